"""The state that is saved: a byte-level transformer and its AdamW, as a training run would hold
them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class Size:
    """Layers and width: about ``12 * layers * width**2`` fp32 parameters, and three times that with
    the moments.
    """

    layers: int
    width: int


SIZES = {
    "tiny": Size(layers=4, width=64),  # 2.5 MB in 140 tensors: to try a script
    "small": Size(layers=12, width=448),  # 0.35 GB in 396 tensors
    "large": Size(layers=24, width=640),  # 1.42 GB in 780 tensors
    "huge": Size(layers=24, width=1280),  # 5.66 GB in 780 tensors
}


class Block(nn.Module):
    """Pre-norm attention and feed-forward, without linear biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape ``(batch, length, width)`` to the same shape."""
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class ByteTransformer(nn.Module):
    """A causal language model over bytes; the output reuses the embedding without being an alias in
    the state.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean next-byte loss of ``tokens``, shape ``(batch, length)``."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class TrainState:
    """A model and its AdamW with both moments filled.

    Args:
        size: A key of ``SIZES``.
        device: Where the parameters and moments live.
        fused: Use the fused AdamW, as training on a GPU does.
    """

    def __init__(self, size: str, device: str = "cpu", *, fused: bool = True) -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        with self.device:
            self.model = ByteTransformer(SIZES[size])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)
        for parameter in self.model.parameters():
            parameter.grad = torch.rand_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def train_step(
        self, tokens: Tensor, guard: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Train on ``tokens``, shape ``(batch, length)``, with ``guard()`` around the update; waits
        for no device.
        """
        self.model(tokens).backward()
        with guard():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def live(self) -> dict[str, Any]:
        """Return the objects themselves, for a checkpointer that takes modules and optimizers."""
        return {"model": self.model, "optimizer": self.optimizer}

    def state_dict(self) -> dict[str, Any]:
        """Return nested state dicts whose tensors share memory with the live ones."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def flat_tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state under one dotted name."""
        return dict(flatten(self.state_dict()))

    def tensors(self) -> list[Tensor]:
        """Return every tensor of the state."""
        return list(self.flat_tensors().values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the state."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @torch.no_grad()
    def perturb(self) -> None:
        """Change every tensor in place, so that no save finds the bytes of the last one."""
        torch._foreach_add_(self.tensors(), 1e-3)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def flatten(value: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts, lists and tuples with dotted names."""
    if isinstance(value, Tensor):
        yield prefix, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from flatten(item, f"{prefix}.{index}" if prefix else str(index))
