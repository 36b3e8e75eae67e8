"""``Checkpointer``, which a training script holds: a run, a daemon, a copier, staging slots."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import torch

from sidesave.client import arguments
from sidesave.client.encryption import Encryption
from sidesave.client.loading.load import LoadRequest
from sidesave.client.loading.load_filter import Rename
from sidesave.client.options import (
    FailureOptions,
    MirrorOptions,
    Observer,
    Options,
    PathLike,
    StagingOptions,
)
from sidesave.client.ranks.meeting import find_node, find_world
from sidesave.client.runs.mirror import check_mirror
from sidesave.client.runs.run import Run
from sidesave.client.saving.closing import await_predecessors, checkpointers
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.saving.mirroring import MirrorStatus
from sidesave.client.saving.saver import Saver
from sidesave.client.saving.session import Session
from sidesave.errors import InvalidArgumentError, SidesaveError
from sidesave.stager import ownership
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.options import DaemonOptions
from sidesave.writer_daemon.save_record import SaveRecord
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves the state of a training run without stopping it.

    Constructing one starts the writer daemon and waits until it holds the directory, a fraction of
    a second; saves left unfinished there by dead sessions are completed or removed first. Use it as
    a context manager, or call :meth:`close`. All methods may be called from any thread.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        process_group: torch.distributed.ProcessGroup | None = None,
        distributed: bool = True,
        node_local: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        mirror: PathLike | MirrorOptions | None = None,
        encryption: Encryption | None = None,
        observers: Sequence[Observer] = (),
        staging: StagingOptions = StagingOptions(),
        failures: FailureOptions = FailureOptions(),
        daemon: DaemonOptions = DaemonOptions(),
    ) -> None:
        """Open a run directory, and create it if it does not exist.

        In a job with several ranks, each creates one at the same time, for one directory that they
        all see. From then on every rank saves the same steps in the same order, and no rank waits
        for another in :meth:`save`.

        Args:
            directory: The run directory: each checkpoint is a ``step-XXXXXXXX`` directory in it. Or
                a URL: checkpoints are then written to an object store (docs/remote.md).
            process_group: The ranks that save together; None means all.
            distributed: Save together with the other ranks: those of the process group if one is
                initialised, else those that the launcher names (``RANK``, ``WORLD_SIZE``). False
                for a process that saves alone, such as rank 0 of a job whose ranks hold the same.
            node_local: The directory is a different one on each node, on a disk of its own: each
                node keeps what its ranks hold, and a step can be loaded while every node has its
                part. Needs a process group.
            allow_pickle: Pickle values that are not plain data.
            storage_options: For a URL, options of its store besides the environment: credentials,
                an endpoint. Text, numbers and dicts of these. They reach the daemon by a socket,
                and are in no file, log or argument.
            mirror: A second place for committed checkpoints: a directory, a URL, or
                :class:`MirrorOptions`.
            encryption: The key that encrypts all that is saved before it reaches storage, the same
                on all ranks; a run that began with a key needs it at each start
                (docs/encryption.md).
            observers: Functions that follow the saves of this rank (docs/monitoring.md). Each is
                called with a :class:`~sidesave.reporting.SaveRecord` of outcome ``"saving"`` when a
                state is about to be staged, in the thread that saves, and once with the outcome, in
                the thread that learns of it. Its exceptions are logged. It must not take long, and
                cannot save or wait for saves.
            staging: Host memory for the state, and when it is copied there.
            failures: Retries, a fallback and tolerance for saves that storage refuses.
            daemon: How the writer daemon runs, and how long it waits.

        Raises:
            WriteError: The directory cannot be created, or is not a directory.
            DirectoryInUseError: Another live session writes there, which the message names. (A
                checkpointer that nothing refers to any more is closed first, and waited for.)
            DaemonStartError: The daemon did not start, or that of another rank did not.
            InvalidArgumentError: An option is invalid; on all ranks, if it is on one.
            KeyMissingError: The run is encrypted, or other ranks have a key, and ``encryption`` was
                not given.
            WrongKeyError: The run is encrypted with a different key, or other ranks have a
                different one.
            SidesaveError: The error that kept another rank from starting; the message names the
                rank.
        """
        path = arguments.place_to_write(directory)
        arguments.check_path(path)
        world = find_world(
            path, distributed, process_group, node_local=node_local, storage_options=storage_options
        )
        # before any rank waits for another
        with world.raise_together("cannot use the run directory"):
            encoded_options = urls.encode_options(storage_options)
            if mirror is not None and not isinstance(mirror, MirrorOptions):
                mirror = MirrorOptions(place=mirror)
            options = Options(
                staging=staging,
                failures=failures,
                daemon=daemon,
                mirror=mirror,
                allow_pickle=allow_pickle,
                encryption=encryption,
                observers=observers,
            )
            mirror_place = (
                "" if mirror is None else check_mirror(mirror.place, path, node_local=node_local)
            )
            given = failures.fallback_directory
            fallback = "" if given is None else arguments.path_text(given)
            arguments.check_path(fallback)
            if storage_options and not any(map(urls.is_url, (path, mirror_place))):
                raise InvalidArgumentError(
                    "storage_options are for a URL, and neither the run directory nor the mirror "
                    f"is one: leave them out, or give the URL in the place of {path}"
                )
            if world.size > 1:
                options.check_shared()
            if fallback and os.path.realpath(fallback) == os.path.realpath(path):
                raise InvalidArgumentError(
                    f"FailureOptions.fallback_directory is the run directory itself: {fallback}"
                )
            arguments.make_directory(path)
            await_predecessors(path, daemon.takeover_timeout_s)
        with urls.using(storage_options):
            node = find_node(world, path, node_local=node_local)
        self._session = session = Session(
            world, node, Run(path, fallback, mirror_place), options, encoded_options
        )
        self._dropped = weakref.finalize(self, session.drop)
        self._dropped.atexit = False  # the checkpointer is closed first, and waited for
        try:
            session.start()
            self._saver = Saver(session)
            checkpointers.add(self)
        except BaseException:  # an interrupt leaves no daemon either
            session.stop()
            raise

    # Saving ---------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        blocking: bool = False,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, str | bytes] | None = None,
    ) -> SaveHandle:
        """Save ``state`` as ``step``; returns when training may go on.

        CPU tensors are copied before this returns, at memory speed; CUDA tensors are only
        scheduled, and the next optimizer step waits for them in stream order. Everything else
        happens elsewhere: see the handle's futures.

        Args:
            step: Names the checkpoint; 0 or more, and not yet in this run's lineage unless
                ``overwrite``.
            state: Named items: modules, optimizers, anything with ``state_dict``, tensors,
                containers, plain data.
            blocking: Return only when the checkpoint is committed.
            overwrite: Replace an existing step; the old one stays until the new one is committed,
                and for its readers as long as after :meth:`delete`.
            metadata: Facts about the checkpoint, such as metrics: plain JSON data of at most 64
                KiB. Rank 0's are written, and read as :attr:`CheckpointInfo.metadata`.
            files: Small files to write next to the tensors, by name, such as ``config.json``: up to
                64 MiB in all, since they are copied at each call. ``str`` is written as UTF-8. They
                are durable, verified, committed and deleted with the checkpoint. Those of rank 0
                are written (with ``node_local`` of the first rank of each node), others ignored.
                A name may have one folder in front (``folder/name``); names of a checkpoint's own
                files and the endings ``.safetensors``, ``.xxh3`` and ``.msgpack`` are refused.

        Raises:
            InvalidArgumentError: Negative step, a state that is no dict, metadata that is no plain
                JSON, or files that cannot be written beside the tensors.
            CheckpointExistsError: The step exists.
            UnsupportedValueError: The state holds something that cannot be saved; nothing was done.
            HostMemoryError: No memory for a staging slot.
            WriteStalledError: All slots are busy, and no byte of any save has moved for longer than
                the timeouts of :class:`DaemonOptions` allow.
            ClosedError: The checkpointer is closed.
            SidesaveError: An earlier save failed and has not been raised yet (with one rank).
        """
        return self._saver.save(
            step, state, blocking=blocking, overwrite=overwrite, metadata=metadata, files=files
        )

    def prepare(
        self,
        state: Mapping[str, Any],
        *,
        files: Mapping[str, str | bytes] | None = None,
        slots: int = 1,
    ) -> Future[None]:
        """Allocate, populate and pin memory for ``slots`` states of this kind in the background.

        With ``files`` for them as well, as :meth:`save` takes them. Optional: without it the first
        save makes a slot, and one that finds it busy another. Raises like :meth:`save` for a state
        that cannot be saved; what goes wrong later is the future's exception.
        """
        return self._saver.prepare(state, arguments.encode_files(files), slots)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise what :meth:`save` would raise for this state; nothing is saved."""
        self._saver.check(state)

    @contextlib.contextmanager
    def guard(self) -> Generator[None]:
        """Protect a hand-written update of tensors that an optimizer owns.

        Entering waits for copies under way. Optimizers from ``torch.optim``, and wrappers that call
        their ``step``, do not need this.
        """
        with ownership.guard():
            yield

    def wait(self, timeout_s: float | None = None, *, mirrored: bool = False) -> None:
        """Block until every save issued before is committed or has failed.

        With ``mirrored``, block until it is mirrored; this includes checkpoints that earlier
        sessions left unmirrored.

        Raises:
            SidesaveError: A save failed; or, with ``mirrored``, the mirror did.
            InvalidArgumentError: There is no mirror to wait for.
            WriteStalledError: ``timeout_s`` seconds passed first.
        """
        self._session.check_process()
        self._saver.refuse_waiting("wait")
        self._saver.undo_interrupted()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        saves = self._session.saves
        saves.wait(timeout_s)
        saves.raise_failure()
        if mirrored:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._session.mirroring.wait(left_s)

    # Loading --------------------------------------------------------------------------------------

    def load(
        self,
        step: int | str | os.PathLike[str] | None = None,
        *,
        into: dict[str, Any] | None = None,
        map_location: str | torch.device | None = None,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        dtype: torch.dtype | None = None,
        verify: bool = True,
        fallback: bool = False,
        allow_pickle: bool | None = None,
    ) -> dict[str, Any]:
        """Load ``step``, or the latest checkpoint, and make it the parent of all later saves.

        ``step`` may also be the step's directory, or a ``CheckpointInfo``; the run directory stands
        for the latest. They must be of this run: others raise ``InvalidArgumentError``, as later
        saves would not descend from them. Use :func:`sidesave.load` for those.

        Loading a ``step`` goes back to it, durably: when this returns, later checkpoints are given
        up, and ``load()`` returns this step until a save is committed, in this session and in later
        ones. A step that was given up can be loaded by its number, which takes it up again.

        With several ranks all must call it, for the same step and with the same ``fallback``: they
        load the same checkpoint, or none of them does, and the error names the rank that could not.
        (If a live object raises while it receives its state, all ranks raise, and other ranks'
        objects may have received theirs.) See :func:`sidesave.load` for the arguments and errors.
        With ``fallback`` the newest older checkpoint that verifies is loaded if this one does not
        verify; skipped checkpoints are logged.

        Waits first for this session's saves under way; with a ``step``, only for that of the step.
        A save that fails meanwhile is logged as a warning, and raised later as it would have been
        without this call.
        """
        session = self._session
        session.check_open()
        self._saver.refuse_waiting("load")
        request = LoadRequest(
            into=into,
            map_location=map_location,
            include=include,
            exclude=exclude,
            rename=rename,
            strict=strict,
            dtype=dtype,
            verify=verify,
            allow_pickle=session.options.allow_pickle if allow_pickle is None else allow_pickle,
            rank=session.node.rank,
            size=session.node.size,
        )
        return session.shared.load(step, request, fallback=fallback)

    def checkpoints(self) -> list[CheckpointInfo]:
        """Read the run's checkpoints from its directory, in the order of :func:`sidesave.find`."""
        return self._session.checkpoints()

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, ascending; read from the directory."""
        return sorted({info.step for info in self.checkpoints()})

    def latest_step(self) -> int | None:
        """The step committed last, or loaded since to go back to it; None without either."""
        checkpoints = self.checkpoints()
        return checkpoints[-1].step if checkpoints else None

    def mirror_status(self) -> MirrorStatus | None:
        """Return the checkpoints that the mirror still lacks, and its speed; None without a mirror.

        Returns at once.
        """
        return self._session.mirroring.status()

    def delete(self, step: int) -> Future[None]:
        """Delete a checkpoint in the daemon, after the saves issued before.

        The future is done when the checkpoint is deleted. It disappears in one step; a reader that
        has opened it can finish. (On a network file system, where locks do not show readers, they
        have half a minute, or less if the session ends or a save needs the space.) Errors are the
        future's exception: ``CheckpointNotFoundError``; ``InvalidArgumentError`` for the newest
        checkpoint, which can be deleted only once a newer one is committed, and for one that was
        saved again while the mirror has only the older save of it; ``WriteError``.
        """
        return self._saver.delete(step)

    def history(self) -> list[SaveRecord]:
        """Return the outcomes of the run's saves, also those under way, in the order of the calls.

        The log behind this is bounded: the oldest saves of a long run are missing. In an object
        store there is none, and these are the last saves of this session.
        """
        self._session.check_process()
        return self._session.history.records()

    @property
    def recovered(self) -> tuple[str, ...]:
        """Checkpoints of dead sessions that this one completed when it started."""
        return self._session.connection.recovered

    @property
    def removed(self) -> tuple[str, ...]:
        """Leftovers of dead sessions that could not be completed; removed when this one started."""
        return self._session.connection.removed

    @property
    def directory(self) -> str:
        """The run directory."""
        return self._session.directory

    @property
    def daemon_pid(self) -> int | None:
        """The writer daemon's process id; None while it is being replaced, or when closed."""
        return self._session.connection.pid

    @property
    def session(self) -> Session:
        """The parts of the checkpointer, for managers and adapters; not a public interface."""
        return self._session

    @property
    def saver(self) -> Saver:
        """The calls that save, likewise."""
        return self._saver

    # The end --------------------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for every save, end the daemon, free the memory; idempotent.

        Raises what :meth:`wait` would raise, after everything has been closed. After ``timeout_s``
        seconds the daemon is left to write the staged saves by itself. The mirror is not waited
        for: the daemon continues it alone, and the next session, which may begin at once, completes
        it; see :meth:`wait`.
        """
        session = self._session
        if session.pid != os.getpid() or session.ended:
            return
        self._saver.refuse_waiting("close")
        session.closed = True
        patience_s = 0.0
        try:
            self._saver.await_call(timeout_s)
            self._saver.undo_interrupted()
            session.saves.wait(timeout_s)
            patience_s = 10.0
        finally:
            session.close(patience_s)
            self._dropped.detach()
            checkpointers.open.discard(self)
        session.saves.raise_failure()

    @property
    def closed(self) -> bool:
        """Whether the checkpointer was closed."""
        return self._session.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; a failed save is only logged if an exception is already leaving the block."""
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except SidesaveError as failure:
            logger.error("a save failed as well: %s", failure)

    def __repr__(self) -> str:
        return f"<Checkpointer {self.directory!r}{' closed' if self.closed else ''}>"
