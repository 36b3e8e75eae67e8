"""A small character transformer of the GPT-2 kind, with dropout and with tied input and output
embeddings.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_lib import Size

DROPOUT = 0.1


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.norm_attention(x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        attended = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=DROPOUT if self.training else 0.0, is_causal=True
        )
        x = x + self.dropout(self.project(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class CharTransformer(nn.Module):
    def __init__(self, size: Size, *, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, characters, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.characters.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[batch, context, characters]` for tokens `[batch, context]`."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.characters(tokens) + self.positions(places))
        return self.head(self.norm(self.blocks(x)))
