# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false
"""torchtitan's trainer saves with sidesave: ``SidesaveCheckpointManager.Config`` is its ``config.checkpoint``.

See docs/integrations/torchtitan.md.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import torch
import tyro
from torch import nn
from torch.distributed import checkpoint as torch_dcp
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from sidesave.client import arguments
from sidesave.client.checkpointer import Checkpointer
from sidesave.client.export.safetensors import export
from sidesave.client.integrations import dcp
from sidesave.client.internals import saver_of
from sidesave.client.loading.flat import FlatMap, is_stateful
from sidesave.client.loading.load import LoadRequest
from sidesave.client.options import CheckpointerOptions
from sidesave.client.ranks.group import Alone, GroupWorld, World
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.client.runs import finding
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.runs.pins import Pins
from sidesave.client.runs.run import Run
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.training.keep_policies import KeepLatest
from sidesave.client.training.links import Links
from sidesave.client.training.retention import Retention
from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError, StateMismatchError
from sidesave.stager.state.annotations import Compared
from sidesave.writer_daemon.format.manifest import no_such_step
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)

_CONTENT: Final = "torchtitan"
"""Of a checkpoint's metadata, what is in it: ``full``, ``model``, or ``hf``, the model under Hugging Face's names."""
_STOCK: Final = ".metadata"
"""What a checkpoint of torchtitan's own has, and none of ours."""
_TIDY_TIMEOUT_S: Final = 30.0
_NOT_OURS: Final = {
    "distributed": "torchtitan's ranks save together",
    "process_group": "torchtitan's ranks save together",
    "fallback_directory": "all checkpoints are looked for in checkpoint.folder",
    "node_local": "all ranks look for checkpoints in one checkpoint.folder",
}


class SidesaveCheckpointManager(BaseCheckpointManager):
    """Saves, keeps and loads what torchtitan's own ``CheckpointManager`` does, by one ``Checkpointer``.

    The checkpoint of step 10 is ``step-00000010`` in the folder, and ``step-10`` a link to it, made soon after the
    commit. Only committed checkpoints are loaded, and counted by ``keep_latest_k``. Those that torchtitan itself has
    left in the folder are loaded too, and never deleted.

    All ranks make one, and call the same. Errors are those of :class:`~sidesave.Checkpointer`, and of its methods.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's options, with its meanings and defaults."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """Whether a save returns when training may go on, which the last two both do, or at the commit."""

        checkpointer: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Further options, of sidesave.Checkpointer, by name; not on the command line, and not in torchtitan's logs."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)  # super() does not know a class with slots
            self.async_mode = self.async_mode.lower()  # pyright: ignore[reportAttributeAccessIssue]
            if self.async_mode not in ("disabled", "async", "async_with_pinned_mem"):
                raise InvalidArgumentError(
                    f"checkpoint.async_mode={self.async_mode!r}: give 'disabled', 'async' or 'async_with_pinned_mem'"
                )
            for name in self.checkpointer:
                if name in _NOT_OURS:
                    raise InvalidArgumentError(f"checkpoint.checkpointer has {name!r}: {_NOT_OURS[name]}")
                if name not in CheckpointerOptions.__annotations__:
                    raise InvalidArgumentError(
                        f"checkpoint.checkpointer has {name!r}, which sidesave.Checkpointer has not"
                    )

        def to_dict(self) -> dict[str, Any]:
            """For logs: without the values of ``checkpointer``, among which may be credentials."""
            return {**BaseCheckpointManager.Config.to_dict(self), "checkpointer": sorted(self.checkpointer)}

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        """As ``config.build(...)`` of torchtitan's trainer calls it; opens the folder, unless ``load_only``.

        Blocks as :class:`~sidesave.Checkpointer` does.

        Raises:
            InvalidArgumentError: ``states`` has something without a state dict, or there is no adapter to save in
                Hugging Face's form.
            SidesaveError: As ``Checkpointer`` raises it.
        """
        self.enable = config.enable
        self.save_future = None
        if not config.enable:
            return
        self._config = config
        self.folder = arguments.place_to_write(filesystem.join(base_folder, config.folder))
        self.states = states
        self.states.update(
            {
                MODEL: ModelWrapper(model_parts),
                OPTIMIZER: optimizers,
                DATALOADER: dataloader,
                LR_SCHEDULER: lr_schedulers,
            }
        )
        for name, value in states.items():
            if value is not None and not is_stateful(value):
                kind = type(value).__name__
                raise InvalidArgumentError(f"states[{name!r}] is a {kind}: put an object with a state dict there")
        if config.last_save_in_hf and sd_adapter is None:
            raise InvalidArgumentError("checkpoint.last_save_in_hf: the model has no sd_adapter, which has the names")
        self._adapter = sd_adapter
        self._options = config.checkpointer
        is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._world: World = GroupWorld(None) if is_initialized else Alone()
        self._checkpointer: Checkpointer | None = None
        self._retention: Retention | None = None
        if config.load_only:
            mirror = self._options.get("mirror")
            self._run = Run(self.folder, "", arguments.place_to_write(mirror) if mirror else "")
            return
        self._checkpointer = Checkpointer(self.folder, **self._options)
        self._run = saver_of(self._checkpointer).session.run
        keep = [KeepLatest(config.keep_latest_k)] if config.keep_latest_k else None
        links = None if urls.is_url(self.folder) else Links(self._checkpointer.directory, _name_of)
        if self._world.rank == 0 and (keep or links):
            self._retention = Retention(self._checkpointer, keep, Pins(self._checkpointer.directory), links)

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The ``Checkpointer``, for all that torchtitan does not do; None with ``load_only``."""
        return self._checkpointer

    # Saving ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if this step is due; the last one, and each with ``disabled``, until its commit."""
        config = self._config
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (is_first or last_step or curr_step % config.interval == 0):
            return False
        content, state = "full", {}
        if last_step and config.last_save_model_only:
            content, state = "hf" if config.last_save_in_hf else "model", {MODEL: Compared(self._exported())}
        handle = self._submit(curr_step, state or self._saved(), content)
        if handle.skipped:
            return False
        self.save_future = handle.committed
        if last_step or config.async_mode == "disabled":
            self.maybe_wait_for_saving()
        if content == "hf":
            with self._world.raise_together("cannot export"):
                if self._world.rank == 0:
                    self._export(handle.committed.result())
        return True

    def _submit(self, step: int, state: dict[str, Any], content: str) -> SaveHandle:
        assert self._checkpointer is not None
        with contextlib.nullcontext() if self._retention is None else self._retention.saving():
            # A step that load_step has gone back behind is replaced.
            handle = self._checkpointer.save(step, state, overwrite=True, metadata={_CONTENT: content})
            if self._retention is not None and not handle.skipped:
                self._retention.add(handle)
        return handle

    def _saved(self) -> dict[str, Any]:
        """The state: what has tensors is shared by the ranks, and all else is each rank's own."""
        states = {name: value.state_dict() for name, value in self.states.items() if value is not None}
        return {name: Compared(state) if _has_tensors(name, state) else state for name, state in states.items()}

    def _exported(self) -> dict[str, Any]:
        """The model, in the dtype and under the names of the last save."""
        dtype = TORCH_DTYPE_MAP[self._config.export_dtype]
        state = {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in self.states[MODEL].state_dict().items()
        }
        return self._adapter.to_hf(state) if self._config.last_save_in_hf else state

    def _export(self, info: CheckpointInfo) -> None:
        """Write the files that Hugging Face's tools read, where torchtitan has them."""
        target = os.path.join(self.folder, f"step-{info.step}")
        if os.path.islink(target):  # of another checkpoint of that step
            os.unlink(target)
        export(info, target, item=MODEL)

    def _maybe_wait_for_staging(self) -> None:
        """Protect what changes next: on the host, or in the order of a device's stream."""
        if self._checkpointer is not None:
            with self._checkpointer.guard():
                pass

    def _wait_for_saving(self) -> None:
        """Until the last save is committed; raises what it has failed with."""
        future, self.save_future = self.save_future, None
        assert future is not None
        future.result()

    def _close(self) -> None:
        """Wait for all saves and for what retention deletes, end the daemon; raises what a save has failed with."""
        checkpointer, retention = self._checkpointer, self._retention
        if checkpointer is None or saver_of(checkpointer).session.closed:
            return
        with contextlib.ExitStack() as stack:  # the last one pushed runs first
            stack.callback(checkpointer.close)
            if retention is not None:
                stack.callback(retention.close, _TIDY_TIMEOUT_S)
            stack.callback(checkpointer.wait)

    # Loading ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load a step, of -1 the highest, else what ``initial_load_*`` say. Saves under way are waited for first.

        All ranks load the same, as rank 0 has found it.
        """
        with urls.using(self._options.get("storage_options")):
            chosen: list[Any] | None = None
            with self._world.raise_together("cannot tell what to load"):
                if self._checkpointer is not None:
                    saver_of(self._checkpointer).session.saves.settle(None)
                if self._world.rank == 0:
                    chosen = self._choose(step)
            chosen = self._world.gather("what to load", chosen)[0]
            if chosen is None:
                logger.info("there is no checkpoint to load: this is a fresh start")
                return False
            kind, place, model_only = chosen
            logger.info("loading %s", place)
            if kind == "ours":
                self._load_ours(place, self._loaded(model_only))
            elif kind == "torch":
                self._load_torchs(place, self._loaded(model_only))
            else:
                self._load_hf(place)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        return True

    def _loaded(self, model_only: bool) -> dict[str, Any]:
        """What takes its state from a checkpoint."""
        if model_only:
            return {MODEL: self.states[MODEL]}
        for name in self._config.exclude_from_loading:
            if name not in self.states:
                raise InvalidArgumentError(
                    f"checkpoint.exclude_from_loading has {name!r}: there are {', '.join(self.states)}"
                )
        excluded = self._config.exclude_from_loading
        return {name: each for name, each in self.states.items() if each is not None and name not in excluded}

    def _load_ours(self, place: str, states: Mapping[str, Any]) -> None:
        current = {name: value.state_dict() for name, value in states.items()}
        shared = {name: state for name, state in current.items() if _has_tensors(name, state)}
        own: dict[str, Any] = {}
        allow_pickle = self._options.get("allow_pickle", False)
        with self._world.raise_together("cannot load what each rank has for itself"):
            for name in current.keys() - shared.keys():
                own[name] = _read_own(place, name, current[name].keys(), self._world.rank, allow_pickle=allow_pickle)
        dcp.load(shared, checkpoint_id=place, allow_pickle=allow_pickle)
        with self._world.raise_together("cannot give its objects what it has loaded"):
            for name, state in {**shared, **own}.items():
                states[name].load_state_dict(state)

    def _load_torchs(self, place: str, states: Mapping[str, Any]) -> None:
        """As torchtitan does: the names of the model stand beside those of the other objects."""
        flat = {name: value for name, value in states.items() if name != MODEL} | states[MODEL].state_dict()
        torch_dcp.load(flat, checkpoint_id=place)
        states[MODEL].load_state_dict(flat)

    def _load_hf(self, place: str) -> None:
        state = self._adapter.to_hf(self.states[MODEL].state_dict())
        reader = self._adapter.get_hf_storage_reader(place, self._config.initial_load_in_hf_quantized)
        torch_dcp.load(state, storage_reader=reader)
        self.states[MODEL].load_state_dict(self._adapter.from_hf(state))

    def _choose(self, step: int) -> list[Any] | None:
        """The kind of what is to be loaded, where it lies, and whether it is the model alone; None for a fresh start.

        Raises:
            CheckpointNotFoundError: There is nothing at ``load_step``, or where ``initial_load_*`` say.
            StateMismatchError: The step has the model alone.
            IntegrityError: The highest step is damaged.
        """
        steps = self._steps(step)
        if step == -1:
            step = max(steps, default=-1)
        elif step not in steps:
            text = f"checkpoint.load_step={step}: {no_such_step(step, steps)}"
            raise CheckpointNotFoundError(errno.ENOENT, text, self.folder)
        if step == -1:
            return self._choose_initial()
        kind, place, content = steps[step]
        if step and content != "full":
            raise StateMismatchError(
                f"{place} was saved as the last step, with the model alone, and training cannot go on from it: give it "
                "as checkpoint.initial_load_path to another run, or an earlier checkpoint.load_step here"
            )
        later = sorted(other for other in steps if other > step)
        if later and not self._config.load_only:
            logger.warning(
                "training goes on from step %d, and %s has later ones, %s: load_step=-1 will take the highest that is "
                "there then; delete what is not to be gone on with",
                step,
                self.folder,
                later,
            )
        return [kind, place, step == 0]

    def _steps(self, step: int) -> dict[int, tuple[str, str, str]]:
        """What is in the folder: kind, place and content by step. Raises the problem of a damaged ``step``."""
        found: dict[int, tuple[str, str, str]] = {}
        if not urls.is_url(self.folder):
            if not os.path.isdir(self.folder):
                return found
            for name in os.listdir(self.folder):
                match, place = re.fullmatch(r"step-(\d+)", name), os.path.join(self.folder, name)
                if match and os.path.isfile(os.path.join(place, _STOCK)):
                    found[int(match[1])] = "torch", place, "full"
        own, _ = self._run.scan_all()
        self._run.refuse_damaged(None if step == -1 else step, own)
        return found | {info.step: ("ours", info.path, info.metadata.get(_CONTENT, "full")) for info in own}

    def _choose_initial(self) -> list[Any] | None:
        config = self._config
        path = config.initial_load_path
        if config.initial_load_in_hf:
            if self._adapter is None:
                raise InvalidArgumentError(
                    "checkpoint.initial_load_in_hf: the model has no sd_adapter, which has the names"
                )
            place = path or self._adapter.hf_assets_path
            if not place or not os.path.isdir(place):
                where = "checkpoint.initial_load_path" if path else "hf_assets_path"
                raise CheckpointNotFoundError(errno.ENOENT, f"{where} is no directory with weights", place)
            return ["hf", place, True]
        if not path:
            return None
        if (not filesystem.is_remote(path) or urls.is_url(path)) and finding.find(path):
            return ["ours", path, config.initial_load_model_only]
        if not filesystem.isfile(filesystem.join(path, _STOCK)):
            raise finding.not_found(path)
        return ["torch", path, config.initial_load_model_only]


def _name_of(info: CheckpointInfo) -> str | None:
    """The link to a checkpoint; where its export has that name there is none."""
    return None if info.metadata.get(_CONTENT) == "hf" else f"step-{info.step}"


def _has_tensors(name: str, state: Mapping[str, Any]) -> bool:
    """Whether the ranks share an item. Those of the model and the optimizers are many, and not looked through."""
    return name in (MODEL, OPTIMIZER) or any(
        isinstance(leaf, torch.Tensor) for leaf in FlatMap.of(state).leaves.values()
    )


def _read_own(place: str, item: str, names: Collection[str], rank: int, *, allow_pickle: bool) -> dict[str, Any]:
    """What this rank has saved of an item; of names that it has not, on another mesh, what the first other rank has.

    Raises ``StateMismatchError`` if no rank has saved one of ``names``.
    """
    with CheckpointReader(finding.locate(place)) as reader:
        saved_by = reader.manifest.world_size
    found: dict[str, Any] = {}
    for each in sorted(range(saved_by), key=lambda other: (other != rank, other)):
        request = LoadRequest(include=item, rank=each, allow_pickle=allow_pickle)
        found = {**request.read(place).apply().get(item, {}), **found}
        if found.keys() >= set(names):
            return found
    missing = ", ".join(f"{item}.{name}" for name in names if name not in found)
    raise StateMismatchError(
        f"{place} does not fit, and nothing was loaded: it does not have {missing}; with {item!r} in "
        "checkpoint.exclude_from_loading it stays as it is"
    )
