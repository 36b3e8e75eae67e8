"""Ctrl-C at any moment, and threads and callbacks that end as they should not: the next calls work,
nothing is left.

The campaign of real signals runs for one minute, or three.
"""

import contextlib
import ctypes
import gc
import logging
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy.ma  # noqa: F401 - an interrupt during its import, in torch, would leave a file open
import psutil
import pytest
import torch
from campaigns import Share
from interrupts import Interrupts, dropped_by_python, free_loggers
from row_tables import GrowingTable
from states import held
from trainers import DEADLINE_S, Traces, daemon, save, stopped, wait_until

import sidesave
from sidesave.client.daemon_link.connection import Connection
from sidesave.client.reading import block_io
from sidesave.client.runs.finding import catalog_of
from sidesave.errors import (
    ClosedError,
    DaemonDiedError,
    DirectoryInUseError,
    SidesaveError,
    StagingError,
)
from sidesave.stager import signal_safe
from sidesave.stager.copy.copier import StagingCopy
from sidesave.stager.copy.device_copy import DeviceCopy
from sidesave.stager.devices import device
from sidesave.stager.memory.arena import Arena
from sidesave.stager.signal_safe import Worker

# Of a file whose `with` was interrupted before it began: Python closes it, with this warning.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed (file|scandir iterator):ResourceWarning")


@pytest.fixture
def run(run: Path, traces: Traces) -> Iterator[Path]:
    """A run directory, whose daemons and sockets are gone in the end."""
    yield run
    traces.check()


class Subject:
    """A checkpointer with one slot, its calls, and what has to hold after each, however it was
    left.
    """

    def __init__(self, run: Path) -> None:
        self.ckpt = sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=1))
        self.state: dict[str, Any] = {
            "model": torch.nn.Linear(3, 3),
            "w": torch.arange(256.0),
            "into": torch.zeros(9),
        }
        self.large = {"w": torch.zeros(1 << 22)}
        self.table = GrowingTable()
        self.shared = {
            "users": self.table,
            "base": sidesave.Frozen(torch.nn.Linear(90, 90).requires_grad_(False)),
        }
        self.step = 0

    def save(self, *, blocking: bool = False) -> sidesave.SaveHandle:
        self.step += 1
        return self.ckpt.save(self.step, self.state, blocking=blocking)

    def save_large(self) -> None:
        self.step += 1
        self.ckpt.save(self.step, self.large)

    def save_blocking(self) -> None:
        self.save(blocking=True)

    def save_rows(self) -> None:
        """And what is frozen: the first time all of it, then what has changed."""
        self.step += 1
        self.ckpt.save(self.step, self.shared, blocking=True)

    def wait(self) -> None:
        self.save()
        self.ckpt.wait()

    def load(self) -> None:
        self.ckpt.load(into={"model": self.state["model"], "w": self.state["w"]}, strict=False)

    def check(self) -> None:
        """Another thread saves and waits, and so does this one; nothing is taken, held or under
        way.
        """
        free_loggers()
        self.table.train(range(self.step, self.step + 3))
        other = threading.Thread(target=self.wait, daemon=True)
        other.start()
        other.join(DEADLINE_S)
        assert not other.is_alive(), "a lock is held"
        self.save().committed.result(DEADLINE_S)
        self.ckpt.wait(DEADLINE_S)
        assert [slot.owner for slot in self.ckpt.session.pool._slots] == [None]
        assert not self.ckpt.session.saves._open
        assert not self.ckpt.session.history._under_way
        assert torch.is_grad_enabled()
        assert gc.isenabled()
        assert not device.exclusion()._is_owned()  # type: ignore[attr-defined]


# torch's own, of one whose making was interrupted
HALF_MADE = pytest.mark.filterwarnings(
    "ignore:.*StorageWeakRef.__del__:pytest.PytestUnraisableExceptionWarning"
)

CALLS = ["save", "save_large", "save_blocking", "save_rows", "wait", "load"]


Choice = Callable[[range], Iterable[int]]
"""Which of the points of a call are interrupted."""


def _spread(count: int) -> Choice:
    """Choose ``count`` points, evenly spread."""
    return lambda points: points[:: max(1, len(points) // count)]


def interrupt_at_every(subject: Subject, call: Callable[[], object], choose: Choice) -> None:
    """Interrupt ``call`` at those of its points that are chosen."""
    subject.check()
    counting = Interrupts()
    counting.run(call)
    subject.check()
    hits = tries = 0
    for at in choose(range(1, counting.count)):
        tries += 1
        interrupts = Interrupts(at)
        try:
            interrupts.run(call)
        except KeyboardInterrupt:
            hits += 1
        try:
            subject.check()
        except BaseException as error:
            error.add_note(f"after an interrupt at point {at}: {interrupts.where}")
            raise
    assert hits or tries < 8, "nothing was interrupted"


@HALF_MADE
@pytest.mark.drawn
@pytest.mark.parametrize("name", CALLS)
def test_a_call_interrupted_at_any_point_leaves_nothing(run: Path, name: str):
    subject = Subject(run)
    interrupt_at_every(subject, getattr(subject, name), _spread(24))
    subject.ckpt.close()


@HALF_MADE
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_interrupted_at_every_point_leaves_nothing(run: Path, share: Share, name: str):
    subject = Subject(run)
    interrupt_at_every(subject, getattr(subject, name), share.points)
    subject.ckpt.close()


def _there() -> tuple[list[str], list[str], list[str]]:
    """The children, threads and open files of this process."""
    links: list[str] = []
    for each in Path("/proc/self/fd").iterdir():
        # a thread has closed it meanwhile, as this list has its own
        with contextlib.suppress(FileNotFoundError):
            links.append(re.sub(r"\d+", "", str(each.readlink())))  # a new socket may replace one
    return (
        ["child" for _ in psutil.Process().children()],
        [t.name for t in threading.enumerate()],
        links,
    )


def _await_nothing_left(
    before: tuple[list[str], list[str], list[str]], interrupts: Interrupts
) -> None:
    # less is no matter: something of a test before this one may end meanwhile
    def is_as_before() -> bool:
        return not any(
            Counter(now) - Counter(then) for now, then in zip(_there(), before, strict=True)
        )

    if not is_as_before():
        gc.collect()  # an interrupt may have left a cycle of frames
    try:
        wait_until(is_as_before, "nothing is left")
    except AssertionError as error:
        error.add_note(
            f"of an interrupt at {interrupts.count}, {interrupts.where}: before {before}, after "
            f"{_there()}"
        )
        raise


def _interrupt_ends(run: Path, choose: Choice) -> None:
    save(run, {"w": torch.zeros(9)})
    gc.collect()
    before = _there()

    def end(interrupts: Interrupts) -> None:
        ckpt = sidesave.Checkpointer(run)
        ckpt.save(2, {"w": torch.zeros(9)}, overwrite=True)
        with contextlib.suppress(KeyboardInterrupt):
            interrupts.run(ckpt.close)
        ckpt.close()
        with pytest.raises(ClosedError):
            ckpt.save(3, {})

    def begin(interrupts: Interrupts) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            interrupts.run(lambda: sidesave.Checkpointer(run)).close()

    for action in (begin, end):
        counting = Interrupts()
        action(counting)
        for at in choose(range(1, counting.count)):
            interrupts = Interrupts(at)
            action(interrupts)
            _await_nothing_left(before, interrupts)
    save(run, {"w": torch.zeros(9)}, 4)


def test_a_start_or_an_end_interrupted_at_any_point_leaves_no_daemon_thread_or_descriptor(
    run: Path,
):
    _interrupt_ends(run, _spread(3))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_start_or_an_end_interrupted_at_many_points_leaves_no_daemon_thread_or_descriptor(
    run: Path, share: Share
):
    _interrupt_ends(run, lambda points: share.points(points, part=0.5))


def _reading(run: Path) -> dict[str, Callable[[], object]]:
    step = run / "step-00000001"
    return {
        "load": lambda: sidesave.load(step),
        "load_into": lambda: sidesave.load(step, into={"w": torch.zeros(1 << 20)}, strict=False),
        "steps": lambda: catalog_of(str(run)).all(),
        "history": lambda: sidesave.history(run),
        "verify": lambda: sidesave.verify(step),
    }


def _interrupt_reading(run: Path, name: str, choose: Choice) -> None:
    save(run, {"w": torch.zeros(1 << 20), "model": torch.nn.Linear(3, 3), "plain": [1, 2]})
    call = _reading(run)[name]
    counting = Interrupts()
    call()
    counting.run(call)
    gc.collect()
    before = _there()
    for at in choose(range(1, counting.count)):
        interrupts = Interrupts(at)
        with contextlib.suppress(KeyboardInterrupt):
            interrupts.run(call)
        _await_nothing_left(before, interrupts)


READING = ["load", "load_into", "steps", "history", "verify"]


@pytest.mark.drawn
@pytest.mark.parametrize("name", READING)
def test_reading_interrupted_at_any_point_leaves_no_descriptor_or_thread(run: Path, name: str):
    _interrupt_reading(run, name, _spread(12))


@pytest.mark.slow
@pytest.mark.parametrize("name", READING)
def test_reading_interrupted_at_many_points_leaves_no_descriptor_or_thread(
    run: Path, share: Share, name: str
):
    _interrupt_reading(run, name, share.points)


class _Interrupter:
    """Sends SIGINT to this process at a chosen moment of a call; only the call itself is
    interrupted.
    """

    def __init__(self) -> None:
        self._armed = False
        self._before: Any = None

    def __enter__(self) -> "_Interrupter":
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: object) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt

    def interrupt(self, call: Callable[[], object], delay_s: float) -> bool:
        def fire() -> None:
            time.sleep(delay_s)  # the moment is what the campaign samples
            os.kill(os.getpid(), signal.SIGINT)

        firing = threading.Thread(target=fire)
        firing.start()
        try:
            self._armed = True
            call()
            self._armed = False
        except KeyboardInterrupt:
            return True
        finally:
            firing.join()
        return False


def test_an_interrupted_load_leaves_when_nothing_is_read_into_its_tensors_any_more(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    save(run, {str(n): torch.ones(1 << 20) for n in range(40)})
    read_piece, run_all = block_io._LocalSource.read, signal_safe.run_all
    entered, stopped = threading.Event(), threading.Event()
    begun: list[int] = []
    ended: list[int] = []

    def held(*arguments: Any, **options: Any) -> int:
        begun.append(1)
        entered.set()
        assert stopped.wait(DEADLINE_S)
        time.sleep(0.05)  # somebody who did not wait would be gone
        ended.append(1)
        return read_piece(*arguments, **options)

    def interrupted(call: object) -> None:
        assert entered.wait(DEADLINE_S)
        raise KeyboardInterrupt

    def run_noting(
        works: Iterable[Callable[[], Any]], name: str, stop: Callable[[], object]
    ) -> Any:
        monkeypatch.setattr(signal_safe._Call, "result", interrupted)
        return run_all(works, name, lambda: (stop(), stopped.set()))

    monkeypatch.setattr(block_io._LocalSource, "read", held)
    monkeypatch.setattr(signal_safe, "run_all", run_noting)
    into = {str(n): torch.zeros(1 << 20) for n in range(40)}
    with pytest.raises(KeyboardInterrupt):
        sidesave.load(run / "step-00000001", into=into)
    assert len(ended) == len(begun) < 40, (
        "what is waiting to be read is dropped, and what is being read is awaited"
    )


def _campaign(run: Path, seed: int, seconds: float) -> None:
    rng = random.Random(seed)
    subject = Subject(run)
    subject.check()
    until = time.monotonic() + seconds
    tried = hits = 0
    with dropped_by_python(KeyboardInterrupt), _Interrupter() as interrupter:
        while time.monotonic() < until or not hits:
            name = rng.choice([*CALLS, "close", "start"])
            began = tried
            delay_s = rng.random() * {"start": 0.3, "close": 0.05, "save": 0.002}.get(name, 0.02)
            tried += 1
            try:
                if name == "start":
                    subject.ckpt.close()
                    hits += interrupter.interrupt(
                        lambda: setattr(subject, "ckpt", _open(run)), delay_s
                    )
                    if subject.ckpt.session.ended:
                        subject.ckpt = _open(run)
                elif name == "close":
                    subject.save()
                    hits += interrupter.interrupt(subject.ckpt.close, delay_s)
                    subject.ckpt.close()
                    subject.ckpt = _open(run)
                else:
                    hits += interrupter.interrupt(getattr(subject, name), delay_s)
                subject.check()
            except BaseException as error:
                error.add_note(
                    f"seed {seed}, try {began}: {name} interrupted after {delay_s:.6f} s"
                )
                raise
    subject.ckpt.close()
    assert hits


def _open(run: Path) -> sidesave.Checkpointer:
    return sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=1))


def test_a_real_interrupt_leaves_nothing(run: Path):
    _campaign(run, 1, 3.0)


@pytest.mark.slow(minutes=3)
def test_a_campaign_of_real_interrupts_leaves_nothing(run: Path, share: Share):
    _campaign(run, share.chance.randrange(1 << 30), share.seconds)


def test_a_start_interrupted_at_its_very_end_leaves_when_the_daemon_is_gone(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    give_up = Connection.give_up_starting
    pids: list[int] = []

    def slowly(connection: Connection, timeout_s: float) -> None:
        pid = connection.pid
        assert pid is not None
        pids.append(pid)
        stack.enter_context(stopped(pid))
        threading.Timer(0.5, stack.close).start()
        give_up(connection, timeout_s)
        connection._thread.join(0.2)  # as where the main thread is held up in between

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with contextlib.ExitStack() as stack, monkeypatch.context() as patched:
        patched.setattr(Connection, "give_up_starting", slowly)
        patched.setattr("sidesave.client.checkpointer.Saver", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sidesave.Checkpointer(run)
    assert len(pids) == 1
    save(run, {"w": torch.zeros(9)})


def test_a_start_waits_for_the_daemon_that_an_interrupted_close_has_left(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    ckpt = sidesave.Checkpointer(run)
    ckpt.save(1, {"w": torch.zeros(9)}, blocking=True)
    pid = daemon(ckpt)

    def interrupted(timeout_s: float | None = None) -> None:
        raise KeyboardInterrupt

    with stopped(pid):
        monkeypatch.setattr(ckpt.session.saves, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.close()
        with pytest.raises(DirectoryInUseError, match="of this process"):
            sidesave.Checkpointer(run, daemon=sidesave.DaemonOptions(takeover_timeout_s=0.1))
    with sidesave.Checkpointer(run) as ckpt:
        assert ckpt.steps() == [1]


# Callbacks and threads ----------------------------------------------------------------------------


def _owned() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.zeros(1 << 16))
    return {"weight": weight, "optimizer": torch.optim.SGD([weight], lr=0.1)}


@pytest.mark.drawn
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError])
@pytest.mark.parametrize("phase", ["staged", "written", "committed", "deleted"])
def test_a_callback_that_raises_anything_ends_no_thread(
    run: Path, caplog: pytest.LogCaptureFixture, kind: type[BaseException], phase: str
):
    def callback(_: object) -> None:
        raise kind(1)

    called: list[object] = []
    state = _owned()
    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(overlap=True)) as ckpt:
        ckpt.save(1, state, blocking=True)
        ckpt.save(2, state, blocking=True)
        with held(ckpt):
            handle = ckpt.save(3, state)
            future = ckpt.delete(1) if phase == "deleted" else getattr(handle, phase)
            future.add_done_callback(callback)
            future.add_done_callback(called.append)
        wait_until(lambda: called, "the callback behind it is called")
        ckpt.save(4, state).committed.result(DEADLINE_S)
        ckpt.wait(DEADLINE_S)
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "callback" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is kind


def test_a_callback_that_ends_the_program_when_a_save_failed_ends_no_thread(run: Path):
    failed: list[BaseException | None] = []

    def callback(done: Any) -> None:
        failed.append(done.exception())
        raise SystemExit(1)

    state = _owned()
    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(overlap=True)) as ckpt:
        with held(ckpt):
            handle = ckpt.save(1, state)
            handle.committed.add_done_callback(callback)
            state["weight"].untyped_storage().resize_(0)
        assert isinstance(handle.committed.exception(DEADLINE_S), SidesaveError)
        ckpt.wait(DEADLINE_S)
        ckpt.save(2, _owned()).committed.result(DEADLINE_S)
    assert len(failed) == 1


def _end_thread(ident: int) -> None:
    assert (
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(ident), ctypes.py_object(SystemExit)
        )
        == 1
    )


def test_when_the_thread_of_the_connection_ends_what_is_open_fails_and_later_calls_raise(run: Path):
    ckpt = sidesave.Checkpointer(run)
    pid = daemon(ckpt)
    os.kill(pid, signal.SIGSTOP)
    try:
        handle = ckpt.save(1, {"w": torch.zeros(9)})
        ident = ckpt.session.connection._thread.ident
        assert ident is not None
        _end_thread(ident)
        assert isinstance(handle.committed.peek(DEADLINE_S), DaemonDiedError)
        with pytest.raises(DaemonDiedError, match="connection"):
            ckpt.wait(DEADLINE_S)
        later = ckpt.save(2, {"w": torch.zeros(9)})
        assert isinstance(later.committed.peek(DEADLINE_S), DaemonDiedError)
        with pytest.raises(DaemonDiedError, match="connection"):
            ckpt.save(3, {"w": torch.zeros(9)})
        ckpt.close()
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("which", ["books", "starter", "finisher"])
@pytest.mark.parametrize("at_work", [False, True])
def test_a_thread_that_stages_survives_what_would_end_it(
    run: Path, caplog: pytest.LogCaptureFixture, which: str, at_work: bool
):
    state = _owned()
    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(overlap=True)) as ckpt:
        ckpt.save(1, state).committed.result(DEADLINE_S)
        workers = {
            "books": ckpt.session.books,
            "starter": ckpt.session.copier._starter,
            "finisher": ckpt.session.copier._finisher,
        }
        worker = workers[which]
        if at_work:
            worker.submit(_refuse)
        else:
            _end_thread(worker._ident)  # which it notices when it has something to do
        with contextlib.suppress(SidesaveError):
            handle = ckpt.save(2, state)
            handle.committed.exception(DEADLINE_S)
        with contextlib.suppress(SidesaveError):
            ckpt.wait(DEADLINE_S)
        ckpt.save(3, state).committed.result(DEADLINE_S)
        ckpt.wait(DEADLINE_S)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_thread_that_is_started_for_what_another_has_done_ends():
    worker = Worker("too-late")
    worker.call(lambda: None)
    worker.close(DEADLINE_S)
    wait_until(worker.is_idle, "the first one ends")
    # As where the main thread was held up between handing something over and looking whether
    # somebody works.
    thread = threading.Thread(target=worker._work, daemon=True)
    thread.start()
    thread.join(300)
    assert not thread.is_alive()
    assert worker.call(lambda: 7) == 7


def _refuse() -> None:
    raise SystemExit


@pytest.mark.parametrize("which", ["books", "starter", "finisher", "lost"])
def test_a_save_whose_staging_ends_in_a_thread_fails_loudly(
    run: Path, monkeypatch: pytest.MonkeyPatch, which: str
):
    state: dict[str, Any] = _owned()
    with sidesave.Checkpointer(
        run, staging=sidesave.StagingOptions(overlap=which != "books", slots=1)
    ) as ckpt:
        ckpt.save(1, state, blocking=True)
        target = {
            "books": (Arena, "mark_staged"),
            "starter": (DeviceCopy, "enqueue"),
            "finisher": (DeviceCopy, "finish"),
            "lost": (StagingCopy, "finish"),
        }[which]

        def refuse(*_: object) -> None:
            monkeypatch.undo()
            raise SystemExit

        monkeypatch.setattr(*target, refuse)
        handle = ckpt.save(2, state)
        assert isinstance(handle.committed.peek(DEADLINE_S), StagingError)
        with pytest.raises(StagingError, match="SystemExit"):
            ckpt.wait(DEADLINE_S)
        for step in (3, 4, 5):
            ckpt.save(step, state).committed.result(DEADLINE_S)
        assert [slot.owner for slot in ckpt.session.pool._slots] == [None]
