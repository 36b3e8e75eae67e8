"""What policies decide, and what they refuse: when a step is due, which checkpoints go, how often
to save.
"""

from __future__ import annotations

import itertools
import math
import signal
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sidesave
from sidesave import (
    AtSteps,
    BeforeTraining,
    CheckpointInfo,
    Ephemeral,
    EverySeconds,
    EverySteps,
    FirstStep,
    KeepBest,
    KeepEveryMinutes,
    KeepEverySteps,
    KeepLatest,
    KeepPolicy,
    KeepSteps,
    LastStep,
    OnException,
    OnRequest,
    OnSignal,
    OptimalInterval,
    PolicyContext,
)
from sidesave.client.training.intervals import Advice, SaveCost, daly
from sidesave.client.training.keep_policies import to_delete
from sidesave.client.training.metadata import is_ephemeral, metric_of
from sidesave.errors import InvalidArgumentError
from sidesave.writer_daemon.save_record import SaveRecord


def context(step: int = 0, **changes: Any) -> PolicyContext:
    facts: dict[str, Any] = {
        "event": "step",
        "now_s": 1000.0,
        "saved_s": 1000.0,
        "persistent_step": None,
        "persistent_s": None,
        "signal": 0,
        "requested": False,
        "cost": None,
    }
    return PolicyContext(step=step, **{**facts, **changes})


def checkpoint(step: int, sequence: int, minute: float = 0.0, **metadata: Any) -> CheckpointInfo:
    return CheckpointInfo(
        step, f"/run/step-{step:08d}", 1, "a" * 16, sequence, None, 60 * minute, metadata
    )


# When ---------------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.data())
def test_every_n_th_step_is_due_whatever_the_offset(n: int, data: st.DataObject):
    offset = data.draw(st.integers(0, n - 1))
    due = [step for step in range(4 * n) if EverySteps(n, offset).due(context(step))]
    assert due == [step for step in range(offset, 4 * n, n) if step or n == 1]


def test_step_0_is_saved_only_by_who_asks_for_it():
    assert not EverySteps(500).due(context(0)) and not Ephemeral(EverySteps(50)).due(context(0))
    assert (
        AtSteps([0]).due(context(0))
        and EverySteps(1).due(context(0))
        and FirstStep().due(context(0, is_first=True))
    )


@given(st.lists(st.integers(0, 40), min_size=1))
def test_the_steps_that_are_named_are_due(named: list[int]):
    assert [step for step in range(42) if AtSteps(np.array(named)).due(context(step))] == sorted(
        set(named)
    )


def test_time_counts_from_the_last_save():
    assert not EverySeconds(10).due(context(now_s=1009.9))
    assert EverySeconds(10).due(context(now_s=1010.0))


@pytest.mark.parametrize(
    "policy", [EverySteps(1), EverySeconds(1), AtSteps([0]), OptimalInterval(1e-9)]
)
@pytest.mark.parametrize("event", ["restore", "close", "exception"])
def test_what_training_steps_make_due_is_not_due_on_other_events(policy: Any, event: str):
    assert not policy.due(context(event=event, now_s=1e9, cost=(0.0, 0.0)))


def test_each_event_has_its_policy():
    of = {"restore": BeforeTraining(), "close": LastStep(), "exception": OnException()}
    for event, (whose, policy) in itertools.product(["step", *of], of.items()):
        assert policy.due(context(event=event)) == (event == whose)


def test_an_ephemeral_save_waits_until_the_last_lasting_one_is_old_enough():
    policy = Ephemeral(EverySteps(1), cool_down_steps=3, cool_down_s=5)
    assert policy.due(context(7))
    assert not policy.due(context(7, persistent_step=5, persistent_s=0.0))
    assert not policy.due(context(7, persistent_step=1, persistent_s=996.0))
    assert policy.due(context(7, persistent_step=4, persistent_s=995.0))
    assert not Ephemeral(EverySteps(2)).due(context(7))


def test_which_policies_ranks_have_to_agree_on():
    steps = [EverySteps(1), AtSteps([1]), Ephemeral(EverySteps(2), cool_down_steps=1)]
    alike = [*steps, BeforeTraining(), FirstStep(), LastStep()]
    apart = [
        EverySeconds(1),
        OnSignal(),
        OnRequest(),
        OptimalInterval(9),
        Ephemeral(EverySteps(2), cool_down_s=1),
    ]
    assert not any(policy.is_local for policy in alike)
    assert all(policy.is_local for policy in apart)


def test_which_signals_end_training():
    policy = OnSignal(signal.SIGTERM, signal.SIGUSR1)
    assert policy.due(context(signal=signal.SIGUSR1)) and not policy.due(
        context(signal=signal.SIGINT)
    )
    assert policy.ends(signal.SIGTERM) and not policy.ends(signal.SIGUSR1)
    assert OnSignal(signal.SIGUSR2, exit=True).ends(signal.SIGUSR2)
    assert not OnSignal(signal.SIGTERM, exit=False).ends(signal.SIGTERM)
    assert OnSignal().signals == (signal.SIGTERM,)


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: EverySteps(0), "EverySteps takes an int, 1 or more"),
        (lambda: EverySteps(5, 5), "offset of EverySteps"),
        (lambda: EverySeconds(0), "seconds of EverySeconds"),
        (lambda: EverySeconds(math.nan), "seconds of EverySeconds"),
        (lambda: AtSteps([]), "AtSteps takes ints"),
        (lambda: AtSteps([-1]), "AtSteps takes ints"),
        (lambda: AtSteps(5), "AtSteps takes ints"),  # pyright: ignore[reportArgumentType]
        (lambda: KeepLatest(0), "KeepLatest takes an int, 1 or more"),
        (lambda: KeepEverySteps(True), "KeepEverySteps takes an int"),
        (lambda: KeepEveryMinutes(-1), "minutes of KeepEveryMinutes"),
        (lambda: KeepBest(2), "needs the name of a metric"),
        (lambda: KeepBest(0, metric="loss"), "KeepBest takes an int"),
        (lambda: KeepBest(1, metric="loss", mode="low"), "'min' or 'max'"),  # pyright: ignore[reportArgumentType]
        (lambda: OnSignal(signal.SIGTERM, signal.SIGTERM), "twice: SIGTERM"),
        (lambda: OnSignal(signal.SIGKILL), "SIGKILL cannot ask"),
        (lambda: OnSignal(signal.SIGSTOP), "SIGSTOP cannot ask"),
        (lambda: OnSignal(1000), "1000 is not a signal"),
        (lambda: OnSignal(deadline_s=-1), "deadline_s of OnSignal"),
        (lambda: OptimalInterval(0), "mtbf_s"),
        (lambda: Ephemeral(OnSignal()), "again and again"),
        (lambda: Ephemeral(FirstStep()), "again and again"),
        (lambda: Ephemeral(5), "takes a policy"),  # pyright: ignore[reportArgumentType]
        (lambda: Ephemeral(EverySteps(1), cool_down_steps=-1), "cool_down_steps"),
    ],
)
def test_policies_that_make_no_sense_are_refused(make: Callable[[], object], told: str):
    with pytest.raises(InvalidArgumentError, match=told):
        make()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"save": True}, "save takes a policy such as"),
        ({"save": 0}, "EverySteps takes an int, 1 or more"),
        ({"save": "500"}, "save takes a policy such as"),
        ({"keep": 3}, "keep takes policies"),
        ({"save": [KeepLatest(1)]}, "save takes a policy such as"),
        ({"save": [EverySteps(2), EverySteps(2)]}, "twice"),
        (
            {"save": [OnSignal(), OnSignal(signal.SIGTERM, exit=False)]},
            "two policies answer SIGTERM",
        ),
        (
            {"save": [EverySteps(5, 2), Ephemeral(EverySteps(10, 7))]},
            "saves all of its steps persistently",
        ),
        ({"keep": [3]}, "keep takes policies"),
        ({"keep": [EverySteps(3)]}, "keep takes policies"),
        ({"keep": [KeepLatest(3), KeepLatest(3)]}, "twice"),
        ({"metadata": {"x": object()}}, "plain JSON"),
    ],
)
def test_policies_that_cannot_be_followed_are_refused_before_anything_is_made(
    tmp_path: Any, options: dict[str, Any], told: str
):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(InvalidArgumentError, match=told):
        sidesave.CheckpointManager(tmp_path / "run", {"x": 1}, **options)
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("save", [2, np.int64(2), EverySteps(2), [2], (EverySteps(2),)], ids=repr)
def test_one_policy_or_a_number_of_steps_needs_no_list(tmp_path: Any, save: Any):
    with sidesave.CheckpointManager(
        tmp_path / "run", {"x": 1}, save=save, keep=KeepLatest(1)
    ) as manager:
        assert [step for step in range(5) if manager.step(step)] == [2, 4]
        manager.wait()


# What is kept -------------------------------------------------------------------------------------


def kept(policy: KeepPolicy, checkpoints: list[CheckpointInfo]) -> list[int]:
    gone = to_delete(checkpoints, [policy])
    return [info.step for info in checkpoints if info.step not in gone]


class Longest(KeepPolicy):
    """Of the user's own: keeps the checkpoint with the most tokens."""

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        return [max(checkpoints, key=lambda info: info.metadata["user"]["tokens"]).step]


class WhenPlateaued(sidesave.SavePolicy):
    """Of the user's own: saves when told, by the attribute of an object that both know."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def due(self, context: PolicyContext) -> bool:
        return context.event == "step" and self.run.plateaued


def test_policies_of_ones_own_decide_like_ours(tmp_path: Any):
    run = types.SimpleNamespace(plateaued=False)
    with sidesave.CheckpointManager(
        tmp_path / "run",
        {"x": 1},
        save=[WhenPlateaued(run)],
        keep=[Longest()],
        metadata={"tokens": 0},
    ) as manager:
        for step in range(4):
            run.plateaued = step % 2 == 1
            manager.step(step)
        manager.save(4, metadata={"tokens": 9})
        manager.save(5)
        manager.wait()
        assert manager.checkpointer.latest_step() == 5
    assert [info.step for info in sidesave.find(tmp_path / "run")] == [4, 5]


def test_latest_goes_by_commits_and_not_by_numbers():
    row = [checkpoint(step, place) for place, step in enumerate([10, 20, 30, 11, 12])]
    assert kept(KeepLatest(3), row) == [30, 11, 12]


def test_of_a_multiple_that_was_not_saved_the_next_that_was_is_kept():
    exact = [checkpoint(step, step) for step in range(26)]
    assert kept(KeepEverySteps(10), exact) == [0, 10, 20, 25]
    assert kept(KeepEverySteps(10, 5), exact) == [5, 15, 25]
    by_time = [
        checkpoint(step, place) for place, step in enumerate([3, 9, 12, 17, 31, 38, 40, 41, 47])
    ]
    assert kept(KeepEverySteps(10), by_time) == [12, 31, 40, 47]
    again = [checkpoint(step, place) for place, step in enumerate([8, 13, 19, 11, 12, 18])]
    assert kept(KeepEverySteps(10), again) == [11, 18], "after going back"


def test_one_of_each_period_is_kept_and_stays_when_others_go():
    row = [
        checkpoint(step, step, minute)
        for step, minute in enumerate([0, 4, 9.9, 10, 15, 20, 31, 5, 40])
    ]
    assert kept(KeepEveryMinutes(10), row) == [0, 3, 5, 6, 7, 8]


def test_the_best_have_the_metric_and_the_newer_of_two_equals_wins():
    losses = [3.0, 1.0, "nan", None, 1.0, "-inf", "inf", 2.0]
    row = [
        checkpoint(step, step, metrics={} if loss is None else {"loss": loss})
        for step, loss in enumerate(losses)
    ]
    row.append(checkpoint(8, 8))
    assert kept(KeepBest(1, metric="loss"), row) == [5, 8]
    assert kept(KeepBest(2, metric="loss"), row) == [4, 5, 8]
    assert kept(KeepBest(2, metric="loss", mode="max"), row) == [0, 6, 8]
    assert kept(KeepBest(1, metric="accuracy"), row) == [8]


@st.composite
def rows(draw: st.DrawFn) -> list[CheckpointInfo]:
    steps = draw(st.lists(st.integers(0, 30), unique=True, max_size=15))
    number = st.one_of(st.floats(-5, 5), st.sampled_from(["nan", "inf", "x"]), st.none())
    return [
        checkpoint(
            step,
            place,
            draw(st.floats(0, 100)),
            ephemeral=draw(st.booleans()),
            metrics={"loss": draw(number)},
        )
        for place, step in enumerate(steps)
    ]


policies = st.lists(
    st.one_of(
        st.builds(KeepLatest, st.integers(1, 5)),
        st.builds(KeepEverySteps, st.integers(3, 7), st.integers(0, 2)),
        st.builds(KeepEveryMinutes, st.floats(1, 50)),
        st.builds(KeepBest, st.integers(1, 4), st.just("loss"), st.sampled_from(["min", "max"])),
        st.builds(KeepSteps, st.lists(st.integers(0, 30), min_size=1)),
    ),
    max_size=3,
)
some_steps = st.frozensets(st.integers(0, 30))


@given(rows(), policies, some_steps, some_steps, st.randoms())
def test_what_is_deleted_is_wanted_by_nobody(
    row: list[CheckpointInfo],
    keep: list[KeepPolicy],
    pinned: frozenset[int],
    loading: frozenset[int],
    chance: Any,
):
    gone = to_delete(row, keep, pinned, loading)
    assert len(set(gone)) == len(gone) and set(gone) <= {info.step for info in row}
    assert not (pinned | loading) & set(gone)
    assert not row or row[-1].step not in gone, "the newest is the last good one"
    persistent = [info for info in row if not is_ephemeral(info)]
    wanted = (
        set().union(*(policy.wanted(persistent) for policy in keep))
        if keep
        else {info.step for info in persistent}
    )
    safe = pinned | loading | {info.step for info in row[-1:]}
    assert set(gone) == {
        info.step
        for info in row
        if info.step not in safe and (is_ephemeral(info) or info.step not in wanted)
    }
    order = [next(info for info in row if info.step == step) for step in gone]
    assert order == sorted(order, key=lambda info: (not is_ephemeral(info), info.sequence))
    shuffled = list(row)
    chance.shuffle(shuffled)
    assert to_delete(shuffled, keep, pinned, loading) == gone
    left = [info for info in row if info.step not in gone]
    assert to_delete(left, keep, pinned, loading) == [], "what is left stays"


@given(rows(), st.integers(1, 4), st.sampled_from(["min", "max"]))
def test_no_checkpoint_is_better_than_the_best(row: list[CheckpointInfo], n: int, mode: Any):
    best = KeepBest(n, metric="loss", mode=mode).wanted(row)
    values = {info.step: metric_of(info, "loss") for info in row}
    numbers = {
        step: value for step, value in values.items() if value is not None and not math.isnan(value)
    }
    assert set(best) <= numbers.keys() and len(best) == min(n, len(numbers))
    sign = 1 if mode == "max" else -1
    for step, value in numbers.items():
        assert step in best or all(sign * value <= sign * numbers[other] for other in best)


# How often ----------------------------------------------------------------------------------------


@given(st.floats(1e-3, 1e3), st.floats(1.0, 1e7))
def test_dalys_interval_loses_no_more_than_its_neighbours(cost_s: float, mtbf_s: float):
    """Against the exact expectation that it approximates, Daly (2006), equation (13): exp((T + C) /
    M) - 1 over T.
    """
    if cost_s > mtbf_s / 2:
        return

    def lost(interval_s: float) -> float:
        return math.expm1((interval_s + cost_s) / mtbf_s) / interval_s

    best = daly(cost_s, mtbf_s)
    assert lost(best) <= 1.001 * min(lost(0.8 * best), lost(1.25 * best))


def test_advice_follows_the_formula_and_never_saves_before_the_last_save_is_done():
    assert daly(300, 100) == 100
    advice = Advice.of(stall_s=2, commit_s=5, mtbf_s=10_000)
    assert advice.interval_s == pytest.approx(200 * (1 + 0.01 / 3 + 0.0001 / 9) - 2)
    assert advice.lost == pytest.approx(
        2 / (advice.interval_s + 2) + (advice.interval_s / 2 + 5) / 10_000
    )
    assert Advice.of(stall_s=0.001, commit_s=60, mtbf_s=100).interval_s == 60


def test_the_optimal_interval_is_what_is_measured():
    cost = SaveCost()
    assert cost.known is None
    cost(SaveRecord(step=0, session="", outcome="saving", stall_s=50.0))
    cost(SaveRecord(step=0, session="", outcome="failed", stall_s=50.0))
    assert cost.known is None
    # the first one allocates
    cost(SaveRecord(step=1, session="", outcome="committed", stall_s=50.0, committed_s=60.0))
    for step in range(2, 6):
        cost(SaveRecord(step=step, session="", outcome="committed", stall_s=2.0, committed_s=5.0))
    assert cost.known == (2, 5)
    policy = OptimalInterval(10_000, initial_s=30)
    assert policy.due(context(now_s=1030.0)) and not policy.due(context(now_s=1029.0))
    interval_s = cost.advise(10_000).interval_s
    assert not policy.due(context(now_s=1000 + interval_s - 1, cost=cost.known))
    assert policy.due(context(now_s=1000 + interval_s + 1, cost=cost.known))
