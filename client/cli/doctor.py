"""``sidesave doctor``: what sidesave needs of a machine and a directory, tried out where that is possible.

A check is a generator of verdicts (status, finding, remedy). What it makes goes into a temporary subdirectory, which
goes away with all in it; an ``OSError`` or an error of sidesave that it raises is its failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import importlib.metadata
import mmap
import os
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import psutil

from sidesave.errors import SidesaveError
from sidesave.stager.memory import host_memory
from sidesave.stager.memory.arena import PAGE, Arena, madvise
from sidesave.stager.system_calls import CALLS, REFUSED, usable_cpus
from sidesave.writer_daemon.storage import PosixStorage
from sidesave.writer_daemon.storage.posix import RENAME_NOREPLACE, renameat2

Status = Literal["ok", "warn", "fail"]
Verdict = tuple[Status, str, str]
Check = Callable[[], Iterator[Verdict]]

_MIB: Final = 1 << 20
_PIECE_NBYTES: Final = 16 * _MIB
_SPEED_NBYTES: Final = 256 * _MIB
_SPEED_DEADLINE_S: Final = 10.0
_SPEED_THREADS: Final = 4
_START_LIMIT_S: Final = 5.0
_ANSWER_TIMEOUT_S: Final = 60.0
_OLDEST_KERNEL: Final = (5, 3)  # pidfd_open; F_SEAL_FUTURE_WRITE is of 5.1
_OLDEST_TORCH: Final = (2, 8)
_MADV_POPULATE_WRITE: Final = 23
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC  # PROC_PID_INIT_INO in the kernel's sources
_NETWORK: Final = re.compile("9p|afs|beegfs|ceph|cifs|fuse.*|glusterfs|gpfs|lustre|nfs4?|smb3|virtiofs")
_OUTLIVE: Final = "have it live on for as long as a save takes: sh -c 'python train.py; code=$?; sleep 60; exit $code'"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a check; ``remedy`` says what to do where it is not ``"ok"``."""

    name: str
    status: Status
    finding: str
    remedy: str = ""


def examine(directory: Path) -> Iterator[Finding]:
    """Run all checks, yielding each finding as soon as it is known.

    A directory that does not exist yet is not made: its nearest existing parent is checked in its place.
    """
    yield from _run("versions", _versions, "pip install -U 'torch>=2.8'")
    yield from _run("memfd", _memfd, CALLS["memfd_create"].remedy)
    yield from _run("pidfd", _pidfd, CALLS["pidfd_open"].remedy)
    yield from _run("populate", _populate, CALLS["memfd_create"].remedy)
    yield from _run("host memory", _host_memory, "see whether /proc and /sys/fs/cgroup are mounted")
    yield from _run("/dev/shm", _shared_memory, "")
    yield from _run("memlock", _locked_memory, "")
    yield from _run("open files", _open_files, "")
    yield from _run("GPU", _gpu, "repair the torch installation: python -c 'import torch; torch.cuda.init()'")
    yield from _run("sockets", _sockets, "set TMPDIR to a writable directory whose path is shorter than 70 characters")
    yield from _survival()
    while not directory.exists():
        directory = directory.parent
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".sidesave-doctor-", dir=directory)
    except OSError as error:
        why = f"cannot write to {directory}: {error.strerror}"
        yield Finding("directory", "fail", why, "choose another directory, or have its mode, mount or quota changed")
        return
    with scratch as name:
        yield from _in_directory(directory, Path(name))


def _in_directory(directory: Path, scratch: Path) -> Iterator[Finding]:
    another = "put the run directory on another file system"
    yield from _run("directory", partial(_file_system, directory.resolve()), another)
    yield from _run("system calls", partial(_system_calls, scratch), another)
    yield from _run("file locks", partial(_file_locks, scratch), "mount with locks (Lustre: -o flock); " + another)
    yield from _run("direct I/O", partial(_direct_io, scratch), another)
    yield from _run("preallocation", partial(_preallocation, scratch), another)
    yield from _run("publishing", partial(_publishing, scratch), another)
    yield from _run("space", partial(_space, scratch), another)
    yield from _run("disk speed", partial(_disk_speed, scratch), "free some space, or " + another)
    yield from _run("daemon", partial(_daemon, scratch), "see the checks above; Checkpointer raises the same error")


def _run(name: str, check: Check, remedy: str) -> Iterator[Finding]:
    try:
        for verdict in check():
            yield Finding(name, *verdict)
    except (SidesaveError, OSError, ImportError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        yield Finding(name, "fail", text or type(error).__name__, remedy)


# The machine -----------------------------------------------------------------------------------------------------


def _versions() -> Iterator[Verdict]:
    kernel, torch = platform.release(), importlib.metadata.version("torch")
    found = f"Linux {kernel}, Python {platform.python_version()}, torch {torch}"
    if _numbers(kernel) < _OLDEST_KERNEL:
        yield "fail", found, "sidesave needs Linux 5.3 or newer"
    elif _numbers(torch) < _OLDEST_TORCH:
        yield "fail", found, "sidesave needs torch 2.8 or newer: pip install -U torch"
    else:
        yield "ok", found, ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _memfd() -> Iterator[Verdict]:
    Arena.create(PAGE, PAGE).close()
    yield "ok", "shared memory can be created, sealed and mapped", ""


def _pidfd() -> Iterator[Verdict]:
    os.close(os.pidfd_open(os.getpid()))
    yield "ok", "the death of the other process can be watched", ""


def _populate() -> Iterator[Verdict]:
    arena = Arena.create(PAGE, _MIB)
    try:
        code = madvise(arena.address, arena.nbytes, _MADV_POPULATE_WRITE)
    finally:
        arena.close()
    if code:
        why = f"MADV_POPULATE_WRITE: {os.strerror(code)}; staging memory is touched page by page"
        yield "warn", why, "use Linux 5.14 or newer, or call prepare() early: the first save waits for this memory"
    else:
        yield "ok", "MADV_POPULATE_WRITE allocates staging memory", ""


def _host_memory() -> Iterator[Verdict]:
    available, headroom, limit = host_memory.available_nbytes(), host_memory.cgroup_headroom_nbytes(), _cgroup_limit()
    group = "no cgroup limit"
    if limit is not None:
        group = f"the tightest memory cgroup allows {_gb(limit)} and has {_gb(headroom)} left"
    found = f"{_gb(available)} can be allocated ({group}): two staging slots for a state of up to {_gb(available / 2)}"
    if available < 2 << 30:
        yield "warn", found, "give the job more memory; slots=1 needs half"
    else:
        yield "ok", found, ""


def _cgroup_limit() -> int | None:
    """The least limit of a memory cgroup above this process, in bytes."""
    limits: list[int] = []
    for root, name in _cgroups("memory"):
        for group in (root / name, *(root / name).parents):
            for file in ("memory.max", "memory.limit_in_bytes"):
                with contextlib.suppress(OSError, ValueError):  # "max"
                    limits.append(int((group / file).read_text()))
    return min((limit for limit in limits if limit < 1 << 60), default=None)


def _cgroups(controller: str) -> Iterator[tuple[Path, str]]:
    """Roots of the hierarchies that could have a controller, with this process's group in each."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers == "":
                yield Path("/sys/fs/cgroup"), name.lstrip("/")
            elif controller in controllers.split(","):
                yield Path("/sys/fs/cgroup", controller.removeprefix("name=")), name.lstrip("/")


def _shared_memory() -> Iterator[Verdict]:
    with contextlib.suppress(OSError):
        size = _gb(shutil.disk_usage("/dev/shm").total)
        yield "ok", f"{size}; its size does not matter, staging memory is a memfd", ""


def _locked_memory() -> Iterator[Verdict]:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    size = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10:,} KiB"
    yield "ok", f"{size}; it does not matter, sidesave locks no memory and CUDA pins through its driver", ""


def _open_files() -> Iterator[Verdict]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < 256:
        yield "warn", f"at most {limit}", "ulimit -n 1024"
    else:
        yield "ok", f"at most {limit:,}; sidesave keeps fewer than 50", ""


def _gpu() -> Iterator[Verdict]:
    import torch

    from sidesave.stager.memory.pinning import PinnedRange

    if not torch.cuda.is_available():
        yield "ok", "none that torch can use; tensors are copied within the call of save()", ""
        return
    arena = Arena.create(PAGE, 64 * _MIB)
    try:
        host_memory.populate(arena)
        name = torch.cuda.get_device_name()
        started = time.monotonic()
        PinnedRange(torch.device("cuda", torch.cuda.current_device()), arena.address, arena.nbytes).close()
        yield "ok", f"{name}; 64 MiB pinned and unpinned in {time.monotonic() - started:.3f} s", ""
    except RuntimeError as error:
        remedy = "saves work, but copies from the GPU are slow; look for the driver's reason in dmesg"
        yield "warn", f"staging memory cannot be pinned: {error}", remedy
    finally:
        arena.close()


def _sockets() -> Iterator[Verdict]:
    from sidesave.client.daemon_link.socket_dir import socket_directory

    directory = Path(socket_directory())
    directory.rmdir()
    yield "ok", f"in {directory.parent}", ""


# Who would take the daemon along ---------------------------------------------------------------------------------


def _survival() -> Iterator[Finding]:
    """What ends the daemon when the trainer dies, as seen from here: the trainer may be started in another way."""
    checks = (_container, _service, _slurm, _oom_group)
    threats = [finding for check in checks for finding in _run("survival", check, "")]
    yield from threats or [Finding("survival", "ok", "nothing found that ends the daemon when the trainer dies")]


def _container() -> Iterator[Verdict]:
    if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
        comm = Path("/proc/1/comm").read_text().strip()
        found = f"in a container: when its process 1 ({comm}) ends, the daemon is killed, whatever it is writing"
        yield "warn", found, f"if process 1 is the trainer or waits for nothing else, {_OUTLIVE}"


def _service() -> Iterator[Verdict]:
    groups = [*_cgroups("name=systemd")]
    unit, path = next(((Path(name).name, name) for _, name in groups if name.endswith(".service")), ("", ""))
    if not unit:
        return
    manager = "--user" if "user@" in path else "--system"
    command = ["systemctl", manager, "show", "-p", "KillMode,TimeoutStopUSec", unit]
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        facts = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    mode, grace = facts.get("KillMode", "unknown KillMode"), facts.get("TimeoutStopUSec", "TimeoutStopSec")
    if mode == "control-group":
        yield "ok", f"in {unit}: systemd asks the daemon to end, it finishes its save, and has {grace} for that", ""
    elif mode not in ("process", "none"):
        found = f"in {unit} ({mode}): systemd may kill the daemon when the trainer ends"
        yield "warn", found, "set KillMode=control-group, and TimeoutStopSec to more than a save takes"


def _slurm() -> Iterator[Verdict]:
    if "SLURM_JOB_ID" in os.environ:
        found = "in a Slurm job: what is left of a step is killed when its tasks have ended, the daemon included"
        yield "warn", found, f"start the trainer from a script, and {_OUTLIVE}"


def _oom_group() -> Iterator[Verdict]:
    for root, name in _cgroups("memory"):
        for group in (root / name, *(root / name).parents):
            with contextlib.suppress(OSError):
                if (group / "memory.oom.group").read_text().strip() == "1":
                    found = f"{group} has memory.oom.group: running out of memory kills its processes all at once"
                    yield "warn", found, "leave headroom beside the staging slots; Kubernetes: singleProcessOOMKill"
                    return


# The directory ---------------------------------------------------------------------------------------------------


def _file_system(directory: Path) -> Iterator[Verdict]:
    kind, source = _mount(directory)
    found = f"{directory} is on {kind} ({source})"
    if kind in ("tmpfs", "ramfs"):
        yield "warn", f"{found}: in memory, gone with a reboot", "choose a directory on a disk"
    elif kind == "overlay":
        yield "warn", f"{found}: it may be a container's own layer and go with the container", "mount a volume"
    elif _NETWORK.fullmatch(kind):
        remedy = "measure a save and a load; after the crash of another host its runs are free only after 3 minutes"
        yield "warn", f"{found}: a network or user-space file system, where sidesave has been tried little", remedy
    else:
        yield "ok", found, ""


def _mount(directory: Path) -> tuple[str, str]:
    """Type and source of the file system of ``directory``."""
    best, found = Path("/"), ("unknown", "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4]))
        if directory.is_relative_to(point) and len(point.parts) >= len(best.parts):  # of two in one place the later one
            best, found = point, (right.split()[0], right.split()[1])
    return found


def _system_calls(scratch: Path) -> Iterator[Verdict]:
    """Each call of the list that errors are worded by."""
    refused: list[Verdict] = []
    for name, attempt in system_call_attempts(scratch):
        call = CALLS[name]
        try:
            attempt()
        except (OSError, psutil.Error) as error:
            if isinstance(error, OSError) and error.errno not in REFUSED:
                continue
            found = f"{name} is refused: it {call.purpose}"
            refused.append(
                ("warn", f"{found}; without it {call.without}", call.remedy)
                if call.without
                else ("fail", found, call.remedy)
            )
    yield from refused or [("ok", f"all {len(CALLS)} that sidesave uses are allowed", "")]


def system_call_attempts(scratch: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """A use of each call of the list, in an order in which they can be made; what they make is in ``scratch``."""
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
    yield "ioprio_set", lambda: me.ionice(*me.ionice())
    yield "prlimit64", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
    directory = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    file = os.open("calls", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, dir_fd=directory)
    here = {"src_dir_fd": directory, "dst_dir_fd": directory}
    try:
        yield "flock", lambda: fcntl.flock(file, fcntl.LOCK_UN)
        yield "fstatfs", lambda: os.fstatvfs(file)
        yield "fallocate", lambda: _raise(ctypes.get_errno() if _libc.fallocate(file, 0, 0, PAGE) else 0)
        yield "pwrite64", lambda: os.pwrite(file, b"x", 0)
        yield "preadv", lambda: os.preadv(file, [bytearray(1)], 0)
        yield "ftruncate", lambda: os.ftruncate(file, 1)
        yield "fsync", lambda: os.fsync(file)
        yield "linkat", lambda: os.link("calls", "linked", **here, follow_symlinks=False)
        yield "renameat2", lambda: _raise(renameat2(directory, "calls", "renamed", RENAME_NOREPLACE))
        yield "mkdirat", lambda: os.mkdir("directory", dir_fd=directory)
        yield "fchmodat", lambda: os.chmod("directory", 0o700, dir_fd=directory)
        yield "renameat", lambda: os.rename("directory", "other", **here)
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
                "a file can be locked twice: nobody can tell if a run is in use",
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
        yield "warn", "not taken; writes go through the page cache", "expect slower saves; ext4 and XFS take O_DIRECT"
    else:
        yield "ok", "an aligned O_DIRECT write is taken", ""


def _preallocation(scratch: Path) -> Iterator[Verdict]:
    with (scratch / "reserved").open("wb") as file:
        if _libc.fallocate(file.fileno(), 0, 0, _MIB) == 0:
            yield "ok", "fallocate reserves space before the first byte", ""
            return
    why = f"no fallocate ({os.strerror(ctypes.get_errno())})"
    yield "warn", f"{why}: a full disk shows only while writing", "watch the free space; ext4 and XFS can reserve it"


def _publishing(scratch: Path) -> Iterator[Verdict]:
    (scratch / "file").touch()
    try:
        (scratch / "link").hardlink_to(scratch / "file")
        yield "ok", "files get their names by hard links", ""
    except OSError as error:
        storage = PosixStorage(str(scratch))
        try:
            storage.publish("file", "renamed")
        finally:
            storage.close()
        yield "ok", f"no hard links ({error.strerror}); files get their names by renaming", ""


def _space(scratch: Path) -> Iterator[Verdict]:
    facts = os.statvfs(scratch)
    free, total = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    inodes = f", {facts.f_favail:,} inodes" if facts.f_files else ""  # btrfs and others have no such limit
    found = f"{_gb(free)} of {_gb(total)} free{inodes}"
    if free < 10 * 10**9 or (facts.f_files and facts.f_favail < 10_000):
        yield "warn", found, "free some: a checkpoint takes the size of the state, and about ten files a rank"
    else:
        yield "ok", found, ""


def _disk_speed(scratch: Path) -> Iterator[Verdict]:
    """As the daemon writes and the loader reads: past the page cache, four pieces at a time."""
    storage = PosixStorage(str(scratch))

    def read(offset: int) -> None:
        with storage.open("speed") as source:
            source.read_at(offset, _PIECE_NBYTES)

    with contextlib.closing(storage), mmap.mmap(-1, _PIECE_NBYTES) as buffer, memoryview(buffer) as piece:
        piece[:] = os.urandom(_PIECE_NBYTES)
        with storage.creating("speed", _SPEED_NBYTES) as output:
            wrote = _rate(lambda offset: output.write_at(piece, offset), lambda: output.finish(_SPEED_NBYTES))
        found = f"{wrote:.2f} GB/s written and synced, {_rate(read):.2f} GB/s read"
    if wrote < 0.2:
        found += f": 100 GB take {100 / wrote / 60:,.0f} minutes"
        yield "warn", found, "training goes on meanwhile; save less often, or to a faster disk"
    else:
        yield "ok", found, ""


def _rate(work: Callable[[int], object], finish: Callable[[], object] = lambda: None) -> float:
    """GB/s of ``work`` on one piece after the other by several threads; none is begun after the deadline."""
    started = time.monotonic()

    def one(offset: int) -> int:
        if time.monotonic() - started > _SPEED_DEADLINE_S:
            return 0
        work(offset)
        return _PIECE_NBYTES

    with ThreadPoolExecutor(_SPEED_THREADS) as pool:
        nbytes = sum(pool.map(one, range(0, _SPEED_NBYTES, _PIECE_NBYTES)))
    finish()
    return nbytes / 1e9 / (time.monotonic() - started)


def _daemon(scratch: Path) -> Iterator[Verdict]:
    import torch

    from sidesave.client.checkpointer import Checkpointer

    state = {"tensor": torch.zeros(1 << 20)}
    started = time.monotonic()
    with Checkpointer(scratch / "run", stall_timeout_s=_ANSWER_TIMEOUT_S) as checkpointer:
        up = time.monotonic()
        checkpointer.save(0, state).committed.result(_ANSWER_TIMEOUT_S)
        saved = time.monotonic()
    found = f"up in {up - started:.2f} s; 4 MB saved and committed in {saved - up:.3f} s"
    if up - started > _START_LIMIT_S:
        yield "warn", found, "starting Python is slow here: keep the environment on a local disk"
    else:
        yield "ok", found, ""


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB"
