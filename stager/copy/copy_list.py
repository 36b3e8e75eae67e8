"""Decides how tensors are copied into a slot; cached while addresses and layouts stay the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from sidesave.errors import UnsupportedValueError
from sidesave.stager import ownership, plan
from sidesave.stager.copy import packing
from sidesave.stager.copy.fingerprint import NORMED, WindowViews
from sidesave.stager.copy.memcopy import Region
from sidesave.stager.copy.packing import ALIGNMENT, Batch, is_plain
from sidesave.stager.copy.slot import StagingSlot
from sidesave.stager.devices import kinds
from sidesave.stager.plan import Target
from sidesave.stager.state.flat_state import FlatState

_MAX_MISSES: Final = 3
"""Stop caching a state whose addresses have changed at this many saves in a row."""


class DeviceList:
    """One device's tensors to capture at the call and those an optimizer guards; holds no tensors.

    Attributes:
        captured: Index of each tensor and its offset in the image, in the order of offsets.
        guarded: Indices, sorted by dtype.
        half_nbytes: Wanted size of a half of the scratch.
        batches: Cached layouts, by the size of the half.
        windows: Cached views of the guarded tensors' windows.
    """

    def __init__(
        self,
        indices: Sequence[int],
        tensors: Sequence[torch.Tensor],
        targets: Sequence[Target],
        owned: Mapping[int, int],
    ) -> None:
        """Divide the tensors with these indices into captured and guarded ones."""
        self.captured: list[tuple[int, int]] = []
        self.guarded: list[int] = []
        self.batches: dict[int, Batch] = {}
        self.windows = WindowViews()
        self._large: list[tuple[int, int, bool]] = []
        need = 0
        for index in sorted(indices, key=lambda index: targets[index].offset):
            source, nbytes = tensors[index], targets[index].nbytes
            if not nbytes:
                continue
            owns = False
            if nbytes >= plan.SMALL_NBYTES and source.dtype in NORMED and is_plain(source):
                owns = ownership.is_owned(source, owned)
                self._large.append((source.data_ptr(), nbytes, owns))
            if owns:
                self.guarded.append(index)
            else:
                self.captured.append((index, targets[index].offset))
                need += nbytes + ALIGNMENT
        self.guarded.sort(key=lambda index: NORMED[tensors[index].dtype])
        self.half_nbytes = next(
            (size for size in packing.HALF_NBYTES if need <= size), packing.HALF_NBYTES[-1]
        )

    def holds(self, owned: Mapping[int, int]) -> bool:
        """Whether optimizers own the same tensors as when the list was made; ignores addresses."""
        return all(
            (nbytes <= owned.get(address, -1)) is owns for address, nbytes, owns in self._large
        )


class CopyList:
    """How some tensors of a state are copied into a slot. Holds no tensors.

    Attributes:
        regions: Copied at the call by all cores.
        gathered: Indices of tensors that torch copies at the call: strided, conjugated, or on a
            device without a runtime.
        overlapped: Indices of CPU tensors that are copied during training.
        devices: Tensors that :mod:`sidesave.stager.copy.device_copy` copies, by device.
    """

    def __init__(
        self,
        indices: Sequence[int],
        tensors: Sequence[torch.Tensor],
        slot: StagingSlot,
        owned: Mapping[int, int],
        *,
        overlap_host: bool = False,
    ) -> None:
        """Classify the tensors with these indices.

        Raises ``UnsupportedValueError`` if the storage of one was resized to 0 bytes.
        """
        self.regions: list[Region] = []
        self.gathered: list[int] = []
        self.overlapped: list[int] = []
        on_device: dict[torch.device, list[int]] = {}
        for index in indices:
            source, target = tensors[index], slot.targets[index]
            on_host = source.is_cpu
            has_lane = not on_host and kinds.runtime_of(source.device) is not None
            # FSDP does so
            if (on_host or has_lane) and target.nbytes and not source.untyped_storage().nbytes():
                raise UnsupportedValueError(
                    f"{target.fqn} has no memory: its storage was resized to 0 bytes"
                )
            if has_lane:
                on_device.setdefault(source.device, []).append(index)
            elif on_host and overlap_host and _may_run_beside(source, owned):
                self.overlapped.append(index)
            elif on_host and is_plain(source):
                self.regions.append((target.address, source.data_ptr(), target.nbytes))
            else:
                if not on_host:
                    kinds.warn_synchronous(source.device.type)
                self.gathered.append(index)
        self.devices = {
            device: DeviceList(some, tensors, slot.targets, owned)
            for device, some in on_device.items()
        }

    def holds(self, owned: Mapping[int, int]) -> bool:
        """Whether optimizers own the same tensors as when the list was made; ignores addresses."""
        return all(each.holds(owned) for each in self.devices.values())


@dataclass(slots=True)
class _Prepared:
    """A cached copy list and the state that it is valid for.

    Attributes:
        looks: ``FlatState.looks`` of the state.
        requested: All indices that :func:`lists_of` was called with.
        indices: The indices that ``copy_list`` covers, with the ``addresses`` of their tensors.
        moving: The other indices: tensors whose addresses change from save to save.
        misses: Number of saves in a row at which most addresses had changed.
        matched: Origin of a state that the list was valid for, and index and address of the tensors
            that another state of that origin may have at other addresses.
    """

    looks: object
    requested: Sequence[int]
    indices: Sequence[int]
    addresses: list[int]
    copy_list: CopyList
    moving: frozenset[int] = frozenset()
    misses: int = 0
    matched: tuple[object, list[tuple[int, int]]] = (None, [])

    def matches_origin(self, flat: FlatState, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the state's origin shows that all addresses are unchanged."""
        origin, fresh = self.matched
        same = flat.origin is not None and flat.origin is origin
        return same and all(tensors[index].data_ptr() == address for index, address in fresh)

    def remember_origin(self, flat: FlatState, slot: StagingSlot) -> None:
        """Store that the list is valid for a state of this origin."""
        pairs = zip(self.indices, self.addresses, strict=True)
        fresh = [
            (index, address) for index, address in pairs if slot.targets[index].fqn in flat.fresh
        ]
        self.matched = flat.origin, fresh


def lists_of(
    slot: StagingSlot,
    flat: FlatState,
    tensors: Sequence[torch.Tensor],
    requested: Sequence[int],
    owned: Mapping[int, int],
    *,
    overlap_host: bool,
) -> list[CopyList]:
    """Return how the tensors at the indices ``requested`` are copied into ``slot``.

    The first list is cached in the slot; a second one covers tensors whose addresses keep changing.
    """
    looks = flat.looks
    if overlap_host:  # depends on more than addresses, so it is not cached
        return [CopyList(requested, tensors, slot, owned, overlap_host=True)]
    cached = slot.prepared
    moving, misses = frozenset[int](), 0
    if (
        isinstance(cached, _Prepared)
        and cached.looks is looks
        and looks is not None
        and cached.requested == requested
    ):
        moving, misses = cached.moving, cached.misses
        matches_origin = cached.matches_origin(flat, tensors)
        addresses = cached.addresses if matches_origin else _addresses(tensors, cached.indices)
        if addresses != cached.addresses:
            moved = {
                index
                for index, a, b in zip(cached.indices, addresses, cached.addresses, strict=True)
                if a != b
            }
            if 2 * len(moved) <= len(cached.indices):
                moving |= moved
            else:
                misses += 1
            if misses >= _MAX_MISSES:
                moving = frozenset(requested)
        elif cached.copy_list.holds(owned):
            if not matches_origin:
                cached.remember_origin(flat, slot)
            cached.misses = 0
            rest = sorted(moving)
            return (
                [cached.copy_list, CopyList(rest, tensors, slot, owned)]
                if rest
                else [cached.copy_list]
            )
    indices = [index for index in requested if index not in moving]
    first = CopyList(indices, tensors, slot, owned)
    slot.prepared = _Prepared(
        looks, requested, indices, _addresses(tensors, indices), first, moving, misses
    )
    return [first, CopyList(sorted(moving), tensors, slot, owned)] if moving else [first]


def _addresses(tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> list[int]:
    selected = tensors if len(indices) == len(tensors) else [tensors[index] for index in indices]
    return list(map(torch.Tensor.data_ptr, selected))


def _may_run_beside(source: torch.Tensor, owned: Mapping[int, int]) -> bool:
    return (
        ownership.is_owned(source, owned)
        and is_plain(source)
        and not (source.is_shared() or ownership.is_resizable(source))
    )
