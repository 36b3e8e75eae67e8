"""Two trainers on one directory, many checkpointers in one process, many threads on one
checkpointer.
"""

import contextlib
import faulthandler
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import campaigns
import pytest
from trainers import (
    DEADLINE_S,
    Orders,
    Traces,
    Trainer,
    a_state,
    check,
    entries,
    same,
    staging_memory,
)

import sidesave
from sidesave.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ClosedError,
    SidesaveError,
)


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """Whoever waits for ever is shown where."""
    faulthandler.dump_traceback_later(DEADLINE_S, file=2)
    yield
    faulthandler.cancel_dump_traceback_later()


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(DEADLINE_S + 10)
    assert [thread.name for thread in threads if thread.is_alive()] == [], "a deadlock"


# Two trainers -------------------------------------------------------------------------------------


def test_of_two_trainers_that_start_at_once_one_gets_the_directory_and_the_other_hears_who(
    run: Path, traces: Traces
):
    with contextlib.ExitStack() as stack:
        trainers = [stack.enter_context(Trainer(traces, "compete", run)) for _ in range(2)]
        for trainer in trainers:
            trainer.expect("started")
        for step in range(1, 4):
            for trainer in trainers:
                trainer.go_on()
            outcomes = {next(trainer.lines()).partition(" ")[0]: trainer for trainer in trainers}
            assert outcomes.keys() == {"won", "refused"}
            winner, loser = outcomes["won"], outcomes["refused"]
            _, saved, daemon = winner.heard[-1].split(" ")
            assert int(saved) == step, "each goes on where the one before it ended"
            for name in (f"trainer {winner.pid}", f"daemon {daemon}", str(run)):
                assert name in loser.heard[-1]
            loser.go_on()
            assert next(loser.lines()).startswith("refused"), "it stays the other's"
            if step % 2:
                winner.go_on()
                winner.expect("closed")
            else:
                winner.kill()
            winner.end()
            trainers = [loser, stack.enter_context(Trainer(traces, "compete", run))]
            trainers[1].expect("started")
        for trainer in trainers:
            trainer.kill()
    check(run, *range(1, 4))
    traces.check()


# Many checkpointers -------------------------------------------------------------------------------


def test_checkpointers_of_many_directories_save_at_once_and_keep_to_themselves(
    run: Path, traces: Traces
):
    count, saves = 6, campaigns.examples(12)

    def train(number: int) -> None:
        with sidesave.Checkpointer(f"{run}-{number}") as ckpt:
            daemons.add(ckpt.daemon_pid)
            everyone.wait(DEADLINE_S)
            for step in range(number, number + saves):
                ckpt.save(step, a_state(step))
            everyone.wait(DEADLINE_S)  # all are open up to here
            ckpt.wait(DEADLINE_S)
            assert ckpt.steps() == list(range(number, number + saves))

    daemons: set[int | None] = set()
    everyone = threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(train, number) for number in range(count)]:
            future.result(DEADLINE_S)
    assert len(daemons - {None}) == count
    for number in range(count):
        check(f"{run}-{number}", *range(number, number + saves))
    assert staging_memory() == []
    traces.check()


# Many threads -------------------------------------------------------------------------------------


class Crowd:
    """Threads that each call one thing again and again, and what became of the calls."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.faults: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def add(self, name: str, call: Callable[[], object], *allowed: type[SidesaveError]) -> None:
        """Have a thread call this until the checkpointer is closed; any error but those is a
        fault.
        """

        def work() -> None:
            try:
                while True:
                    try:
                        call()
                        self.outcomes[name] += 1
                    except ClosedError:
                        self.outcomes[f"{name} after the end"] += 1
                        return
                    except allowed as error:
                        self.outcomes[f"{name}: {type(error).__name__}"] += 1
            except BaseException as error:  # noqa: BLE001 - looked at by the test
                self.faults.append(error)

        self._threads.append(threading.Thread(target=work, name=name))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        join(self._threads)
        for fault in self.faults:
            raise fault


@pytest.mark.parametrize("slots", [1, 3])
def test_threads_that_use_one_checkpointer_at_once_lose_no_save_and_do_not_lock_up(
    run: Path, traces: Traces, slots: int
):
    steps, many = itertools.count(1), campaigns.examples(60)
    handles: list[sidesave.SaveHandle] = []
    names = ("save 0", "save 1", "save 2", "load 0", "load 1", "wait")
    enough = threading.Event()

    def save() -> None:
        step = next(steps)
        handles.append(ckpt.save(step, a_state(step, 0.2)))
        if len(handles) > many and (all(crowd.outcomes[name] for name in names) or crowd.faults):
            enough.set()

    def load() -> None:
        state = ckpt.load()
        assert same(state, a_state(state["seed"], 0.2))

    def look() -> None:
        latest = ckpt.latest_step()
        assert latest is None or latest in ckpt.steps()
        if ckpt.closed:
            raise ClosedError("these go on working")

    def wait() -> None:
        ckpt.wait(DEADLINE_S)
        if ckpt.closed:
            raise ClosedError("this goes on working")

    ckpt = sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=slots))
    crowd = Crowd()
    for number in range(3):
        crowd.add(f"save {number}", save)
    for number in range(2):
        crowd.add(f"load {number}", load, CheckpointNotFoundError)
    crowd.add("wait", wait)
    crowd.add("steps", look)
    crowd.add(
        "prepare", lambda: ckpt.prepare(a_state(0, random.choice([0.2, 1]))).result(DEADLINE_S)
    )
    crowd.start()
    assert enough.wait(DEADLINE_S)
    closers = [threading.Thread(target=ckpt.close, name=f"close {number}") for number in range(3)]
    for closer in closers:
        closer.start()
    join(closers)
    crowd.join()
    print(crowd.outcomes)
    committed = [handle.committed.result(0).step for handle in handles]
    assert len(committed) == len(set(committed)) > many
    check(run, *committed, mib=0.2)
    assert entries(run) == [f"step-{step:08d}" for step in sorted(committed)]
    assert staging_memory() == []
    traces.check()


def test_threads_that_save_the_same_step_one_of_them_does_and_the_others_are_told(run: Path):
    everyone = threading.Barrier(4)
    saved: list[int] = []

    def save(number: int) -> None:
        for step in range(12):
            everyone.wait(DEADLINE_S)
            try:
                ckpt.save(step, a_state(step, 0.1)).committed.result(DEADLINE_S)
                saved.append(step)
            except CheckpointExistsError as error:
                assert str(step) in str(error)  # noqa: PT017 - one of the two outcomes

    with sidesave.Checkpointer(run) as ckpt, ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(save, number) for number in range(4)]:
            future.result(DEADLINE_S)
    assert sorted(saved) == list(range(12))
    check(run, *range(12), mib=0.1)


def test_step_that_is_replaced_again_and_again_is_found_whole_by_whoever_reads_it(run: Path):
    versions, last = campaigns.examples(40), 0

    def read() -> None:
        while not done.is_set():
            state = sidesave.load(run / "step-00000007")
            assert same(state, a_state(state["seed"], 0.2))
            reads.append(state["seed"])

    reads: list[int] = []
    done = threading.Event()
    with sidesave.Checkpointer(run) as ckpt, ThreadPoolExecutor(2) as pool:
        ckpt.save(7, a_state(0, 0.2)).committed.result(DEADLINE_S)
        readers = [pool.submit(read) for _ in range(2)]
        try:
            while last < versions or (
                len(set(reads)) <= 3 and not any(reader.done() for reader in readers)
            ):
                last += 1
                ckpt.save(7, a_state(last, 0.2), overwrite=True).committed.result(DEADLINE_S)
        finally:
            done.set()
        for reader in readers:
            reader.result(DEADLINE_S)
    assert same(sidesave.load(run / "step-00000007"), a_state(last, 0.2))
    assert entries(run) == ["step-00000007"]


def test_close_during_a_save_of_another_thread_keeps_that_save(
    run: Path, orders: Orders, traces: Traces
):
    ckpt = sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=1))
    orders.give("hold")
    first = ckpt.save(1, a_state(1))
    orders.obeyed()
    waiting: list[sidesave.SaveHandle | ClosedError] = []

    def save() -> None:
        try:
            waiting.append(ckpt.save(2, a_state(2)))  # waits for the one slot
        except ClosedError as error:
            waiting.append(error)

    threads = [
        threading.Thread(target=save, name="save"),
        threading.Thread(target=ckpt.close, name="close"),
    ]
    for thread in threads:
        thread.start()
    orders.release()
    join(threads)
    steps = [1]
    for outcome in waiting:
        if isinstance(outcome, sidesave.SaveHandle):
            assert outcome.committed.result(0).step == 2
            steps.append(2)
    assert first.committed.result(0).step == 1
    check(run, *steps)
    traces.check()
