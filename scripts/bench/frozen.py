"""What a save costs where most of a model is not trained: bytes, the call, and until it is durable.

    python -m scripts.bench.frozen --size large --rounds 8

One process, one checkpointer for each way to save, one save of each a round, in rotating order.
Each save finds its adapter and optimizer changed. Of the rows, "everything trains" is a model of
that size with its AdamW; the others are such a model, of which nothing trains, with an adapter of 1
% of its parameters and the adapter's AdamW: saved as plain tensors, as modules whose parameters
need no gradient, declared ``Frozen``, and with a base that changes all the same.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sidesave
from scripts.bench.common import arguments, rotated, settle, workspace
from scripts.bench.report import Report, machine, median, ratios, spread
from scripts.bench.state import SIZES, ByteTransformer

WHOLE = "adapter, all of it written"


class Adapted:
    """A base that nothing trains, and an adapter with its AdamW that hold a hundredth of its
    parameters.
    """

    def __init__(self, size: str) -> None:
        self.base = ByteTransformer(SIZES[size]).requires_grad_(False)
        count = sum(parameter.numel() for parameter in self.base.parameters()) // 100
        self.adapter = nn.ParameterList([nn.Parameter(torch.rand(count // 20)) for _ in range(20)])
        self.optimizer = torch.optim.AdamW(self.adapter.parameters())
        self.train()

    def train(self) -> None:
        """Change what is trained."""
        for parameter in self.adapter:
            parameter.grad = torch.rand_like(parameter)
        self.optimizer.step()

    def change_base(self) -> None:
        """Change what is not trained, as an average of weights is."""
        torch._foreach_add_([parameter.detach() for parameter in self.base.parameters()], 1e-3)
        self.train()

    def items(self, base: Any) -> dict[str, Any]:
        """The state, with the base as it is to be saved."""
        return {"base": base, "adapter": self.adapter, "optimizer": self.optimizer}


class Full:
    """A model of which everything trains, and its AdamW."""

    def __init__(self, size: str) -> None:
        self.model = ByteTransformer(SIZES[size])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.train()

    def train(self) -> None:
        """Change everything."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@dataclass
class Way:
    """One way to save, and what its saves took."""

    name: str
    state: Callable[[], dict[str, Any]]
    train: Callable[[], None]
    checkpointer: sidesave.Checkpointer
    written_nbytes: list[float] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)
    staged_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)

    def save(self, step: int, *, counts: bool) -> None:
        """Train and save once; the checkpoint before the last is deleted outside of the timing."""
        self.train()
        settle(0)
        start = time.perf_counter()
        handle = self.checkpointer.save(step, self.state())
        called = time.perf_counter()
        handle.staged.result()
        staged = time.perf_counter()
        path = Path(handle.committed.result().path)
        durable = time.perf_counter()
        if counts:
            self.call_s.append(called - start)
            self.staged_s.append(staged - start)
            self.durable_s.append(durable - start)
            facts = [each.stat() for each in path.iterdir()]
            self.written_nbytes.append(sum(each.st_size for each in facts if each.st_nlink == 1))
        if step:
            self.checkpointer.delete(step - 1).result()


def main() -> None:
    """Measure and report."""
    args = arguments(__doc__, rounds=8, peers=False).parse_args()
    torch.manual_seed(0)
    full, adapted, changing = Full(args.size), Adapted(args.size), Adapted(args.size)
    plain = {name: parameter.detach() for name, parameter in adapted.base.named_parameters()}
    report = Report("Frozen parameters")
    with workspace(args.dir) as folder, contextlib.ExitStack() as opened:

        def way(name: str, state: Callable[[], dict[str, Any]], train: Callable[[], None]) -> Way:
            place = folder / name.replace(" ", "-")
            return Way(
                name,
                state,
                train,
                opened.enter_context(
                    sidesave.Checkpointer(place, staging=sidesave.StagingOptions(slots=1))
                ),
            )

        ways = [
            way(
                "everything trains",
                lambda: {"model": full.model, "optimizer": full.optimizer},
                full.train,
            ),
            way(WHOLE, lambda: adapted.items(plain), adapted.train),
            way(
                "adapter, base without gradients",
                lambda: adapted.items(adapted.base),
                adapted.train,
            ),
            way(
                "adapter, base Frozen",
                lambda: adapted.items(sidesave.Frozen(adapted.base)),
                adapted.train,
            ),
            way(
                "the same, its base changes",
                lambda: changing.items(changing.base),
                changing.change_base,
            ),
        ]
        # the first save of each writes everything, the second is a warm-up
        for step in range(args.rounds + 2):
            for each in rotated(ways, step):
                each.save(step, counts=step > 1)
        base = next(each for each in ways if each.name == WHOLE)
        report.note(
            f"{args.rounds} saves of each, one slot. Minimum / median / maximum. {machine(folder)}."
        )
        report.table(
            (
                "",
                "MB written",
                "call, ms",
                "until it may change, ms",
                "durable, s",
                "/ all written",
            ),
            [
                (
                    each.name,
                    median(each.written_nbytes, 1e-6, 1),
                    spread(each.call_s, 1e3, 1),
                    spread(each.staged_s, 1e3, 1),
                    spread(each.durable_s, 1, 3),
                    median(ratios(each.durable_s, base.durable_s), 1, 3),
                )
                for each in ways
            ],
        )
        report.publish(args.markdown, None)


if __name__ == "__main__":
    main()
