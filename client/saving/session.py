"""The parts of a checkpointer, started and closed together: a daemon, staging slots, a copier.

Nothing here refers to the checkpointer, so that one which is dropped without ``close()`` is closed
all the same.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Final

from sidesave.client.cost import CostReport, Durations
from sidesave.client.daemon_link.connection import Connection
from sidesave.client.increments import Increments
from sidesave.client.options import Options
from sidesave.client.ranks.encryption import RunEncryption
from sidesave.client.ranks.group import NodeWorld, World
from sidesave.client.ranks.meeting import tidy
from sidesave.client.runs.run import Run
from sidesave.client.runs.save_requests import forget_requests
from sidesave.client.runs.view import RunView
from sidesave.client.saving.closing import EXIT_TIMEOUT_S, close_dropped, leave_to_finish
from sidesave.client.saving.history import History
from sidesave.client.saving.lineage import Lineage, Turns, sequence_of_now
from sidesave.client.saving.mirroring import Mirroring
from sidesave.client.saving.save import Save
from sidesave.client.saving.saves import Failures, Saves
from sidesave.client.saving.shared_run import SharedRun, common, from_json, to_json
from sidesave.errors import ClosedError, SidesaveError, StagingError
from sidesave.stager.copy.copier import Copier
from sidesave.stager.copy.pool import SlotPool
from sidesave.stager.memory.host_memory import NodeMemory, memory_of_rank
from sidesave.stager.signal_safe import Latch, Worker
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.format import rollback
from sidesave.writer_daemon.format.rollback import Rollbacks
from sidesave.writer_daemon.log import read_history
from sidesave.writer_daemon.protocol import Boot, Delete
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)

_THREAD_TIMEOUT_S: Final = 10.0
_START_PATIENCE_S: Final = 5.0
"""What a daemon has to end whose checkpointer failed to start."""


class Session:
    """The parts of one checkpointer, which exist from :meth:`start` on, and their life cycle."""

    id: str
    copier: Copier
    connection: Connection
    pool: SlotPool
    turns: Turns
    saves: Saves
    lineage: Lineage
    history: History
    shared: SharedRun

    def __init__(
        self, world: World, node: World, run: Run, options: Options, storage_options: bytes
    ) -> None:
        """Start nothing. The world is left at the end.

        ``storage_options`` are encoded, and may be secret.
        """
        self.world, self.node, self.run, self.options = world, node, run, options
        self.directory, self.pid = run.directory, os.getpid()
        self._storage_options = storage_options
        self.books = Worker("sidesave-books", self._thread_failed)
        self.droppable: tuple[int, ...] = ()
        """Steps of which a save that finds no room may delete each, the oldest first."""
        self._spared = set[int]()
        """Steps taken out of ``droppable`` that a save called before may still delete."""
        self._at_end: list[Callable[[], object]] = []
        self.closed = self._stopped = self.ended = self._left = False
        self._remembers = self._remembers_mirror = False
        self.encryption = RunEncryption(run.directory, run.mirror.place, options.encryption)
        self.increments = Increments(links=not self.encryption)

    # The start ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything with the other ranks; if this raises, :meth:`stop` has to follow."""
        if urls.is_url(self.directory):
            urls.remember(self.directory, urls.decode_options(self._storage_options))
            self._remembers = True
        if urls.is_url(self.run.mirror.place):
            urls.remember(self.run.mirror.place, urls.decode_options(self._storage_options))
            self._remembers_mirror = True
        self.encryption.remember(self.run.fallback)
        self._open()
        for name in self.connection.recovered:
            logger.info("finished %s, which a dead session had left", name)
        for name in self.connection.removed:
            logger.info("removed %s, which a dead session had left", name)

    def _open(self) -> None:
        """Open and settle the directory on each node's first rank; others join its session."""
        world, staging, leads = self.world, self.options.staging, self.leads
        begun = world.gather("a session", [secrets.token_hex(8), *memory_of_rank()])
        self.id = begun[0][0]
        self._memory = NodeMemory.of(
            staging.node_memory_bytes, world.rank, [memory for _, *memory in begun]
        )
        self.cost = CostReport(self._memory, staging.slots)
        self.encryption.agree(world, self.node, self.id)
        self.run.mirror.was_unreachable(self.encryption.mirror_error)
        existing: list[CheckpointInfo] = []
        leftovers, rollbacks = 0, Rollbacks()
        with world.raise_together("cannot open the run directory"):
            self.copier = self.books.call(
                lambda: Copier(
                    overlap=staging.overlap,
                    validate=staging.validate,
                    on_failure=self._thread_failed,
                )
            )
            if leads:
                self.books.call(self._start_daemon)
                leftovers, rollbacks, existing = self.books.call(self._look_around)
        answers = world.gather(
            "what is there", [leftovers, rollbacks.pairs, to_json(existing)] if leads else None
        )
        views = [answer for answer in answers if answer is not None]
        agreed = Rollbacks.of(views[0][1])
        with world.raise_together("cannot start its daemon"):
            if not leads:
                self.books.call(self._start_daemon)
            elif rollbacks != agreed:
                # nodes that keep their own parts, of which some have crashed on going back
                rollback.write_in(self.directory, agreed)
        everything = [from_json(infos, self.directory) for *_, infos in views]
        complete = common(everything)
        self.shared = SharedRun(
            world,
            self.node,
            self.run,
            self.id,
            self.saves,
            self.lineage,
            {info.key for info in complete},
        )
        self.lineage.begin(
            complete, everything, agreed, leftovers_before=max(left for left, *_ in views)
        )

    def _look_around(self) -> tuple[int, Rollbacks, list[CheckpointInfo]]:
        """The sequence after all leftovers (0: none), the rollbacks, and the checkpoints."""
        tidy(self.directory)
        if not urls.is_url(self.directory):  # where requests are files
            forget_requests(self.directory)
        self.run.remember_fallbacks()
        leftovers = bool(self.connection.left)
        leftovers |= self.run.has_leftovers_elsewhere()
        self.run.mirror.adopt_rollbacks(self.directory)
        view = self.run.look(strict=True)
        for listed in (view.all, view.unrelated()):
            self.encryption.check(listed)
        self.encryption.write_down()
        leftovers |= not view.is_complete
        self.run.warn_of_fallbacks(view.here, alone=self.world.size == 1)
        if not urls.is_url(self.directory):  # where a log of saves is kept
            self.cost.durations = Durations.of(read_history(self.directory))
        own = (info for info in view.here if os.path.dirname(info.path) == self.directory)
        self.mirroring.begin(own, view.mirrored)  # what is elsewhere is not mirrored
        return sequence_of_now() if leftovers else 0, view.rollbacks, view.all

    def _start_daemon(self) -> None:
        options, staging = self.options, self.options.staging
        boot = Boot(
            attempt=0,
            directory=self.directory,
            session=self.id,
            rank=self.node.rank,
            world_size=self.node.size,
            trainer_pid=self.pid,
            encrypts=bool(self.encryption),
            storage_options=self._storage_options,
            fallback_directory=self.run.fallback,
            retries=options.failures.retries,
            mirror=self.run.mirror.place,
            mirror_bandwidth=(options.mirror.bandwidth or 0) if options.mirror else 0,
            options=options.daemon,
        )
        connection = self.connection = Connection(boot)
        self.turns = Turns(self.node, self.id, connection)
        self.lineage = Lineage(self.directory, self.turns)
        self.pool = SlotPool(staging.slots, connection.attach, connection.detach, self._memory)
        self.history = History(
            self.directory, self.run.fallback, self.id, connection, options.observers
        )
        self.saves = Saves(
            self.directory,
            failures=Failures(options.failures.tolerated, logs=self.world.size > 1),
            turns=self.turns,
            lineage=self.lineage,
            increments=self.increments,
            pool=self.pool,
            history=self.history,
            mirroring=Mirroring(self.run.mirror.place, self.id, leads=self.world.rank == 0),
            cost=self.cost,
        )
        connection.start(self.saves)
        if self._stopped:  # by the main thread, which did not see the connection yet
            self.connection.give_up_starting(_START_PATIENCE_S)
        self.connection.wait_ready()

    # Meanwhile ------------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raise ``ClosedError`` in a forked child."""
        if self.pid != os.getpid():
            raise ClosedError(
                f"this checkpointer belongs to process {self.pid}; a forked child cannot use it, "
                "make one of its own"
            )

    def check_open(self) -> None:
        """Raise ``ClosedError`` in a forked child, and when the checkpointer is closed."""
        self.check_process()
        if self.closed:
            raise ClosedError(f"the checkpointer of {self.directory} is closed")

    def is_our_thread(self) -> bool:
        """Whether the caller runs in a thread of this session, as callbacks of saves do."""
        threads = (self.books, *self.copier.workers)
        return self.connection.is_this_thread() or any(worker.is_current() for worker in threads)

    def undo(self, save: Save, error: BaseException | None) -> None:
        """Give back all that a call took that ended with ``error``; None if its end was not seen.

        For a thread that no signal interrupts. Blocks until the copies of the call are over, and
        for no earlier ones if it has no slot. Idempotent; does nothing for a save that was handed
        over as a whole.
        """
        undone = Latch()

        def undo() -> None:
            try:
                self.copier.abandon(save.copy)
                self.saves.drop(save, error or StagingError("save() was interrupted"))
            finally:
                undone.open()

        if save.slot is None:
            undo()
        else:
            self.copier.when_copied(undo)
            undone.wait()

    def _thread_failed(self, error: BaseException) -> None:
        """Fail what is being staged: the job that has failed may have been a part of it."""
        for save in self.saves.being_staged() if hasattr(self, "saves") else ():
            lost = StagingError(f"a thread that stages step {save.step} failed: {error!r}")
            self.saves.fail(save, lost)
            self.books.submit(functools.partial(self.undo, save, lost))

    # What managers and adapters ask for -----------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this rank acts for all others that share its run directory."""
        return self.node.rank == 0

    @property
    def node_local(self) -> bool:
        """Whether each node keeps its own part of every checkpoint."""
        return isinstance(self.node, NodeWorld)

    @property
    def mirroring(self) -> Mirroring:
        """The checkpoints on their way to the mirror."""
        return self.saves.mirroring

    def is_busy(self) -> bool:
        """Whether all staging slots are taken."""
        return self.pool.is_busy()

    def slot_patience_s(self) -> float | None:
        """How long a save waits for memory without progress; None in the thread that frees it."""
        return None if self.connection.is_this_thread() else self.options.slot_patience_s

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the checkpoints that exist for all ranks, in the order of their commits."""
        return self.shared.checkpoints()

    def look(self) -> RunView:
        """Return the checkpoints of the run's directories, without those of its mirror."""
        return self.run.look(mirror=False)

    def add_mirror(self, view: RunView) -> RunView:
        """Return a view to which the mirror is added, if it can be listed now; blocking."""
        return self.run.with_mirror(view)

    def loaded(self) -> CheckpointInfo | None:
        """Read the checkpoint that this session goes on from; None if it began without one.

        Raises:
            CheckpointNotFoundError: It was deleted or replaced since.
        """
        parent = self.lineage.parent
        return None if parent is None else self.run.find(*parent)

    def ancestor(self, upto: int) -> int:
        """Return the newest ancestor step up to ``upto``; all ranks must call this."""
        return self.shared.ancestor(upto)

    def refuse_damaged(self) -> None:
        """Raise if the run has checkpoints, but none that can be read."""
        self.look().limited_to(()).refuse_damaged(None)

    def settle(self, step: int | None) -> None:
        """Wait for the outcomes of saves of ``step``, or all; failures are logged, not raised."""
        self.saves.settle(step)

    def hold(self, steps: Sequence[int], existing: Collection[int]) -> None:
        """Hold ``steps``, oldest first, for the mirror.

        With ``backlog="drop"``, a save without room may delete each. ``existing`` are the steps
        that there are: a step held before that is not among them was deleted like that.
        """
        for step in {*self.droppable, *self._spared}.difference(existing):
            self.lineage.remove(step)
            self._spared.discard(step)
        mirror = self.options.mirror
        self.droppable = tuple(steps) if mirror is not None and mirror.backlog == "drop" else ()

    def spare(self, step: int) -> bool:
        """Stop holding ``step``, so later saves do not delete it; return whether it was held."""
        if step not in self.droppable:
            return False
        self._spared.add(step)
        self.droppable = tuple(each for each in self.droppable if each != step)
        return True

    def delete(
        self, steps: Sequence[int], *, spare_read: bool = False, mirror: bool = False
    ) -> Future[dict[int, SidesaveError]]:
        """Delete steps at once; the future has an error for each that stays.

        With ``spare_read`` a step that is being read stays, with EBUSY. With ``mirror`` they are
        deleted in the mirror alone.
        """
        self.check_open()
        request = Delete(
            attempt=1,
            save_id=self.turns.new_id(),
            steps=tuple(steps),
            sequence=self.turns.last,
            retry=False,
            spare_read=spare_read,
            mirror=mirror,
        )
        saves, connection, copier = self.saves, self.connection, self.copier
        future = Future[dict[int, SidesaveError]]()
        future.set_running_or_notify_cancel()

        def submit() -> None:
            saves.deletions.add(request, future)
            connection.submit(request)

        self.books.submit(lambda: copier.when_copied(submit))
        return future

    def at_end(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` at the session's end, even if the checkpointer was never closed.

        It is called in a thread of the session, and must neither block nor raise.
        """
        self._at_end.append(callback)

    # The end, in one thread that nothing interrupts -----------------------------------------------

    def stop(self) -> None:
        """End what a failed start has left, quickly: a daemon that starts is not waited for."""
        self._stopped = True
        if hasattr(self, "connection"):
            self.connection.give_up_starting(_START_PATIENCE_S)
        self.close(_START_PATIENCE_S)

    def close(self, patience_s: float) -> None:
        """End everything; the daemon may take ``patience_s`` seconds to finish. Idempotent."""
        self.books.call(functools.partial(self._end, patience_s))
        self.books.close(_THREAD_TIMEOUT_S)

    def drop(self) -> None:
        """End what a dropped checkpointer has left, without blocking; saves finish first."""
        if self.pid != os.getpid() or self.ended:
            return
        self.closed = True  # first: retention deletes nothing more

        def close() -> None:
            try:
                if hasattr(self, "saves"):
                    self.saves.wait(EXIT_TIMEOUT_S)
                    self.saves.raise_failure()
            except SidesaveError as error:
                logger.error("a save to %s failed: %s", self.directory, error)
            finally:
                self._end(10.0)

        close_dropped(self.books, self.directory, close)

    def _end(self, patience_s: float) -> None:
        if hasattr(self, "copier"):
            self.copier.close()
        if hasattr(self, "connection"):
            self.connection.close(patience_s)
            if self.connection.reaper is not None and not self.connection.released:
                leave_to_finish(self.connection.reaper, self.directory)
        if hasattr(self, "saves"):
            self.saves.abandon()
        if hasattr(self, "pool"):
            self.pool.close()
        self.encryption.forget()
        remembers, self._remembers = self._remembers, False
        if remembers:
            urls.forget(self.directory)
        remembers, self._remembers_mirror = self._remembers_mirror, False
        if remembers:
            urls.forget(self.run.mirror.place)
        left, self._left = self._left, True
        if not left:
            self.world.close()
        self.ended = True
        for callback in self._at_end:
            callback()
        self.books.end()
