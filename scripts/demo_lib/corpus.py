"""The text that the demo trains on: the documentation inside this Python's own standard library."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

ENOUGH_BYTES = 1_500_000
PACKAGES = (
    ".",
    "asyncio",
    "collections",
    "concurrent/futures",
    "email",
    "http",
    "importlib",
    "json",
    "logging",
)


def docstrings(path: Path) -> Iterator[str]:
    """Every docstring of one source file, in the order of the file."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        documented = isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        if documented and (text := ast.get_docstring(node)):
            yield text


def collect() -> str:
    """The language topics of `help()`, then docstrings of library modules in the order of their
    names; ASCII only.
    """
    parts = [topics[name] for name in sorted(topics)]
    size = sum(map(len, parts))
    library = Path(sysconfig.get_path("stdlib"))
    for path in (path for package in PACKAGES for path in sorted((library / package).glob("*.py"))):
        if size >= ENOUGH_BYTES:
            break
        found = list(docstrings(path))
        parts += found
        size += sum(map(len, found))
    return "\n\n".join(parts).encode("ascii", "replace").decode()


class BlockSampler:
    """Batches of text blocks: each epoch visits every block once, in an order and from an offset of
    its own.

    Its place in the text and its random generator are its state, which is saved beside the model.
    """

    def __init__(self, tokens: Tensor, *, batch: int, context: int, seed: int) -> None:
        self.tokens, self.batch, self.context = tokens, batch, context
        self.generator = torch.Generator().manual_seed(seed)
        self.epoch = -1
        self._next_epoch()

    def _next_epoch(self) -> None:
        self.epoch, self.position = self.epoch + 1, 0
        blocks = (len(self.tokens) - 1) // self.context - 1
        self.offset = int(torch.randint(self.context, (), generator=self.generator))
        self.order = torch.randperm(blocks, generator=self.generator)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each `[batch, context]`."""
        if self.position + self.batch > len(self.order):
            self._next_epoch()
        chosen = self.order[self.position : self.position + self.batch]
        self.position += self.batch
        index = self.offset + chosen[:, None] * self.context + torch.arange(self.context)
        return self.tokens[index], self.tokens[index + 1]

    def state_dict(self) -> dict[str, int | Tensor]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "offset": self.offset,
            "order": self.order,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, int | Tensor]) -> None:
        self.epoch, self.position, self.offset = (
            int(state[name]) for name in ("epoch", "position", "offset")
        )
        order, generator = state["order"], state["generator"]
        assert isinstance(order, Tensor) and isinstance(generator, Tensor)
        self.order = order.clone()
        self.generator.set_state(generator)
