"""The checks of ``sidesave doctor`` in a directory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from sidesave.client.cli.finding import Finding, Verdict, gb, run
from sidesave.stager.memory.arena import PAGE, madvise
from sidesave.stager.system_calls import CALLS, REFUSED, usable_cpus
from sidesave.writer_daemon.storage import PosixStorage
from sidesave.writer_daemon.storage.posix import RENAME_NOREPLACE, renameat2

_MIB: Final = 1 << 20
_START_LIMIT_S: Final = 5.0
_ANSWER_TIMEOUT_S: Final = 60.0
_NETWORK: Final = re.compile(
    "9p|afs|beegfs|ceph|cifs|fuse.*|glusterfs|gpfs|lustre|nfs4?|smb3|virtiofs"
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def examine_directory(directory: Path, scratch: Path) -> Iterator[Finding]:
    """Check ``directory``, in a temporary subdirectory ``scratch``."""
    another = "put the run directory on another file system"
    yield from run("directory", partial(_file_system, directory.resolve()), another)
    yield from run("system calls", partial(_system_calls, scratch), another)
    yield from run(
        "file locks",
        partial(_file_locks, scratch),
        "mount with locks (Lustre: -o flock); " + another,
    )
    yield from run("direct I/O", partial(_direct_io, scratch), another)
    yield from run("preallocation", partial(_preallocation, scratch), another)
    yield from run("space", partial(_space, scratch), another)
    yield from run("disk speed", partial(_disk_speed, scratch), "free some space, or " + another)
    yield from run(
        "daemon",
        partial(_daemon, scratch),
        "see the checks above; Checkpointer raises the same error",
    )


def _file_system(directory: Path) -> Iterator[Verdict]:
    kind, source = _mount(directory)
    detail = f"{directory} is on {kind} ({source})"
    if kind in ("tmpfs", "ramfs"):
        yield "warn", f"{detail}: in memory, gone with a reboot", "choose a directory on a disk"
    elif kind == "overlay":
        yield (
            "warn",
            f"{detail}: it may be a container's own layer and go with the container",
            "mount a volume",
        )
    elif _NETWORK.fullmatch(kind):
        remedy = (
            "measure a save and a load; after the crash of another host its runs are free only "
            "after 3 minutes"
        )
        yield (
            "warn",
            f"{detail}: a network or user-space file system, on which sidesave is little tested",
            remedy,
        )
    else:
        yield "ok", detail, ""


def _mount(directory: Path) -> tuple[str, str]:
    """Return type and source of the file system of ``directory``."""
    best, mount = Path("/"), ("unknown", "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4]))
        # the later of two mounts
        if directory.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, mount = point, (right.split()[0], right.split()[1])
    return mount


def _system_calls(scratch: Path) -> Iterator[Verdict]:
    """Try each system call of the list from which error messages are made."""
    refused: list[Verdict] = []
    for name, attempt in system_call_attempts(scratch):
        call = CALLS[name]
        try:
            attempt()
        except (OSError, psutil.Error) as error:
            if isinstance(error, OSError) and error.errno not in REFUSED:
                continue
            detail = f"{name} is refused: it {call.purpose}"
            refused.append(
                ("warn", f"{detail}; without it {call.without}", call.remedy)
                if call.without
                else ("fail", detail, call.remedy)
            )
    yield from refused or [("ok", f"all {len(CALLS)} that sidesave uses are allowed", "")]


def system_call_attempts(scratch: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a use of each call in the list, in an order that works, with files in ``scratch``."""
    me = psutil.Process()
    yield "memfd_create", lambda: os.close(os.memfd_create("sidesave"))
    yield "pidfd_open", lambda: os.close(os.pidfd_open(os.getpid()))
    yield "eventfd2", lambda: os.close(os.eventfd(0))
    yield "socketpair", lambda: [end.close() for end in socket.socketpair()]
    yield "pidfd_send_signal", lambda: signal.pidfd_send_signal(-1, 0)
    yield "setsid", lambda: subprocess.run(["true"], start_new_session=True, check=True)
    yield "madvise", lambda: _raise(madvise(0, 0, 0))
    yield "sched_getaffinity", lambda: os.sched_getaffinity(0)
    yield "sched_setaffinity", lambda: os.sched_setaffinity(0, usable_cpus())
    yield "setpriority", lambda: me.nice(me.nice())
    yield (
        "prlimit64",
        lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)
        ),
    )
    directory = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    file = os.open("calls", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, dir_fd=directory)
    fds = {"src_dir_fd": directory, "dst_dir_fd": directory}
    try:
        yield "flock", lambda: fcntl.flock(file, fcntl.LOCK_UN)
        yield "fstatfs", lambda: os.fstatvfs(file)
        yield (
            "fallocate",
            lambda: _raise(ctypes.get_errno() if _libc.fallocate(file, 0, 0, PAGE) else 0),
        )
        yield "pwrite64", lambda: os.pwrite(file, b"x", 0)
        yield "preadv", lambda: os.preadv(file, [bytearray(1)], 0)
        yield "ftruncate", lambda: os.ftruncate(file, 1)
        yield "fsync", lambda: os.fsync(file)
        yield "linkat", lambda: os.link("calls", "linked", **fds, follow_symlinks=False)
        yield (
            "renameat2",
            lambda: _raise(renameat2(directory, "calls", "renamed", RENAME_NOREPLACE)),
        )
        yield "mkdirat", lambda: os.mkdir("directory", dir_fd=directory)
        yield "fchmodat", lambda: os.chmod("directory", 0o700, dir_fd=directory)
        yield "renameat", lambda: os.rename("directory", "other", **fds)
        yield "unlinkat", lambda: os.rmdir("other", dir_fd=directory)
    finally:
        os.close(file)
        os.close(directory)


def _raise(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))


def _file_locks(scratch: Path) -> Iterator[Verdict]:
    path = scratch / "lock"
    with path.open("w") as one, path.open("w") as other:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield "ok", "a second writer is kept out", ""
        else:
            yield (
                "fail",
                "a file can be locked twice, so a run in use cannot be detected",
                "mount it with file locks",
            )


def _direct_io(scratch: Path) -> Iterator[Verdict]:
    try:
        fd = os.open(scratch / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        with os.fdopen(fd, "wb", buffering=0), mmap.mmap(-1, PAGE) as page:
            os.pwrite(fd, page, 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        yield (
            "warn",
            "not taken; writes go through the page cache",
            "expect slower saves; ext4 and XFS take O_DIRECT",
        )
    else:
        yield "ok", "an aligned O_DIRECT write is taken", ""


def _preallocation(scratch: Path) -> Iterator[Verdict]:
    with (scratch / "reserved").open("wb") as file:
        if _libc.fallocate(file.fileno(), 0, 0, _MIB) == 0:
            yield "ok", "fallocate reserves space before the first byte", ""
            return
    why = f"no fallocate ({os.strerror(ctypes.get_errno())})"
    yield (
        "warn",
        f"{why}: a full disk shows only while writing",
        "watch the free space; ext4 and XFS can reserve it",
    )


def _space(scratch: Path) -> Iterator[Verdict]:
    facts = os.statvfs(scratch)
    free, total = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    # btrfs and others have no such limit
    inodes = f", {facts.f_favail:,} inodes" if facts.f_files else ""
    detail = f"{gb(free)} of {gb(total)} free{inodes}"
    if free < 10 * 10**9 or (facts.f_files and facts.f_favail < 10_000):
        yield (
            "warn",
            detail,
            "free some: a checkpoint takes the size of the state, and about ten files a rank",
        )
    else:
        yield "ok", detail, ""


def _disk_speed(scratch: Path) -> Iterator[Verdict]:
    """Measure like the daemon writes and the loader reads: direct I/O, four pieces at a time."""
    from sidesave.client.planning import PIECE_NBYTES, speed_of, write_speed

    storage = PosixStorage(str(scratch))

    def read(offset: int) -> None:
        with storage.open("speed") as source:
            source.read_at(offset, PIECE_NBYTES)

    with contextlib.closing(storage):
        wrote, was_read = write_speed(storage, "speed") / 1e9, speed_of(read) / 1e9
    detail = f"{wrote:.2f} GB/s written and synced, {was_read:.2f} GB/s read"
    if wrote < 0.2:
        detail += f": 100 GB take {100 / wrote / 60:,.0f} minutes"
        yield "warn", detail, "training goes on meanwhile; save less often, or to a faster disk"
    else:
        yield "ok", detail, ""


def _daemon(scratch: Path) -> Iterator[Verdict]:
    import torch

    from sidesave.client.checkpointer import Checkpointer
    from sidesave.writer_daemon.options import DaemonOptions

    state = {"tensor": torch.zeros(1 << 20, device="cpu")}
    started = time.monotonic()
    with Checkpointer(
        scratch / "run", daemon=DaemonOptions(stall_timeout_s=_ANSWER_TIMEOUT_S)
    ) as checkpointer:
        up = time.monotonic()
        checkpointer.save(0, state).committed.result(_ANSWER_TIMEOUT_S)
        saved = time.monotonic()
    detail = f"up in {up - started:.2f} s; 4 MB saved and committed in {saved - up:.3f} s"
    if up - started > _START_LIMIT_S:
        yield "warn", detail, "starting Python is slow here: keep the environment on a local disk"
    else:
        yield "ok", detail, ""
