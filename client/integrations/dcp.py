"""``save``, ``async_save`` and ``load`` with the signatures of ``torch.distributed.checkpoint``.

The parent of a ``checkpoint_id`` is the run directory, for which the process keeps one
``Checkpointer`` open. The digits at the end of the id are the step, and a link has the given name.
See docs/integrations/dcp.md.
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
from sidesave.client.loading.load import LoadRequest
from sidesave.client.options import CheckpointerOptions
from sidesave.client.ranks.group import Alone, World, is_initialized, of_group
from sidesave.client.reading.stored import FlatMap
from sidesave.client.runs import finding
from sidesave.client.runs.links import Links
from sidesave.client.saving.handle import Outcome, SaveHandle
from sidesave.client.targets.live_map import is_stateful
from sidesave.errors import InvalidArgumentError, StateMismatchError, brief, listed
from sidesave.stager.state.annotations import ANNOTATIONS, Compared
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.format.names import is_safe_name, parse_step_directory, step_directory
from sidesave.writer_daemon.storage import urls

Group = torch.distributed.ProcessGroup | None
PathLike = str | os.PathLike[str]

_NAME: Final = "checkpoint_id"
"""Metadata key: the last part of the id that the checkpoint was saved under."""
STOCK: Final = ".metadata"
"""A file that only torch's own checkpoints have."""


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
    """Save in the place of torch's ``async_save``.

    Returns when training may go on, as ``Checkpointer.save`` does. The first call for a run
    directory makes its ``Checkpointer``; :func:`open_run` does so before, with options.

    Args:
        state_dict: Modules, optimizers, other objects with ``state_dict``, tensors, containers,
            plain data.
        checkpoint_id: ``RUN/NAME``, with the step in the digits at the end of ``NAME``.
        storage_writer: Must be None.
        planner: Must be None.
        process_group: The ranks that save together, None for all.
        async_checkpointer_type: Ignored: another process always writes.
        async_stager: None or a ``DefaultStager``. With its ``use_async_staging`` an
            ``AsyncSaveResponse`` is returned; its other options are ignored.
        no_dist: This process saves alone.
        use_collectives: Ignored: saves use no collectives.

    Returns:
        A future of the commit, whose result describes the checkpoint.

    Raises:
        InvalidArgumentError: The id does not end in digits, its step or its name is taken, the run
            is open with other ranks, or an argument is not supported.
        SidesaveError: As ``Checkpointer`` and its ``save`` raise it.
    """
    _refuse_others(storage_writer=storage_writer, planner=planner)
    if async_stager is not None and type(async_stager) is not DefaultStager:
        raise InvalidArgumentError(
            f"async_stager={brief(async_stager)}: sidesave stages by itself; leave it out, or pass "
            "a DefaultStager"
        )
    handle, saved = _save(state_dict, checkpoint_id, process_group, no_dist=no_dist)
    config = getattr(async_stager, "_config", None)
    if config is not None and config.use_async_staging:
        return AsyncSaveResponse(
            staging_completion=handle.staged, upload_completion=cast("Any", saved)
        )
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
    """Load a checkpoint of sidesave or of torch in place, as torch's ``load`` does.

    Tensors are filled, and cast if the saved floating-point dtype differs; objects with
    ``load_state_dict`` get their state, and plain values are replaced. Saved items that are not in
    ``state_dict`` are not loaded, except that a dict of plain values becomes the saved dict. Either
    all ranks load or none does. If this process is still saving to the same id, the load waits for
    that save.

    Args:
        state_dict: The objects to load into, by the names that they were saved under.
        checkpoint_id: The id given to the save, or a checkpoint of torch's, which torch's own
            ``load`` reads.
        storage_reader: Must be None.
        planner: For checkpoints of torch's only.
        process_group: The ranks that load together, None for all.
        no_dist: This process loads alone.
        allow_pickle: Unpickle pickled values, which can run any code that the checkpoint contains.

    Raises:
        InvalidArgumentError: An argument is not supported.
        StateMismatchError: An item of ``state_dict`` is not in the checkpoint, or has another shape
            or dtype.
        SidesaveError: As :func:`sidesave.load` raises it.
    """
    _refuse_others(storage_reader=storage_reader)
    world = _world(process_group, no_dist=no_dist)
    with world.raise_together("cannot find the checkpoint"):
        place = _located(_text(checkpoint_id))
        is_stock = not urls.is_url(place) and os.path.exists(os.path.join(place, STOCK))
        if not is_stock:
            _refuse_others(planner=planner)
    world.require_alike(of_torch=is_stock)
    if is_stock:
        torch_dcp.load(
            state_dict,
            checkpoint_id=place,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )
        return
    with world.raise_together("cannot load the checkpoint"):
        into = {key: _target(value) for key, value in state_dict.items()}
        request = LoadRequest(
            into=into,
            strict=False,
            allow_pickle=allow_pickle,
            casts=True,
            rank=world.rank,
            size=world.size,
        )
        loaded = request.read(place)
        lacking = dict.fromkeys([*loaded.missing, *loaded.lacking()])
        missing = [name for name in lacking if not _is_empty(into.get(name))]
        if missing:
            names = listed(missing, 10)
            raise StateMismatchError(
                f"{place} does not fit, and nothing was loaded: it does not have {names}"
            )
    with world.raise_together("cannot give the loaded state to its objects"):
        loaded.apply()
        for key, value in state_dict.items():
            if _is_unknown_stateful(value):
                value.load_state_dict(into[key])
            else:
                state_dict[key] = into[key]


def open_run(directory: PathLike, **options: Unpack[CheckpointerOptions]) -> Checkpointer:
    """Create the ``Checkpointer`` of a run directory now, with options.

    It stays open until :func:`close`, or exit. Without this call, the first save creates it, which
    takes a fraction of a second. All ranks must call this.

    Raises:
        InvalidArgumentError: The run is already open.
        SidesaveError: As ``Checkpointer`` raises it.
    """
    place = arguments.place_to_write(directory)
    with _lock:
        if place in _runs:
            raise InvalidArgumentError(
                f"{place} is open: call open_run() before the first save, or after close()"
            )
        run = _runs[place] = _Run(place, options)
    return run.checkpointer


def close() -> None:
    """Wait for all saves and close this process's runs; raises as ``Checkpointer.close`` does."""
    with _lock:
        runs = [*_runs.values()]
        _runs.clear()
    failure: Exception | None = None
    for run in runs:
        try:
            run.checkpointer.close()
        except Exception as error:  # noqa: BLE001 - the other runs must still be closed
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
        # add the links that a killed process did not make
        if self._links is not None and self._leads:
            self._links.update(finding.find(self._directory))

    def save(
        self, step: int, name: str, state: dict[str, Any]
    ) -> tuple[SaveHandle, Outcome[CheckpointInfo]]:
        self._claim(step, name)
        handle = self.checkpointer.save(step, state, overwrite=True, metadata={_NAME: name})
        saved: Outcome[CheckpointInfo] = Outcome()
        if handle.skipped:
            saved.cancel()
            return handle, saved
        saved.set_running_or_notify_cancel()
        self.saves = {other: each for other, each in self.saves.items() if not each.done()} | {
            name: saved
        }
        handle.committed.add_done_callback(lambda _: self._finish(handle, saved))
        return handle, saved

    def _finish(self, handle: SaveHandle, saved: Outcome[CheckpointInfo]) -> None:
        # read by the caller, from `saved`, or raised by the next save
        error = handle.committed.peek()
        if error is not None:
            saved.fail(cast("Exception", error))
            return
        info = Outcome[CheckpointInfo].result(handle.committed)
        if self._links is not None and self._leads:
            self._links.add(info)
        saved.resolve(info)

    def _claim(self, step: int, name: str) -> None:
        """Raise if the step already has another name, or if the name belongs to something else."""
        place = os.path.join(self._directory, name)
        known = self._names.get(step)
        if known is None:
            found = finding.find(f"{self._directory}/{step_directory(step)}")
            known = found[0].metadata.get(_NAME, step_directory(step)) if found else name
        if known != name:
            raise InvalidArgumentError(
                f"checkpoint_id {place}: step {step} of this run is {known}; the digits at the end "
                "of each name have to be unique"
            )
        if name != step_directory(step) and self._links is not None:
            if not is_safe_name(name) or parse_step_directory(name) is not None:
                text = (
                    "a name has letters, digits and any of %_@.-, no dot at its start, and is not "
                    "another step's"
                )
                raise InvalidArgumentError(f"checkpoint_id {place}: {text}")
            if os.path.lexists(place) and not os.path.islink(place):
                what = (
                    "a checkpoint of torch's"
                    if os.path.exists(os.path.join(place, STOCK))
                    else "something else"
                )
                raise InvalidArgumentError(
                    f"checkpoint_id {place}: {what} is there; save under another name"
                )
        self._names[step] = name


_runs: dict[str, _Run] = {}
_lock = threading.RLock()


def _save(
    state_dict: Mapping[str, Any],
    checkpoint_id: PathLike | None,
    process_group: Group,
    *,
    no_dist: bool,
) -> tuple[SaveHandle, Outcome[CheckpointInfo]]:
    directory, name, step = _parts(_text(checkpoint_id))
    place = arguments.place_to_write(directory)
    alone = no_dist or not is_initialized()
    ranks = process_group, not alone
    with _lock:
        run = _runs.get(place)
        if run is None:
            run = _runs[place] = _Run(
                place, {"process_group": process_group, "distributed": not alone}
            )
        elif run.ranks[0] is not process_group or (run.ranks[1] and is_initialized()) != ranks[1]:
            raise InvalidArgumentError(
                f"{place} is open with other ranks: pass the same process_group and no_dist each "
                "time, also to open_run(), or save to another directory"
            )
        return run.save(step, name, {key: _source(value) for key, value in state_dict.items()})


def _source(value: Any) -> Any:
    """Return an item as it is saved: ranks share and compare items with tensors, like modules."""
    if isinstance(value, (nn.Module, torch.optim.Optimizer, *ANNOTATIONS)):
        return value
    state = value.state_dict() if is_stateful(value) else value
    if has_tensors(state):
        return Compared(state)
    return _Given(state) if is_stateful(value) else value


def has_tensors(state: Any) -> bool:
    """Whether a nest has a tensor."""
    return any(isinstance(leaf, torch.Tensor) for leaf in FlatMap.of(state).leaves.values())


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """The state of an object, saved by each rank for itself."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not implemented: such an object is only saved."""
        raise NotImplementedError


def _target(value: Any) -> Any:
    """Return the target to load into.

    Like torch, a stateful object's state is filled, then given back to it.
    """
    return value.state_dict() if _is_unknown_stateful(value) else value


def _is_unknown_stateful(value: Any) -> bool:
    return is_stateful(value) and not isinstance(value, torch.optim.Optimizer)


def _is_empty(value: Any) -> bool:
    return isinstance(value, (dict, list)) and not value


def _refuse_others(**given: object) -> None:
    cures = {
        "storage_writer": "give its path as checkpoint_id",
        "storage_reader": (
            "give its path as checkpoint_id; for SidesaveReader and others, call torch's own load"
        ),
        "planner": (
            "leave it out: saved names that are not in the target are not loaded; sidesave.load "
            "has rename="
        ),
    }
    for name, value in given.items():
        if value is not None:
            raise InvalidArgumentError(
                f"{name}={brief(value)} has no meaning for sidesave: {cures[name]}"
            )


def _text(checkpoint_id: PathLike | None) -> str:
    if checkpoint_id is None:
        raise InvalidArgumentError(
            "checkpoint_id is missing: give RUN/NAME, with the step at the end of NAME"
        )
    text = (
        arguments.path_text(checkpoint_id)
        if not urls.is_url(os.fspath(checkpoint_id))
        else os.fspath(checkpoint_id)
    )
    return text.rstrip("/") if urls.is_url(text) else os.path.abspath(text)


def _parts(place: str) -> tuple[str, str, int]:
    """The run directory, the name and the step of an id."""
    directory, _, name = place.rpartition("/")
    digits = re.search(r"[0-9]+\Z", name)
    if digits is None or not directory:
        raise InvalidArgumentError(
            f"checkpoint_id {place}: there is no step at its end; give a name such as "
            f"{place}/step-100, whose parent is the run directory"
        )
    return directory, name, int(digits[0])


def _located(place: str) -> str:
    """Return a checkpoint's path: ``place`` itself, or the step whose metadata has that name."""
    name = os.path.basename(place)
    for directory, run in _runs.items():
        pending = run.saves.get(name)
        if pending is not None and arguments.place_to_write(os.path.dirname(place)) == directory:
            pending.peek()
            break
    if not urls.is_url(place) and os.path.exists(place):
        return place
    if re.search(r"[0-9]+\Z", name) and os.path.dirname(place):
        directory, name, step = _parts(place)
        found = finding.find(f"{directory}/{step_directory(step)}")
        if found and _name_of(found[0]) == name:
            return found[0].path
    return place


def _name_of(info: CheckpointInfo) -> str | None:
    return info.metadata.get(_NAME)


def _world(process_group: Group, *, no_dist: bool) -> World:
    return Alone() if no_dist else of_group(process_group)
