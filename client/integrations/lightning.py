# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false
"""A ``CheckpointIO`` plugin that saves Lightning's checkpoints with sidesave.

See docs/integrations/lightning.md.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, Unpack

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from sidesave.client import arguments
from sidesave.client.checkpointer import Checkpointer
from sidesave.client.integrations.checkpoint_paths import CheckpointPaths, is_left_out, is_pending
from sidesave.client.integrations.lightning_values import (
    SHARDED,
    FaithfulValues,
    with_versions,
    without_versions,
)
from sidesave.client.loading.load import LoadRequest, own_place
from sidesave.client.options import CheckpointerOptions
from sidesave.client.runs.finding import is_checkpoint
from sidesave.errors import (
    CheckpointNotFoundError,
    DirectoryInUseError,
    InvalidArgumentError,
    SidesaveError,
    brief,
)
from sidesave.stager.state import tree
from sidesave.stager.state.annotations import Compared
from sidesave.writer_daemon.options import DaemonOptions
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)

T = TypeVar("T")
PathLike = str | os.PathLike[str]

_TAKEOVER_POLL_S: Final = 0.05


class SidesaveCheckpointIO(TorchCheckpointIO):
    """Lets ``Trainer`` and ``ModelCheckpoint`` load, and save without waiting for storage.

    Each path that Lightning saves under becomes a link to a checkpoint of the run directory at the
    commit; in this process the path exists as soon as the save is called. A checkpoint that
    ``ModelCheckpoint`` removes is deleted when the save before the removal is committed, and stays
    if that save fails. Checkpoints that Lightning has written itself are loaded too.
    """

    def __init__(self, directory: PathLike, **options: Unpack[CheckpointerOptions]) -> None:
        """Finish or undo the paths that a killed trainer left in ``directory``.

        This makes ``ckpt_path="last"`` work. Blocks for at most
        ``DaemonOptions.takeover_timeout_s``, and hardly at all if nothing was left.

        Args:
            directory: The run directory, on a disk. It gets the data, wherever the paths are.
            **options: Those of ``Checkpointer``, without the ones that choose the saving ranks:
                Lightning's rank 0 saves.

        Raises:
            TypeError: ``Checkpointer`` has no such option.
            InvalidArgumentError: ``directory`` is a URL, or an option is not supported.
            SidesaveError: As ``Checkpointer``, if a killed trainer left something.
        """
        for name in ("distributed", "process_group", "node_local"):
            if name in options:
                raise InvalidArgumentError(
                    f"{name}={brief(options.get(name))} has no meaning for Lightning, whose rank 0 "
                    "saves: leave it out"
                )
        if urls.is_url(os.fspath(directory)):
            raise InvalidArgumentError(
                f"{urls.shown(os.fspath(directory))}: Lightning's paths are links, which object "
                "stores do not have; give a directory, and the URL as mirror="
            )
        # a typo is raised here, not in the first save
        inspect.signature(Checkpointer).bind(directory, **options)
        self._directory = arguments.path_text(directory)
        self._options = options
        self._checkpointer: Checkpointer | None = None
        self._paths: CheckpointPaths | None = None  # on rank 0
        self._values = FaithfulValues(pickles=options.get("allow_pickle", False))
        self._recover()

    def _recover(self) -> None:
        if not is_left_out(self._directory):
            return
        if rank_zero_only.rank == 0:
            try:
                self.open()
            except DirectoryInUseError:
                return  # these are no leftovers: another trainer saves there
            self._close()
        else:  # this rank is about to look for paths too, so wait until rank 0 has recovered them
            deadline = (
                time.monotonic() + self._options.get("daemon", DaemonOptions()).takeover_timeout_s
            )
            while is_left_out(self._directory) and time.monotonic() < deadline:
                time.sleep(_TAKEOVER_POLL_S)

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The ``Checkpointer`` while the run directory is open on this rank, else None.

        It gives access to its other methods.
        """
        return self._checkpointer

    def callback(self) -> Callback:
        """Return a callback that creates the ``Checkpointer`` when ``fit`` begins.

        Without it, the first save does so. The callback also refuses strategies that do not save
        through this plugin.
        """
        return _Setup(self)

    def open(self, *, shards: bool = False) -> Checkpointer:
        """Create the ``Checkpointer`` now; takes a fraction of a second.

        Rank 0 alone calls this; with ``shards``, for :meth:`save_shards`, all ranks. Raises as
        ``Checkpointer`` does.
        """
        if self._checkpointer is None:
            options: CheckpointerOptions = {**self._options, "distributed": shards}
            checkpointer = Checkpointer(self._directory, **options)
            leads = not shards or own_place()["rank"] == 0
            try:
                self._paths = CheckpointPaths(checkpointer) if leads else None
            except BaseException:  # also on an interrupt: the caller gets no object to close
                checkpointer.close()
                raise
            self._checkpointer = checkpointer
        return self._checkpointer

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: object = None
    ) -> None:
        """Save; returns when training may go on. Rank 0 alone calls this.

        Raises:
            InvalidArgumentError: ``storage_options`` are given, or ``path`` is a URL or a
                directory.
            UnsupportedValueError: The checkpoint has values that cannot be saved; they are named.
            SidesaveError: An earlier save failed; or as ``Checkpointer.save``.
        """
        _refuse(storage_options)
        place = _place(path)
        self.open()
        assert self._paths is not None
        state = with_versions(self._values.of(checkpoint))
        self._paths.save(place, self._paths.claim(place), state, _facts(checkpoint))

    def save_shards(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: object = None
    ) -> None:
        """Save each rank's shards of ``state_dict`` and ``optimizer_states``. All ranks call this.

        All other items are saved from rank 0. For strategies; see
        :class:`SidesaveModelParallelStrategy`.
        """
        _refuse(storage_options)
        checkpointer = self.open(shards=True)
        self._values.of(checkpoint)  # raises on every rank before a path is claimed
        step, note = _agreed(
            _place(path), lambda place: self._paths.claim(place) if self._paths else (0, "")
        )
        state = {name: Compared(checkpoint[name]) for name in SHARDED if name in checkpoint}
        if self._paths is None:
            checkpointer.save(step, state)
        else:
            self._paths.save(
                _place(path),
                (step, note),
                {**self._values.of(checkpoint), **state},
                _facts(checkpoint),
            )

    def check(self, state: dict[str, Any]) -> None:
        """Raise ``UnsupportedValueError`` for values that a save would refuse; nothing is saved."""
        tree.check(self._values.of(state), allow_pickle=self._options.get("allow_pickle", False))

    def load_shards(
        self, place: str, into: dict[str, Any], *, strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        """Fill ``into``, the sharded items of :meth:`save_shards`, and return all others.

        All ranks call this.
        """
        allow_pickle = self._options.get("allow_pickle", False) and weights_only is not True
        rest = LoadRequest(exclude=SHARDED, strict=False, allow_pickle=allow_pickle).read(place)
        ranks = own_place()
        own = LoadRequest(
            include=[*into],
            into=into,
            strict=strict,
            allow_pickle=allow_pickle,
            rank=ranks["rank"],
            size=ranks["size"],
        )
        own.read(place).apply()
        return rest.apply()

    def load_checkpoint(
        self, path: PathLike, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint that ``path`` leads to, after pending saves there.

        All ranks call this, and load the checkpoint that rank 0 finds at its ``path``. Pickled
        values need ``allow_pickle=True``, and are refused with ``weights_only=True``.

        Raises:
            CheckpointNotFoundError: There is no committed checkpoint at ``path``.
            SidesaveError: As :func:`sidesave.load`.
        """
        place = self.find_checkpoint(path)
        if not os.path.isdir(place):
            options = {} if map_location is None else {"map_location": map_location}
            return super().load_checkpoint(place, **options, weights_only=weights_only)
        if callable(map_location) or isinstance(map_location, Mapping):
            raise InvalidArgumentError(
                f"{place}: map_location must be a device, not {brief(map_location)}"
            )
        allow_pickle = self._options.get("allow_pickle", False) and weights_only is not True
        request = LoadRequest(map_location=map_location, allow_pickle=allow_pickle, rank=0, size=1)
        return without_versions(request.read(place).apply())

    def find_checkpoint(self, path: PathLike) -> str:
        """Return the target of rank 0's ``path`` after its pending saves; all ranks call this."""
        return _agreed(_place(path), self._found)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove ``path`` and its checkpoint once earlier saves commit; if one fails, both stay.

        Raises ``WriteError`` if they cannot be removed, and ``SidesaveError`` as ``Checkpointer``.
        """
        place = _place(path)
        self.open()
        assert self._paths is not None
        self._paths.remove(place)

    def teardown(self) -> None:
        """Wait for all commits and deletions, and end the daemon; the next save starts another one.

        Raises the error of a failed save, or only logs it if another exception is already
        propagating.
        """
        raised = sys.exception()
        try:
            self._close()
        except SidesaveError as error:
            if raised is None:
                raise
            logger.error("a save failed as well: %s", error)

    def _close(self) -> None:
        closing = self._paths or self._checkpointer
        self._paths = self._checkpointer = None
        if closing is not None:
            closing.close()

    def _found(self, path: str) -> str:
        """Return the target of ``path``, after waiting for pending saves there."""
        if self._paths is not None:
            self._paths.wait_for(path)
        if is_pending(path):
            raise CheckpointNotFoundError(
                f"{path}: its save is not committed, or its trainer was killed before the commit; "
                "create a SidesaveCheckpointIO for that run, or resume the run, to link the path "
                "to what was committed"
            )
        if not os.path.exists(path):
            raise CheckpointNotFoundError(f"{path}: there is no checkpoint")
        return os.path.realpath(path)


class _Setup(Callback):
    def __init__(self, io: SidesaveCheckpointIO) -> None:
        self._io = io

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the strategy, and open the run directory if training begins."""
        strategy = trainer.strategy
        if strategy.checkpoint_io is not self._io:
            raise InvalidArgumentError(
                "this SidesaveCheckpointIO is not the trainer's: pass it in plugins=[...] as well"
            )
        if isinstance(strategy, _BYPASSING) and not isinstance(
            strategy, SidesaveModelParallelStrategy
        ):
            raise InvalidArgumentError(
                f"{type(strategy).__name__} does not save through a CheckpointIO: for FSDP2 and "
                "tensor parallelism use SidesaveModelParallelStrategy, else leave "
                "SidesaveCheckpointIO out"
            )
        if stage != "fit":
            return
        for each in (pl_module, trainer.datamodule):
            if each is not None and each.hparams:
                self._io.check({each.CHECKPOINT_HYPER_PARAMS_KEY: dict(each.hparams)})
        if isinstance(strategy, SidesaveModelParallelStrategy):
            self._io.open(shards=True)
        elif trainer.is_global_zero:
            self._io.open()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise before the first step if the state of a scheduler or callback cannot be saved."""
        if all(getattr(each, "save_weights_only", False) for each in trainer.checkpoint_callbacks):
            return
        schedulers = [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]
        callbacks = {each.state_key: each.state_dict() for each in trainer.callbacks}
        self._io.check({"lr_schedulers": schedulers, "callbacks": callbacks})


class SidesaveModelParallelStrategy(ModelParallelStrategy):
    """FSDP2 and tensor parallelism, whose shards the trainer's ``SidesaveCheckpointIO`` saves.

    Takes the arguments of ``ModelParallelStrategy``.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not self._save_distributed_checkpoint:
            raise InvalidArgumentError(
                "save_distributed_checkpoint=False would gather all shards on rank 0: leave it "
                "out; one process can read the sharded checkpoint with sidesave.load"
            )

    @property
    def _io(self) -> SidesaveCheckpointIO:
        if not isinstance(self.checkpoint_io, SidesaveCheckpointIO):
            raise InvalidArgumentError(
                f"{type(self).__name__} saves through a SidesaveCheckpointIO, and the trainer has "
                f"a {type(self.checkpoint_io).__name__}: pass one in plugins=[...]"
            )
        return self.checkpoint_io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The live shards, which the save copies."""
        assert self.model is not None
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The live shards, which the save copies."""
        assert self.model is not None
        return get_optimizer_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: object = None
    ) -> None:
        """Save with :meth:`SidesaveCheckpointIO.save_shards`."""
        self._io.save_shards(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: PathLike, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load into the shards, otherwise like :meth:`SidesaveCheckpointIO.load_checkpoint`."""
        assert self.model is not None
        place = self._io.find_checkpoint(checkpoint_path)
        if not is_checkpoint(place):
            return super().load_checkpoint(place, weights_only=weights_only)
        into: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        if self.optimizers:
            into["optimizer_states"] = [
                get_optimizer_state_dict(self.model, each) for each in self.optimizers
            ]
        strict = self.lightning_module.strict_loading
        rest = self._io.load_shards(place, into, strict=strict, weights_only=weights_only)
        set_model_state_dict(
            self.model, into["state_dict"], options=StateDictOptions(strict=strict)
        )
        for optimizer, state in zip(self.optimizers, into.get("optimizer_states", ()), strict=True):
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=state)
        return rest

    def teardown(self) -> None:
        """Tear down the strategy, and the plugin, which Lightning does not tear down here."""
        try:
            super().teardown()
        finally:
            self._io.teardown()


_BYPASSING: Final = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)


def _refuse(storage_options: object) -> None:
    if storage_options is not None:
        raise InvalidArgumentError(
            f"storage_options={brief(storage_options)} has no meaning for one save: give "
            "SidesaveCheckpointIO options"
        )


def _facts(checkpoint: Mapping[str, Any]) -> dict[str, int]:
    """Return the metadata of a checkpoint other than its path."""
    return {
        name: checkpoint[name]
        for name in ("epoch", "global_step")
        if isinstance(checkpoint.get(name), int)
    }


def _place(path: PathLike) -> str:
    text = os.fspath(path)
    if urls.is_url(text):
        raise InvalidArgumentError(
            f"{urls.shown(text)}: Lightning's paths are links, which object stores do not have; "
            "give a ModelCheckpoint a directory, and SidesaveCheckpointIO the URL as mirror="
        )
    return arguments.path_text(text)


def _agreed(path: str, find: Callable[[str], T]) -> T:
    """Return rank 0's ``find(path)`` on every rank; an error on rank 0 is raised on every rank."""
    place = own_place()
    if place["size"] == 1:
        return find(path)
    answer: list[Any] = [None]
    if place["rank"] == 0:
        try:
            answer = [find(path)]
        except SidesaveError as error:
            answer = [error]
    torch.distributed.broadcast_object_list(answer)
    if isinstance(answer[0], SidesaveError):
        raise answer[0]
    return answer[0]
