"""Copies into a mirror: what is there after any interruption, and what is never there."""

import contextlib
import dataclasses
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from loads import flip_bit
from object_server import Fault, ObjectServer, Request
from sessions import NEW, OLD, Session, a_state, same
from trainers import DEADLINE_S

from sidesave.client.loading import load as loader
from sidesave.client.reading.verify import verify
from sidesave.errors import (
    CheckpointNotFoundError,
    IntegrityError,
    InvalidArgumentError,
    WriteError,
)
from sidesave.writer_daemon.checkpoints.catalog import Catalog
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.format import rollback
from sidesave.writer_daemon.format.rollback import ROLLBACK_FILE, Rollbacks
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.lease.record import LeaseRecord
from sidesave.writer_daemon.mirror import identity
from sidesave.writer_daemon.mirror.identity import open_target
from sidesave.writer_daemon.mirror.mirror import Mirror
from sidesave.writer_daemon.mirror.uploader import Uploader
from sidesave.writer_daemon.options import DaemonOptions
from sidesave.writer_daemon.protocol import Boot, Delete, Mirrored
from sidesave.writer_daemon.storage import urls

pytestmark = pytest.mark.usefixtures("end_all")

Chunk = Callable[[int], None]


class Interrupted(Exception):
    """The process ends here."""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    root = tmp_path / "run"
    root.mkdir()
    session = Session(root, OLD)
    yield session
    session.close()


@contextlib.contextmanager
def mirror(
    session: Session, place: str, before_chunk: Chunk = lambda nbytes: None
) -> Iterator[Uploader]:
    target = open_target(place)
    lease = Lease(target, LeaseRecord.current(NEW, os.getpid()), 1.0, lambda: True)
    try:
        yield Uploader(str(session.root), target, lease, before_chunk)
    finally:
        lease.release()


def bring(
    session: Session, place: str, before_chunk: Chunk = lambda nbytes: None
) -> list[CheckpointInfo]:
    """All that is missing."""
    with mirror(session, place, before_chunk) as uploader:
        missing, _ = uploader.begin()
        for step in missing:
            uploader.upload(step)
        return missing


def interrupted_at(number: int) -> Chunk:
    chunks = itertools.count()

    def before_chunk(nbytes: int) -> None:
        if next(chunks) == number:
            raise Interrupted

    return before_chunk


def holds(place: str, **states: int) -> None:
    """The mirror has these steps alone, and each verifies and holds the state of that seed."""
    assert sorted(info.name for info in Catalog(place).all()) == sorted(states)
    for name, seed in states.items():
        report = verify(f"{place}/{name}")
        assert report.ok, report.faults
        assert same(loader.load(f"{place}/{name}"), a_state(seed))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidesave.writer_daemon.mirror.uploader.PIECE_NBYTES", 128 << 10)


@pytest.mark.usefixtures("small_chunks")
def test_an_interrupted_copy_shows_nothing_and_is_gone_on_with_file_by_file(
    session: Session, place: str
):
    session.save(1, a_state(1))
    chunks: list[int] = []
    bring(session, f"{place}-whole", chunks.append)
    assert len(chunks) > 10
    for number in range(len(chunks)):
        at = f"{place}-{number}"
        with pytest.raises(Interrupted):
            bring(session, at, interrupted_at(number))
        holds(at)
        again: list[int] = []
        bring(session, at, again.append)
        holds(at, **{"step-00000001": 1})
        assert len(again) <= len(chunks)
        if number == len(chunks) - 1:
            assert len(again) == 1  # the manifest: all else was there


@pytest.mark.usefixtures("small_chunks")
def test_a_copy_may_be_interrupted_again_and_again(session: Session, place: str):
    session.save(1, a_state(1))
    for number in itertools.count(1):
        try:
            bring(session, place, interrupted_at(number))
        except Interrupted:
            holds(place)
        else:
            break
    holds(place, **{"step-00000001": 1})
    assert not [name for name in open_target(place).list_directory("") if name.startswith(".step")]


@pytest.mark.usefixtures("small_chunks")
def test_a_beginning_that_failed_is_made_again(session: Session, place: str):
    session.save(1, a_state(1))
    with pytest.raises(Interrupted):
        bring(session, place, interrupted_at(4))
    again: list[int] = []
    with mirror(session, place, again.append) as uploader:
        renamed = [uploader.begin(), uploader.begin(), uploader.begin()]
        assert renamed[0] == renamed[1] == renamed[2]
        for step in renamed[-1][0]:
            uploader.upload(step)
    holds(place, **{"step-00000001": 1})
    whole: list[int] = []
    bring(session, f"{place}-whole", whole.append)
    assert len(again) < len(whole)  # what had arrived was there


@pytest.mark.usefixtures("small_chunks")
def test_of_two_interrupted_copies_of_one_save_one_is_gone_on_with(session: Session, place: str):
    session.save(1, a_state(1))
    with contextlib.suppress(Interrupted):
        bring(session, place, interrupted_at(4))
    with mirror(session, place) as uploader:
        uploader.begin()  # renames it
        uploader.target.make_directory(f".step-00000001.{OLD}-1.partial", 0o700)
    bring(session, place)
    holds(place, **{"step-00000001": 1})
    assert not [name for name in open_target(place).list_directory("") if name.startswith(".step")]


def test_steps_are_copied_in_the_order_of_their_commits_and_once(session: Session, place: str):
    session.save(9, a_state(9), sequence=1)
    session.save(3, a_state(3), sequence=2)
    assert [step.step for step in bring(session, place)] == [9, 3]
    assert bring(session, place) == []
    holds(place, **{"step-00000003": 3, "step-00000009": 9})


@pytest.mark.usefixtures("small_chunks")
def test_damage_is_not_handed_on_and_does_not_keep_others_back(session: Session, place: str):
    session.save(1, a_state(1), sequence=1)
    session.save(2, a_state(2), sequence=2)
    flip_bit(next(Path(session.root).glob("step-00000001/model*.safetensors")))
    with mirror(session, place) as uploader:
        (first, second), _ = uploader.begin()
        with pytest.raises(IntegrityError, match="block"):
            uploader.upload(first)
        uploader.forget(first)
        uploader.upload(second)
    holds(place, **{"step-00000002": 2})


def test_a_file_that_is_missing_is_damage(session: Session, place: str):
    session.save(1, a_state(1))
    next(Path(session.root).glob("step-00000001/model*.safetensors")).unlink()
    with mirror(session, place) as uploader, pytest.raises(IntegrityError, match="o such file"):
        uploader.upload(*uploader.begin()[0])
    holds(place)


def test_a_replaced_step_is_replaced_in_the_mirror_and_never_by_an_older_one(
    session: Session, place: str
):
    session.save(1, a_state(1), sequence=1)
    bring(session, place)
    before = Path(session.root) / "before"
    shutil.copytree(Path(session.root) / "step-00000001", before)
    session.save(1, a_state(2), sequence=2, replace=True)
    bring(session, place)
    holds(place, **{"step-00000001": 2})
    shutil.rmtree(Path(session.root) / "step-00000001")
    before.rename(Path(session.root) / "step-00000001")
    assert bring(session, place) == []
    holds(place, **{"step-00000001": 2})


@pytest.mark.usefixtures("small_chunks")
def test_a_step_that_is_deleted_while_it_is_copied_arrives_whole(session: Session, place: str):
    session.save(1, a_state(1))
    hidden = Path(session.root) / f".step-00000001.{OLD}.trash"

    def delete(nbytes: int) -> None:
        if not hidden.exists():
            (Path(session.root) / "step-00000001").rename(hidden)

    bring(session, place, delete)
    holds(place, **{"step-00000001": 1})


def test_a_step_that_is_gone_before_its_turn_is_told_of(session: Session, place: str):
    session.save(1, a_state(1))
    with mirror(session, place) as uploader:
        ((step,), _) = uploader.begin()
        shutil.rmtree(Path(session.root) / "step-00000001")
        with pytest.raises(CheckpointNotFoundError, match="before it was copied"):
            uploader.upload(step)
    holds(place)


@pytest.mark.usefixtures("small_chunks")
def test_a_step_that_is_replaced_while_it_is_copied_arrives_whole_and_its_successor_comes(
    session: Session, place: str
):
    session.save(1, a_state(1), sequence=1)

    def replace(nbytes: int) -> None:
        if not (Path(session.root) / "replaced").exists():
            (Path(session.root) / "replaced").touch()
            session.save(1, a_state(2), sequence=2, replace=True)

    bring(session, place, replace)
    holds(place, **{"step-00000001": 1})
    bring(session, place)
    holds(place, **{"step-00000001": 2})


@pytest.mark.usefixtures("small_chunks")
def test_what_the_run_does_not_have_any_more_leaves_nothing_half_in_the_mirror(
    session: Session, place: str
):
    session.save(1, a_state(1), sequence=1)
    with pytest.raises(Interrupted):
        bring(session, place, interrupted_at(8))
    shutil.rmtree(Path(session.root) / "step-00000001")
    session.save(2, a_state(2), sequence=2)
    bring(session, place)
    holds(place, **{"step-00000002": 2})
    assert not [name for name in open_target(place).list_directory("") if name.startswith(".step")]


@pytest.mark.usefixtures("small_chunks")
def test_who_has_lost_the_mirror_commits_nothing_there(session: Session, place: str):
    session.save(1, a_state(1))
    chunks: list[int] = []
    bring(session, f"{place}-whole", chunks.append)
    seen = itertools.count(1)

    def overtake(nbytes: int) -> None:
        if next(seen) == len(chunks):  # only the manifest is to come
            with mirror(session, place) as other:
                other.begin()

    with mirror(session, place, overtake) as uploader:
        ((step,), _) = uploader.begin()
        with pytest.raises(WriteError):
            uploader.upload(step)
    holds(place)
    bring(session, place)
    holds(place, **{"step-00000001": 1})


def test_where_the_run_has_gone_back_is_known_before_a_later_commit(session: Session, place: str):
    session.save(1, a_state(1), sequence=1)
    bring(session, place)
    ROLLBACK_FILE.write(session.storage, Rollbacks(((1, 5),)))
    session.save(2, a_state(2), sequence=6)
    with mirror(session, place) as uploader:
        uploader.upload(*uploader.begin()[0])
        assert rollback.read(uploader.target).pairs == ((1, 5),)


def test_a_deleted_step_is_gone_from_the_mirror_alone(session: Session, place: str):
    session.save(1, a_state(1), sequence=1)
    session.save(2, a_state(2), sequence=2)
    with mirror(session, place) as uploader:
        for step in uploader.begin()[0]:
            uploader.upload(step)
        assert uploader.delete([1], 2, spare_read=True) == {}
    holds(place, **{"step-00000002": 2})
    assert (Path(session.root) / "step-00000001").exists()


@pytest.mark.parametrize("there", [None, b"", b"\n"])
def test_who_gives_an_identity_late_gives_no_second_one(
    session: Session, place: str, there: bytes | None
):
    late, target = open_target(place), open_target(place)
    if there is not None:
        target.replace(identity.IDENTITY, there)
    read, given = late.read, list[str]()

    def read_late(path: str, max_nbytes: int) -> bytes | None:
        found = read(path, max_nbytes)
        if not given:  # who has taken over meanwhile is faster
            given.append(identity.identify(target))
        return found

    late.read = read_late
    assert identity.identify(late) == given[0] == identity.identify(target)
    assert [name for name in target.list_directory("") if "mirror-id" in name] == [
        identity.IDENTITY
    ]


def test_an_identity_that_is_given_while_it_is_looked_for_is_no_other_one(
    session: Session, place: str, monkeypatch: pytest.MonkeyPatch
):
    """By the daemon of the session before, which has begun with the mirror in that moment."""
    run = str(session.root)
    has_begun = False

    def begins_after(look: Callable[..., object]) -> Callable[..., object]:
        def looking(*arguments: object) -> object:
            nonlocal has_begun
            found = look(*arguments)
            if not has_begun:
                has_begun = True
                identity.remember(run, place, identity.identify(open_target(place)))
            return found

        return looking

    for name in ("_remembered", "_identity_at"):
        monkeypatch.setattr(identity, name, begins_after(getattr(identity, name)))
    identity.open_known(run, place)
    identity.open_known(run, place)
    shutil.rmtree(place.removeprefix("file://"))
    with pytest.raises(WriteError, match="no longer exists"):
        identity.open_known(run, place)


def thread_of(run: Path, place: str = "", store: Mapping[str, str] | None = None) -> Mirror:
    """The mirror of a daemon, which is not started yet."""
    boot = Boot(
        attempt=1,
        directory=str(run),
        session=NEW,
        rank=0,
        world_size=1,
        trainer_pid=os.getpid(),
        mirror=place or f"{run}-mirror",
        options=DaemonOptions(takeover_timeout_s=1.0, commit_timeout_s=60.0),
        storage_options=urls.encode_options(store),
    )
    return Mirror(boot, lambda: None)


def test_a_mirror_does_not_wait_for_a_run_directory_that_was_removed(tmp_path: Path):
    mirror = thread_of(tmp_path / "removed")
    mirror.start()
    mirror.finish()
    # the patience with a mirror that does not answer is longer
    assert mirror.ended.wait(DEADLINE_S)


def test_what_was_deleted_is_removed_at_the_end(session: Session, place: str):
    """Before its grace is over: the next start may never come."""
    session.save(1, a_state(1), sequence=1)
    session.save(2, a_state(2), sequence=2)
    bring(session, place)
    mirror = thread_of(Path(session.root), place)
    mirror.delete(Delete(attempt=1, save_id=9, steps=(1,), sequence=2, retry=False, mirror=True))
    mirror.start()
    mirror.finish()
    assert mirror.ended.wait(DEADLINE_S)
    holds(place, **{"step-00000002": 2})
    assert not [name for name in open_target(place).list_directory("") if name.startswith(".step")]


def test_a_save_of_the_fallback_directory_is_told_of_by_its_step(session: Session):
    mirror = thread_of(Path(session.root))
    mirror.committed(CheckpointInfo(7, "/elsewhere/step-00000007", 100, OLD, 3, None, 1.0))
    message = mirror.messages.get(timeout=DEADLINE_S)
    assert isinstance(message, Mirrored)
    assert (message.sequence, message.name) == (3, "step-00000007")
    assert message.error is not None
    assert "is not mirrored" in message.error.message


def test_pauses_begin_anew_once_something_has_arrived(
    session: Session, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
):
    """Credentials expire, come back until the large file's turn, expire again and come back."""
    pauses: list[float] = []
    monkeypatch.setattr(Mirror, "_pause", lambda self, seconds: pauses.append(seconds))  # pyright: ignore
    small_one = threading.Event()

    def answer(request: Request, number: int) -> Fault:
        if request.method == "PUT-NEW" and request.key.endswith("objects.rank-00000.msgpack"):
            small_one.set()
        if request.method == "START":
            # which goes beside it, and so arrives in the same try
            assert small_one.wait(DEADLINE_S)
            return 403 if number < 3 else None
        return (
            403
            if request.key.endswith(".directory") and "step-" in request.key and number < 4
            else None
        )

    session.save(1, {"model": {"large": a_state(1)["model"]["w"].repeat(10, 1)[:2900]}})
    server.fault = answer
    mirror = thread_of(Path(session.root), "s3://bucket/mirror", server.options)
    mirror.start()
    mirror.finish()
    assert mirror.ended.wait(DEADLINE_S)
    with urls.using(server.options):
        assert verify("s3://bucket/mirror/step-00000001").ok
    assert pauses == [0.25, 0.5, 1.0, 2.0, 0.25, 0.5, 1.0]


def test_a_plain_checkpoint_is_not_put_behind_encrypted_ones(session: Session, place: str):
    session.save(1, a_state(1))
    bring(session, place)
    session.save(2, a_state(2))
    with mirror(session, place) as uploader:
        [missing], [there] = uploader.begin()
        uploader._latest = dataclasses.replace(there, encrypted=True)  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(InvalidArgumentError, match="the mirror of an encrypted run"):
            uploader.upload(missing)
    holds(place, **{"step-00000001": 1})
