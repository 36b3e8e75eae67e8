"""Loading: a checkpoint as a fresh nest, or into live objects. All of it is checked before anything live is touched."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from sidesave.client.arguments import path_text
from sidesave.client.loading import apply, resized
from sidesave.client.loading.mismatch import Mismatches, Strangers
from sidesave.client.loading.plan import DICTS, Fitting
from sidesave.client.loading.rename import Rename
from sidesave.client.loading.selection import Choice, Selection, filled
from sidesave.client.reading.checkpoint_reader import open_checkpoint
from sidesave.client.runs import catalog
from sidesave.errors import (
    InvalidArgumentError,
    StateMismatchError,
    WriteError,
    brief,
)
from sidesave.writer_daemon.format import integrity
from sidesave.writer_daemon.format.integrity import Fault
from sidesave.writer_daemon.format.manifest import MANIFEST
from sidesave.writer_daemon.storage import PosixStorage

logger = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str],
    *,
    into: dict[str, Any] | None = None,
    map_location: str | torch.device | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Load the checkpoint in ``path``; needs no daemon, and blocks at the speed of the medium.

    It may be of any number of ranks, and be loaded by any other. What is spread over a mesh in ``into`` (``DTensor``)
    takes this rank's part and reads no more than that; everything else comes whole. What ranks have saved each for
    itself comes back to the same rank. To another number of ranks it comes if it was the same for all; see
    :class:`sidesave.PerRank` for how to say what each gets. Of plain numbers outside of it that differ, and without
    ``into`` of all else, rank 0's come, with a warning. No rank talks to another. In a process with a process group the
    rank is the one in the world, not that on the node: it is for storage that all ranks share.

    Args:
        path: A ``step-XXXXXXXX`` directory.
        into: Live objects by the names they were saved under: modules and optimizers and everything else with
            ``load_state_dict`` take their state, tensors are filled in place, plain values are replaced in this dict.
            Without it a fresh nest is returned, state dicts in the place of objects.
        map_location: Device for fresh tensors; None is the CPU.
        include: Patterns (``"model"``, ``"model.layers.*"``) of the FQNs to load, and of all below them; None is all.
        exclude: Patterns of FQNs to leave out; of a list in a fresh nest the rest closes up. What is left out of a live
            optimizer (``"optimizer.param_groups.*.lr"``), or of another object that takes its state whole, stays as it
            is.
        rename: From the names in the checkpoint to those of ``into``, or of the nest: a dict of FQNs and what they
            begin with (``{"model.module": "model", "head": None}``), of which the longest counts, or a function of each
            leaf's FQN; None leaves it out. ``include`` and ``exclude`` know the names in the checkpoint.
        strict: With ``into``, raise when an item's keys are not exactly those saved; else load what both have, and log
            the rest. Keys that only some ranks have saved, each a stage of a pipeline, may be missing in the target.
            With ``include`` or ``exclude`` the target may have more keys than what is chosen by them; behind a function
            as ``rename``, which cannot be turned round, it may not. Raise too, else log it, when there is nothing in
            the checkpoint that a pattern speaks of; ``exclude`` may speak of what only the target of this rank has. An
            old name in a dict ``rename`` that is not there is logged with ``into``, which tells whether that matters,
            else raised.
        dtype: Cast floating-point tensors to this, except the step counts and hyperparameters of optimizers.
        verify: Compare everything read with its digests.
        allow_pickle: Unpickle values that were pickled, which runs code that the checkpoint chooses.

    Returns:
        The nest, or ``into`` itself.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        IntegrityError: A file is missing, short, or does not match its digest; nothing live has been touched.
        StateMismatchError: Items, keys, shapes or dtypes differ, a pattern matches nothing, or there is nothing to
            load; ten of each kind are named, with names that are like them, and nothing has been touched.
        InvalidArgumentError: An argument is wrong, or ``rename`` gives two things one name.
        FormatVersionError: It was written in a newer format.
        UnsupportedValueError: It holds pickled values and ``allow_pickle`` is false.
    """
    loaded = read(
        path,
        into=into,
        map_location=map_location,
        include=include,
        exclude=exclude,
        rename=rename,
        strict=strict,
        dtype=dtype,
        verify=verify,
        allow_pickle=allow_pickle,
        **own_place(),
    )
    return loaded.apply()


def own_place() -> dict[str, int]:
    """This process's rank, and the size of the world; 0 of 1 where there is no process group."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return {"rank": 0, "size": 1}
    return {"rank": distributed.get_rank(), "size": distributed.get_world_size()}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that has been read and checked, in fresh memory; nothing live has been touched.

    Attributes:
        path: The checkpoint; of several the last.
        nbytes_read: Bytes that were read for it.
        missing: Names of the target that it has not; none, if ``strict``.
        unexpected: Names in it that the target has not; none, if ``strict``.
    """

    path: str
    nbytes_read: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    _state: dict[str, Any]
    _into: dict[str, Any] | None
    _exact: bool

    def has(self, name: str) -> bool:
        """Whether there is anything for an item."""
        found = self._state.get(name)
        return name in self._state and not (type(found) in DICTS and not found)

    def apply(self) -> dict[str, Any]:
        """Give live objects what was loaded for them; once. Returns what :func:`load` does.

        What a live object raises is raised here; objects that came before it have been put back as they were, except
        modules and tensors, which come last.
        """
        if self._into is None:
            return self._state
        apply.give(self._into, self._state, strict=self._exact)
        return self._into


def read(
    path: str | os.PathLike[str],
    *,
    into: dict[str, Any] | None = None,
    map_location: str | torch.device | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
    rank: int = 0,
    size: int | None = None,
) -> Loaded:
    """The first half of :func:`load`, all that can fail for the checkpoint: for ranks that go on only if all can.

    ``rank`` is the one to load as, of ``size``, None for as many as have saved it; see :func:`load` for all else.
    """
    choice = Choice(include, exclude, rename, dtype, strict=strict)
    check_into(into)
    device = _device(map_location)

    def read(place: str) -> Loaded:
        with open_checkpoint(place, rank, size) as reader:
            selection = Selection(reader, choice, into, allow_pickle=allow_pickle)
            resized.settle(reader, selection, choice, into, allow_pickle=allow_pickle)
            found = Mismatches()
            if into is not None:
                found = fit(into, selection.nest, selection.partial, choice.required, [selection], strict=strict)
            needed = selection.needed(selection.nest)
            selection.check_apart(needed, live=into is not None)
            values = selection.read(needed, device if into is None else None, verify=verify)
            exact = strict and not (found.missing or found.unexpected or found.absent)
            state = filled(selection.nest, values)
            apply.refuse_two_for_one(into or {}, state)
            names = tuple(found.missing), tuple(found.unexpected)
            return Loaded(place, reader.nbytes_read, *names, state, into, exact)

    return catalog.read_settled(os.path.realpath(path_text(path)), read)


def _device(map_location: object) -> torch.device | None:
    """The device for fresh tensors; ``InvalidArgumentError`` for what is none, or none that this process has."""
    if map_location is None:
        return None
    told = brief(map_location)
    if callable(map_location) or isinstance(map_location, Mapping):
        raise InvalidArgumentError(
            f"map_location must be one device, not {told}: a checkpoint does not say which devices its "
            "tensors were on, so there is nothing to map; load it to the CPU, and move what you want"
        )
    try:
        device = torch.device(cast("str", map_location))
        torch.empty(0, device=device)
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise InvalidArgumentError(f"map_location={told} is no device here: {why}") from error
    return device


def check_into(into: object) -> None:
    """``into`` is a plain dict, or None."""
    if into is not None and type(into) is not dict:
        raise InvalidArgumentError(f"into must be a dict of named items, not {type(into).__name__}")


def fit(
    into: Mapping[str, Any],
    nest: dict[str, Any],
    partial: Collection[str],
    required: Callable[[str], bool] | None,
    selections: Sequence[Selection],
    *,
    strict: bool,
    strangers: Iterable[Strangers] = (),
) -> Mismatches:
    """Compare live objects with a nest, and take out of it what they have no place for though that is no mistake.

    Raises ``StateMismatchError`` for all that does not fit; what is missing or unexpected is logged, if not ``strict``.
    ``strangers`` are known already, and told if something is missing.
    """
    fitting = Fitting(partial, strict=strict, required=required)
    fitting.compare(into, nest)
    found = fitting.mismatches
    if found.missing:
        found.strangers += strangers
    renamed = any(selection.renaming for selection in selections)
    lines = found.text(
        lambda: (name for selection in selections for name in selection.names()), renamed=renamed, strict=strict
    )
    empty = strict and into and not any(name in nest for name in into) and not lines
    if lines or empty:
        items = ", ".join(repr(item) for selection in selections for item in selection.items())
        lines = lines or f"nothing of it is chosen for {', '.join(map(repr, into))}; the checkpoint has {items}"
        raise StateMismatchError(f"the checkpoint does not fit, and nothing was loaded:\n  {lines}")
    if found.missing or found.unexpected:
        logger.warning("loading what both have: of %s, %s", selections[-1].where, found.summary())
    for holder, key in fitting.surplus:
        del holder[key]
    return found


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What :func:`verify` found.

    Attributes:
        path: The checkpoint.
        nbytes: Bytes compared with digests.
        faults: Everything that is wrong, one line each when printed.
    """

    path: str
    nbytes: int
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.faults


def verify(path: str | os.PathLike[str], *, on_bytes: Callable[[int], None] | None = None) -> VerifyReport:
    """Compare every byte of a checkpoint with its digests, read from the medium; blocking, loads nothing.

    Args:
        path: A ``step-XXXXXXXX`` directory.
        on_bytes: Called with the number of bytes compared since its last call.

    Raises:
        WriteError: The directory cannot be opened at all.
    """

    def check(place: str) -> VerifyReport:
        checked = 0

        def count(nbytes: int) -> None:
            nonlocal checked
            checked += nbytes
            if on_bytes is not None:
                on_bytes(nbytes)

        storage = PosixStorage(os.path.dirname(place))
        try:
            with contextlib.suppress(WriteError):  # what is wrong with it is told below
                storage.hold(os.path.basename(place), MANIFEST)
            faults = tuple(integrity.check_checkpoint(storage, os.path.basename(place), count))
        finally:
            storage.close()
        return VerifyReport(place, checked, faults)

    return catalog.read_settled(os.path.realpath(path_text(path)), check, is_whole=lambda report: report.ok)
