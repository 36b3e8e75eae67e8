"""Tensors of other classes come back bit for bit in one of the same class; else it is refused, or
the log tells.
"""

import dataclasses
import enum
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from commands import output
from states import bits
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from trainers import save

import sidesave
from sidesave.errors import StateMismatchError, UnsupportedValueError
from sidesave.stager.state import tree

aten = torch.ops.aten


class Rounding(enum.Enum):
    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


class Block(NamedTuple):
    rows: int
    columns: int


@dataclasses.dataclass(frozen=True)
class Scheme:
    block: Block
    rounding: Rounding
    dtype: torch.dtype


SCHEME = Scheme(Block(1, 4), Rounding.NEAREST, torch.int8)


class Scaled(torch.Tensor):
    """Codes and their scale in the place of a tensor of float32; it can only be detached."""

    @staticmethod
    def __new__(cls, codes: Any, scale: Any, scheme: Any = SCHEME) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Any, scale: Any, scheme: Any = SCHEME) -> None:
        self.codes, self.scale, self.scheme = codes, scale, scheme

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"scheme": self.scheme}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scale"], context["scheme"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.copy_.default and args[0] is args[1]:
            return args[0]
        if func in (aten.detach.default, aten.view.default):
            return cls(args[0].codes, args[0].scale, args[0].scheme)
        if func is aten._to_copy.default:  # an optimizer does that with what it is given
            return cls(args[0].codes, args[0].scale, args[0].scheme)
        raise NotImplementedError(func)


class Bare(Scaled):
    """Another class of the same tensors."""


class Tagged(torch.Tensor):
    pass


def scaled(value: float, scheme: Any = SCHEME, kind: type[Scaled] = Scaled) -> Any:
    return kind(torch.full((2, 4), int(value), dtype=torch.int8), torch.tensor([value / 3]), scheme)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if not isinstance(one, Scaled):
        return bits(one.as_subclass(torch.Tensor)) == bits(other.as_subclass(torch.Tensor))
    return (
        one.scheme == other.scheme and same(one.codes, other.codes) and same(one.scale, other.scale)
    )


@pytest.fixture
def allowed() -> Iterator[None]:
    """Lists the classes of this module among torch's safe globals."""
    with torch.serialization.safe_globals([Scaled, Bare, Tagged, Scheme, Block, Rounding]):
        yield


def module(value: float, **about: Any) -> nn.Module:
    made = nn.Module()
    made.weight = nn.Parameter(scaled(value, **about), requires_grad=False)
    made.again = made.weight
    return made


# Made of inner tensors ----------------------------------------------------------------------------


def test_inner_tensors_are_written_in_place_without_importing_a_class(tmp_path: Path):
    path = save(tmp_path, {"model": module(5), "bare": scaled(6)})
    live, bare = cast("Any", module(0)), scaled(0)
    before = [live.weight, live.weight.codes, live.weight.scale]
    sidesave.load(path, into={"model": live, "bare": bare})
    assert same(live.weight.data, scaled(5)) and same(bare, scaled(6))
    assert [live.weight, live.weight.codes, live.weight.scale] == [*map(_Same, before)]
    assert live.again is live.weight


class _Same:
    """Equals the very same object alone."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return other is self.value


@pytest.mark.usefixtures("allowed")
def test_a_fresh_load_makes_tensors_of_a_class_that_torch_lists_as_safe(tmp_path: Path):
    nested = Scaled(torch.zeros(2, 4, dtype=torch.int8), scaled(3), SCHEME)
    state = {"model": module(5), "list": [scaled(6), nested]}
    fresh = sidesave.load(save(tmp_path, state))
    assert same(fresh["model"]["weight"], scaled(5))
    assert fresh["model"]["again"].codes.data_ptr() == fresh["model"]["weight"].codes.data_ptr()
    assert same(fresh["list"][0], scaled(6)) and same(fresh["list"][1], nested)


def test_a_fresh_load_refuses_a_class_that_nobody_has_declared_safe(tmp_path: Path):
    path = save(tmp_path, {"x": {"y": scaled(5)}, "z": 3})
    with pytest.raises(
        UnsupportedValueError, match=r"x\.y: it is a .*\.Scaled.*add_safe_globals.*exclude="
    ):
        sidesave.load(path)
    assert sidesave.load(path, exclude="x") == {"z": 3}
    with (
        torch.serialization.safe_globals([Scaled, Scheme, Block]),
        pytest.raises(UnsupportedValueError, match=r"x\.y: its context has a .*\.Rounding"),
    ):
        sidesave.load(path)


class Newer(Scaled):
    """Needs something that an older version has not saved."""

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["zero_point"])


def test_a_class_that_cannot_be_made_of_what_was_saved_is_named(tmp_path: Path):
    path = save(tmp_path, {"x": scaled(5, kind=Newer, scheme=1), "y": torch.ones(2)})
    live = torch.zeros(2)
    with (
        torch.serialization.safe_globals([Newer]),
        pytest.raises(
            UnsupportedValueError, match=r"x: the saved parts do not make a .*\.Newer of"
        ),
    ):
        sidesave.load(path)
    with pytest.raises(UnsupportedValueError, match="zero_point"):
        sidesave.load(path, into={"y": live, "x": scaled(0, kind=Newer, scheme=1)})
    assert not live.any()


def test_no_module_that_a_checkpoint_names_is_imported(tmp_path: Path):
    (tmp_path / "their_tensors.py").write_text(
        "from test_subclasses import Scaled\nclass Theirs(Scaled): pass\nprint('imported')\n"
    )
    code = """if True:
        import sys, sidesave
        try:
            sidesave.load(sys.argv[1])
        except sidesave.errors.UnsupportedValueError as error:
            print(str(error).count("their_tensors.Theirs"))
    """
    sys.path.insert(0, str(tmp_path))
    try:
        import their_tensors  # pyright: ignore[reportMissingImports]

        path = save(tmp_path / "run", {"x": scaled(5, kind=their_tensors.Theirs)})
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["their_tensors"]
    found = subprocess.run(
        [sys.executable, "-c", code, path], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["1"]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: torch.zeros(2, 4), r"holds a .*\.Scaled tensor, the target is a plain tensor"),
        (
            lambda: scaled(0, kind=Bare),
            r"holds a .*\.Scaled tensor, the target is a .*\.Bare tensor",
        ),
        (
            lambda: scaled(0, Scheme(Block(1, 4), Rounding.STOCHASTIC, torch.int8)),
            "contexts or strides differ",
        ),
        (lambda: Scaled(torch.zeros(2, 3, dtype=torch.int8), torch.zeros(1)), "codes is"),
        (
            lambda: Scaled(torch.zeros(2, 4, dtype=torch.int8), torch.zeros(2)),
            r"scale is .*\[1\].*, .*\[2\]",
        ),
        (
            lambda: Scaled(torch.zeros(2, 4, dtype=torch.int16), torch.zeros(1)),
            r"codes is torch\.int8.*, torch\.int16",
        ),
        (lambda: Scaled(scaled(0), torch.zeros(1)), "inner tensors"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_touched(make: Any, told: str, tmp_path: Path):
    path = save(tmp_path, {"x": scaled(5), "y": torch.ones(2)})
    live, other = make(), torch.zeros(2)
    with pytest.raises(StateMismatchError, match=rf"\n  x: .*{told}"):
        sidesave.load(path, into={"x": live, "y": other})
    assert same(live, make()) and not other.any()


def test_plain_values_do_not_go_into_a_tensor_of_inner_tensors(tmp_path: Path):
    path = save(tmp_path, {"x": torch.ones(2, 4)})
    with pytest.raises(
        StateMismatchError, match=r"x: .*holds a plain tensor, the target is a .*\.Scaled tensor"
    ):
        sidesave.load(path, into={"x": scaled(0)})


def test_a_context_that_is_no_data_is_refused_by_name_unless_pickle_is_allowed(tmp_path: Path):
    odd = scaled(5, scheme=complex)
    with pytest.raises(
        UnsupportedValueError, match=r"x\.y\.<context>\.scheme: a builtins\.type cannot be saved"
    ):
        save(tmp_path / "refused", {"x": {"y": odd}})
    with pytest.raises(UnsupportedValueError, match=r"x: tensors in the context"):
        tree.flatten({"x": scaled(5, scheme=torch.ones(1))})
    path = save(tmp_path / "pickled", {"x": odd}, allow_pickle=True)
    with (
        torch.serialization.safe_globals([Scaled]),
        pytest.raises(UnsupportedValueError, match=r"allow_pickle=True if you trust"),
    ):
        sidesave.load(path)
    with torch.serialization.safe_globals([Scaled]):
        assert same(sidesave.load(path, allow_pickle=True)["x"], odd)


class Quantizing(torch.optim.SGD):
    """Keeps a momentum of inner tensors."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                self.state[parameter]["momentum"] = scaled(number + 1)


@pytest.mark.parametrize("has_state", [False, True])
def test_states_of_an_optimizer_come_back_into_a_new_one_and_into_one_that_has_some(
    has_state: bool, tmp_path: Path, request: pytest.FixtureRequest
):
    def optimizer(model: nn.Module) -> Any:
        return Quantizing(model.parameters(), lr=0.1)

    model = nn.Linear(4, 2)
    saved = optimizer(model)
    saved.step()
    path = save(tmp_path, {"model": model, "optimizer": saved})
    live = optimizer(other := nn.Linear(4, 2))
    if has_state:  # then its class is known
        live.step()
        for state in live.state.values():
            state["momentum"].codes.zero_()
    else:
        request.getfixturevalue("allowed")
    sidesave.load(path, into={"model": other, "optimizer": live})
    for parameter, value in zip(other.parameters(), (1, 2), strict=True):
        assert same(live.state[parameter]["momentum"], scaled(value))


def test_ranks_that_share_a_sharded_tensor_of_inner_tensors_are_told_what_to_do():
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        shard = DTensor.from_local(
            scaled(5), mesh, [Shard(0)], run_check=False, shape=torch.Size([4, 4]), stride=(4, 1)
        )
        with pytest.raises(
            UnsupportedValueError,
            match=r"^x: each rank's part of it is a Scaled.* sidesave\.PerRank",
        ):
            tree.flatten({"x": shard}, ranks=(0, 1))
        flat = tree.flatten({"x": sidesave.PerRank(shard)}, ranks=(0, 1))
        assert flat.containers["x"].keys() == {"x.codes", "x.scale"}
    finally:
        dist.destroy_process_group()


def test_every_tool_knows_such_a_checkpoint(tmp_path: Path):
    model, tag = {"weight": scaled(5), "head": torch.ones(2)}, torch.ones(1).as_subclass(Tagged)
    state = {"model": model, "rows": jagged(4, 3, 2), "tag": tag}
    first = save(tmp_path / "first", state)
    second = save(tmp_path / "second", state | {"model": model | {"weight": scaled(6, scheme=1)}})
    assert sidesave.verify(first).ok
    assert "model.weight.codes" in output("show", first)
    assert "model.weight.codes" not in output("diff", first, first)
    differences = output("diff", first, second)
    assert "model.weight.codes" in differences and "plain values: 1 changed" in differences
    with pytest.raises(
        UnsupportedValueError, match=r"model\.weight: it is a .*\.Scaled tensor; leave it out"
    ):
        sidesave.export(first, tmp_path / "export", item="model")
    assert (
        sidesave.export(first, tmp_path / "export", item="model", exclude="model.weight").tensors
        == 1
    )
    (file,) = Path(first).glob("model.*.safetensors")
    stock = safetensors.torch.load_file(file)
    assert stock.keys() == {"model.head", "model.weight.codes", "model.weight.scale"}
    assert same(stock["model.weight.codes"], scaled(5).codes)


def test_the_result_of_a_collective_is_waited_for_and_saved_as_a_plain_tensor(
    monkeypatch: pytest.MonkeyPatch,
):
    waited: list[torch.Tensor] = []
    monkeypatch.setattr(
        _functional_collectives, "wait_tensor", lambda each: waited.append(each) or each
    )
    flat = tree.flatten({"x": _functional_collectives.AsyncCollectiveTensor(torch.ones(2))})
    assert [*flat.containers["tensors"]] == ["x"]
    assert len(waited) == 1


# Of another class, jagged -------------------------------------------------------------------------


def test_an_ordinary_tensor_of_another_class_keeps_that_of_the_target(tmp_path: Path):
    path = save(tmp_path, {"x": torch.arange(3.0).as_subclass(Tagged)})
    live = torch.zeros(3).as_subclass(Tagged)
    sidesave.load(path, into={"x": live})
    assert same(live, torch.arange(3.0).as_subclass(Tagged))


def test_without_a_target_its_class_is_used_if_torch_lists_it_as_safe_and_else_the_log_tells(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
):
    path = save(tmp_path, {"x": torch.arange(3.0).as_subclass(Tagged)})
    assert type(sidesave.load(path)["x"]) is torch.Tensor
    assert "x was a test_subclasses.Tagged" in caplog.text
    caplog.clear()
    request.getfixturevalue("allowed")
    assert same(sidesave.load(path)["x"], torch.arange(3.0).as_subclass(Tagged))
    assert caplog.text == ""


def jagged(value: float, *lengths: int) -> Any:
    rows = [torch.full((length, 2), value) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def with_holes(value: float, *lengths: int) -> Any:
    padded = torch.full((len(lengths), 5, 2), value)
    starts, ends = torch.ones(len(lengths), dtype=torch.int64), torch.tensor(lengths)
    return torch.nested.narrow(padded, 1, starts, ends, layout=torch.jagged)


@pytest.mark.parametrize("make", [jagged, with_holes, lambda *args: jagged(*args).transpose(1, 2)])
def test_jagged_tensors_come_back_with_their_offsets(make: Any, tmp_path: Path):
    path = save(tmp_path, {"x": make(5, 3, 1), "y": [make(6, 2, 2)]})
    live, expected = make(0, 3, 1), make(5, 3, 1)
    sidesave.load(path, include="x", into={"x": live})
    fresh = sidesave.load(path)["x"]
    for came_back in (live, fresh):
        assert came_back.shape[0] == 2 and came_back._ragged_idx == expected._ragged_idx
        assert all(
            torch.equal(*pair) for pair in zip(came_back.unbind(), expected.unbind(), strict=True)
        )
    with pytest.raises(
        StateMismatchError, match=r"x: the rows of the nested tensor have other lengths"
    ):
        sidesave.load(path, include="x", into={"x": make(0, 1, 3)})
