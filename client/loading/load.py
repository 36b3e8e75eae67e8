"""Loading: a checkpoint as a fresh nest, or into live objects. All of it is checked before anything live is touched."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from sidesave.client.loading import apply, resized, tensors
from sidesave.client.loading.flat import FlatMap, LiveMap, fqn_of
from sidesave.client.loading.messages import PrefixMismatch
from sidesave.client.loading.plan import LoadPlan, filled
from sidesave.client.loading.rename import Rename
from sidesave.client.loading.selection import LoadFilter, Selection
from sidesave.client.loading.tensors import EnumLoad
from sidesave.client.messages import few
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.client.runs import finding
from sidesave.errors import InvalidArgumentError, StateMismatchError, brief
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
) -> dict[str, Any]:
    """Load the checkpoint in ``path``; needs no daemon, and blocks at the speed of the medium.

    It may be of any number of ranks, and be loaded by any other. What is spread over a mesh in ``into`` (``DTensor``)
    takes this rank's part and reads no more than that; everything else comes whole. What ranks have saved each for
    itself comes back to the same rank. To another number of ranks it comes if it was the same for all; see
    :class:`sidesave.PerRank` for how to say what each gets. Of plain numbers outside of it that differ, and without
    ``into`` of all else, rank 0's come, with a warning. No rank talks to another. In a process with a process group the
    rank is the one in the world, not that on the node: it is for storage that all ranks share.

    Args:
        path: A ``step-XXXXXXXX`` directory, a ``CheckpointInfo``, or a run directory, of which it is the newest one; or
            the URL of one of them, of which no more is read than what is loaded (docs/remote.md).
        into: Live objects by the names they were saved under: modules and optimizers and everything else with
            ``load_state_dict`` take their state, tensors are filled in place, and plain data is replaced, in the dicts
            and lists that are there. An optimizer whose modules are there takes its state by the names of their
            parameters. Members of enums come where it has some of their class, else as their values.
            Without it a fresh nest is returned, state dicts in the place of objects.
        map_location: Device for fresh tensors; None is the CPU.
        include: Patterns (``"model"``, ``"model.layers.*"``) of the FQNs to load, and of all below them; None is all.
        exclude: Patterns of FQNs to leave out; of a list in a fresh nest the rest closes up. What is left out of a live
            optimizer (``"optimizer.param_groups.*.lr"``), or of another object that takes its state whole, stays as it
            is.
        rename: From the names in the checkpoint to those of ``into``, or of the nest: a dict of FQNs and what they
            begin with (``{"model.module": "model", "head": None}``), of which the longest counts, or a function of each
            leaf's FQN; None leaves it out. ``include`` and ``exclude`` know the names in the checkpoint.
        strict: Raise where a live tensor or object finds nothing in the checkpoint, or this has something of an item
            that has no place there; else load what both have, and log the rest. What only some ranks have saved, each a
            stage of a pipeline, need have no place. With ``include`` or ``exclude`` the target may have more than they
            choose, but not behind a function as ``rename``, which cannot be turned round. Plain data is no matter of
            ``strict``: it becomes what was saved; beside live objects what the checkpoint lacks stays, and what the
            target lacks is added, with a warning. A pattern that matches nothing raises too, else is logged;
            ``exclude`` may match what only the target of this rank has. An old name in a dict ``rename`` that is not
            there is logged with ``into``, which tells whether that matters, else raised.
        dtype: Cast floating-point tensors to this, except the step counts and hyperparameters of optimizers.
        verify: Compare everything read with its digests.
        allow_pickle: Unpickle values that were pickled, which runs code that the checkpoint chooses.
        storage_options: For a URL, what its store needs besides the environment: credentials, an endpoint.

    Returns:
        The nest, or ``into`` itself.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        IntegrityError: A file is missing, short, or does not match its digest; or it is not known which checkpoint of a
            run is the newest, for one that may be is damaged. Nothing live has been touched.
        StateMismatchError: Items, keys, shapes or dtypes differ, a pattern matches nothing, or there is nothing to
            load; ten of each kind are named, with names that are like them, and nothing has been touched.
        InvalidArgumentError: An argument is wrong, or ``rename`` gives two things one name.
        FormatVersionError: It was written in a newer format.
        UnsupportedValueError: It holds pickled values and ``allow_pickle`` is false.
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
    with urls.using(storage_options):
        loaded = request.read(path)
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
    _given: LoadPlan | dict[str, Any]
    _exact: bool = False

    def has(self, name: str) -> bool:
        """Whether there is anything for an item of the target."""
        return name in self._given if isinstance(self._given, dict) else self._given.has(name)

    def apply(self) -> dict[str, Any]:
        """Give live objects what was loaded for them; once. Returns what :func:`load` does.

        What a live object raises is raised here; objects that came before it have been put back as they were, except
        modules and tensors, which come last.
        """
        if not isinstance(self._given, LoadPlan):
            return self._given
        apply.assign(self._given, strict=self._exact)
        return self._given.live.into


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What is to be loaded, by ``rank`` of ``size`` that load; None is as many as have saved it. See :func:`load`."""

    into: dict[str, Any] | None = None
    map_location: str | torch.device | None = None
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    rename: Rename | None = None
    strict: bool = True
    dtype: torch.dtype | None = None
    verify: bool = True
    allow_pickle: bool = False
    rank: int = 0
    size: int | None = None

    def read(self, path: str | os.PathLike[str]) -> Loaded:
        """The first half of :func:`load`, all that can fail for the checkpoint: for ranks that go on only if all can.

        The arguments are checked only here, so that what is wrong with one rank's can be told on all.
        """
        wanted = LoadFilter(self.include, self.exclude, self.rename, self.dtype, strict=self.strict)
        live = None if self.into is None else live_map(self.into)
        device = _device(self.map_location)
        for attempt in finding.attempts(path):
            with attempt as (place,), CheckpointReader(place, self.rank, self.size) as reader:
                selection = Selection(reader, wanted, live, allow_pickle=self.allow_pickle)
                resized.settle(reader, selection, wanted, live, allow_pickle=self.allow_pickle)
                if live is None:
                    leaves, containers = selection.flat.leaves, selection.flat.containers
                    selection.check_apart(leaves.values(), live=False)
                    values = tensors.read_tensors(reader, selection.needed(leaves.values()), device, verify=self.verify)
                    _tell_values(place, leaves.values(), values)
                    state = FlatMap({at: filled(leaf, values) for at, leaf in leaves.items()}, containers).nest()
                    return Loaded(place, reader.nbytes_read, (), (), state)
                plan = LoadPlan(live)
                unplaced = plan.take(selection)
                plan.found.unexpected, plan.found.prefixes = unplaced.unexpected, unplaced.prefixes
                check(plan, [selection], wanted.leaves_out, strict=self.strict)
                values = tensors.read_tensors(reader, selection.needed(plan.leaves()), None, verify=self.verify)
                return finish(plan, values, place, reader.nbytes_read, strict=self.strict)
        raise AssertionError("unreachable: the last attempt returns or raises")


def check(
    plan: LoadPlan,
    selections: Sequence[Selection],
    leaves_out: Callable[[str], bool],
    *,
    strict: bool,
    prefixes: Iterable[PrefixMismatch] = (),
) -> None:
    """Compare a plan with its targets, before anything is read.

    Raises ``StateMismatchError`` for all that does not fit; what is missing or unexpected is logged, if not ``strict``.
    ``prefixes`` are known already, and told if something is missing.
    """
    plan.compare(leaves_out)
    found = plan.found
    if found.missing:
        found.prefixes += prefixes
    renamed = any(selection.renaming for selection in selections)
    lines = found.text(
        lambda: (name for selection in selections for name in selection.names()), renamed=renamed, strict=strict
    )
    into = plan.live.into
    if lines or (strict and into and plan.is_empty):
        items = ", ".join(repr(item) for selection in selections for item in selection.items())
        lines = lines or f"nothing of it is chosen for {', '.join(map(repr, into))}; the checkpoint has {items}"
        raise StateMismatchError(f"the checkpoint does not fit, and nothing was loaded:\n  {lines}")
    if found.missing or found.unexpected:
        logger.warning("loading what both have: of %s, %s", selections[-1].where, found.summary())
    _tell_unused(plan, selections)
    leaves = plan.leaves()
    for selection in selections:
        selection.check_apart(leaves, live=True)


def finish(plan: LoadPlan, values: dict[Any, Any], where: str, nbytes_read: int, *, strict: bool) -> Loaded:
    """Fill a plan with the values that were read of the checkpoint ``where``, of several the last."""
    values.update(plan.members())
    _tell_values(where, plan.leaves(), values)
    plan.fill(values)
    odd = plan.two_for_one()
    if odd:
        raise StateMismatchError(
            "the checkpoint does not fit, and nothing was loaded:\n  "
            + "\n  ".join(few(odd, lambda line: f"{line} in the checkpoint; exclude one", "are one"))
        )
    found = plan.found
    exact = strict and not (found.missing or found.unexpected or found.absent)
    return Loaded(where, nbytes_read, tuple(found.missing), tuple(found.unexpected), plan, exact)


def _tell_unused(plan: LoadPlan, selections: Sequence[Selection]) -> None:
    """What stays as it was though something was loaded, and what there was to load and is not used, by their names."""
    where = ", ".join(selection.where for selection in selections)
    stay = [*plan.found.kept, *(name for name in plan.live.into if name in plan.found.absent)]
    if stay:
        names = ", ".join(few(stay, str, "stay"))
        logger.warning("loading %s: it has nothing for %s, which stay as they are", where, names)
    if plan.new:
        names = ", ".join(few(list(map(fqn_of, plan.new)), str, "are new"))
        logger.warning("loading %s: %s, which the state does not have, are added to it as plain data", where, names)
    leaves = {id(leaf) for leaf in plan.leaves()}
    for selection in selections:
        if selection.by_position:
            names = ", ".join(few(selection.by_position, str, "are such"))
            cure = "have the module in the state and in into=, or make the optimizer of named_parameters()"
            logger.warning(
                "loading %s: the state of %s goes by position, not by name: %s", selection.where, names, cure
            )
        if selection.unasked:
            names = ", ".join(few(list(selection.unasked), str, "are not loaded"))
            logger.warning("loading %s: nobody has asked for %s, which it has too", selection.where, names)
        if len(selections) > 1 and not any(id(leaf) in leaves for leaf in selection.flat.leaves.values()):
            logger.warning("nothing of %s is used: later sources have all that it was to give", selection.where)


def _tell_values(where: str, leaves: Iterable[Any], values: Mapping[Any, Any]) -> None:
    """Members of enums of which only the values are given, for no class of the checkpoint's is imported."""
    alone = [leaf for leaf in leaves if isinstance(leaf, EnumLoad) and leaf not in values]
    if alone:
        lines = few(alone, lambda leaf: f"{leaf.fqn} was {leaf.kind}.{leaf.name}", "are such")
        logger.warning("loading %s: members of enums come as their values: %s", where, ", ".join(lines))


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


def live_map(into: object) -> LiveMap:
    """A plain dict as a flat map; ``InvalidArgumentError`` for anything else."""
    if type(into) is not dict:
        raise InvalidArgumentError(f"into must be a dict of named items, not {type(into).__name__}")
    return LiveMap(cast("dict[str, Any]", into))
