"""The saves whose checkpoints are not in the mirror yet, as the daemon tells of them."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from sidesave import errors
from sidesave.client.saving.handle import SaveHandle
from sidesave.errors import (
    CommitUnknownError,
    InvalidArgumentError,
    SidesaveError,
    WriteStalledError,
)
from sidesave.stager.signal_safe import Monitor
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.format.names import step_directory
from sidesave.writer_daemon.protocol import Message

logger = logging.getLogger(__name__)

_NO_MIRROR: Final = "there is no mirror; name one with Checkpointer(directory, mirror=...)"
_NOT_HERE: Final = "what is mirrored is known to rank 0: ask the handle there"


@dataclass(slots=True)
class _Open:
    handle: SaveHandle
    committed_by: int | None = None
    """The number of the daemon that has committed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """The last reported state of a mirror, at most some seconds old while its daemon copies.

    Attributes:
        mirror: Where it is.
        checkpoints: How many are still to be copied; None before both places were compared.
        nbytes: Bytes of those; one that is being copied counts whole.
        nbytes_per_s: Bytes per second that go there now, also those of a file that is sent once
            more.
        last_step: What was mirrored last since the daemon started.
        error: What it fails of now; None while it works.
    """

    mirror: str
    checkpoints: int | None
    nbytes: int
    nbytes_per_s: float
    last_step: int | None
    error: SidesaveError | None


class Mirroring:
    """The ``mirrored`` futures of a session.

    Thread-safe: the daemon's messages arrive in the connection's thread.
    """

    def __init__(self, mirror: str = "", session: str = "", *, leads: bool = True) -> None:
        """Start empty; "" means no mirror. Only rank 0 ``leads``: its daemon copies for all."""
        self.mirror = mirror
        self._leads = leads
        self._session = session
        self._changed = Monitor()
        self._open: dict[int, _Open] = {}
        self._here: dict[str, int] = {}
        """Sequences of checkpoints in the run directory that are not mirrored, by name.

        Of earlier sessions only those of which the mirror has an older save.
        """
        self._there: dict[str, int] = {}
        """Sequences of the checkpoints in the mirror, by name."""
        self._replaced = set[str]()
        """Names this session saved again; a mirror not yet known may have older saves of them."""
        self._failures: list[SidesaveError] = []
        self._over: SidesaveError | None = None
        self._missing: frozenset[int] | None = None
        self._state = protocol.MirrorState(attempt=0)
        self._trouble = ""
        """The problem that was logged since a checkpoint was last copied."""
        self._watchers: list[Callable[[], object]] = []

    def begin(self, here: Iterable[CheckpointInfo], there: Iterable[CheckpointInfo]) -> None:
        """Note what earlier sessions left in the run directory and in the mirror, if it is known.

        What the daemon has told since its start may be newer.
        """
        with self._changed:
            for info in there:
                name = step_directory(info.step)
                self._there[name] = max(self._there.get(name, 0), info.sequence)
            for info in here:
                name = step_directory(info.step)
                if self._there.get(name, info.sequence) < info.sequence:
                    self._here[name] = info.sequence

    def add(self, sequence: int, handle: SaveHandle, *, replaces: bool = False) -> None:
        """A save that has just been called; ``replaces`` if it takes the place of another."""
        if replaces and self.mirror and self._leads:
            self._replaced.add(step_directory(handle.step))
        over = self._over
        if not self.mirror or not self._leads:
            over = InvalidArgumentError(_NOT_HERE if self.mirror else _NO_MIRROR)
        if over is not None:
            handle.mirrored.fail(over)
            return
        # first: an interrupt may come between
        handle.mirrored.add_done_callback(lambda done: self._forget(sequence))
        with self._changed:
            self._open[sequence] = _Open(handle)

    def receive(self, message: Message) -> None:
        """Handle a mirror message; of others, note only which daemon has committed a save."""
        match message:
            case protocol.Committed(save_id=sequence, attempt=attempt, name=name):
                with self._changed:
                    if self.mirror and self._leads:
                        self._here[name] = sequence
                    if sequence in self._open:
                        self._open[sequence].committed_by = attempt
            case protocol.Mirrored(session=session, sequence=sequence, name=name, error=failure):
                with self._changed:
                    entry = self._open.get(sequence) if session == self._session else None
                if entry is not None and failure is not None:
                    self._fail(entry, _from_wire(failure))
                if failure is None:
                    self._arrived(name, sequence)
                    self._trouble = ""
                if entry is not None and failure is None:
                    entry.handle.mirrored.resolve(os.path.join(self.mirror, name))
            case protocol.MirrorState():
                before, self._state = self._state, message
                self._hear_state(message)
                if dataclasses.replace(before, nbytes_per_s=0.0) != dataclasses.replace(
                    message, nbytes_per_s=0.0
                ):
                    for watcher in self._watchers:
                        watcher()
            case _:
                pass

    def _hear_state(self, state: protocol.MirrorState) -> None:
        if state.compared:
            with self._changed:
                self._missing = frozenset(state.missing)
                self._over = None  # of a daemon before this one
                self._changed.notify_all()
        error = None if state.error is None else _from_wire(state.error)
        if error is not None and state.over:
            logger.error(
                "the mirror %s is given up, and saves go on without it: %s", self.mirror, error
            )
            with self._changed:
                self._over = error
                entries = list(self._open.values())
                self._failures += () if entries else (error,)
                self._changed.notify_all()
            for entry in entries:
                self._fail(entry, error)
        elif error is not None and str(error) != self._trouble:
            self._trouble = str(error)
            logger.warning(
                "the mirror %s does not work now, and is tried again: %s", self.mirror, error
            )
        elif error is None and state.compared:
            # What an earlier daemon has committed is in one place or the other, or was deleted
            # before it was copied.
            with self._changed:
                lost = [
                    entry
                    for sequence, entry in self._open.items()
                    if entry.committed_by is not None
                    and entry.committed_by < state.attempt
                    and sequence not in state.missing
                ]
            for entry in lost:
                text = "it was deleted or replaced before it was copied"
                self._fail(entry, errors.CheckpointNotFoundError(errno.ENOENT, text, self.mirror))

    def status(self) -> MirrorStatus | None:
        """How the mirror stands; None where there is none, and on other ranks than 0."""
        state = self._state
        if not self.mirror or not self._leads:
            return None
        return MirrorStatus(
            mirror=self.mirror,
            checkpoints=len(state.missing) if state.compared else None,
            nbytes=state.nbytes,
            nbytes_per_s=state.nbytes_per_s,
            last_step=state.last_step,
            error=None if state.error is None else _from_wire(state.error),
        )

    def watch(self, callback: Callable[[], object]) -> None:
        """Have ``callback`` called when :meth:`status` has changed, in the connection's thread."""
        self._watchers.append(callback)

    def awaits(self, sequence: int) -> bool:
        """Whether the checkpoint of that ``sequence`` is still to be copied, or may be."""
        if not self.mirror or self._over is not None:
            return False
        return self._missing is None or sequence in self._missing or sequence in self._open

    def has_older(self, step: int) -> bool:
        """Whether the mirror lacks the last save of a step, and has an older one, or may have."""
        name = step_directory(step)
        with self._changed:
            under_way = [
                sequence for sequence, entry in self._open.items() if entry.handle.step == step
            ]
            last = max([self._here.get(name, 0), *under_way])
            is_unknown = self._missing is None and name in self._replaced
            return self._there.get(name, 0 if is_unknown else last) < last

    def _arrived(self, name: str, sequence: int) -> None:
        with self._changed:
            self._there[name] = sequence
            if self._here.get(name, 0) <= sequence:
                self._here.pop(name, None)
                self._replaced.discard(name)

    def removed(self, step: int) -> None:
        """Record that a step was deleted in the mirror."""
        with self._changed:
            self._there.pop(step_directory(step), None)

    def _fail(self, entry: _Open, error: SidesaveError) -> None:
        with self._changed:
            # One that is gone by then, as retention has it go, is no failure of the mirror.
            if not isinstance(error, errors.CheckpointNotFoundError) and self._failures[-1:] != [
                error
            ]:
                self._failures.append(error)
        entry.handle.mirrored.fail(error)

    def _forget(self, sequence: int) -> None:
        with self._changed:
            self._open.pop(sequence, None)
            self._changed.notify_all()

    def wait(self, timeout_s: float | None) -> None:
        """Block until all earlier saves and what past sessions left are mirrored, or will not be.

        Raises:
            WriteStalledError: ``timeout_s`` seconds passed first.
            InvalidArgumentError: There is no mirror. On other ranks than 0 this returns at once.
            SidesaveError: The first that kept a step from being mirrored, unless it was read from
                the handle's future. A step that was deleted or replaced before its turn is none.
        """
        if not self.mirror:
            raise InvalidArgumentError(_NO_MIRROR)
        waiting, left = set(self._open), self._missing

        def done() -> bool:
            nonlocal left
            left = self._missing if left is None else left
            earlier = (
                self._leads
                and self._over is None
                and (left is None or not left.isdisjoint(self._missing or ()))
            )
            return not earlier and waiting.isdisjoint(self._open)

        if not self._changed.wait_for(done, timeout_s):
            with self._changed:
                steps = sorted(
                    entry.handle.step for key, entry in self._open.items() if key in waiting
                )
            what = f"steps {steps} were" if steps else "what earlier sessions have left was"
            text = (
                f"{what} not mirrored within {timeout_s:g} s; {self._state.nbytes:,} bytes are to "
                "be copied"
            )
            raise WriteStalledError(text)
        with self._changed:
            failures, self._failures = self._failures, []
        for error in failures:
            if not error.was_read:
                raise error

    def abandon(self) -> None:
        """The checkpointer is closed: what is still open goes on without it."""
        with self._changed:
            entries = list(self._open.values())
        for entry in entries:
            text = (
                f"the checkpointer was closed before step {entry.handle.step} was mirrored; its "
                "daemon goes on"
            )
            entry.handle.mirrored.fail(CommitUnknownError(errno.ETIMEDOUT, text, self.mirror))


def _from_wire(failure: protocol.Failed) -> SidesaveError:
    return errors.from_wire(failure.error, failure.message, failure.errno, failure.path)
