"""A state flattened into tensors and plain data, and the names of the files of its parts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

import torch
import xxhash
from torch import nn

from sidesave.stager.state.sharding import Grid
from sidesave.stager.tables import Column, RowImage, RowTable

TENSORS: Final = "tensors"
"""The container of bare tensors at the top level."""
FROZEN: Final = "@frozen"
"""Behind the name of a container: that of its tensors that are not expected to change."""
OBJECTS: Final = "objects"
"""The stem of the file that holds the treespec."""
_MAX_STEM: Final = 130
"""Of the 200 characters that a file name may have."""


@dataclass(frozen=True, slots=True, eq=False)
class TableItem:
    """A table of rows in the state: the object, its columns, and how the names of its containers begin."""

    value: RowTable
    columns: dict[str, Column]
    stem: str


@dataclass(slots=True)
class FlatState:
    """A state taken apart.

    Attributes:
        containers: FQN to tensor, per container (one file each), in the order of the state. The tensors are dense and
            of a dtype that safetensors knows; their memory is the caller's.
        objects: The encoded treespec with all plain data.
        pickled: Whether a value had to be pickled.
        optimizers: Every optimizer met, for the ownership rules.
        modules: Every module met.
        grids: Of tensors that are known to be shared with other ranks, which of them hold what.
        undeclared: Plain tensors of modules and optimizers of which nobody has said which ranks hold the same: they are
            compared in each save.
        per_rank: The FQNs of items that each rank has for itself: in ``PerRank``, or with a state dict of their own.
        frozen: Tensors that the user has declared ``Frozen``.
        tables: Tables of rows by FQN; no tensor of theirs is in ``containers``.
        row_images: What is staged of them, in the order of the plan.
        shared_digest: Of what the treespec says of modules, optimizers and all else that ranks share.
        origin: An object for where the tensors are from: the same one, and all but those in ``fresh`` are the same, in
            the same memory, and all have the same names. None where nothing is remembered.
        fresh: By FQN the tensors that were looked at anew.
        looks: An object for all that can be seen of the tensors without their memory: the same one, the same looks.
    """

    containers: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict[str, dict[str, torch.Tensor]])
    objects: bytes = b""
    pickled: bool = False
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list[torch.optim.Optimizer])
    modules: list[nn.Module] = field(default_factory=list[nn.Module])
    grids: dict[str, Grid] = field(default_factory=dict[str, Grid])
    undeclared: dict[str, None] = field(default_factory=dict[str, None])
    per_rank: list[str] = field(default_factory=list[str])
    frozen: dict[str, None] = field(default_factory=dict[str, None])
    tables: dict[str, TableItem] = field(default_factory=dict[str, TableItem])
    row_images: list[RowImage] = field(default_factory=list[RowImage])
    shared_digest: str = ""
    origin: object = None
    fresh: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    looks: object = None


def container_name(key: str) -> str:
    """The file stem for a top-level key: letters, digits, ``_`` and ``-`` stand, all else is percent-encoded."""
    stem = re.sub(
        r"[^A-Za-z0-9_-]",
        lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass")),
        key,
    )
    if stem in (TENSORS, OBJECTS, "rank", "manifest"):
        stem = f"%{ord(stem[0]):02X}{stem[1:]}"
    if len(stem) > _MAX_STEM:
        stem = f"{stem[:_MAX_STEM]}-{xxhash.xxh3_64_hexdigest(stem.encode())}"
    return stem
