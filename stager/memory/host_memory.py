"""Available host memory, a rank's share of it, and the allocation of staging arenas.

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
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sidesave.errors import HostMemoryError
from sidesave.stager.memory import numa
from sidesave.stager.memory.arena import HUGE_PAGE, PAGE, Arena, madvise
from sidesave.stager.system_calls import REFUSED, boot_id, usable_cpus

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
    return _meminfo("MemAvailable")


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """A memory cgroup with a limit.

    Attributes:
        id: The same for all processes of a machine that see this cgroup.
        limit_nbytes: The limit.
        headroom_nbytes: What is left of it, with page cache counted as free.
    """

    id: str
    limit_nbytes: int
    headroom_nbytes: int


def cgroup_headroom_nbytes() -> int:
    """Return the bytes left in the memory cgroup with the least; ``1 << 62`` if unlimited.

    Counts page cache as free.
    """
    return min((group.headroom_nbytes for group in _cgroups()), default=1 << 62)


def tightest_cgroup() -> MemoryCgroup | None:
    """Return the cgroup with the smallest limit above this process; None if unlimited."""
    return min(_cgroups(), key=lambda group: group.limit_nbytes, default=None)


def _cgroups() -> Iterator[MemoryCgroup]:
    """Yield the memory cgroups above this process that have a limit."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
                yield from _chain(root, name, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
            yield from _chain(root, name, limit, usage, "total_inactive_file")


def _chain(
    root: Path, name: str, limit: str, usage: str, reclaimable: str
) -> Iterator[MemoryCgroup]:
    """Yield the cgroups from one up to ``root`` that have a limit.

    Inside a container the path may not exist; then only ``root`` counts.
    """
    group = root / name.lstrip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(root):
            break
        try:
            most = int((directory / limit).read_text())  # not for "max"
            used = int((directory / usage).read_text())
            stat = (directory / "memory.stat").read_text()
            inode = directory.stat().st_ino
        except (OSError, ValueError):
            continue
        if most >= 1 << 60:
            continue
        cache = next(
            (int(row.split()[1]) for row in stat.splitlines() if row.startswith(reclaimable + " ")),
            0,
        )
        yield MemoryCgroup(f"{root}:{inode}", most, max(0, most - used + cache))


# The share of a rank ------------------------------------------------------------------------------


def memory_of_rank() -> list[str]:
    """Return the IDs of this process's machine and of its tightest memory cgroup, or ``""``.

    Ranks exchange them to find out who shares memory: :class:`NodeMemory`.
    """
    group = tightest_cgroup()
    return [
        boot_id(),
        "" if group is None else group.id,
    ]


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The staging memory of a node, and this rank's share of it.

    Attributes:
        budget: Bytes, or the fraction of the machine's memory, for the slots of all ranks of the
            machine; None without a limit.
        ranks: The number of ranks on this machine.
        cgroup_ranks: The number of them in this rank's tightest memory cgroup.
        leads: Whether this is the first of them.
        share_nbytes: The most bytes that the slots of this rank may use.
    """

    budget: float | None = None
    ranks: int = 1
    cgroup_ranks: int = 1
    leads: bool = True
    share_nbytes: int = 1 << 62

    @classmethod
    def of(cls, budget: float | None, rank: int, gathered: Sequence[Sequence[str]]) -> NodeMemory:
        """Divide a budget, given what :func:`memory_of_rank` returned on each rank.

        A fraction counts for the memory of the machine, and for the tightest memory cgroup.
        """
        machine, group = gathered[rank]
        here = [position for position, each in enumerate(gathered) if each[0] == machine]
        ranks, cgroup_ranks = len(here), sum(gathered[position][1] == group for position in here)
        share_nbytes = 1 << 62
        if isinstance(budget, int):
            share_nbytes = budget // ranks
        elif budget is not None:
            share_nbytes = int(budget * _meminfo("MemTotal")) // ranks
            if tightest := tightest_cgroup():
                share_nbytes = min(
                    share_nbytes, int(budget * tightest.limit_nbytes) // cgroup_ranks
                )
        return cls(budget, ranks, cgroup_ranks, here[0] == rank, share_nbytes)

    def available_nbytes(self, used_nbytes: int = 0) -> int:
        """Return the bytes that the slots of this rank can have, which use ``used_nbytes`` now."""
        free_nbytes = min(
            _mem_available() // self.ranks, cgroup_headroom_nbytes() // self.cgroup_ranks
        )
        return min(self.share_nbytes, used_nbytes + free_nbytes)

    def require(self, nbytes: int, used_nbytes: int) -> None:
        """Raise ``HostMemoryError`` if the rank's share has no room for another slot."""
        if used_nbytes + nbytes <= self.share_nbytes:
            return
        budget = f"{self.budget:,} bytes" if isinstance(self.budget, int) else f"{self.budget:.0%}"
        needed, allowed, used = (
            f"{amount / 2**20:,.0f} MiB" for amount in (nbytes, self.share_nbytes, used_nbytes)
        )
        raise HostMemoryError(
            f"a staging slot needs {needed} of host memory, and saves that are being written use "
            f"{used}, but StagingOptions.node_memory_bytes allows this rank {allowed} ({budget} / "
            f"{self.ranks} on this node); allow more, or save less"
        )


UNLIMITED: Final = NodeMemory()
"""A rank alone, without a budget."""


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
