"""``Checkpointer``: what a training script holds. One run directory, one daemon, two staging slots, one copier."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self

import torch

from sidesave.client import arguments
from sidesave.client.arguments import path_text
from sidesave.client.encryption import Encryption
from sidesave.client.loading.load import LoadRequest
from sidesave.client.loading.rename import Rename
from sidesave.client.options import Options, check_cores, default_stall_timeout_s
from sidesave.client.ranks.group import find_node, find_world
from sidesave.client.runs.mirror import check_bandwidth, check_mirror
from sidesave.client.runs.run import Run
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.saving.mirroring import MirrorStatus
from sidesave.client.saving.saver import Saver
from sidesave.client.saving.session import Session, await_predecessors, close_at_exit, was_closed
from sidesave.errors import InvalidArgumentError, SidesaveError
from sidesave.stager.state import ownership
from sidesave.writer_daemon.log import SaveRecord
from sidesave.writer_daemon.protocol import DaemonOptions
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves the state of a training run without stopping it.

    Constructing one starts the writer daemon and waits until it holds the directory, a fraction of a second; what dead
    sessions left there is finished or removed first. Use it as a context manager, or call :meth:`close`. All methods
    may be called from any thread.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        slots: int = 2,
        max_host_memory_bytes: int | None = None,
        overlap: bool | None = None,
        validate: bool = False,
        on_error: Literal["raise", "warn"] = "raise",
        max_consecutive_failures: int = 5,
        retries: int = 2,
        fallback_directory: str | os.PathLike[str] | None = None,
        on_busy: Literal["wait", "skip"] = "wait",
        busy_timeout_s: float = 600.0,
        stall_timeout_s: float | None = None,
        takeover_timeout_s: float = 60.0,
        commit_timeout_s: float = 600.0,
        distributed: bool = True,
        process_group: torch.distributed.ProcessGroup | None = None,
        node_local: bool = False,
        allow_pickle: bool = False,
        nice: int = 0,
        io_class: Literal["", "idle", "best-effort"] = "",
        cpus: Sequence[int] = (),
        storage_options: Mapping[str, Any] | None = None,
        mirror: str | os.PathLike[str] | None = None,
        mirror_bandwidth: int | None = None,
        encryption: Encryption | None = None,
    ) -> None:
        """Open a run directory, creating it if need be.

        Of a job with several ranks each makes one, at the same time, for one directory that all of them see; from then
        on every rank saves the same steps in the same order, and no rank waits for another in :meth:`save`.

        Args:
            directory: Where the checkpoints go, one ``step-XXXXXXXX`` directory each; or a URL: then they go
                to an object store as they are written (docs/remote.md).
            slots: Staging slots: how many saves can be under way. Each takes host memory of the state's size.
            max_host_memory_bytes: Most host memory for all slots together; None leaves it to what the machine has.
            overlap: Copy owned tensors beside training. None does so for CUDA tensors, where it pays; True for CPU
                tensors as well; False captures everything at the call.
            validate: Compare everything, not samples, to find tensors that changed under a copy; for debugging.
            on_error: ``"raise"`` a failed save in the next :meth:`save`, :meth:`wait` or :meth:`close`, unless it was
                read from a future of its handle; or ``"warn"`` once. With several ranks the next :meth:`save` goes on,
                for they may have read different things: the failure is logged, and the other two raise it.
            max_consecutive_failures: With ``"warn"``, one failure more than this in a row is raised, and each after
                it, until a save is committed.
            retries: How often a save is tried again, in the background, after an error that may be gone a second
                later: a server that does not answer, a failing disk. A full disk is none.
            fallback_directory: A run directory for saves that the first one refuses for good, on another file system;
                what was saved there is found by this class like the rest, also by later sessions without this option,
                which say so. Slots are then held until the commit.
            on_busy: With all slots busy, ``"wait"`` for one or ``"skip"`` the save.
            busy_timeout_s: How long to wait for a slot before ``WriteStalledError``, in seconds.
            stall_timeout_s: After this long without a byte moved a save fails with ``WriteStalledError``, in seconds;
                None is 300 on a disk, and 900 in an object store, where each request is tried again for minutes.
            takeover_timeout_s: How long to wait for a daemon that still writes here, in seconds: a dead trainer's, or
                one that an interrupted ``close()`` of this process has left.
            commit_timeout_s: How long, in seconds, a rank whose part is written waits for the others.
            distributed: Save together with the other ranks: those of the process group if one is initialised, else
                those that the launcher tells of (``RANK``, ``WORLD_SIZE``). False for a process that saves alone, such
                as rank 0 of a job whose ranks hold the same.
            process_group: The ranks that save together, None for all.
            node_local: The directory is another one on each node, on a disk of its own: each node keeps what its ranks
                hold, and a step can be loaded while every node has its part. Needs a process group.
            allow_pickle: Let values that are no plain data be pickled.
            nice: Niceness of the daemon, 0 to 19.
            io_class: I/O scheduling class of the daemon; empty leaves the system's.
            cpus: Cores the daemon may use; empty means all, or those of the GPU's node where there are several NUMA
                nodes and it is not kept off them.
            storage_options: For a URL, what its store needs besides the environment: credentials, an endpoint. Text,
                numbers and dicts of these: they reach the daemon by a socket, and stand in no file, log or argument.
            mirror: A second place for committed checkpoints: a directory, such as one on a network file system, or a
                URL. The daemon copies them there behind the saves, which never wait for it; what a session leaves
                undone goes on after its end, and the next session finishes it. Loading finds what is there alone.
            mirror_bandwidth: The most that goes to the mirror, in bytes per second; None for as fast as it goes.
            encryption: The key with which all that is saved is encrypted before it reaches storage, the same on all
                ranks; a run that has begun with one needs it at each start (docs/encryption.md).

        Raises:
            WriteError: The directory cannot be created or is none.
            DirectoryInUseError: Another live session writes there; the message names it, and says if it is one of this
                very process. (One that nobody refers to any more is closed first, and waited for.)
            DaemonStartError: The daemon did not come up, or another rank did not.
            InvalidArgumentError: An option makes no sense.
            KeyMissingError: The run is encrypted, or other ranks have a key, and ``encryption`` was not given.
            WrongKeyError: The run is encrypted with another key, or other ranks have another one.
            SidesaveError: Whatever kept another rank from starting; the message names it.
        """
        path = arguments.place_to_write(directory)
        further = "" if fallback_directory is None else path_text(fallback_directory)
        for each in filter(None, (path, further)):
            arguments.check_path(each)
        world = find_world(path, distributed, process_group, node_local=node_local, storage_options=storage_options)
        with world.raise_together("cannot use the run directory"):  # before anybody waits for anybody
            encoded_options = urls.encode_options(storage_options)
            mirror_place = check_mirror(mirror, path, node_local=node_local)
            if storage_options and not any(map(urls.is_url, (path, mirror_place))):
                text = "storage_options are for a URL, and neither the run directory nor the mirror is one"
                raise InvalidArgumentError(f"{text}: leave them out, or give the URL in the place of {path}")
            options = Options(
                slots=slots,
                max_host_memory_bytes=max_host_memory_bytes,
                overlap=overlap,
                validate=validate,
                on_error=on_error,
                max_consecutive_failures=max_consecutive_failures,
                on_busy=on_busy,
                busy_timeout_s=busy_timeout_s,
                allow_pickle=allow_pickle,
                encryption=encryption,
                daemon=DaemonOptions(
                    fallback_directory=further,
                    retries=retries,
                    stall_timeout_s=default_stall_timeout_s(path) if stall_timeout_s is None else stall_timeout_s,
                    takeover_timeout_s=takeover_timeout_s,
                    commit_timeout_s=commit_timeout_s,
                    nice=nice,
                    io_class=io_class,
                    cpus=check_cores(cpus),
                    mirror=mirror_place,
                    mirror_bandwidth=check_bandwidth(mirror_bandwidth, mirror),
                ),
            )
            if world.size > 1:
                options.check_shared()
            if further and os.path.realpath(further) == os.path.realpath(path):
                raise InvalidArgumentError(f"fallback_directory is the run directory itself: {further}")
            arguments.make_directory(path)
            await_predecessors(path, takeover_timeout_s)
        with urls.using(storage_options):
            node = find_node(world, path, node_local=node_local)
        session = Session(world, node, Run(path, further, options.daemon.mirror), options, encoded_options)
        self._dropped = weakref.finalize(self, session.drop)
        self._dropped.atexit = False  # close_at_exit comes first, and waits
        try:
            session.start()
            self._saver = Saver(session)
            close_at_exit(self)
        except BaseException:  # an interrupt leaves no daemon either
            session.stop()
            raise

    # Saving ----------------------------------------------------------------------------------------------------

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

        CPU tensors are copied before this returns, at memory speed; CUDA tensors are only scheduled, and the next
        optimizer step waits for them in stream order. Everything else happens elsewhere: see the handle's futures.

        Args:
            step: Names the checkpoint; 0 or more, and not yet in this run's lineage unless ``overwrite``.
            state: Named items: modules, optimizers, anything with ``state_dict``, tensors, containers, plain data.
            blocking: Return only when the checkpoint is committed.
            overwrite: Replace an existing step; the old one stays until the new one is committed.
            metadata: Facts about the checkpoint, such as metrics: plain JSON data of at most 64 KiB, of which that of
                rank 0 stands in the manifest and in :attr:`CheckpointInfo.metadata`.
            files: Small files to write beside the tensors, by name: a model's ``config.json``, a tokenizer. They are
                durable, verified, committed and deleted with the checkpoint, and copied at each call, so that all of
                them may take 64 MiB; ``str`` is written as UTF-8. Those of rank 0 are written (with ``node_local`` of
                the first rank of each node), any others ignored. Names are plain, and none that a file of the
                checkpoint may have, nor that ends in ``.safetensors``, ``.xxh3`` or ``.msgpack``.

        Raises:
            InvalidArgumentError: Negative step, a state that is no dict, metadata that is no plain JSON, or files that
                cannot be written beside the tensors.
            CheckpointExistsError: The step exists.
            UnsupportedValueError: The state holds something that cannot be saved; nothing was done.
            HostMemoryError: No memory for a staging slot.
            WriteStalledError: All slots stayed busy for ``busy_timeout_s``.
            ClosedError: The checkpointer is closed.
            SidesaveError: An earlier save failed, and nobody has been told (``on_error="raise"``, one rank).
        """
        return self._saver.save(step, state, blocking=blocking, overwrite=overwrite, metadata=metadata, files=files)

    def prepare(self, state: Mapping[str, Any], *, files: Mapping[str, str | bytes] | None = None) -> Future[None]:
        """Allocate, populate and pin the staging memory for states of this structure, in the background.

        With ``files`` for them as well, as :meth:`save` takes them. Optional: without it the first saves do so. Raises
        like :meth:`save` for a state that cannot be saved; what goes wrong later is the future's exception.
        """
        return self._saver.prepare(state, arguments.encode_files(files))

    @contextlib.contextmanager
    def guard(self) -> Generator[None]:
        """Protects a hand-written update of tensors that an optimizer owns: entering waits for copies under way.

        Optimizers from ``torch.optim``, and wrappers that call their ``step``, need nothing of the kind.
        """
        with ownership.guard():
            yield

    def wait(self, timeout_s: float | None = None, *, mirrored: bool = False) -> None:
        """Block until every save issued so far is committed, or has failed; with ``mirrored`` until it is mirrored.

        And what earlier sessions have left for the mirror, too.

        Raises:
            SidesaveError: A save failed (``on_error="raise"``); or, with ``mirrored``, the mirror.
            InvalidArgumentError: There is no mirror to wait for.
            WriteStalledError: ``timeout_s`` seconds passed first.
        """
        self._saver.session.check_process()
        self._saver.refuse_waiting("wait")
        self._saver.undo_interrupted()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        saves = self._saver.session.saves
        saves.wait(timeout_s)
        saves.raise_failure()
        if mirrored:
            saves.mirroring.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    # Loading ---------------------------------------------------------------------------------------------------

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
        """Load ``step``, or the latest checkpoint, and make it the parent of what is saved from now on.

        Instead of its number a step is also meant by its directory, or by a ``CheckpointInfo``; the run directory means
        the latest. They have to be of this run: those of another are an ``InvalidArgumentError``, for what is saved
        next would not descend from them. :func:`sidesave.load` loads them.

        To load a ``step`` is to go back to it, durably: when this returns, what was saved after it is given up, and
        ``load()`` gives this step until something is committed, in this session and in later ones. What was given up
        can be loaded by its step, which takes it up again.

        Of several ranks all have to call it, for the same step and with the same ``fallback``: they load the same
        checkpoint, or none of them does, and the error names the rank that could not. (What a live object raises that
        is given its state is raised on all of them too, and then others may have been given theirs.) See
        :func:`sidesave.load` for the arguments and errors. With ``fallback`` the newest older checkpoint that verifies
        is taken when this one does not; what was passed over is logged.

        Saves of this session that are under way are waited for first, of a ``step`` only its own. One that fails
        meanwhile is logged as a warning, and raised where it would have been without this call.
        """
        self._saver.session.check_open()
        self._saver.refuse_waiting("load")
        session = self._saver.session
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

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, ascending; read from the directory."""
        return sorted({info.step for info in self._saver.session.shared.checkpoints()})

    def latest_step(self) -> int | None:
        """The step committed last, or gone back to since; None when there is none."""
        checkpoints = self._saver.session.shared.checkpoints()
        return checkpoints[-1].step if checkpoints else None

    def mirror_status(self) -> MirrorStatus | None:
        """What the mirror still lacks, and how fast it gets it; at once. None without a mirror."""
        return self._saver.session.saves.mirroring.status()

    def delete(self, step: int) -> Future[None]:
        """Delete a checkpoint, in the daemon and behind the saves issued so far; the future is done when it is gone.

        It disappears in one step; a reader that has opened it can finish. (On a network file system, where locks do not
        tell of readers, it has half a minute, less when the session ends or a save needs the room.) What can go wrong
        is the future's exception: ``CheckpointNotFoundError``; ``InvalidArgumentError`` for the newest checkpoint,
        which can be deleted only once a newer one is committed; ``WriteError``.
        """
        return self._saver.delete(step)

    def history(self) -> list[SaveRecord]:
        """What became of every save of the run directory, in the order of the calls, those under way included.

        The log that it comes from is bounded: of a long run the oldest are missing. See :func:`sidesave.history`, which
        needs no checkpointer. In an object store none is kept, and these are the last saves of this session.
        """
        self._saver.session.check_process()
        return self._saver.session.history.records()

    @property
    def recovered(self) -> tuple[str, ...]:
        """Checkpoints that dead sessions had left unfinished, and that were finished when this one began."""
        return self._saver.session.connection.recovered

    @property
    def removed(self) -> tuple[str, ...]:
        """Leftovers of dead sessions that could not be finished and were removed when this one began."""
        return self._saver.session.connection.removed

    @property
    def directory(self) -> str:
        """The run directory."""
        return self._saver.session.directory

    @property
    def daemon_pid(self) -> int | None:
        """The writer daemon's process id; None while it is being replaced, or when closed."""
        return self._saver.session.connection.pid

    # The end ---------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for every save, end the daemon, give the memory back; idempotent.

        Raises what :meth:`wait` would raise, after everything has been closed. After ``timeout_s`` seconds the daemon
        is left to finish what was staged by itself. The mirror is not waited for: the daemon goes on with it alone, and
        the next session, which may begin at once, finishes what is left; see :meth:`wait`.
        """
        session = self._saver.session
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
            was_closed(self)
        session.saves.raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; a failed save is only logged when the block is already being left by an exception."""
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except SidesaveError as failure:
            logger.error("a save failed as well: %s", failure)

    def __repr__(self) -> str:
        return f"<Checkpointer {self.directory!r}{' closed' if self._saver.session.closed else ''}>"
