"""A state taken apart and put together again: every value comes back with its own type, and what
cannot is refused.
"""

import argparse
import collections
import dataclasses
import datetime
import enum
import io
import pathlib
import pickle
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import campaigns
import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings

# NumPy's own example of a dtype of somebody else's
from numpy._core._rational_tests import rational
from states import TENSORS, bits, difference, noise
from torch import nn
from trainers import save

import sidesave
from sidesave.client.loading import tensors
from sidesave.client.reading.stored import FlatMap
from sidesave.errors import IntegrityError, InvalidArgumentError, UnsupportedValueError
from sidesave.stager.dtypes import PACKED, QUANTIZED
from sidesave.stager.state import tree
from sidesave.stager.state.tags import Tag
from sidesave.stager.state.tensor_nodes import TensorRef, quantized_bytes, quantized_parts
from sidesave.stager.state.treespec import TreeSpec, Unbuilt

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # torch: complex32, sparse CSR and quantization are "beta"


def round_trip(value: Any, *, allow_pickle: bool = False) -> Any:
    """Through the treespec and back; tensors by way of their bytes, as a file would hold them."""
    flat = tree.flatten({"x": value}, allow_pickle=allow_pickle)
    stored = {
        fqn: tensor for tensors in flat.containers.values() for fqn, tensor in tensors.items()
    }

    def tensor(ref: TensorRef) -> torch.Tensor:
        source = stored[ref.fqn]
        copy = torch.empty(source.shape, dtype=source.dtype)
        return tensors.finished(copy.copy_(source.detach()), ref, None, None)

    return TreeSpec(flat.objects, "objects").build(
        tensor, unpickle=pickle.loads if allow_pickle else None
    )["x"]


def assert_comes_back(value: Any) -> None:
    assert difference(value, round_trip(value)) == ""


# Plain data ---------------------------------------------------------------------------------------

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too: file names are such
FIXED_ZONES = st.integers(-86399, 86399).map(
    lambda offset_s: datetime.timezone(datetime.timedelta(seconds=offset_s))
)
ZONES = st.none() | FIXED_ZONES | st.timezones()
HASHABLE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(1 << 200), max_value=1 << 200)
    | st.floats()
    | st.complex_numbers()
    | ANY_TEXT
    | st.binary()
    | st.builds(
        lambda at, fold: at.replace(fold=fold), st.datetimes(timezones=ZONES), st.integers(0, 1)
    )
    | st.builds(
        lambda at, fold: at.replace(fold=fold), st.times(timezones=ZONES), st.integers(0, 1)
    )
    | st.dates()
    | st.timedeltas()
    | ANY_TEXT.map(pathlib.Path)
    | ANY_TEXT.map(pathlib.PurePosixPath)
    | st.lists(st.integers(0, (1 << 63) - 1), max_size=4).map(torch.Size)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.complex128, torch.quint8, torch.bool])
    | st.sampled_from(["cpu", "meta", "cuda:3", "cuda", "mps"]).map(torch.device)
)
LEAVES = (
    HASHABLE
    | st.binary().map(bytearray)
    | st.builds(lambda content, at: _stream(content, at), st.binary(), st.integers(0, 40))
    | st.sets(HASHABLE, max_size=3)
    | st.frozensets(HASHABLE, max_size=3)
)
KEYS = HASHABLE | st.tuples(HASHABLE, HASHABLE) | st.frozensets(HASHABLE, max_size=2)
FACTORIES: list[Any] = [None, list, dict, set, int, float]


def _stream(content: bytes, position: int) -> io.BytesIO:
    stream = io.BytesIO(content)
    stream.seek(position)
    return stream


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    pairs = st.lists(st.tuples(KEYS, inner), max_size=3)
    return (
        items
        | items.map(tuple)
        | st.builds(
            lambda found, maxlen: collections.deque(found, maxlen),
            items,
            st.none() | st.integers(0, 5),
        )
        | st.dictionaries(ANY_TEXT, inner, max_size=3)
        | pairs.map(dict)
        | pairs.map(collections.OrderedDict)
        | st.builds(
            lambda f, body: collections.defaultdict(f, body),
            st.sampled_from(FACTORIES),
            pairs.map(dict),
        )
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(collections.Counter)
    )


@given(st.recursive(LEAVES, _containers, max_leaves=12))
@settings(max_examples=campaigns.examples(400))
def test_plain_data_comes_back_with_type_and_value(value: Any):
    assert_comes_back(value)


def test_the_ends_of_the_64_bit_range_and_what_lies_beyond_come_back():
    edges = [
        sign * (1 << bit) + off
        for bit in (31, 32, 63, 64, 65, 5000)
        for sign in (1, -1)
        for off in (-1, 0, 1)
    ]
    assert_comes_back(edges)
    assert_comes_back(dict.fromkeys(edges, "key"))


@pytest.mark.parametrize(
    "value",
    [np.bytes_(b"ab\0"), np.bytes_(b"\0\0"), np.str_("ab\0\0"), np.str_("\0"), np.str_("\ud800")],
)
def test_text_scalars_of_numpy_keep_the_zeros_at_their_end(value: Any):
    again = round_trip(value)
    assert type(again) is type(value)
    assert again == value
    assert len(again) == len(value)


def test_enums_come_back_by_value():
    class Color(enum.Enum):
        RED = "red"

    class Level(enum.IntEnum):
        LOW = 7

    class Mode(enum.StrEnum):
        FAST = "fast"

    assert round_trip([Color.RED, Level.LOW, Mode.FAST]) == ["red", 7, "fast"]
    assert [type(value) for value in round_trip([Color.RED, Level.LOW, Mode.FAST])] == [
        str,
        int,
        str,
    ]


def test_a_hundred_levels_of_nesting_come_back_and_more_are_refused():
    value: Any = 1.5
    for level in range(tree.MAX_DEPTH):
        value = [value] if level % 2 else {"deeper": value}
    assert_comes_back(value)
    with pytest.raises(UnsupportedValueError, match=r"^x\..*nested deeper than 100 levels"):
        round_trip([[value]])


# NumPy --------------------------------------------------------------------------------------------


def _read_only() -> np.ndarray:
    array = np.arange(6)
    array.flags.writeable = False
    return array


RECORDS = np.dtype([("id", "<i4"), ("position", "<f8", (2,))])
ARRAYS: dict[str, Any] = {
    **{f"array of {code}": np.arange(5).astype(code) for code in "?bhiqBHIQefdFD"},
    "long double": np.arange(3, dtype=np.longdouble) / 3,
    "0-dim": np.array(2.5),
    "empty": np.zeros((0, 3), np.float32),
    "read-only": _read_only(),
    "broadcast, hence read-only": np.broadcast_to(np.float32(3), (4, 2)),
    "negative strides": np.arange(12).reshape(3, 4)[::-1, ::-2],
    "transposed": np.arange(12).reshape(3, 4).T,
    "big-endian": np.array([1, -2, 3], dtype=">i4"),
    "big-endian floats": np.array([1.5, np.nan], dtype=">f8"),
    "structured": np.array([(1, (2.0, 3.0)), (4, (5.0, 6.0))], dtype=RECORDS),
    "structured, 0-dim": np.array((1, (2.0, 3.0)), dtype=RECORDS),
    "datetime64": np.array(["2026-01-02T03:04:05.678", "NaT"], dtype="M8[ms]"),
    "timedelta64": np.array([5, -7], dtype="m8[ns]"),
    "unicode": np.array(["", "häß", "\U0001f600"]),
    "bytes": np.array([b"", b"a\0b"]),
    "no characters at all": np.array(["", ""], dtype="U0"),
}
SCALARS: dict[str, Any] = {
    **{f"scalar {code}": np.dtype(code).type(1) for code in "?bhilBHILefdgFDG"},
    "nan": np.float32("nan"),
    "negative zero": np.float64(-0.0),
    "empty str_": np.str_(""),
    "str_": np.str_("häß"),
    "empty bytes_": np.bytes_(b""),
    "record": np.array([(7, (8.0, 9.0))], dtype=RECORDS)[0],
    "datetime64 scalar": np.datetime64("2026-01-02T03:04:05.678901234", "ns"),
    "NaT": np.datetime64("NaT"),
    "timedelta64 scalar": np.timedelta64(-3, "D"),
}


@pytest.mark.parametrize("name", [*ARRAYS, *SCALARS])
def test_a_numpy_value_comes_back_with_dtype_and_bits(name: str):
    assert_comes_back({**ARRAYS, **SCALARS}[name])


def test_a_numpy_array_that_is_saved_can_be_written_to_afterwards(tmp_path: Path):
    memory = np.memmap(tmp_path / "map", dtype=np.int16, mode="w+", shape=(3, 2))
    memory[:] = 7
    came_back = round_trip([memory, _read_only()])
    assert type(came_back[0]) is np.ndarray
    for array in came_back:
        array += 1
    assert came_back[0].tolist() == [[8, 8]] * 3


# Tensors ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every kind of value above, saved by a daemon and loaded from disk."""
    run = tmp_path_factory.mktemp("run")
    state = {
        "bare": TENSORS["transposed"],
        "tensors": TENSORS,
        "arrays": ARRAYS,
        "scalars": SCALARS,
    }
    save(run, state)
    assert sidesave.verify(run / "step-00000001").ok
    return sidesave.load(run / "step-00000001")


@pytest.mark.drawn
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_from_disk_bit_for_bit(saved: dict[str, Any], name: str):
    assert difference(TENSORS[name], saved["tensors"][name]) == ""
    assert not saved["tensors"][name].requires_grad


EVERY_DTYPE = sorted(
    {each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str
)


def packed_numbers(dtype: torch.dtype) -> torch.Tensor:
    scales, zero_points = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.0, 1.0, 2.0])
    return torch.quantize_per_channel(torch.arange(12.0).view(3, 4), scales, zero_points, 0, dtype)


def of_dtype(dtype: torch.dtype) -> torch.Tensor:
    if dtype in PACKED:
        return packed_numbers(dtype)
    if dtype in QUANTIZED:
        return torch.quantize_per_tensor(torch.arange(12.0).view(3, 4), 0.1, 1, dtype)
    return noise(dtype, 3, 4)


@pytest.fixture(scope="module")
def every_dtype(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    save(run, {str(dtype): of_dtype(dtype) for dtype in EVERY_DTYPE})
    return run


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_every_dtype_of_torch_comes_back_bit_for_bit(every_dtype: Path, dtype: torch.dtype):
    expected, fresh = of_dtype(dtype), sidesave.load(every_dtype, include=f"{dtype}")[f"{dtype}"]
    assert fresh.dtype is dtype
    assert raw(fresh) == raw(expected)
    other = torch.empty(3, 4, dtype=dtype)
    if dtype in QUANTIZED:
        other = of_dtype(dtype)
        quantized_bytes(other).fill_(0)
    sidesave.load(every_dtype, into={f"{dtype}": other})
    assert raw(other) == raw(expected)


def raw(tensor: torch.Tensor) -> list[Any]:
    if tensor.dtype not in QUANTIZED:
        return [bits(tensor)]
    parameters, parts = quantized_parts(tensor, "")
    return [tensor.shape, parameters, *map(bits, parts.values())]


@pytest.mark.parametrize("of_channels", [False, True])
def test_quantized_tensors_of_a_module_come_back_with_their_scales(
    of_channels: bool, tmp_path: Path
):
    def module(scale: float) -> nn.Module:
        values, model = torch.arange(12.0).view(3, 4), nn.Module()
        scales = torch.tensor([scale, 2 * scale, 3 * scale])
        made = torch.quantize_per_channel(values, scales, torch.tensor([0, 1, 2]), 0, torch.qint8)
        model.register_buffer(
            "w", made if of_channels else torch.quantize_per_tensor(values, scale, 3, torch.quint8)
        )
        return model

    with sidesave.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": module(0.5)}, blocking=True)
        live = module(0.25)
        checkpointer.load(into={"model": live})
    assert raw(live.get_buffer("w")) == raw(module(0.5).get_buffer("w"))
    assert raw(sidesave.load(tmp_path)["model"]["w"]) == raw(module(0.5).get_buffer("w"))


def test_a_bare_tensor_and_numpy_values_come_back_from_disk(saved: dict[str, Any]):
    assert difference(TENSORS["transposed"], saved["bare"]) == ""
    assert difference(ARRAYS, saved["arrays"]) == ""
    assert difference(SCALARS, saved["scalars"]) == ""


def test_tied_weights_are_stored_once_and_come_back_tied():
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    state = {
        "model": nn.ModuleDict({"in": embedding, "out": head}),
        "again": [embedding.weight],
        "raw": head.weight,
    }
    flat = tree.flatten(state)
    assert {name: list(tensors) for name, tensors in flat.containers.items()} == {
        "model": ["model.in.weight"]
    }
    came_back = round_trip(state)
    tied = [
        came_back["model"]["in.weight"],
        came_back["model"]["out.weight"],
        came_back["again"][0],
        came_back["raw"],
    ]
    # `round_trip` makes one for each reference
    assert len({tensor.data_ptr() for tensor in tied} | {0}) == 5
    assert all(difference(embedding.weight, tensor) == "" for tensor in tied)


def test_different_views_of_one_memory_are_stored_each():
    base = torch.arange(8.0)
    views = {
        "all": base,
        "prefix": base[:4],
        "rows": base.view(2, 4),
        "as integers": base.view(torch.int32),
        "every other": base[::2],
        "negated": torch._neg_view(base),
    }
    assert list(tree.flatten({"views": views}).containers["views"]) == [
        f"views.{name}" for name in views
    ]
    assert_comes_back(views)


# Refusals -----------------------------------------------------------------------------------------


class Opaque:
    """Says nothing of its state."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


def _list_cycle() -> list[Any]:
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    return cycle


class _Zone(datetime.tzinfo):
    pass


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


class Pair(NamedTuple):
    a: int
    b: int


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


class Endless:
    def state_dict(self) -> dict[str, Any]:
        return {"more": Endless()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Noted(torch.Tensor):
    pass


def _noted(name: str) -> Noted:
    tensor = torch.ones(1).as_subclass(Noted)
    setattr(tensor, name, 1)
    return tensor


class Dispatching(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.empty(2, device="meta"), "x.y: a meta tensor has no values"),
    "meta module": (
        lambda: nn.Linear(2, 2, device="meta"),
        r"2 values.*\n  x.y.weight: a meta tensor has no v",
    ),
    "quantized without scales": (
        lambda: torch.empty(2, dtype=torch.qint8),
        "x.y: a tensor of torch.qint8 without s",
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "x.y: a nested tensor",
    ),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), "x.y: tensors of layout torch._mkldnn"),
    "sparse meta": (
        lambda: torch.ones(2, 2).to_sparse().to("meta"),
        "x.y: tensors of layout torch.sparse_coo on meta",
    ),
    "lazy parameter": (lambda: nn.LazyLinear(2), r"2 values.*\n  x.y.weight: a lazy parameter"),
    "tensor subclass with attributes": (
        lambda: _noted("noted"),
        r"x.y: a .*Noted is not .* would be lost \(noted\)",
    ),
    "tensor subclass with a dispatch": (
        lambda: torch.ones(1).as_subclass(Dispatching),
        "x.y: a .*Dispatching is not",
    ),
    "object": (lambda: Opaque(1), r"x.y: a .*Opaque cannot be saved; .*allow_pickle"),
    "class with state_dict": (lambda: nn.Linear, "x.y: a builtins.type cannot be saved"),
    "function": (lambda: print, "x.y: a builtins.builtin_function"),
    "object array": (lambda: np.array([object()]), "x.y: a numpy.ndarray"),
    "masked array": (lambda: np.ma.array([1], mask=[True]), "x.y: a numpy.ma.*MaskedArray"),
    "record scalar": (lambda: np.rec.array([(1,)], dtype=[("a", "i4")])[0], "x.y: a numpy.*record"),
    "named tuple": (lambda: Pair(1, 2), r"x.y: a .*Pair cannot be saved; save x\._asdict\(\)$"),
    "dict subclass": (
        lambda: type("Bag", (dict,), {})(a=1),
        r"x.y: a .*Bag cannot be saved; save dict\(x\)$",
    ),
    "dataclass": (
        lambda: Settings(),
        r"x.y: a .*Settings cannot be saved; save dataclasses\.asdict\(x\)$",
    ),
    "namespace": (
        lambda: argparse.Namespace(lr=1),
        r"x.y: a argparse.Namespace cannot be saved; save vars\(x\)",
    ),
    "generator of torch": (
        torch.Generator,
        r"x.y: a .*Generator cannot be saved; save x\.get_state\(\), ",
    ),
    "generator of Python": (
        random.Random,
        r"x.y: a random.Random cannot be saved; save x\.getstate\(\), ",
    ),
    "generator of NumPy": (
        np.random.default_rng,
        r"x.y: a numpy.*Generator cannot be saved; save x\.bit_generator",
    ),
    "data loader": (
        lambda: torch.utils.data.DataLoader([1]),  # pyright: ignore[reportArgumentType]
        r"x.y: a .*DataLoader cannot be saved; .*torchdata's StatefulDataLoader((?!pickle).)*$",
    ),
    "iterator": (
        lambda: iter([1]),
        "x.y: a builtins.list_iterator cannot be saved; its position cannot be read",
    ),
    "defaultdict": (lambda: collections.defaultdict(lambda: 3), "x.y: a defaultdict with factory"),
    "time zone": (
        lambda: datetime.datetime(2026, 1, 1, tzinfo=_Zone()),
        "x.y: a time zone of type _Zone",
    ),
    "list cycle": (_list_cycle, r"x.y: it contains itself, as x.y.0.again$"),
    "endless state": (
        Endless,
        r"x.y.more.{60,80}\.\.\..{60,80}more: nested deeper than 100 levels$",
    ),
    "tensor as a key": (lambda: {torch.ones(1): 2}, "x.y: a tensor cannot be a key"),
    "tensor within a key": (lambda: {(torch.ones(1), 1): 2}, "x.y: a tuple cannot be a key"),
    "tensor in a set": (lambda: {torch.ones(1)}, "x.y: a tensor cannot be a key, nor in a set"),
    "tensor in a frozen set": (
        lambda: frozenset({torch.ones(1)}),
        "x.y: a tensor cannot be a key, nor in a set",
    ),
    "module as a key": (lambda: {nn.Linear(1, 1): 2}, "x.y: a Linear cannot be a key"),
    "module in a set": (lambda: {nn.ReLU()}, "x.y: a ReLU cannot be a key, nor in a set"),
    "enum of a list as a key": (
        lambda: {enum.Enum("Odd", {"A": [1]})["A"]: 2},
        "x.y: a Odd cannot be a key",
    ),
    "enum and its value as keys": (
        lambda: {Phase.WARM: "a", 1: "b"},
        "x.y: <Phase.WARM: 1> and 1 would come back as",
    ),
    "enum beside what equals its value": (
        lambda: {Phase.WARM: "a", True: "b"},
        "x.y: <Phase.WARM: 1> and True would",
    ),
    "enum within a key": (
        lambda: {(Phase.WARM, 0): "a", (1, 0): "b"},
        r"x.y: \(<Phase.WARM: 1>, 0\) and \(1, 0\)",
    ),
    "enum and its value in a set": (lambda: {Phase.WARM, 1}, "x.y: .* would come back as one"),
    "zeros without memory": (
        lambda: torch._efficientzerotensor(3),
        "x.y: a tensor of zeros without memory",
    ),
    "array of a dtype without a name": (
        lambda: np.zeros(2, rational),
        "x.y: NumPy cannot save the dtype rational",
    ),
    "scalar of a dtype without a name": (
        lambda: np.zeros(2, rational)[0],
        "x.y: NumPy cannot save the dtype rational",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_is_refused_by_name(name: str):
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedValueError, match="^" + message):
        tree.flatten({"x": {"y": make()}})


def test_all_that_cannot_be_saved_is_told_at_once_and_briefly():
    odd = [Opaque(number) for number in range(40)]
    with pytest.raises(UnsupportedValueError) as caught:
        tree.flatten(
            {"a": iter([]), "b": _list_cycle(), "c": odd, "d": {"e": torch.ones(1), "f": print}}
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "43 values of the state cannot be saved:"
    assert [line.strip().partition(":")[0] for line in lines[1:4]] == ["a", "b.0", "c.0"]
    assert (len(lines), lines[-1]) == (22, "  ... and 23 more")
    assert all(len(line) < 250 for line in lines)


def test_a_cycle_with_many_ways_is_told_once():
    round_about: dict[str, Any] = {}
    round_about |= {"left": round_about, "right": round_about}
    with pytest.raises(UnsupportedValueError, match=r"^x: it contains itself, as x\.left$"):
        tree.flatten({"x": round_about})


def test_before_training_only_what_will_never_be_saved_is_refused():
    class NotReady:
        def state_dict(self) -> dict[str, Any]:
            raise AttributeError("not yet")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    tree.check(
        {"lazy": nn.LazyLinear(2), "meta": nn.Linear(2, 2, device="meta"), "later": NotReady()}
    )
    with pytest.raises(UnsupportedValueError, match=r"^odd: a .*Opaque cannot be saved"):
        tree.check({"lazy": nn.LazyLinear(2), "later": NotReady(), "odd": Opaque(1)})


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b.c": torch.ones(1), "b": {"c": torch.zeros(1)}}},
        {"a": {"b": {"c": torch.ones(1)}}, "a.b": {"c": torch.zeros(1)}},
        {"a.b.c": torch.ones(1), "a": {"b": {"c": torch.zeros(1)}}},
    ],
)
def test_two_tensors_of_one_name_are_refused(state: dict[str, Any]):
    with pytest.raises(UnsupportedValueError, match=r"^a\.b\.c: two tensors"):
        tree.flatten(state)


def test_keys_that_only_differ_in_type_hold_plain_data_but_not_two_tensors():
    assert_comes_back({1: "number", "1": "text"})
    with pytest.raises(UnsupportedValueError, match=r"^a\.1: two tensors"):
        tree.flatten({"a": {1: torch.ones(1), "1": torch.zeros(1)}})


def test_the_name_that_safetensors_reserves_is_refused():
    with pytest.raises(UnsupportedValueError, match=r"^__metadata__: .*reserved"):
        tree.flatten({"__metadata__": torch.ones(1)})


@pytest.mark.parametrize("state", [None, [1], {1: 2}, {"": 2}, {None: 1}])
def test_a_state_that_is_no_dict_of_names_is_refused(state: Any):
    with pytest.raises(InvalidArgumentError):
        tree.flatten(state)


def test_top_level_names_of_any_kind_come_back_from_disk(tmp_path: Path):
    names = [
        "tensors",
        "objects",
        "rank",
        "manifest",
        "%74ensors",
        "a/b",
        "..",
        "a b",
        "Grüße",
        "x" * 400,
        "x" * 401,
    ]
    state = {name: [torch.tensor(float(n))] for n, name in enumerate(names)}
    state |= {f"plain {name}": name for name in names} | {
        "\udc80": "a surrogate",
        "bare": torch.ones(2),
    }
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        info = checkpointer.save(1, state, blocking=True).committed.result()
    assert difference(state, sidesave.load(info)) == ""
    assert sidesave.verify(info).ok


def test_a_tensor_name_that_is_no_unicode_is_refused(tmp_path: Path):
    with (
        sidesave.Checkpointer(tmp_path) as checkpointer,
        pytest.raises(UnsupportedValueError, match="not valid Unicode"),
    ):
        checkpointer.save(1, {"x": {"\udc80": torch.ones(1)}})


# Pickle -------------------------------------------------------------------------------------------


def test_a_pickled_value_needs_the_word_on_both_sides(tmp_path: Path):
    state = {"odd": {"one": Opaque(3), "plain": 4}}
    with sidesave.Checkpointer(tmp_path, allow_pickle=True) as checkpointer:
        info = checkpointer.save(1, state, blocking=True).committed.result()
        assert checkpointer.load() == state
    assert b'"pickle":true' in (Path(info) / "manifest.json").read_bytes()
    with pytest.raises(
        UnsupportedValueError, match=r"odd\.one was pickled; pass allow_pickle=True"
    ):
        sidesave.load(info)
    assert sidesave.load(info, allow_pickle=True) == state
    assert sidesave.load(info, include="odd.plain") == {"odd": {"plain": 4}}


def test_a_pickled_key_comes_back_where_pickle_is_allowed():
    value = {Opaque(5): "a key", (1, Opaque(6)): "in a key"}
    assert round_trip(value, allow_pickle=True) == value


def test_plain_data_does_not_mark_a_checkpoint_as_pickled(tmp_path: Path):
    with sidesave.Checkpointer(tmp_path, allow_pickle=True) as checkpointer:
        info = checkpointer.save(
            1, {"x": [1, {2}, torch.ones(3)]}, blocking=True
        ).committed.result()
    assert b'"pickle":false' in (Path(info) / "manifest.json").read_bytes()


def test_what_even_pickle_cannot_take_is_refused_by_name():
    with pytest.raises(UnsupportedValueError, match=r"^x\.y: a function cannot be pickled"):
        tree.flatten({"x": {"y": lambda: 0}}, allow_pickle=True)


# Hostile treespecs --------------------------------------------------------------------------------


def packed(body: Any) -> bytes:
    return msgpack.packb(body, use_bin_type=True) or b""


def build(data: bytes) -> None:
    """Decode as a loader does, with whatever tensors it asks for; any error but the two typed ones
    is a failure.
    """
    try:
        treespec = TreeSpec(data, "objects")
        treespec.build(lambda ref: ref.fqn)  # one that only wants names
        treespec.build(lambda ref: torch.zeros(2, 2))
    except (IntegrityError, UnsupportedValueError):
        pass


@given(st.binary(max_size=300))
@settings(max_examples=campaigns.examples(300))
def test_random_bytes_are_refused_with_a_typed_error(data: bytes):
    build(data)


SCRAPS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=20)
    | st.sampled_from(
        [
            "float32",
            "complex128",
            "sparse_coo",
            "sparse_csr",
            "UTC",
            "2026-01-01",
            "<f8",
            "O",
            "values",
            "indices",
        ]
    )
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
)
NODES = st.recursive(
    SCRAPS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(st.sampled_from(Tag), st.lists(inner, max_size=5)).map(
            lambda node: [int(node[0]), *node[1]]
        )
        | st.dictionaries(
            st.text(max_size=3) | st.sampled_from(["values", "indices"]), inner, max_size=3
        )
    ),
    max_leaves=15,
)


@given(st.dictionaries(st.text(max_size=3) | st.binary(max_size=3), NODES, min_size=1, max_size=3))
@settings(max_examples=campaigns.examples(600))
def test_random_treespecs_build_or_are_refused_with_a_typed_error(body: dict[str, Any]):
    build(packed(body))


@given(NODES, st.sampled_from([0, 1, 50, 102, 103, 104, 105]))
@settings(max_examples=campaigns.examples(300))
def test_the_leaves_make_the_nest_and_are_as_strict(node: Any, depth: int):
    for _ in range(depth):
        node = [Tag.LIST, node]
    made: list[str] = []
    for apart in ("not", {}, None):
        try:
            treespec = TreeSpec(packed({"x": node}), "objects")
            if apart == "not":
                nest = treespec.build(lambda ref: ref.fqn)
            else:
                every = treespec.leaves(apart=cast("dict[Any, bool] | None", apart))
                leaves = {
                    path: leaf.build(lambda ref: ref.fqn) if isinstance(leaf, Unbuilt) else leaf
                    for path, leaf in every.leaves.items()
                }
                nest = FlatMap(leaves, every.containers).nest()
            made.append(_in_order(nest))
        except (IntegrityError, UnsupportedValueError):
            made.append("refused")
    assert made[0] == made[1] == made[2]


def _in_order(value: Any) -> str:
    """What a value holds, with sets sorted: of one with a NaN, which hashes by its address, the
    order is chance.
    """
    parts: Any = ()
    if isinstance(value, dict):
        parts = (
            f"{_in_order(key)}: {_in_order(item)}"
            for key, item in cast("dict[Any, Any]", value).items()
        )
    elif isinstance(value, (set, frozenset)):
        parts = sorted(map(_in_order, cast("set[Any]", value)))
    elif isinstance(value, (list, tuple, collections.deque)):
        parts = map(_in_order, cast("list[Any]", value))
    elif isinstance(value, io.BytesIO):
        parts = (repr(value.getvalue()), str(value.tell()))
    else:
        return repr(value)
    return f"{type(value).__name__}({', '.join(parts)})"


def _npy_header(shape: str, descr: str = "'<f8'") -> bytes:
    text = (
        f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode()
        + b"\n"
    )
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


MALFORMED: dict[str, Any] = {
    "a number of bytes in place of bytes": [Tag.BYTEARRAY, 1 << 33],
    "a number of bytes in place of a stream": [Tag.BYTES_IO, 1 << 33, 0],
    "position before the start": [Tag.BYTES_IO, b"", -1],
    "array larger than its file": [Tag.NUMPY_FILE, _npy_header(f"({1 << 40},)")],
    "array of objects": [Tag.NUMPY_FILE, _npy_header("(1,)", "'|O'") + pickle.dumps([print])],
    "scalar of objects": [Tag.NUMPY_SCALAR, "O", b"\0" * 8],
    "scalar of nothing": [Tag.NUMPY_SCALAR, "<f8", b""],
    "giant scalar": [Tag.NUMPY_SCALAR, f"V{1 << 40}", b""],
    "extension type": msgpack.ExtType(5, b"data"),
    "bare map": {"a": 1},
    "no tag": [],
    "unknown tag": [99, 1],
    "tag of text": ["DICT", {}],
    "unhashable key": [Tag.ITEMS, [[[Tag.LIST], 1]]],
    "unhashable item": [Tag.SET, [Tag.LIST]],
    "carried dtype that is none": [Tag.TENSOR, "fqn", "float32"],
    "placements of an unknown kind": [Tag.PLACED, True, "S0 X", [Tag.TENSOR, "fqn"]],
    "placements that are a number": [Tag.PLACED, True, 7, [Tag.TENSOR, "fqn"]],
    "placements as a parameter of no kind": [Tag.PLACED, 1, "S0", [Tag.TENSOR, "fqn"]],
    "placements of a list": [Tag.PLACED, True, "S0", [Tag.LIST, "fqn"]],
    "dtype that is a function": [Tag.DTYPE, "compile"],
    "layout that is a function": [Tag.SPARSE, "compile", [2], True, {}],
    "sparse without parts": [Tag.SPARSE, "sparse_coo", [2], True, {}],
    "default factory that runs": [Tag.DEFAULT_DICT, "print", []],
    "zone outside the database": [Tag.DATETIME, "2026-01-01T00:00:00", 0, "../../../../etc/passwd"],
    "memory format that is a function": [Tag.TENSOR, "fqn", "", "compile"],
    "memory order that is none": [Tag.TENSOR, "fqn", "", [0, 2]],
    "memory order of flags": [Tag.TENSOR, "fqn", "", [True, False]],
    "class that is a number": [Tag.SUBCLASS, "a:b", 5, [2], [1], None, {"a": [Tag.TENSOR, "fqn"]}],
    "class without tensors": [Tag.SUBCLASS, "a:b", "float32", [2], [1], None, {}],
    "offsets behind the end": [
        Tag.NESTED,
        1,
        {"values": [Tag.TENSOR, "a"], "offsets": [Tag.TENSOR, "b"]},
    ],
    "nested without offsets": [Tag.NESTED, 1, {"values": [Tag.TENSOR, "a"]}],
    "quantized values of another shape": [
        Tag.QUANTIZED,
        "quint8",
        [3],
        [0.1, 0],
        {"values": [Tag.TENSOR, "a"]},
    ],
    "quantized dtype that is another": [
        Tag.QUANTIZED,
        "float32",
        [2],
        [0.1, 0],
        {"values": [Tag.TENSOR, "a"]},
    ],
    "scales that are not there": [Tag.QUANTIZED, "qint8", [2], [0], {"values": [Tag.TENSOR, "a"]}],
    "endless length": [Tag.DEQUE, 1 << 63, 1],
    "ordered by what is no pair": [Tag.ORDERED_DICT, [[1, [Tag.TENSOR, "a"], 2]]],
    "timedelta out of range": [Tag.TIMEDELTA, 1 << 62, 0, 0],
}


def in_one(treespec: TreeSpec) -> None:
    """Build the nest, as a load without a target does."""
    treespec.build(lambda ref: torch.zeros(2))


def leaf_by_leaf(treespec: TreeSpec) -> None:
    """Build one leaf after the other, as a load into a target does."""
    for leaf in treespec.leaves().leaves.values():
        if isinstance(leaf, Unbuilt):
            leaf.build(lambda ref: torch.zeros(2))


@pytest.mark.parametrize("build", [in_one, leaf_by_leaf])
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_node_is_an_integrity_error_that_names_it(
    name: str, build: Callable[[TreeSpec], None]
):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    treespec = TreeSpec(packed({"x": [Tag.LIST, MALFORMED[name]]}), "the/objects")
    with pytest.raises(IntegrityError, match=r"^the/objects: x\.0 is"):
        build(treespec)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB, a gigabyte"


@pytest.mark.parametrize("depth", [200, 5000, 200_000])
def test_a_treespec_nested_without_end_is_refused(depth: int):
    node = b"\x92" + bytes([Tag.LIST])  # an array of two: the tag, then the next level
    with pytest.raises(IntegrityError, match=r"nested too deep|not a treespec"):
        TreeSpec(b"\x81\xa1x" + node * depth + b"\xc0", "objects").build(lambda ref: None)


@pytest.mark.parametrize(
    "data", [b"", b"\xc0", b"\x93\x01\x02\x03", b"\x81\xc4\x01a\x01", b"\x81\x01\x02", b"\x80\x80"]
)
def test_a_treespec_that_is_no_map_of_names_is_refused(data: bytes):
    with pytest.raises(IntegrityError, match=r"^objects: "):
        TreeSpec(data, "objects")


def test_a_pickled_node_runs_nothing_unless_allowed(tmp_path: Path):
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    data = packed({"x": [Tag.SET, [Tag.PICKLE, pickle.dumps(Bomb())]]})
    with pytest.raises(UnsupportedValueError, match=r"^objects: x was pickled"):
        TreeSpec(data, "objects").build(lambda ref: None)
    assert not (tmp_path / "ran").exists()
