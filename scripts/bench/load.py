"""How fast a checkpoint comes back, from a cold and from a warm page cache, sidesave (which
verifies) beside its peers.

    python -m scripts.bench.load --size large --chart load.png

Before a cold load every page of the checkpoint is dropped from the page cache, which ``mincore``
confirms. Loaders that map the file return before they have read it; a second figure includes
reading every byte once.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import load_file

from scripts.bench.common import Field, arguments, private_memory, rotated, settle, workspace
from scripts.bench.peers import DcpSave, Peer, Safetensors, Sidesave, TorchSave, choose, require
from scripts.bench.raw_limits import BLOCK, LIBC, direct_read
from scripts.bench.report import Report, machine, median, rate, ratios, spread
from scripts.bench.state import TrainState, flatten

RAW = "raw direct read, 4 threads"
RESIDENT_LIMIT = 0.01
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint."""
    return [file for file in path.rglob("*") if file.is_file()]


def resident(path: Path) -> int:
    """Count the bytes of a file that are in the page cache."""
    size = path.stat().st_size
    if size == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as memory:
        pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        first = ctypes.c_char.from_buffer(memory)
        failed = LIBC.mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages
        )
        del first  # the memory cannot be unmapped while it is exported
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def make_cold(path: Path) -> float:
    """Drop a checkpoint, which is on disk already, from the page cache; return the fraction that
    stayed.
    """
    files = files_of(path)
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    total = sum(file.stat().st_size for file in files)
    stayed = sum(map(resident, files)) / total
    if stayed > RESIDENT_LIMIT and os.access(DROP_CACHES, os.W_OK):
        DROP_CACHES.write_text("1")
        stayed = sum(map(resident, files)) / total
    return stayed


def make_warm(path: Path) -> None:
    """Read a checkpoint into the page cache."""
    for file in files_of(path):
        with file.open("rb", buffering=0) as handle:
            while handle.read(BLOCK):
                pass


def touch(loaded: object) -> None:
    """Read every byte of what was loaded; a digest is the fastest reader that needs no second
    thread.
    """
    for _, tensor in flatten(loaded):
        xxhash.xxh3_64_digest((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


@dataclass(slots=True)
class Loader:
    """One way to read a checkpoint back, with what it took: one entry a round."""

    path: Path
    nbytes: int
    load: Callable[[], object]
    cold_s: list[float] = field(default_factory=list)
    cold_touched_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)
    warm_touched_s: list[float] = field(default_factory=list)
    stayed: float = 0.0

    def measure(self) -> None:
        """Load from the cold cache, then from the warm one."""
        self.stayed = max(self.stayed, make_cold(self.path))
        self._time(self.cold_s, self.cold_touched_s)
        make_warm(self.path)
        self._time(self.warm_s, self.warm_touched_s)

    def _time(self, loaded_s: list[float], touched_s: list[float]) -> None:
        settle(self.nbytes)
        start = time.perf_counter()
        loaded = self.load()
        loaded_s.append(time.perf_counter() - start)
        touch(loaded)
        touched_s.append(time.perf_counter() - start)


def loaders_of(peer: Peer, state: TrainState) -> dict[str, Loader]:
    """Return the loaders of what ``peer`` has saved."""
    path = peer.saved[-1]
    match peer:
        case TorchSave():
            file = path / "state.pt"
            return {
                "torch.load": Loader(path, state.nbytes, lambda: torch.load(file)),
                "torch.load(mmap=True)": Loader(
                    path, state.nbytes, lambda: torch.load(file, mmap=True)
                ),
            }
        case Safetensors():
            return {
                "safetensors.load_file": Loader(
                    path, state.nbytes, lambda: load_file(path / "state.safetensors")
                )
            }
        case DcpSave():
            return {"dcp.load in place": Loader(path, state.nbytes, lambda: dcp_load(path, state))}
        case Sidesave():
            sidesave = require("sidesave")
            return {
                "sidesave.load": Loader(path, state.nbytes, lambda: sidesave.load(path)),
                "sidesave.load in place": Loader(
                    path, state.nbytes, lambda: sidesave_load(path, state)
                ),
            }
        case _:
            return {}


def dcp_load(path: Path, state: TrainState) -> dict[str, Any]:
    """Load into the tensors of the state."""
    target = state.state_dict()
    dcp.load(target, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return target


def sidesave_load(path: Path, state: TrainState) -> dict[str, Any]:
    """Load into the model and the optimizer."""
    require("sidesave").load(path, into=state.live())
    return state.state_dict()


def raw_read(path: Path) -> None:
    """Read one file straight from the disk into fresh memory."""
    with private_memory(-(-path.stat().st_size // BLOCK) * BLOCK) as target:
        direct_read(path, target, threads=4)


def main() -> None:
    """Measure and report."""
    args = arguments(__doc__, rounds=5).parse_args()
    state = TrainState(args.size)
    report = Report("Load")
    chosen = choose(args.only, [kind.name for kind in (Sidesave, DcpSave, Safetensors, TorchSave)])
    with workspace(args.dir) as folder, Field(chosen, folder, state) as peers:
        loaders: dict[str, Loader] = {}
        for peer in peers.start_all():
            peer.save(1, state)
            peer.wait()
            loaders |= loaders_of(peer, state)
            if isinstance(peer, Safetensors):
                path = peer.saved[-1]
                loaders[RAW] = Loader(
                    path, state.nbytes, lambda path=path: raw_read(path / "state.safetensors")
                )
        for turn in range(args.rounds):
            for loader in rotated(list(loaders.values()), turn):
                loader.measure()
        report.note(
            f"{state.nbytes / 1e9:.2f} GB in {len(state.tensors())} tensors, {args.rounds} rounds. "
            f"{machine(folder)}."
        )
        warmest = max(loader.stayed for loader in loaders.values())
        if warmest > RESIDENT_LIMIT:
            report.note(f"NOT COLD: up to {warmest:.0%} of a checkpoint stayed in the page cache.")
        missing = peers.refused

    ours = loaders.get("sidesave.load")
    nbytes = state.nbytes
    report.note(
        "GB/s: min / median / max. Touched: until every byte was read once. Ratio: of cold, "
        "touched rates."
    )
    report.table(
        ("", "cold", "cold, touched", "warm", "warm, touched", "/ sidesave.load"),
        [
            (
                name,
                spread(rate(nbytes, loader.cold_s)),
                spread(rate(nbytes, loader.cold_touched_s)),
                spread(rate(nbytes, loader.warm_s)),
                spread(rate(nbytes, loader.warm_touched_s)),
                median(ratios(ours.cold_touched_s, loader.cold_touched_s)) if ours else "-",
            )
            for name, loader in loaders.items()
        ],
    )
    report.items([(name, f"not run: {reason}") for name, reason in missing.items()])
    report.panel(
        "Cold, every byte",
        "GB/s",
        {name: rate(nbytes, x.cold_touched_s) for name, x in loaders.items()},
    )
    report.panel(
        "Warm, every byte",
        "GB/s",
        {name: rate(nbytes, x.warm_touched_s) for name, x in loaders.items()},
    )
    report.publish(args.markdown, args.chart)


if __name__ == "__main__":
    main()
