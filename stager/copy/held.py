"""Frozen tensors whose bytes a staging slot already holds, so that they are not copied again.

A tensor counts as unchanged if its storage, its torch version counter, and the number of optimizer
steps that may have written it are the same. Some writes change none of these, so a sample of each
held tensor's bytes is compared at every save, and all bytes at every :data:`EVERY`-th save. Buffers
are always copied, because modules write them untracked, and so are small tensors, because comparing
them takes as long as copying.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch.optim import Optimizer

from sidesave.stager import ownership, torch_private
from sidesave.stager.copy import fingerprint
from sidesave.stager.copy.packing import is_plain
from sidesave.stager.devices import kinds
from sidesave.stager.plan import SMALL_NBYTES, Target
from sidesave.stager.state.flat_state import FlatState
from sidesave.stager.torch_private import StorageReference, storage_id

EVERY: Final = 20
"""One save in this many compares all bytes; a slot not used by it does so at its next use."""


@dataclass(frozen=True, slots=True)
class Content:
    """The storage and signature of a tensor when it was copied.

    Attributes:
        storage: Identifies the storage without keeping its memory; the identity is not reused.
        signature: See :func:`_signature`.
        digest: The digest of the tensor's bytes, if it is on a device.
    """

    storage: StorageReference
    signature: tuple[object, ...] | None
    digest: bytes = b""

    def is_of(self, tensor: torch.Tensor, signature: tuple[object, ...] | None) -> bool:
        """Whether the tensor has the same storage and no counted write has changed it."""
        same = signature is not None and self.signature == signature
        return same and self.storage.is_of(tensor.untyped_storage())


@dataclass(slots=True)
class Turn:
    """The frozen tensors of one save, by their indices in the plan, and how each is treated.

    Attributes:
        held: Not copied. Windows of those on devices are compared after the call.
        compared: CPU tensors whose bytes are all compared, and copied if they differ.
        copied: Copied like other tensors.
        digests: Expected digests of some of ``copied``; another digest means an untracked change.
        changed: FQNs of tensors that changed untracked.
    """

    held: dict[int, Content] = field(default_factory=dict[int, Content])
    compared: dict[int, Content] = field(default_factory=dict[int, Content])
    copied: dict[int, Content] = field(default_factory=dict[int, Content])
    digests: dict[int, bytes] = field(default_factory=dict[int, bytes])
    changed: list[str] = field(default_factory=list[str])


@dataclass(slots=True, eq=False, weakref_slot=True)
class Held:
    """The frozen tensors that one slot holds, by their indices in the slot's plan."""

    contents: dict[int, Content] = field(default_factory=dict[int, Content])
    turn: int = -1
    windows: dict[torch.device, fingerprint.WindowViews] = field(
        default_factory=dict[torch.device, fingerprint.WindowViews]
    )

    def begin(
        self,
        tensors: Sequence[torch.Tensor],
        targets: Sequence[Target],
        candidates: Iterable[int],
        count: int,
        steps: StepCounts,
    ) -> Turn:
        """Decide what save number ``count`` does with the tensors at the indices ``candidates``.

        Until :meth:`end` only tensors that this save does not copy count as held.
        """
        turn, previous, is_full = Turn(), self.contents, self.turn != count // EVERY
        self.turn = count // EVERY
        storages = {index: tensors[index].untyped_storage() for index in candidates}
        steps.watch(self, {*map(storage_id, storages.values())})
        for index, storage in storages.items():
            tensor, target, before = tensors[index], targets[index], previous.get(index)
            signature = _signature(tensor, steps.of(storage))
            now = Content(StorageReference(storage), signature)
            if before is None or not before.is_of(tensor, signature):
                turn.copied[index] = now
            elif is_full and not tensor.is_cpu:
                turn.copied[index], turn.digests[index] = now, before.digest
            elif is_full:
                turn.compared[index] = before
            elif tensor.is_cpu and not fingerprint.samples_match(
                tensor.data_ptr(), target.address, target.nbytes
            ):
                turn.copied[index] = now
                turn.changed.append(target.fqn)
            else:
                turn.held[index] = before
        self.contents = dict(turn.held)
        return turn

    def end(
        self, turn: Turn, tensors_on_device: Iterable[int], targets: Sequence[Target]
    ) -> list[str]:
        """Add the copied tensors; return the FQNs of device tensors that changed untracked.

        Computes digests of the copies of ``tensors_on_device``, in host memory.
        """
        self.contents |= turn.copied | turn.compared
        changed: list[str] = []
        for index in tensors_on_device:
            content, target = turn.copied[index], targets[index]
            digest = fingerprint.of_memory(target.address, target.nbytes)
            self.contents[index] = Content(content.storage, content.signature, digest)
            if turn.digests.get(index, digest) != digest:
                changed.append(target.fqn)
        return changed


def candidates(
    flat: FlatState, tensors: Sequence[torch.Tensor], targets: Sequence[Target], restless: set[str]
) -> list[int]:
    """Return the indices of tensors that a slot may hold.

    These are declared frozen, large and contiguous, and neither buffers nor in ``restless``.
    """
    if not flat.frozen:
        return []
    buffers = ownership.buffer_storages(flat.modules, SMALL_NBYTES)
    return [
        index
        for index, target in enumerate(targets)
        if target.nbytes >= SMALL_NBYTES
        and target.fqn in flat.frozen
        and target.fqn not in restless
        and is_plain(tensor := tensors[index])
        and (tensor.is_cpu or kinds.runtime_of(tensor.device) is not None)
        and storage_id(tensor.untyped_storage()) not in buffers
    ]


class StepCounts:
    """Counts the optimizer steps that may have written the storages of held tensors.

    Needed because fused optimizers do not increment version counters.
    """

    def __init__(self) -> None:
        """Start without watched storages."""
        self._counts: dict[int, int] = {}
        self._clock = itertools.count(1)
        self._by_slot: weakref.WeakKeyDictionary[Held, set[int]] = weakref.WeakKeyDictionary()
        self._watched: frozenset[int] = frozenset()
        self._writes: weakref.WeakKeyDictionary[
            Optimizer, tuple[int, Mapping[torch.Tensor, list[int]]]
        ]
        self._writes = weakref.WeakKeyDictionary()
        """Number of an optimizer's parameters, and the watched storages it writes for each."""
        ownership.watch_steps(self)

    def watch(self, slot: Held, storages: set[int]) -> None:
        """Count the steps that write ``storages`` from now on, on behalf of ``slot``."""
        if self._by_slot.get(slot, set[int]()) != storages:
            self._by_slot[slot] = storages
            self._watched = frozenset[int]().union(*self._by_slot.values())
            self._writes.clear()

    def of(self, storage: torch.UntypedStorage) -> int:
        """Return a number that changes with each step that may have written the storage."""
        return self._counts.get(storage_id(storage), 0)

    def stepped(self, optimizer: Optimizer) -> None:
        """Count an optimizer step before it runs; takes microseconds if no storage is watched."""
        if not self._watched:
            return
        number = sum(len(group["params"]) for group in optimizer.param_groups)
        writes = self._writes.get(optimizer)
        if writes is None or writes[0] != number:
            writes = self._writes[optimizer] = (
                number,
                ownership.storages_written(optimizer, self._watched),
            )
        for parameter, storages in writes[1].items():
            # a closure may still compute gradients
            if parameter.requires_grad or parameter.grad is not None:
                self._counts.update(dict.fromkeys(storages, next(self._clock)))


def _signature(tensor: torch.Tensor, steps: int) -> tuple[object, ...] | None:
    """Return a value that each counted write to a tensor changes; None if torch does not count."""
    version = torch_private.version_of(tensor)
    return (
        None if version is None else (version, tensor.data_ptr(), steps, ownership.guards_entered())
    )
