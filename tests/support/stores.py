"""Places that a run can be read from: each takes a directory of files and gives its URL, and what
its store needs.
"""

import contextlib
import itertools
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import obstore
from object_server import serving
from seaweed import upload
from trainers import Traces, Trainer, check_step, end, size_of

import sidesave
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
        own += [
            f".sidesave.{name}"
            for name in ("lease", "log", "rendezvous", "rollback", "keys", "mirror-id")
        ]
        return [key for key in storage.bucket.list_all("") if key.partition("/")[0] not in own]


def kill_both(chance: random.Random, trainer: Trainer, daemon: int) -> None:
    """SIGKILL a trainer and its daemon, either of them first."""
    killed = [trainer.kill, lambda: end(daemon)]
    chance.shuffle(killed)
    for kill in killed:
        # a daemon whose trainer was first may be through
        with contextlib.suppress(ProcessLookupError):
            kill()


def kill_both_again_and_again(
    url: str, traces: Traces, chance: random.Random, rounds: Iterable[int]
) -> None:
    """Kill trainers that go on with a run, and their daemons, at any moment: nothing that was
    committed is lost.
    """
    committed: set[int] = set()
    first = 1
    for _ in rounds:
        with Trainer(traces, "keep_saving", url, first, 6, 0) as trainer:
            [pid] = trainer.expect("ready")
            trainer.go_on()
            until = chance.randrange(1, 12)  # lines
            for count, _line in enumerate(trainer.lines(), 1):
                if count == until:
                    break
            kill_both(chance, trainer, int(pid))
            committed |= {
                int(line.split(" ")[1]) for line in trainer.heard if line.startswith("committed ")
            }
        with sidesave.Checkpointer(url) as ckpt:
            first = (ckpt.latest_step() or 0) + 1
        found = {info.step: info for info in sidesave.find(url)}
        assert committed <= found.keys()
        for step, info in found.items():
            check_step(info, step, size_of(step))
        assert strays(url) == []
    traces.check()


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
            obstore.put(
                remote.memory_store(bucket), f"run/{path.relative_to(directory).as_posix()}", path
            )
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


def in_seaweed(
    options: dict[str, str],
) -> Callable[[Path], contextlib.AbstractContextManager[Place]]:
    @contextlib.contextmanager
    def place(directory: Path) -> Iterator[Place]:
        prefix = f"runs/{next(_numbers)}"
        upload(directory, "bucket", prefix, options)
        yield f"s3://bucket/{prefix}", dict(options)

    return place
