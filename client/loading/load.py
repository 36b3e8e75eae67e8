"""Loads a checkpoint as a fresh nest, or into live objects once everything has been checked."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import torch

from sidesave.client.encryption import Encryption, using
from sidesave.client.loading import resized, tensors
from sidesave.client.loading.fitting import PrefixMismatch
from sidesave.client.loading.load_filter import LoadFilter, Rename
from sidesave.client.loading.plan import LoadPlan, filled
from sidesave.client.loading.selection import Selection
from sidesave.client.loading.tensors import EnumLoad, TensorLoad
from sidesave.client.messages import few
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.client.reading.stored import FlatMap, fqn_of
from sidesave.client.runs import finding
from sidesave.client.targets import tensor_memory
from sidesave.client.targets.assign import assign
from sidesave.client.targets.live_map import LiveMap
from sidesave.errors import InvalidArgumentError, StateMismatchError, brief
from sidesave.stager.gc_pause import gc_paused
from sidesave.writer_daemon.storage import urls

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
    storage_options: Mapping[str, Any] | None = None,
    encryption: Encryption | None = None,
) -> dict[str, Any]:
    """Load the checkpoint at ``path``; blocks until all is read, at the speed of storage.

    No daemon is needed. Any number of ranks may load a checkpoint, however many saved it. A
    ``DTensor`` in ``into`` reads this rank's shard only; other tensors are read whole. State that
    each rank saved for itself returns to the same rank. Another number of ranks gets it only if it
    was the same on all; :class:`sidesave.PerRank` can say what each rank gets. Rank 0's value is
    taken, with a warning, for plain numbers outside ``PerRank`` that differ, and without ``into``
    for everything that differs. Ranks do not communicate. The rank is the global one of the process
    group, so ranks must share storage.

    Args:
        path: A ``step-XXXXXXXX`` directory, a ``CheckpointInfo``, or a run directory, which means
            its newest; or the URL of one of them. Only what is loaded is read of it
            (docs/remote.md).
        into: Live objects by the names they were saved under. Objects with ``load_state_dict`` take
            their state, tensors are filled in place, and plain data is replaced inside the existing
            dicts and lists. An optimizer takes its state by parameter name if its modules are in
            ``into``. Wrappers (``DistributedDataParallel``, ``torch.compile``) are in no name, and
            a prefix of theirs in the checkpoint is dropped where that leaves no doubt. Enum members
            are restored where the target holds a member of their class, else as values. Without
            ``into`` a fresh nest of state dicts is returned.
        map_location: Device for fresh tensors; None is the CPU.
        include: Patterns (``"model"``, ``"model.layers.*"``) of the FQNs to load, with all below
            them; None is all.
        exclude: Patterns of FQNs to leave out. Lists in a fresh nest close up. What is left out of
            an optimizer (``"optimizer.param_groups.*.lr"``), or of another object with
            ``load_state_dict``, stays as it is.
        rename: From names in the checkpoint to those of the target: a dict of FQN prefixes
            (``{"model.module": "model", "head": None}``), whose longest match is used, or a
            function of each leaf's FQN; None leaves it out. ``include`` and ``exclude`` use the
            names in the checkpoint.
        strict: Raise if a live tensor or object is missing in the checkpoint, or if an item of the
            checkpoint has something that the target has not; else load what both have and log the
            rest. What only some ranks saved, such as the stages of a pipeline, needs no place. With
            ``include`` or ``exclude`` the target may have more than they choose, unless ``rename``
            is a function, which cannot be inverted. Plain data is not compared: it becomes what was
            saved. Beside live objects, what the checkpoint lacks stays, and what the target lacks
            is added with a warning. A pattern that matches nothing raises too, else is logged;
            ``exclude`` may match what only this rank's target has. An old name of a dict ``rename``
            that the checkpoint lacks is logged with ``into``, where a missing name shows, else
            raised.
        dtype: Cast floating-point parameters and buffers to this: the tensors of modules and
            tables, and live tensors in ``into`` that are parameters or have this dtype. Tensors in
            the state of other objects, and in a nest, are cast too, except scalars (which may be
            counters), states of optimizers, extra states of modules, and tensors made of inner
            ones.
        verify: Compare everything that is read with its digests.
        allow_pickle: Unpickle values that were pickled, which runs code that the checkpoint
            chooses.
        storage_options: For a URL, what its store needs besides the environment: credentials, an
            endpoint.
        encryption: The key of an encrypted checkpoint.

    Returns:
        The nest, or ``into`` itself.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        IntegrityError: A file is missing, short, or does not match its digest; or a damaged
            checkpoint of the run may be the newest. No live object has changed.
        StateMismatchError: Items, keys, shapes or dtypes differ, a live tensor cannot be written,
            live tensors share memory that cannot hold their values, a pattern matches nothing, or
            there is nothing to load. Ten of each kind are named, with similar names. No live object
            has changed. Also if a live object raises when it is given its state: it is named, and
            its error is the cause. All objects are put back then, except data loaders and tables
            (they come last among what may raise); modules and tensors that run torch's code only
            come after all that may raise.
        InvalidArgumentError: An argument is wrong, or ``rename`` gives two things one name.
        FormatVersionError: It was written in a newer format.
        UnsupportedValueError: It holds pickled values and ``allow_pickle`` is false.
        KeyMissingError: It is encrypted, and no key was given.
        WrongKeyError: It is encrypted with another key.
    """
    request = LoadRequest(
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
    with urls.using(storage_options), using(encryption):
        loaded = request.read(path)
    return loaded.apply()


class Place(TypedDict):
    """A rank, and the number of ranks."""

    rank: int
    size: int


def own_place() -> Place:
    """This process's rank and the world size; 0 of 1 without a process group."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return Place(rank=0, size=1)
    return Place(rank=distributed.get_rank(), size=distributed.get_world_size())


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that has been read and checked, in fresh memory. No live object has changed.

    Attributes:
        path: The checkpoint; the last one of several.
        nbytes_read: Bytes that were read.
        missing: Names that only the target has; none if ``strict``.
        unexpected: Names that only the checkpoint has; none if ``strict``.
    """

    path: str
    nbytes_read: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    _given: LoadPlan | dict[str, Any]
    _exact: bool = False

    def has(self, name: str) -> bool:
        """Whether an item of the target is given anything."""
        return name in self._given if isinstance(self._given, dict) else self._given.has(name)

    def lacking(self) -> list[str]:
        """Names of the target's plain data the checkpoint lacks; not all are in ``missing``."""
        return [] if isinstance(self._given, dict) else self._given.lacking()

    def apply(self) -> dict[str, Any]:
        """Assign to the live objects, once. Returns what :func:`load` returns.

        Raises ``StateMismatchError`` if a live object raises. The others are put back, see
        :func:`load`.
        """
        if not isinstance(self._given, LoadPlan):
            return self._given
        assign(self._given.live, self._given.assignments(), strict=self._exact)
        return self._given.live.into


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """The arguments of :func:`load`, for ``rank`` of ``size`` ranks (None: as many as saved).

    With ``casts`` a tensor may have another floating-point dtype than its target, which keeps its
    own.
    """

    into: dict[str, Any] | None = None
    map_location: str | torch.device | None = None
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    rename: Rename | None = None
    strict: bool = True
    dtype: torch.dtype | None = None
    verify: bool = True
    allow_pickle: bool = False
    casts: bool = False
    rank: int = 0
    size: int | None = None

    @gc_paused()
    def read(self, path: str | os.PathLike[str]) -> Loaded:
        """Do all that the checkpoint can make fail in :func:`load`; ranks go on only if all can.

        The arguments are checked here too, so that a mistake on one rank is reported on all.
        """
        wanted = LoadFilter(self.include, self.exclude, self.rename, self.dtype, strict=self.strict)
        live = None if self.into is None else live_map(self.into)
        device = _device(self.map_location)
        for attempt in finding.attempts(path):
            with attempt as (place,), CheckpointReader(place, self.rank, self.size) as reader:
                selection = Selection(reader, wanted, live, allow_pickle=self.allow_pickle)
                if reader.resized:
                    resized.settle(reader, selection, wanted, live, allow_pickle=self.allow_pickle)
                if live is None:
                    leaves, containers = selection.flat.leaves, selection.flat.containers
                    selection.check_diverged(leaves.values(), live=False)
                    values = tensors.read_tensors(
                        reader,
                        selection.needed(leaves.values()),
                        device,
                        verify=self.verify,
                        fresh=True,
                    )
                    _tell_values(place, leaves.values(), values)
                    state = FlatMap(
                        {at: filled(leaf, values) for at, leaf in leaves.items()}, containers
                    ).nest()
                    return Loaded(place, reader.nbytes_read, (), (), state)
                plan = LoadPlan(live, casts=self.casts)
                unplaced = plan.take(selection)
                plan.mismatches.unexpected, plan.mismatches.prefixes = (
                    unplaced.unexpected,
                    unplaced.prefixes,
                )
                leaves = check(plan, [selection], wanted.leaves_out, strict=self.strict)
                values = tensors.read_tensors(
                    reader, selection.needed(leaves), None, verify=self.verify
                )
                return finish(plan, leaves, values, place, reader.nbytes_read, strict=self.strict)
        raise AssertionError("unreachable: the last attempt returns or raises")


def check(
    plan: LoadPlan,
    selections: Sequence[Selection],
    leaves_out: Callable[[str], bool],
    *,
    strict: bool,
    prefixes: Iterable[PrefixMismatch] = (),
) -> list[Any]:
    """Compare a plan with its targets before anything is read; return the leaves to assign.

    Raises ``StateMismatchError`` for all that does not fit. Without ``strict``, missing and
    unexpected names are only logged. ``prefixes`` are known mismatches, reported if something is
    missing.
    """
    plan.compare(leaves_out)
    mismatches = plan.mismatches
    if mismatches.missing:
        mismatches.prefixes += prefixes
    leaves, lines = plan.leaves(), ""
    if mismatches.different or mismatches.missing or mismatches.unexpected or mismatches.prefixes:
        renamed = any(selection.renaming.renames for selection in selections)
        lines = mismatches.text(
            lambda: (name for selection in selections for name in selection.names()),
            renamed=renamed,
            strict=strict,
        )
    into = plan.live.into
    if lines or (strict and into and not leaves and plan.is_empty):
        items = ", ".join(repr(item) for selection in selections for item in selection.items())
        lines = lines or (
            f"nothing of it is chosen for {', '.join(map(repr, into))}; the checkpoint has {items}"
        )
        raise StateMismatchError(f"the checkpoint does not fit, and nothing was loaded:\n  {lines}")
    if mismatches.missing or mismatches.unexpected:
        logger.warning(
            "loading what both have: of %s, %s", selections[-1].where, mismatches.summary()
        )
    _tell_unused(plan, leaves, selections)
    for selection in selections:
        if selection.has_differing:
            selection.check_diverged(leaves, live=True)
    return leaves


def finish(
    plan: LoadPlan,
    leaves: Sequence[Any],
    values: dict[Any, Any],
    where: str,
    nbytes_read: int,
    *,
    strict: bool,
) -> Loaded:
    """Fill a plan with the values read from ``where``, the last of several checkpoints."""
    new, odd = plan.fill(values)
    _tell_values(where, leaves, values)
    odd += tensor_memory.conflicts(new)
    if odd:
        raise StateMismatchError(
            "the checkpoint does not fit, and nothing was loaded:\n  "
            + "\n  ".join(
                few(odd, lambda line: f"{line} in the checkpoint; exclude one", "are one")
            )
        )
    mismatches = plan.mismatches
    exact = strict and not (mismatches.missing or mismatches.unexpected or mismatches.absent)
    return Loaded(
        where, nbytes_read, tuple(mismatches.missing), tuple(mismatches.unexpected), plan, exact
    )


def _tell_unused(plan: LoadPlan, leaves: Sequence[Any], selections: Sequence[Selection]) -> None:
    """Warn, by name, of targets that keep their state, and of loaded state that is not used."""
    where = ", ".join(selection.where for selection in selections)
    stay = [
        *plan.mismatches.kept,
        *(name for name in plan.live.into if name in plan.mismatches.absent),
    ]
    if stay:
        names = ", ".join(few(stay, str, "stay"))
        logger.warning("loading %s: no saved state for %s; left unchanged", where, names)
    if plan.new:
        names = ", ".join(few(list(map(fqn_of, plan.new)), str, "are new"))
        logger.warning(
            "loading %s: %s, which the state does not have, are added to it as plain data",
            where,
            names,
        )
    used = {id(leaf) for leaf in leaves} if len(selections) > 1 else set[int]()
    for selection in selections:
        if selection.by_position:
            names = ", ".join(few(selection.by_position, str, "are such"))
            cure = (
                "have the module in the state and in into=, or make the optimizer of "
                "named_parameters()"
            )
            logger.warning(
                "loading %s: the state of %s goes by position, not by name: %s",
                selection.where,
                names,
                cure,
            )
        if selection.unasked:
            names = ", ".join(few(list(selection.unasked), str, "are not loaded"))
            logger.warning("loading %s: not loaded (not in into=): %s", selection.where, names)
        if len(selections) > 1 and not any(
            id(leaf) in used for leaf in selection.flat.leaves.values()
        ):
            logger.warning(
                "nothing of %s is used: later sources override all of it", selection.where
            )


def _tell_values(where: str, leaves: Iterable[Any], values: Mapping[Any, Any]) -> None:
    """Warn of enum members loaded as values, and tensors as plain ones: no class is imported."""
    loads = [
        leaf
        for leaf in leaves
        if isinstance(leaf, TensorLoad) and leaf.ref.whole is not None and leaf in values
    ]
    lost = [(load.ref.fqn, name) for load in loads if (name := load.lost_class(values[load]))]
    if lost:
        lines = few(lost, lambda pair: f"{pair[0]} was a {pair[1]}", "are such")
        logger.warning(
            (
                "loading %s: tensors come as plain ones, as torch.serialization.get_safe_globals() "
                "lacks their class: %s"
            ),
            where,
            ", ".join(lines),
        )
    alone = [leaf for leaf in leaves if isinstance(leaf, EnumLoad) and leaf not in values]
    if alone:
        lines = few(alone, lambda leaf: f"{leaf.fqn} was {leaf.kind}.{leaf.name}", "are such")
        logger.warning(
            "loading %s: members of enums come as their values: %s", where, ", ".join(lines)
        )


def _device(map_location: object) -> torch.device | None:
    """The device for fresh tensors; ``InvalidArgumentError`` if this process has no such device."""
    if map_location is None:
        return None
    shown = brief(map_location)
    if callable(map_location) or isinstance(map_location, Mapping):
        raise InvalidArgumentError(
            f"map_location must be one device, not {shown}: a checkpoint does not say which "
            "devices its tensors were on, so there is nothing to map; load it to the CPU, and move "
            "what you want"
        )
    try:
        device = torch.device(cast("str", map_location))
        torch.empty(0, device=device)
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise InvalidArgumentError(f"map_location={shown} is no device here: {why}") from error
    return device


def live_map(into: object) -> LiveMap:
    """A plain dict as a flat map; ``InvalidArgumentError`` for anything else."""
    if type(into) is not dict:
        raise InvalidArgumentError(f"into must be a dict of named items, not {type(into).__name__}")
    return LiveMap(cast("dict[str, Any]", into))
