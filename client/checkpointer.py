"""``Checkpointer``: what a training script holds. One run directory, one daemon, two staging slots, one copier."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import gc
import itertools
import logging
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Literal, Self

import torch

from sidesave.client import arguments
from sidesave.client.daemon_link.config import DaemonConfig
from sidesave.client.daemon_link.connection import Connection
from sidesave.client.loading import loader
from sidesave.client.loading.rename import Rename
from sidesave.client.ranks.group import NodeWorld, World, find_node, find_world, tidy
from sidesave.client.runs import catalog
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.runs.save_requests import forget_requests
from sidesave.client.saving.handle import Outcome, SaveHandle
from sidesave.client.saving.in_flight import SaveInFlight, SavesInFlight
from sidesave.client.saving.lineage import Lineage
from sidesave.client.saving.own_history import OwnHistory
from sidesave.client.saving.pipeline import Submission
from sidesave.errors import (
    CheckpointNotFoundError,
    ClosedError,
    DirectoryInUseError,
    IntegrityError,
    InvalidArgumentError,
    SidesaveError,
    StagingError,
)
from sidesave.stager import apart
from sidesave.stager.apart import Worker
from sidesave.stager.copy.copier import Copier
from sidesave.stager.copy.pool import SlotPool
from sidesave.stager.devices import kinds
from sidesave.stager.state import ownership
from sidesave.writer_daemon.format import fallbacks, rollback
from sidesave.writer_daemon.format.manifest import step_directory
from sidesave.writer_daemon.format.rollback import Rollbacks
from sidesave.writer_daemon.lease.lease import current_holder
from sidesave.writer_daemon.log import SaveRecord
from sidesave.writer_daemon.protocol import Delete
from sidesave.writer_daemon.storage import PosixStorage

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S: Final = 600.0
_THREAD_TIMEOUT_S: Final = 10.0
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
            DirectoryInUseError: Another live session writes there; the message names it, and says if it is one of this
                very process. (One that nobody refers to any more is closed first, and waited for.)
            DaemonStartError: The daemon did not come up, or another rank did not.
            InvalidArgumentError: An option makes no sense.
            SidesaveError: Whatever kept another rank from starting; the message names it.
        """
        self._directory = arguments.path_text(directory)
        self._fallback = "" if fallback_directory is None else arguments.path_text(fallback_directory)
        self._elsewhere: list[str] = []  # fallback directories of earlier sessions
        self._lost: list[str] = []  # those that are not there
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
            _await_dropped(self._directory)
        self._node = find_node(self._world, self._directory, node_local=node_local)
        self._pid = os.getpid()
        self._on_busy = on_busy
        self._busy_timeout_s = busy_timeout_s
        self._allow_pickle = allow_pickle
        self._ids = itertools.count(_FIRST_ID)
        self._call = threading.RLock()
        self._entry: SaveInFlight | None = None  # of the call of save() under way, or of one that was interrupted
        self._closed = False
        self._parts = parts = _Parts(self._directory)
        parts.world = self._world
        self._dropped = weakref.finalize(self, _close_dropped, parts)
        self._dropped.atexit = False  # _close_all comes first, and waits
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
            parts.books.call(
                lambda: self._start(
                    replace(config, session=session),
                    slots=slots,
                    max_host_memory_bytes=max_host_memory_bytes,
                    bearable_failures=max_consecutive_failures if on_error == "warn" else 0,
                )
            )

        try:
            self._copier = parts.copier = parts.books.call(lambda: Copier(overlap=overlap, validate=validate))
            self._open(start)
            for name in self.recovered:
                logger.info("finished %s, which a dead session had left", name)
            for name in self.removed:
                logger.info("removed %s, which a dead session had left", name)
            self._submission = Submission(
                self._node,
                self._session,
                self._ids,
                parts.books,
                self._connection,
                self._pool,
                self._copier,
                self._saves,
                self._lineage,
                self._history,
                allow_pickle=allow_pickle,
            )
            for worker in (parts.books, *self._copier.workers):
                worker.on_failure = self._submission.lose
            _at_exit(self)
        except BaseException:
            parts.stop()
            raise

    def _open(self, start: Callable[[str], None]) -> None:
        """The first rank of each node opens the directory, and settles what is there; the others join its session."""
        world, leads = self._world, self._node.rank == 0
        session: str = world.gather("a session", secrets.token_hex(8))[0]
        mine: list[CheckpointInfo] = []
        leftovers, rollbacks = False, Rollbacks()
        with world.agreeing("cannot open the run directory"):
            if leads:
                start(session)
                leftovers, rollbacks, mine = self._parts.books.call(self._look_around)
        told = world.gather(
            "what is there", [leftovers, rollbacks.pairs, [info.to_json() for info in mine]] if leads else None
        )
        views = [answer for answer in told if answer is not None]
        agreed = Rollbacks(tuple((target, last) for target, last in views[0][1]))
        with world.agreeing("cannot start its daemon"):
            if not leads:
                start(session)
            elif rollbacks != agreed:  # nodes that keep their own parts, of which some have crashed on going back
                rollback.write(self._directory, agreed)
        everything = [[CheckpointInfo.from_json(info, self._directory) for info in infos] for *_, infos in views]
        complete = _common(everything)
        self._complete = {(info.session, info.sequence) for info in complete}
        self._lineage.begin(complete, everything, after=agreed.last, leftovers=any(left for left, *_ in views))

    def _look_around(self) -> tuple[bool, Rollbacks, list[CheckpointInfo]]:
        """Whether something may still be finished, where the run has gone back, and what is there."""
        tidy(self._directory)
        forget_requests(self._directory)
        # The daemon recovers the fallback directory when it first needs it, perhaps in the middle of the run.
        self._elsewhere, self._lost = fallbacks.remember(self._directory, self._fallback)
        leftovers = bool(self._connection.left)
        leftovers |= any(map(catalog.has_leftovers, [self._fallback, *self._elsewhere]))
        rollbacks = catalog.read_rollbacks(self._directory, strict=True)
        found = self._scan(refuse_newer=True)
        self._tell_elsewhere(found)
        return leftovers, rollbacks, found

    def _tell_elsewhere(self, found: list[CheckpointInfo]) -> None:
        """Say what an earlier session has left in a fallback directory that this one was not given."""
        for place in self._lost:
            logger.warning("%s", _lost(self._directory, place))
        for place in self._elsewhere:
            there = [info for info in found if os.path.dirname(info.path) == place]
            if there and self._world.size > 1:
                raise InvalidArgumentError(
                    f"the run has steps {_steps(there)} in {place}, the fallback directory of a session of one rank, "
                    f"where several ranks do not look: move them to {self._directory}, and remove {place}"
                )
            if there:
                logger.warning(
                    "the run has steps %s in %s, the fallback directory of an earlier session: they are loaded like "
                    "the rest; pass fallback_directory to save and delete there as well",
                    _steps(there),
                    place,
                )

    def _start(
        self, config: DaemonConfig, *, slots: int, max_host_memory_bytes: int | None, bearable_failures: int
    ) -> None:
        self._session = config.session
        lineage = self._lineage = Lineage(self._directory)

        parts = self._parts

        def release_slot(entry: SaveInFlight) -> None:  # neither this nor the other may keep a dropped one alive
            pool.release(entry)

        def on_committed(info: CheckpointInfo) -> None:
            lineage.add(info)

        self._saves = parts.saves = SavesInFlight(
            self._directory,
            bearable_failures=bearable_failures,
            logs_failures=self._world.size > 1,
            release_slot=release_slot,
            on_committed=on_committed,
        )
        self._connection = parts.connection = Connection(config, self._saves.receive, self._saves.lose)
        pool = SlotPool(slots, max_host_memory_bytes, self._connection.attach, self._connection.detach)
        self._pool = parts.pool = pool
        self._history = OwnHistory(self._directory, self._fallback, self._session, self._connection)
        self._connection.start()
        if parts.stopped:  # by the main thread, which did not see the connection yet
            self._connection.give_up_starting()
        self._connection.wait_ready()

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
        self._check_open()
        self._refuse_reentry("save")
        if blocking:
            self._refuse_in_callback("save")
        with kinds.exclusion():
            refusal: StagingError | None = None
            try:
                kinds.await_captures("save()")
            except StagingError as error:
                refusal = error
            with self._call:
                self._undo_interrupted()
                # Every call takes a place, whatever comes of it: by its place other ranks know which save is meant.
                handle = SaveHandle(step)
                entry = self._entry = SaveInFlight(step, handle, self._copier.new_copy())
                try:
                    self._lineage.give_place(entry)
                    self._check_open()  # again: close() may have come first
                    if self._world.size == 1:  # of several ranks some may have read it, and the others go on
                        self._saves.raise_failure()
                    if refusal is not None:
                        raise refusal
                    step = entry.step = handle.step = arguments.check_step(step)
                    entry.unrecorded = True
                    told, beside = arguments.encode_metadata(metadata), arguments.encode_files(files)
                    replace = self._lineage.may_replace(step, overwrite=overwrite, pending=self._saves.place_of(step))
                    flat = self._submission.flatten(state)
                    entry.slot = self._pool.try_acquire(entry)
                    if entry.slot is None and self._on_busy == "skip":
                        self._history.came_to_nothing(entry)
                        self._entry = None
                        return SaveHandle(step, skipped=True)
                    entry.slot = entry.slot or self._pool.acquire(entry, self._busy_timeout_s)
                    self._submission.stage(
                        entry, flat, replace=replace, blocking=blocking, metadata=told, beside=beside
                    )
                except BaseException as error:
                    self._undo(entry, error)
                    raise
                self._entry = None
                self._history.returned(entry)
        if blocking:
            handle.committed.result()
        return handle

    def _undo(self, entry: SaveInFlight, error: BaseException | None) -> None:
        """End a call of :meth:`save` that came to nothing; where this is interrupted, the next call does it again."""
        undo = functools.partial(self._submission.undo, entry, error)
        if self._is_in_callback():  # a thread of ours, that nothing interrupts, and that this would wait for
            self._parts.books.submit(undo)
        else:
            self._parts.books.call(undo)
        self._entry = None

    def _undo_interrupted(self) -> None:
        """Give back what an interrupted call of :meth:`save` has left; not inside another one."""
        entry = self._entry
        if entry is not None and not self._is_saving(entry.thread):
            with self._call:
                if self._entry is entry:
                    self._undo(entry, None)

    def _is_saving(self, thread: int) -> bool:
        """Whether that thread is inside :meth:`save`, as its frames tell, which no interrupt can leave behind."""
        frame = sys._current_frames().get(thread)
        while frame is not None:
            if frame.f_code is Checkpointer.save.__code__ and frame.f_locals.get("entry") is self._entry:
                return True
            frame = frame.f_back
        return False

    def _give_up(self, step: int, error: BaseException) -> None:
        """Take the place of a save that came to nothing before it was called, and tell the other ranks."""
        with self._call:
            self._undo_interrupted()
            entry = SaveInFlight(step, SaveHandle(step), self._copier.new_copy())
            self._entry = entry
            self._undo(entry, error)

    def _refuse_reentry(self, what: str) -> None:
        if self._entry is not None and self._is_saving(threading.get_ident()):
            raise StagingError(
                f"{what}() was called inside this thread's save(), by a signal handler for instance; "
                "set a flag there and call it from the training loop"
            )

    def _refuse_in_callback(self, what: str) -> None:
        """What waits for our own threads would wait for ever in one of them."""
        if self._is_in_callback():
            raise StagingError(f"{what}() was called in a callback of a save's future, which it would have to wait for")

    def _is_in_callback(self) -> bool:
        threads = (self._parts.books, *self._copier.workers)
        return self._connection.is_this_thread() or any(worker.is_current() for worker in threads)

    def prepare(self, state: Mapping[str, Any], *, files: Mapping[str, str | bytes] | None = None) -> Future[None]:
        """Allocate, populate and pin the staging memory for states of this structure, in the background.

        With ``files`` for them as well, as :meth:`save` takes them. Optional: without it the first saves do so. Raises
        like :meth:`save` for a state that cannot be saved; what goes wrong later is the future's exception.
        """
        self._check_open()
        beside = arguments.encode_files(files)
        with kinds.exclusion():
            kinds.await_captures("prepare()")
            flat = self._submission.flatten(state)
        future: Future[None] = Outcome()
        future.set_running_or_notify_cancel()

        def work() -> None:
            failure: BaseException | None = None
            try:
                while (slot := self._pool.try_acquire(future)) is not None:
                    self._submission.fit(flat, slot, beside)
            except BaseException as error:  # noqa: BLE001 - handed over through the future
                failure = error
            self._pool.release(future)
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)

        apart.start(work, "sidesave-prepare")
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
        self._undo_interrupted()
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
        """Load ``step``, or the latest checkpoint, and make it the parent of what is saved from now on.

        To load a ``step`` is to go back to it, durably: when this returns, what was saved after it is given up, and
        ``load()`` gives this step until something is committed, in this session and in later ones. What was given up
        can be loaded by its step, which takes it up again.

        Of several ranks all have to call it, with the same ``step`` and ``fallback``: they load the same checkpoint, or
        none of them does, and the error names the rank that could not. (What a live object raises that is given its
        state is raised on all of them too, and then others may have been given theirs.) See :func:`sidesave.load` for
        the arguments and errors. With ``fallback`` the newest older checkpoint that verifies is taken when this one
        does not; what was passed over is logged.

        Saves of this session that are under way are waited for first, of a ``step`` only its own. One that fails
        meanwhile is logged as a warning, and raised where it would have been without this call.
        """
        self._check_open()
        self._refuse_reentry("load")
        self._refuse_in_callback("load")
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
                        size=self._node.size,
                    )
            except IntegrityError as error:
                if info is candidates[-1]:
                    raise
                logger.warning("step %d does not verify, trying an older one: %s", info.step, error)
                continue
            with self._world.agreeing(f"cannot give its objects what it has loaded of step {info.step}"):
                state = loaded.apply()
            self._lineage.go_back_to(info, checkpoints)
            if step is not None:
                with self._world.agreeing(f"cannot write down that it goes on from step {info.step}"):
                    if self._node.rank == 0:
                        self._give_up_after(info)
            seconds = time.monotonic() - began
            logger.info("loaded step %d: %d bytes read in %.2f s", info.step, loaded.nbytes_read, seconds)
            return state
        raise AssertionError("unreachable: the last candidate returns or raises")

    def _ancestor(self, upto: int) -> int:
        """The newest step, up to ``upto``, that training descends from; the same on all ranks, which all ask."""
        found: list[int] = []
        with self._world.agreeing("finds nothing to go back to"):
            if self._world.rank == 0:
                self._saves.settle(None)
                ancestors = self._lineage.ancestors
                found = [info.step for info in self._whole() if info.step <= upto and info.step in ancestors][-1:]
                if not found:
                    text = f"there is no checkpoint to go back to, up to step {upto}"
                    raise CheckpointNotFoundError(errno.ENOENT, text, self._directory)
        return self._world.gather("the step to go back to", found)[0][0]

    def _give_up_after(self, info: CheckpointInfo) -> None:
        """Write down that the run goes on from ``info``: nothing that was saved after it is the latest any more."""
        before = catalog.read_rollbacks(self._directory, strict=True)
        after = before.going_back(info.sequence, self._lineage.sequence)
        if after == before:
            return
        with contextlib.closing(PosixStorage(self._directory)) as storage:
            holder = current_holder(storage)
        if holder is None or holder.session != self._session:
            text = f"the run has passed to {holder or 'nobody'}, so this session can neither go back nor save"
            raise DirectoryInUseError(errno.EBUSY, text, self._directory)
        rollback.write(self._directory, after)
        logger.warning("the run goes on from step %d: what was saved after it is given up", info.step)

    def _candidates(self, step: int | None, *, fallback: bool) -> tuple[list[CheckpointInfo], list[CheckpointInfo]]:
        """What to try to load, best first, and all checkpoints there are; as rank 0 sees them."""
        world, leads = self._world, self._node.rank == 0
        found: list[list[CheckpointInfo]] = []
        mine: list[CheckpointInfo] = []
        with world.agreeing("cannot list the run directory"):
            if step is not None:
                step = arguments.check_step(step)
            self._saves.settle(step)
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
            if self._lost:
                raise IntegrityError(_lost(self._directory, self._lost[0]))
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
        wanted = [info for info in checkpoints if info.step == step or (step is None and not info.given_up)]
        left_out = self._left_out(step, checkpoints) if step is not None and not wanted else []
        if left_out and fallback:
            wanted = [info for info in checkpoints if step is None or info.step < step]
        if not wanted:
            elsewhere = left_out and isinstance(self._node, NodeWorld)
            if step is None and checkpoints:
                text = "the checkpoint that the run went back to is not there any more; load one of those given up"
                raise IntegrityError(f"{self._directory}: {text} by its step: {_steps(checkpoints)}")
            text = f"not every node has its part of step {step}" if elsewhere else _not_found(step, checkpoints)
            raise CheckpointNotFoundError(errno.ENOENT, text, self._directory)
        best = max(wanted, key=lambda info: info.order)
        older = [info for info in checkpoints if info.sequence < best.sequence and info.given_up <= best.given_up]
        older.sort(key=lambda info: info.sequence, reverse=True)
        return [best, *older] if fallback else [best]

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, ascending; read from the directory."""
        return sorted({info.step for info in self._whole()})

    def latest_step(self) -> int | None:
        """The step committed last, or gone back to since; None when there is none."""
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
        step = arguments.check_step(step)
        lineage = self._lineage
        request = Delete(
            attempt=1,
            save_id=next(self._ids),
            step=step,
            sequence=lineage.sequence,
            retry=False,
            spare_read=spare_read,
        )
        saves, connection, copier = self._saves, self._connection, self._copier
        future: Future[None] = Outcome()
        future.set_running_or_notify_cancel()
        future.add_done_callback(lambda done: lineage.remove(step) if done.exception() is None else None)

        def submit() -> None:
            saves.add_deletion(request.save_id, future)
            connection.submit(request)

        self._parts.books.submit(lambda: copier.when_copied(submit))
        return future

    def _scan(self, *, refuse_newer: bool = False) -> list[CheckpointInfo]:
        """The checkpoints of both directories, the latest last."""
        rollbacks = catalog.read_rollbacks(self._directory, strict=refuse_newer)
        found = catalog.scan(self._directory, refuse_newer=refuse_newer, rollbacks=rollbacks)
        for directory in self._directories()[1:]:
            known = {(info.session, info.sequence) for info in found}
            further = catalog.scan(directory, refuse_newer=refuse_newer, rollbacks=rollbacks)
            found += [info for info in further if (info.session, info.sequence) not in known]
        return catalog.in_order(found)

    def _directories(self) -> list[str]:
        """Where the checkpoints are."""
        further = filter(os.path.isdir, [self._fallback, *self._elsewhere])
        return [self._directory, *further]

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
        if self._pid != os.getpid() or self._parts.ended:
            return
        self._refuse_reentry("close")
        self._refuse_in_callback("close")
        self._closed = True
        patience_s = 0.0
        try:
            try:
                self._call.acquire(timeout=self._busy_timeout_s if timeout_s is None else timeout_s)
            finally:
                with contextlib.suppress(RuntimeError):  # else another thread's save() is still at work
                    self._call.release()
            self._undo_interrupted()
            self._saves.wait(timeout_s)
            patience_s = 10.0
        finally:
            self._parts.close(patience_s)
            self._dropped.detach()
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
_dropped: set[_Parts] = set()
"""Of checkpointers that were dropped and are being closed."""
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
    _await_dropped()


class _Parts:
    """What a checkpointer runs on and has to end, in one thread that nothing interrupts. Idempotent."""

    def __init__(self, directory: str) -> None:
        """Nothing runs yet."""
        self.directory, self.pid = directory, os.getpid()
        self.books = Worker("sidesave-books")
        self.copier: Copier | None = None
        self.saves: SavesInFlight | None = None
        self.connection: Connection | None = None
        self.pool: SlotPool | None = None
        self.world: World | None = None
        self.stopped = self.ended = False

    def stop(self) -> None:
        """End what a start that failed has left, and keep the failure short: a daemon that starts is not waited for."""
        self.stopped = True
        if self.connection is not None:
            self.connection.give_up_starting()
        self.close(5.0)

    def close(self, patience_s: float) -> None:
        """End everything; the daemon may take ``patience_s`` seconds to finish."""
        self.books.call(functools.partial(self._end, patience_s))
        self.books.close(_THREAD_TIMEOUT_S)

    def drop(self) -> None:
        """The same without waiting, for saves under way to finish first."""

        def work() -> None:
            try:
                if self.saves is not None:
                    self.saves.wait(_EXIT_TIMEOUT_S)
                    self.saves.raise_failure()
            except SidesaveError as error:
                logger.error("a save to %s failed: %s", self.directory, error)
            finally:
                self._end(10.0)
                _dropped.discard(self)

        self.books.submit(work)

    def _end(self, patience_s: float) -> None:
        if self.copier is not None:
            self.copier.close()
        if self.connection is not None:
            self.connection.close(patience_s)
        if self.saves is not None:
            self.saves.abandon()
        if self.pool is not None:
            self.pool.close()
        world, self.world = self.world, None
        if world is not None:
            world.close()
        self.ended = True
        self.books.end()


def _close_dropped(parts: _Parts) -> None:
    """End what a checkpointer that was dropped without ``close()`` has left: saves under way finish."""
    if parts.pid == os.getpid() and not parts.ended:
        _dropped.add(parts)
        parts.drop()


def _await_dropped(directory: str | None = None) -> None:
    """Wait until checkpointers that nobody refers to any more are closed: those of one directory, or all."""
    place = None if directory is None else os.path.realpath(directory)
    if any(os.path.realpath(other._directory) == place for other in _open):
        gc.collect()  # it may be one that only refers to itself
    for parts in list(_dropped):
        if parts.pid == os.getpid() and place in (None, os.path.realpath(parts.directory)):
            parts.books.close(_EXIT_TIMEOUT_S)


def _common(views: list[list[CheckpointInfo]]) -> list[CheckpointInfo]:
    """The checkpoints of which every node has its part, as the first one has them."""
    keys = [{(info.step, info.session, info.sequence) for info in view} for view in views]
    return [info for info in views[0] if all((info.step, info.session, info.sequence) in known for known in keys)]


def _not_found(step: int | None, checkpoints: list[CheckpointInfo]) -> str:
    if step is None or not checkpoints:
        return "there is no checkpoint"
    return f"there is no step {step}; there are {_steps(checkpoints)}"


def _lost(directory: str, place: str) -> str:
    return (
        f"{place}, the fallback directory that this run has saved to, is not there, and perhaps its newest checkpoint "
        f"is: mount it, or remove {directory}/{fallbacks.USED} to go on without it"
    )


def _steps(checkpoints: list[CheckpointInfo]) -> list[int]:
    return sorted(info.step for info in checkpoints)[-20:]
