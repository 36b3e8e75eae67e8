"""A state flattened into tensors and plain data, and the names of the files of its parts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import xxhash
from torch import nn

from sidesave.stager.sharding import Grid
from sidesave.stager.tables import Column, RowImage, RowTable

TENSORS: Final = "tensors"
"""The container of bare tensors at the top level."""
FROZEN: Final = "@frozen"
"""Suffix of a container's name: holds those of its tensors that are not expected to change."""
OBJECTS: Final = "objects"
"""The stem of the file that holds the treespec."""
Added = tuple[
    list[tuple[str, torch.Tensor]], list[tuple[str, torch.Tensor]], dict[str, Grid], dict[str, None]
]
"""Tensors that are expected to change, others, and the grids and undeclared ones among them."""
_MAX_STEM: Final = 130
"""Leaves room for suffixes: a file name may have 200 characters."""


@dataclass(frozen=True, slots=True, eq=False)
class TableItem:
    """A table of rows in the state: the object, its columns, and its containers' name prefix."""

    value: RowTable
    columns: dict[str, Column]
    stem: str


@dataclass(slots=True)
class FlatState:
    """A flattened state.

    Attributes:
        containers: FQN to tensor, per container (one file each), in the order of the state. The
            tensors are dense and of a dtype that safetensors knows; their memory is the caller's.
        objects: The encoded treespec with all plain data.
        pickled: Whether a value had to be pickled.
        optimizers: All optimizers in the state, for the ownership rules.
        modules: All modules in the state.
        grids: How tensors shared with other ranks are divided among them, by FQN.
        undeclared: Plain tensors of modules and optimizers that no annotation covers, so which
            ranks hold the same values is unknown; each save compares them.
        per_rank: FQNs of items that each rank has for itself: in ``PerRank``, or objects with a
            ``state_dict``.
        frozen: Tensors that the user has declared ``Frozen``.
        tables: Tables of rows by FQN; their tensors are not in ``containers``.
        row_images: The parts of tables that are staged, in the order of the plan.
        shared_digest: Digest of the treespec of everything that ranks share, such as modules and
            optimizers.
        origin: Identifies the source of the tensors. If two saves have the same one, all tensors
            but ``fresh`` are the same, in the same memory, and all names are the same. None if
            nothing is remembered.
        fresh: The tensors that were collected again in this save, by FQN.
        looks: Identifies the tensors' metadata (all but their memory): the same object means the
            same metadata.
    """

    containers: dict[str, dict[str, torch.Tensor]] = field(
        default_factory=dict[str, dict[str, torch.Tensor]]
    )
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

    def lengths(self, container: str) -> tuple[int, ...]:
        """How much was added up to now; see :meth:`added_since`."""
        own = (self.containers.get(name, {}) for name in (container, container + FROZEN))
        count = sum(map(len, self.containers.values()))
        return count, *map(len, (*own, self.grids, self.undeclared))

    def added_since(self, lengths: Sequence[int], container: str) -> Added | None:
        """All that was added since ``lengths`` were taken; None if another container grew."""
        count, begin, frozen_begin, grids, undeclared = lengths
        changing, frozen = (
            [*itertools.islice(self.containers.get(name, {}).items(), first, None)]
            for name, first in ((container, begin), (container + FROZEN, frozen_begin))
        )
        if sum(map(len, self.containers.values())) - count != len(changing) + len(frozen):
            return None
        new_grids = dict(itertools.islice(self.grids.items(), grids, None))
        new_undeclared = dict(itertools.islice(self.undeclared.items(), undeclared, None))
        return changing, frozen, new_grids, new_undeclared


def container_name(key: str) -> str:
    """Percent-encode a top-level key as a file stem; keeps letters, digits, ``_`` and ``-``."""
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
