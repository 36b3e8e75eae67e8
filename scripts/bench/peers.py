"""Checkpointers under one interface, each at its best settings and with the same durability.

A save is durable when every file and directory of it is fsynced. Where a peer has no fsync of its
own, the adapter adds one after the peer's completion, inside the measured time. ``torch.save``
computes a CRC-32 by default; it is switched off wherever a peer uses it, since it costs a quarter
of the speed.
"""

import importlib
import importlib.util
import json
import os
import resource
import shutil
import socket
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.utils.serialization import config as serialization

from scripts.bench.state import TrainState

CUDA = torch.cuda.is_available()
IO_THREADS = min(8, 2 * len(os.sched_getaffinity(0)))
DEADLINE_S = 600.0
# each DCP call in a single process says so
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class PeerUnavailableError(RuntimeError):
    """This peer cannot run here; the message says why."""


def fsync_path(path: Path) -> None:
    """Flush one file or directory to the device."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(root: Path) -> None:
    """Flush every file and directory of ``root``, and the entry of ``root`` itself."""
    for folder, _, files in os.walk(root):
        for name in files:
            fsync_path(Path(folder, name))
        fsync_path(Path(folder))
    fsync_path(root.parent)


def tune_torch_save() -> None:
    """Make ``torch.save`` of this process as fast as it can be: no CRC-32, and pinned memory on the
    way from a GPU.
    """
    serialization.save.compute_crc32 = False
    serialization.save.use_pinned_memory_for_d2h = CUDA


def require(module: str) -> ModuleType:
    """Import a package that need not be installed."""
    if importlib.util.find_spec(module) is None:
        raise PeerUnavailableError(f"{module} is not installed")
    return importlib.import_module(module)


def require_shared_memory(state: TrainState) -> None:
    """Refuse where /dev/shm cannot hold one copy of the state: torch would be killed by SIGBUS
    instead.
    """
    free = shutil.disk_usage("/dev/shm").free
    if free < 1.1 * state.nbytes:
        raise PeerUnavailableError(
            f"/dev/shm has {free / 1e9:.1f} GB free, the shared-memory stager needs more"
        )


class Peer(ABC):
    """One checkpointer, in an empty directory of its own.

    Attributes:
        name: How the tables and ``--only`` call it.
        settings: What was chosen for it, for the report.
        staging_copies: How many copies of the state it keeps in host memory.
    """

    name: ClassVar[str]
    settings: ClassVar[str]
    staging_copies: ClassVar[int] = 0

    def __init__(self, directory: Path, state: TrainState) -> None:
        """Start; raises ``PeerUnavailableError`` where this peer cannot run."""
        directory.mkdir(parents=True)
        self.directory = directory
        self.saved: list[Path] = []
        tune_torch_save()

    def prepare(self, state: TrainState) -> bool:
        """Allocate staging memory ahead of the first save and wait for it; False where the peer has
        no such call.
        """
        return False

    @abstractmethod
    def save(self, step: int, state: TrainState) -> None:
        """Start a save, and return when the caller would get control back."""

    def wait_staged(self) -> None:  # noqa: B027
        """Wait until the state may be changed."""

    def wait(self) -> None:  # noqa: B027
        """Wait until every save is durable."""

    def guard(self) -> AbstractContextManager[object]:
        """Return what the peer wants around an update of the state."""
        return nullcontext()

    def discard(self) -> None:
        """Delete all checkpoints so far."""
        while self.saved:
            shutil.rmtree(self.saved.pop())

    def close(self) -> None:  # noqa: B027
        """Stop threads and processes."""

    def new_step(self, step: int) -> Path:
        """Return the path of a new step, which will be discarded."""
        self.saved.append(self.directory / f"step-{step}")
        return self.saved[-1]


class TorchSave(Peer):
    """``torch.save`` into one file."""

    name = "torch.save"
    settings = "one file, no CRC-32; fsync added"

    def save(self, step: int, state: TrainState) -> None:
        """Write, and return when durable."""
        path = self.new_step(step)
        path.mkdir()
        torch.save(state.state_dict(), path / "state.pt")
        fsync_tree(path)


class Safetensors(Peer):
    """``safetensors.torch.save_file`` of the flattened tensors."""

    name = "safetensors"
    settings = "one file of flattened tensors; fsync added"

    def save(self, step: int, state: TrainState) -> None:
        """Write, and return when durable."""
        path = self.new_step(step)
        path.mkdir()
        groups = json.dumps(state.optimizer.state_dict()["param_groups"])
        save_file(
            state.flat_tensors(), path / "state.safetensors", metadata={"param_groups": groups}
        )
        fsync_tree(path)


class PlainWriter(FileSystemWriter):
    """DCP's writer without CRC-32, also in a process that this module did not start."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write the planned items of this rank."""
        tune_torch_save()
        return super().write_data(plan, planner)


def dcp_arguments(path: Path) -> dict[str, Any]:
    """Return what every DCP peer is given: threads, DCP's own fsync, cached plans, no
    collectives.
    """
    return {
        "storage_writer": PlainWriter(path, thread_count=IO_THREADS, sync_files=True),
        "planner": DefaultSavePlanner(enable_plan_caching=True),
        "no_dist": True,
    }


def dcp_fsync_directories(path: Path) -> None:
    """Flush what DCP's own fsync leaves out."""
    fsync_path(path)
    fsync_path(path.parent)


class DcpSave(Peer):
    """``torch.distributed.checkpoint.save``."""

    name = "dcp.save"
    settings = f"{IO_THREADS} threads, its own fsync, cached plans, no CRC-32"

    def save(self, step: int, state: TrainState) -> None:
        """Write, and return when durable."""
        path = self.new_step(step)
        dcp.save(state.state_dict(), **dcp_arguments(path))
        dcp_fsync_directories(path)


class AsyncPeer(Peer):
    """A peer that answers with futures, and whose files are flushed in a thread as soon as they are
    written.
    """

    staging_copies = 1

    def __init__(self, directory: Path, state: TrainState) -> None:
        """Start the flushing thread."""
        super().__init__(directory, state)
        self.staged: Future[Any] | None = None
        self._flusher = ThreadPoolExecutor(1)
        self._durable: list[Future[None]] = []

    def flush_after(self, written: Future[Any], flush: Callable[[Path], None], path: Path) -> None:
        """Make ``path`` durable once ``written`` is done; ``wait`` waits for it."""

        def work() -> None:
            written.result(DEADLINE_S)
            flush(path)

        self._durable.append(self._flusher.submit(work))

    def wait_staged(self) -> None:
        """Wait for the stager's thread, if it has one."""
        if self.staged is not None:
            self.staged.result(DEADLINE_S)

    def wait(self) -> None:
        """Wait until all that was saved is flushed."""
        while self._durable:
            self._durable.pop(0).result(DEADLINE_S)

    def guard(self) -> AbstractContextManager[object]:
        """Hold an update back until staging has ended."""
        self.wait_staged()
        return nullcontext()

    def close(self) -> None:
        """End the flushing thread."""
        self._flusher.shutdown()


class DcpAsync(AsyncPeer):
    """``torch.distributed.checkpoint.async_save`` with its ``DefaultStager``, which keeps its
    buffers between saves.
    """

    writer: ClassVar[AsyncCheckpointerType]
    shared: ClassVar[bool]
    overlapped: ClassVar[bool]

    def __init__(self, directory: Path, state: TrainState) -> None:
        """Make the stager; the writer starts at the first save."""
        super().__init__(directory, state)
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=CUDA,
                use_shared_memory=self.shared,
                use_async_staging=self.overlapped,
                use_non_blocking_copy=CUDA,
            )
        )
        self.written: Future[Any] | None = None

    def save(self, step: int, state: TrainState) -> None:
        """Wait for the last save, as DCP asks its users to, and start this one."""
        if self.written is not None:
            self.written.result(DEADLINE_S)
        path = self.new_step(step)
        answer = dcp.async_save(
            state.state_dict(),
            async_stager=self.stager,
            async_checkpointer_type=self.writer,
            **dcp_arguments(path),
        )
        if isinstance(answer, AsyncSaveResponse):
            self.staged, self.written = answer.staging_completion, answer.upload_completion
        else:
            self.written = answer
        self.flush_after(self.written, dcp_fsync_directories, path)

    def close(self) -> None:
        """Let the writer end, then the stager."""
        super().close()
        self.stager.close()


class DcpThread(DcpAsync):
    """A writer thread; the copy blocks the call, which is DCP's default."""

    name = "dcp thread"
    settings = (
        f"cached stager (pinned on CUDA), blocking copy, {IO_THREADS} threads, its own fsync, no "
        "CRC-32"
    )
    writer = AsyncCheckpointerType.THREAD
    shared = False
    overlapped = False


class DcpThreadOverlapped(DcpThread):
    """A writer thread and a stager thread."""

    name = "dcp thread overlapped"
    settings = "as dcp thread, with use_async_staging; updates wait for staging_completion"
    overlapped = True


class DcpProcess(DcpAsync):
    """A writer process that is handed shared memory; it wants a process group, here of one rank."""

    name = "dcp process"
    settings = (
        f"cached shared-memory stager (pinned on CUDA), blocking copy, {IO_THREADS} threads, its "
        "own fsync, no CRC-32"
    )
    writer = AsyncCheckpointerType.PROCESS
    shared = True
    overlapped = False

    def __init__(self, directory: Path, state: TrainState) -> None:
        """Start a process group; the process starts at the first save."""
        require_shared_memory(state)
        super().__init__(directory, state)
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)

    def close(self) -> None:
        """End the process, which DCP keeps in a global for as long as the trainer lives, and the
        group.
        """
        from torch.distributed.checkpoint import _async_process_executor

        super().close()
        _async_process_executor._CHECKPOINT_PROCESS = None
        dist.destroy_process_group()


class TorchExperimental(AsyncPeer):
    """``torch.distributed.checkpoint._experimental``: a stager thread and a writer process."""

    name = "torch _experimental"
    settings = (
        "shared-memory staging (pinned on CUDA) in a thread, torch.save in a process, no CRC-32; "
        "fsync added"
    )

    def __init__(self, directory: Path, state: TrainState) -> None:
        """Start the process in the background."""
        from torch.distributed.checkpoint._experimental.builder import make_async_checkpointer
        from torch.distributed.checkpoint._experimental.config import CheckpointerConfig
        from torch.distributed.checkpoint._experimental.staging import CheckpointStagerConfig

        require_shared_memory(state)
        super().__init__(directory, state)
        staging = CheckpointStagerConfig(
            use_pinned_memory=CUDA,
            use_shared_memory=True,
            use_async_staging=True,
            use_non_blocking_copy=CUDA,
        )
        self.checkpointer = make_async_checkpointer(
            CheckpointerConfig(staging_config=staging), subprocess_init_fn=tune_torch_save
        )

    def save(self, step: int, state: TrainState) -> None:
        """Start a save; it waits for the one before."""
        path = self.new_step(step)
        futures = self.checkpointer.save(str(path), state.state_dict())
        assert futures is not None
        self.staged, written = futures
        self.flush_after(written, fsync_tree, path)

    def close(self) -> None:
        """End threads and process."""
        super().close()
        self.checkpointer.close()


def takes_unaligned_direct_writes(directory: Path) -> bool:
    """Say whether O_DIRECT takes writes of any length here, as ``torch_checkpointing``'s direct
    mode needs.
    """
    path = directory / "direct-probe"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            os.write(fd, b"x" * 1000)
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


class TorchCheckpointing(AsyncPeer):
    """``torch_checkpointing``'s ``CheckpointManager``: a stager thread, a writer process, a lock
    around updates.
    """

    name = "torch_checkpointing"
    settings = (
        "async shared-memory staging (pinned on CUDA), one file a top-level item in parallel, "
        "direct I/O where the filesystem takes unaligned writes, no CRC-32; fsync added"
    )

    def __init__(self, directory: Path, state: TrainState) -> None:
        """Start the process in the background."""
        require("torch_checkpointing")
        from torch_checkpointing import CheckpointManager, CheckpointWriterConfig  # pyright: ignore[reportMissingImports]
        from torch_checkpointing.config import AsyncCheckpointSaverConfig  # pyright: ignore[reportMissingImports]
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig  # pyright: ignore[reportMissingImports]

        require_shared_memory(state)
        super().__init__(directory, state)
        direct = takes_unaligned_direct_writes(directory)
        self.manager: Any = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(
                    writer_config=CheckpointWriterConfig(file_write_max_threads=IO_THREADS)
                ),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=direct),
                subprocess_init_fn=tune_torch_save,
            )
        )

    def prepare(self, state: TrainState) -> bool:
        """Allocate the stager's memory by staging once; wait for that and the process through
        private names.
        """
        self.manager.prewarm_staging(state.state_dict())
        self.manager._prewarm_staging_future.result(DEADLINE_S)
        self.manager._saver._checkpoint_process.wait_for_init()
        return True

    def save(self, step: int, state: TrainState) -> None:
        """Start a save; it waits for the one before."""
        path = self.new_step(step)
        written = self.manager.save(str(path), state.state_dict())
        self.staged = self.manager._staging_future
        self.flush_after(written, fsync_tree, path)

    def guard(self) -> AbstractContextManager[object]:
        """Return the lock that its documentation puts around ``optimizer.step``."""
        return self.manager.lock()

    def close(self) -> None:
        """End threads and process."""
        super().close()
        self.manager.close()


class Sidesave(Peer):
    """``sidesave.Checkpointer``; it takes the modules themselves, and its optimizer hook is its
    guard.
    """

    name = "sidesave"
    settings = "defaults"
    staging_copies = 2

    def __init__(self, directory: Path, state: TrainState) -> None:
        """Start the daemon in the background."""
        sidesave = require("sidesave")
        super().__init__(directory, state)
        self.checkpointer = sidesave.Checkpointer(directory)
        self.handles: list[Any] = []

    def prepare(self, state: TrainState) -> bool:
        """Allocate, populate and pin the staging memory."""
        self.checkpointer.prepare(state.live()).result(DEADLINE_S)
        return True

    def save(self, step: int, state: TrainState) -> None:
        """Start a save."""
        self.handles.append(self.checkpointer.save(step, state.live()))

    def wait_staged(self) -> None:
        """Wait for the copy."""
        self.handles[-1].staged.result(DEADLINE_S)

    def wait(self) -> None:
        """Wait for the commit, which comes after every fsync."""
        while self.handles:
            self.saved.append(Path(self.handles.pop(0).committed.result(DEADLINE_S).path))

    def close(self) -> None:
        """End the daemon."""
        self.checkpointer.close()


PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        Sidesave,
        TorchCheckpointing,
        TorchExperimental,
        DcpProcess,
        DcpThreadOverlapped,
        DcpThread,
        DcpSave,
        Safetensors,
        TorchSave,
    )
}


def choose(only: list[str] | None, default: list[str] | None = None) -> list[type[Peer]]:
    """Return the chosen peers in the order of ``PEERS``.

    Raises:
        SystemExit: A name is not known.
    """
    names = only or default or list(PEERS)
    if unknown := sorted(set(names) - PEERS.keys()):
        raise SystemExit(f"unknown peers {', '.join(unknown)}; known: {', '.join(PEERS)}")
    return [peer for name, peer in PEERS.items() if name in names]


def allow_many_files() -> None:
    """Raise the limit on open files: peers that share memory keep one descriptor a tensor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
