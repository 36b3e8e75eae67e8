"""How much host memory there is, and how staging arenas get theirs.

Pages are allocated ahead of the first save, in pieces and by all cores, and each piece is checked against what the
node and the tightest memory cgroup have left: a process over its cgroup limit is killed, not refused.

They are huge pages where the kernel can make them. A memfd gets none by default, but ``MADV_COLLAPSE`` (Linux 6.1)
makes them whatever the system's setting for shared memory, and of a piece that was only touched it makes them directly.
That populated 1 GiB in 0.2 s instead of 1.0, and direct writes from it ran at 2.4 GB/s instead of 1.7: the disk gets a
few long segments instead of many pages.

Of several NUMA nodes they lie on the one whose cores have touched them first, see :mod:`sidesave.stager.memory.numa`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

from sidesave.errors import HostMemoryError
from sidesave.stager.memory import numa
from sidesave.stager.memory.arena import HUGE_PAGE, PAGE, Arena, madvise
from sidesave.stager.system_calls import REFUSED, usable_cpus

_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25
_PIECE_NBYTES: Final = 64 << 20
_RESERVE_NBYTES: Final = 256 << 20
"""Left to the rest of the machine: page tables, the daemon, the trainer's next allocation."""
_LOCK_DEADLINE_S: Final = 120.0


def available_nbytes() -> int:
    """Bytes that can be allocated now: the node's ``MemAvailable`` or the tightest cgroup's headroom, in bytes."""
    return min(_mem_available(), cgroup_headroom_nbytes())


def _mem_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def cgroup_headroom_nbytes() -> int:
    """Bytes left in the tightest memory cgroup of this process, page cache counted as free; huge when unlimited."""
    headroom = 1 << 62
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return headroom
    for line in groups:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
                headroom = min(headroom, _chain_headroom(root, name, "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
            headroom = min(headroom, _chain_headroom(root, name, limit, usage, "total_inactive_file"))
    return headroom


def _chain_headroom(root: Path, name: str, limit: str, usage: str, reclaimable: str) -> int:
    """Least headroom from a cgroup up to its root; inside a container the path may not exist, then the root counts."""
    headroom = 1 << 62
    group = root / name.lstrip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(root):
            break
        try:
            most = (directory / limit).read_text().strip()
            used = int((directory / usage).read_text())
            stat = (directory / "memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if most == "max" or int(most) >= 1 << 60:
            continue
        cache = next((int(row.split()[1]) for row in stat.splitlines() if row.startswith(reclaimable + " ")), 0)
        headroom = min(headroom, max(0, int(most) - used + cache))
    return headroom


def require(nbytes: int, purpose: str) -> None:
    """Raise ``HostMemoryError`` with the figures unless ``nbytes`` can be allocated now."""
    node, cgroup = _mem_available(), cgroup_headroom_nbytes()
    if nbytes + _RESERVE_NBYTES > min(node, cgroup):
        where = "the node" if node <= cgroup else "the memory cgroup"
        raise HostMemoryError(
            f"{purpose} needs {nbytes / 2**20:,.0f} MiB of host memory (and {_RESERVE_NBYTES >> 20} MiB in reserve), "
            f"but {where} has {min(node, cgroup) / 2**20:,.0f} MiB left; save less, use slots=1, or give the job more"
        )


@contextlib.contextmanager
def _node_turn() -> Generator[None]:
    """Let the ranks of a node allocate one after another, so that their checks do not count the same bytes twice.

    The lock is an advisory one on the directory /dev/shm itself: it leaves nothing behind and dies with its holder.
    Where it cannot be had within the deadline the caller goes on, with the per-piece checks alone.
    """
    try:
        fd = os.open("/dev/shm", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + _LOCK_DEADLINE_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:
                break
        yield
    finally:
        os.close(fd)


def populate(arena: Arena, node: int | None = None) -> None:
    """Allocate every page of ``arena``, blocking; all cores help, or those near ``node``.

    Args:
        arena: A fresh arena of this process.
        node: The NUMA node that the memory should lie on, where that is a choice (:func:`numa.cores_near`).

    Raises:
        HostMemoryError: Before the first piece or between two, when memory runs short. The arena is then partly
            allocated and should be closed.
    """
    near = numa.cores_near(node)
    if near:
        arena.node = node
    offsets = iter(range(0, arena.nbytes, _PIECE_NBYTES))
    failures: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        try:
            if near:
                with contextlib.suppress(OSError):  # it is slower from elsewhere, and works
                    os.sched_setaffinity(0, near)
            while not failures:
                with lock:
                    offset = next(offsets, None)
                    if offset is None:
                        return
                    require(min(_PIECE_NBYTES, arena.nbytes - offset), "the next piece of a staging slot")
                _populate_piece(arena.address + offset, min(_PIECE_NBYTES, arena.nbytes - offset))
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            failures.append(error)

    with _node_turn():
        require(arena.nbytes, "a staging slot")
        # Threads of our own, never the caller's: affinity is a property of the thread and would stick.
        threads = [
            threading.Thread(target=work, name="sidesave-populate", daemon=True)
            for _ in range(min(len(near or usable_cpus()), 8, 1 + arena.nbytes // _PIECE_NBYTES))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: the arena is about to be unmapped, so nobody may still be at it
            failures.append(error)
            for thread in threads:
                if thread.is_alive():
                    thread.join()
            raise
    if failures:
        raise failures[0]


def _populate_piece(address: int, nbytes: int) -> None:
    whole = nbytes // HUGE_PAGE * HUGE_PAGE
    if whole:
        _touch(address, whole, HUGE_PAGE)  # a stretch without any page cannot be collapsed
        madvise(address, whole, _MADV_COLLAPSE)  # what it cannot do, an old kernel or fragmented memory, is done below
    code = madvise(address, nbytes, _MADV_POPULATE_WRITE)
    if code == errno.EINVAL or code in REFUSED:  # Linux before 5.14, or madvise is not allowed
        _touch(address, nbytes, PAGE)
    elif code:
        raise HostMemoryError(f"cannot allocate {nbytes >> 20} MiB of staging memory: {os.strerror(code)}")


def _touch(address: int, nbytes: int, stride: int) -> None:
    """Write to one byte in each ``stride``, leaving it as it is."""
    for position in range(address, address + nbytes, stride):
        byte = ctypes.c_ubyte.from_address(position)
        byte.value = byte.value
