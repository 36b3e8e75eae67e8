"""Available host memory, and the allocation of staging arenas.

Pages are allocated ahead of the first save, in pieces and by all cores. Each piece is checked
against the memory left on the node and in the tightest memory cgroup: the kernel kills a process
that exceeds its cgroup limit instead of refusing the allocation.

Pages are huge if the kernel can provide that. A memfd gets no huge pages by default, but
``MADV_COLLAPSE`` (Linux 6.1) creates them regardless of the system's setting for shared memory.
That populated 1 GiB in 0.2 s instead of 1.0 s, and direct writes from it ran at 2.4 GB/s instead of
1.7 GB/s, since the disk receives a few long segments instead of many pages.

On NUMA machines a page lies on the node whose core touches it first, see
:mod:`sidesave.stager.memory.numa`.
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
"""Bytes left to the rest of the machine: page tables, the daemon, the trainer's next allocation."""
_LOCK_DEADLINE_S: Final = 120.0


def available_nbytes() -> int:
    """Return the number of bytes that can be allocated now.

    This is the node's ``MemAvailable`` or, if less, the cgroups' headroom.
    """
    return min(_mem_available(), cgroup_headroom_nbytes())


def _mem_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def cgroup_headroom_nbytes() -> int:
    """Return the bytes left in the tightest memory cgroup; ``1 << 62`` if unlimited.

    Counts page cache as free.
    """
    headroom = 1 << 62
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return headroom
    for line in groups:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
                headroom = min(
                    headroom,
                    _chain_headroom(root, name, "memory.max", "memory.current", "inactive_file"),
                )
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
            headroom = min(
                headroom, _chain_headroom(root, name, limit, usage, "total_inactive_file")
            )
    return headroom


def _chain_headroom(root: Path, name: str, limit: str, usage: str, reclaimable: str) -> int:
    """Return the least headroom from a cgroup up to ``root``, in bytes.

    Inside a container the path may not exist; then only ``root`` counts.
    """
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
        cache = next(
            (int(row.split()[1]) for row in stat.splitlines() if row.startswith(reclaimable + " ")),
            0,
        )
        headroom = min(headroom, max(0, int(most) - used + cache))
    return headroom


def require(nbytes: int, purpose: str) -> None:
    """Raise ``HostMemoryError``, with the amounts, unless ``nbytes`` bytes can be allocated now."""
    node, cgroup = _mem_available(), cgroup_headroom_nbytes()
    if nbytes + _RESERVE_NBYTES > min(node, cgroup):
        where = "the node" if node <= cgroup else "the memory cgroup"
        raise HostMemoryError(
            f"{purpose} needs {nbytes / 2**20:,.0f} MiB of host memory (and "
            f"{_RESERVE_NBYTES >> 20} MiB in reserve), but {where} has "
            f"{min(node, cgroup) / 2**20:,.0f} MiB left; save less, or give the job more"
        )


@contextlib.contextmanager
def _node_turn() -> Generator[None]:
    """Let the ranks of a node allocate one after another.

    So two ranks do not count the same free bytes. Takes an advisory lock on the directory /dev/shm
    itself, which leaves no file behind and ends with its holder. If the lock is not available
    within the deadline, the caller goes on and relies on the check of each piece.
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
        # A child that was forked meanwhile has the descriptor too, and would keep the lock.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def new_arena(descriptor_nbytes: int, data_nbytes: int, node: int | None) -> Arena:
    """Create an arena with all pages allocated, see :func:`populate`; blocks until done.

    Raises:
        HostMemoryError: The machine does not have that much memory left.
    """
    try:
        arena = Arena.create(descriptor_nbytes, data_nbytes)
        try:
            populate(arena, node)
        except BaseException:  # also on Ctrl-C no arena is left
            arena.close()
            raise
    except OSError as error:
        raise HostMemoryError(
            f"cannot create a staging slot of {data_nbytes / 2**20:,.1f} MiB: {error}"
        ) from error
    return arena


def populate(arena: Arena, node: int | None = None) -> None:
    """Allocate every page of ``arena`` on all cores, or on those of ``node``; blocks until done.

    Args:
        arena: A new arena of this process.
        node: The preferred NUMA node; ignored if there is no choice (:func:`numa.cores_near`).

    Raises:
        HostMemoryError: Memory runs short. The arena is then partly allocated and should be closed.
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
                with contextlib.suppress(OSError):  # memory of another node is slower, but works
                    os.sched_setaffinity(0, near)
            while not failures:
                with lock:
                    offset = next(offsets, None)
                    if offset is None:
                        return
                    require(
                        min(_PIECE_NBYTES, arena.nbytes - offset),
                        "the next piece of a staging slot",
                    )
                _populate_piece(arena.address + offset, min(_PIECE_NBYTES, arena.nbytes - offset))
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            failures.append(error)

    with _node_turn():
        require(arena.nbytes, "a staging slot")
        # Never in the caller's thread: it would keep the affinity.
        threads = [
            threading.Thread(target=work, name="sidesave-populate", daemon=True)
            for _ in range(min(len(near or usable_cpus()), 8, 1 + arena.nbytes // _PIECE_NBYTES))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: end all access, the caller unmaps the arena next
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
        _touch(address, whole, HUGE_PAGE)  # a range without any page cannot be collapsed
        # May fail (old kernel, fragmented memory); the pages are populated below.
        madvise(address, whole, _MADV_COLLAPSE)
    code = madvise(address, nbytes, _MADV_POPULATE_WRITE)
    if code == errno.EINVAL or code in REFUSED:  # Linux before 5.14, or madvise is not allowed
        _touch(address, nbytes, PAGE)
    elif code:
        raise HostMemoryError(
            f"cannot allocate {nbytes >> 20} MiB of staging memory: {os.strerror(code)}"
        )


def _touch(address: int, nbytes: int, stride: int) -> None:
    """Rewrite one byte of each ``stride`` bytes with its own value."""
    for position in range(address, address + nbytes, stride):
        byte = ctypes.c_ubyte.from_address(position)
        byte.value = byte.value
