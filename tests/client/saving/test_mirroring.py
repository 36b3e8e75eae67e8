"""What a client makes of what daemons tell of the mirror."""

import dataclasses
import errno

import pytest

from sidesave.client.saving.handle import SaveHandle
from sidesave.client.saving.mirroring import Mirroring
from sidesave.errors import (
    CheckpointNotFoundError,
    CommitUnknownError,
    DirectoryInUseError,
    WriteError,
    WriteStalledError,
)
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.protocol import Committed, Failed, Mirrored, MirrorState

SESSION, EARLIER = "f" * 16, "e" * 16


@pytest.fixture
def mirroring() -> Mirroring:
    return Mirroring("/mirror", SESSION)


def a_save(mirroring: Mirroring, sequence: int) -> SaveHandle:
    handle = SaveHandle(sequence)
    mirroring.add(sequence, handle)
    return handle


def listed(step: int, sequence: int) -> CheckpointInfo:
    return CheckpointInfo(step, f"/run/step-{step:08d}", 1, EARLIER, sequence, None, 0.0)


def committed(sequence: int, attempt: int = 1) -> Committed:
    return Committed(attempt=attempt, save_id=sequence, name=f"step-{sequence:08d}", nbytes=1)


def mirrored(sequence: int, error: Failed | None = None, session: str = SESSION) -> Mirrored:
    return Mirrored(
        attempt=1, session=session, sequence=sequence, name=f"step-{sequence:08d}", error=error
    )


def failure(error: Exception) -> Failed:
    return protocol.failure(1, None, error)


def test_only_this_sessions_saves_are_answered(mirroring: Mirroring):
    mirroring.receive(MirrorState(attempt=1, compared=True))
    handle = a_save(mirroring, 1)
    mirroring.receive(mirrored(1, session="0" * 16))
    assert not handle.mirrored.done()
    mirroring.receive(mirrored(1))
    assert handle.mirrored.result(0) == "/mirror/step-00000001"
    mirroring.receive(mirrored(1))  # the next daemon says what is there
    mirroring.wait(0)


def test_what_a_dead_daemon_committed_and_the_next_one_does_not_find_was_deleted(
    mirroring: Mirroring,
):
    lost, waiting, late = (a_save(mirroring, sequence) for sequence in (1, 2, 3))
    mirroring.receive(committed(1))
    mirroring.receive(committed(2))
    mirroring.receive(committed(3, attempt=2))
    mirroring.receive(MirrorState(attempt=2, compared=True, missing=(2,)))
    with pytest.raises(CheckpointNotFoundError):
        lost.mirrored.result(0)
    assert not waiting.mirrored.done()
    assert not late.mirrored.done(), "that daemon has not been told of it when it looked"


def test_trouble_fails_nothing_and_the_end_fails_all(mirroring: Mirroring):
    first = a_save(mirroring, 1)
    mirroring.receive(
        MirrorState(attempt=1, error=failure(WriteError(errno.EACCES, "denied", "/mirror")))
    )
    assert not first.mirrored.done()
    assert mirroring.awaits(1)
    mirroring.receive(
        MirrorState(
            attempt=1,
            over=True,
            error=failure(DirectoryInUseError(errno.EBUSY, "taken", "/mirror")),
        )
    )
    for handle in (first, a_save(mirroring, 2)):
        with pytest.raises(DirectoryInUseError):
            handle.mirrored.result(0)
    assert not mirroring.awaits(1)
    mirroring.receive(MirrorState(attempt=2, compared=True))  # another daemon, which has got it
    assert not a_save(mirroring, 3).mirrored.done()


def test_a_failure_is_raised_once_and_not_where_it_was_read(mirroring: Mirroring):
    mirroring.receive(MirrorState(attempt=1, compared=True))
    read, unread = a_save(mirroring, 1), a_save(mirroring, 2)
    for sequence in (1, 2):
        mirroring.receive(
            mirrored(sequence, failure(WriteError(errno.EIO, f"of {sequence}", "/mirror")))
        )
    assert isinstance(read.mirrored.exception(0), WriteError)
    with pytest.raises(WriteError, match="of 2"):
        mirroring.wait(0)
    mirroring.wait(0)
    assert unread.mirrored.done()


def test_what_earlier_sessions_have_left_is_waited_for_until_the_mirror_is_given_up(
    mirroring: Mirroring,
):
    for message in (
        None,
        MirrorState(attempt=1, compared=True, missing=(3, 4)),
        MirrorState(attempt=1, compared=True, missing=(4,)),
    ):
        if message is not None:
            mirroring.receive(message)
        with pytest.raises(
            WriteStalledError, match="what earlier sessions have left was not mirrored"
        ):
            mirroring.wait(0)
    mirroring.receive(MirrorState(attempt=1, compared=True))
    mirroring.wait(0)
    mirroring.receive(
        MirrorState(
            attempt=1,
            over=True,
            error=failure(DirectoryInUseError(errno.EBUSY, "taken", "/mirror")),
        )
    )
    with pytest.raises(DirectoryInUseError):
        mirroring.wait(0)
    mirroring.wait(0)
    Mirroring("/mirror", SESSION, leads=False).wait(0)


def test_what_is_open_at_the_end_is_not_known(mirroring: Mirroring):
    handle = a_save(mirroring, 1)
    mirroring.abandon()
    with pytest.raises(CommitUnknownError, match="its daemon goes on"):
        handle.mirrored.result(0)


def test_the_status_is_what_the_daemon_has_last_told(mirroring: Mirroring):
    failure = Failed(
        attempt=1,
        save_id=None,
        error="WriteError",
        message="it is away",
        errno=errno.EIO,
        path="/mirror",
    )
    told: list[bool] = []
    mirroring.watch(lambda: told.append(True))
    status = mirroring.status()
    assert status is not None and status.checkpoints is None
    state = MirrorState(
        attempt=1, compared=True, missing=(3, 4), nbytes=7, nbytes_per_s=2.5, last_step=9
    )
    for message in (
        state,
        dataclasses.replace(state, nbytes_per_s=3.5),
        dataclasses.replace(state, error=failure),
    ):
        mirroring.receive(message)
    status = mirroring.status()
    assert status is not None
    assert (status.checkpoints, status.nbytes, status.nbytes_per_s, status.last_step) == (
        2,
        7,
        2.5,
        9,
    )
    assert isinstance(status.error, WriteError)
    assert len(told) == 2  # a rate alone is no news: who is told lists both places
    assert Mirroring().status() is None
    assert Mirroring("/mirror", SESSION, leads=False).status() is None


def test_an_older_save_of_a_step_is_known_until_the_last_is_mirrored(mirroring: Mirroring):
    handle = a_save(mirroring, 1)
    assert not mirroring.has_older(1)
    mirroring.receive(mirrored(1))
    assert not mirroring.has_older(1)
    again = SaveHandle(1)
    mirroring.add(7, again)
    assert mirroring.has_older(1)
    mirroring.receive(Mirrored(attempt=2, session=SESSION, sequence=7, name="step-00000001"))
    assert not mirroring.has_older(1)
    assert handle.mirrored.done() and again.mirrored.done()


def test_what_earlier_sessions_left_unmirrored_is_known_from_the_start(mirroring: Mirroring):
    arrived = Mirrored(attempt=1, session=EARLIER, sequence=13, name="step-00000003")
    mirroring.receive(arrived)  # after both places were listed
    here = [listed(step, sequence=10 + step) for step in (1, 2, 3, 4)]
    there = [listed(1, sequence=11), listed(2, sequence=5), listed(3, sequence=6)]
    mirroring.begin(here, there)
    assert [mirroring.has_older(step) for step in (1, 2, 3, 4)] == [False, True, False, False]
    mirroring.receive(dataclasses.replace(arrived, sequence=12, name="step-00000002"))
    assert not mirroring.has_older(2)


def test_an_older_save_may_be_in_a_mirror_that_is_not_known_or_was_given_up(mirroring: Mirroring):
    mirroring.add(3, SaveHandle(1))
    assert not mirroring.has_older(1), "it is the first"
    mirroring.add(4, SaveHandle(2), replaces=True)
    assert mirroring.has_older(2), "perhaps"
    mirroring.receive(MirrorState(attempt=1, compared=True, missing=(3, 4)))
    assert not mirroring.has_older(2)
    mirroring.receive(mirrored(2, session=EARLIER))
    mirroring.receive(Committed(attempt=1, save_id=4, name="step-00000002", nbytes=1))
    mirroring.receive(
        MirrorState(attempt=1, over=True, error=failure(WriteError(errno.EIO, "broken", "/mirror")))
    )
    assert mirroring.has_older(2), "it is still there"
    mirroring.removed(2)
    assert not mirroring.has_older(2)
