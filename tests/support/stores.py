"""Places that a run can be read from: each takes a directory of files and gives its URL, and what its store needs."""

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
from object_server import serving
from seaweed import upload

from sidesave.writer_daemon.storage import remote, urls
from sidesave.writer_daemon.storage.object_run import NamedObjects

Place = tuple[str, dict[str, Any]]
"""A path or URL, and storage options."""
_numbers = itertools.count()


def strays(url: str) -> list[str]:
    """Objects of a run that belong to no checkpoint, but for what every run has."""
    with contextlib.closing(urls.open_storage(url)) as storage:
        assert isinstance(storage, NamedObjects)
        steps = [name for name in storage.list_directory("") if name.startswith("step-")]
        own = [storage.location_of(name).rpartition("/")[2] for name in steps]
        own += [".sidesave.lease", ".sidesave.log", ".sidesave.rendezvous", ".sidesave.rollback"]
        return [key for key in storage.bucket.list_all("") if key.partition("/")[0] not in own]


@contextlib.contextmanager
def local(directory: Path) -> Iterator[Place]:
    yield str(directory), {}


@contextlib.contextmanager
def by_file(directory: Path) -> Iterator[Place]:
    yield f"file://{directory}", {}


@contextlib.contextmanager
def in_memory(directory: Path) -> Iterator[Place]:
    bucket = f"bucket-{next(_numbers)}"
    for path in directory.rglob("*"):
        if path.is_file():
            obstore.put(remote.memory_store(bucket), f"run/{path.relative_to(directory).as_posix()}", path)
    yield f"memory://{bucket}/run", {}


@contextlib.contextmanager
def by_s3(directory: Path) -> Iterator[Place]:
    """From the object server of the tests, which has the run in a bucket of its own."""
    bucket = directory.parent / "buckets" / "bucket"
    shutil.copytree(directory, bucket / "run")
    with serving(bucket.parent) as server:
        yield "s3://bucket/run", dict(server.options)


@contextlib.contextmanager
def by_http(directory: Path) -> Iterator[Place]:
    with serving(directory.parent) as server:
        yield f"{server.endpoint}/{directory.name}", {}


def in_seaweed(options: dict[str, str]) -> Callable[[Path], contextlib.AbstractContextManager[Place]]:
    @contextlib.contextmanager
    def place(directory: Path) -> Iterator[Place]:
        prefix = f"runs/{next(_numbers)}"
        upload(directory, "bucket", prefix, options)
        yield f"s3://bucket/{prefix}", dict(options)

    return place
