"""Wall time that one save adds to a training loop: a real transformer and AdamW, a save every few
steps.

    python -m scripts.bench.training_loop --rounds 6 --chart loop.png

A round runs one block of steps without saving and one block with each peer, in rotating order;
before each block the disk is quiet and the last checkpoints are deleted. What a save adds is the
difference to the block without saving of the same round, divided by the saves of a block. The wait
for the last save of a block is left out, as in a real run.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from scripts.bench.common import Field, arguments, rotated, settle, workspace
from scripts.bench.peers import (
    DcpThread,
    DcpThreadOverlapped,
    Peer,
    Sidesave,
    TorchCheckpointing,
    choose,
)
from scripts.bench.report import Report, machine, median, ratios, spread
from scripts.bench.state import VOCABULARY, TrainState

LENGTH = 64
NO_SAVING = "no saving"


class Trainer:
    """Trains the state on random bytes, with a batch chosen so that a step takes about ``step_s``
    seconds.
    """

    def __init__(self, state: TrainState, step_s: float) -> None:
        self.state = state
        self.batch = 1
        while (taken := self._best_step()) < step_s:
            self.batch += max(1, int(self.batch * min(1.0, step_s / taken - 1)))

    def _best_step(self) -> float:
        return min(self.step(None) for _ in range(4))

    def step(self, peer: Peer | None) -> float:
        """Train one step, the update under the peer's guard; return seconds."""
        tokens = torch.randint(VOCABULARY, (self.batch, LENGTH + 1), device=self.state.device)
        self.state.synchronize()
        start = time.perf_counter()
        self.state.train_step(tokens, peer.guard if peer else nullcontext)
        self.state.synchronize()
        return time.perf_counter() - start


@dataclass(slots=True)
class Blocks:
    """What the blocks of one peer took, one entry a round; the lists of steps have one entry a
    step.
    """

    total_s: list[float] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)
    first_step_s: list[float] = field(default_factory=list)
    other_step_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pace:
    """A block: so many saves, with so many steps after each."""

    saves: int
    every: int


def run_block(
    trainer: Trainer, peer: Peer | None, pace: Pace, first_save: int, blocks: Blocks
) -> None:
    """Train one block and note its times."""
    if peer is not None:
        peer.discard()
    settle(trainer.state.nbytes)
    trainer.step(None)
    start = time.perf_counter()
    for save in range(pace.saves):
        called = time.perf_counter()
        if peer is not None:
            peer.save(first_save + save, trainer.state)
            blocks.call_s.append(time.perf_counter() - called)
        blocks.first_step_s.append(trainer.step(peer))
        blocks.other_step_s += [trainer.step(peer) for _ in range(pace.every - 1)]
    blocks.total_s.append(time.perf_counter() - start)
    if peer is not None:
        peer.wait()


def warm_up(trainer: Trainer, peer: Peer) -> None:
    """Take the first save, which is not what this measures."""
    peer.prepare(trainer.state)
    for step in range(2):
        peer.save(step, trainer.state)
        peer.wait_staged()
        peer.wait()


def added(blocks: Blocks, without: Blocks, saves: int) -> list[float]:
    """Return the seconds that one save added, round by round."""
    return [
        (total - base) / saves for total, base in zip(blocks.total_s, without.total_s, strict=True)
    ]


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__, rounds=6)
    parser.add_argument("--device", default="cpu", help="where to train (default cpu)")
    parser.add_argument(
        "--step", type=float, default=0.4, help="seconds a step shall take (default 0.4)"
    )
    parser.add_argument("--every", type=int, default=4, help="steps between saves (default 4)")
    parser.add_argument("--saves", type=int, default=3, help="saves a block (default 3)")
    args = parser.parse_args()
    pace = Pace(args.saves, args.every)
    state = TrainState(args.size, args.device)
    trainer = Trainer(state, args.step)
    chosen = choose(
        args.only,
        [kind.name for kind in (Sidesave, TorchCheckpointing, DcpThreadOverlapped, DcpThread)],
    )
    report = Report("Training loop")

    with workspace(args.dir) as folder, Field(chosen, folder, state) as field:
        peers = field.start_all()
        results = {name: Blocks() for name in (NO_SAVING, *(peer.name for peer in peers))}
        for peer in peers:
            field.attempt(peer, partial(warm_up, trainer, peer))
        for turn in range(args.rounds):
            for peer in rotated([None, *peers], turn):
                blocks = results[peer.name if peer else NO_SAVING]
                block = partial(run_block, trainer, peer, pace, 10 + turn * pace.saves, blocks)
                field.attempt(peer, block) if peer else block()
        report.note(
            f"State of {state.nbytes / 1e9:.2f} GB in {len(state.tensors())} tensors on "
            f"{state.device}; a save every {pace.every} steps, {pace.saves} saves a block, "
            f"{args.rounds} rounds. {machine(folder)}."
        )
        settings = field.settings()

    without = results[NO_SAVING]
    names = [name for name in results if name != NO_SAVING and name not in field.broken]
    cost = {name: added(results[name], without, pace.saves) for name in names}
    ours = cost.get(Sidesave.name, [])
    report.note(
        "Milliseconds; added: min / median / max over rounds; ratio pair by pair; steps: medians."
    )
    report.table(
        (
            "",
            "one save adds",
            "/ sidesave",
            "call",
            "step after a save",
            "other steps",
            "slowest step",
        ),
        [
            (
                name,
                spread(cost[name], 1e3, 0),
                median(ratios(cost[name], ours)),
                median(results[name].call_s, 1e3, 1),
                median(results[name].first_step_s, 1e3, 0),
                median(results[name].other_step_s, 1e3, 0),
                median([max(results[name].first_step_s + results[name].other_step_s)], 1e3, 0),
            )
            for name in names
        ]
        + [
            (
                NO_SAVING,
                "0",
                "-",
                "-",
                median(without.first_step_s, 1e3, 0),
                median(without.other_step_s, 1e3, 0),
                median([max(without.first_step_s + without.other_step_s)], 1e3, 0),
            )
        ],
    )
    report.items(settings)
    report.panel(
        "One save adds to the loop", "ms", {name: [1e3 * s for s in cost[name]] for name in names}
    )
    report.panel(
        "Slowest step of a block",
        "ms",
        {n: _slowest(results[n], pace) for n in (NO_SAVING, *names)},
    )
    report.publish(args.markdown, args.chart)


def _slowest(blocks: Blocks, pace: Pace) -> list[float]:
    """Return the slowest step of each round in milliseconds."""
    first, others = pace.saves, pace.saves * (pace.every - 1)
    return [
        1e3
        * max(
            blocks.first_step_s[r * first : (r + 1) * first]
            + blocks.other_step_s[r * others : (r + 1) * others]
        )
        for r in range(len(blocks.total_s))
    ]


if __name__ == "__main__":
    main()
