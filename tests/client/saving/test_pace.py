"""The daemon gives way where training's own steps show that this costs them less, and never where anybody waits."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sidesave
from sidesave.client.internals import saver_of
from sidesave.client.saving.pace import LEAST, PART, REST_SAVES, SAVES
from sidesave.stager.memory.arena import PAGE, Arena
from sidesave.writer_daemon.writing import pace
from sidesave.writer_daemon.writing.pace import Turns
from tests.support.paces import NBYTES, STEP_S, Loop, slowed
from tests.support.trainers import (
    DEADLINE_S,
    Orders,
    Traces,
    Trainer,
    a_state,
    await_end,
    check,
    daemon,
    end,
    pidfd_of,
    stopped,
    wait_until,
)

MIB = 64
"""Of a state that is slowed: four chunks, a second at the slowest pace."""


def test_no_pace_before_two_saves_were_seen_nor_before_full_speed_is_known() -> None:
    loop = Loop(lambda factor: 0.4 / factor)
    assert set(loop.run(SAVES)) == {1}


def test_a_save_that_costs_training_nothing_is_written_at_full_speed() -> None:
    assert set(Loop(lambda factor: 0.0).run(300)) == {1}


def test_spread_out_work_that_costs_the_same_in_all_is_written_at_full_speed() -> None:
    loop = Loop(lambda factor: 0.4)
    assert loop.run(1 + 2 * SAVES)[-SAVES:] == [3] * SAVES  # it was tried
    assert set(loop.run(REST_SAVES)) == {1}


def test_slow_writes_that_cost_less_are_kept() -> None:
    loop = Loop(lambda factor: 0.4 / factor)
    loop.run(1 + 2 * SAVES)
    assert set(loop.run(REST_SAVES)) == {3}


def test_what_was_found_is_tried_anew_and_given_up_where_it_pays_no_more() -> None:
    loop = Loop(lambda factor: 0.4 / factor)
    loop.run(1 + 2 * SAVES)
    loop.cost = lambda factor: 0.0
    assert set(loop.run(REST_SAVES + 300)[REST_SAVES + 1 :]) == {1}


def test_a_write_takes_half_of_the_time_between_saves_at_most() -> None:
    loop = Loop(lambda factor: 0.4 / factor)
    for _ in range(1 + 2 * SAVES):
        loop.save(steps=30)  # 3 s
    assert loop.factors[-1] == 2
    loop = Loop(lambda factor: 0.4 / factor)
    for _ in range(1 + 2 * SAVES):
        loop.save(steps=15)
    assert set(loop.factors) == {1}  # too little is left to try


def test_saves_that_are_waited_for_say_nothing_and_are_not_slowed() -> None:
    loop = Loop(lambda factor: 0.4 / factor)
    loop.run(1 + 2 * SAVES)
    loop.save(waited=True)
    assert loop.factors[-1] == 1
    loop.save()
    assert loop.factors[-1] == 3


def test_a_pause_beside_a_write_is_not_held_against_it() -> None:
    loop = Loop(lambda factor: 0.0)
    for _ in range(20):
        loop.save(steps=100)
        loop.search.began(2, loop.now, NBYTES)
        loop.step(60.0)  # an evaluation
        loop.search.ended(2, loop.now)
        for _ in range(100):
            loop.step()
    assert set(loop.factors) == {1}


def test_of_several_optimizers_the_first_one_after_a_save_is_the_clock() -> None:
    loop = Loop(lambda factor: 0.4 / factor)
    stepped = loop.search.stepped

    def both(clock: int, now_s: float) -> None:
        stepped(clock, now_s)
        stepped(2, now_s + 0.001)
        stepped(3, now_s + 0.05)

    loop.search.stepped = both  # type: ignore[method-assign]
    loop.run(1 + 2 * SAVES)
    assert loop.search.usual_s == pytest.approx(STEP_S)
    assert set(loop.run(3)) == {3}


times = st.floats(0.0, 100.0)
events = st.one_of(
    st.tuples(st.just("step"), times, st.integers(0, 2)),
    st.tuples(st.just("save"), times, st.integers(0, 1 << 34)),
    st.tuples(st.just("end"), times, st.integers(0, 9)),
    st.tuples(st.just("lift"), times, st.just(0)),
)


@given(st.lists(events, max_size=200), st.lists(events, max_size=200), st.integers(0, 3))
def test_whatever_happens_a_pace_keeps_its_bounds_and_ends_with_the_write(
    first: list[tuple[str, float, int]], then: list[tuple[str, float, int]], rounds: int
) -> None:
    loop = Loop(lambda factor: 0.4 / factor)
    loop.run(1 + SAVES * rounds)
    search, now, under_way, called = loop.search, loop.now, list[int](), list[float]()
    for kind, after_s, value in [*first, *then]:
        now += after_s
        if kind == "step":
            before = search.pace
            search.stepped(value, now)
            assert search.pace == before  # never changed in the middle, but for those who wait
        elif kind == "save":
            search.began(len(called), now, value)
            under_way.append(len(called))
            called.append(now)
            search.called(now, now + after_s / 2)
            if len(under_way) > 1:  # the save before has not left time
                assert search.pace == 0
            elif search.pace and len(called) > 1:
                assert search.pace >= LEAST
                assert value / search.pace <= PART * (called[-1] - called[-2]) + 1e-6
        elif kind == "end" and under_way:
            search.ended(under_way.pop(value % len(under_way)), now)
        elif kind == "lift":
            search.lift()
            assert search.pace == 0
        assert under_way or search.pace == 0


# Turns -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(PAGE, PAGE)
    yield made
    made.close()


def waiting(turns: Turns) -> threading.Thread:
    """A thread that has taken one turn and waits for the next."""
    turns.take(1)
    thread = threading.Thread(target=turns.take, args=(1,))
    thread.start()
    return thread


def ends(thread: threading.Thread) -> bool:
    thread.join(DEADLINE_S)
    return not thread.is_alive()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "MAX_WAIT_S", 1e9)


@pytest.mark.usefixtures("patient")
def test_a_pace_that_is_lifted_raised_or_no_more_renewed_is_followed_in_the_middle_of_a_wait(arena: Arena) -> None:
    for change in (lambda: arena.set_pace(0, 1e6), lambda: arena.set_pace(1 << 40, 1e6), lambda: arena.set_pace(1, 0)):
        over = threading.Event()
        arena.set_pace(1, 1e6)
        thread = waiting(Turns(arena, over.is_set))
        arena.set_pace(1, 1e6)
        change()
        assert ends(thread)
        arena.set_pace(1, 1e6)
        thread = waiting(Turns(arena, over.is_set))
        over.set()
        assert ends(thread)


@pytest.mark.usefixtures("patient")
def test_a_new_save_in_the_same_memory_begins_without_a_pace(arena: Arena) -> None:
    arena.set_pace(1, 1e6)
    arena.begin_generation()
    assert arena.pace() == 0


def test_turns_are_as_far_apart_as_the_pace_says_and_never_far(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0.0, 0.0

    def sleep(seconds: float) -> None:
        nonlocal now, slept
        now += seconds
        slept += seconds

    arena.set_pace(1 << 20, 1e6)
    monkeypatch.setattr(pace.time, "monotonic", lambda: now)
    monkeypatch.setattr(pace.time, "sleep", sleep)
    turns = Turns(arena, lambda: False)
    for _ in range(11):
        turns.take(1 << 17)
    assert slept == pytest.approx(10 / 8)
    turns.take(1 << 40)
    slept = 0.0
    turns.take(1)
    assert slept == pytest.approx(pace.MAX_WAIT_S)


# Daemons ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def the_arena(checkpointer: sidesave.Checkpointer) -> Arena:
    [slot] = saver_of(checkpointer).session.pool._slots
    assert slot.arena is not None
    return slot.arena


def test_a_slowed_write_takes_as_long_as_told_and_its_bytes_are_right(run: Path) -> None:
    with sidesave.Checkpointer(run, slots=1) as checkpointer:
        checkpointer.save(1, a_state(1, MIB), blocking=True)
        pacer = slowed(checkpointer)
        with stopped(daemon(checkpointer)):
            handle = checkpointer.save(2, a_state(2, MIB))
            assert pacer.search.pace == LEAST
        done = threading.Event()
        handle.written.add_done_callback(lambda _: done.set())
        assert done.wait(DEADLINE_S)  # nobody waits for the future itself
        began, ended = handle.staged.reached, handle.written.reached
        assert began is not None and ended is not None
        assert ended - began > 0.25 * MIB / 16 / 2  # some pieces may have been on their way before
    check(run, 1, 2, mib=MIB)


@pytest.mark.drawn
@pytest.mark.parametrize("way", ["wait", "committed", "written", "close", "save", "load"])
def test_who_waits_lifts_the_pace_in_the_middle_of_a_write(run: Path, way: str) -> None:
    checkpointer = sidesave.Checkpointer(run, slots=1)
    checkpointer.save(1, a_state(1, MIB), blocking=True)
    slowed(checkpointer)
    with stopped(daemon(checkpointer)):  # it neither writes nor ends before somebody waits
        handle = checkpointer.save(2, a_state(2, MIB))
        arena = the_arena(checkpointer)
        assert arena.pace() == LEAST
        ways: dict[str, Callable[[], object]] = {
            "wait": checkpointer.wait,
            "committed": handle.committed.result,
            "written": handle.written.exception,
            "close": checkpointer.close,
            "save": lambda: checkpointer.save(3, a_state(3, MIB)),
            "load": checkpointer.load,
        }
        thread = threading.Thread(target=ways[way])
        thread.start()
        wait_until(lambda: arena.pace() == 0)
        assert not handle.written.done()
    assert ends(thread)
    checkpointer.close()
    check(run, 1, 2, *[3] * (way == "save"), mib=MIB)


def test_a_daemon_killed_in_a_slowed_write_leaves_the_pace_to_its_successor_which_finishes(
    run: Path, orders: Orders
) -> None:
    with sidesave.Checkpointer(run, slots=1) as checkpointer:
        checkpointer.save(1, a_state(1, MIB), blocking=True)
        slowed(checkpointer)
        orders.give("stop", after=1)
        handle = checkpointer.save(2, a_state(2, MIB))
        pid, _ = orders.obeyed()
        orders.give("hold", starting_at="got BOOT", every_step=True)
        end(pid)
        assert orders.obeyed()[0] != pid
        assert not handle.written.done()
        assert the_arena(checkpointer).pace() == LEAST
        orders.release()
        handle.committed.result(DEADLINE_S)
    check(run, 1, 2, mib=MIB)


def test_a_trainer_killed_in_a_slowed_write_its_daemon_finishes(run: Path, traces: Traces) -> None:
    with Trainer(traces, "save_slowly", run, MIB) as trainer:
        [pid] = trainer.expect("saving")
        with pidfd_of(int(pid)) as pidfd:
            trainer.kill()
            await_end(pidfd)
    check(run, 1, 2, mib=MIB)
    traces.check()


def test_steps_of_a_real_optimizer_are_the_clock_and_renew_the_pace(run: Path) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with sidesave.Checkpointer(run, slots=1) as checkpointer:
        checkpointer.save(1, a_state(1, MIB), blocking=True)
        for _ in range(20):
            optimizer.step()
        assert saver_of(checkpointer).session.pacer.search.usual_s is not None
        slowed(checkpointer, optimizer)
        with stopped(daemon(checkpointer)):
            checkpointer.save(2, a_state(2, MIB))
            the_arena(checkpointer).set_pace(1, 0)  # it has lapsed
            optimizer.step()
            assert the_arena(checkpointer).pace() == LEAST
