"""What this machine can do at best: disk, page cache, memory, digest. Every other figure is judged
against these.

python -m scripts.bench.raw_limits --size large
"""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from scripts.bench.common import (
    MADV_POPULATE_WRITE,
    arguments,
    private_memory,
    rotated,
    settle,
    workspace,
)
from scripts.bench.report import Report, machine, rate, spread
from scripts.bench.state import TrainState

MIB = 1 << 20
BLOCK = 8 * MIB
THREADS = (1, 2, 4)
CORES = len(os.sched_getaffinity(0))
LIBC = ctypes.CDLL(None, use_errno=True)  # `mmap.madvise` would hold the GIL


def random_buffer(nbytes: int) -> mmap.mmap:
    """Return page-aligned memory with random content, so that no layer below can compress it."""
    buffer = private_memory(nbytes)
    for start in range(0, nbytes, BLOCK):
        buffer[start : start + BLOCK] = os.urandom(min(BLOCK, nbytes - start))
    return buffer


def in_threads(threads: int, work: Callable[[int], None]) -> float:
    """Run ``work(thread)`` in so many threads and return the seconds until the last one has
    ended.
    """
    ready = threading.Barrier(threads + 1)  # threads start outside of the timing

    def begin(thread: int) -> None:
        ready.wait()
        work(thread)

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(begin, thread) for thread in range(threads)]
        ready.wait()
        start = time.perf_counter()
        for future in running:
            future.result()
        return time.perf_counter() - start


def direct_write(path: Path, nbytes: int, source: mmap.mmap, threads: int) -> float:
    """Write ``nbytes`` with O_DIRECT in 8 MiB blocks, allocation and fsync included; return
    seconds.
    """
    view = memoryview(source)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    length = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def write(thread: int) -> None:
        for offset in range(thread * BLOCK, length, threads * BLOCK):
            begin = offset % (len(source) - BLOCK + 1) // mmap.PAGESIZE * mmap.PAGESIZE
            os.pwrite(fd, view[begin : begin + min(BLOCK, length - offset)], offset)

    try:
        start = time.perf_counter()
        os.posix_fallocate(fd, 0, length)
        allocated = time.perf_counter()
        written = in_threads(threads, write)
        finish = time.perf_counter()
        os.fsync(fd)
        return allocated - start + written + time.perf_counter() - finish
    finally:
        os.close(fd)


def buffered_write(path: Path, nbytes: int, source: mmap.mmap) -> float:
    """Write ``nbytes`` through the page cache and fsync; return seconds."""
    view = memoryview(source)
    with path.open("wb", buffering=0) as file:
        start = time.perf_counter()
        for offset in range(0, nbytes, BLOCK):
            begin = offset % (len(source) - BLOCK + 1)
            file.write(view[begin : begin + min(BLOCK, nbytes - offset)])
        os.fsync(file.fileno())
        return time.perf_counter() - start


def direct_read(path: Path, target: mmap.mmap, threads: int) -> float:
    """Read the whole file with O_DIRECT into ``target``, which is at least as long in whole pages;
    return seconds.
    """
    view = memoryview(target)
    length = path.stat().st_size
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(thread: int) -> None:
        for offset in range(thread * BLOCK, length, threads * BLOCK):
            pages = -(-min(BLOCK, length - offset) // mmap.PAGESIZE) * mmap.PAGESIZE
            os.preadv(fd, [view[offset : offset + pages]], offset)

    try:
        return in_threads(threads, read)
    finally:
        os.close(fd)


def populate(nbytes: int, threads: int) -> float:
    """Fault in the pages of a fresh memfd, 32 MiB a call; return seconds."""
    piece = 32 * MIB
    fd = os.memfd_create("bench")
    try:
        os.ftruncate(fd, nbytes)
        with mmap.mmap(fd, nbytes) as memory:
            start = ctypes.addressof(first := ctypes.c_char.from_buffer(memory))

            def work(thread: int) -> None:
                for offset in range(thread * piece, nbytes, threads * piece):
                    size = min(piece, nbytes - offset)
                    if (
                        LIBC.madvise(
                            ctypes.c_void_p(start + offset),
                            ctypes.c_size_t(size),
                            MADV_POPULATE_WRITE,
                        )
                        != 0
                    ):
                        raise OSError(ctypes.get_errno(), "madvise")

            try:
                return in_threads(threads, work)
            finally:
                del first  # the memory cannot be unmapped while it is exported
    finally:
        os.close(fd)


def copy_memmove(targets: Sequence[Tensor], sources: Sequence[Tensor], threads: int) -> float:
    """Copy CPU tensors with ``memmove`` in 8 MiB pieces over threads; return seconds."""
    pieces = [
        (target.data_ptr() + offset, source.data_ptr() + offset, min(BLOCK, source.nbytes - offset))
        for target, source in zip(targets, sources, strict=True)
        for offset in range(0, source.nbytes, BLOCK)
    ]

    def work(thread: int) -> None:
        for target, source, nbytes in pieces[thread::threads]:
            ctypes.memmove(target, source, nbytes)

    return in_threads(threads, work)


@torch.no_grad()
def copy_foreach(targets: list[Tensor], sources: list[Tensor]) -> float:
    """Copy tensors with ``_foreach_copy_``, which uses every core for a large one; return
    seconds.
    """
    start = time.perf_counter()
    torch._foreach_copy_(targets, sources)
    return time.perf_counter() - start


def host_targets(sources: Sequence[Tensor]) -> list[Tensor]:
    """Return host memory for a copy of each tensor, already touched, and pinned where the tensor is
    not on the host.
    """
    targets = [
        torch.empty_like(source, device="cpu", pin_memory=source.is_cuda) for source in sources
    ]
    torch._foreach_zero_(targets)
    return targets


def copy_best(targets: list[Tensor], sources: list[Tensor]) -> float:
    """Return the seconds of the fastest way to copy into host memory: from the host, with all
    cores.
    """
    if any(source.is_cuda for source in sources):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start
    return min(copy_foreach(targets, sources), copy_memmove(targets, sources, CORES))


def direct_write_best(folder: Path, nbytes: int, source: mmap.mmap) -> float:
    """Return the seconds of the fastest direct write among 1, 2 and 4 threads."""
    times = []
    for threads in THREADS:
        path = folder / f"raw-{threads}"
        settle(0)
        times.append(direct_write(path, nbytes, source, threads))
        path.unlink()
    return min(times)


def digest(source: mmap.mmap, hasher: Callable[[memoryview], object], threads: int = 1) -> float:
    """Digest the buffer in pieces of 256 KiB; return seconds."""
    view, piece = memoryview(source), 256 * 1024

    def work(thread: int) -> None:
        for offset in range(thread * piece, len(source), threads * piece):
            hasher(view[offset : offset + piece])

    return in_threads(threads, work)


def main() -> None:
    """Measure every limit in turn, round by round."""
    args = arguments(__doc__, rounds=5, peers=False).parse_args()
    state = TrainState(args.size)
    sources = [tensor.detach() for tensor in state.tensors()]
    targets = host_targets(sources)
    nbytes = state.nbytes
    source = random_buffer(min(256 * MIB, -(-nbytes // BLOCK) * BLOCK))
    target = random_buffer(-(-nbytes // BLOCK) * BLOCK)
    report = Report("Raw limits")

    with workspace(args.dir) as folder:
        path = folder / "raw"
        limits: dict[str, tuple[int, Callable[[], float]]] = {}
        for threads in THREADS:
            limits[f"direct write, {threads} threads"] = (
                nbytes,
                lambda n=threads: direct_write(path, nbytes, source, n),
            )
        limits["buffered write + fsync"] = nbytes, lambda: buffered_write(path, nbytes, source)
        for threads in THREADS:
            limits[f"direct read, {threads} threads"] = (
                nbytes,
                lambda n=threads: direct_read(path, target, n),
            )
        for threads in sorted({1, CORES}):
            limits[f"populate a memfd, {threads} threads"] = (
                nbytes,
                lambda n=threads: populate(nbytes, n),
            )
            limits[f"memmove, {threads} threads"] = (
                nbytes,
                lambda n=threads: copy_memmove(targets, sources, n),
            )
        limits["torch._foreach_copy_"] = nbytes, lambda: copy_foreach(targets, sources)
        limits["XXH3-64, 1 thread"] = len(source), lambda: digest(source, xxhash.xxh3_64_digest)
        limits["XXH3-128, 1 thread"] = len(source), lambda: digest(source, xxhash.xxh3_128_digest)

        buffered_write(path, nbytes, source)
        rates: dict[str, list[float]] = {name: [] for name in limits}
        for turn in range(args.rounds):
            for name, (amount, limit) in rotated(list(limits.items()), turn):
                settle(nbytes)
                rates[name] += rate(amount, [limit()])
        report.note(f"{nbytes / 1e9:.2f} GB, {args.rounds} rounds. {machine(folder)}.")

    report.table(
        ("", "GB/s: min / median / max"), [(name, spread(values)) for name, values in rates.items()]
    )
    report.panel("Raw limits", "GB/s", rates)
    report.publish(args.markdown, args.chart)


if __name__ == "__main__":
    main()
