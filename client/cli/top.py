"""The writer daemons of this machine, observed through ``/proc`` and the logs of their runs.

Daemons are not asked, so one that hangs is shown too. A run directory whose storage does not answer
delays one update by two seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from sidesave.client.runs.finding import catalog_of
from sidesave.errors import SidesaveError
from sidesave.writer_daemon.format.names import LEASE_DIRECTORY, parse_hidden_directory
from sidesave.writer_daemon.log import HISTORY_FILE, read_history
from sidesave.writer_daemon.mirror.progress import MEMORY, MEMORY_NBYTES
from sidesave.writer_daemon.save_record import SaveRecord

_MODULE: Final = "sidesave.writer_daemon"
_STORAGE_TIMEOUT_S: Final = 2.0
_MAX_EXTENTS: Final = 10_000
"""The most extents of a file that are counted; a writer creates far fewer."""
_RANK_OF_FILE: Final = re.compile(r"\.rank-(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonView:
    """One writer daemon; unknown values are None.

    Attributes:
        pid: The PID of the daemon.
        run: Its run directory.
        rank: The rank of its trainer: 0 for the daemon that holds the lease, else the launcher's
            ``RANK``.
        trainer_pid: The PID of the trainer; None once the trainer has ended and is reaped.
        trainer_lives: Whether the trainer is running.
        step: The step that is being staged or written.
        progress: The fraction of this rank's bytes passed to the disk, 0.0 to 1.0; known only while
            the file system reports unwritten parts.
        last_step: The step that was last committed in this run.
        last_commit_s: The time of that commit, in seconds since the epoch.
        uss_nbytes: Memory that only the daemon uses, without staging memory shared with a trainer.
        cpu: Cores in use since the last update.
        written_nbytes_per_s: Bytes written per second since the last update.
        mirror: The state of its mirror: ``checkpoints`` and ``nbytes`` still to be copied (once
            ``compared``), ``nbytes_per_s``, ``last_step`` and ``error``.
    """

    pid: int
    run: str | None
    rank: int | None
    trainer_pid: int | None
    trainer_lives: bool
    step: int | None
    progress: float | None
    last_step: int | None
    last_commit_s: float | None
    uss_nbytes: int | None
    cpu: float | None
    written_nbytes_per_s: float | None
    mirror: dict[str, Any] | None = None

    @property
    def last_commit_age_s(self) -> float | None:
        """Seconds since the last commit."""
        return None if self.last_commit_s is None else max(0.0, time.time() - self.last_commit_s)

    def to_json(self) -> dict[str, Any]:
        """Return the view as values for JSON."""
        return {**asdict(self), "last_commit_age_s": self.last_commit_age_s}


class Top:
    """Samples all daemons of this user repeatedly; rates are since the last sample."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, float], tuple[float, float, int | None]] = {}
        self._logs: dict[str, _RunLog] = {}

    def look(self) -> list[DaemonView]:
        """Return the running daemons, sorted by run directory and rank."""
        samples: dict[tuple[int, float], tuple[float, float, int | None]] = {}
        views: list[DaemonView] = []
        for process in _daemons():
            # it has just ended
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                key = (process.pid, process.create_time())
                samples[key] = _sample(process)
                views.append(self._view(process, self._before.get(key), samples[key]))
        self._before = samples
        runs = {view.run for view in views}
        self._logs = {run: log for run, log in self._logs.items() if run in runs}
        return sorted(
            views,
            key=lambda view: (view.run or "", -1 if view.rank is None else view.rank, view.pid),
        )

    def _view(
        self,
        process: psutil.Process,
        before: tuple[float, float, int | None] | None,
        now: tuple[float, float, int | None],
    ) -> DaemonView:
        files = _open_files(process.pid)
        run = _run_of(process.pid, files)
        log = (
            _RunLog(run) if run is not None and run not in self._logs else self._logs.get(run or "")
        )
        if run is not None and log is not None:
            self._logs[run] = log
            log.read()
        step, progress = _being_written(process.pid, files)
        if step is None and log is not None:
            step = log.under_way
        trainer, lives = _trainer_of(process, files)
        cpu, rate = _rates(before, now)
        return DaemonView(
            pid=process.pid,
            run=run,
            rank=_rank_of(process, files),
            trainer_pid=trainer,
            trainer_lives=lives,
            step=step,
            progress=progress,
            last_step=None if log is None else log.last_step,
            last_commit_s=None if log is None else log.last_commit_s,
            uss_nbytes=_uss_of(process),
            cpu=cpu,
            written_nbytes_per_s=rate,
            mirror=_mirror_of(process.pid, files),
        )


def _daemons() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real != os.getuid():
                continue
            command = process.cmdline()
            if any(pair == ("-m", _MODULE) for pair in itertools.pairwise(command)):
                yield process


def _sample(process: psutil.Process) -> tuple[float, float, int | None]:
    """Return the time, the CPU seconds used, and the bytes written (None if unknown)."""
    times = process.cpu_times()
    try:
        nbytes = process.io_counters().write_bytes
    except psutil.AccessDenied:
        nbytes = None
    return time.monotonic(), times.user + times.system, nbytes


def _rates(
    before: tuple[float, float, int | None] | None, now: tuple[float, float, int | None]
) -> tuple[float | None, float | None]:
    if before is None or now[0] <= before[0]:
        return None, None
    seconds = now[0] - before[0]
    nbytes = None if before[2] is None or now[2] is None else (now[2] - before[2]) / seconds
    return (now[1] - before[1]) / seconds, nbytes


def _uss_of(process: psutil.Process) -> int | None:
    try:
        return process.memory_full_info().uss
    except psutil.AccessDenied:
        return None


# Descriptors --------------------------------------------------------------------------------------


def _open_files(pid: int) -> dict[int, str]:
    """Return the descriptors of a process, ascending, and their targets."""
    targets: dict[int, str] = {}
    try:
        numbers = sorted(map(int, os.listdir(f"/proc/{pid}/fd")))
    except PermissionError:
        return targets
    for number in numbers:
        with contextlib.suppress(OSError):
            targets[number] = os.readlink(f"/proc/{pid}/fd/{number}")
    return targets


def _run_of(pid: int, files: dict[int, str]) -> str | None:
    """Return the run directory, which a daemon keeps open, with its log and perhaps its lease.

    A daemon that uses its fallback directory has that open too, but opened it later and has no log
    there.
    """
    for target in files.values():
        if target.endswith(f"/{HISTORY_FILE}"):
            return os.path.dirname(target)
    for number, target in files.items():
        if _flags(pid, number) & os.O_DIRECTORY:  # no stat(2): storage may hang
            return target
    return None


def _rank_of(process: psutil.Process, files: dict[int, str]) -> int | None:
    """Return 0 for the lease's holder (rank 0), else the rank in an open file's name, or RANK."""
    for number, target in files.items():
        if (
            f"/{LEASE_DIRECTORY}/" in target
            and _flags(process.pid, number) & os.O_ACCMODE == os.O_RDWR
        ):
            return 0  # daemons of other ranks only read the lease
    for _, target in _partial_files(files):
        match = _RANK_OF_FILE.search(os.path.basename(target))
        if match is not None:
            return int(match[1])
    try:
        return int(process.environ()["RANK"])
    except (psutil.AccessDenied, KeyError, ValueError):
        return None


def _trainer_of(process: psutil.Process, files: dict[int, str]) -> tuple[int | None, bool]:
    """Return PID and liveness of the trainer, from the daemon's pidfd.

    The pidfd has the PID until the trainer is reaped.
    """
    for number, target in files.items():
        if "pidfd" in target:
            match = re.search(
                r"^Pid:\s*(-?\d+)$", _descriptor_facts(process.pid, number), re.MULTILINE
            )
            pid = int(match[1]) if match else -1
            if pid > 0:
                with contextlib.suppress(psutil.NoSuchProcess):
                    return pid, psutil.Process(pid).status() not in (
                        psutil.STATUS_ZOMBIE,
                        psutil.STATUS_DEAD,
                    )
    return None, False


def _descriptor_facts(pid: int, number: int) -> str:
    try:
        return Path(f"/proc/{pid}/fdinfo/{number}").read_text()
    except OSError:
        return ""


def _flags(pid: int, number: int) -> int:
    match = re.search(r"^flags:\s*([0-7]+)$", _descriptor_facts(pid, number), re.MULTILINE)
    return int(match[1], 8) if match else 0


def _mirror_of(pid: int, files: dict[int, str]) -> dict[str, Any] | None:
    """Return the state of the mirror that the daemon publishes in a memory file."""
    for number, target in files.items():
        if target.startswith(f"/memfd:{MEMORY} "):
            with (
                contextlib.suppress(OSError, ValueError),
                open(f"/proc/{pid}/fd/{number}", "rb") as file,
            ):
                return json.loads(file.read(MEMORY_NBYTES))
    return None


def _partial_files(files: dict[int, str]) -> Iterator[tuple[int, str]]:
    """Yield the open files of unfinished checkpoints."""
    for number, target in files.items():
        hidden = parse_hidden_directory(os.path.basename(os.path.dirname(target)))
        if hidden is not None:
            yield number, target


def _being_written(pid: int, files: dict[int, str]) -> tuple[int | None, float | None]:
    """Return the step whose files are open, and the written fraction of the reserved space."""
    done = total = 0
    step: int | None = None
    for number, target in _partial_files(files):
        hidden = parse_hidden_directory(os.path.basename(os.path.dirname(target)))
        assert hidden is not None
        step = hidden[0]
        with contextlib.suppress(OSError):
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                written, nbytes = _written(fd)
            finally:
                os.close(fd)
            done, total = done + written, total + nbytes
    return step, done / total if done < total else None


def _written(fd: int) -> tuple[int, int]:
    """Return the written bytes of a file and its size; reserved but unwritten space is a hole."""
    nbytes, offset, data = os.fstat(fd).st_size, 0, 0
    for _ in range(_MAX_EXTENTS):
        try:
            begin = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError:  # only holes from here on
            break
        offset = os.lseek(fd, begin, os.SEEK_HOLE)
        data += offset - begin
        if offset >= nbytes:
            break
    return min(data, nbytes), nbytes


# Logs ---------------------------------------------------------------------------------------------


class _RunLog:
    """The log of a run, read again after each change, in a thread because storage may hang."""

    def __init__(self, run: str) -> None:
        self.under_way: int | None = None
        self.last_step: int | None = None
        self.last_commit_s: float | None = None
        self._run = run
        self._catalog = catalog_of(run)
        self._version: tuple[int, int, int] | None = None
        self._reading: threading.Thread | None = None

    def read(self) -> None:
        """Update within two seconds, or keep the old values until storage answers."""
        if self._reading is None or not self._reading.is_alive():
            self._reading = threading.Thread(target=self._read, name="sidesave-top", daemon=True)
            self._reading.start()
            self._reading.join(_STORAGE_TIMEOUT_S)

    def _read(self) -> None:
        with contextlib.suppress(OSError, SidesaveError):
            facts = os.stat(f"{self._run}/{HISTORY_FILE}")
            version = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
            if version == self._version:
                return
            records = read_history(self._run)
            self._version = version
            open_steps = [record.step for record in records if record.outcome == "saving"]
            self.under_way = open_steps[0] if open_steps else None
            committed = max(
                filter(_is_committed, records),
                key=lambda record: record.sequence or 0,
                default=None,
            )
            if committed is not None and committed.called_s is not None:
                self.last_step = committed.step
                self.last_commit_s = committed.called_s + (committed.committed_s or 0.0)
            else:
                self._scan()

    def _scan(self) -> None:
        checkpoints = self._catalog.all()
        if checkpoints:
            self.last_step, self.last_commit_s = checkpoints[-1].step, checkpoints[-1].created_s


def _is_committed(record: SaveRecord) -> bool:
    return record.outcome in ("committed", "recovered")
