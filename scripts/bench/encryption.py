"""What encryption costs: the same save and load with it and without, and the cipher alone on the
same bytes.

    python -m scripts.bench.encryption --size large --rounds 6

One process, one checkpointer for each, one save and one load of each a round, in rotating order.
The cipher alone seals as many bytes as the state has, in memory, by as many threads as a writer
has, and stores nothing.
"""

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import sidesave
from scripts.bench.common import arguments, rotated, settle, workspace
from scripts.bench.report import Report, machine, median, ratios, spread
from scripts.bench.state import SIZES, ByteTransformer
from sidesave.writer_daemon.sealing.cipher import TAG_NBYTES, FileCipher
from sidesave.writer_daemon.writing.sealed import BOUNCE_NBYTES
from sidesave.writer_daemon.writing.writer import IN_FLIGHT

_BLOCK_NBYTES = 256 << 10


def seal_alone(nbytes: int) -> float:
    """Seconds to seal so many bytes."""
    cipher, count = FileCipher(os.urandom(32)), nbytes // BOUNCE_NBYTES // IN_FLIGHT

    def work(first: int) -> None:
        source, into = (
            memoryview(bytearray(BOUNCE_NBYTES)),
            memoryview(bytearray(_BLOCK_NBYTES + TAG_NBYTES)),
        )
        for number in range(first, first + count * (BOUNCE_NBYTES // _BLOCK_NBYTES)):
            at = number * _BLOCK_NBYTES % BOUNCE_NBYTES
            cipher.seal_block(number, source[at : at + _BLOCK_NBYTES], into)

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        start = time.perf_counter()
        list(pool.map(work, [each << 40 for each in range(IN_FLIGHT)]))
        return time.perf_counter() - start


class Way:
    """One way to save, and what its saves and loads took."""

    def __init__(self, name: str, folder: Path, encryption: sidesave.Encryption | None) -> None:
        """Begin a run."""
        self.name, self.encryption = name, encryption
        self.checkpointer = sidesave.Checkpointer(
            folder / name, staging=sidesave.StagingOptions(slots=1), encryption=encryption
        )
        self.call_s: list[float] = []
        self.durable_s: list[float] = []
        self.load_s: list[float] = []

    def turn(self, step: int, state: dict[str, object]) -> None:
        """Save and load once; the checkpoint before is deleted outside of the timing."""
        settle(0)
        start = time.perf_counter()
        handle = self.checkpointer.save(step, state)
        called = time.perf_counter()
        path = handle.committed.result().path
        durable = time.perf_counter()
        sidesave.load(path, encryption=self.encryption)
        loaded = time.perf_counter()
        if step > 1:  # the first make the memory, and fill caches
            self.call_s.append(called - start)
            self.durable_s.append(durable - start)
            self.load_s.append(loaded - durable)
        if step:
            self.checkpointer.delete(step - 1).result()


def main() -> None:
    """Measure and report."""
    args = arguments(__doc__, rounds=6, peers=False).parse_args()
    torch.manual_seed(0)
    model = ByteTransformer(SIZES[args.size])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    report = Report("Encryption")
    with workspace(args.dir) as folder, contextlib.ExitStack() as opened:
        ways = [
            Way("plain", folder, None),
            Way("encrypted", folder, sidesave.Encryption(key=os.urandom(32))),
        ]
        for each in ways:
            opened.enter_context(each.checkpointer)
        alone_s: list[float] = []
        nbytes = 0
        for step in range(args.rounds + 2):
            for each in rotated(ways, step):
                each.turn(step, {"model": model, "optimizer": optimizer})
            latest = sidesave.latest(ways[0].checkpointer.directory)
            assert latest is not None
            nbytes = latest.nbytes
            if step > 1:
                alone_s.append(seal_alone(nbytes))
        report.note(
            f"{args.rounds} of each, {nbytes / 1e6:.1f} MB. Minimum / median / maximum. "
            f"{machine(folder)}."
        )
        rows = [
            (
                each.name,
                spread(each.call_s, 1e3, 1),
                spread(each.durable_s, 1, 3),
                median(ratios(each.durable_s, ways[0].durable_s), 1, 2),
                spread(each.load_s, 1, 3),
                median(ratios(each.load_s, ways[0].load_s), 1, 2),
            )
            for each in ways
        ]
        report.table(("", "call, ms", "durable, s", "/ plain", "load, warm, s", "/ plain"), rows)
        report.note(f"The cipher alone: {spread(alone_s, 1, 3)} s.")
        report.publish(args.markdown, None)


if __name__ == "__main__":
    main()
