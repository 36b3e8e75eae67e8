"""The parts a checkpointer runs on: one daemon, some staging slots, one copier. Started and closed together.

Nothing here refers to the checkpointer, so that one which is dropped without ``close()`` is closed all the same.
"""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, Protocol

from sidesave.client.daemon_link.connection import Connection
from sidesave.client.options import Options
from sidesave.client.ranks.encryption import RunEncryption
from sidesave.client.ranks.group import World, tidy
from sidesave.client.runs import catalog, finding
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.runs.run import Run
from sidesave.client.runs.save_requests import forget_requests
from sidesave.client.saving.congestion import Congestion
from sidesave.client.saving.in_flight import SaveInFlight, SavesInFlight
from sidesave.client.saving.lineage import Lineage
from sidesave.client.saving.mirroring import Mirroring
from sidesave.client.saving.own_history import OwnHistory
from sidesave.client.saving.pace import Pacer
from sidesave.client.saving.shared_run import SharedRun, common, from_json, to_json
from sidesave.errors import ClosedError, SidesaveError
from sidesave.stager.copy.copier import Copier
from sidesave.stager.copy.pool import SlotPool
from sidesave.stager.signal_safe import Worker
from sidesave.writer_daemon.format import rollback
from sidesave.writer_daemon.format.rollback import Rollbacks
from sidesave.writer_daemon.protocol import Boot
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S: Final = 600.0
_THREAD_TIMEOUT_S: Final = 10.0
_START_PATIENCE_S: Final = 5.0
"""What a daemon has to end whose checkpointer failed to start."""
_FIRST_ID: Final = 1 << 60
"""Of requests that are no saves: a save is known by its place, which is the same on all ranks."""


class Session:
    """The parts of one checkpointer, which are there from :meth:`start` on, and their life cycle."""

    id: str
    copier: Copier
    connection: Connection
    pool: SlotPool
    saves: SavesInFlight
    lineage: Lineage
    history: OwnHistory
    shared: SharedRun

    def __init__(self, world: World, node: World, run: Run, options: Options, storage_options: bytes) -> None:
        """Nothing runs yet. The world is left at the end. ``storage_options`` are encoded, and may be secret."""
        self.world, self.node, self.run, self.options = world, node, run, options
        self.directory, self.pid = run.directory, os.getpid()
        self._storage_options = storage_options
        self.books = Worker("sidesave-books")
        self.pacer = Pacer()
        self.congestion = Congestion(run.directory, tells=urls.is_url(run.directory))
        self.ids = itertools.count(_FIRST_ID)
        self.droppable: tuple[int, ...] = ()
        """Steps of which a save that finds no room may delete each, the oldest first."""
        self.closed = self._stopped = self.ended = self._left = False
        self._remembers = self._remembers_mirror = False
        self.encryption = RunEncryption(run.directory, run.mirror.place, options.encryption)

    # The start -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything, together with the other ranks; where this raises, :meth:`stop` has to follow."""
        if urls.is_url(self.directory):
            urls.remember(self.directory, urls.decode_options(self._storage_options))
            self._remembers = True
        if urls.is_url(self.run.mirror.place):
            urls.remember(self.run.mirror.place, urls.decode_options(self._storage_options))
            self._remembers_mirror = True
        self.encryption.remember(self.options.daemon.fallback_directory)
        self._open()
        for name in self.connection.recovered:
            logger.info("finished %s, which a dead session had left", name)
        for name in self.connection.removed:
            logger.info("removed %s, which a dead session had left", name)

    def _open(self) -> None:
        """The first rank of each node opens the directory, and settles what is there; the others join its session."""
        world, options, leads = self.world, self.options, self.node.rank == 0
        self.id = world.gather("a session", secrets.token_hex(8))[0]
        self.encryption.agree(world, self.node, self.id)
        existing: list[CheckpointInfo] = []
        leftovers, rollbacks = False, Rollbacks()
        with world.raise_together("cannot open the run directory"):
            self.copier = self.books.call(lambda: Copier(overlap=options.overlap, validate=options.validate))
            if leads:
                self.books.call(self._start_daemon)
                leftovers, rollbacks, existing = self.books.call(self._look_around)
        answers = world.gather("what is there", [leftovers, rollbacks.pairs, to_json(existing)] if leads else None)
        views = [answer for answer in answers if answer is not None]
        agreed = Rollbacks(tuple((target, last) for target, last in views[0][1]))
        with world.raise_together("cannot start its daemon"):
            if not leads:
                self.books.call(self._start_daemon)
            elif rollbacks != agreed:  # nodes that keep their own parts, of which some have crashed on going back
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
            {(info.session, info.sequence) for info in complete},
        )
        self.lineage.begin(complete, everything, after=agreed.last, leftovers=any(left for left, *_ in views))

    def _look_around(self) -> tuple[bool, Rollbacks, list[CheckpointInfo]]:
        """Whether something may still be finished, where the run has gone back, and what is there."""
        tidy(self.directory)
        if not urls.is_url(self.directory):  # where requests are files
            forget_requests(self.directory)
        self.run.remember_fallbacks()
        self.encryption.write_down()
        leftovers = bool(self.connection.left)
        leftovers |= self.run.has_leftovers_elsewhere()
        self.run.mirror.adopt_rollbacks(self.directory)
        rollbacks = catalog.read_rollbacks(self.directory, strict=True)
        checkpoints, reached = self.run.scan_all(refuse_newer=True)
        leftovers |= not reached  # else its places in the order of commits would be given away twice
        self.run.tell_elsewhere(checkpoints, alone=self.world.size == 1)
        return leftovers, rollbacks, checkpoints

    def _start_daemon(self) -> None:
        options = self.options
        self.lineage = Lineage(self.directory)
        self.saves = SavesInFlight(
            self.directory,
            bearable_failures=options.bearable_failures,
            logs_failures=self.world.size > 1,
            release_slot=self._release_slot,
            on_committed=self.lineage.add,
            on_ended=lambda entry: self.history.ended(entry),
        )
        self.saves.hurry = self.pacer.lift
        self.saves.on_written = self.congestion.wrote
        self.saves.mirroring = Mirroring(options.daemon.mirror, self.id, leads=self.world.rank == 0)
        boot = Boot(
            attempt=0,
            directory=self.directory,
            session=self.id,
            rank=self.node.rank,
            world_size=self.node.size,
            trainer_pid=self.pid,
            encrypts=bool(self.encryption),
            storage_options=self._storage_options,
            options=options.daemon,
        )
        connection = self.connection = Connection(boot, self.saves.receive, self.saves.lose)
        budget = options.max_host_memory_bytes
        self.pool = SlotPool(options.slots, budget, connection.attach, connection.detach)
        self.history = OwnHistory(self.directory, options.daemon.fallback_directory, self.id, connection)
        self.connection.start()
        if self._stopped:  # by the main thread, which did not see the connection yet
            self.connection.give_up_starting(_START_PATIENCE_S)
        self.connection.wait_ready()

    def _release_slot(self, entry: SaveInFlight) -> None:
        self.pacer.ended(entry.sequence)
        self.pool.release(entry)

    # Meanwhile -------------------------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raise ``ClosedError`` in a forked child."""
        if self.pid != os.getpid():
            raise ClosedError(
                f"this checkpointer belongs to process {self.pid}; a forked child cannot use it, make one of its own"
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

    # The end, in one thread that nothing interrupts --------------------------------------------------------------

    def stop(self) -> None:
        """End what a start that failed has left, and keep the failure short: a daemon that starts is not waited for."""
        self._stopped = True
        if hasattr(self, "connection"):
            self.connection.give_up_starting(_START_PATIENCE_S)
        self.close(_START_PATIENCE_S)

    def close(self, patience_s: float) -> None:
        """End everything; the daemon may take ``patience_s`` seconds to finish. Idempotent."""
        self.books.call(functools.partial(self._end, patience_s))
        self.books.close(_THREAD_TIMEOUT_S)

    def drop(self) -> None:
        """End what a checkpointer dropped without ``close()`` has left, without waiting: saves finish first."""
        if self.pid != os.getpid() or self.ended:
            return

        def work() -> None:
            try:
                if hasattr(self, "saves"):
                    self.saves.wait(_EXIT_TIMEOUT_S)
                    self.saves.raise_failure()
            except SidesaveError as error:
                logger.error("a save to %s failed: %s", self.directory, error)
            finally:
                self._end(10.0)
                _dropped.discard(self)

        _dropped.add(self)
        self.books.submit(work)

    def _end(self, patience_s: float) -> None:
        if hasattr(self, "copier"):
            self.copier.close()
        if hasattr(self, "connection"):
            self.connection.close(patience_s)
            if self.connection.reaper is not None and not self.connection.released:
                _finishing[self.connection.reaper] = finding.place_of(self.directory)
        if hasattr(self, "saves"):
            self.saves.abandon()
            self.saves.mirroring.abandon()
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
            self.congestion.close()
            self.world.close()
        self.ended = True
        self.books.end()


class _Checkpointer(Protocol):
    @property
    def directory(self) -> str: ...

    def close(self, timeout_s: float | None = None) -> None: ...


_open: weakref.WeakSet[_Checkpointer] = weakref.WeakSet()
_dropped: set[Session] = set()
"""Of checkpointers that were dropped and are being closed."""
_finishing: dict[threading.Thread, str] = {}
"""Where daemons finish that were left to do so, by what ends with each."""
_registered: Callable[[], None] | None = None


def close_at_exit(checkpointer: _Checkpointer) -> None:
    """Have an unclosed checkpointer closed when the interpreter ends, and never in a forked child."""
    global _registered
    _open.add(checkpointer)
    if _registered is None:
        _registered = atexit.register(_close_all)


def was_closed(checkpointer: _Checkpointer) -> None:
    """Take back :func:`close_at_exit`; idempotent."""
    _open.discard(checkpointer)


def _close_all() -> None:
    for checkpointer in list(_open):
        try:
            checkpointer.close(_EXIT_TIMEOUT_S)
        except SidesaveError as error:
            logger.error("a save failed: %s", error)
    _await_dropped(None)


def await_predecessors(directory: str, timeout_s: float) -> None:
    """Wait for what this process has had in ``directory``: checkpointers that nobody refers to, daemons left behind.

    For the daemons ``timeout_s`` at most.
    """
    place = finding.place_of(directory)
    if any(finding.place_of(other.directory) == place for other in _open):
        gc.collect()  # it may be one that only refers to itself
    _await_dropped(place)
    deadline = time.monotonic() + timeout_s
    for reaper, where in list(_finishing.items()):
        if where == place:
            reaper.join(max(0.0, deadline - time.monotonic()))
        if not reaper.is_alive():
            _finishing.pop(reaper, None)


def _await_dropped(place: str | None) -> None:
    for session in list(_dropped):
        if session.pid == os.getpid() and place in (None, finding.place_of(session.directory)):
            session.books.close(_EXIT_TIMEOUT_S)
