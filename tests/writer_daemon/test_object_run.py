"""A run directory in an object store, for who writes: the suite of all storages, and what is its
own.
"""

import errno
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_server import ObjectServer
from storage_suite import StorageConformance, put

from sidesave.errors import WriteError
from sidesave.writer_daemon.storage import Storage
from sidesave.writer_daemon.storage.object_run import ObjectRun

SESSION, OTHER = "f" * 16, "0" * 16
_numbers = itertools.count()

Place = tuple[str, dict[str, Any]]


class ObjectConformance(StorageConformance):
    """On whatever store ``place`` is in."""

    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError

    @pytest.fixture
    def storage(self, place: Place) -> Iterator[ObjectRun]:
        storage = ObjectRun(*place)
        storage.take_over(SESSION)
        yield storage
        storage.close()


class TestMemory(ObjectConformance):
    @pytest.fixture
    def place(self) -> Place:
        return f"memory://conformance-{next(_numbers)}/run", {}


class TestFile(ObjectConformance):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return f"file://{tmp_path}/run", {}


class TestS3(ObjectConformance):
    @pytest.fixture
    def place(self, server: ObjectServer) -> Place:
        return "s3://bucket/run", dict(server.options)


@pytest.mark.slow
class TestSeaweed(ObjectConformance):
    @pytest.fixture
    def place(self, weed: dict[str, str]) -> Place:
        return f"s3://bucket/conformance-{next(_numbers)}", weed

    def test_tree_is_removed_with_all_that_is_in_it(self, storage: Storage):
        """It goes on to list levels that have become empty, which are no names of steps."""
        assert isinstance(storage, ObjectRun)
        for name in ("step", "step/deep", "step/deep/er"):
            storage.make_directory(name, 0o700)
            put(storage, f"{name}/file", b"1")
        for _ in range(2):
            storage.remove_tree("step")
            assert storage.bucket.list_all("step") == []


# Daemons of other ranks, which put files and do not take over -------------------------------------

SAVE, STEP = f".step-00000001.{SESSION}-1.partial", "step-00000001"
ABORTED = f".step-00000001.{SESSION}-1.aborted"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return f"file://{tmp_path}/run", {}


@pytest.fixture
def first(place: Place) -> ObjectRun:
    """Of rank 0."""
    storage = ObjectRun(*place)
    storage.take_over(SESSION)
    storage.settle(alone=False)
    return storage


@pytest.fixture
def other(place: Place, first: ObjectRun) -> ObjectRun:
    return ObjectRun(*place)


def test_rank_0_finds_what_other_ranks_have_made_and_they_see_what_becomes_of_it(
    first: ObjectRun, other: ObjectRun
):
    other.make_directory(SAVE, 0o700)
    put(other, f"{SAVE}/rank-00001.json", b"1")
    another = f".step-00000002.{SESSION}-1.partial"
    other.make_directory(another, 0o700)
    put(other, f"{another}/rank-00001.json", b"2")
    assert {SAVE, another} <= {*first.list_directory("")}
    assert not first.make_directory(SAVE, 0o700)
    assert first.list_directory(SAVE) == first.list_directory(another) == ["rank-00001.json"]
    first.rename_directory(SAVE, STEP)
    first.remove_tree(another)
    assert [name for name in other.list_directory("") if "step" in name] == [STEP]
    assert other.read(f"{STEP}/rank-00001.json", 9) == b"1"


def test_names_are_changed_by_rank_0_alone(first: ObjectRun, other: ObjectRun):
    first.make_directory(SAVE, 0o700)
    put(first, f"{SAVE}/rank-00000.json", b"0")
    with pytest.raises(WriteError, match="has not taken over") as caught:
        other.rename_directory(SAVE, STEP)
    assert caught.value.errno == errno.ESTALE
    first.rename_directory(SAVE, STEP)
    for name in (SAVE, STEP):
        other.remove_tree(name)
    assert first.read(f"{STEP}/rank-00000.json", 9) == b"0"


@pytest.mark.parametrize("is_told", [True, False])
def test_what_another_rank_sends_to_a_save_that_was_given_up_counts_for_nothing_and_is_removed(
    first: ObjectRun, other: ObjectRun, is_told: bool
):
    other.make_directory(SAVE, 0o700)
    output = other.create(f"{SAVE}/.late", 1, f"{SAVE}/late")
    first.make_directory(SAVE, 0o700)
    first.rename_directory(SAVE, ABORTED)
    if not is_told:  # and that is long ago
        first.remove_tree(ABORTED)
    other.list_directory("")
    with pytest.raises(WriteError) as caught:
        other.create(f"{SAVE}/.later", 1, f"{SAVE}/later")
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(WriteError, match="was aborted") as caught:
        other.make_directory(SAVE, 0o700)
    assert caught.value.errno == errno.ECONNABORTED
    output.finish(1)
    assert other.publish(f"{SAVE}/.late", f"{SAVE}/late")  # its upload had begun before
    assert SAVE not in first.list_directory("")
    assert first.list_directory(ABORTED) == ["late"] * is_told
    other.remove_tree(SAVE)
    other.remove(f"{ABORTED}/late")
    first.remove_tree(ABORTED)
    assert first.bucket.list_all("step-00000001") == []


def test_a_rank_of_an_earlier_session_makes_no_directory(
    place: Place, first: ObjectRun, other: ObjectRun
):
    other.make_directory(SAVE, 0o700)
    following = ObjectRun(*place)
    following.take_over(OTHER)
    following.settle(alone=False)
    later = f".step-00000002.{SESSION}-2.partial"
    with pytest.raises(WriteError, match="another session has taken over the run"):
        other.make_directory(later, 0o700)
    other.remove_tree(SAVE)
    assert [name for name in following.list_directory("") if "step" in name] == []
    assert following.bucket.list_all("step-00000001") == []


def test_a_directory_that_got_a_new_prefix_and_no_mark_is_made_by_the_next_try(
    server: ObjectServer,
):
    run = ObjectRun("s3://bucket/run", server.options)
    run.take_over(SESSION)
    run.settle()
    # of a session whose prefixes do not count any more
    directory = f".step-00000001.{OTHER}-1.partial"
    server.fault = lambda request, number: 403 if request.key.endswith(".directory") else None
    with pytest.raises(WriteError) as refused:
        run.make_directory(directory, 0o700)
    assert refused.value.errno == errno.EACCES
    server.heal()
    assert run.make_directory(directory, 0o700)
    assert not run.make_directory(directory, 0o700)
    put(run, f"{directory}/manifest.json", b"1")
    run.rename_directory(directory, STEP)
    assert run.read(f"{STEP}/manifest.json", 9) == b"1"
