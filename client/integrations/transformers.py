"""A ``transformers.Trainer`` that saves and resumes with sidesave.

See docs/integrations/transformers.md.

The checkpoint of step 100 is ``step-00000100`` in the output directory, and ``checkpoint-100`` is a
link to it. The link is made at the commit, so tools that look for directories of that name find
only complete checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import os
from typing import Any, Final, cast

from torch import nn

from sidesave.client.integrations import hf_overrides as overrides
from sidesave.client.integrations.hf_model import (
    INDEX,
    ModelItems,
    model_items,
    pretrained_files,
    without_weights,
    written_files,
)
from sidesave.client.integrations.hf_run import BEST, NAME, STATE, TrainingRun, open_run
from sidesave.client.loading.load import load
from sidesave.client.options import CheckpointerOptions
from sidesave.client.runs import finding
from sidesave.client.training.rng_state import RandomState
from sidesave.errors import InvalidArgumentError
from sidesave.stager.ownership import is_torchs_own
from sidesave.stager.state.annotations import PerRank, Replicated

logger = logging.getLogger(__name__)

_transformers: Any = importlib.import_module("transformers")
_callbacks: Any = importlib.import_module("transformers.trainer_callback")
_utils: Any = importlib.import_module("transformers.utils")

_HOOKS: Final = (
    "train",
    "_prepare_for_training",
    "_finalize_training",
    "_save_checkpoint",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_load_best_model",
    "store_flos",
)
"""The trainer's methods that the mixin overrides or calls; a version must have all of them."""
_OPTIMIZER, _SCHEDULER, _SCALER, _RANDOM = (
    "trainer-optimizer",
    "trainer-scheduler",
    "trainer-scaler",
    "trainer-random",
)
_ARGUMENTS: Final = "training_args.bin"
"""A pickle that the trainer writes for reference and never reads."""
_MANIFEST: Final = "manifest.json"
_ITEMS: Final = "trainer_items"
"""Metadata key: the items other than the model."""


class SidesaveTrainerMixin:
    """A mixin to put before a trainer's class: ``class MyTrainer(SidesaveTrainerMixin, Trainer)``.

    The keyword argument ``sidesave_options`` has options of :class:`~sidesave.Checkpointer`. The
    checkpointer is created when ``train`` begins, and closed at its end.
    """

    args: Any
    accelerator: Any
    callback_handler: Any
    control: Any
    data_collator: Any
    lr_scheduler: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    processing_class: Any
    state: Any

    def __init__(
        self, *args: Any, sidesave_options: CheckpointerOptions | None = None, **kwargs: Any
    ) -> None:
        """Create the trainer with its own ``args`` and ``kwargs``.

        Raises:
            InvalidArgumentError: No trainer class comes after this one, or its version is not
                supported.
        """
        super().__init__(*args, **kwargs)
        above = cast("Any", super())
        missing = [name for name in _HOOKS if not hasattr(above, name)]
        if missing:
            raise InvalidArgumentError(
                f"{type(self).__name__} has no {', '.join(missing)} after SidesaveTrainerMixin: "
                "put it before a transformers.Trainer; transformers is "
                f"{_transformers.__version__}, and 5.23 was tested"
            )
        self._sidesave_options: CheckpointerOptions = sidesave_options or {}
        self._sidesave: TrainingRun | None = None
        self._sidesave_files: dict[str, bytes] | None = None
        self._sidesave_random = RandomState(self.args.process_index)

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train like the trainer.

        Saves that a killed job has staged are committed first, and count for ``True``.

        Raises:
            InvalidArgumentError: A feature in use is not supported (it is named); or as
                ``Checkpointer`` raises it.
            UnsupportedValueError: The state has values that cannot be saved; they are named.
            SidesaveError: As ``Checkpointer`` and its ``save``, ``load`` and ``close`` raise it.
        """
        _refuse(self, trial)
        directory = os.path.abspath(str(self.args.output_dir))
        with open_run(directory, self.args.save_total_limit, self._sidesave_options) as run:
            self._sidesave, self._sidesave_files = run, None
            watch = overrides.watch_callbacks(self, directory)
            try:
                if resume_from_checkpoint is True:
                    resume_from_checkpoint = run.newest() or True
                elif resume_from_checkpoint:
                    resume_from_checkpoint = run.located(str(resume_from_checkpoint))
                return cast("Any", super()).train(resume_from_checkpoint, trial, *args, **kwargs)
            finally:
                self._sidesave = None
                self.callback_handler.remove_callback(watch)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = cast("Any", super())._prepare_for_training(*args, **kwargs)
        if self._sidesave is not None:
            self._sidesave.check(self._sidesave_items(self._sidesave_model()), self._own_files())
        return prepared

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._sidesave is not None:
            self._sidesave.settle()
        return cast("Any", super())._finalize_training(*args, **kwargs)

    # Saving ---------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run = self._sidesave
        if run is None:  # called by hand, outside of train()
            cast("Any", super())._save_checkpoint(model, trial)
            return
        cast("Any", super()).store_flos()
        step: int = self.state.global_step
        best = self.state.best_global_step
        if best and (best == step or run.has(best)):
            self.state.best_model_checkpoint = os.path.join(
                self.args.output_dir, f"checkpoint-{best}"
            )
        files: dict[str, str | bytes] = {}
        whole = self._sidesave_model()
        items = self._sidesave_items(whole)
        own = self._own_files()
        if self.args.process_index == 0:
            self._note_callbacks()
            files = {
                **own,
                STATE: json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True),
            }
            if whole.index is not None:
                files[INDEX] = whole.index
        best_named = NAME.search(self.state.best_model_checkpoint or "")
        run.save(
            step,
            items,
            files,
            {
                _ITEMS: sorted(items.keys() - whole.items.keys()),
                BEST: best_named and int(best_named[1]),
            },
        )

    def _note_callbacks(self) -> None:
        """Copy the callbacks' state to the trainer's state, as the trainer's own save does."""
        told = self.state.stateful_callbacks
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, _callbacks.ExportableState):
                name, state = type(callback).__name__, callback.state()
                if isinstance(told[name], list):
                    told[name].append(state)
                else:
                    told[name] = state

    def _own_files(self) -> dict[str, bytes]:
        """Return config and tokenizer (cached), or what overrides of ``_save`` write, on rank 0.

        All ranks call this; the others get an empty dict.
        """
        if overrides.are_called(self, SidesaveTrainerMixin):
            with (
                without_weights(self.model)
                if hasattr(self.model, "save_pretrained")
                else contextlib.nullcontext()
            ):
                files = written_files(
                    lambda folder: cast("Any", self).save_model(folder, _internal_call=True)
                )
            files.pop(_ARGUMENTS, None)
            return files if self.args.process_index == 0 else {}
        if self._sidesave_files is None:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            leads = self.args.process_index == 0
            self._sidesave_files = (
                pretrained_files(_uncompiled(self.model), [tokenizer] if tokenizer else [])
                if leads
                else {}
            )
        return self._sidesave_files

    def _sidesave_model(self) -> ModelItems:
        return model_items(
            _uncompiled(self.model),
            alike=self._are_alike() and not self._sidesave_options.get("node_local"),
        )

    def _sidesave_items(self, whole: ModelItems) -> dict[str, Any]:
        """Return the items to save, by name."""
        items = dict(whole.items)
        if self.args.save_only_model:
            return items
        # unwrap accelerate's optimizer
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        # others may keep a parameter's state on one rank
        alike = self._are_alike() and is_torchs_own(optimizer)
        items[_OPTIMIZER] = Replicated(optimizer) if alike else optimizer
        items[_SCHEDULER] = self.lr_scheduler
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            items[_SCALER] = scaler
        items[_RANDOM] = PerRank(self._sidesave_random, self._sidesave_random.when_resized)
        return items

    def _are_alike(self) -> bool:
        """Whether ranks hold the same model and optimizer: one rank, or DistributedDataParallel."""
        if self.args.world_size == 1:
            return True
        wrapped = getattr(self.model_wrapped, "_orig_mod", self.model_wrapped)
        return (
            isinstance(wrapped, nn.parallel.DistributedDataParallel)
            and not wrapped.parameters_to_ignore
        )

    # Loading --------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        if self._sidesave is None or not _is_ours(resume_from_checkpoint):
            cast("Any", super())._load_from_checkpoint(resume_from_checkpoint, model)
        # else everything is loaded at once, with the optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        run = self._sidesave
        if run is None or not _is_ours(checkpoint):
            cast("Any", super())._load_optimizer_and_scheduler(checkpoint)
            return
        whole = self._sidesave_model()
        items = self._sidesave_items(whole)
        found = finding.find(checkpoint)
        saved = found[0].metadata.get(_ITEMS) if found else None
        absent = (
            [] if saved is None else [name for name in items if name not in (*whole.items, *saved)]
        )
        if absent:
            logger.warning("%s was saved without %s; not restored", checkpoint, ", ".join(absent))
        run.load(checkpoint, {name: item for name, item in items.items() if name not in absent})

    def _load_scaler(self, checkpoint: Any) -> None:
        if self._sidesave is None or not _is_ours(checkpoint):
            cast("Any", super())._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if self._sidesave is None or not _is_ours(checkpoint):
            cast("Any", super())._load_rng_state(checkpoint)
            return
        self._sidesave_random.apply()

    def _load_best_model(self) -> None:
        run = self._sidesave
        path = (
            self.state.best_model_checkpoint
            if run is None
            else run.located(self.state.best_model_checkpoint)
        )
        if not _is_ours(path):
            cast("Any", super())._load_best_model()
            return
        items = self._sidesave_model().items
        logger.info("loading the best model from %s (%s)", path, self.state.best_metric)
        load(path, into=dict(items), include=list(items))


def _uncompiled(model: Any) -> Any:
    """Return the model without ``torch.compile``; ``from_pretrained`` needs its names and class."""
    return getattr(model, "_orig_mod", model)


def _is_ours(path: Any) -> bool:
    return isinstance(path, str) and os.path.exists(os.path.join(path, _MANIFEST))


def _refuse(trainer: Any, trial: Any) -> None:
    """Raise ``InvalidArgumentError`` for features not saved, or not saved as the trainer does."""
    overrides.refuse(trainer, SidesaveTrainerMixin)
    args = trainer.args
    refused = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "XLA": _utils.is_torch_xla_available() or trainer.is_fsdp_xla_enabled,
        "SageMaker's model parallelism": _utils.is_sagemaker_mp_enabled(),
        "FSDP of version 1": trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2,
        "a PEFT model": any(
            kind.__module__.partition(".")[0] == "peft"
            for kind in type(cast("object", trainer.model)).__mro__
        ),
        "adapters of model.add_adapter (their file is not adapter_model.safetensors)": getattr(
            trainer.model, "_hf_peft_config_loaded", False
        ),
        "hyperparameter search": trial is not None or trainer.hp_search_backend is not None,
        "enable_jit_checkpoint, which writes a directory by itself": getattr(
            args, "enable_jit_checkpoint", False
        ),
        "save_on_each_node": args.save_on_each_node,
        "push_to_hub with a hub_strategy other than 'end'": args.push_to_hub
        and str(getattr(args.hub_strategy, "value", args.hub_strategy)) != "end",
    }
    for what, is_used in refused.items():
        if is_used:
            raise InvalidArgumentError(
                f"SidesaveTrainerMixin does not support {what}: leave it out, or train with the "
                "plain Trainer"
            )
