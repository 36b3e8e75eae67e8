"""The decision of retention: what may be deleted in the run directory, in the mirror, and by a save
without room.
"""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sidesave import KeepEverySteps, KeepLatest, KeepSteps
from sidesave.client.runs.view import RunView
from sidesave.client.training.keep_policies import KeepPolicy
from sidesave.client.training.retention import KeepRules, Surplus, surplus
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo, in_commit_order
from sidesave.writer_daemon.format.rollback import Rollbacks

STEPS = range(12)
policies = st.sampled_from(
    [KeepLatest(1), KeepLatest(3), KeepEverySteps(2), KeepEverySteps(3, offset=1), KeepSteps([4])]
)
some_steps = st.frozensets(st.sampled_from(STEPS), max_size=4)


@st.composite
def views(draw: st.DrawFn) -> RunView:
    """A run whose saves are here, in the mirror, or in both; it may have gone back."""
    steps = draw(st.lists(st.sampled_from(STEPS), unique=True, max_size=9))
    rollbacks = Rollbacks()
    if steps and draw(st.booleans()):
        last = draw(st.integers(1, len(steps)))
        rollbacks = rollbacks.going_back(draw(st.integers(1, last)), last)
    saves = [
        CheckpointInfo(
            step,
            "",
            0,
            "session",
            sequence,
            None,
            float(sequence),
            {"ephemeral": True} if draw(st.booleans()) else {},
            given_up=not rollbacks.order(sequence)[0],
        )
        for sequence, step in enumerate(steps, start=1)
    ]
    places = [draw(st.sampled_from(["here", "mirror", "both"])) for _ in saves]
    here = [info for info, place in zip(saves, places, strict=True) if place != "mirror"]
    mirrored = [info for info, place in zip(saves, places, strict=True) if place != "here"]
    return RunView("/run", in_commit_order(here), [], rollbacks, mirrored=in_commit_order(mirrored))


@st.composite
def rules(draw: st.DrawFn) -> KeepRules:
    return KeepRules(draw(st.lists(policies, max_size=2)), draw(st.lists(policies, max_size=2)))


def wanted(
    by: tuple[KeepPolicy, ...] | list[KeepPolicy], checkpoints: list[CheckpointInfo]
) -> set[int]:
    # what the run has given up comes first
    ordered = sorted(checkpoints, key=lambda info: info.order)
    lasting = [info for info in ordered if not info.metadata.get("ephemeral")]
    steps = {info.step for info in lasting}
    return (
        steps & set(itertools.chain.from_iterable(policy.wanted(lasting) for policy in by))
        if by
        else steps
    )


@given(views(), rules(), st.frozensets(st.integers(1, 9)), some_steps, some_steps)
def test_only_what_nothing_keeps_is_deleted(
    view: RunView,
    keep: KeepRules,
    awaited: frozenset[int],
    pinned: frozenset[int],
    loading: frozenset[int],
):
    decided = surplus(view, keep, awaited.__contains__, pinned, loading)
    assert keep.here is not None
    for steps, checkpoints, policies in (
        (decided.here, view.here, keep.here),
        (decided.mirrored, view.mirrored, keep.mirror),
        (decided.under_pressure, view.here, keep.here),
    ):
        assert len({*steps}) == len(steps)
        assert {*steps} <= {info.step for info in checkpoints}
        assert not {*steps} & (pinned | loading)
        assert not {*steps} & wanted(list(policies), checkpoints)
        assert all(info.step not in steps for info in checkpoints[-1:])


@given(views(), rules(), st.frozensets(st.integers(1, 9)), some_steps)
def test_what_is_only_here_waits_for_the_mirror_that_is_to_keep_it(
    view: RunView, keep: KeepRules, awaited: frozenset[int], pinned: frozenset[int]
):
    decided = surplus(view, keep, awaited.__contains__, pinned)
    waiting = {info.step for info in view.here if info.sequence in awaited}
    for_the_mirror = wanted(list(keep.mirror), view.here) | pinned
    assert not {*decided.here} & waiting & for_the_mirror
    assert {*decided.under_pressure} <= waiting
    order = {info.step: info.sequence for info in view.here}
    assert list(decided.under_pressure) == sorted(decided.under_pressure, key=order.__getitem__)


@given(views(), rules(), st.frozensets(st.integers(1, 9)), some_steps, some_steps)
def test_nothing_that_can_go_is_forgotten(
    view: RunView,
    keep: KeepRules,
    awaited: frozenset[int],
    pinned: frozenset[int],
    loading: frozenset[int],
):
    decided = surplus(view, keep, awaited.__contains__, pinned, loading)
    assert keep.here is not None
    kept = (
        wanted(list(keep.here), view.here)
        | pinned
        | loading
        | {info.step for info in view.here[-1:]}
    )
    assert {*decided.here, *decided.under_pressure} == {info.step for info in view.here} - kept
    assert not {*decided.here} & {*decided.under_pressure}


@given(views(), st.lists(policies, max_size=2))
def test_without_rules_nothing_is_deleted_anywhere(view: RunView, mirror: list[KeepPolicy]):
    assert surplus(view, KeepRules(None, mirror), lambda _: False) == Surplus()


def test_each_place_keeps_its_own_newest():
    def info(step: int) -> CheckpointInfo:
        return CheckpointInfo(step, "", 0, "session", step, None, float(step))

    view = RunView("/run", [info(1), info(2)], [], Rollbacks(), mirrored=[info(1), info(3)])
    latest = KeepRules([KeepLatest(1)], [KeepLatest(1)])
    assert surplus(view, latest, lambda _: False) == Surplus(here=(1,), mirrored=(1,))
