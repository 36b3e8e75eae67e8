"""Generated states come back as they were: the differential zoo, a share of it at a time.

`python -m scripts.zoo` goes through all of it and prints a table. Optimizers of other packages take
part where these are installed: `scripts/test --integrations zoo`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from campaigns import Share
from zoo import Point, Zoo, points, run_together

ONCE_WRONG = {
    "state that one rank has under DDP": Point("zoo.OwnedByOneRank", wrapper="ddp"),
    "state that differs by rank under DDP": Point("zoo.DifferentOnEachRank", wrapper="ddp"),
    "nested state in another dtype than its parameter": Point("zoo.Nested", dtype="bf16"),
    "nested DTensors": Point("zoo.NestedHistory", wrapper="fsdp"),
    "a batch norm that is Frozen": Point("torch.SGD", "PartlyFrozen"),
    "two targets that share memory": Point("torch.SGD", "SharesNoMemory", target="shared"),
    "state at an address that a kernel rounds differently for": Point("torch.LBFGS"),
    "sparse state, with overlap": Point(
        "torch.SGD nesterov momentum", "SparseGradients", overlap=True
    ),
    "state saved under other keys": Point("zoo.SavesOtherKeys", target="used"),
    "state in another order of dimensions": Point("zoo.Transposed"),
    "state at addresses that kernels round differently for": Point("zoo.Addresses"),
    "state in a form of its own": Point("zoo.OwnForm", target="used"),
    "state in a form of its own, of sharded parameters": Point("zoo.OwnForm", wrapper="fsdp"),
    "whole state of sharded parameters, in another order of dimensions": Point(
        "zoo.Transposed", wrapper="fsdp"
    ),
    "state in another order of dimensions than usual, sharded": Point(
        "zoo.Transposed", "Recurrent", wrapper="fsdp"
    ),
    "moments that are smaller than their parameter": Point("zoo.SmallMoments"),
    "state of another size than the target's": Point("zoo.DrawnSizes", target="used"),
    "state in the memory format of its parameter": Point("torch.Adam fused", "Convolutions"),
}


Run = Callable[[list[Point]], list[tuple[Point, str]]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Give the verdicts on points that all need one process, or all of them two ranks."""
    with Zoo(tmp_path) as zoo:
        yield (
            lambda chosen: (
                [(point, zoo.run(point)) for point in chosen]
                if chosen[0].wrapper == "plain"
                else [*run_together(chosen)]
            )
        )


EXACT = [
    *(
        Point(name, overlap=overlap)
        for name in ("torch.AdamW", "torch.SGD")
        for overlap in (False, True)
    ),
    *(
        Point("torch.AdamW amsgrad", model, target="used")
        for model in ("Tied", "SharesMemory", "Recurrent")
    ),
    *(Point("torch.Adam", model, "bf16") for model in ("Parametrized", "Convolutions")),
    *(Point("torch.SparseAdam", "SparseGradients"), Point("torch.Adafactor", target="nest")),
]


@pytest.mark.parametrize("point", EXACT, ids=str)
def test_a_state_comes_back_bit_for_bit_and_trains_on_as_if_nothing_had_happened(
    run: Run, point: Point
):
    assert run([point]) == [(point, "exact")]


@pytest.mark.slow
def test_states_of_two_ranks_come_back_bit_for_bit(run: Run):
    chosen = [
        Point("torch.AdamW", "Plain", dtype, wrapper)
        for dtype in ("fp32", "bf16")
        for wrapper in ("ddp", "fsdp")
    ]
    assert [*run(chosen)] == [(point, "exact") for point in chosen]


@pytest.mark.slow
@pytest.mark.parametrize("point", ONCE_WRONG.values(), ids=ONCE_WRONG)
def test_what_came_back_wrong_once_is_exact_or_refused(run: Run, point: Point):
    for ran, verdict in run([point]):
        assert not verdict.startswith("WRONG"), f"{ran}: {verdict}"


def _drawn(share: Share, wrappers: tuple[str, ...]) -> list[Point]:
    return points(share.chance.randrange(1 << 32), wrappers)


@pytest.mark.slow(minutes=2)
def test_generated_states_are_exact_or_refused(run: Run, share: Share):
    for drawn in share.points(_drawn(share, ("plain",))):
        for point, verdict in run([drawn]):
            assert not verdict.startswith("WRONG"), f"{point}: {verdict}"


@pytest.mark.slow(minutes=2)
@pytest.mark.timeout(1200)
def test_generated_states_of_two_ranks_are_exact_or_refused(run: Run, share: Share):
    drawn = _drawn(share, ("ddp", "fsdp"))
    share.chance.shuffle(drawn)
    for batch in share.points([drawn[first : first + 6] for first in range(0, len(drawn), 6)]):
        for point, verdict in run(batch):
            assert not verdict.startswith("WRONG"), f"{point}: {verdict}"
