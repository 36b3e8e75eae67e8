"""A run directory in an object store, for who writes: the suite of all storages, and what is its own."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_server import ObjectServer, serving
from seaweed import seaweed
from storage_suite import StorageConformance, put

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


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with seaweed(tmp_path_factory.mktemp("weed")) as options:
        yield options


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    (tmp_path / "buckets").mkdir()
    with serving(tmp_path / "buckets") as server:
        yield server
