"""The life of a save as a pure state machine: an event comes in, actions go out. No I/O, no clock, no threads.

::

    QUEUED ──> WRITING ──> WRITTEN ──> COMMITTING ──> done (committed)
                  │                        │
                  └────────────────────────┴────────> done (failed; partial bytes reclaimed)

Saves are written one at a time, in the order in which they came: two at once would share the disk's bandwidth and make
both late. They are committed in that order, too. Where one process saves alone, the next is written after the commit;
of several ranks a commit waits for the others, and meanwhile the next save is written. A queued save fails, too, when
storage stays stuck under the one before it. Invariants, which the property tests hold:

* a save is answered by exactly one of COMMITTED and FAILED, and WRITTEN comes before COMMITTED;
* at most one write and one commit are under way, and alone only one of both;
* the daemon exits only when nothing is left to do, and then always.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

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


# Events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """A save arrived: SAVE, or found staged in the memory of a dead trainer."""

    save: Save


@dataclass(frozen=True, slots=True)
class Watched:
    """An earlier daemon had written this save; only its commit is open."""

    save: Save


@dataclass(frozen=True, slots=True)
class Progressed:
    """More bytes of the save being written have reached storage."""

    save_id: int
    nbytes: int
    total_nbytes: int


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """The rank's files and record are durable (``error`` None), or not."""

    save_id: int
    nbytes: int
    seconds: float
    error: Failed | None = None


@dataclass(frozen=True, slots=True)
class CommitEnded:
    """The step's directory has its name (``error`` None), or not."""

    save_id: int
    name: str
    nbytes: int
    error: Failed | None = None


@dataclass(frozen=True, slots=True)
class DeleteRequested:
    """DELETE arrived."""

    request: Delete


@dataclass(frozen=True, slots=True)
class DeleteEnded:
    """The checkpoint is gone (``error`` None), or not."""

    save_id: int
    error: Failed | None = None


@dataclass(frozen=True, slots=True)
class RefusalRequested:
    """REFUSE arrived."""

    request: Refuse


@dataclass(frozen=True, slots=True)
class RefusalEnded:
    """The other ranks can learn of it, if storage worked; ``error`` is the answer to the trainer."""

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
"""What comes from outside; every other event tells that storage is alive."""
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


# Actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartWrite:
    """Write the save's files and publish its record; without ``memory`` an earlier daemon's record is adopted."""

    save: Save
    memory: bool


@dataclass(frozen=True, slots=True)
class StartCommit:
    """Publish the manifest and give the directory its name."""

    save: Save


@dataclass(frozen=True, slots=True)
class StartDelete:
    """Delete a checkpoint; every save submitted before has its outcome."""

    request: Delete


@dataclass(frozen=True, slots=True)
class StartRefusal:
    """Tell the other ranks that this one will not take part."""

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
    answered: bool = False  # a stalled save has been reported as failed, though its thread is still stuck
    failure: Failed | None = None


@dataclass(slots=True)
class _Deletion:
    request: Delete
    behind: set[int]  # the saves that came before it: one of them may be what makes it allowed
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
        """The save, or else the deletion, that storage works on."""
        return self.active or next((deletion.request for deletion in self._deletions if deletion.started), None)

    def knows(self, save_id: int) -> bool:
        """Whether this save was ever accepted by this daemon."""
        return save_id in self._seen

    def handle(self, event: Event) -> list[Action]:
        """Handle one event; returns the actions, in order."""
        actions: list[Action] = []
        match event:
            case Submitted(save) | Watched(save):
                # A repeated SAVE is the same save: the answer to the first is under way or was given.
                if save.save_id not in self._seen:
                    self._seen.add(save.save_id)
                    self._queue.append(_Job(save, memory=isinstance(event, Submitted)))
            case Progressed(save_id, nbytes, total_nbytes):
                if not self._answered(save_id):
                    progress = Progress(attempt=self.attempt, save_id=save_id, nbytes=nbytes, total_nbytes=total_nbytes)
                    actions.append(Send(progress))
            case WriteEnded(save_id, nbytes, seconds, error):
                job = self._expect(save_id, Phase.WRITING)
                if error is not None or job.answered:
                    if error is None and job.failure is not None:
                        actions.append(Reclaim(job.save, job.failure))
                    self._finish(job, error, actions)
                else:
                    actions.append(Send(Written(attempt=self.attempt, save_id=save_id, nbytes=nbytes, seconds=seconds)))
                    job.phase = Phase.WRITTEN
            case CommitEnded(save_id, name, nbytes, error):
                job = self._expect(save_id, Phase.COMMITTING)
                if error is None and not job.answered:
                    actions.append(Send(Committed(attempt=self.attempt, save_id=save_id, name=name, nbytes=nbytes)))
                    job.answered = True
                self._finish(job, error, actions)
            case DeleteRequested(request):
                if request.save_id not in self._seen:
                    self._seen.add(request.save_id)
                    self._deletions.append(_Deletion(request, {job.save.save_id for job in self._queue}))
            case DeleteEnded(save_id, error):
                (deletion,) = [each for each in self._deletions if each.request.save_id == save_id]
                self._deletions.remove(deletion)
                if not deletion.answered:
                    actions.append(Send(error or Deleted(attempt=self.attempt, save_id=save_id)))
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
                busy = [job for phase in (Phase.WRITING, Phase.COMMITTING) if (job := self._in_phase(phase))]
                stuck = [job for job in busy if not job.answered]
                for job in stuck:
                    job.answered, job.failure = True, replace(error, save_id=job.save.save_id)
                    is_named = job.phase is Phase.COMMITTING  # or may be so any moment
                    changes = {"error": "CommitUnknownError"} if is_named else {}
                    actions.append(Send(replace(job.failure, **changes)))
                if not stuck:  # stuck for another deadline, or in a deletion: those behind it would wait for ever
                    waiting = [job for job in self._queue if job.phase in (Phase.QUEUED, Phase.WRITTEN)]
                    self._queue = [job for job in self._queue if job not in waiting]
                    actions += [Send(_late(error, job)) for job in waiting if not job.answered]
                    ids = [deletion.request.save_id for deletion in self._deletions if not deletion.answered]
                    actions += [Send(replace(error, save_id=each)) for each in ids]
                    self._deletions = [
                        replace(deletion, answered=True) for deletion in self._deletions if deletion.started
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
        if job is not None and self._in_phase(Phase.WRITING) is None and (job is first or job.save.world_size > 1):
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
    """The answer to a save behind one that is stuck; if written already, it may still be committed."""
    written = job.phase is Phase.WRITTEN
    return replace(error, save_id=job.save.save_id, **({"error": "CommitUnknownError"} if written else {}))
