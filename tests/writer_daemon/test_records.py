"""Rank 0's daemon and the records of a large job, at the size that no test machine can run as processes."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import pytest
from wire_messages import a_save

from sidesave.errors import NoSpaceError, WriteError
from sidesave.writer_daemon.commit import coordination
from sidesave.writer_daemon.commit.coordination import GivenUp
from sidesave.writer_daemon.format.layout import Part, Table
from sidesave.writer_daemon.format.manifest import FileRecord, RankRecord, Refusal, record_file
from sidesave.writer_daemon.format.tensor_file import digest
from sidesave.writer_daemon.protocol import Save, failure
from sidesave.writer_daemon.storage import PosixStorage

WORLD = 512


class Distant(PosixStorage):
    """A server so far away that a record comes only once so many are asked for."""

    asked = threading.Barrier(32, timeout=300)

    def read(self, path: str, max_nbytes: int) -> bytes | None:
        self.asked.wait()
        return super().read(path, max_nbytes)


def a_record(save: Save, rank: int) -> RankRecord:
    objects = FileRecord(f"objects.rank-{rank:05d}.msgpack", 1, digest(b"").hex())
    return RankRecord(
        session=save.session,
        step=save.step,
        sequence=save.sequence,
        rank=rank,
        world_size=WORLD,
        parent=None,
        pickled=False,
        created_s=1.5,
        torch_version="2.8",
        files=(),
        objects=objects,
        part=Part(Table({}, ())),
    )


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """A save of which the records of all ranks are there."""
    save = a_save(rank=0, world_size=WORLD)
    directory = tmp_path / coordination.partial_of(save)
    directory.mkdir()
    for rank in range(WORLD):
        (directory / record_file(rank)).write_bytes(a_record(save, rank).to_bytes())
    return save


def no_wait() -> None:
    return None


def test_many_records_are_read_at_the_same_time(tmp_path: Path, save: Save):
    records = coordination.await_records(Distant(str(tmp_path)), save, 60, no_wait)
    assert records == [a_record(save, rank) for rank in range(WORLD)]


def test_a_refusal_among_many_records_ends_the_save(tmp_path: Path, save: Save):
    refusal = Refusal(save.session, save.step, save.sequence, 300, WORLD, "failed", "NoSpaceError", "full", 28, "/x")
    (tmp_path / coordination.partial_of(save) / record_file(300)).write_bytes(refusal.to_bytes())
    with pytest.raises(GivenUp, match="rank 300: full"):
        coordination.await_records(PosixStorage(str(tmp_path)), save, 60, no_wait)


def test_a_record_that_cannot_be_read_is_an_error_of_storage(tmp_path: Path, save: Save):
    path = tmp_path / coordination.partial_of(save) / record_file(7)
    path.unlink()
    path.mkdir()
    with pytest.raises(WriteError, match="rank-00007"):
        coordination.await_records(PosixStorage(str(tmp_path)), save, 60, no_wait)


def test_a_record_of_another_save_is_refused(tmp_path: Path, save: Save):
    other = dataclasses.replace(a_record(save, 9), sequence=save.sequence + 1)
    (tmp_path / coordination.partial_of(save) / record_file(9)).write_bytes(other.to_bytes())
    with pytest.raises(coordination.IntegrityError, match="another save"):
        coordination.await_records(PosixStorage(str(tmp_path)), save, 60, no_wait)


def test_what_a_rank_has_made_since_rank_0_tidied_up_goes_when_it_learns_of_the_end(tmp_path: Path, save: Save):
    storage = PosixStorage(str(tmp_path))
    aborted = coordination.abort(storage, save, failure(0, None, NoSpaceError(28, "full")), "0-1")
    assert aborted is not None and storage.list_directory(aborted) == [coordination.ABORT]
    record, other = record_file(1), record_file(2)
    for name in (record, other, f".{record}.1-1", "model.rank-00001.safetensors", "replica-digest.rank-00001.0"):
        (tmp_path / aborted / name).touch()
    late = dataclasses.replace(save, rank=1)
    with pytest.raises(GivenUp, match="full"):
        coordination.await_commit(storage, late, 60, no_wait, no_wait, time.monotonic())
    assert sorted(storage.list_directory(aborted)) == [coordination.ABORT, other]
