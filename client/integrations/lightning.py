# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false
"""Lightning's checkpoints saved by sidesave: a ``CheckpointIO`` plugin. See docs/integrations/lightning.md."""

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
from sidesave.stager.state.annotations import Compared
from sidesave.stager.state.treespec import with_metadata
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)

T = TypeVar("T")
PathLike = str | os.PathLike[str]

SHARDED: Final = ("state_dict", "optimizer_states")
"""The items of a checkpoint that ranks of model parallelism have in parts."""
_MODULE_VERSIONS: Final = "sidesave.state_dict._metadata"
"""The item of a checkpoint that keeps what torch hides in an attribute of a module's state dict."""
_TAKEOVER_POLL_S: Final = 0.05


class SidesaveCheckpointIO(TorchCheckpointIO):
    """Has ``Trainer`` and ``ModelCheckpoint`` save without waiting for storage, and load what was saved so.

    Each path that Lightning saves under is a link to a checkpoint of the run directory, made with the commit. In this
    process the path is there from the call on. A checkpoint that ``ModelCheckpoint`` removes goes when the save before
    the removal is committed, and stays if that fails. Checkpoints that Lightning has written itself are loaded too.
    """

    def __init__(self, directory: PathLike, **options: Unpack[CheckpointerOptions]) -> None:
        """Put in order what a killed trainer has left in ``directory``, so that ``ckpt_path="last"`` finds it.

        Blocks for that at most ``takeover_timeout_s``, and hardly at all where nothing is left.

        Args:
            directory: The run directory, on a disk: the bytes go there, wherever the paths are.
            **options: Those of ``Checkpointer``, but those that say who saves: Lightning's rank 0 does.

        Raises:
            TypeError: ``Checkpointer`` has no such option.
            InvalidArgumentError: ``directory`` is a URL, or an option has no meaning here.
            SidesaveError: As ``Checkpointer``, where a killed trainer has left something.
        """
        for name in ("distributed", "process_group", "node_local"):
            if name in options:
                raise InvalidArgumentError(
                    f"{name}={brief(options.get(name))} has no meaning for Lightning, whose rank 0 saves: leave it out"
                )
        if urls.is_url(os.fspath(directory)):
            raise InvalidArgumentError(
                f"{urls.shown(os.fspath(directory))}: Lightning's paths are links, which object stores do not have; "
                "give a directory, and the URL as mirror="
            )
        inspect.signature(Checkpointer).bind(directory, **options)  # a typo shows here, and not in the first save
        self._directory = arguments.path_text(directory)
        self._options = options
        self._checkpointer: Checkpointer | None = None
        self._paths: CheckpointPaths | None = None  # on rank 0
        self._recover()

    def _recover(self) -> None:
        if not is_left_out(self._directory):
            return
        if rank_zero_only.rank == 0:
            try:
                self.open()
            except DirectoryInUseError:
                return  # nothing is left: another trainer saves there
            self._close()
        else:  # which of the paths there are is about to be asked on this rank too
            deadline = time.monotonic() + self._options.get("takeover_timeout_s", 60.0)
            while is_left_out(self._directory) and time.monotonic() < deadline:
                time.sleep(_TAKEOVER_POLL_S)

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The ``Checkpointer`` while the run directory is open on this rank, for what this class does not do."""
        return self._checkpointer

    def callback(self) -> Callback:
        """A callback that makes the ``Checkpointer`` when ``fit`` begins, and not in the first save.

        It also refuses strategies that would save past this plugin.
        """
        return _Setup(self)

    def open(self) -> None:
        """Make the ``Checkpointer`` now, on the rank that saves: a fraction of a second. Raises as that does."""
        self._open(distributed=False)

    def open_shards(self) -> None:
        """The same for :meth:`save_shards`: all ranks call it."""
        self._open(distributed=True)

    def _open(self, *, distributed: bool) -> Checkpointer:
        if self._checkpointer is None:
            options: CheckpointerOptions = {**self._options, "distributed": distributed}
            checkpointer = Checkpointer(self._directory, **options)
            try:
                self._paths = CheckpointPaths(checkpointer) if not distributed or _rank() == 0 else None
            except BaseException:  # also where this is interrupted: no daemon is left without a way to end it
                checkpointer.close()
                raise
            self._checkpointer = checkpointer
        return self._checkpointer

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: object = None) -> None:
        """Save; returns when training may go on. Rank 0 alone calls this.

        Raises:
            InvalidArgumentError: ``storage_options`` are given, or ``path`` is a URL or a directory.
            UnsupportedValueError: The checkpoint has values that cannot be saved; they are named.
            SidesaveError: An earlier save failed; or as ``Checkpointer.save``.
        """
        _refuse(storage_options)
        place = _place(path)
        self.open()
        assert self._paths is not None
        self._paths.save(place, self._paths.claim(place), _with_versions(checkpoint), _facts(checkpoint))

    def save_shards(self, checkpoint: dict[str, Any], path: PathLike, storage_options: object = None) -> None:
        """The same, of the parts that each rank has: ``state_dict`` and ``optimizer_states``. All ranks call this.

        Of all else that of rank 0 is saved. For strategies; see :class:`SidesaveModelParallelStrategy`.
        """
        _refuse(storage_options)
        checkpointer = self._open(distributed=True)
        step, note = _agreed(_place(path), lambda place: self._paths.claim(place) if self._paths else (0, ""))
        state = {name: Compared(checkpoint[name]) for name in SHARDED if name in checkpoint}
        if self._paths is None:
            checkpointer.save(step, state)
        else:
            self._paths.save(_place(path), (step, note), {**checkpoint, **state}, _facts(checkpoint))

    def load_shards(
        self, place: str, into: dict[str, Any], *, strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        """Fill ``into``, which has what :meth:`save_shards` divides; returns all else. All ranks call this."""
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
        """Load what ``path`` leads to, after the commit of what this process saves there. All ranks call this.

        All ranks load what rank 0 finds at its ``path``. Pickled values need ``allow_pickle=True``, and are refused
        with ``weights_only=True``.

        Raises:
            CheckpointNotFoundError: Nothing is there, or nothing that was committed.
            SidesaveError: As :func:`sidesave.load`.
        """
        place = self.find_checkpoint(path)
        if not os.path.isdir(place):
            options = {} if map_location is None else {"map_location": map_location}
            return super().load_checkpoint(place, **options, weights_only=weights_only)
        if callable(map_location) or isinstance(map_location, Mapping):
            raise InvalidArgumentError(f"{place}: map_location must be a device, not {brief(map_location)}")
        allow_pickle = self._options.get("allow_pickle", False) and weights_only is not True
        request = LoadRequest(map_location=map_location, allow_pickle=allow_pickle, rank=0, size=1)
        return _without_versions(request.read(place).apply())

    def find_checkpoint(self, path: PathLike) -> str:
        """What rank 0's ``path`` leads to, after the commit of what is saved there; all ranks call this."""
        return _agreed(_place(path), self._found)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove what ``path`` leads to, when all saves before this call are committed; if one fails, it stays.

        Raises ``WriteError`` where it cannot be removed, and ``SidesaveError`` as ``Checkpointer``.
        """
        place = _place(path)
        self.open()
        assert self._paths is not None
        self._paths.remove(place)

    def teardown(self) -> None:
        """Wait for all commits and deletions, and end the daemon; the next save begins anew.

        Raises what a save has failed with; after another exception, which goes on, that is only logged.
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
        """Where a path leads, when what is under way there has been committed."""
        if self._paths is not None:
            self._paths.wait_for(path)
        if is_pending(path):
            raise CheckpointNotFoundError(
                f"{path}: its save is not committed, or its trainer was killed before that; make SidesaveCheckpointIO "
                "of that run, or resume the run, and the path leads to what was committed, if anything was"
            )
        if not os.path.exists(path):
            raise CheckpointNotFoundError(f"{path}: there is no checkpoint")
        return os.path.realpath(path)


class _Setup(Callback):
    def __init__(self, io: SidesaveCheckpointIO) -> None:
        self._io = io

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Open the run directory where training begins."""
        strategy = trainer.strategy
        if strategy.checkpoint_io is not self._io:
            raise InvalidArgumentError(
                "this SidesaveCheckpointIO is not the trainer's: pass it in plugins=[...] as well"
            )
        if isinstance(strategy, _BYPASSING) and not isinstance(strategy, SidesaveModelParallelStrategy):
            raise InvalidArgumentError(
                f"{type(strategy).__name__} saves past a CheckpointIO: for FSDP2 and tensor parallelism take "
                "SidesaveModelParallelStrategy, else leave SidesaveCheckpointIO out"
            )
        if stage != "fit":
            return
        if isinstance(strategy, SidesaveModelParallelStrategy):
            self._io.open_shards()
        elif trainer.is_global_zero:
            self._io.open()


class SidesaveModelParallelStrategy(ModelParallelStrategy):
    """FSDP2 and tensor parallelism, with each rank's shards saved by the ``SidesaveCheckpointIO`` of the trainer.

    Takes what ``ModelParallelStrategy`` does.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not self._save_distributed_checkpoint:
            raise InvalidArgumentError(
                "save_distributed_checkpoint=False would gather all on rank 0: leave it out; one process can "
                "read what is saved, by sidesave.load"
            )

    @property
    def _io(self) -> SidesaveCheckpointIO:
        if not isinstance(self.checkpoint_io, SidesaveCheckpointIO):
            raise InvalidArgumentError(
                f"{type(self).__name__} saves through a SidesaveCheckpointIO, and the trainer has a "
                f"{type(self.checkpoint_io).__name__}: pass one in plugins=[...]"
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

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: object = None) -> None:
        """As :meth:`SidesaveCheckpointIO.save_shards`."""
        self._io.save_shards(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        """As :meth:`SidesaveCheckpointIO.load_checkpoint`, into the shards; or a checkpoint of Lightning's own."""
        assert self.model is not None
        place = self._io.find_checkpoint(checkpoint_path)
        if not is_checkpoint(place):
            return super().load_checkpoint(place, weights_only=weights_only)
        into: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        if self.optimizers:
            into["optimizer_states"] = [get_optimizer_state_dict(self.model, each) for each in self.optimizers]
        strict = self.lightning_module.strict_loading
        rest = self._io.load_shards(place, into, strict=strict, weights_only=weights_only)
        set_model_state_dict(self.model, into["state_dict"], options=StateDictOptions(strict=strict))
        for optimizer, state in zip(self.optimizers, into.get("optimizer_states", ()), strict=True):
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=state)
        return rest

    def teardown(self) -> None:
        """As of any strategy, and the plugin's, which Lightning leaves out here."""
        try:
            super().teardown()
        finally:
            self._io.teardown()


_BYPASSING: Final = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _refuse(storage_options: object) -> None:
    if storage_options is not None:
        raise InvalidArgumentError(
            f"storage_options={brief(storage_options)} has no meaning for one save: give SidesaveCheckpointIO options"
        )


def _facts(checkpoint: Mapping[str, Any]) -> dict[str, int]:
    """What is told of a checkpoint beside its path."""
    return {name: checkpoint[name] for name in ("epoch", "global_step") if isinstance(checkpoint.get(name), int)}


def _place(path: PathLike) -> str:
    text = os.fspath(path)
    if urls.is_url(text):
        raise InvalidArgumentError(
            f"{urls.shown(text)}: Lightning's paths are links, which object stores do not have; give a ModelCheckpoint "
            "a directory, and SidesaveCheckpointIO the URL as mirror="
        )
    return arguments.path_text(text)


def _agreed(path: str, find: Callable[[str], T]) -> T:
    """What ``find(path)`` is on rank 0; what it raises there is raised on every rank."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return find(path)
    said: list[Any] = [None]
    if distributed.get_rank() == 0:
        try:
            said = [find(path)]
        except SidesaveError as error:
            said = [error]
    distributed.broadcast_object_list(said)
    if isinstance(said[0], SidesaveError):
        raise said[0]
    return said[0]


def _with_versions(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    versions = getattr(checkpoint.get("state_dict"), "_metadata", None)
    return {**checkpoint, **({} if versions is None else {_MODULE_VERSIONS: [*versions.items()]})}


def _without_versions(checkpoint: dict[str, Any]) -> dict[str, Any]:
    versions = checkpoint.pop(_MODULE_VERSIONS, None)
    if versions is not None:
        checkpoint["state_dict"] = with_metadata(checkpoint["state_dict"], dict(versions))
    return checkpoint
