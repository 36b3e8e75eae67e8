"""What has not changed since the last save is linked, and what cannot be linked is written."""

import contextlib
import errno
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from object_server import ObjectServer
from object_sessions import KINDS, begin, new_place
from sessions import Death, Session, State, check, entries

from sidesave import Frozen
from sidesave.errors import NoSpaceError, WriteError
from sidesave.writer_daemon.commit import commit
from sidesave.writer_daemon.storage import urls
from sidesave.writer_daemon.writing import frozen
from sidesave.writer_daemon.writing.frozen import FrozenFiles

pytestmark = pytest.mark.usefixtures("end_all")

BASE, LIST = "model@frozen.rank-00000.safetensors", "model@frozen.rank-00000.xxh3"


def a_state(seed: int, base: int = 0) -> State:
    """A base of some blocks, and what is trained on top of it."""
    generator = torch.Generator().manual_seed(base)
    layers = {
        "large": torch.rand(300_000, generator=generator),
        "small": torch.rand(7, generator=generator),
    }
    return {
        "model": {"base": Frozen(layers), "adapter": torch.full((50,), seed + 0.5)},
        "seed": seed,
    }


def inode(root: Path, step: int, name: str = BASE) -> int:
    return (root / f"step-{step:08d}" / name).stat().st_ino


def test_the_same_bytes_are_linked_with_their_digests_and_the_rest_is_written(
    session: Session, root: Path
):
    for step in (1, 2, 3):
        session.save(step, a_state(step), sequence=step)
    for step in (1, 2, 3):
        check(root, step, a_state(step))
        names = entries(root / f"step-{step:08d}")
        links = {name: (root / f"step-{step:08d}" / name).stat().st_nlink for name in names}
        assert links == {name: 3 if name in (BASE, LIST) else 1 for name in names}
    shutil.rmtree(root / "step-00000001")
    check(root, 3, a_state(3))


@pytest.mark.parametrize("changed", ["first", "last"])
def test_other_bytes_are_written_and_those_are_linked_from_then_on(
    session: Session, root: Path, changed: str
):
    states = [a_state(step) for step in range(4)]
    for state in states[2:]:
        state["model"]["base"].value["large"][0 if changed == "first" else -1] = 5
    for step, state in enumerate(states):
        session.save(step, state, sequence=step + 1)
    assert inode(root, 0) == inode(root, 1) != inode(root, 2) == inode(root, 3)
    for step, state in enumerate(states):
        check(root, step, state)


def test_a_base_of_another_size_is_written(session: Session, root: Path):
    states = [a_state(1), a_state(2), a_state(3)]
    states[1]["model"]["base"].value["more"] = torch.ones(3)
    for step, state in enumerate(states):
        session.save(step, state, sequence=step + 1)
        check(root, step, state)
    assert len({inode(root, step) for step in range(3)}) == 3


def test_each_so_manyth_save_writes_the_file_anew(
    session: Session, root: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(frozen, "EVERY", 3)
    for step in range(8):
        session.save(step, a_state(step), sequence=step + 1)
    inodes = [inode(root, step) for step in range(8)]
    assert [inodes.index(number) for number in inodes] == [0, 0, 0, 3, 3, 3, 6, 6]


def test_the_first_save_of_a_daemon_writes_the_file_anew(session: Session, root: Path):
    session.save(1, a_state(1))
    session.end()
    session.respawn()
    session.save(2, a_state(2), sequence=2)
    assert inode(root, 1) != inode(root, 2)


@pytest.mark.parametrize("becomes", ["deleted", "moved", "of another save", "a link"])
def test_a_last_step_that_is_gone_between_digest_and_link_costs_one_write(
    session: Session, root: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
):
    session.save(1, a_state(1, base=1), sequence=1)
    shutil.copytree(root / "step-00000001", root.with_name("other"))
    session.save(1, a_state(2), sequence=2, replace=True)
    link = FrozenFiles.link

    def late(self: FrozenFiles, name: str, final: str) -> bool:
        path = root / "step-00000001"
        if becomes == "deleted":
            shutil.rmtree(path, ignore_errors=True)
        elif becomes == "moved":
            path.rename(root / ".step-00000001.ffffffffffffffff.trash")
        elif becomes == "of another save":
            shutil.rmtree(path)
            shutil.copytree(root.with_name("other"), path)
        else:
            (path / BASE).rename(root.with_name("elsewhere"))
            (path / BASE).symlink_to(root.with_name("elsewhere"))
        return link(self, name, final)

    with monkeypatch.context() as patch:
        patch.setattr(FrozenFiles, "link", late)
        session.save(2, a_state(3), sequence=3)
    check(root, 2, a_state(3))
    assert (root / "step-00000002" / BASE).stat().st_nlink == 1
    session.save(3, a_state(4), sequence=4)
    assert inode(root, 2) == inode(root, 3)


def test_a_save_that_was_written_and_never_committed_is_not_taken_for_the_step_of_its_name(
    session: Session, root: Path
):
    session.save(1, a_state(1), sequence=1)
    given_up = session.put(1, a_state(2, base=1), sequence=2, replace=True)
    commit.reclaim(session.storage, given_up)
    session.save(2, a_state(3, base=1), sequence=3)
    check(root, 1, a_state(1))
    check(root, 2, a_state(3, base=1))


def test_a_save_whose_commit_is_still_to_come_is_linked_to(session: Session, root: Path):
    """As with several ranks, where rank 0 may be waiting for another one."""
    first, second = session.stage(1, a_state(1), sequence=1), None
    session.write(first)
    second = session.put(2, a_state(2), sequence=2)
    session.commit(first)
    session.commit(second)
    assert inode(root, 1) == inode(root, 2)
    for step in (1, 2):
        check(root, step, a_state(step))


@pytest.mark.parametrize(
    "code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES]
)
def test_where_no_link_can_be_made_the_file_is_written(
    session: Session, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    link = os.link

    def refuse(source: str, target: str, **options: Any) -> None:
        if Path(source).parent != Path(target).parent:
            raise OSError(code, os.strerror(code))
        link(source, target, **options)

    session.save(1, a_state(1))
    monkeypatch.setattr(os, "link", refuse)
    session.save(2, a_state(2), sequence=2)
    check(root, 2, a_state(2))
    assert inode(root, 1) != inode(root, 2)


def test_an_error_of_the_disk_is_the_saves(
    session: Session, root: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*names: str, **options: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    session.save(1, a_state(1))
    save = session.stage(2, a_state(2), sequence=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", fail)
        with pytest.raises(WriteError) as caught:
            session.write(save)
    assert caught.value.errno == errno.EIO
    session.resume(save)
    check(root, 2, a_state(2))


def test_room_is_needed_only_for_what_is_written(
    session: Session, root: Path, monkeypatch: pytest.MonkeyPatch
):
    session.save(1, a_state(1))
    monkeypatch.setattr(session.storage, "free_nbytes", lambda: 500_000)
    session.save(2, a_state(2), sequence=2)
    check(root, 2, a_state(2))
    save = session.stage(3, a_state(3, base=1), sequence=3)
    with pytest.raises(NoSpaceError):
        session.write(save)


def save_and_die(root: Path, last: int) -> bool:
    """A save that links, of a daemon that dies before its ``last``-th operation on storage; whether
    it survived.
    """
    root.mkdir()
    session = Session(root)
    session.save(1, a_state(1))
    save, known = session.stage(2, a_state(2), sequence=2), session.writer._frozen
    session.mortal(last)
    known._storage = session.storage
    session.writer._frozen = known
    survived = False
    with contextlib.suppress(Death):
        session.write(save)
        session.commit(save)
        survived = True
    session.end()
    session.respawn()
    session.recover()
    session.resume(save)
    for step in (1, 2):
        check(root, step, a_state(step))
    assert survived == ((root / "step-00000002" / BASE).stat().st_nlink == 2) or last > 1
    assert entries(root) == ["step-00000001", "step-00000002"]
    session.close()
    return survived


def test_a_daemon_dead_at_any_operation_of_such_a_save_leaves_it_to_the_next(tmp_path: Path):
    last = next(last for last in itertools.count() if save_and_die(tmp_path / f"{last}", last))
    assert last > 15


# Other storages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_copies_what_has_not_changed(kind: str, tmp_path: Path):
    with new_place(kind, tmp_path) as root:
        session = begin(root)
        for step in (1, 2, 3):
            session.save(step, a_state(step, base=step // 3), sequence=step)
        for step in (1, 2, 3):
            check(root, step, a_state(step, base=step // 3))
        session.close()


@pytest.fixture
def server(server: ObjectServer) -> Iterator[ObjectServer]:
    with urls.using(server.options):
        yield server


def uploads(server: ObjectServer) -> int:
    """Of bases."""
    return sum(
        request.key.endswith(BASE) and request.method in ("PUT", "START")
        for request in server.requests
    )


def test_what_has_not_changed_is_not_uploaded_again(server: ObjectServer):
    session = begin("s3://bucket/run")
    session.save(1, a_state(1))
    assert (uploads(server), server.count("COPY")) == (1, 0)
    begun = len(server.requests)
    session.save(2, a_state(2), sequence=2)
    assert (uploads(server), server.count("COPY")) == (1, 2)
    frozen = ("@frozen", "-00000001.ffffffffffffffff/rank-00000.json")
    asked = Counter(
        each.method for each in server.requests[begun:] if any(name in each.key for name in frozen)
    )
    assert asked == {"GET": 2, "HEAD": 4, "COPY": 2}, (
        "of tensors and digests: is it that save, is it there, now it is"
    )
    check("s3://bucket/run", 2, a_state(2))
    session.close()


@pytest.mark.parametrize("fault", [400, 501, 403])
def test_what_a_store_does_not_copy_is_uploaded(server: ObjectServer, fault: int):
    session = begin("s3://bucket/run")
    session.save(1, a_state(1))
    server.fault = lambda request, number: fault if request.method == "COPY" else None
    session.save(2, a_state(2), sequence=2)
    assert uploads(server) == 2
    check("s3://bucket/run", 2, a_state(2))
    session.close()


def test_a_link_whose_answer_was_lost_costs_one_write(
    session: Session, root: Path, monkeypatch: pytest.MonkeyPatch
):
    """As on network file systems, which repeat a request and are told that the name is taken."""
    link = session.storage.link
    monkeypatch.setattr(session.storage, "link", lambda old, new: link(old, new) and False)
    session.save(1, a_state(1))
    session.save(2, a_state(2), sequence=2)
    assert inode(root, 1) == inode(root, 2)
    for step in (1, 2):
        check(root, step, a_state(step))
