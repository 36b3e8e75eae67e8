"""``save``, ``async_save`` and ``load`` as ``torch.distributed.checkpoint`` has them, on checkpoints of sidesave.

The parent of a ``checkpoint_id`` is the run directory, of which one ``Checkpointer`` stays open for the process; the
digits at its end are the step; and a link has the given name. See docs/integrations/dcp.md.
"""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections.abc import Mapping
from typing import Any, Final, Unpack, cast

import torch
from torch import nn
from torch.distributed import checkpoint as torch_dcp
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from sidesave.client import arguments
from sidesave.client.checkpointer import Checkpointer
from sidesave.client.loading.flat import FlatMap, is_stateful
from sidesave.client.loading.load import LoadRequest
from sidesave.client.options import CheckpointerOptions
from sidesave.client.ranks.group import Alone, GroupWorld, World
from sidesave.client.runs import finding
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.saving.handle import Outcome, SaveHandle
from sidesave.client.training.links import Links
from sidesave.errors import InvalidArgumentError, StateMismatchError, brief
from sidesave.stager.state.annotations import ANNOTATIONS, Compared
from sidesave.writer_daemon.format.manifest import parse_step_directory, step_directory
from sidesave.writer_daemon.format.names import is_safe_name
from sidesave.writer_daemon.storage import urls

Group = torch.distributed.ProcessGroup | None
PathLike = str | os.PathLike[str]

_NAME: Final = "checkpoint_id"
"""Of a checkpoint's metadata, the last part of the id that it was saved under."""
_STOCK: Final = ".metadata"
"""What a checkpoint of torch's has, and none of ours."""


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: PathLike | None = None,
    storage_writer: object = None,
    planner: object = None,
    process_group: Group = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> CheckpointInfo:
    """Save and wait for the commit, in the place of torch's ``save``; see :func:`async_save`.

    Raises what :func:`async_save` and its future raise.
    """
    _refuse_others(storage_writer=storage_writer, planner=planner)
    return _save(state_dict, checkpoint_id, process_group, no_dist=no_dist)[1].result()


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: PathLike | None = None,
    storage_writer: object = None,
    planner: object = None,
    process_group: Group = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: object = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Outcome[CheckpointInfo] | AsyncSaveResponse:
    """Save in the place of torch's ``async_save``; returns when training may go on, as ``Checkpointer.save`` does.

    The first call for a run directory makes its ``Checkpointer``; :func:`open_run` does so before, with options.

    Args:
        state_dict: Modules, optimizers, other objects with ``state_dict``, tensors, containers, plain data.
        checkpoint_id: ``RUN/NAME``, with the step in the digits at the end of ``NAME``.
        storage_writer: None; another is refused, and so is a ``planner``.
        planner: None.
        process_group: The ranks that save together, None for all.
        async_checkpointer_type: Either one: another process writes in any case.
        async_stager: None, or a ``DefaultStager``, of which only ``use_async_staging`` counts: with it an
            ``AsyncSaveResponse`` is returned.
        no_dist: This process saves alone.
        use_collectives: Either one: no save is collective.

    Returns:
        A future of the commit, whose result describes the checkpoint.

    Raises:
        InvalidArgumentError: The id has no digits at its end, its step or its name is taken, the run is open with
            other ranks, or an argument has no meaning here.
        SidesaveError: As ``Checkpointer`` and its ``save`` raise it.
    """
    _refuse_others(storage_writer=storage_writer, planner=planner)
    if async_stager is not None and type(async_stager) is not DefaultStager:
        raise InvalidArgumentError(
            f"async_stager={brief(async_stager)}: sidesave stages by itself; leave it out, or pass a DefaultStager"
        )
    handle, saved = _save(state_dict, checkpoint_id, process_group, no_dist=no_dist)
    config = getattr(async_stager, "_config", None)
    if config is not None and config.use_async_staging:
        return AsyncSaveResponse(staging_completion=handle.staged, upload_completion=cast("Any", saved))
    return saved


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: PathLike | None = None,
    storage_reader: object = None,
    planner: Any = None,
    process_group: Group = None,
    no_dist: bool = False,
    allow_pickle: bool = False,
) -> None:
    """Load in place, in the place of torch's ``load``: a checkpoint of sidesave, or one that torch has written.

    Tensors are filled, cast from another floating-point dtype if need be; objects with ``load_state_dict`` are given
    their state, and plain values are replaced. What the checkpoint has and ``state_dict`` has not is left alone, but
    that a dict of plain values becomes what was saved. All ranks load, or none does. A save of this process to the same
    id is waited for.

    Args:
        state_dict: What to load, by the names that it was saved under.
        checkpoint_id: As at the save; or any checkpoint of torch's, which its own ``load`` reads.
        storage_reader: None; another is refused.
        planner: For a checkpoint of torch's; refused for one of ours.
        process_group: The ranks that load together, None for all.
        no_dist: This process loads alone.
        allow_pickle: Unpickle values that were pickled, which runs code that the checkpoint chooses.

    Raises:
        InvalidArgumentError: An argument has no meaning here.
        StateMismatchError: Something of ``state_dict`` is not in the checkpoint, or has another shape or dtype.
        SidesaveError: As :func:`sidesave.load` raises it.
    """
    _refuse_others(storage_reader=storage_reader)
    world = _world(process_group, no_dist=no_dist)
    with world.raise_together("cannot find the checkpoint"):
        place = _located(_text(checkpoint_id))
        is_stock = not urls.is_url(place) and os.path.exists(os.path.join(place, _STOCK))
        if not is_stock:
            _refuse_others(planner=planner)
    world.require_alike(of_torch=is_stock)
    if is_stock:
        torch_dcp.load(state_dict, checkpoint_id=place, planner=planner, process_group=process_group, no_dist=no_dist)
        return
    with world.raise_together("cannot load the checkpoint"):
        into = {key: _target(value) for key, value in state_dict.items()}
        request = LoadRequest(
            into=into, strict=False, allow_pickle=allow_pickle, casts=True, rank=world.rank, size=world.size
        )
        loaded = request.read(place)
        lacking = dict.fromkeys([*loaded.missing, *loaded.lacking()])
        missing = [name for name in lacking if not _is_empty(into.get(name))]
        if missing:
            names = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
            raise StateMismatchError(f"{place} does not fit, and nothing was loaded: it does not have {names}")
    with world.raise_together("cannot give its objects what it has loaded"):
        loaded.apply()
        for key, value in state_dict.items():
            if _is_unknown_stateful(value):
                value.load_state_dict(into[key])
            else:
                state_dict[key] = into[key]


def open_run(directory: PathLike, **options: Unpack[CheckpointerOptions]) -> Checkpointer:
    """Make the ``Checkpointer`` of a run directory now, with options; it stays open until :func:`close`, or the exit.

    Made in the first save it takes a fraction of a second there. All ranks have to call it.

    Raises:
        InvalidArgumentError: The run is open.
        SidesaveError: As ``Checkpointer`` raises it.
    """
    place = arguments.place_to_write(directory)
    with _lock:
        if place in _runs:
            raise InvalidArgumentError(f"{place} is open: call open_run() before the first save, or after close()")
        run = _runs[place] = _Run(place, options)
    return run.checkpointer


def close() -> None:
    """Wait for all saves, and close the run directories of this process. Raises as ``Checkpointer.close`` does."""
    with _lock:
        runs = [*_runs.values()]
        _runs.clear()
    failure: Exception | None = None
    for run in runs:
        try:
            run.checkpointer.close()
        except Exception as error:  # noqa: BLE001 - the others are to be closed all the same
            failure = failure or error
    if failure is not None:
        raise failure


class _Run:
    """A run directory that is open in this process."""

    def __init__(self, directory: str, options: CheckpointerOptions) -> None:
        self.ranks = options.get("process_group"), options.get("distributed", True)
        self.checkpointer = Checkpointer(directory, **options)
        self._directory = self.checkpointer.directory
        self._names: dict[int, str] = {}
        self._links = None if urls.is_url(directory) else Links(self._directory, _name_of)
        self._leads = not self.ranks[1] or _world(self.ranks[0], no_dist=False).rank == 0
        self.saves: dict[str, Outcome[CheckpointInfo]] = {}
        if self._links is not None and self._leads:  # those that a killed process has left out
            self._links.update(finding.find(self._directory))

    def save(self, step: int, name: str, state: dict[str, Any]) -> tuple[SaveHandle, Outcome[CheckpointInfo]]:
        self._claim(step, name)
        handle = self.checkpointer.save(step, state, overwrite=True, metadata={_NAME: name})
        saved: Outcome[CheckpointInfo] = Outcome()
        if handle.skipped:
            saved.cancel()
            return handle, saved
        saved.set_running_or_notify_cancel()
        saved.hurry = lambda: handle.committed.hurry()
        self.saves = {other: each for other, each in self.saves.items() if not each.done()} | {name: saved}
        handle.committed.add_done_callback(lambda _: self._finish(handle, saved))
        return handle, saved

    def _finish(self, handle: SaveHandle, saved: Outcome[CheckpointInfo]) -> None:
        error = handle.committed.peek()  # read by the caller, from `saved`, or raised by the next save
        if error is not None:
            saved.fail(cast("Exception", error))
            return
        info = Outcome[CheckpointInfo].result(handle.committed)
        if self._links is not None and self._leads:
            self._links.add(info)
        saved.resolve(info)

    def _claim(self, step: int, name: str) -> None:
        """Refuse a step that has another name, and a name that something else has."""
        place = os.path.join(self._directory, name)
        known = self._names.get(step)
        if known is None:
            found = finding.find(f"{self._directory}/{step_directory(step)}")
            known = found[0].metadata.get(_NAME, step_directory(step)) if found else name
        if known != name:
            raise InvalidArgumentError(
                f"checkpoint_id {place}: step {step} of this run is {known}; the digits at the end of a name have to "
                "be those of no other"
            )
        if name != step_directory(step) and self._links is not None:
            if not is_safe_name(name) or parse_step_directory(name) is not None:
                text = "a name has letters, digits and any of %_@.-, no dot in front, and is not another step's"
                raise InvalidArgumentError(f"checkpoint_id {place}: {text}")
            if os.path.lexists(place) and not os.path.islink(place):
                what = "a checkpoint of torch's" if os.path.exists(os.path.join(place, _STOCK)) else "something else"
                raise InvalidArgumentError(f"checkpoint_id {place}: {what} is there; save under another name")
        self._names[step] = name


_runs: dict[str, _Run] = {}
_lock = threading.RLock()


def _save(
    state_dict: Mapping[str, Any], checkpoint_id: PathLike | None, process_group: Group, *, no_dist: bool
) -> tuple[SaveHandle, Outcome[CheckpointInfo]]:
    directory, name, step = _parts(_text(checkpoint_id))
    place = arguments.place_to_write(directory)
    alone = no_dist or not _is_initialized()
    ranks = process_group, not alone
    with _lock:
        run = _runs.get(place)
        if run is None:
            run = _runs[place] = _Run(place, {"process_group": process_group, "distributed": not alone})
        elif run.ranks[0] is not process_group or (run.ranks[1] and _is_initialized()) != ranks[1]:
            raise InvalidArgumentError(
                f"{place} is open with other ranks: pass the same process_group and no_dist each time, also to "
                "open_run(), or save to another directory"
            )
        return run.save(step, name, {key: _source(value) for key, value in state_dict.items()})


def _source(value: Any) -> Any:
    """An item as it is saved: ranks share what has tensors in it, which are compared, as those of a module are."""
    if isinstance(value, (nn.Module, torch.optim.Optimizer, *ANNOTATIONS)):
        return value
    state = value.state_dict() if is_stateful(value) else value
    if any(isinstance(leaf, torch.Tensor) for leaf in FlatMap.of(state).leaves.values()):
        return Compared(state)
    return _Given(state) if is_stateful(value) else value


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """The state of an object, which each rank has for itself."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As nobody does: this is never loaded into."""
        raise NotImplementedError


def _target(value: Any) -> Any:
    """An item as it is loaded into; torch fills the state of objects in place, and gives it to them."""
    return value.state_dict() if _is_unknown_stateful(value) else value


def _is_unknown_stateful(value: Any) -> bool:
    return is_stateful(value) and not isinstance(value, torch.optim.Optimizer)


def _is_empty(value: Any) -> bool:
    return isinstance(value, (dict, list)) and not value


def _refuse_others(**given: object) -> None:
    cures = {
        "storage_writer": "give its path as checkpoint_id",
        "storage_reader": "give its path as checkpoint_id; for SidesaveReader and others, call torch's own load",
        "planner": "leave it out: names that the target does not have are left alone, and sidesave.load has rename=",
    }
    for name, value in given.items():
        if value is not None:
            raise InvalidArgumentError(f"{name}={brief(value)} has no meaning for sidesave: {cures[name]}")


def _text(checkpoint_id: PathLike | None) -> str:
    if checkpoint_id is None:
        raise InvalidArgumentError("checkpoint_id is missing: give RUN/NAME, with the step at the end of NAME")
    text = arguments.path_text(checkpoint_id) if not urls.is_url(os.fspath(checkpoint_id)) else os.fspath(checkpoint_id)
    return text.rstrip("/") if urls.is_url(text) else os.path.abspath(text)


def _parts(place: str) -> tuple[str, str, int]:
    """The run directory, the name and the step of an id."""
    directory, _, name = place.rpartition("/")
    digits = re.search(r"[0-9]+\Z", name)
    if digits is None or not directory:
        raise InvalidArgumentError(
            f"checkpoint_id {place}: there is no step at its end; give a name such as {place}/step-100, of which "
            "the parent is the run directory"
        )
    return directory, name, int(digits[0])


def _located(place: str) -> str:
    """Where a checkpoint lies: under its own name, or as the step of which its metadata says that it has that name."""
    pending = next((run.saves.get(os.path.basename(place)) for at, run in _runs.items() if _is_in(place, at)), None)
    if pending is not None:
        pending.peek()
    if not urls.is_url(place) and os.path.exists(place):
        return place
    name = os.path.basename(place)
    if re.search(r"[0-9]+\Z", name) and os.path.dirname(place):
        directory, name, step = _parts(place)
        found = finding.find(f"{directory}/{step_directory(step)}")
        if found and _name_of(found[0]) == name:
            return found[0].path
    return place


def _is_in(place: str, directory: str) -> bool:
    return arguments.place_to_write(os.path.dirname(place)) == directory


def _name_of(info: CheckpointInfo) -> str | None:
    return info.metadata.get(_NAME)


def _is_initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _world(process_group: Group, *, no_dist: bool) -> World:
    return Alone() if no_dist or not _is_initialized() else GroupWorld(process_group)
