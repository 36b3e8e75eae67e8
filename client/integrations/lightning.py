# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false
"""Lightning's checkpoints saved by sidesave: a ``CheckpointIO`` plugin. See docs/integrations/lightning.md."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, Unpack

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import Callback

from sidesave.client import arguments
from sidesave.client.checkpointer import Checkpointer
from sidesave.client.integrations.checkpoint_paths import CheckpointPaths, is_left_out, is_pending
from sidesave.client.loading.load import LoadRequest
from sidesave.client.options import CheckpointerOptions
from sidesave.errors import (
    CheckpointNotFoundError,
    DirectoryInUseError,
    InvalidArgumentError,
    SidesaveError,
    brief,
)
from sidesave.stager.state.treespec import with_metadata
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]

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
        self._directory = arguments.path_text(directory)
        self._options = options
        self._paths: CheckpointPaths | None = None
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

    def callback(self) -> Callback:
        """A callback that makes the ``Checkpointer`` when ``fit`` begins, and not in the first save.

        It also refuses strategies that would save past this plugin.
        """
        return _Setup(self)

    def open(self) -> None:
        """Make the ``Checkpointer`` now, on the rank that saves: a fraction of a second. Raises as that does."""
        if self._paths is None:
            checkpointer = Checkpointer(self._directory, **{**self._options, "distributed": False})
            try:
                self._paths = CheckpointPaths(checkpointer)
            except BaseException:
                checkpointer.close()
                raise

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: object = None) -> None:
        """Save; returns when training may go on. Rank 0 alone calls this.

        Raises:
            InvalidArgumentError: ``storage_options`` are given, or ``path`` is a URL or a directory.
            UnsupportedValueError: The checkpoint has values that cannot be saved; they are named.
            SidesaveError: An earlier save failed; or as ``Checkpointer.save``.
        """
        if storage_options is not None:
            raise InvalidArgumentError(
                f"storage_options={brief(storage_options)} has no meaning for one save: give SidesaveCheckpointIO its "
                "options"
            )
        place = _place(path)
        self.open()
        assert self._paths is not None
        facts = {name: checkpoint[name] for name in ("epoch", "global_step") if isinstance(checkpoint.get(name), int)}
        self._paths.save(place, self._paths.claim(place), _with_versions(checkpoint), facts)

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
        place = _agreed(_place(path), self._found)
        if not os.path.isdir(place):
            options = {} if map_location is None else {"map_location": map_location}
            return super().load_checkpoint(place, **options, weights_only=weights_only)
        if callable(map_location) or isinstance(map_location, Mapping):
            raise InvalidArgumentError(f"{place}: map_location must be a device, not {brief(map_location)}")
        allow_pickle = self._options.get("allow_pickle", False) and weights_only is not True
        request = LoadRequest(map_location=map_location, allow_pickle=allow_pickle, rank=0, size=1)
        return _without_versions(request.read(place).apply())

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
        paths, self._paths = self._paths, None
        if paths is not None:
            paths.close()

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
        if trainer.strategy.checkpoint_io is not self._io:
            raise InvalidArgumentError("SidesaveCheckpointIO is not the trainer's: pass it in plugins=[...] too")
        if not trainer.strategy.restore_checkpoint_after_setup:
            pass
        if stage == "fit" and trainer.is_global_zero:
            self._io.open()


def _place(path: PathLike) -> str:
    text = os.fspath(path)
    if urls.is_url(text):
        raise InvalidArgumentError(
            f"{urls.shown(text)}: Lightning's paths are links, which object stores do not have; give a ModelCheckpoint "
            "a directory, and SidesaveCheckpointIO the URL as mirror="
        )
    return arguments.path_text(text)


def _agreed(path: str, find: Any) -> str:
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
