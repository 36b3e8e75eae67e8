"""The state of an ``accelerate.Accelerator``, saved and restored. See docs/integrations/accelerate.md."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Unpack

import torch
from torch import nn

from sidesave.client.options import CheckpointerOptions
from sidesave.client.training.keep_policies import KeepLatest, KeepPolicy
from sidesave.client.training.links import Naming
from sidesave.client.training.manager import CheckpointManager
from sidesave.client.training.save_policies import SavePolicy
from sidesave.errors import InvalidArgumentError
from sidesave.stager.state.annotations import Replicated
from sidesave.stager.state.tensor_collector import is_dtensor

logger = logging.getLogger(__name__)

_KINDS: Final = ("NO", "FSDP")
"""The values of ``DistributedType`` that are saved, and those of ``DistributedDataParallel``, ``MULTI_...``."""


class SidesaveState(CheckpointManager):
    """A :class:`~sidesave.CheckpointManager` of what an accelerator has prepared and registered.

    ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with SidesaveState(accelerator, "runs/exp1", keep=KeepLatest(3)) as state:
            for step in range(state.restore(), total):
                train(step)
                if step % 500 == 0:
                    state.save(step)

    It has the models, optimizers and schedulers, the scaler, the positions of the samplers, registered objects, the
    random number generators, and the accelerator's count of steps. What is prepared or registered later is saved from
    then on. A loader that is within an epoch is left at its begin by :meth:`restore`: skip what was read.
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
            directory: The run directory; None for ``checkpoints`` in the project's.
            save: As for ``CheckpointManager``.
            keep: As for ``CheckpointManager``; without any, ``total_limit`` of the project's configuration counts.
            names: As for ``CheckpointManager``.
            blocking: As for ``CheckpointManager``.
            metadata: As for ``CheckpointManager``.
            **options: Those of ``Checkpointer``.

        Raises:
            InvalidArgumentError: The accelerator has something that is not saved, which is named; there is no
                directory; or as ``CheckpointManager`` raises it.
            UnsupportedValueError: An object has values that cannot be saved, which are named.
            SidesaveError: As ``CheckpointManager`` raises it.
        """
        project = accelerator.project_configuration
        if directory is None:
            if not project.project_dir:
                raise InvalidArgumentError("there is no directory: give one, or Accelerator(project_dir=...)")
            directory = os.path.join(project.project_dir, "checkpoints")
        if keep == () and project.total_limit:
            keep = KeepLatest(project.total_limit)
        objects = _Objects(accelerator)
        super().__init__(
            directory,
            objects.items,
            save=save,
            keep=keep,
            names=names,
            random_state=True,
            blocking=blocking,
            metadata=metadata,
            **options,
        )
        self._managed.before = objects.collect


class _Objects:
    """What an accelerator has prepared and registered by now, as items of a state."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._own: Collection[str] = ()
        self.items: dict[str, Any] = {}
        self.collect()

    def collect(self) -> None:
        """Bring the items up to date; those that were added to them by others stay."""
        accelerator = self._accelerator
        _refuse(accelerator)
        own: dict[str, Any] = {"accelerator": _Steps(accelerator)}
        shared = str(accelerator.distributed_type.value) not in _KINDS
        for name, model in _named("model", accelerator._models):
            own[name] = Replicated(model) if shared and _is_one(model) else model
        for name, optimizer in _named("optimizer", accelerator._optimizers):
            inner = getattr(optimizer, "optimizer", optimizer)  # without that of accelerate around it
            parameters = [each for group in inner.param_groups for each in group["params"]]
            own[name] = Replicated(inner) if shared and not any(map(is_dtensor, parameters)) else inner
        own |= _named("scheduler", accelerator._schedulers)
        own |= {name: _Loader(loader) for name, loader in _named("loader", accelerator._dataloaders)}
        own |= _named("registered", accelerator._custom_objects)
        if accelerator.scaler is not None:
            own["scaler"] = accelerator.scaler
        for name in self._own:
            del self.items[name]
        self.items.update(own)
        self._own = own.keys()


class _Steps:
    """The accelerator's own count, by which it accumulates gradients."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._accelerator.step = state_dict["step"]


class _Loader:
    """Which pass of the data a loader is in, and of which seed; and its own state, if it has one."""

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
            logger.warning("a data loader is of another kind than the one that was saved; not restored: %s", what)
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


def _named(kind: str, objects: Sequence[Any]) -> list[tuple[str, Any]]:
    """Names as accelerate's files have them: the first without a number."""
    return [(kind if number == 0 else f"{kind}_{number}", each) for number, each in enumerate(objects)]


def _is_one(model: nn.Module) -> bool:
    """Whether DistributedDataParallel keeps all of a model alike on all ranks."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return not ignored and not any(map(is_dtensor, model.parameters()))


def _refuse(accelerator: Any) -> None:
    """Raise ``InvalidArgumentError`` for what would not be saved as accelerate does, or not at all."""
    kind = str(accelerator.distributed_type.value)
    if kind not in _KINDS and not kind.startswith("MULTI_"):
        raise InvalidArgumentError(f"SidesaveState does not save {kind}: use accelerator.save_state")
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise InvalidArgumentError("SidesaveState saves FSDP with fsdp_version=2 only: use that, or save_state")
    if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:
        raise InvalidArgumentError(
            "hooks of save_state and load_state are not called by SidesaveState: remove them, and register what they "
            "save with accelerator.register_for_checkpointing"
        )
    if accelerator.project_configuration.save_on_each_node:
        raise InvalidArgumentError(
            "SidesaveState does not go with save_on_each_node: leave it out, and pass node_local=True for a directory "
            "that each node has for itself"
        )
