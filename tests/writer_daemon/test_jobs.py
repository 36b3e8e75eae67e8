"""The life of a save, driven by every order of events that storage, trainer and signals can
produce.
"""

import dataclasses

import campaigns
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from job_messages import ATTEMPT, a_failure, a_save, an_info

from sidesave.writer_daemon.process import jobs
from sidesave.writer_daemon.process.jobs import Jobs
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


def a_refusal(save_id: int) -> Refuse:
    return Refuse(
        attempt=ATTEMPT,
        save_id=save_id,
        step=1,
        session="0123456789abcdef",
        sequence=save_id,
        rank=0,
        world_size=2,
        error="StagingError",
        message="no",
        errno=None,
        path=None,
        retry=False,
    )


def messages(actions: list[jobs.Action]) -> list[Message]:
    return [action.message for action in actions if isinstance(action, jobs.Send)]


class Daemon(RuleBasedStateMachine):
    """Plays the server and its storage thread around a ``Jobs`` and keeps the books by which it is
    judged.
    """

    @initialize(world_size=st.sampled_from([1, 2]))
    def start(self, world_size: int) -> None:
        self.jobs = Jobs(ATTEMPT)
        self.world_size = world_size
        self.accepted: list[Save] = []
        self.with_memory: dict[int, bool] = {}
        self.started: list[int] = []  # writes, in the order of their start
        self.commits: list[int] = []  # likewise
        self.writing: Save | None = None
        self.committing: Save | None = None
        self.written: set[int] = set()
        self.refusals: set[int] = set()
        self.refusing: list[int] = []  # handed to storage, in order
        self.answers: dict[int, Message] = {}
        self.deletions: set[int] = set()
        self.before: dict[int, set[int]] = {}  # the saves that came before each deletion
        self.deleting: list[int] = []  # handed to storage, in order
        self.draining = False
        self.exited = False

    def feed(self, event: jobs.Event) -> list[jobs.Action]:
        actions = self.jobs.handle(event)
        for action in actions:
            assert not self.exited, f"{action} after Exit"
            match action:
                case jobs.StartWrite(save, memory):
                    assert self.writing is None, "two writes at once"
                    assert self.committing is None or self.world_size > 1, (
                        "no commit waits for others here"
                    )
                    assert save.save_id not in self.answers
                    assert memory == self.with_memory[save.save_id]
                    self.started.append(save.save_id)
                    self.writing = save
                case jobs.StartCommit(save):
                    assert self.committing is None, "two commits at once"
                    assert self.writing is None or self.world_size > 1, (
                        "no commit waits for others here"
                    )
                    assert save.save_id in self.written, (
                        "committed what was never said to be written"
                    )
                    self.commits.append(save.save_id)
                    self.committing = save
                case jobs.StartDelete(request):
                    assert request.save_id not in self.deleting
                    open_saves = self.before[request.save_id] - self.answers.keys()
                    assert not open_saves, "deleted what may be the last checkpoint"
                    self.deleting.append(request.save_id)
                case jobs.StartRefusal(request):
                    assert request.save_id not in self.refusing
                    assert request.save_id not in self.answers
                    self.refusing.append(request.save_id)
                case jobs.Reclaim(save):
                    assert isinstance(self.answers[save.save_id], Failed), (
                        "removed a save that had not failed"
                    )
                case jobs.Send(message):
                    self.hear(message)
                case jobs.Exit():
                    assert self.draining
                    assert self.writing is None
                    assert self.committing is None
                    assert not self.deleting
                    assert not self.refusing
                    assert self.answers.keys() == self.requests()
                    self.exited = True
        return actions

    def hear(self, message: Message) -> None:
        assert message.attempt == ATTEMPT
        assert isinstance(message, Written | Committed | Failed | Progress | Deleted)
        save_id = message.save_id
        assert save_id is not None
        assert save_id not in self.answers, f"{message} after {self.answers[save_id]}"
        match message:
            case Written():
                assert save_id not in self.written
                self.written.add(save_id)
            case Committed():
                assert save_id in self.written
                self.answers[save_id] = message
            case Failed() | Deleted():
                self.answers[save_id] = message
            case _:
                pass

    def requests(self) -> set[int]:
        return {save.save_id for save in self.accepted} | self.deletions | self.refusals

    def is_running(self) -> bool:
        return not self.exited

    def is_writing(self) -> bool:
        return self.writing is not None

    def is_committing(self) -> bool:
        return self.committing is not None

    @precondition(is_running)
    @rule(watched=st.booleans())
    def a_save_arrives(self, watched: bool) -> None:
        save = a_save(len(self.accepted) + 1, self.world_size)
        assert not self.jobs.knows(save.save_id)
        self.accepted.append(save)
        self.with_memory[save.save_id] = not watched
        self.feed(jobs.Watched(save) if watched else jobs.Submitted(save))
        assert self.jobs.knows(save.save_id)

    @precondition(lambda self: self.is_running() and self.accepted)
    @rule(data=st.data(), watched=st.booleans())
    def a_save_arrives_again(self, data: st.DataObject, watched: bool) -> None:
        save = dataclasses.replace(data.draw(st.sampled_from(self.accepted)), retry=True)
        assert self.feed(jobs.Watched(save) if watched else jobs.Submitted(save)) == []

    @precondition(lambda self: self.is_running() and self.accepted)
    @rule(data=st.data())
    def bytes_move(self, data: st.DataObject) -> None:
        # of an answered one as well: its thread may be stuck
        save = data.draw(st.sampled_from(self.accepted))
        told = messages(self.feed(jobs.Progressed(save.save_id, 5, 10)))
        assert len(told) == (save.save_id not in self.answers)

    @precondition(is_running)
    @rule(again=st.booleans())
    def a_deletion_is_asked_for(self, again: bool) -> None:
        request = Delete(
            attempt=ATTEMPT,
            save_id=1000 + len(self.deletions) - again,
            steps=(1,),
            sequence=1,
            retry=again,
        )
        known = request.save_id in self.deletions
        self.deletions.add(request.save_id)
        if not known:
            self.before[request.save_id] = {save.save_id for save in self.accepted}
        actions = self.feed(jobs.DeleteRequested(request))
        assert not (known and actions)

    @precondition(lambda self: self.deleting)
    @rule(failed=st.booleans())
    def a_deletion_ends(self, failed: bool) -> None:
        request_id = self.deleting.pop(0)
        given_up = request_id in self.answers
        self.feed(jobs.DeleteEnded(request_id, a_failure(request_id) if failed else None))
        assert isinstance(self.answers[request_id], Failed if failed or given_up else Deleted)

    @precondition(lambda self: self.is_running() and self.world_size > 1)
    @rule(again=st.booleans())
    def a_refusal_is_asked_for(self, again: bool) -> None:
        request = a_refusal(2000 + len(self.refusals) - again)
        known = request.save_id in self.refusals
        self.refusals.add(request.save_id)
        actions = self.feed(jobs.RefusalRequested(request))
        assert actions == ([] if known else [jobs.StartRefusal(request)]), "it waits for nothing"

    @precondition(lambda self: self.refusing)
    @rule()
    def a_refusal_ends(self) -> None:
        request_id = self.refusing.pop(0)
        self.feed(jobs.RefusalEnded(request_id, a_failure(request_id)))
        assert request_id in self.answers

    @precondition(lambda self: self.is_writing() or self.is_committing())
    @rule()
    def other_ranks_are_waited_for(self) -> None:
        save = self.writing or self.committing
        assert save is not None
        assert self.feed(jobs.Waited(save.save_id)) == []

    @precondition(is_writing)
    @rule(failed=st.booleans())
    def a_write_ends(self, failed: bool) -> None:
        save, self.writing = self.writing, None
        assert save is not None
        given_up = save.save_id in self.answers
        actions = self.feed(
            jobs.WriteEnded(save.save_id, 100, 1.0, a_failure(save.save_id) if failed else None)
        )
        if failed:
            assert isinstance(self.answers[save.save_id], Failed)
        else:
            reclaimed = any(isinstance(action, jobs.Reclaim) for action in actions)
            assert reclaimed == given_up, "durable bytes of a save given up must go, others stay"

    @precondition(is_committing)
    @rule(failed=st.booleans())
    def a_commit_ends(self, failed: bool) -> None:
        save, self.committing = self.committing, None
        assert save is not None
        if failed:
            self.feed(jobs.CommitEnded(save.save_id, error=a_failure(save.save_id)))
        else:
            self.feed(jobs.CommitEnded(save.save_id, "step-1", an_info(save)))
        assert save.save_id in self.answers

    @precondition(is_running)
    @rule()
    def storage_stalls(self) -> None:
        awaited = self.jobs.awaited
        if awaited is None:
            assert self.feed(jobs.Stalled(a_failure(0))) == []
            return
        stuck = {save.save_id for save in (self.writing, self.committing) if save is not None}
        already = stuck <= self.answers.keys()
        self.feed(jobs.Stalled(a_failure(awaited.save_id)))
        assert isinstance(self.answers[awaited.save_id], Failed)
        assert stuck <= self.answers.keys(), "stuck is stuck, whatever it was at"
        if already:
            assert self.requests() - self.refusals <= self.answers.keys(), (
                "stuck storage leaves nothing open"
            )

    @precondition(is_running)
    @rule()
    def drain(self) -> None:
        self.draining = True
        self.feed(jobs.DrainRequested())

    @precondition(lambda self: self.exited)
    @rule(world_size=st.sampled_from([1, 2]))
    def a_successor_starts(self, world_size: int) -> None:
        self.start(world_size)

    @invariant()
    def nothing_waits_without_a_reason(self) -> None:
        if self.exited:
            return
        open_saves = [save for save in self.accepted if save.save_id not in self.answers]
        busy = [save for save in (self.writing, self.committing) if save is not None]
        assert busy or not open_saves, f"nobody works on {open_saves}"
        assert self.jobs.active == (busy[0] if busy else None)
        in_hand = {save.save_id for save in open_saves + busy}
        assert len(self.jobs) == len(in_hand)
        if self.world_size > 1:
            queued = {save.save_id for save in open_saves} - set(self.started)
            assert self.writing is not None or not queued, (
                "it is written while others are waited for"
            )
        idle = not self.deleting and not self.refusing and self.deletions <= self.answers.keys()
        assert not (self.draining and len(self.jobs) == 0 and idle), (
            "drained and empty, yet no Exit"
        )

    @invariant()
    def saves_start_in_the_order_in_which_they_came(self) -> None:
        assert self.started == sorted(self.started)
        assert self.commits == sorted(self.commits)

    def teardown(self) -> None:
        """Whatever has happened: once asked to drain, and with storage answering, it ends."""
        if self.is_running():
            self.drain()
        for _ in range(2 * len(self.accepted) + 1):
            if self.is_writing():
                self.a_write_ends(failed=False)
            elif self.is_committing():
                self.a_commit_ends(failed=False)
        while self.deleting:
            self.a_deletion_ends(failed=False)
        while self.refusing:
            self.a_refusal_ends()
        assert self.exited
        assert self.answers.keys() == self.requests()


TestDaemon = Daemon.TestCase
TestDaemon.settings = settings(max_examples=campaigns.examples(300), stateful_step_count=30)


def test_save_runs_from_queue_to_commit():
    machine, save = Jobs(ATTEMPT), a_save(1)
    assert machine.handle(jobs.Submitted(save)) == [jobs.StartWrite(save, memory=True)]
    written = jobs.Send(Written(attempt=ATTEMPT, save_id=1, nbytes=7, seconds=0.5))
    assert machine.handle(jobs.WriteEnded(1, 7, 0.5)) == [written, jobs.StartCommit(save)]
    committed = jobs.Send(Committed(attempt=ATTEMPT, save_id=1, name="step-00000010", nbytes=7))
    assert machine.handle(jobs.CommitEnded(1, "step-00000010", an_info(save, 7))) == [committed]
    assert machine.handle(jobs.DrainRequested()) == [jobs.Exit()]


def test_failed_save_makes_way_for_the_next():
    machine, first, second = Jobs(ATTEMPT), a_save(1), a_save(2)
    machine.handle(jobs.Submitted(first))
    assert machine.handle(jobs.Submitted(second)) == []
    failed = a_failure(1)
    actions = machine.handle(jobs.WriteEnded(1, 0, 0.0, failed))
    assert actions == [jobs.Send(failed), jobs.StartWrite(second, memory=True)]


def test_written_save_of_an_earlier_daemon_is_looked_up_without_memory():
    machine, save = Jobs(ATTEMPT), a_save(1)
    assert machine.handle(jobs.Watched(save)) == [jobs.StartWrite(save, memory=False)]


def test_stalled_save_that_comes_back_is_reclaimed_and_not_committed():
    machine, save = Jobs(ATTEMPT), a_save(1)
    machine.handle(jobs.Submitted(save))
    stalled = a_failure(1)
    assert machine.handle(jobs.Stalled(stalled)) == [jobs.Send(stalled)]
    assert machine.handle(jobs.WriteEnded(1, 7, 900.0)) == [jobs.Reclaim(save, stalled)]


def test_saves_behind_stuck_storage_fail_with_it_after_a_second_deadline():
    machine = Jobs(ATTEMPT)
    for save_id in (1, 2, 3):
        machine.handle(jobs.Submitted(a_save(save_id)))
    assert machine.handle(jobs.Stalled(a_failure(1))) == [jobs.Send(a_failure(1))]
    assert machine.handle(jobs.Stalled(a_failure(1))) == [
        jobs.Send(a_failure(2)),
        jobs.Send(a_failure(3)),
    ]
    assert machine.handle(jobs.DrainRequested()) == [], (
        "the stuck operation still holds the directory"
    )
    assert machine.handle(jobs.WriteEnded(1, 0, 0.0, a_failure(1))) == [jobs.Exit()]


def test_save_of_several_ranks_is_written_while_the_one_before_it_waits_for_the_others():
    machine, first, second = Jobs(ATTEMPT), a_save(1, world_size=2), a_save(2, world_size=2)
    machine.handle(jobs.Submitted(first))
    machine.handle(jobs.Submitted(second))
    written = jobs.Send(Written(attempt=ATTEMPT, save_id=1, nbytes=7, seconds=0.5))
    ended = machine.handle(jobs.WriteEnded(1, 7, 0.5))
    assert ended == [written, jobs.StartCommit(first), jobs.StartWrite(second, memory=True)]
    stalled = dataclasses.replace(a_failure(1), error="CommitUnknownError")
    assert machine.handle(jobs.Stalled(a_failure(2))) == [
        jobs.Send(a_failure(2)),
        jobs.Send(stalled),
    ]
