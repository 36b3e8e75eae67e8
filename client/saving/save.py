"""One call of ``save()``: the resources taken for it, its progress, and its record."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field

from sidesave.client.saving.handle import SaveHandle
from sidesave.errors import CommitUnknownError, DaemonDiedError, SidesaveError
from sidesave.stager.copy.copier import StagingCopy
from sidesave.stager.copy.slot import StagingSlot
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.save_record import SaveRecord, describe_error, wall_clock_s


@dataclass(slots=True, eq=False)
class Save:
    """One call of ``save()``, from its start to its outcome; owns all that is taken for it.

    Its slot goes back once neither the trainer fills it nor the daemon needs it.

    Attributes:
        handle: What the call returns; its ``step`` may be invalid until ``step`` is set.
        copy: The copies that go on after the call.
        step: The step, once it was checked.
        sequence: Its place in the order of saves; 0 before it has one.
        slot: Where the state is staged.
        staging_nbytes: Host memory of all slots then.
        info: The checkpoint to be; path and size are those of the commit.
        thread: The thread of the call.
        called: Time of the call, by the monotonic clock.
        called_s: The same in seconds since the epoch.
        reached: Times of ``laid_out`` (its slot has memory), ``returned`` and the phases
            ``staged``, ``written`` and ``committed``, by the same clock.
        replaces: Whether it takes the place of another save of its step.
        filling: Whether the slot may still be written to.
        released: Whether the daemon does not need the slot any more.
        abandoned: Whether a daemon that was left alone may still read the slot, so that it must not
            be voided.
        error: A copy of the error that it failed with. The error itself would keep the state alive
            by its traceback.
    """

    handle: SaveHandle
    copy: StagingCopy
    step: int | None = None
    sequence: int = 0
    slot: StagingSlot | None = None
    staging_nbytes: int | None = None
    info: CheckpointInfo | None = None
    thread: int = field(default_factory=threading.get_ident)
    called: float = field(default_factory=time.monotonic)
    called_s: float = field(default_factory=wall_clock_s)
    reached: dict[str, float] = field(default_factory=dict[str, float])
    replaces: bool = False
    filling: bool = True
    released: bool = False
    abandoned: bool = False
    error: SidesaveError | None = None

    def reach(self, phase: str) -> None:
        """Note the time of a phase, unless it was noted before."""
        self.reached.setdefault(phase, time.monotonic())

    def record(self, session: str, directory: str) -> SaveRecord:
        """Return what is known of the save now; its outcome is decided here alone."""
        assert self.step is not None
        now_s = round(time.monotonic() - self.called, 6)
        # A copy, made at once: other threads add phases.
        seconds = {phase: round(at - self.called, 6) for phase, at in dict(self.reached).items()}
        outcome, path, nbytes = "saving", None, None
        name, message, number = (
            (None, None, None) if self.error is None else describe_error(self.error)
        )
        if self.handle.skipped:
            outcome = "skipped"
        elif self.error is not None:
            # A daemon that died, or was left alone, may have made it durable nevertheless.
            unknown = isinstance(self.error, (CommitUnknownError, DaemonDiedError))
            outcome = "unknown" if unknown else "failed"
        elif self.info is not None and "committed" in self.reached:
            outcome, nbytes = "committed", self.info.nbytes
            path = self.info.path if os.path.dirname(self.info.path) != directory else None
        return SaveRecord(
            step=self.step,
            session=session,
            outcome=outcome,
            save_id=self.sequence,
            sequence=None if self.info is None else self.sequence,
            error=name,
            message=message,
            errno=number,
            path=path,
            nbytes=nbytes,
            called_s=self.called_s,
            stall_s=seconds.get("returned", now_s),
            staged_s=seconds.get("staged"),
            written_s=seconds.get("written"),
            committed_s=seconds.get("committed"),
            called=self.called,
            ended_s=None if outcome == "saving" else seconds.get("committed", now_s),
            rank_nbytes=self.handle.nbytes,
            staging_nbytes=self.staging_nbytes,
        )
