"""What differs between two checkpoints: one report wherever tensors lie, and no word of what nobody
read.
"""

import collections
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loads import flip_bit
from states import noise
from trainers import DEADLINE_S, save

import sidesave
from sidesave.client.export.diff import Contents, DiffReport, TensorChange, compare
from sidesave.errors import IntegrityError

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.uint8,
)
SIZES = (0, 1, 1_000, 70_001)


def report(first: Path, second: Path) -> DiffReport:
    with Contents(str(first)) as one, Contents(str(second)) as other:
        return compare(one, other)


def measured(fqn: str, before: torch.Tensor, after: torch.Tensor) -> TensorChange:
    """What a change is by its definition, of the tensors as a whole."""
    bits = [tensor.view(torch.uint8).view(tensor.numel(), -1) for tensor in (before, after)]
    differs = (bits[0] != bits[1]).any(1)
    wide = torch.complex128 if before.is_complex() else torch.float64
    old, new = before.to(wide), after.to(wide)
    delta = (new - old).abs()[differs]
    delta = delta[~delta.isnan()]
    squares = [float(values[values.isfinite()].square().sum()) for values in (delta, old.abs())]
    return TensorChange(
        fqn,
        int(differs.sum()),
        before.numel(),
        float(delta.max()) if delta.numel() else 0.0,
        math.sqrt(squares[0] / squares[1]) if squares[1] else math.inf if squares[0] else 0.0,
        (int(old.isnan().sum()), int(new.isnan().sum())),
    )


def test_changes_are_what_their_definition_says_whatever_has_changed(tmp_path: Path):
    before: dict[str, torch.Tensor] = {}
    after: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        for size in SIZES:
            for change in ("none", "few", "all"):
                name = f"{dtype}/{size}/{change}"
                before[name], after[name] = noise(dtype, size), noise(dtype, size)
                if change != "all":
                    most = size - 3 if change == "few" else size
                    after[name][: max(most, 0)] = before[name][: max(most, 0)]
    before["specials"] = torch.randn(200_000)
    after["specials"] = before["specials"].clone()
    before["specials"][:4] = torch.tensor([math.nan, math.inf, 0.0, -math.inf])
    after["specials"][:4] = torch.tensor([math.nan, math.inf, -0.0, 1.0])
    after["specials"][150_000] = math.nan
    before["large"], after["large"] = (
        torch.full((3,), value, dtype=torch.float64) for value in (1e200, 2e200)
    )
    found = report(save(tmp_path / "a", before), save(tmp_path / "b", after))
    raw = {name: [state[name].view(torch.uint8) for state in (before, after)] for name in before}
    expected = {name: torch.equal(*pair) for name, pair in raw.items()}
    assert set(found.equal) == {name for name, is_equal in expected.items() if is_equal}
    assert {change.fqn for change in found.changed} == {
        name for name, is_equal in expected.items() if not is_equal
    }
    for change in found.changed:
        if change.fqn == "large":
            continue  # the squares leave the range of a double
        exact = measured(change.fqn, before[change.fqn], after[change.fqn])
        assert change.relative_l2 == pytest.approx(exact.relative_l2, rel=1e-9)
        assert (change.changed, change.elements, change.nans) == (
            exact.changed,
            exact.elements,
            exact.nans,
        )
        assert change.max_abs == exact.max_abs


def test_equal_tensors_are_equal_wherever_they_lie_in_their_files(tmp_path: Path):
    tensors = {"small": torch.randn(100), "large": torch.randn(200_000), "odd": torch.randn(70_001)}
    first = save(tmp_path / "a", {"model": tensors})
    second = save(
        tmp_path / "b", {"model": {"new": torch.randn(33), **tensors, "more": torch.randn(100_000)}}
    )
    found = report(first, second)
    assert sorted(found.equal) == ["model.large", "model.odd", "model.small"]
    assert (found.changed, found.only_second) == ([], ["model.new", "model.more"])


def test_what_shares_a_block_with_a_change_is_equal_all_the_same(tmp_path: Path):
    before = {f"t{index}": torch.randn(50) for index in range(20)}
    after = {**before, "t7": before["t7"] + 1}
    found = report(save(tmp_path / "a", before), save(tmp_path / "b", after))
    assert ([change.fqn for change in found.changed], len(found.equal)) == (["t7"], 19)


@pytest.mark.parametrize("damaged", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("size", [100, 200_000])
def test_damaged_tensors_are_not_told_to_be_equal(damaged: int, size: int, tmp_path: Path):
    state = {"t": torch.randn(size)}
    paths = [save(tmp_path / name, state) for name in ("a", "b")]
    flip_bit(paths[damaged] / "tensors.rank-00000.safetensors", -1)
    with pytest.raises(IntegrityError, match="does not match its digest; it holds t"):
        report(*paths)


def _nests() -> st.SearchStrategy[Any]:
    leaves = st.sampled_from([None, True, 1, 1.0, "1", torch.ones(2), np.ones(2, np.float32)])
    keys = st.sampled_from([1, "1", True, "a", 2])

    def below(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists = st.lists(inner, max_size=2)
        dicts = st.lists(st.tuples(keys, inner), max_size=3, unique_by=lambda pair: str(pair[0]))
        return st.one_of(
            lists,
            lists.map(tuple),
            lists.map(lambda items: collections.deque(items, 4)),
            dicts.map(dict),
            dicts.map(collections.OrderedDict),
            dicts.map(lambda items: collections.defaultdict(list, items)),
        )

    return st.recursive(leaves, below, max_leaves=6)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two nests are alike, of the same types, in all but the order of an ordinary dict."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs, others = list(one.items()), list(other.items())
        if not isinstance(one, collections.OrderedDict):
            pairs, others = (
                sorted(each, key=lambda pair: str(pair[0])) for each in (pairs, others)
            )
        return _is_same([*map(list, pairs)], [*map(list, others)])
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool((one == other).all()) if hasattr(one, "all") else one == other


def test_two_nests_are_the_same_exactly_if_types_keys_and_values_are(tmp_path: Path):
    steps = itertools.count()
    with sidesave.Checkpointer(tmp_path / "run") as ckpt:

        @settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
        @given(one=_nests(), other=_nests(), both=_nests())
        def check(one: Any, other: Any, both: Any) -> None:
            states = [{"x": [each, both]} for each in (one, other)]
            handles = [ckpt.save(next(steps), state) for state in states]
            paths = [Path(handle.committed.result(DEADLINE_S)) for handle in handles]
            assert report(paths[0], paths[1]).same == _is_same(*states)

        check()
