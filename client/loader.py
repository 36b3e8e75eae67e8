"""Loading: a checkpoint as a fresh nest, or into live objects. All of it is checked before anything live is touched."""

from __future__ import annotations

import fnmatch
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sidesave.client import catalog, gifts
from sidesave.client.fitting import Expected, Fitting, nearest
from sidesave.client.handle import path_text
from sidesave.client.reader import CheckpointReader, Wanted, open_checkpoint
from sidesave.client.shards import Local
from sidesave.errors import InvalidArgumentError, StateMismatchError
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
    strict: bool = True,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Load the checkpoint in ``path``; needs no daemon, and blocks at the speed of the medium.

    It may be of any number of ranks, and be loaded by any other. What is spread over a mesh in ``into`` (``DTensor``)
    takes this rank's part and reads no more than that; everything else comes whole. What ranks have saved each for
    itself comes back to the same rank, or from rank 0 to one that did not exist. No rank talks to another.

    Args:
        path: A ``step-XXXXXXXX`` directory.
        into: Live objects by the names they were saved under: modules and optimizers and everything else with
            ``load_state_dict`` take their state, tensors are filled in place, plain values are replaced in this dict.
            Without it a fresh nest is returned, state dicts in the place of objects.
        map_location: Device for fresh tensors; None is the CPU.
        include: Patterns (``"model.layers.*"``) of the FQNs to load; None is all.
        exclude: Patterns of FQNs to leave out.
        strict: With ``into``, raise when an item's keys are not exactly those saved; else load what both have. Keys
            that only some ranks have saved, each a stage of a pipeline, may be missing in the target.
        dtype: Cast floating-point tensors to this.
        verify: Compare everything read with its digests.
        allow_pickle: Unpickle values that were pickled, which runs code that the checkpoint chooses.

    Returns:
        The nest, or ``into`` itself.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        IntegrityError: A file is missing, short, or does not match its digest; nothing live has been touched.
        StateMismatchError: Items, keys, shapes or dtypes differ; all of them are named, and nothing has been touched.
        FormatVersionError: It was written in a newer format.
        UnsupportedValueError: It holds pickled values and ``allow_pickle`` is false.
    """
    distributed = torch.distributed
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    loaded = read(
        path,
        into=into,
        map_location=map_location,
        include=include,
        exclude=exclude,
        strict=strict,
        dtype=dtype,
        verify=verify,
        allow_pickle=allow_pickle,
        rank=rank,
    )
    return loaded.apply()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that has been read and checked, in fresh memory; nothing live has been touched.

    Attributes:
        path: The checkpoint.
        nbytes_read: Bytes that were read for it.
    """

    path: str
    nbytes_read: int
    _state: dict[str, Any]
    _into: dict[str, Any] | None
    _strict: bool

    def apply(self) -> dict[str, Any]:
        """Give live objects what was loaded for them; once. Returns what :func:`load` does.

        What a live object raises is raised here; objects that came before it have been put back as they were, except
        modules and tensors, which come last.
        """
        if self._into is None:
            return self._state
        gifts.give(self._into, self._state, strict=self._strict)
        return self._into


def read(
    path: str | os.PathLike[str],
    *,
    into: dict[str, Any] | None = None,
    map_location: str | torch.device | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
    rank: int = 0,
) -> Loaded:
    """The first half of :func:`load`, all that can fail for the checkpoint: for ranks that go on only if all can.

    ``rank`` is the one to load as; see :func:`load` for all else.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise InvalidArgumentError(f"dtype casts floating-point tensors, so it cannot be {dtype}")
    if into is not None and type(into) is not dict:
        raise InvalidArgumentError(f"into must be a dict of named items, not {type(into).__name__}")
    selected = selector(include, exclude)
    strict_within = strict and include is None and exclude is None

    def read(place: str) -> Loaded:
        with open_checkpoint(place, rank) as reader:
            chosen = selected if into is None else _within(into, reader, selected, strict=strict)
            selection = _Selection(reader, chosen, dtype, allow_pickle=allow_pickle)
            if into is not None:
                selection.fit(into, strict=strict_within)
            selection.check_apart(live=into is not None)
            state = selection.read(map_location if into is None else None, verify=verify)
            return Loaded(place, reader.nbytes_read, state, into, strict_within)

    return catalog.read_settled(os.path.realpath(path_text(path)), read)


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


def _within(
    into: Mapping[str, Any], reader: CheckpointReader, selected: Callable[[str], bool], *, strict: bool
) -> Callable[[str], bool]:
    """Narrow a selection to the items of ``into``; an item that was never saved is an error."""
    saved = reader.skeleton.keys()
    unknown = [name for name in into if name not in saved]
    if unknown and strict:
        raise StateMismatchError(
            "\n".join(f"the checkpoint has no item {name!r}{nearest(name, saved)}" for name in unknown)
        )
    prefixes = tuple(name + "." for name in into)
    return lambda fqn: (fqn in into or fqn.startswith(prefixes)) and selected(fqn)


class _Selection:
    """What is loaded of a checkpoint: which leaves, and of each tensor which part."""

    def __init__(
        self,
        reader: CheckpointReader,
        selected: Callable[[str], bool],
        cast_to: torch.dtype | None,
        *,
        allow_pickle: bool,
    ) -> None:
        self._reader = reader
        self._selected: Callable[[str], bool] = selected
        self._cast_to = cast_to
        self._allow_pickle = allow_pickle
        self._survey()

    def _survey(self) -> None:
        """The nest as it will be, with :class:`Expected` for tensors. Nothing is unpickled before all is checked."""
        self._leaves: list[Expected] = []
        self._partial: set[str] = set()

        def expect(ref: TensorRef) -> Expected:
            leaf = Expected.of(ref, self._reader, self._cast_to)
            if ref.sparse_shape is None:  # which stands for parts that have come before it
                self._leaves.append(leaf)
            return leaf

        self._nest = self._reader.skeleton.build(
            expect,
            only=self._selected,
            unpickle=_leave_pickled if self._allow_pickle else None,
            partial=self._partial,
        )

    def fit(self, into: Mapping[str, Any], *, strict: bool) -> None:
        """Compare with live objects, and leave out what they have no place for though other ranks had."""
        fitting = Fitting(self._partial, strict=strict)
        fitting.compare(into, self._nest)
        if not fitting.surplus:
            return
        selected, surplus = self._selected, fitting.surplus
        self._selected = lambda fqn: selected(fqn) and not any(name in surplus for name in _and_above(fqn))
        self._survey()
        self.fit(into, strict=strict)

    def check_apart(self, *, live: bool) -> None:
        """Tensors that are not the same on the ranks that have saved them, and that this rank has not."""
        apart, rank = self._reader.manifest.apart, self._reader.rank
        odd = {
            leaf.ref.fqn: apart[leaf.ref.fqn] for leaf in self._leaves if rank not in apart.get(leaf.ref.fqn, (rank,))
        }
        if not odd:
            return
        told = "\n  ".join(f"{fqn} differs between ranks {_brief(ranks)}" for fqn, ranks in list(odd.items())[:20])
        if live:
            raise StateMismatchError(
                f"nothing was loaded:\n  {told}\nload with as many ranks, or leave it out with exclude="
            )
        logger.warning("%s; of each the first rank's is taken", told)

    def read(self, device: str | torch.device | None, *, verify: bool) -> dict[str, Any]:
        """The nest, read and verified; a part of a tensor is a :class:`Local`."""
        stored = self._reader.read_boxes([leaf.wanted for leaf in self._leaves if leaf.wanted], verify=verify)
        made: dict[tuple[Wanted, bool], torch.Tensor] = {}
        leaves = iter(self._leaves)

        def tensor(ref: TensorRef) -> torch.Tensor | Local:
            leaf = next(leaves)  # of the same skeleton, in the same order
            wanted, shard = leaf.wanted, leaf.shard
            if wanted is None:
                assert shard is not None
                return Local(shard, shard.empty(leaf.dtype))
            key = (wanted, ref.array)
            if key not in made:  # tied weights come back tied
                made[key] = _finish(stored[wanted], ref, device, self._cast_to)
            return made[key] if shard is None else Local(shard, made[key])

        unpickle = pickle.loads if self._allow_pickle else None
        return self._reader.skeleton.build(tensor, only=self._selected, unpickle=unpickle)


def _and_above(fqn: str) -> Iterator[str]:
    """An FQN and those of all that it is in."""
    end = len(fqn)
    while end > 0:
        yield fqn[:end]
        end = fqn.rfind(".", 0, end)


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


def _leave_pickled(data: bytes) -> None:
    """Stands for a pickled value while only names and shapes matter."""
