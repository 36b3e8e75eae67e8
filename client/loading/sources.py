"""Loads from several checkpoints at once: the optimizer of one run, the backbone of another."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from sidesave.client import arguments
from sidesave.client.arguments import path_text
from sidesave.client.encryption import Encryption, using
from sidesave.client.loading import resized, tensors
from sidesave.client.loading.fitting import Mismatches, PrefixMismatch
from sidesave.client.loading.load import Loaded, check, finish, live_map, own_place
from sidesave.client.loading.load_filter import LoadFilter, Rename
from sidesave.client.loading.plan import LoadPlan
from sidesave.client.loading.selection import Selection
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.client.reading.safetensors_reader import SafetensorsReader
from sidesave.client.reading.stored import Reader
from sidesave.client.runs import finding
from sidesave.client.targets.live_map import unwrap
from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError, StateMismatchError, brief
from sidesave.stager.gc_pause import gc_paused
from sidesave.writer_daemon.checkpoints.replacement import RetryIfReplaced
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint, and the part of it to load; :func:`sidesave.load` explains the rest.

    Plain safetensors weights, as Hugging Face's tools write them, are a source of a single
    ``item``.

    Attributes:
        path: A checkpoint, a run directory, or the URL of one; with ``item`` a ``*.safetensors``
            file, a directory of them, or an index (``*.safetensors.index.json``). Of a directory,
            the files in its index count, else ``model.safetensors``, else all.
        step: The step of a run directory; None is the latest.
        item: For plain safetensors weights: the item that they belong to. It is put before their
            names (``layers.0.weight`` becomes ``model.layers.0.weight``) before ``include``,
            ``exclude`` and ``rename``. They have no digests, so they are not verified.
        include: Patterns of the FQNs to take, as this checkpoint names them; None is all.
        exclude: Patterns of FQNs to leave out.
        rename: From names in this checkpoint to those of the target.
        strict: Raise if an item has something that the target has no place for, or if nothing is
            loaded. With ``include`` the source may have more names than the target.
        dtype: Cast floating-point parameters and buffers to this.
        storage_options: For a URL, what its store needs besides the environment.
        encryption: The key of an encrypted checkpoint.
    """

    path: str | os.PathLike[str]
    step: int | None = None
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    rename: Rename | None = None
    strict: bool = True
    dtype: torch.dtype | None = None
    item: str | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    encryption: Encryption | None = field(default=None, repr=False, hash=False)

    def __post_init__(self) -> None:
        if self.step is not None:
            object.__setattr__(self, "step", arguments.check_step(self.step))
        if self.item is not None:
            if (
                not isinstance(cast("object", self.item), str)
                or self.item.strip(".") != self.item
                or not self.item
            ):
                raise InvalidArgumentError(
                    f"item must be the name of an item of the state, not {brief(self.item)}"
                )
            if self.step is not None:
                raise InvalidArgumentError(
                    "step= chooses a checkpoint of a run, item= is for plain weights: not both"
                )
        self.choice()

    def choice(self) -> LoadFilter:
        """The part of it to load."""
        return LoadFilter(self.include, self.exclude, self.rename, self.dtype, strict=self.strict)

    def locate(self) -> str:
        """Return the checkpoint's current directory.

        One of several ranks should call this, and send the result to the others.

        Raises like :func:`sidesave.load`; ``CheckpointNotFoundError`` says what is there instead.
        """
        if self.item is not None:
            return finding.locate_weights(self.path)
        with urls.using(self.storage_options):
            return finding.locate(self.path, self.step)


def load_sources(
    sources: Iterable[Source] | Source,
    into: dict[str, Any],
    *,
    strict: bool = True,
    verify: bool = True,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Load several checkpoints into live objects; later ones override earlier ones.

    Everything is read and checked before a live object is touched, and only what will be used is
    read. Modules, dicts and tensors take values one by one. An optimizer, or another object with
    ``load_state_dict``, takes all of its state from the last source that has any. See
    :func:`sidesave.load` for everything else.

    Args:
        sources: The checkpoints, in order.
        into: Live objects by name.
        strict: Raise if no source has something that is in ``into``; else it is left unchanged, and
            logged.
        verify: Compare everything read with its digests.
        allow_pickle: Unpickle values that were pickled, which runs code that the checkpoints
            choose.

    Returns:
        ``into`` itself.

    Raises:
        CheckpointNotFoundError: A source is not a checkpoint; the message describes it.
        StateMismatchError: Something is missing in all sources, has no place, or does not fit.
            Nothing has changed.
    """
    loaded = read_sources(
        sources, into, strict=strict, verify=verify, allow_pickle=allow_pickle, **own_place()
    )
    return loaded.apply()


@gc_paused()
def read_sources(
    sources: Iterable[Source] | Source,
    into: dict[str, Any],
    *,
    strict: bool = True,
    verify: bool = True,
    allow_pickle: bool = False,
    rank: int = 0,
    size: int | None = None,
) -> Loaded:
    """Do all that checkpoints can make fail in :func:`load_sources`, as ``rank`` of ``size``."""
    wanted = check_sources(sources)
    if not wanted:
        raise InvalidArgumentError("there are no sources to load from")
    live = live_map(into)
    for source in wanted:
        _check_item(source, into)
    places = [source.locate() for source in wanted]
    own = [place for place, source in zip(places, wanted, strict=True) if source.item is None]
    for attempt in RetryIfReplaced(*own):
        with attempt as located, contextlib.ExitStack() as opened:
            current_paths = dict(zip(own, located, strict=True))
            plan, prefixes = LoadPlan(live), list[PrefixMismatch]()
            readers, selections = list[Reader](), list[Selection]()
            for source, place in zip(wanted, places, strict=True):
                if source.item is not None:
                    readers.append(SafetensorsReader(place, source.item, rank))
                else:
                    with urls.using(source.storage_options), using(source.encryption):
                        readers.append(
                            opened.enter_context(CheckpointReader(current_paths[place], rank, size))
                        )
            for source, reader in zip(wanted, readers, strict=True):
                choice = source.choice()
                selection = Selection(reader, choice, live, allow_pickle=allow_pickle)
                if reader.resized:
                    with urls.using(source.storage_options), using(source.encryption):
                        resized.settle(reader, selection, choice, live, allow_pickle=allow_pickle)
                unplaced = plan.take(selection, tie=True)
                _check(source, selection, plan, unplaced)
                prefixes += unplaced.prefixes
                selections.append(selection)
            leaves = check(plan, selections, lambda name: False, strict=strict, prefixes=prefixes)
            values = dict[Any, Any]()
            for selection, reader in zip(selections, readers, strict=True):
                values.update(
                    tensors.read_tensors(reader, selection.needed(leaves), None, verify=verify)
                )
            nbytes_read = sum(reader.nbytes_read for reader in readers)
            return finish(plan, leaves, values, selections[-1].where, nbytes_read, strict=strict)
    raise AssertionError("unreachable: the last attempt returns or raises")


def check_sources(sources: object) -> list[Source]:
    """One or several sources as a list; ``InvalidArgumentError`` for anything else."""
    several = isinstance(sources, Iterable) and not isinstance(sources, (str, Mapping))
    checked: list[Source] = []
    for source in cast("Iterable[object]", sources if several else (sources,)):
        if not isinstance(source, Source):
            hint = "sidesave.Source(path, ...), or several in a list"
            raise InvalidArgumentError(
                f"sources must be {hint}, not {type(source).__name__} {brief(source)}"
            )
        checked.append(source)
    return checked


def _check_item(source: Source, into: Mapping[str, Any]) -> None:
    """Raise if plain weights have no item, or one that is not in ``into`` and not renamed."""
    if source.item is not None and source.item not in into and not source.choice().renaming.renames:
        raise InvalidArgumentError(
            f"item={source.item!r} is not among what is loaded into: {', '.join(into)}"
        )
    if source.item is None and finding.are_weights(source.path):
        modules = [name for name, target in into.items() if isinstance(unwrap(target), nn.Module)]
        proposed = " or ".join(f"item={name!r}" for name in modules or into)
        where = os.path.abspath(path_text(source.path))
        what = (
            "plain safetensors weights, whose names have no item in front: say which they are for "
            f"with {proposed}"
        )
        raise CheckpointNotFoundError(errno.ENOENT, f"no checkpoint: {what}", where)


def _check(source: Source, selection: Selection, plan: LoadPlan, unplaced: Mismatches) -> None:
    """Raise for names without a place in the target, or log them if the source allows that."""
    where = f"{selection.where} does not fit, and nothing was loaded:\n  "
    renamed = selection.renaming.renames
    if unplaced.unexpected and source.strict and source.include is None:
        raise StateMismatchError(where + unplaced.text(list, renamed=renamed, strict=True))
    if unplaced.unexpected:
        logger.warning(
            "loading what has a place here: of %s, %s", selection.where, unplaced.summary()
        )
    if source.strict and not unplaced.placed:
        hints = Mismatches(prefixes=unplaced.prefixes).text(list, renamed=renamed, strict=True)
        items = ", ".join(map(repr, selection.items()))
        into = ", ".join(plan.live.into)
        raise StateMismatchError(
            where + (hints or f"nothing of it is chosen for {into}; it has {items}")
        )
