"""Rank 0's daemon and the records of a large job, at the size that no test machine can run as
processes.
"""

from __future__ import annotations

import dataclasses
import errno
import threading
import time
from pathlib import Path

import pytest
from wire_messages import a_save

from sidesave.errors import NoSpaceError, ProtocolError, StateMismatchError, WriteError
from sidesave.writer_daemon.commit import attempts, coordination
from sidesave.writer_daemon.commit.attempts import GivenUp
from sidesave.writer_daemon.commit.manifest_builder import assemble
from sidesave.writer_daemon.format.layout import GroupSum, Layout, Part, Table, TensorInfo, whole
from sidesave.writer_daemon.format.manifest import FileRecord, RankRecord
from sidesave.writer_daemon.format.names import record_file
from sidesave.writer_daemon.format.refusal import Refusal
from sidesave.writer_daemon.format.tensor_file import digest
from sidesave.writer_daemon.protocol import Link, Save, failure
from sidesave.writer_daemon.storage import PosixStorage
from sidesave.writer_daemon.writing.links import Linked, link_all
from sidesave.writer_daemon.writing.record import build_record

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


class Unreadable(PosixStorage):
    """It refuses to read for now."""

    def read(self, path: str, max_nbytes: int) -> bytes | None:
        raise WriteError(errno.EIO, "for now", path)


def test_a_link_whose_record_cannot_be_read_now_is_tried_again(tmp_path: Path):
    """It is not taken for one to a step that was deleted, of which no try would find more."""
    link = Link(names=("users",), saves=((1, 1), (2, 2)))
    save = dataclasses.replace(a_save(), links=(link,))
    for storage, expected in ((Unreadable, errno.EIO), (PosixStorage, errno.ENOENT)):
        with pytest.raises(WriteError) as caught:
            link_all(storage(str(tmp_path)), None, save, "1")
        assert caught.value.errno == expected
    assert "step-00000002/rank" in str(caught.value)


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """A save of which the records of all ranks are there."""
    save = a_save(rank=0, world_size=WORLD)
    directory = tmp_path / attempts.partial_of(save)
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
    refusal = Refusal(
        save.session,
        save.step,
        save.sequence,
        300,
        WORLD,
        "failed",
        "NoSpaceError",
        "full",
        28,
        "/x",
    )
    (tmp_path / attempts.partial_of(save) / record_file(300)).write_bytes(refusal.to_bytes())
    with pytest.raises(GivenUp, match="rank 300: full"):
        coordination.await_records(PosixStorage(str(tmp_path)), save, 60, no_wait)


def test_a_record_that_cannot_be_read_is_an_error_of_storage(tmp_path: Path, save: Save):
    path = tmp_path / attempts.partial_of(save) / record_file(7)
    path.unlink()
    path.mkdir()
    with pytest.raises(WriteError, match="rank-00007"):
        coordination.await_records(PosixStorage(str(tmp_path)), save, 60, no_wait)


def test_a_record_of_another_save_is_refused(tmp_path: Path, save: Save):
    other = dataclasses.replace(a_record(save, 9), sequence=save.sequence + 1)
    (tmp_path / attempts.partial_of(save) / record_file(9)).write_bytes(other.to_bytes())
    with pytest.raises(coordination.IntegrityError, match="another save"):
        coordination.await_records(PosixStorage(str(tmp_path)), save, 60, no_wait)


def records_of_two(*parts: Part) -> list[RankRecord]:
    save = a_save(rank=0, world_size=2)
    records = [dataclasses.replace(a_record(save, rank), world_size=2) for rank in range(2)]
    return [
        dataclasses.replace(record, part=part) for record, part in zip(records, parts, strict=True)
    ]


def check_refused(records: list[RankRecord], names: dict[int, set[str]], match: str) -> None:
    with pytest.raises(StateMismatchError, match=match):
        assemble(records, "here", names_of=lambda record: names[record.rank])


def test_a_rank_that_has_not_written_what_another_describes_fails_the_commit_by_name():
    table = Table({"w": TensorInfo("F32", (4,), "model")}, (Layout((0, 1), ((0, 2, 4),)),))
    first, sums = Part(table, cells=table.sums()[0]), table.sums()
    assemble(records_of_two(first, Part(cells=sums[1])), "here")
    match = r"ranks \[1\] hold other names.* w is on rank 0 and not on rank 1"
    check_refused(records_of_two(first, Part()), {0: {"w"}, 1: set()}, match)


@pytest.mark.parametrize("other", [{}, {"both": GroupSum(2, 8)}], ids=["nothing", "something else"])
def test_a_tensor_that_a_rank_expects_of_another_which_does_not_know_it_fails_the_commit(
    other: dict[str, GroupSum],
):
    """No record describes it, as each leaves that to the other, and its name would be in the
    treespec alone.
    """
    mine = {"both": GroupSum(2, 7)}
    assemble(records_of_two(Part(groups=mine), Part(groups=mine)), "here")
    records = records_of_two(Part(groups=mine), Part(groups=other))
    check_refused(
        records, {0: {"w", "momentum"}, 1: {"w"}}, "momentum is on rank 0 and not on rank 1"
    )


def test_a_record_does_not_list_a_tensor_that_no_file_of_its_rank_holds():
    save, objects = (
        a_save(rank=1, world_size=2),
        FileRecord("objects.rank-00001.msgpack", 1, digest(b"").hex()),
    )
    info = TensorInfo("F32", (4,), "model")
    for part in (
        Part(own=whole({"a": info}, 1)),
        Part(Table({"a": info}, (Layout((1, 0), ((0, 2, 4),)),))),
    ):
        with pytest.raises(
            ProtocolError, match=r"files of rank 1 lack tensors that its table lists: a$"
        ):
            build_record(save, [], Linked(), objects, (), part, "")


def test_what_a_rank_has_made_since_rank_0_tidied_up_goes_when_it_learns_of_the_end(
    tmp_path: Path, save: Save
):
    storage = PosixStorage(str(tmp_path))
    aborted = attempts.abort(storage, save, failure(0, None, NoSpaceError(28, "full")), "0-1")
    assert aborted is not None and storage.list_directory(aborted) == [attempts.ABORT]
    record, other = record_file(1), record_file(2)
    for name in (
        record,
        other,
        f".{record}.1-1",
        "model.rank-00001.safetensors",
        "replica-digest.rank-00001.0",
    ):
        (tmp_path / aborted / name).touch()
    late = dataclasses.replace(save, rank=1)
    with pytest.raises(GivenUp, match="full"):
        coordination.await_commit(storage, late, 60, no_wait, no_wait, time.monotonic())
    assert sorted(storage.list_directory(aborted)) == [attempts.ABORT, other]
