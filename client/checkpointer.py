"""``Checkpointer``: what a training script holds. One run directory, one daemon, two staging slots, one copier."""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Literal, Self

import torch

from sidesave import errors
from sidesave.client import arguments, catalog, loader
from sidesave.client.connection import Connection, DaemonConfig
from sidesave.client.handle import CheckpointInfo, SaveHandle, path_text
from sidesave.client.history import OwnHistory
from sidesave.client.lineage import Lineage
from sidesave.client.renaming import Rename
from sidesave.client.saves import SavesInFlight
from sidesave.client.submission import Submission
from sidesave.client.world import NodeWorld, find_node, find_world, tidy
from sidesave.errors import (
    CheckpointNotFoundError,
    ClosedError,
    InvalidArgumentError,
    SidesaveError,
    StagingError,
)
from sidesave.stager import ownership
from sidesave.stager.copier import Copier
from sidesave.stager.pool import Slot, SlotPool
from sidesave.writer_daemon.history import SaveRecord
from sidesave.writer_daemon.manifest import step_directory
from sidesave.writer_daemon.protocol import Delete

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S: Final = 600.0
_FIRST_ID: Final = 1 << 60
"""Of requests that are no saves: a save is known by its place, which is the same on all ranks."""


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
        stall_timeout_s: float = 300.0,
        takeover_timeout_s: float = 60.0,
        commit_timeout_s: float = 600.0,
        distributed: bool = True,
        process_group: torch.distributed.ProcessGroup | None = None,
        node_local: bool = False,
        allow_pickle: bool = False,
        nice: int = 0,
        io_class: Literal["", "idle", "best-effort"] = "",
        cpus: Sequence[int] = (),
    ) -> None:
        """Open a run directory, creating it if need be.

        Of a job with several ranks each makes one, at the same time, for one directory that all of them see; from then
        on every rank saves the same steps in the same order, and no rank waits for another in :meth:`save`.

        Args:
            directory: Where the checkpoints go, one ``step-XXXXXXXX`` directory each.
            slots: Staging slots: how many saves can be under way. Each takes host memory of the state's size.
            max_host_memory_bytes: Most host memory for all slots together; None leaves it to what the machine has.
            overlap: Copy owned tensors beside training. None does so for CUDA tensors, where it pays; True for CPU
                tensors as well; False captures everything at the call.
            validate: Compare everything, not samples, to find tensors that changed under a copy; for debugging.
            on_error: ``"raise"`` a failed save again in the next :meth:`save`, :meth:`wait` or :meth:`close`, or
                ``"warn"`` once. Its futures raise either way.
            max_consecutive_failures: With ``"warn"``, one failure more than this in a row is raised, and each after
                it, until a save is committed.
            retries: How often a save is tried again, in the background, after an error that may be gone a second
                later: a server that does not answer, a failing disk. A full disk is none.
            fallback_directory: A run directory for saves that the first one refuses for good, on another file system;
                what was saved there is found by this class like the rest. Slots are then held until the commit.
            on_busy: With all slots busy, ``"wait"`` for one or ``"skip"`` the save.
            busy_timeout_s: How long to wait for a slot before ``WriteStalledError``, in seconds.
            stall_timeout_s: After this long without a byte moved a save fails with ``WriteStalledError``, in seconds.
            takeover_timeout_s: How long to wait for the daemon of a dead trainer that still writes here, in seconds.
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
            cpus: Cores the daemon may use; empty means all.

        Raises:
            WriteError: The directory cannot be created or is none.
            DirectoryInUseError: Another live session writes there; the message names it.
            DaemonStartError: The daemon did not come up, or another rank did not.
            InvalidArgumentError: An option makes no sense.
            SidesaveError: Whatever kept another rank from starting; the message names it.
        """
        self._directory = path_text(directory)
        self._fallback = "" if fallback_directory is None else path_text(fallback_directory)
        for path in filter(None, (self._directory, self._fallback)):
            arguments.check_path(path)
        self._world = find_world(self._directory, distributed, process_group, node_local=node_local)
        with self._world.agreeing("cannot use the run directory"):  # before anybody waits for anybody
            arguments.check_options(slots, on_error, on_busy, nice, io_class, max_host_memory_bytes, cpus)
            arguments.check_counts(max_consecutive_failures=max_consecutive_failures, retries=retries)
            arguments.check_seconds(
                busy_timeout_s=busy_timeout_s,
                stall_timeout_s=stall_timeout_s,
                takeover_timeout_s=takeover_timeout_s,
                commit_timeout_s=commit_timeout_s,
            )
            if self._world.size > 1:
                arguments.check_alone(fallback_directory=self._fallback, on_busy=on_busy)
            if self._fallback and os.path.realpath(self._fallback) == os.path.realpath(self._directory):
                raise InvalidArgumentError(f"fallback_directory is the run directory itself: {self._fallback}")
            arguments.make_directory(self._directory)
        self._node = find_node(self._world, self._directory, node_local=node_local)
        self._pid = os.getpid()
        self._on_busy = on_busy
        self._busy_timeout_s = busy_timeout_s
        self._allow_pickle = allow_pickle
        self._ids = itertools.count(_FIRST_ID)
        self._call = threading.RLock()
        self._saving: int | None = None  # the thread inside save()
        self._closed = False
        config = DaemonConfig(
            directory=self._directory,
            fallback_directory=self._fallback,
            session="",
            rank=self._node.rank,
            world_size=self._node.size,
            retries=retries,
            stall_timeout_s=stall_timeout_s,
            takeover_timeout_s=takeover_timeout_s,
            commit_timeout_s=commit_timeout_s,
            nice=nice,
            io_class=io_class,
            cpus=tuple(cpus),
        )

        def start(session: str) -> None:
            self._start(
                replace(config, session=session),
                slots=slots,
                max_host_memory_bytes=max_host_memory_bytes,
                bearable_failures=max_consecutive_failures if on_error == "warn" else 0,
            )

        try:
            self._copier = Copier(overlap=overlap, validate=validate)
            self._open(start)
        except BaseException:
            self._stop()
            raise
        for name in self.recovered:
            logger.info("finished %s, which a dead session had left", name)
        for name in self.removed:
            logger.info("removed %s, which a dead session had left", name)
        self._submission = Submission(
            self._node,
            self._session,
            self._ids,
            self._connection,
            self._pool,
            self._copier,
            self._saves,
            self._lineage,
            self._history,
            allow_pickle=allow_pickle,
        )
        self._dropped = weakref.finalize(
            self, _close_dropped, os.getpid(), self._directory, self._copier, self._saves, self._connection, self._pool
        )
        self._dropped.atexit = False  # _close_all comes first, and waits
        _at_exit(self)

    def _open(self, start: Callable[[str], None]) -> None:
        """The first rank of each node opens the directory, and settles what is there; the others join its session."""
        world, leads = self._world, self._node.rank == 0
        session: str = world.gather("a session", secrets.token_hex(8))[0]
        mine: list[CheckpointInfo] = []
        leftovers = False
        with world.agreeing("cannot open the run directory"):
            if leads:
                start(session)
                tidy(self._directory)
                # The daemon recovers the fallback directory when it first needs it, perhaps in the middle of the run.
                leftovers = bool(self._connection.left) or catalog.has_leftovers(self._fallback)
                mine = self._scan(refuse_newer=True)
        told = world.gather("what is there", [leftovers, [info.to_json() for info in mine]] if leads else None)
        views = [answer for answer in told if answer is not None]
        with world.agreeing("cannot start its daemon"):
            if not leads:
                start(session)
        everything = [[CheckpointInfo.from_json(info, self._directory) for info in infos] for _, infos in views]
        complete = _common(everything)
        self._complete = {(info.session, info.sequence) for info in complete}
        self._lineage.begin(complete, everything, leftovers=any(left for left, _ in views))

    def _start(
        self, config: DaemonConfig, *, slots: int, max_host_memory_bytes: int | None, bearable_failures: int
    ) -> None:
        self._session = config.session
        lineage = self._lineage = Lineage(self._directory)

        def release_slot(slot: Slot) -> None:  # neither this nor the other may keep a dropped checkpointer alive
            pool.release(slot)

        def on_committed(info: CheckpointInfo) -> None:
            lineage.add(info)

        self._saves = SavesInFlight(
            self._directory,
            bearable_failures=bearable_failures,
            release_slot=release_slot,
            on_committed=on_committed,
        )
        self._connection = Connection(config, self._saves.receive, self._saves.lose)
        pool = SlotPool(slots, max_host_memory_bytes, self._connection.attach, self._connection.detach)
        self._pool = pool
        self._history = OwnHistory(self._directory, self._fallback, self._session, self._connection)
        self._connection.wait_ready()

    def _stop(self) -> None:
        connection: Connection | None = getattr(self, "_connection", None)
        if connection is not None:
            connection.close(5.0)

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
            SidesaveError: An earlier save failed (``on_error="raise"``).
        """
        self._check_open()
        self._refuse_reentry("save")
        if blocking:
            self._refuse_in_callback("save")
        with self._call:
            self._saving = threading.get_ident()
            # Every call takes a place, whatever comes of it: by its place other ranks know which save is meant.
            sequence = self._lineage.next_sequence()
            earlier = True
            try:
                self._check_open()  # again: close() may have come first
                self._saves.raise_failure()
                earlier = False
                arguments.check_step(step)
                with self._history.call(step, sequence):
                    told, beside = arguments.encode_metadata(metadata), arguments.encode_files(files)
                    handle = self._submit(step, state, sequence, told, beside, blocking=blocking, overwrite=overwrite)
            except BaseException as error:
                self._submission.refuse(step, sequence, error, earlier=earlier)
                raise
            finally:
                self._saving = None
        if handle.skipped:
            return handle
        if blocking:
            try:
                handle.committed.result()
            except SidesaveError as error:
                self._saves.was_raised(error)
                raise
        return handle

    def _give_up(self, step: int, error: BaseException) -> None:
        """Take the place of a save that came to nothing before it was called, and tell the other ranks."""
        with self._call:
            self._submission.refuse(step, self._lineage.next_sequence(), error)

    def _submit(
        self,
        step: int,
        state: Mapping[str, Any],
        sequence: int,
        metadata: bytes,
        beside: bytes,
        *,
        blocking: bool,
        overwrite: bool,
    ) -> SaveHandle:
        replace = self._lineage.may_replace(step, overwrite=overwrite, pending=self._saves.has_step(step))
        flat = self._submission.flatten(state)
        slot = self._pool.try_acquire()
        if slot is None and self._on_busy == "skip":
            return self._history.skip(SaveHandle(step, skipped=True))
        slot = slot or self._pool.acquire(self._busy_timeout_s)
        handle = SaveHandle(step)
        self._submission.stage(
            step, flat, slot, handle, sequence, replace=replace, blocking=blocking, metadata=metadata, beside=beside
        )
        return handle

    def _refuse_reentry(self, what: str) -> None:
        if self._saving == threading.get_ident():
            raise StagingError(
                f"{what}() was called inside this thread's save(), by a signal handler for instance; "
                "set a flag there and call it from the training loop"
            )

    def _refuse_in_callback(self, what: str) -> None:
        """What waits for our own threads would wait for ever in one of them."""
        if self._connection.is_this_thread() or self._copier.is_this_thread():
            raise StagingError(f"{what}() was called in a callback of a save's future, which it would have to wait for")

    def prepare(self, state: Mapping[str, Any], *, files: Mapping[str, str | bytes] | None = None) -> Future[None]:
        """Allocate, populate and pin the staging memory for states of this structure, in the background.

        With ``files`` for them as well, as :meth:`save` takes them. Optional: without it the first saves do so. Raises
        like :meth:`save` for a state that cannot be saved; what goes wrong later is the future's exception.
        """
        self._check_open()
        beside = arguments.encode_files(files)
        flat = self._submission.flatten(state)
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()

        def work() -> None:
            held: list[Slot] = []
            try:
                while (slot := self._pool.try_acquire()) is not None:
                    held.append(slot)
                    self._submission.fit(flat, slot, beside)
            except BaseException as error:  # noqa: BLE001 - handed over through the future
                future.set_exception(error)
            finally:
                for slot in held:
                    self._pool.release(slot)
                if not future.done():
                    future.set_result(None)

        threading.Thread(target=work, name="sidesave-prepare", daemon=True).start()
        return future

    @contextlib.contextmanager
    def guard(self) -> Generator[None]:
        """Protects a hand-written update of tensors that an optimizer owns: entering waits for copies under way.

        Optimizers from ``torch.optim``, and wrappers that call their ``step``, need nothing of the kind.
        """
        with ownership.guard():
            yield

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until every save issued so far is committed, or has failed.

        Raises:
            SidesaveError: A save failed (``on_error="raise"``).
            WriteStalledError: ``timeout_s`` seconds passed first.
        """
        self._check_process()
        self._refuse_reentry("wait")
        self._refuse_in_callback("wait")
        self._saves.wait(timeout_s)
        self._saves.raise_failure()

    # Loading ---------------------------------------------------------------------------------------------------

    def load(
        self,
        step: int | None = None,
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
        """Load ``step``, or the newest checkpoint, and make it the parent of what is saved from now on.

        Of several ranks all have to call it, with the same ``step`` and ``fallback``: they load the same checkpoint, or
        none of them does, and the error names the rank that could not. (What a live object raises that is given its
        state is raised on all of them too, and then others may have been given theirs.) See :func:`sidesave.load` for
        the arguments and errors. With ``fallback`` the newest older checkpoint that verifies is taken when this one
        does not; what was passed over is logged.
        """
        self._check_open()
        began = time.monotonic()
        candidates, checkpoints = self._candidates(step, fallback=fallback)
        for info in candidates:
            try:
                with self._world.agreeing(f"cannot load step {info.step}"):
                    loaded = loader.read(
                        info.path,
                        into=into,
                        map_location=map_location,
                        include=include,
                        exclude=exclude,
                        rename=rename,
                        strict=strict,
                        dtype=dtype,
                        verify=verify,
                        allow_pickle=self._allow_pickle if allow_pickle is None else allow_pickle,
                        rank=self._node.rank,
                    )
            except errors.IntegrityError as error:
                if info is candidates[-1]:
                    raise
                logger.warning("step %d does not verify, trying an older one: %s", info.step, error)
                continue
            with self._world.agreeing(f"cannot give its objects what it has loaded of step {info.step}"):
                state = loaded.apply()
            self._lineage.go_back_to(info, checkpoints)
            seconds = time.monotonic() - began
            logger.info("loaded step %d: %d bytes read in %.2f s", info.step, loaded.nbytes_read, seconds)
            return state
        raise AssertionError("unreachable: the last candidate returns or raises")

    def _candidates(self, step: int | None, *, fallback: bool) -> tuple[list[CheckpointInfo], list[CheckpointInfo]]:
        """What to try to load, best first, and all checkpoints there are; as rank 0 sees them."""
        world, leads = self._world, self._node.rank == 0
        found: list[list[CheckpointInfo]] = []
        mine: list[CheckpointInfo] = []
        with world.agreeing("cannot list the run directory"):
            if step is not None:
                arguments.check_step(step)
            if leads:
                mine = self._scan()
        if world.size > 1:
            world.require_alike(step=step, fallback=fallback)
            told = world.gather("checkpoints", [info.to_json() for info in mine] if leads else None)
            views = [answer for answer in told if answer is not None]
            mine = _common([[CheckpointInfo.from_json(info, self._directory) for info in infos] for infos in views])
        with world.agreeing("finds a damaged checkpoint"):
            if leads and not fallback:
                self._refuse_damaged(step, mine)
        with world.agreeing("finds nothing to load"):
            if world.rank == 0:
                found = [self._choose(step, mine, fallback=fallback)]
        if world.size > 1:
            told = world.gather("candidates", [info.to_json() for infos in found for info in infos])[0]
            found = [[CheckpointInfo.from_json(info, self._directory) for info in told]]
        return found[0], mine

    def _refuse_damaged(self, step: int | None, checkpoints: list[CheckpointInfo]) -> None:
        """Raise what is wrong with what is here in the place of ``step``, or of one newer than all ``checkpoints``."""
        if step is None:
            for directory in self._directories():
                catalog.refuse_newer_damaged(directory, checkpoints)
            return
        for path in self._left_out(step, checkpoints):
            try:
                catalog.read_info(path)
            except FileNotFoundError:
                if all(info.step != step for info in checkpoints):
                    raise

    def _left_out(self, step: int, checkpoints: list[CheckpointInfo]) -> list[str]:
        """The directories that have the name of a step, and are none of ``checkpoints``."""
        listed = {info.path for info in checkpoints}
        paths = [os.path.join(directory, step_directory(step)) for directory in self._directories()]
        return [path for path in paths if path not in listed and os.path.isdir(path)]

    def _choose(self, step: int | None, checkpoints: list[CheckpointInfo], *, fallback: bool) -> list[CheckpointInfo]:
        wanted = [info for info in checkpoints if step is None or info.step == step]
        left_out = self._left_out(step, checkpoints) if step is not None and not wanted else []
        if left_out and fallback:
            wanted = [info for info in checkpoints if step is None or info.step < step]
        if not wanted:
            elsewhere = left_out and isinstance(self._node, NodeWorld)
            text = f"not every node has its part of step {step}" if elsewhere else _not_found(step, checkpoints)
            raise CheckpointNotFoundError(errno.ENOENT, text, self._directory)
        candidates = [info for info in reversed(checkpoints) if info.sequence <= wanted[-1].sequence]
        return candidates if fallback else candidates[:1]

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, ascending; read from the directory."""
        return sorted({info.step for info in self._whole()})

    def latest_step(self) -> int | None:
        """The step committed last, which is not the highest one after going back; None when there is none."""
        checkpoints = self._whole()
        return checkpoints[-1].step if checkpoints else None

    def _whole(self) -> list[CheckpointInfo]:
        """The checkpoints; of nodes that keep their own parts those of earlier sessions that every node has."""
        found = self._scan()
        if not isinstance(self._node, NodeWorld):
            return found
        return [
            info for info in found if info.session == self._session or (info.session, info.sequence) in self._complete
        ]

    def delete(self, step: int) -> Future[None]:
        """Delete a checkpoint, in the daemon and behind the saves issued so far; the future is done when it is gone.

        It disappears in one step; a reader that has opened it can finish. (On a network file system, where locks do not
        tell of readers, it has half a minute, less when the session ends or a save needs the room.) What can go wrong
        is the future's exception: ``CheckpointNotFoundError``; ``InvalidArgumentError`` for the newest checkpoint,
        which can be deleted only once a newer one is committed; ``WriteError``.
        """
        return self._delete(step)

    def _delete(self, step: int, *, spare_read: bool = False) -> Future[None]:
        """With ``spare_read`` that is refused, with EBUSY, while somebody reads it."""
        self._check_open()
        arguments.check_step(step)
        lineage = self._lineage
        request = Delete(
            attempt=1,
            save_id=next(self._ids),
            step=step,
            sequence=lineage.sequence,
            retry=False,
            spare_read=spare_read,
        )
        future = self._saves.add_deletion(request.save_id)
        future.add_done_callback(lambda done: lineage.remove(step) if done.exception() is None else None)
        self._copier.when_copied(lambda: self._connection.submit(request))
        return future

    def _scan(self, *, refuse_newer: bool = False) -> list[CheckpointInfo]:
        """The checkpoints of both directories in the order of their commits."""
        found = catalog.scan(self._directory, refuse_newer=refuse_newer)
        for directory in self._directories()[1:]:
            known = {(info.session, info.sequence) for info in found}
            further = catalog.scan(directory, refuse_newer=refuse_newer)
            found += [info for info in further if (info.session, info.sequence) not in known]
        return sorted(found, key=lambda info: info.sequence)

    def _directories(self) -> list[str]:
        """Where the checkpoints are."""
        return [self._directory, *([self._fallback] if self._fallback and os.path.isdir(self._fallback) else [])]

    def history(self) -> list[SaveRecord]:
        """What became of every save of the run directory, in the order of the calls, those under way included.

        The log that it comes from is bounded: of a long run the oldest are missing. See :func:`sidesave.history`, which
        needs no checkpointer.
        """
        self._check_process()
        return self._history.records()

    @property
    def recovered(self) -> tuple[str, ...]:
        """Checkpoints that dead sessions had left unfinished, and that were finished when this one began."""
        return self._connection.recovered

    @property
    def removed(self) -> tuple[str, ...]:
        """Leftovers of dead sessions that could not be finished and were removed when this one began."""
        return self._connection.removed

    @property
    def directory(self) -> str:
        """The run directory."""
        return self._directory

    @property
    def daemon_pid(self) -> int | None:
        """The writer daemon's process id; None while it is being replaced, or when closed."""
        return self._connection.pid

    # The end ---------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for every save, end the daemon, give the memory back; idempotent.

        Raises what :meth:`wait` would raise, after everything has been closed. After ``timeout_s`` seconds the daemon
        is left to finish what was staged by itself.
        """
        if self._pid != os.getpid() or self._closed:
            return
        self._refuse_reentry("close")
        self._refuse_in_callback("close")
        self._closed = True
        self._dropped.detach()
        patience_s = 0.0
        try:
            if self._call.acquire(timeout=self._busy_timeout_s if timeout_s is None else timeout_s):
                self._call.release()  # no save() is at work in another thread, and none will begin
            self._copier.close()
            self._saves.wait(timeout_s)
            patience_s = 10.0
        finally:
            self._connection.close(patience_s)
            self._saves.abandon()
            self._pool.close()
            _open.discard(self)
        self._saves.raise_failure()

    def __enter__(self) -> Self:
        """The checkpointer itself."""
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

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                f"this checkpointer belongs to process {self._pid}; a forked child cannot use it, make one of its own"
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError(f"the checkpointer of {self._directory} is closed")

    def __repr__(self) -> str:
        """Directory and state."""
        return f"<Checkpointer {self._directory!r}{' closed' if self._closed else ''}>"


_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
_registered: Callable[[], None] | None = None


def _at_exit(checkpointer: Checkpointer) -> None:
    """Have an unclosed checkpointer closed when the interpreter ends, and never in a forked child."""
    global _registered
    _open.add(checkpointer)
    if _registered is None:
        _registered = atexit.register(_close_all)


def _close_all() -> None:
    for checkpointer in list(_open):
        try:
            checkpointer.close(_EXIT_TIMEOUT_S)
        except SidesaveError as error:
            logger.error("a save failed: %s", error)


def _close_dropped(
    pid: int, directory: str, copier: Copier, saves: SavesInFlight, connection: Connection, pool: SlotPool
) -> None:
    """End what a checkpointer that was dropped without ``close()`` has left, in a thread: saves under way finish."""
    if pid != os.getpid():
        return

    def work() -> None:
        try:
            copier.close()
            saves.wait(_EXIT_TIMEOUT_S)
            saves.raise_failure()
        except SidesaveError as error:
            logger.error("a save to %s failed: %s", directory, error)
        finally:
            connection.close(10.0)
            saves.abandon()
            pool.close()

    threading.Thread(target=work, name="sidesave-close").start()


def _common(views: list[list[CheckpointInfo]]) -> list[CheckpointInfo]:
    """The checkpoints of which every node has its part, as the first one has them."""
    keys = [{(info.step, info.session, info.sequence) for info in view} for view in views]
    return [info for info in views[0] if all((info.step, info.session, info.sequence) in known for known in keys)]


def _not_found(step: int | None, checkpoints: list[CheckpointInfo]) -> str:
    if step is None or not checkpoints:
        return "there is no checkpoint"
    return f"there is no step {step}; there are {sorted(info.step for info in checkpoints)[-20:]}"
