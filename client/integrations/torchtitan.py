# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false
"""A checkpoint manager for torchtitan's trainer.

Use ``SidesaveCheckpointManager.Config`` as ``config.checkpoint``. See
docs/integrations/torchtitan.md.
"""

from __future__ import annotations

import errno
import functools
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
from sidesave.client.loading.load import LoadRequest
from sidesave.client.options import CheckpointerOptions, FailureOptions, MirrorOptions
from sidesave.client.ranks.group import of_group
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.client.runs import finding
from sidesave.client.runs.links import Links
from sidesave.client.runs.pins import Pins
from sidesave.client.runs.run import Run
from sidesave.client.targets.live_map import is_stateful
from sidesave.client.training.keep_policies import KeepLatest
from sidesave.client.training.retention import Retention, close_after_deletions
from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError, StateMismatchError
from sidesave.stager.state.annotations import Compared
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo, no_such_step
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)

_CONTENT: Final = "torchtitan"
"""Metadata key of the content: ``full``, ``model``, or ``hf`` (model with Hugging Face's names)."""
_NOT_OURS: Final = {
    "distributed": "torchtitan's ranks save together",
    "process_group": "torchtitan's ranks save together",
    "node_local": "all ranks look for checkpoints in one checkpoint.folder",
}


class SidesaveCheckpointManager(BaseCheckpointManager):
    """Does what torchtitan's own ``CheckpointManager`` does, with one ``Checkpointer``.

    The checkpoint of step 10 is ``step-00000010`` in the folder, and ``step-10`` a link to it, made
    soon after the commit. Only committed checkpoints are loaded and counted by ``keep_latest_k``.
    Checkpoints that torchtitan itself has left in the folder are loaded too, and never deleted.

    All ranks create one and make the same calls. Errors are those of
    :class:`~sidesave.Checkpointer` and its methods.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's options, with its meanings and defaults."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """With ``disabled`` a save returns at the commit, else when training may continue."""

        checkpointer: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Options of sidesave.Checkpointer, by name; not in command lines or torchtitan's logs."""

        def __post_init__(self) -> None:
            # super() does not know a class with slots
            BaseCheckpointManager.Config.__post_init__(self)
            self.async_mode = self.async_mode.lower()  # pyright: ignore[reportAttributeAccessIssue]
            if self.async_mode not in ("disabled", "async", "async_with_pinned_mem"):
                raise InvalidArgumentError(
                    f"checkpoint.async_mode={self.async_mode!r}: give 'disabled', 'async' or "
                    "'async_with_pinned_mem'"
                )
            for name in self.checkpointer:
                if name in _NOT_OURS:
                    raise InvalidArgumentError(
                        f"checkpoint.checkpointer has {name!r}: {_NOT_OURS[name]}"
                    )
                if name not in CheckpointerOptions.__annotations__:
                    raise InvalidArgumentError(
                        f"checkpoint.checkpointer has {name!r}, which is not an option of "
                        "sidesave.Checkpointer"
                    )
            failures = self.checkpointer.get("failures")
            if isinstance(failures, FailureOptions) and failures.fallback_directory is not None:
                raise InvalidArgumentError(
                    "checkpoint.checkpointer has FailureOptions.fallback_directory, and torchtitan "
                    "looks for checkpoints in checkpoint.folder only: leave it out"
                )

        def to_dict(self) -> dict[str, Any]:
            """Return the options for logs, without values of ``checkpointer``, often secret."""
            names = {"checkpointer": sorted(self.checkpointer)}
            return BaseCheckpointManager.Config.to_dict(self) | names

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
        """Open the folder, unless ``load_only``.

        Called by ``config.build(...)`` of torchtitan's trainer. Blocks as ``Checkpointer`` does.

        Raises:
            InvalidArgumentError: ``states`` has an object without a state dict, or there is no
                adapter to save in Hugging Face's format.
            SidesaveError: As ``Checkpointer`` raises it.
        """
        self.enable = config.enable
        self.save_future = None
        if not config.enable:
            return
        self._config = config
        self.folder = arguments.place_to_write(filesystem.join(base_folder, config.folder))
        self.states = states
        states |= {
            MODEL: ModelWrapper(model_parts),
            OPTIMIZER: optimizers,
            DATALOADER: dataloader,
            LR_SCHEDULER: lr_schedulers,
        }
        for name, value in states.items():
            if value is not None and not is_stateful(value):
                kind = type(value).__name__
                raise InvalidArgumentError(
                    f"states[{name!r}] is a {kind}: put an object with a state dict there"
                )
        if config.last_save_in_hf and sd_adapter is None:
            raise InvalidArgumentError(
                "checkpoint.last_save_in_hf: the model has no sd_adapter, which has the names"
            )
        self._adapter = sd_adapter
        self._options = config.checkpointer
        self._world = of_group(None)
        self._checkpointer: Checkpointer | None = None
        self._retention: Retention | None = None
        if config.load_only:
            mirror = self._options.get("mirror")
            place = mirror.place if isinstance(mirror, MirrorOptions) else mirror
            self._run = Run(self.folder, "", arguments.place_to_write(place) if place else "")
            return
        self._checkpointer = Checkpointer(self.folder, **self._options)
        self._run = self._checkpointer.session.run
        keep = [KeepLatest(config.keep_latest_k)] if config.keep_latest_k else None
        links = None if urls.is_url(self.folder) else Links(self._checkpointer.directory, _name_of)
        if self._world.rank == 0 and (keep or links):
            self._retention = Retention(
                self._checkpointer.session, keep, Pins(self._checkpointer.directory), links
            )

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The ``Checkpointer``, for its other methods; None with ``load_only``."""
        return self._checkpointer

    # Saving ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if the step is due; wait for the last step's commit, or each with ``disabled``."""
        config = self._config
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (is_first or last_step or curr_step % config.interval == 0):
            return False
        content, state = "full", {}
        if last_step and config.last_save_model_only:
            content = "hf" if config.last_save_in_hf else "model"
            state = {MODEL: Compared(self._exported())}
        assert self._checkpointer is not None
        call = functools.partial(  # load_step can have gone back behind this step: replace it
            self._checkpointer.save,
            curr_step,
            state or self._saved(),
            overwrite=True,
            metadata={_CONTENT: content},
        )
        handle = call() if self._retention is None else self._retention.save(call)
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

    def _saved(self) -> dict[str, Any]:
        """Return the state: ranks share items with tensors, and save their own of the others."""
        states = {
            name: value.state_dict() for name, value in self.states.items() if value is not None
        }
        return {
            name: Compared(state) if _has_tensors(name, state) else state
            for name, state in states.items()
        }

    def _exported(self) -> dict[str, Any]:
        """Return the model's state in the dtype and under the names of the last save."""
        dtype = TORCH_DTYPE_MAP[self._config.export_dtype]
        state = {
            name: value.to(dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in self.states[MODEL].state_dict().items()
        }
        return self._adapter.to_hf(state) if self._config.last_save_in_hf else state

    def _export(self, info: CheckpointInfo) -> None:
        """Write the files that Hugging Face's tools read to the path that torchtitan uses."""
        target = os.path.join(self.folder, f"step-{info.step}")
        if os.path.islink(target):  # of another checkpoint of that step
            os.unlink(target)
        export(info, target, item=MODEL)

    def _maybe_wait_for_staging(self) -> None:
        """Wait, on the host or in the device's stream, until the step may change the state."""
        if self._checkpointer is not None:
            with self._checkpointer.guard():
                pass

    def _wait_for_saving(self) -> None:
        """Wait until the last save is committed; raises its error if it failed."""
        future, self.save_future = self.save_future, None
        assert future is not None
        future.result()

    def _close(self) -> None:
        """Wait for all saves and deletions, and end the daemon; raises a failed save's error."""
        if self._checkpointer is not None and not self._checkpointer.closed:
            close_after_deletions(self._checkpointer, self._retention, None)

    # Loading --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load ``step`` (-1: the highest), or what ``initial_load_*`` name if no step is saved.

        Waits for saves first. All ranks load the checkpoint that rank 0 chooses.
        """
        with urls.using(self._options.get("storage_options")):
            chosen: list[Any] | None = None
            with self._world.raise_together("cannot decide what to load"):
                if self._checkpointer is not None:
                    self._checkpointer.session.settle(None)
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
        """Return the objects that are loaded from a checkpoint."""
        if model_only:
            return {MODEL: self.states[MODEL]}
        for name in self._config.exclude_from_loading:
            if name not in self.states:
                raise InvalidArgumentError(
                    f"checkpoint.exclude_from_loading has {name!r}: there are "
                    f"{', '.join(self.states)}"
                )
        excluded = self._config.exclude_from_loading
        return {
            name: each
            for name, each in self.states.items()
            if each is not None and name not in excluded
        }

    def _load_ours(self, place: str, states: Mapping[str, Any]) -> None:
        current = {name: value.state_dict() for name, value in states.items()}
        shared = {name: state for name, state in current.items() if _has_tensors(name, state)}
        own: dict[str, Any] = {}
        allow_pickle = self._options.get("allow_pickle", False)
        with self._world.raise_together("cannot load the items that each rank saves for itself"):
            for name in current.keys() - shared.keys():
                own[name] = _read_own(
                    place, name, current[name].keys(), self._world.rank, allow_pickle=allow_pickle
                )
        dcp.load(shared, checkpoint_id=place, allow_pickle=allow_pickle)
        with self._world.raise_together("cannot give the loaded state to its objects"):
            for name, state in {**shared, **own}.items():
                states[name].load_state_dict(state)

    def _load_torchs(self, place: str, states: Mapping[str, Any]) -> None:
        """Load like torchtitan, which puts the model's names next to those of the other objects."""
        flat = {name: value for name, value in states.items() if name != MODEL} | states[
            MODEL
        ].state_dict()
        torch_dcp.load(flat, checkpoint_id=place)
        states[MODEL].load_state_dict(flat)

    def _load_hf(self, place: str) -> None:
        state = self._adapter.to_hf(self.states[MODEL].state_dict())
        reader = self._adapter.get_hf_storage_reader(
            place, self._config.initial_load_in_hf_quantized
        )
        torch_dcp.load(state, storage_reader=reader)
        self.states[MODEL].load_state_dict(self._adapter.from_hf(state))

    def _choose(self, step: int) -> list[Any] | None:
        """Return kind and path of what to load, and whether only the model; None to start fresh.

        Raises:
            CheckpointNotFoundError: There is no checkpoint at ``load_step``, or at the path of
                ``initial_load_*``.
            StateMismatchError: The step has only the model.
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
                f"{place} was saved as the last step, with the model alone, so training cannot "
                "continue from it: use it as checkpoint.initial_load_path of another run, or set "
                "an earlier checkpoint.load_step here"
            )
        later = sorted(other for other in steps if other > step)
        if later and not self._config.load_only:
            logger.warning(
                "training continues from step %d, and %s has later ones, %s: load_step=-1 will "
                "take the highest step at that time; delete those that training should not "
                "continue from",
                step,
                self.folder,
                later,
            )
        return [kind, place, step == 0]

    def _steps(self, step: int) -> dict[int, tuple[str, str, str]]:
        """Return kind, path and content of each step; raises the problem of a damaged ``step``."""
        found: dict[int, tuple[str, str, str]] = {}
        if not urls.is_url(self.folder):
            if not os.path.isdir(self.folder):
                return found
            for name in os.listdir(self.folder):
                match, place = re.fullmatch(r"step-(\d+)", name), os.path.join(self.folder, name)
                if match and os.path.isfile(os.path.join(place, dcp.STOCK)):
                    found[int(match[1])] = "torch", place, "full"
        own = self._run.look()
        own.refuse_damaged(None if step == -1 else step)
        return found | {
            info.step: ("ours", info.path, info.metadata.get(_CONTENT, "full")) for info in own.all
        }

    def _choose_initial(self) -> list[Any] | None:
        config = self._config
        path = config.initial_load_path
        if config.initial_load_in_hf:
            if self._adapter is None:
                raise InvalidArgumentError(
                    "checkpoint.initial_load_in_hf: the model has no sd_adapter, which has the "
                    "names"
                )
            place = path or self._adapter.hf_assets_path
            if not place or not os.path.isdir(place):
                where = "checkpoint.initial_load_path" if path else "hf_assets_path"
                raise CheckpointNotFoundError(
                    errno.ENOENT, f"{where} is not a directory with weights", place
                )
            return ["hf", place, True]
        if not path:
            return None
        if (not filesystem.is_remote(path) or urls.is_url(path)) and finding.find(path):
            return ["ours", path, config.initial_load_model_only]
        if not filesystem.isfile(filesystem.join(path, dcp.STOCK)):
            raise finding.not_found(path)
        return ["torch", path, config.initial_load_model_only]


def _name_of(info: CheckpointInfo) -> str | None:
    """Return the name of the link to a checkpoint; None if its export has that name."""
    return None if info.metadata.get(_CONTENT) == "hf" else f"step-{info.step}"


def _has_tensors(name: str, state: Mapping[str, Any]) -> bool:
    """Whether an item has tensors; the large model and optimizers do, and are not searched."""
    return name in (MODEL, OPTIMIZER) or dcp.has_tensors(state)


def _read_own(
    place: str, item: str, names: Collection[str], rank: int, *, allow_pickle: bool
) -> dict[str, Any]:
    """Read an item as this rank saved it.

    Names that it lacks (on another mesh) come from the first rank with them. Raises
    ``StateMismatchError`` if no rank has saved one of ``names``.
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
        f"{place} does not fit, and nothing was loaded: it does not have {missing}; add {item!r} "
        "to checkpoint.exclude_from_loading to leave it unchanged"
    )
