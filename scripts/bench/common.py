"""How a benchmark measures: command line, workspace, order of a round, the times of one save, the
peers of a run.
"""

import argparse
import contextlib
import mmap
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from scripts.bench.peers import PEERS, Peer, PeerUnavailableError, Sidesave, allow_many_files
from scripts.bench.state import SIZES, TrainState

T = TypeVar("T")
MADV_POPULATE_WRITE = 23  # Linux 5.14


def arguments(
    description: str | None, *, rounds: int, size: str = "small", peers: bool = True
) -> argparse.ArgumentParser:
    """Return the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"measured rounds (default {rounds})"
    )
    parser.add_argument(
        "--size", choices=SIZES, default=size, help=f"size of the state (default {size})"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="where to write (default: the current folder)"
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="also write the report to this file"
    )
    parser.add_argument(
        "--chart", type=Path, metavar="PNG", help="also draw the report (needs matplotlib)"
    )
    if peers:
        known = ", ".join(PEERS)
        parser.add_argument(
            "--only", type=lambda text: text.split(","), help=f"comma-separated, among: {known}"
        )
    return parser


@contextmanager
def workspace(parent: Path) -> Iterator[Path]:
    """Yield a fresh directory in ``parent`` and remove it at the end."""
    directory = Path(tempfile.mkdtemp(prefix="sidesave-bench-", dir=parent)).resolve()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Return the order of round ``turn``, so that each item comes first, second, ... about equally
    often.
    """
    turn %= max(1, len(items))
    return [*items[turn:], *items[:turn]]


def private_memory(nbytes: int) -> mmap.mmap:
    """Return fresh page-aligned memory, of huge pages if it can be: a read into small ones is three
    times slower.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def settle(nbytes: int) -> None:
    """Let all writeback end, and touch that much free memory.

    One measurement must not pay for another's dirty pages, nor for the pages that a hypervisor has
    taken back from a guest that left them free: the first touch of such a page costs more than any
    copy.
    """
    os.sync()
    if nbytes:
        with private_memory(nbytes) as memory:
            memory.madvise(MADV_POPULATE_WRITE)


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """Seconds from the call of one save.

    Attributes:
        call_s: Until ``save`` returned.
        staged_s: Until the state could be changed.
        durable_s: Until every file of the checkpoint was fsynced.
    """

    call_s: float
    staged_s: float
    durable_s: float


def measure_save(peer: Peer, step: int, state: TrainState) -> SaveTimes:
    """Save once and wait until it is durable; the last checkpoint is deleted outside of the
    timing.
    """
    peer.discard()
    state.perturb()
    state.synchronize()
    settle(state.nbytes)
    start = time.perf_counter()
    peer.save(step, state)
    called = time.perf_counter()
    peer.wait_staged()
    staged = time.perf_counter()
    peer.wait()
    return SaveTimes(called - start, staged - start, time.perf_counter() - start)


class Field:
    """The peers of one run: starts them, remembers why one could not or broke, and ends all of
    them.

    Args:
        chosen: The peers to compare.
        directory: Each peer gets a fresh folder of it each time it is started.
        state: What they will save.
    """

    def __init__(self, chosen: Sequence[type[Peer]], directory: Path, state: TrainState) -> None:
        allow_many_files()
        self.refused: dict[str, str] = {}
        self.broken: dict[str, str] = {}
        self.chosen = list(chosen)
        self._directory = directory
        self._state = state
        self._starts = 0
        self._stack = ExitStack()
        needed = state.nbytes * (2 + sum(peer.staging_copies for peer in chosen))
        available = psutil.virtual_memory().available
        if needed > available:
            raise SystemExit(
                f"these peers together need about {needed / 1e9:.0f} GB of memory and "
                f"{available / 1e9:.0f} GB are available: choose fewer with --only, or a smaller "
                "--size"
            )

    def start(self, kind: type[Peer]) -> Peer | None:
        """Start a peer that lives until this field is closed; None where it cannot run here."""
        if kind.name in self.refused:
            return None
        self._starts += 1
        try:
            peer = kind(
                self._directory / f"{kind.name.replace(' ', '-')}-{self._starts}", self._state
            )
        except PeerUnavailableError as error:
            self.refused[kind.name] = str(error)
            return None
        self._stack.callback(self._end, peer)
        return peer

    def start_all(self) -> list[Peer]:
        """Start every chosen peer that can run here."""
        return [peer for kind in self.chosen if (peer := self.start(kind)) is not None]

    def attempt(self, peer: Peer, work: Callable[[], object]) -> None:
        """Do the work of a peer; one that breaks is told in the report, and nothing more is done
        with it.
        """
        if peer.name in self.broken:
            return
        try:
            work()
        except Exception as error:
            if isinstance(peer, Sidesave):
                raise
            traceback.print_exc()
            self.broken[peer.name] = f"{type(error).__name__}: {error}"

    def _end(self, peer: Peer) -> None:
        with contextlib.suppress(*[Exception] * (peer.name in self.broken)):
            peer.close()

    def settings(self) -> list[tuple[str, str]]:
        """Return rows that tell how each peer was set up, or why it is missing."""
        missing = {name: f"not run: {why}" for name, why in self.refused.items()}
        missing |= {name: f"broke: {why}" for name, why in self.broken.items()}
        return [(kind.name, missing.get(kind.name, kind.settings)) for kind in self.chosen]

    def close(self) -> None:
        """End all peers, the last one first; the field can be used again."""
        self._stack.close()

    def __enter__(self) -> "Field":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
