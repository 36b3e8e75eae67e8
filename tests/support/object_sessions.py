"""Sessions of one rank whose run is in an object store, and what a test does to that store beside
them.
"""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

from object_server import serving
from sessions import NEW, Session

from sidesave.writer_daemon.storage import urls
from sidesave.writer_daemon.storage.object_run import ObjectRun

_numbers = itertools.count()
KINDS = ("memory", "file", "s3")


@contextlib.contextmanager
def new_place(kind: str, directory: Path) -> Iterator[str]:
    """The URL of a run that is still to be made, in a store of one of the ``KINDS``, while that
    store is there.
    """
    if kind == "memory":
        yield f"memory://place-{next(_numbers)}/run"
    elif kind == "file":
        yield f"file://{directory}/run"
    else:
        (directory / "buckets").mkdir()
        with serving(directory / "buckets") as server, urls.using(server.options):
            yield "s3://bucket/run"


def open_run(root: str) -> ObjectRun:
    run = urls.open_for_writing(root)
    assert isinstance(run, ObjectRun)
    return run


def begin(root: str, name: str = NEW) -> Session:
    """A session that has recovered what was there."""
    session = Session(root, name, open_run=open_run)
    session.recover()
    return session


def edit(root: str, key: str, data: bytes | None) -> None:
    bucket = open_run(root).bucket
    if data is None:
        bucket.remove([key])
    else:
        bucket.put(key, data)


def content(root: str, key: str) -> bytes:
    data = open_run(root).bucket.read(key, 1 << 30)
    assert data is not None
    return data
