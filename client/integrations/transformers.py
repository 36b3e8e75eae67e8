"""A ``transformers.Trainer`` that saves with sidesave and goes on from there. See docs/integrations/transformers.md.

The checkpoint of step 100 is ``step-00000100`` in the output directory, and ``checkpoint-100`` a link to it, which is
made at the commit: whatever looks for directories of that name finds whole ones only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import re
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from torch import nn

from sidesave.client import arguments
from sidesave.client.checkpointer import Checkpointer
from sidesave.client.integrations.hf_model import INDEX, ModelItems, model_items, pretrained_files
from sidesave.client.internals import saver_of
from sidesave.client.loading.load import load
from sidesave.client.options import CheckpointerOptions
from sidesave.client.runs import finding
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.runs.pins import Pins
from sidesave.client.saving.handle import Outcome, SaveHandle
from sidesave.client.training.keep_policies import KeepPolicy
from sidesave.client.training.links import Links
from sidesave.client.training.retention import Retention
from sidesave.client.training.rng_state import RandomState
from sidesave.errors import InvalidArgumentError
from sidesave.stager.state.annotations import PerRank, Replicated
from sidesave.writer_daemon.format.manifest import parse_step_directory, step_directory
from sidesave.writer_daemon.storage import urls

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
"""What is overridden of the trainer, or called: a version without one of them would save and load by itself."""
_OPTIMIZER, _SCHEDULER, _SCALER, _RANDOM = "trainer-optimizer", "trainer-scheduler", "trainer-scaler", "trainer-random"
_STATE: Final = "trainer_state.json"
_MANIFEST: Final = "manifest.json"
_ITEMS, _BEST = "trainer_items", "trainer_best_step"
"""Of a checkpoint's metadata: what it has beside the model, and the best step by then."""
_NAME: Final = re.compile(r"checkpoint-(\d+)\Z")
_CLOSE_TIMEOUT_S: Final = 60.0


class SidesaveTrainerMixin:
    """Comes before a trainer's class: ``class MyTrainer(SidesaveTrainerMixin, Trainer)``.

    Its options are those of :class:`~sidesave.Checkpointer`, in the keyword argument ``sidesave_options``. The
    checkpointer is made when ``train`` begins, and closed at its end.
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

    def __init__(self, *args: Any, sidesave_options: CheckpointerOptions | None = None, **kwargs: Any) -> None:
        """Make the trainer; ``args`` and ``kwargs`` are its own.

        Raises:
            InvalidArgumentError: No trainer's class comes after this one, or it is of a version that is not known.
        """
        super().__init__(*args, **kwargs)
        above = cast("Any", super())
        missing = [name for name in _HOOKS if not hasattr(above, name)]
        if missing:
            raise InvalidArgumentError(
                f"{type(self).__name__} has no {', '.join(missing)} after SidesaveTrainerMixin: put it before a "
                f"transformers.Trainer; transformers is {_transformers.__version__}, and 5.23 was tried"
            )
        self._sidesave_options: CheckpointerOptions = sidesave_options or {}
        self._sidesave: _TrainingRun | None = None
        self._sidesave_files: dict[str, bytes] | None = None
        self._sidesave_random = RandomState(self.args.process_index)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As of the trainer. What a killed job has staged is finished first, and counts for ``True``.

        Raises:
            InvalidArgumentError: Something that is not saved, by name; or as ``Checkpointer`` raises it.
            UnsupportedValueError: The state has values that cannot be saved, by name.
            SidesaveError: As ``Checkpointer`` and its ``save``, ``load`` and ``close`` raise it.
        """
        _refuse(self, trial)
        directory = os.path.abspath(str(self.args.output_dir))
        with _opened(directory, self.args.save_total_limit, self._sidesave_options) as run:
            self._sidesave, self._sidesave_files = run, None
            try:
                if resume_from_checkpoint is True:
                    resume_from_checkpoint = run.newest() or True
                elif resume_from_checkpoint:
                    resume_from_checkpoint = run.located(str(resume_from_checkpoint))
                return cast("Any", super()).train(resume_from_checkpoint, trial, *args, **kwargs)
            finally:
                self._sidesave = None

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = cast("Any", super())._prepare_for_training(*args, **kwargs)
        if self._sidesave is not None:
            self._sidesave.check(self._sidesave_items(self._sidesave_model()), self._own_files())
        return prepared

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._sidesave is not None:
            self._sidesave.settle()
        return cast("Any", super())._finalize_training(*args, **kwargs)

    # Saving ----------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run = self._sidesave
        if run is None:  # called by hand, outside of train()
            cast("Any", super())._save_checkpoint(model, trial)
            return
        cast("Any", super()).store_flos()
        step: int = self.state.global_step
        best = self.state.best_global_step
        if best and (best == step or run.has(best)):
            self.state.best_model_checkpoint = os.path.join(self.args.output_dir, f"checkpoint-{best}")
        files: dict[str, str | bytes] = {}
        whole = self._sidesave_model()
        items = self._sidesave_items(whole)
        if self.args.process_index == 0:
            self._note_callbacks()
            files = {**self._own_files(), _STATE: json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True)}
            if whole.index is not None:
                files[INDEX] = whole.index
        best_named = _NAME.search(self.state.best_model_checkpoint or "")
        run.save(
            step,
            items,
            files,
            {_ITEMS: sorted(items.keys() - whole.items.keys()), _BEST: best_named and int(best_named[1])},
        )

    def _note_callbacks(self) -> None:
        """Have the trainer's state tell that of its callbacks, as the trainer's own save does."""
        told = self.state.stateful_callbacks
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, _callbacks.ExportableState):
                name, state = type(callback).__name__, callback.state()
                if isinstance(told[name], list):
                    told[name].append(state)
                else:
                    told[name] = state

    def _own_files(self) -> dict[str, bytes]:
        """Config and tokenizer, on the first rank; the same for all of a training."""
        if self._sidesave_files is None:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            leads = self.args.process_index == 0
            self._sidesave_files = pretrained_files(self.model, [tokenizer] if tokenizer else []) if leads else {}
        return self._sidesave_files

    def _sidesave_model(self) -> ModelItems:
        return model_items(self.model, alike=self._are_alike() and not self._sidesave_options.get("node_local"))

    def _sidesave_items(self, whole: ModelItems) -> dict[str, Any]:
        """What is saved, by name."""
        items = dict(whole.items)
        if self.args.save_only_model:
            return items
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # without that of accelerate around it
        items[_OPTIMIZER] = Replicated(optimizer) if self._are_alike() else optimizer
        items[_SCHEDULER] = self.lr_scheduler
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            items[_SCALER] = scaler
        items[_RANDOM] = PerRank(self._sidesave_random, self._sidesave_random.when_resized)
        return items

    def _are_alike(self) -> bool:
        """Whether all ranks hold the same model and optimizer: there is one, or DistributedDataParallel sees to it."""
        if self.args.world_size == 1:
            return True
        wrapped = getattr(self.model_wrapped, "_orig_mod", self.model_wrapped)
        return isinstance(wrapped, nn.parallel.DistributedDataParallel) and not wrapped.parameters_to_ignore

    # Loading ---------------------------------------------------------------------------------------------------

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
        absent = [] if saved is None else [name for name in items if name not in (*whole.items, *saved)]
        if absent:
            logger.warning("%s was saved without %s, which begin anew", checkpoint, ", ".join(absent))
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
        path = self.state.best_model_checkpoint if run is None else run.located(self.state.best_model_checkpoint)
        if not _is_ours(path):
            cast("Any", super())._load_best_model()
            return
        items = self._sidesave_model().items
        logger.info("loading the best model from %s (%s)", path, self.state.best_metric)
        load(path, into=dict(items), include=list(items))


@dataclass(frozen=True, slots=True)
class _SaveTotalLimit(KeepPolicy):
    """Keep ``limit`` checkpoints as the trainer does: the latest, the best, and the newest of the others."""

    limit: int

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """The steps of these."""
        newest_first = [info.step for info in reversed(checkpoints)]
        best = checkpoints[-1].metadata.get(_BEST) if checkpoints else None
        first = list(dict.fromkeys([*newest_first[:1], *(step for step in newest_first if step == best)]))
        return list(dict.fromkeys([*first, *newest_first]))[: max(self.limit, len(first))]


class _TrainingRun:
    """The output directory of a trainer while it trains."""

    def __init__(self, checkpointer: Checkpointer, limit: int | None) -> None:
        session = saver_of(checkpointer).session
        self._checkpointer = checkpointer
        self._directory = checkpointer.directory
        self._world = session.world
        self._saves: dict[int, SaveHandle] = {}  # those under way
        self._told: list[Outcome[None]] = []
        self._retention: Retention | None = None
        if session.node.rank == 0:
            policies = None if limit is None or limit <= 0 else (_SaveTotalLimit(limit),)
            links = Links(self._directory, _name)
            self._retention = Retention(checkpointer, policies, Pins(self._directory), links)

    def check(self, items: dict[str, Any], files: dict[str, bytes]) -> None:
        """Raise on all ranks what a save of this would raise, as far as that is known before training."""
        with self._world.raise_together("cannot save its state"):
            arguments.encode_files(files)
            saver_of(self._checkpointer).submission.check(items)

    def save(self, step: int, items: dict[str, Any], files: dict[str, str | bytes], metadata: dict[str, Any]) -> None:
        """Save; a step that is there is replaced. Returns when training may go on."""
        retention = self._retention
        with contextlib.nullcontext() if retention is None else retention.saving():
            handle = self._checkpointer.save(step, items, overwrite=True, metadata=metadata, files=files)
            if handle.skipped:
                return
            if retention is not None:
                retention.add(handle)
        told = Outcome[None]()
        handle.committed.add_done_callback(lambda _: told.resolve(None))  # after those of retention
        self._saves = {other: each for other, each in self._saves.items() if not each.done()} | {step: handle}
        self._told = [each for each in self._told if not each.done()] + [told]

    def has(self, step: int) -> bool:
        """Whether a step is committed, or on its way there."""
        handle = self._saves.get(step)
        if handle is not None and not handle.done():
            return True
        return os.path.isdir(os.path.join(self._directory, step_directory(step)))

    def settle(self) -> None:
        """Wait until all is committed, and has its name, on all ranks. Raises what ``Checkpointer.wait`` raises."""
        self._checkpointer.wait()
        self.name()

    def name(self) -> None:
        """Wait until what is committed has its name, on all ranks."""
        with self._world.raise_together("cannot name its checkpoints"):
            for each in self._told:
                each.result()
            if self._retention is not None:
                with self._retention.reading(None):  # which waits for what it has begun
                    pass

    def newest(self) -> str | None:
        """What to resume: the latest checkpoint, or a later one that the trainer has written itself; or None."""
        path: str | None = None
        with self._world.raise_together("cannot tell what to resume"):
            if self._world.rank == 0:
                path = self._newest()
        return self._world.gather("what to resume", path)[0]

    def _newest(self) -> str | None:
        found = saver_of(self._checkpointer).session.shared.checkpoints()
        latest = found[-1] if found else None
        if latest is not None and urls.is_url(latest.path):
            raise InvalidArgumentError(
                f"the latest checkpoint is in the mirror alone, {latest.path}: fetch it with sidesave.fetch() and give "
                "its path as resume_from_checkpoint"
            )
        stock: dict[int, str] = {}
        for entry in os.scandir(self._directory):
            named = _NAME.match(entry.name)
            if named and not entry.is_symlink() and os.path.exists(os.path.join(entry.path, _STATE)):
                stock[int(named[1])] = entry.path
        step = max(stock, default=-1)
        if latest is None or step > latest.step:
            return stock.get(step)
        return latest.path

    def located(self, path: str) -> str:
        """Where a checkpoint lies that may have no link yet."""
        named = _NAME.search(path.rstrip("/"))
        if named and not os.path.exists(path) and _is_in(path, self._directory):
            return os.path.join(self._directory, step_directory(int(named[1])))
        return path

    def load(self, path: str, into: dict[str, Any]) -> None:
        """Load into live objects, on all ranks or on none, and go on from there if it is a checkpoint of this run."""
        real = os.path.realpath(path)
        step = parse_step_directory(os.path.basename(real))
        if step is None or not _is_in(real, self._directory):
            pickled = saver_of(self._checkpointer).session.options.allow_pickle
            with self._world.raise_together(f"cannot load {path}"):
                load(path, into=into, allow_pickle=pickled)
            return
        with contextlib.ExitStack() as spared:
            with self._world.raise_together("cannot tell what to keep while it loads"):
                if self._retention is not None:
                    spared.enter_context(self._retention.reading(step))
            self._checkpointer.load(step, into=into)
        if self._retention is not None:
            for info in finding.find(self._directory):
                link = os.path.join(self._directory, f"checkpoint-{info.step}")
                if info.given_up and os.path.islink(link):
                    os.unlink(link)

    def close(self) -> None:
        """Let all saves end, and what is due be deleted."""
        saver_of(self._checkpointer).session.saves.wait(None)
        if self._retention is not None:
            self._retention.close(_CLOSE_TIMEOUT_S)


@contextlib.contextmanager
def _opened(directory: str, limit: int | None, options: CheckpointerOptions) -> Generator[_TrainingRun]:
    with Checkpointer(directory, **options) as checkpointer:
        run = _TrainingRun(checkpointer, limit)
        try:
            run.name()
            yield run
        finally:
            run.close()


def _name(info: CheckpointInfo) -> str | None:
    """The name of a checkpoint; what the run has gone back behind has none, so that nobody resumes there."""
    return None if info.given_up else f"checkpoint-{info.step}"


def _is_ours(path: Any) -> bool:
    return isinstance(path, str) and os.path.exists(os.path.join(path, _MANIFEST))


def _is_in(path: str, directory: str) -> bool:
    return os.path.realpath(os.path.dirname(os.path.abspath(path))) == os.path.realpath(directory)


def _refuse(trainer: Any, trial: Any) -> None:
    """Raise ``InvalidArgumentError`` for what would not be saved as the trainer does, or not at all."""
    args = trainer.args
    refused = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "XLA": _utils.is_torch_xla_available() or trainer.is_fsdp_xla_enabled,
        "SageMaker's model parallelism": _utils.is_sagemaker_mp_enabled(),
        "FSDP of version 1": trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2,
        "a PEFT model": any(
            kind.__module__.partition(".")[0] == "peft" for kind in type(cast("object", trainer.model)).__mro__
        ),
        "hyperparameter search": trial is not None or trainer.hp_search_backend is not None,
        "enable_jit_checkpoint, which writes a directory by itself": getattr(args, "enable_jit_checkpoint", False),
        "save_on_each_node": args.save_on_each_node,
        "push_to_hub with a hub_strategy other than 'end'": args.push_to_hub
        and str(getattr(args.hub_strategy, "value", args.hub_strategy)) != "end",
    }
    for what, is_used in refused.items():
        if is_used:
            raise InvalidArgumentError(
                f"SidesaveTrainerMixin does not go with {what}: leave it out, or train with the plain Trainer"
            )
