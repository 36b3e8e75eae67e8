"""How each tensor of a state is copied into a slot; remembered while the tensors keep their memory and looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from sidesave.errors import UnsupportedValueError
from sidesave.stager.copy.device_copy import DeviceList
from sidesave.stager.copy.memcopy import Region
from sidesave.stager.copy.packing import is_plain
from sidesave.stager.copy.pool import Slot
from sidesave.stager.devices import kinds
from sidesave.stager.state import ownership
from sidesave.stager.state.flat_state import FlatState

_MAX_MISSES: Final = 3
"""A state that lies elsewhere at so many saves one after the other is looked at anew at each."""


class CopyList:
    """How some tensors of a state are copied into a slot. It keeps no tensor.

    Attributes:
        regions: Copied at the call by all cores.
        gathered: Indices of what torch copies at the call: strided, conjugated, or of a device without a runtime.
        overlapped: Indices of tensors of host memory that are copied beside training.
        devices: What goes through :mod:`sidesave.stager.copy.device_copy`.
    """

    def __init__(
        self,
        indices: Sequence[int],
        tensors: Sequence[torch.Tensor],
        slot: Slot,
        owned: Mapping[int, int],
        *,
        overlap_host: bool = False,
    ) -> None:
        """Look at the tensors with these indices.

        Raises ``UnsupportedValueError`` for one whose storage was resized to nothing.
        """
        self.regions: list[Region] = []
        self.gathered: list[int] = []
        self.overlapped: list[int] = []
        on_device: dict[torch.device, list[int]] = {}
        for index in indices:
            source, target = tensors[index], slot.targets[index]
            on_host = source.is_cpu
            has_lane = not on_host and kinds.runtime_of(source.device) is not None
            if (on_host or has_lane) and target.nbytes and not source.untyped_storage().nbytes():  # FSDP does so
                raise UnsupportedValueError(f"{target.fqn} has no memory: its storage was resized to nothing")
            if has_lane:
                on_device.setdefault(source.device, []).append(index)
            elif on_host and overlap_host and _may_run_beside(source, owned):
                self.overlapped.append(index)
            elif on_host and is_plain(source):
                self.regions.append((target.address, source.data_ptr(), target.nbytes))
            else:
                if not on_host:
                    kinds.tell_synchronous(source.device.type)
                self.gathered.append(index)
        self.devices = {device: DeviceList(some, tensors, slot.targets, owned) for device, some in on_device.items()}

    def holds(self, owned: Mapping[int, int]) -> bool:
        """Whether ownership of these tensors, whose memory is the same, is the same as then."""
        return all(each.holds(owned) for each in self.devices.values())


@dataclass(slots=True)
class _Prepared:
    """The list of what a slot is filled with, and what it holds for; ``elsewhere`` lies elsewhere at each save."""

    looks: object
    every: Sequence[int]
    indices: Sequence[int]
    addresses: list[int]
    copy_list: CopyList
    elsewhere: frozenset[int] = frozenset()
    misses: int = 0
    met: tuple[object, list[tuple[int, int]]] = (None, [])
    """The origin of a state that it held for, and index and address of what another of that may have elsewhere."""

    def is_met(self, flat: FlatState, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all that it holds for lies where it lay, as far as that follows from where the state is from."""
        origin, fresh = self.met
        same = flat.origin is not None and flat.origin is origin
        return same and all(tensors[index].data_ptr() == address for index, address in fresh)

    def meet(self, flat: FlatState, slot: Slot) -> None:
        """What it holds for lies where it lay in this state."""
        every = zip(self.indices, self.addresses, strict=True)
        fresh = [(index, address) for index, address in every if slot.targets[index].fqn in flat.fresh]
        self.met = flat.origin, fresh


def lists_of(
    slot: Slot,
    flat: FlatState,
    tensors: Sequence[torch.Tensor],
    every: Sequence[int],
    owned: Mapping[int, int],
    *,
    overlap_host: bool,
) -> list[CopyList]:
    """How those of ``every`` index of the tensors of ``flat``, one after the other, are copied into ``slot``."""
    looks = flat.looks
    if overlap_host:  # which depends on more than where a tensor is
        return [CopyList(every, tensors, slot, owned, overlap_host=True)]
    known = slot.prepared
    elsewhere, misses = frozenset[int](), 0
    if isinstance(known, _Prepared) and known.looks is looks and looks is not None and known.every == every:
        elsewhere, misses = known.elsewhere, known.misses
        is_met = known.is_met(flat, tensors)
        addresses = known.addresses if is_met else _addresses(tensors, known.indices)
        if addresses != known.addresses:
            moved = {index for index, a, b in zip(known.indices, addresses, known.addresses, strict=True) if a != b}
            if 2 * len(moved) <= len(known.indices):
                elsewhere |= moved
            else:
                misses += 1
            if misses >= _MAX_MISSES:
                elsewhere = frozenset(every)
        elif known.copy_list.holds(owned):
            if not is_met:
                known.meet(flat, slot)
            known.misses = 0
            rest = sorted(elsewhere)
            return [known.copy_list, CopyList(rest, tensors, slot, owned)] if rest else [known.copy_list]
    indices = [index for index in every if index not in elsewhere]
    first = CopyList(indices, tensors, slot, owned)
    slot.prepared = _Prepared(looks, every, indices, _addresses(tensors, indices), first, elsewhere, misses)
    return [first, CopyList(sorted(elsewhere), tensors, slot, owned)] if elsewhere else [first]


def _addresses(tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> list[int]:
    some = tensors if len(indices) == len(tensors) else [tensors[index] for index in indices]
    return list(map(torch.Tensor.data_ptr, some))


def _may_run_beside(source: torch.Tensor, owned: Mapping[int, int]) -> bool:
    return (
        ownership.is_owned(source, owned)
        and is_plain(source)
        and not (source.is_shared() or ownership.is_resizable(source))
    )
