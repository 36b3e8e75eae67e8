"""Loading: a checkpoint as a fresh nest, or into live objects. All of it is checked before anything live is touched."""

from __future__ import annotations

import collections
import fnmatch
import logging
import os
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from sidesave.client import catalog, gifts
from sidesave.client.fitting import Expected, Fitting
from sidesave.client.handle import path_text
from sidesave.client.mismatch import Mismatches, Strangers
from sidesave.client.reader import CheckpointReader, Wanted, open_checkpoint
from sidesave.client.renaming import DICTS, Rearrangement, Rename, Renaming, leaves
from sidesave.client.shards import Local
from sidesave.errors import IntegrityError, InvalidArgumentError, StateMismatchError
from sidesave.stager.skeleton import TensorRef
from sidesave.writer_daemon import integrity
from sidesave.writer_daemon.integrity import Fault
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
    itself comes back to the same rank, or from rank 0 to one that did not exist. No rank talks to another. In a process
    with a process group the rank is the one in the world, not that on the node: it is for storage that all ranks share.

    Args:
        path: A ``step-XXXXXXXX`` directory.
        into: Live objects by the names they were saved under: modules and optimizers and everything else with
            ``load_state_dict`` take their state, tensors are filled in place, plain values are replaced in this dict.
            Without it a fresh nest is returned, state dicts in the place of objects.
        map_location: Device for fresh tensors; None is the CPU.
        include: Patterns (``"model"``, ``"model.layers.*"``) of the FQNs to load; None is all.
        exclude: Patterns of FQNs to leave out.
        rename: From the names in the checkpoint to those of ``into``, or of the nest: a dict of FQNs and what they
            begin with (``{"model.module": "model", "head": None}``), of which the longest counts, or a function of each
            leaf's FQN; None leaves it out. ``include`` and ``exclude`` know the names in the checkpoint.
        strict: With ``into``, raise when an item's keys are not exactly those saved; else load what both have, and log
            the rest. Keys that only some ranks have saved, each a stage of a pipeline, may be missing in the target.
            With ``include`` or ``exclude`` the target may have more keys than what is chosen by them; behind a function
            as ``rename``, which cannot be turned round, it may not.
        dtype: Cast floating-point tensors to this, except the step counts of optimizers.
        verify: Compare everything read with its digests.
        allow_pickle: Unpickle values that were pickled, which runs code that the checkpoint chooses.

    Returns:
        The nest, or ``into`` itself.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        IntegrityError: A file is missing, short, or does not match its digest; nothing live has been touched.
        StateMismatchError: Items, keys, shapes or dtypes differ, or there is nothing to load; ten of each kind are
            named, with names that are like them, and nothing has been touched.
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
        rank=own_rank(),
    )
    return loaded.apply()


def own_rank() -> int:
    """This process's rank in the world, 0 where there is no process group."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


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
        gifts.give(self._into, self._state, strict=self._exact)
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
) -> Loaded:
    """The first half of :func:`load`, all that can fail for the checkpoint: for ranks that go on only if all can.

    ``rank`` is the one to load as; see :func:`load` for all else.
    """
    choice = Choice(include, exclude, rename, dtype)
    check_into(into)

    def read(place: str) -> Loaded:
        with open_checkpoint(place, rank) as reader:
            selection = Selection(reader, choice, into, allow_pickle=allow_pickle)
            found = Mismatches()
            if into is not None:
                found = fit(into, selection.nest, selection.partial, choice.required, [selection], strict=strict)
            needed = selection.needed(selection.nest)
            selection.check_apart(needed, live=into is not None)
            values = selection.read(needed, map_location if into is None else None, verify=verify)
            exact = strict and not (found.missing or found.unexpected or found.absent)
            state = filled(selection.nest, values)
            names = tuple(found.missing), tuple(found.unexpected)
            return Loaded(place, reader.nbytes_read, *names, state, into, exact)

    return catalog.read_settled(os.path.realpath(path_text(path)), read)


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
            faults = tuple(integrity.check_checkpoint(storage, os.path.basename(place), count))
        finally:
            storage.close()
        return VerifyReport(place, checked, faults)

    return catalog.read_settled(os.path.realpath(path_text(path)), check, is_whole=lambda report: report.ok)


# What to load ----------------------------------------------------------------------------------------------------


def selector(include: str | Sequence[str] | None, exclude: str | Sequence[str] | None) -> Callable[[str], bool]:
    """Whether an FQN matches one of the patterns in ``include``, None for any, and none of those in ``exclude``."""
    wanted = [include] if isinstance(include, str) else include
    unwanted = [exclude] if isinstance(exclude, str) else exclude or ()

    def selected(fqn: str) -> bool:
        return (wanted is None or _matches(fqn, wanted)) and not _matches(fqn, unwanted)

    return selected


def _matches(fqn: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(fqn, pattern) or fqn.startswith(pattern + ".") for pattern in patterns)


class Choice:
    """What is wanted of a checkpoint, in the words of :func:`load`, checked.

    Attributes:
        selected: Whether a name of the checkpoint is chosen.
        renaming: Gives the target's names for those.
        cast_to: The dtype for floating-point tensors.
        required: Of names of the target, whether the checkpoint has to have them; None is all.
    """

    def __init__(
        self,
        include: str | Sequence[str] | None,
        exclude: str | Sequence[str] | None,
        rename: Rename | None,
        dtype: torch.dtype | None,
    ) -> None:
        """``InvalidArgumentError`` for what cannot be."""
        if dtype is not None and not dtype.is_floating_point:
            raise InvalidArgumentError(f"dtype casts floating-point tensors, so it cannot be {dtype}")
        self.cast_to = dtype
        self.selected: Callable[[str], bool] = selector(include, exclude)
        self.renaming = Renaming(rename)
        self.required: Callable[[str], bool] | None = None
        if include is not None or exclude is not None:
            self.required = self._is_required

    def _is_required(self, name: str) -> bool:
        origins = self.renaming.origins(name)
        return origins is None or any(map(self.selected, origins))


class Selection:
    """What is loaded of a checkpoint: which leaves, under which names, and of each tensor which part.

    Attributes:
        nest: What is loaded as it will be, with :class:`Expected` and :class:`Pickled` for what has to be read.
        partial: The names in it of what not all ranks have saved.
        renaming: Of the names in the checkpoint.
        where: The checkpoint.
    """

    def __init__(
        self, reader: CheckpointReader, choice: Choice, into: Mapping[str, Any] | None, *, allow_pickle: bool
    ) -> None:
        """Choose what ``into`` has an item for, all where that is None; nothing is unpickled, and no tensor read."""
        self.renaming = choice.renaming
        self.where = reader.path
        self._reader = reader
        self._cast_to = choice.cast_to
        self._sparse: dict[str, Expected] = {}
        fqns: list[str] = []
        prefixes = None if into is None else tuple(name + "." for name in into)

        broken: list[Exception] = []

        def chosen(fqn: str) -> bool:
            try:
                name = self.renaming(fqn) if choice.selected(fqn) and not broken else None
            except Exception as error:  # noqa: BLE001 - the user's, and no malformed skeleton: it is raised below
                broken.append(error)
                return False
            if name is None or not (prefixes is None or into is None or name in into or name.startswith(prefixes)):
                return False
            fqns.append(fqn)
            return True

        partial: set[str] = set()
        unpickle = Pickled if allow_pickle else None
        nest = reader.skeleton.build(Expected, only=chosen, unpickle=unpickle, partial=partial)
        if broken:
            raise broken[0]
        found = leaves(nest)
        if len(found) != len(fqns):
            raise IntegrityError(f"{reader.path}: a container holds {len(found)} of {len(fqns)} items")
        for fqn, leaf in zip(fqns, found, strict=True):
            if isinstance(leaf, Expected):
                leaf.look_up(reader, self._cast_to)
                if leaf.ref.sparse_shape is not None:
                    self._sparse[fqn] = leaf
        self.nest: dict[str, Any] = nest
        self.partial: Collection[str] = partial
        if self.renaming:
            arranged = Rearrangement(self.renaming, into, partial)
            self.nest = arranged.build(nest, fqns)
            self.partial = arranged.partial

    def items(self) -> list[str]:
        """The names at the top of the checkpoint."""
        return self._reader.skeleton.keys()

    def names(self) -> list[str]:
        """Everything that the checkpoint has, whatever is chosen of it, under its new names; and what is at the top."""
        found = self.items()

        def note(fqn: str) -> bool:
            found.append(self.renaming(fqn) or fqn)
            return False

        self._reader.skeleton.build(Expected, only=note)
        return found

    def needed(self, nest: Mapping[str, Any]) -> dict[Expected | Pickled, None]:
        """What there is to read of this checkpoint for a nest, in its order."""
        mine = {leaf: None for leaf in leaves(self.nest) if isinstance(leaf, (Expected, Pickled))}
        return {leaf: None for leaf in leaves(nest) if isinstance(leaf, (Expected, Pickled)) and leaf in mine}

    def check_apart(self, needed: Iterable[Expected | Pickled], *, live: bool) -> None:
        """Tensors that are not the same on the ranks that have saved them, and that this rank has not."""
        apart, rank = self._reader.manifest.apart, self._reader.rank
        fqns = [leaf.ref.fqn for leaf in needed if isinstance(leaf, Expected)]
        odd = {fqn: apart[fqn] for fqn in fqns if rank not in apart.get(fqn, (rank,))}
        if not odd:
            return
        told = "\n  ".join(f"{fqn} differs between ranks {_brief(ranks)}" for fqn, ranks in list(odd.items())[:20])
        if live:
            raise StateMismatchError(
                f"nothing was loaded:\n  {told}\nload with as many ranks, or leave it out with exclude="
            )
        logger.warning("%s; of each the first rank's is taken", told)

    def read(
        self, needed: Iterable[Expected | Pickled], device: str | torch.device | None, *, verify: bool
    ) -> dict[Expected | Pickled, Any]:
        """Values for leaves, read and verified; a part of a tensor is a :class:`Local`."""
        tensors = [leaf for leaf in needed if isinstance(leaf, Expected) and leaf.ref.sparse_shape is None]
        sparse = {fqn: leaf for fqn, leaf in self._sparse.items() if leaf in needed}
        parts = self._parts(sparse) if sparse else []
        wanted = [leaf.wanted for leaf in [*tensors, *parts] if leaf.wanted]
        stored = self._reader.read_boxes(wanted, verify=verify)
        made: dict[tuple[Wanted, bool, torch.dtype | None], torch.Tensor] = {}

        def tensor(leaf: Expected) -> Any:
            wanted, shard = leaf.wanted, leaf.shard
            if wanted is None:
                assert shard is not None
                return Local(shard, shard.empty(leaf.dtype))
            key = wanted, leaf.ref.array, leaf.cast_to
            if key not in made:  # tied weights come back tied
                made[key] = _finish(stored[wanted], leaf.ref, device, leaf.cast_to)
            if shard is not None:
                return Local(shard, made[key])
            return made[key].numpy() if leaf.ref.array else made[key]

        values: dict[Expected | Pickled, Any] = {leaf: tensor(leaf) for leaf in tensors}
        if sparse:
            known = {part.ref: part for part in parts}
            nest = self._reader.skeleton.build(lambda ref: tensor(known[ref]), only=sparse.__contains__)
            values.update(zip(sparse.values(), leaves(nest), strict=True))
        # Only now, when all else is known to be as it should be, code of the checkpoint's may run.
        values.update({leaf: pickle.loads(leaf.data) for leaf in needed if isinstance(leaf, Pickled)})
        return values

    def _parts(self, sparse: Collection[str]) -> list[Expected]:
        """The tensors that sparse ones consist of."""
        refs: list[TensorRef] = []
        self._reader.skeleton.build(refs.append, only=sparse.__contains__)
        parts = [Expected(ref) for ref in refs if ref.sparse_shape is None]
        for part in parts:
            part.look_up(self._reader, self._cast_to)
        return parts


class Pickled:
    """Stands for a pickled value while only names and shapes matter."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        """Of ``data``, which is not looked into."""
        self.data = data

    def __str__(self) -> str:
        """What a name has in its place where it is a key."""
        return "<pickled>"


def filled(value: Any, values: Mapping[Any, Any]) -> Any:
    """A nest with its values in the place of what stands for them; dicts and lists are changed in place."""
    if isinstance(value, (Expected, Pickled)):
        return values[value]
    if type(value) in DICTS:
        items = cast("dict[Any, Any]", value)
        if any(type(key) is not str and type(key) is not int for key in items):
            pairs = [(_thawed(key), item) for key, item in items.items()]
            items.clear()
            for key, item in pairs:
                items[key] = item
        for key, item in items.items():
            items[key] = filled(item, values)
    elif type(value) is list:
        parts = cast("list[Any]", value)
        parts[:] = [filled(item, values) for item in parts]
    elif type(value) is tuple:
        return tuple(filled(item, values) for item in cast("tuple[Any, ...]", value))
    elif type(value) is collections.deque:
        queue = cast("collections.deque[Any]", value)
        return collections.deque((filled(item, values) for item in queue), queue.maxlen)
    return _thawed(value)


def _thawed(value: Any) -> Any:
    """A key, or a set, with what is pickled in it unpickled."""
    if type(value) is Pickled:
        return pickle.loads(value.data)
    if type(value) in (tuple, set, frozenset):
        parts = cast("tuple[Any, ...]", value)
        return type(parts)(map(_thawed, parts))
    return value


def _brief(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _finish(
    tensor: torch.Tensor, ref: TensorRef, device: str | torch.device | None, dtype: torch.dtype | None
) -> torch.Tensor:
    if ref.dtype is not None:
        if ref.dtype.is_complex:
            tensor = torch.view_as_complex(tensor)
        else:
            tensor = tensor.view(ref.dtype)
    if ref.array:
        return tensor
    if device is not None:
        tensor = tensor.to(device)
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
