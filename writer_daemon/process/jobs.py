"""The life of a save as a pure state machine: an event comes in, actions go out.

No I/O, no clock, no threads.

::

    QUEUED ──> WRITING ──> WRITTEN ──> COMMITTING ──> done (committed)
                  │                        │
                  └────────────────────────┴────────> done (failed; partial bytes reclaimed)

Saves are written one at a time, in the order of their arrival: two at once would share the disk's
bandwidth and make both late. They are committed in that order, too. If one process saves alone, the
next save is written after the commit. With several ranks a commit waits for the others, and the
next save is written meanwhile. A queued save also fails when storage stays stuck in the save before
it. The property tests check these invariants:

* a save is answered by exactly one of COMMITTED and FAILED, and WRITTEN comes before COMMITTED;
* at most one write and one commit are in progress; for a process that saves alone, only one of
  the two;
* the daemon exits when nothing is left to do, and not before.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.protocol import (
    Committed,
    Delete,
    Deleted,
    Failed,
    Message,
    Progress,
    Refuse,
    Save,
    Written,
)


class Phase(enum.Enum):
    """The phase of a save."""

    QUEUED = "queued"
    WRITING = "writing"
    WRITTEN = "written"
    COMMITTING = "committing"


# Events -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """A save arrived as SAVE, or was found staged in the memory of a dead trainer."""

    save: Save


@dataclass(frozen=True, slots=True)
class Watched:
    """An earlier daemon wrote this save; only its commit is open."""

    save: Save


@dataclass(frozen=True, slots=True)
class Progressed:
    """More bytes of the save being written have reached storage."""

    save_id: int
    nbytes: int
    total_nbytes: int


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """The rank's files and record are durable (``error`` None), or the write failed."""

    save_id: int
    nbytes: int
    seconds: float
    error: Failed | None = None


@dataclass(frozen=True, slots=True)
class CommitEnded:
    """The step's directory has its name, and holds ``info`` (``error`` None), or the commit failed.

    ``name`` is the name of the directory, or its path if that is not in the run directory.
    """

    save_id: int
    name: str = ""
    info: CheckpointInfo | None = None
    error: Failed | None = None


@dataclass(frozen=True, slots=True)
class DeleteRequested:
    """DELETE arrived."""

    request: Delete


@dataclass(frozen=True, slots=True)
class DeleteEnded:
    """The steps are deleted (``error`` None), except the ``failures``; or the deletion failed."""

    save_id: int
    error: Failed | None = None
    failures: tuple[Failed, ...] = ()


@dataclass(frozen=True, slots=True)
class RefusalRequested:
    """REFUSE arrived."""

    request: Refuse


@dataclass(frozen=True, slots=True)
class RefusalEnded:
    """The refusal is stored for the other ranks, if storage worked.

    ``error`` is the answer to the trainer.
    """

    save_id: int
    error: Failed


@dataclass(frozen=True, slots=True)
class Waited:
    """A commit still waits for other ranks, and storage answers."""

    save_id: int


@dataclass(frozen=True, slots=True)
class Stalled:
    """No byte has moved for the stall deadline."""

    error: Failed


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Finish the open saves and exit: the trainer is gone or sent DRAIN, or a signal came."""


Request = Submitted | Watched | DeleteRequested | RefusalRequested | DrainRequested
"""Events from outside the storage thread; every other event shows that storage makes progress."""
Event = (
    Submitted
    | Watched
    | Progressed
    | WriteEnded
    | CommitEnded
    | DeleteRequested
    | DeleteEnded
    | RefusalRequested
    | RefusalEnded
    | Waited
    | Stalled
    | DrainRequested
)


# Actions ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartWrite:
    """Write the save's files and its record; without ``memory``, adopt an earlier daemon's."""

    save: Save
    memory: bool


@dataclass(frozen=True, slots=True)
class StartCommit:
    """Publish the manifest and give the directory its name."""

    save: Save


@dataclass(frozen=True, slots=True)
class StartDelete:
    """Delete checkpoints; every save submitted before them has its outcome."""

    request: Delete


@dataclass(frozen=True, slots=True)
class StartRefusal:
    """Report to the other ranks that this one will not take part."""

    request: Refuse


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Remove the leftovers of a failed save; ``failure`` is why it failed."""

    save: Save
    failure: Failed


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the trainer."""

    message: Message


@dataclass(frozen=True, slots=True)
class Exit:
    """Nothing is left to do."""


Action = StartWrite | StartCommit | StartDelete | StartRefusal | Reclaim | Send | Exit


@dataclass(slots=True)
class _Job:
    save: Save
    memory: bool
    phase: Phase = Phase.QUEUED
    # Also true for a stalled save, reported as failed while its thread is still stuck.
    answered: bool = False
    failure: Failed | None = None


@dataclass(slots=True)
class _Deletion:
    request: Delete
    # The saves before it, which must end first: one of them may make the deletion valid.
    behind: set[int]
    started: bool = False
    answered: bool = False


@dataclass(slots=True)
class Jobs:
    """All saves that a daemon works on."""

    attempt: int
    _queue: list[_Job] = field(default_factory=list[_Job])
    _deletions: list[_Deletion] = field(default_factory=list["_Deletion"])
    _refusals: set[int] = field(default_factory=set[int])
    _draining: bool = False
    _seen: set[int] = field(default_factory=set[int])

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def active(self) -> Save | None:
        """The save being written, or else committed."""
        job = self._in_phase(Phase.WRITING) or self._in_phase(Phase.COMMITTING)
        return None if job is None else job.save

    @property
    def awaited(self) -> Save | Delete | None:
        """The save, or else the deletion, that storage is working on."""
        return self.active or next(
            (deletion.request for deletion in self._deletions if deletion.started), None
        )

    def knows(self, save_id: int) -> bool:
        """Whether this save was ever accepted by this daemon."""
        return save_id in self._seen

    def handle(self, event: Event) -> list[Action]:
        """Handle one event; returns the actions, in order."""
        actions: list[Action] = []
        match event:
            case Submitted(save) | Watched(save):
                # A repeated SAVE is the same save: it is being answered, or was answered.
                if save.save_id not in self._seen:
                    self._seen.add(save.save_id)
                    self._queue.append(_Job(save, memory=isinstance(event, Submitted)))
            case Progressed(save_id, nbytes, total_nbytes):
                if not self._answered(save_id):
                    progress = Progress(
                        attempt=self.attempt,
                        save_id=save_id,
                        nbytes=nbytes,
                        total_nbytes=total_nbytes,
                    )
                    actions.append(Send(progress))
            case WriteEnded(save_id, nbytes, seconds, error):
                job = self._expect(save_id, Phase.WRITING)
                if error is not None or job.answered:
                    if error is None and job.failure is not None:
                        actions.append(Reclaim(job.save, job.failure))
                    self._finish(job, error, actions)
                else:
                    actions.append(
                        Send(
                            Written(
                                attempt=self.attempt,
                                save_id=save_id,
                                nbytes=nbytes,
                                seconds=seconds,
                            )
                        )
                    )
                    job.phase = Phase.WRITTEN
            case CommitEnded(save_id, name, info, error):
                job = self._expect(save_id, Phase.COMMITTING)
                if info is not None and not job.answered:
                    answer = Committed(
                        attempt=self.attempt, save_id=save_id, name=name, nbytes=info.nbytes
                    )
                    actions.append(Send(answer))
                    job.answered = True
                self._finish(job, error, actions)
            case DeleteRequested(request):
                if request.save_id not in self._seen:
                    self._seen.add(request.save_id)
                    self._deletions.append(
                        _Deletion(request, {job.save.save_id for job in self._queue})
                    )
            case DeleteEnded(save_id, error, failures):
                (deletion,) = [each for each in self._deletions if each.request.save_id == save_id]
                self._deletions.remove(deletion)
                if not deletion.answered:
                    actions.append(
                        Send(
                            error
                            or Deleted(attempt=self.attempt, save_id=save_id, failures=failures)
                        )
                    )
            case RefusalRequested(request):
                if request.save_id not in self._seen:
                    self._seen.add(request.save_id)
                    self._refusals.add(request.save_id)
                    actions.append(StartRefusal(request))
            case RefusalEnded(save_id, error):
                self._refusals.remove(save_id)
                actions.append(Send(error))
            case Waited():
                pass
            case Stalled(error):
                busy = [
                    job
                    for phase in (Phase.WRITING, Phase.COMMITTING)
                    if (job := self._in_phase(phase))
                ]
                stuck = [job for job in busy if not job.answered]
                for job in stuck:
                    job.answered, job.failure = True, replace(error, save_id=job.save.save_id)
                    is_named = job.phase is Phase.COMMITTING  # the step may get its name any time
                    changes = {"error": "CommitUnknownError"} if is_named else {}
                    actions.append(Send(replace(job.failure, **changes)))
                if not stuck:
                    # Stuck for another deadline, or in a deletion: later jobs would wait forever.
                    waiting = [
                        job for job in self._queue if job.phase in (Phase.QUEUED, Phase.WRITTEN)
                    ]
                    self._queue = [job for job in self._queue if job not in waiting]
                    actions += [Send(_late(error, job)) for job in waiting if not job.answered]
                    ids = [
                        deletion.request.save_id
                        for deletion in self._deletions
                        if not deletion.answered
                    ]
                    actions += [Send(replace(error, save_id=each)) for each in ids]
                    self._deletions = [
                        replace(deletion, answered=True)
                        for deletion in self._deletions
                        if deletion.started
                    ]
            case DrainRequested():
                self._draining = True
        self._advance(actions)
        return actions

    def _answered(self, save_id: int) -> bool:
        return not any(job.save.save_id == save_id and not job.answered for job in self._queue)

    def _in_phase(self, phase: Phase) -> _Job | None:
        return next((job for job in self._queue if job.phase is phase), None)

    def _expect(self, save_id: int, phase: Phase) -> _Job:
        job = self._in_phase(phase)
        assert job is not None and job.save.save_id == save_id, (save_id, phase, job)
        return job

    def _finish(self, job: _Job, error: Failed | None, actions: list[Action]) -> None:
        if error is not None and not job.answered:
            actions.append(Send(error))
        self._queue.remove(job)

    def _advance(self, actions: list[Action]) -> None:
        first = self._queue[0] if self._queue else None
        if first is not None and first.phase is Phase.WRITTEN:
            first.phase = Phase.COMMITTING
            actions.append(StartCommit(first.save))
        job = self._in_phase(Phase.QUEUED)
        if (
            job is not None
            and self._in_phase(Phase.WRITING) is None
            and (job is first or job.save.world_size > 1)
        ):
            job.phase = Phase.WRITING
            actions.append(StartWrite(job.save, job.memory))
        in_hand = {job.save.save_id for job in self._queue}
        for deletion in self._deletions:
            if not deletion.started and not deletion.behind & in_hand:
                deletion.started = True
                actions.append(StartDelete(deletion.request))
        if not self._queue and not self._deletions and not self._refusals and self._draining:
            actions.append(Exit())


def _late(error: Failed, job: _Job) -> Failed:
    """Return the answer to a save behind a stuck one; a written save may still be committed."""
    written = job.phase is Phase.WRITTEN
    return replace(
        error, save_id=job.save.save_id, **({"error": "CommitUnknownError"} if written else {})
    )
