"""Which tensors that the user has declared frozen a slot holds already, so that they are not copied into it again.

A tensor is known by its memory and by the counter that torch's own operations move. What writes to the memory past
torch moves nothing, so at each :data:`EVERY`-th save all of them are copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from sidesave.stager import torch_private
from sidesave.stager.torch_private import StorageReference

EVERY: Final = 20
"""Of so many saves one copies everything; a slot that is not used in that one does so when it is used next."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a tensor was when it was copied; its memory is not kept, but its identity is given to no other."""

    storage: StorageReference
    looks: tuple[object, ...] | None


@dataclass(slots=True)
class Held:
    """What one slot holds, by index of the tensor in the plan; it goes with the plan."""

    contents: dict[int, Content] = field(default_factory=dict[int, Content])
    turn: int = -1

    def begin(self, tensors: Sequence[torch.Tensor], frozen: Sequence[int], count: int) -> Mapping[int, Content]:
        """Those of the ``frozen`` tensors that are to be copied, in the save of this number; they are held no longer.

        What comes back is for :meth:`end`.
        """
        known = self.contents if self.turn == count // EVERY else {}
        self.turn = count // EVERY
        held, lacking = dict[int, Content](), dict[int, Content]()
        for index in frozen:
            tensor, before = tensors[index], known.get(index)
            storage, looks = tensor.untyped_storage(), _looks(tensor)
            if before is not None and looks is not None and before.looks == looks and before.storage.is_of(storage):
                held[index] = before
            else:
                lacking[index] = Content(StorageReference(storage), looks)
        self.contents = held
        return lacking

    def end(self, copied: Mapping[int, Content]) -> None:
        """All of these have been copied."""
        self.contents.update(copied)


def _looks(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """How a tensor sees its memory, and how often torch has changed that; None where torch does not count."""
    version = torch_private.version_of(tensor)
    if version is None:
        return None
    return version, tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg()
