"""A small transformer that trains on a device, with the same bits from the same sums."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# before the first use of CUDA in this process
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Embedding and head have 512 KiB each, of which a rank has half: what is smaller than 256 KiB is
# packed at the call, and no copy of it runs beside training.
CHARACTERS, WIDTH, CONTEXT, BATCH = 2048, 64, 16, 2


@contextmanager
def repeatable() -> Iterator[None]:
    """The same bits from the same sums; attention by plain operators, which can be simulated
    too.
    """
    torch.use_deterministic_algorithms(True)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


class Transformer(nn.Module):
    """With buffers that each forward writes: nobody owns them, and no guard holds them back."""

    mean: Tensor
    seen: Tensor

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CHARACTERS)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder(self.embedding(tokens))
        if self.training:
            self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
            self.seen += tokens.numel()
        return self.head(x)


def batch(number: int) -> Tensor:
    """Pinned and not waited for, as a data loader has it."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(CHARACTERS, (BATCH, CONTEXT), generator=generator)
    return tokens.pin_memory().to("cuda", non_blocking=True)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
