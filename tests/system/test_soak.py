"""Thousands of saves whose structures and sizes change, with daemons that die and saves that fail:
nothing grows.
"""

import gc
import os
import shutil
import signal
import statistics
import threading
from collections.abc import Callable
from pathlib import Path

import campaigns
import psutil
import pytest
import torch
from trainers import DEADLINE_S, Orders, Traces, entries, staging_memory

import sidesave
from sidesave.errors import CheckpointExistsError, NoSpaceError
from sidesave.writer_daemon.writing.writer import IN_FLIGHT

STRUCTURES = 10
"""More than there are places for plans, so that plans are made again and again."""
LARGEST_NBYTES = 8 << 20
"""Of one state: the C library may or may not have given that much back at any moment. A daemon that
has shortened the history once keeps half of that, too.
"""


def state_of(step: int) -> dict[str, object]:
    """States of ten structures in turn, which grow for a while and then shrink, from 8 KiB to 8
    MiB.
    """
    kind = step % STRUCTURES
    count = 1 << (10 + min(kind, STRUCTURES - kind) * 2 - (kind > 5))
    layers = {
        f"layer{number}": torch.full((count // (kind + 1),), float(step + number))
        for number in range(kind + 1)
    }
    return {
        f"model{kind}": layers,
        "optimizer": {"m": torch.full((count,), float(step))},
        "step": step,
    }


def check(path: os.PathLike[str], step: int) -> None:
    def leaves(state: object) -> list[object]:
        return (
            [leaf for item in state.values() for leaf in leaves(item)]
            if isinstance(state, dict)
            else [state]
        )

    loaded, saved = sidesave.load(path), state_of(step)
    assert loaded.keys() == saved.keys()
    for one, other in zip(leaves(loaded), leaves(saved), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def written_nbytes(process: psutil.Process) -> int:
    """Memory that is a process's own and that it has written to, but for staging memory.

    The rest of its unshared memory (USS) says less: pages of a library count while nobody else has
    that library open, and staging memory depends on which slot held which state.
    """
    return sum(
        part.private_dirty
        for part in process.memory_maps()
        if not part.path.startswith("/memfd:sidesave")
    )


class Soak:
    """Many saves by one checkpointer, of which only the newest are kept, and what is in use
    meanwhile.
    """

    def __init__(self, run: Path, traces: Traces, orders: Orders) -> None:
        self._run, self._traces, self._orders = run, traces, orders
        self._ckpt = sidesave.Checkpointer(run)
        self._step = 0
        self._kept: list[sidesave.CheckpointInfo] = []
        self.deaths = self.failures = 0

    def __enter__(self) -> "Soak":
        return self

    def __exit__(self, *_: object) -> None:
        self._ckpt.close()

    def go_on(self, saves: int, *, kill_every: int = 0, fail_every: int = 0) -> None:
        """Save this many states, two at a time; each is committed, or fails where it must."""
        handles: list[sidesave.SaveHandle] = []
        for _ in range(saves):
            self._step += 1
            if kill_every and self._step % kill_every == 0:
                self._kill()
            handles.append(self._ckpt.save(self._step, state_of(self._step)))
            if fail_every and self._step % fail_every == 0:
                # by a daemon that is there: one that cannot even start is another matter
                self._finish(handles)
                self._step += 1
                self._fail()
            if len(handles) == 2:
                self._finish(handles)
        self._finish(handles)

    def _finish(self, handles: list[sidesave.SaveHandle]) -> None:
        while handles:
            self._kept.append(handles.pop(0).committed.result(DEADLINE_S))
        for info in self._kept[:-3]:
            if info.step % 50 == 0:
                check(info, info.step)
            shutil.rmtree(info)
        del self._kept[:-3]

    def _kill(self) -> None:
        pid = self._ckpt.daemon_pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            self.deaths += 1

    def _fail(self) -> None:
        """A save that storage refuses, in one of two ways."""
        self.failures += 1
        if self.failures % 2:
            in_the_way = self._run / f"step-{self._step:08d}"
            in_the_way.mkdir()
            error = self._failure()
            in_the_way.rmdir()
            assert isinstance(error, CheckpointExistsError)
        else:
            self._orders.give("ENOSPC", keep=True)
            error = self._failure()
            self._orders.withdraw()
            while self._orders.was_obeyed():
                self._orders.obeyed()
            assert isinstance(error, NoSpaceError)

    def _failure(self) -> BaseException | None:
        error = self._ckpt.save(self._step, state_of(self._step)).committed.exception(DEADLINE_S)
        self._ckpt.wait(DEADLINE_S)
        return error

    def watch(self, saves: int, *, fail_every: int = 0) -> dict[str, float]:
        """Save this many states; the medians of what was in use after each turn of structures."""
        samples: list[dict[str, float]] = []
        for _ in range(saves // STRUCTURES):
            self.go_on(STRUCTURES, fail_every=fail_every)
            samples.append(self._in_use())
        return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}

    def _in_use(self) -> dict[str, float]:
        gc.collect()
        assert self._ckpt.daemon_pid is not None
        trainer, daemon = psutil.Process(), psutil.Process(self._ckpt.daemon_pid)
        arenas = {line.split()[4] for line in staging_memory() if not line.startswith("/proc")}
        return {
            "trainer memory": written_nbytes(trainer),
            "trainer descriptors": trainer.num_fds(),
            "trainer threads": threading.active_count(),
            "arenas": len(arenas),
            "daemon memory": written_nbytes(daemon),
            "daemon descriptors": daemon.num_fds(),
            "daemon threads": daemon.num_threads(),
            "processes": len(self._traces.processes()),
            "files of the run directory": sum(path.is_file() for path in self._run.rglob("*")),
            "entries of TMPDIR": len(list(Path(self._traces.folder).iterdir())),
        }


def assert_flat(
    early: dict[str, float], late: dict[str, float], only: Callable[[str], bool], growth_nbytes: int
) -> None:
    """The medians are no higher, save those of memory by ``growth_nbytes``, and the threads of a
    writing pool.

    The pool starts one only where none is idle: how many, up to ``IN_FLIGHT``, is for chance to
    say.
    """
    for name in filter(only, early):
        room = (
            growth_nbytes
            if name.endswith("memory")
            else IN_FLIGHT
            if name == "daemon threads"
            else 0
        )
        assert late[name] <= early[name] + room, (
            f"{name} has grown from {early[name]:,} to {late[name]:,}"
        )


@pytest.mark.slow
def test_hundred_saves_with_reshapes_deaths_and_failures_leave_everything_flat(
    run: Path, traces: Traces, orders: Orders
):
    with Soak(run, traces, orders) as soak:
        soak.go_on(20)
        early = soak.watch(20, fail_every=9)
        soak.go_on(40, kill_every=13, fail_every=9)
        late = soak.watch(20, fail_every=9)
        assert_flat(early, late, lambda name: True, 2 * LARGEST_NBYTES)
        assert soak.deaths >= 3
        assert soak.failures >= 6
    assert len(entries(run)) == 3
    traces.check()


@pytest.mark.slow(minutes=1)
def test_saves_with_reshapes_deaths_and_failures_leave_everything_flat(
    run: Path, traces: Traces, orders: Orders, capsys: pytest.CaptureFixture[str]
):
    with Soak(run, traces, orders) as soak:
        soak.go_on(campaigns.length(200))
        early = soak.watch(campaigns.length(300), fail_every=37)
        soak.go_on(campaigns.length(1000), kill_every=19, fail_every=37)
        new_daemon = soak.watch(campaigns.length(300), fail_every=37)
        soak.go_on(campaigns.length(900), fail_every=37)
        late = soak.watch(campaigns.length(300), fail_every=37)
        assert_flat(early, late, lambda name: not name.startswith("daemon"), LARGEST_NBYTES)
        assert_flat(new_daemon, late, lambda name: name.startswith("daemon"), LARGEST_NBYTES)
        assert soak.deaths >= campaigns.length(45)
        assert soak.failures >= campaigns.length(70)
    assert len(entries(run)) == 3
    traces.check()
    with capsys.disabled():
        trainer = late["trainer memory"] - early["trainer memory"]
        daemon = late["daemon memory"] - new_daemon["daemon memory"]
        print(
            f"\n{campaigns.length(3000):,} saves of {STRUCTURES} structures, {soak.deaths} daemons "
            f"killed, {soak.failures} saves refused: memory of the trainer {trainer / 2**10:+,.0f} "
            f"KiB, of the daemon {daemon / 2**10:+,.0f} KiB; descriptors, threads, arenas and "
            "files as at the start"
        )
