"""Models of the differential zoo: each has something that a checkpoint can lose."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrizations


class Plain(nn.Module):
    """Layers with a buffer; ``forward`` takes a batch of eight features, as those of all models
    here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())
        self.head = nn.Linear(8, 4)
        self.register_buffer("seen", torch.tensor(2**24 + 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(batch))


class Convolutions(nn.Module):
    """Batch norm, and weights in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)
        )
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch.reshape(-1, 2, 2, 2)).flatten(1)


class Tied(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(batch)))


class SharesMemory(nn.Module):
    """Two parameters, and two buffers, with one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach())
        table = torch.arange(12.0)
        self.register_buffer("table", table)
        self.register_buffer("window", table[3:9])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.window += 1.0  # type: ignore[operator]
        return self.head(torch.tanh(self.embed(batch)))


class SharesNoMemory(SharesMemory):
    """The same names, each with a memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach() + 1)
        self.window = self.window.clone()


class Recurrent(nn.Module):
    """Weights that an LSTM also holds as one flat list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2)
        self.head = nn.Linear(6, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(batch.reshape(2, -1, 4))[0])


class Parametrized(nn.Module):
    """A weight that is computed of two."""

    def __init__(self) -> None:
        super().__init__()
        self.body = parametrizations.weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(batch)))


class PartlyFrozen(nn.Module):
    """A part without gradients whose batch norm still counts; the zoo saves it as ``Frozen``."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.head = nn.Linear(8, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.base(batch)))


class SparseGradients(nn.Module):
    """An embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8, sparse=True)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.embed(batch[:, :3].abs().mul(4).long().clamp(max=15))


class Large(nn.Module):
    """A weight of the size from which optimizers quantise their states."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 1024)
        self.head = nn.Linear(1024, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(batch)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(Plain, Convolutions, Tied, SharesMemory, SharesNoMemory, Recurrent),
        *(Parametrized, PartlyFrozen, SparseGradients, Large),
    )
}
