"""The state of an ``accelerate.Accelerator``, saved and restored.

See docs/integrations/accelerate.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Unpack

import torch
from torch import nn

from sidesave.client.options import CheckpointerOptions
from sidesave.client.runs.links import Naming
from sidesave.client.training.keep_policies import KeepLatest, KeepPolicy
from sidesave.client.training.managed_state import Collect
from sidesave.client.training.manager import CheckpointManager
from sidesave.client.training.save_policies import SavePolicy
from sidesave.errors import InvalidArgumentError
from sidesave.stager.ownership import is_torchs_own
from sidesave.stager.sharding import is_dtensor
from sidesave.stager.state.annotations import Replicated

logger = logging.getLogger(__name__)

_KINDS: Final = ("NO", "FSDP")
"""Saved values of ``DistributedType``, besides ``MULTI_...`` (``DistributedDataParallel``)."""


class SidesaveState(CheckpointManager):
    """A :class:`~sidesave.CheckpointManager` for all that an accelerator prepared or registered.

    ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with SidesaveState(accelerator, "runs/exp1", keep=KeepLatest(3)) as state:
            for step in range(state.restore(), total):
                train(step)
                if step % 500 == 0:
                    state.save(step)

    It saves the models, optimizers and schedulers, the scaler, the positions of the samplers,
    registered objects, the random number generators, and the accelerator's count of steps. Objects
    that are prepared or registered later are saved from then on. :meth:`restore` leaves a loader at
    the beginning of its epoch: skip the batches already read.
    """

    def __init__(
        self,
        accelerator: Any,
        directory: str | os.PathLike[str] | None = None,
        *,
        save: Sequence[SavePolicy] | SavePolicy | int = (),
        keep: Sequence[KeepPolicy] | KeepPolicy = (),
        names: Naming | None = None,
        blocking: bool = False,
        metadata: Mapping[str, Any] | None = None,
        **options: Unpack[CheckpointerOptions],
    ) -> None:
        """Open the run directory. Call it after ``accelerator.prepare``, on all processes.

        Args:
            accelerator: The accelerator.
            directory: The run directory; None for ``checkpoints`` in the project directory.
            save: As for ``CheckpointManager``.
            keep: As for ``CheckpointManager``; defaults to ``total_limit`` of the project's
                configuration.
            names: As for ``CheckpointManager``.
            blocking: As for ``CheckpointManager``.
            metadata: As for ``CheckpointManager``.
            **options: Those of ``Checkpointer``.

        Raises:
            InvalidArgumentError: The accelerator uses a feature that cannot be saved (the message
                names it); there is no directory; or as ``CheckpointManager`` raises it.
            UnsupportedValueError: An object has values that cannot be saved; the message names
                them.
            SidesaveError: As ``CheckpointManager`` raises it.
        """
        project = accelerator.project_configuration
        if directory is None:
            if not project.project_dir:
                raise InvalidArgumentError(
                    "there is no directory: give one, or Accelerator(project_dir=...)"
                )
            directory = os.path.join(project.project_dir, "checkpoints")
        if keep == () and project.total_limit:
            keep = KeepLatest(project.total_limit)
        self._objects = _Objects(accelerator)
        super().__init__(
            directory,
            self._objects.collect(None),
            save=save,
            keep=keep,
            names=names,
            random_state=True,
            blocking=blocking,
            metadata=metadata,
            **options,
        )

    def _collector(self, state: dict[str, Any]) -> Collect:
        return self._objects.collect


class _Objects:
    """The objects that an accelerator has prepared or registered, as items of a state."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._own: Collection[str] = ()
        self._items: dict[str, Any] = {}

    def collect(self, step: int | None) -> dict[str, Any]:
        """Update only the accelerator's items, and return all; ``step`` is about to be saved."""
        accelerator = self._accelerator
        _refuse(accelerator)
        if step is not None:
            _warn_of_gradients(accelerator, step)
        own: dict[str, Any] = {"accelerator": _Steps(accelerator)}
        shared = str(accelerator.distributed_type.value) not in _KINDS
        for name, model in _named("model", accelerator._models):
            own[name] = Replicated(model) if shared and _is_one(model) else model
        for name, optimizer in _named("optimizer", accelerator._optimizers):
            inner = getattr(optimizer, "optimizer", optimizer)  # unwrap accelerate's optimizer
            parameters = [each for group in inner.param_groups for each in group["params"]]
            # others may keep a parameter's state on one rank
            alike = shared and is_torchs_own(inner)
            own[name] = (
                Replicated(inner) if alike and not any(map(is_dtensor, parameters)) else inner
            )
        own |= _named("scheduler", accelerator._schedulers)
        own |= {
            name: _Loader(loader) for name, loader in _named("loader", accelerator._dataloaders)
        }
        own |= _named("registered", accelerator._custom_objects)
        if accelerator.scaler is not None:
            own["scaler"] = accelerator.scaler
        for name in self._own:
            del self._items[name]
        self._items.update(own)
        self._own = own.keys()
        return self._items


class _Steps:
    """The accelerator's count of steps, which decides when accumulated gradients are applied."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._accelerator.step = state_dict["step"]


class _Loader:
    """The epoch and seed of a data loader, and the loader's own state if it is a stateful one."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def _sampler(self) -> Any:
        get: Callable[[], Any] | None = getattr(self._loader, "get_sampler", None)
        sampler = None if get is None else get()
        return sampler if hasattr(sampler, "initial_seed") else None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"iteration": getattr(self._loader, "iteration", None)}
        sampler = self._sampler()
        if sampler is not None:
            state["sampler"] = {"initial_seed": sampler.initial_seed, "epoch": sampler.epoch}
        generator = getattr(self._loader, "synchronized_generator", None)
        if isinstance(generator, torch.Generator):
            state["generator"] = generator.get_state()
        if getattr(self._loader, "use_stateful_dataloader", False):
            state["loader"] = self._loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        others = state_dict.keys() ^ self.state_dict().keys()
        if others:
            what = ", ".join(sorted(others))
            logger.warning(
                "a data loader differs in kind from the one that was saved; not restored: %s", what
            )
        if state_dict["iteration"] is not None:
            self._loader.iteration = state_dict["iteration"]
        sampler, saved = self._sampler(), state_dict.get("sampler")
        if sampler is not None and saved is not None:
            sampler.initial_seed, sampler.epoch = saved["initial_seed"], saved["epoch"]
        generator = getattr(self._loader, "synchronized_generator", None)
        if isinstance(generator, torch.Generator) and "generator" in state_dict:
            generator.set_state(state_dict["generator"])
        if "loader" in state_dict and getattr(self._loader, "use_stateful_dataloader", False):
            self._loader.load_state_dict(state_dict["loader"])


def _warn_of_gradients(accelerator: Any, step: int) -> None:
    """Warn if gradients are being accumulated, since they are not in the checkpoint of ``step``."""
    if accelerator.sync_gradients:
        return
    groups = [group for optimizer in accelerator._optimizers for group in optimizer.param_groups]
    if any(parameter.grad is not None for group in groups for parameter in group["params"]):
        logger.warning(
            "step %d is saved in the middle of gradient accumulation (%d steps): the accumulated "
            "gradients are not in the checkpoint, so a run resumed from it lacks them; save when "
            "accelerator.sync_gradients is true",
            step,
            accelerator.gradient_accumulation_steps,
        )


def _named(kind: str, objects: Sequence[Any]) -> list[tuple[str, Any]]:
    """Pair objects with names like those of accelerate's files: the first has no number."""
    return [
        (kind if number == 0 else f"{kind}_{number}", each) for number, each in enumerate(objects)
    ]


def _is_one(model: nn.Module) -> bool:
    """Whether DistributedDataParallel keeps the whole model identical on all ranks."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return not ignored and not any(map(is_dtensor, model.parameters()))


def _refuse(accelerator: Any) -> None:
    """Raise ``InvalidArgumentError`` for features not saved, or not saved as accelerate does."""
    kind = str(accelerator.distributed_type.value)
    if kind not in _KINDS and not kind.startswith("MULTI_"):
        raise InvalidArgumentError(
            f"SidesaveState does not save {kind}: use accelerator.save_state"
        )
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise InvalidArgumentError(
            "SidesaveState saves FSDP with fsdp_version=2 only: use that, or save_state"
        )
    if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:
        raise InvalidArgumentError(
            "hooks of save_state and load_state are not called by SidesaveState: remove them, and "
            "register what they save with accelerator.register_for_checkpointing"
        )
    if accelerator.project_configuration.save_on_each_node:
        raise InvalidArgumentError(
            "SidesaveState does not support save_on_each_node: leave it out, and pass "
            "node_local=True if each node has a directory of its own"
        )
