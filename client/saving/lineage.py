"""The order of saves, the ancestors of the next save, and the steps that may be replaced.

``latest`` is the checkpoint that was committed last, not the highest step: after going back to step
50, an abandoned step 100 is neither an ancestor nor protected from being replaced.
"""

from __future__ import annotations

import collections
import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from sidesave.client import arguments
from sidesave.errors import CheckpointExistsError, SidesaveError, StagingError, StateMismatchError
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.format.names import step_directory
from sidesave.writer_daemon.format.rollback import Rollbacks

if TYPE_CHECKING:
    from sidesave.client.daemon_link.connection import Connection
    from sidesave.client.ranks.group import World
    from sidesave.client.saving.save import Save

logger = logging.getLogger(__name__)

_FIRST_ID: Final = 1 << 60
"""First id of requests that are not saves; a save's id is its turn, the same on all ranks."""
_MAX_SAVED: Final = 1000
"""Number of past turns remembered; a rank that has missed more never catches up."""
_LEFTOVERS: Final = 1 << 20
"""The number of sequences left to earlier sessions; and more than sessions use in one second."""


def sequence_of_now() -> int:
    """Return a sequence that no session has given away, whatever of the run cannot be read now."""
    return int(time.time() * _LEFTOVERS)


def lineage(
    checkpoints: Iterable[CheckpointInfo], tip: CheckpointInfo, rollbacks: Rollbacks
) -> set[int]:
    """Return the steps that ``tip`` descends from, and its own.

    Nothing that the run had given up before ``tip`` was saved is an ancestor of it. Of the rest,
    earlier saves of a session that was resumed from the same parent are ancestors; then the chain
    goes on at the parent.
    """
    by_session: dict[str, list[CheckpointInfo]] = {}
    line = rollbacks.before(tip.sequence)
    checkpoints = [
        info
        for info in checkpoints
        if info.sequence <= tip.sequence and line.order(info.sequence)[0]
    ]
    newest: tuple[int, str] | None = (tip.step, tip.session)
    oldest: int | None = None
    for info in checkpoints:
        by_session.setdefault(info.session, []).append(info)
    steps: set[int] = set()
    visited: set[tuple[int, str]] = set()
    while newest is not None and newest not in visited:
        visited.add(newest)
        step, session = newest
        saved = sorted(by_session.get(session, []), key=lambda info: info.sequence)
        upto = [info for info in saved if info.step == step] or [
            info for info in saved if info.step < step
        ]
        if not saved and oldest is not None:
            # All of that session was deleted, and with it where it came from: nothing older counts
            # as given up.
            steps.update(info.step for info in checkpoints if info.sequence < oldest)
            break
        if not upto:  # removed since, with all that came before
            newest = saved[0].parent if saved else None
            oldest = saved[0].sequence if saved else None
            continue
        tip = upto[-1]
        oldest = saved[0].sequence
        steps.update(
            info.step
            for info in saved
            if info.parent == tip.parent and info.sequence <= tip.sequence
        )
        newest = tip.parent
    return steps


class Turns:
    """The order of saves: by its turn all ranks know which save is meant. Thread-safe."""

    def __init__(self, world: World, session: str, connection: Connection) -> None:
        """Start before the first turn."""
        self._world = world
        self._session = session
        self._connection = connection
        self._lock = threading.RLock()
        self._ids = itertools.count(_FIRST_ID)
        self._saved: collections.deque[tuple[int, int]] = collections.deque(maxlen=_MAX_SAVED)
        self._caught_up = 0
        self.last = 0
        """The latest turn."""

    def new_id(self) -> int:
        """Return an id for a request that is not a save."""
        return next(self._ids)

    def take(self, save: Save) -> None:
        """Give a save the next turn. Idempotent, so that an interrupted call can be ended."""
        with self._lock:
            if not save.sequence:
                save.sequence = self.last + 1
            self.last = max(self.last, save.sequence)

    def remember(self, save: Save) -> None:
        """Remember which step was saved in the turn."""
        assert save.step is not None
        self._saved.append((save.sequence, save.step))

    def refuse(self, save: Save, error: BaseException) -> None:
        """Report to the other ranks that this one takes no part in a save they may have begun."""
        self._refuse(save.handle.step, save.sequence, error)

    def catch_up(self, save: Save, other: int) -> None:
        """Take the turns that this rank has missed, if it has saved step ``other`` before.

        Another rank saved that step in the turn of ``save``. This rank takes the missed turns
        without saving, refuses them at once, and is then where the others are.
        """
        earlier = [
            sequence
            for sequence, step in list(self._saved)
            if step == other and sequence < save.sequence
        ]
        # the failure of another save was the first to show it
        if not earlier or save.sequence <= self._caught_up:
            return
        missed = save.sequence - earlier[-1]
        calls = "a call" if missed == 1 else f"{missed} calls"
        text = (
            f"rank {self._world.rank} has missed {calls} of save() before step {other}, and "
            "catches up"
        )
        logger.warning("%s: every rank has to save the same steps in the same order", text)
        for _ in range(missed):
            with self._lock:
                self.last += 1
                self._caught_up = self.last
            self._refuse(save.step, self._caught_up, StateMismatchError(text))

    def _refuse(self, step: object, sequence: int, error: BaseException) -> None:
        if self._world.size == 1:
            return
        failure = protocol.failure(
            1, None, error if isinstance(error, SidesaveError) else StagingError(str(error))
        )
        request = protocol.Refuse(
            attempt=1,
            save_id=self.new_id(),
            step=step if type(step) is int and 0 <= step <= arguments.MAX_STEP else 0,
            session=self._session,
            sequence=sequence,
            rank=self._world.rank,
            world_size=self._world.size,
            error=failure.error,
            message=failure.message,
            errno=failure.errno,
            path=failure.path,
            retry=False,
        )
        self._connection.submit(request)


class Lineage:
    """The ancestors of a session's next save. Thread-safe."""

    def __init__(self, directory: str, turns: Turns) -> None:
        """Begin without a past."""
        self._directory = directory
        self._turns = turns
        self._lock = threading.RLock()
        self._since = 0
        self._on_disk: set[int] = set()
        self._committed: dict[int, int] = {}
        """The sequence of this session's last commit of each step."""
        self._parent: tuple[int, str] | None = None
        self._ancestors: set[int] = set()

    def begin(
        self,
        existing: list[CheckpointInfo],
        everything: list[list[CheckpointInfo]],
        rollbacks: Rollbacks,
        *,
        leftovers_before: int = 0,
    ) -> None:
        """Go on from the latest of the ``existing`` checkpoints, which is the last.

        ``everything`` also holds what may be in the way, where nodes keep their own parts. Earlier
        sessions may have saved more than that, which is unfinished or cannot be read now: then
        ``leftovers_before`` is the :func:`sequence_of_now`, else 0.
        """
        known = [info for infos in everything for info in infos]
        last = max([rollbacks.last, *(info.sequence for info in known)])
        # by the clock, as a session may have begun behind such a gap and be unreadable too
        if leftovers_before:
            last = max(last + _LEFTOVERS, leftovers_before)
        self._turns.last = last
        self._on_disk = {info.step for info in known}
        if existing and not existing[-1].given_up:
            self.go_back_to(existing[-1], existing, rollbacks)

    @property
    def parent(self) -> tuple[int, str] | None:
        """Step and session of the checkpoint that this session was resumed from."""
        with self._lock:
            return self._parent

    @property
    def ancestors(self) -> frozenset[int]:
        """The steps that the next save descends from."""
        with self._lock:
            return frozenset(self._ancestors)

    def go_back_to(
        self, info: CheckpointInfo, checkpoints: list[CheckpointInfo], rollbacks: Rollbacks
    ) -> int:
        """Go on from ``info``, one of ``checkpoints``.

        Returns the turn after which saves descend from it.
        """
        with self._lock:
            ancestors = lineage(checkpoints, info, rollbacks)
            # Saves committed since ``checkpoints`` were listed have replaced ancestors.
            ancestors -= {step for step, last in self._committed.items() if last > info.sequence}
            since = self._turns.last
            # At once, as nothing is called in between.
            self._since, self._parent, self._ancestors = since, (info.step, info.session), ancestors
            return since

    def add(self, info: CheckpointInfo) -> None:
        """A save of this session was committed."""
        with self._lock:
            self._committed[info.step] = info.sequence
            if info.sequence > self._since:
                self._ancestors.add(info.step)
            else:  # it was called before training went back, and has replaced an ancestor if any
                self._ancestors.discard(info.step)
            self._on_disk.add(info.step)

    def remove(self, step: int) -> None:
        """A step was deleted."""
        with self._lock:
            self._ancestors.discard(step)
            self._on_disk.discard(step)

    def may_replace(self, step: int, *, overwrite: bool, pending: int) -> tuple[bool, bool]:
        """Whether a save may replace its step's directory, and whether there is or will be one.

        ``pending`` is the place of the last save of that step that is under way, 0 for none.

        Raises:
            CheckpointExistsError: The step is taken.
        """
        with self._lock:
            taken = step in self._ancestors or pending > self._since
            is_there = step in self._on_disk or pending > 0
            if overwrite or (not taken and is_there):
                return True, is_there
            if taken:
                raise CheckpointExistsError(
                    errno.EEXIST,
                    (
                        f"step {step} is already saved or being saved; save another step, or pass "
                        "overwrite=True"
                    ),
                    os.path.join(self._directory, step_directory(step)),
                )
            return False, is_there
