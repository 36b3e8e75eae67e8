"""Trainer and daemon as two state machines with an unreliable world between them, driven by
hypothesis.

The real bookkeeping of both sides (``client.requests``, ``writer_daemon.jobs``) talks through
channels that lose what is under way when a daemon dies, repeat and reorder; storage ends operations
well or badly, and a daemon dies in the middle of them with the effect there or not. What must hold,
whatever happens:

* every save gets exactly one outcome, and a save told to be committed is, with the bytes it had
when it was called; * nothing is written from a slot that holds another save by then;
* a save that is staged when the trainer dies is committed, or has failed for a reason that storage
gave; * a save is told to be written only once its bytes are durable, and nothing is committed twice
with different bytes.
"""

import dataclasses
from collections import deque

import campaigns
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from job_messages import a_failure, a_save, an_info

from sidesave.client.daemon_link.pending import Requests
from sidesave.writer_daemon.process import jobs
from sidesave.writer_daemon.process.jobs import Jobs
from sidesave.writer_daemon.protocol import Committed, Failed, Message, Save, Watch, Written

SLOTS = 1


class Service(RuleBasedStateMachine):
    """One trainer, its daemons one after another, and the storage that outlives them all."""

    @initialize()
    def start(self) -> None:
        self.requests = Requests()
        self.attempt = 1
        self.daemon: Jobs | None = Jobs(1)
        self.to_daemon: deque[Message] = deque()
        self.to_trainer: deque[Message] = deque()
        self.busy: tuple[str, Save, bool] | None = None
        self.slots: dict[int, int] = {}  # slot -> the save whose bytes it holds
        self.slot_of: dict[int, int] = {}
        self.durable: set[int] = set()
        self.committed: set[int] = set()
        self.refused: set[int] = set()  # storage gave an error
        self.outcome: dict[int, Message] = {}
        self.heard_written: set[int] = set()
        self.trainer_lives = True
        self.ids = 0

    # The trainer ----------------------------------------------------------------------------------

    @precondition(lambda self: self.trainer_lives and len(self.slots) < SLOTS)
    @rule()
    def a_save_is_called(self) -> None:
        self.ids += 1
        slot = next(slot for slot in range(SLOTS) if slot not in self.slots)
        self.slots[slot], self.slot_of[self.ids] = self.ids, slot
        save = dataclasses.replace(a_save(self.ids), attempt=1, arena=slot)
        self.send(self.requests.add(save, self.attempt))

    def send(self, message: Message) -> None:
        # else it is lost: its successor will be told by for_successor()
        if self.daemon is not None:
            self.to_daemon.append(message)

    @precondition(lambda self: self.trainer_lives and self.to_trainer)
    @rule()
    def the_trainer_reads(self) -> None:
        message = self.to_trainer.popleft()
        if message.attempt != self.attempt or not self.requests.hear(message):
            return
        save_id = message.save_id  # type: ignore[attr-defined] - all that a daemon says of saves has one
        assert save_id not in self.outcome, f"{message} after {self.outcome[save_id]}"
        match message:
            case Written():
                assert save_id in self.durable | self.refused
                self.heard_written.add(save_id)
                self.release(save_id)
            case Committed():
                assert save_id in self.committed
                self.outcome[save_id] = message
                self.release(save_id)
            case Failed():
                assert save_id in self.refused, "nothing fails that storage did not refuse"
                self.outcome[save_id] = message
                self.release(save_id)
            case _:
                pass

    def release(self, save_id: int) -> None:
        slot = self.slot_of[save_id]
        if self.slots.get(slot) == save_id:
            del self.slots[slot]

    # The channel ----------------------------------------------------------------------------------

    @precondition(lambda self: self.to_daemon)
    @rule()
    def a_message_is_repeated(self) -> None:
        self.to_daemon.append(self.to_daemon[0])

    @precondition(lambda self: len(self.to_daemon) > 1)
    @rule()
    def messages_overtake_each_other(self) -> None:
        self.to_daemon.rotate(1)

    # The daemon -----------------------------------------------------------------------------------

    @precondition(lambda self: self.daemon is not None and self.to_daemon)
    @rule()
    def the_daemon_reads(self) -> None:
        message = self.to_daemon.popleft()
        if message.attempt != self.attempt:
            return
        if isinstance(message, Watch):
            self.feed(jobs.Watched(message.save))
        elif isinstance(message, Save):
            self.feed(jobs.Submitted(message))

    def feed(self, event: jobs.Event) -> None:
        assert self.daemon is not None
        for action in self.daemon.handle(event):
            match action:
                case jobs.StartWrite(save, memory):
                    assert self.busy is None
                    self.busy = ("write", save, memory)
                case jobs.StartCommit(save):
                    assert self.busy is None
                    self.busy = ("commit", save, False)
                case jobs.Send(message):
                    self.to_trainer.append(message)
                case jobs.Exit():
                    self.daemon = None
                case jobs.Reclaim() | jobs.StartDelete() | jobs.StartRefusal():
                    raise AssertionError(f"{action}: nothing stalls and nothing is deleted here")

    def take_effect(self) -> bool:
        """What the storage operation under way does when it ends well; False where it cannot."""
        assert self.busy is not None
        what, save, memory = self.busy
        if what == "commit":
            assert save.save_id in self.durable
            self.committed.add(save.save_id)
        elif save.save_id in self.durable:  # the record of an earlier daemon is adopted
            assert save.retry, "a new save would remove what an earlier daemon has written"
        else:
            if not memory:
                return False
            held = self.slots.get(save.arena)
            assert held == save.save_id, f"wrote the bytes of save {held} as save {save.save_id}"
            self.durable.add(save.save_id)
        return True

    @precondition(lambda self: self.busy is not None and self.daemon is not None)
    @rule(refused=st.booleans())
    def storage_answers(self, refused: bool) -> None:
        assert self.busy is not None
        what, save, _ = self.busy
        already = save.save_id in self.durable
        if refused and not (what == "write" and already):
            self.refused.add(save.save_id)
            self.durable.discard(save.save_id)  # reclaimed
            well = False
        else:
            well = self.take_effect()
            assert well or save.save_id in self.refused, (
                "a save was watched whose record is not there"
            )
        self.busy = None
        error = None if well else dataclasses.replace(a_failure(save.save_id), attempt=self.attempt)
        if what == "write":
            self.feed(jobs.WriteEnded(save.save_id, 100, 1.0, error))
        else:
            self.feed(
                jobs.CommitEnded(save.save_id, "step", None if error else an_info(save), error)
            )

    @precondition(lambda self: self.daemon is not None and self.trainer_lives)
    @rule(effect=st.booleans(), read=st.integers(0, 4))
    def the_daemon_dies(self, effect: bool, read: int) -> None:
        if self.busy is not None and effect:
            self.take_effect()
        for _ in range(min(read, len(self.to_trainer))):
            self.the_trainer_reads()  # what had arrived is still read
        self.daemon, self.busy = None, None
        self.to_daemon.clear()
        self.to_trainer.clear()
        self.attempt += 1
        self.daemon = Jobs(self.attempt)
        self.to_daemon.extend(self.requests.for_successor(self.attempt))

    @precondition(lambda self: self.trainer_lives and self.daemon is not None)
    @rule()
    def the_trainer_dies(self) -> None:
        self.trainer_lives = False
        while self.to_daemon:  # the socket still gives what was sent
            self.the_daemon_reads()
        assert self.daemon is not None
        for slot, save_id in self.slots.items():
            if not self.daemon.knows(save_id):  # found in the memory itself
                self.feed(
                    jobs.Submitted(dataclasses.replace(a_save(save_id), arena=slot, retry=True))
                )
        self.feed(jobs.DrainRequested())

    @precondition(lambda self: self.daemon is None)
    @rule()
    def the_run_is_started_again(self) -> None:
        self.check_the_end_of_a_dead_trainer()
        self.start()

    # What must hold -------------------------------------------------------------------------------

    @invariant()
    def what_was_heard_to_be_written_stays_durable_until_storage_refuses(self) -> None:
        assert self.heard_written <= self.durable | self.refused

    @invariant()
    def every_open_save_has_somebody_who_works_on_it_or_will(self) -> None:
        if self.trainer_lives:
            assert len(self.requests) == self.ids - len(self.outcome)

    def teardown(self) -> None:
        """Without further deaths everything comes to its end."""
        for _ in range(20 * (self.ids + 1)):
            if self.daemon is not None and self.to_daemon:
                self.the_daemon_reads()
            if self.busy is not None:
                self.storage_answers(refused=False)
            if self.trainer_lives and self.to_trainer:
                self.the_trainer_reads()
        if self.trainer_lives:
            assert self.outcome.keys() == set(range(1, self.ids + 1))
        else:
            assert self.daemon is None, "it ends once nothing is left to do"
            self.check_the_end_of_a_dead_trainer()

    def check_the_end_of_a_dead_trainer(self) -> None:
        told = {
            save_id for save_id, message in self.outcome.items() if isinstance(message, Committed)
        }
        assert told <= self.committed
        assert set(range(1, self.ids + 1)) <= self.committed | self.refused


TestService = Service.TestCase
TestService.settings = settings(max_examples=campaigns.examples(400), stateful_step_count=40)


def test_a_written_save_is_only_watched_for_its_slot_may_hold_another_one_by_then():
    requests = Requests()
    save = dataclasses.replace(a_save(1), attempt=1)
    assert requests.add(save, 1) == save
    assert requests.for_successor(2) == [dataclasses.replace(save, attempt=2, retry=True)]
    assert requests.hear(Written(attempt=2, save_id=1, nbytes=1, seconds=1.0))
    assert requests.for_successor(3) == [
        Watch(attempt=3, save=dataclasses.replace(save, attempt=3, retry=True))
    ]
    committed = Committed(attempt=3, save_id=1, name="step", nbytes=1)
    assert [requests.hear(committed), requests.hear(committed)] == [True, False]
    assert requests.for_successor(4) == []


def test_deaths_count_for_what_nothing_was_answered_in_between():
    requests = Requests()
    for save_id in (1, 2, 3):
        requests.add(dataclasses.replace(a_save(save_id), attempt=1), 1)
    for _ in range(5):
        assert requests.daemon_died(5) == []
    assert requests.hear(Committed(attempt=6, save_id=1, name="step", nbytes=1))
    for _ in range(5):
        assert requests.daemon_died(5) == [], "what stood behind the first begins anew"
    assert requests.daemon_died(5) == [2, 3]
    assert len(requests) == 0
