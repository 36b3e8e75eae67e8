"""Sessions of one rank without a trainer or a daemon: their memory, their operations on storage,
and their deaths.
"""

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest
import torch

from sidesave.client.loading import load as loader
from sidesave.client.reading.verify import verify
from sidesave.stager.copy.pool import SlotPool
from sidesave.stager.memory.arena import Arena
from sidesave.stager.plan import make_plan, structure_of
from sidesave.stager.state import tree
from sidesave.stager.state.flat_state import OBJECTS
from sidesave.writer_daemon import wire
from sidesave.writer_daemon.checkpoints.deletion import Trash, delete_steps
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.commit import commit
from sidesave.writer_daemon.commit.recovery import Recovery, recover
from sidesave.writer_daemon.format import tensor_file
from sidesave.writer_daemon.format.manifest import RankRecord
from sidesave.writer_daemon.format.names import hidden_directory, step_directory
from sidesave.writer_daemon.format.rollback import Rollbacks
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.lease.record import LeaseRecord
from sidesave.writer_daemon.protocol import Extent, Parent, Save
from sidesave.writer_daemon.storage import InputFile, OutputFile, PosixStorage, Storage, urls
from sidesave.writer_daemon.writing.writer import Writer

OLD, NEW = "0" * 16, "f" * 16
"""Sessions: one that is dead, and this one."""

State = dict[str, Any]


def a_state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "w": torch.randn(300, 500, generator=generator),
            "b": torch.randn(7, generator=generator),
        },
        "optimizer": {"m": torch.randn(1000, generator=generator), "step": seed},
    }


def arenas_nbytes(pid: int | str = "self") -> list[int]:
    """Sizes of the arenas that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "memfd:sidesave" in line]
    return [int(end, 16) - int(start, 16) for start, end in spans]


def same(one: State, other: State) -> bool:
    a, b = tree.flatten(one), tree.flatten(other)
    ours, theirs = (
        {fqn: tensor for tensors in flat.containers.values() for fqn, tensor in tensors.items()}
        for flat in (a, b)
    )
    return a.objects == b.objects and all(
        torch.equal(tensor, theirs[fqn]) for fqn, tensor in ours.items()
    )


BEFORE, AFTER = a_state(1), a_state(2)
"""States of step 100: the second in the end, and the first until then if a save replaces it."""
FILES = [
    "manifest.json",
    "model.rank-00000.safetensors",
    "model.rank-00000.xxh3",
    "objects.rank-00000.msgpack",
    "optimizer.rank-00000.safetensors",
    "optimizer.rank-00000.xxh3",
    "rank-00000.json",
]
"""Those of a checkpoint of such a state."""
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flip the first bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "flip the last bit": lambda data: data[:-1] + bytes([data[-1] ^ 0x80]),
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
    "lengthen": lambda data: data + b"\0",
}
replacing = pytest.mark.parametrize(
    "replacing", [False, True], ids=["a new step", "an overwritten step"]
)


class Session:
    """One session of one rank: staging memory, and the daemon's operations on a run directory."""

    def __init__(
        self,
        root: Path | str,
        name: str = NEW,
        storage: Storage | None = None,
        open_run: Callable[[str], Storage] = PosixStorage,
    ) -> None:
        self.root = root
        self.name = name
        self._open_run = open_run
        self.storage = storage or open_run(str(root))
        self.lease = self._take_lease()
        self.attempt = f"1-{os.getpid()}-{id(self)}"
        self.writer = self._writer()
        self._pool = SlotPool(1, lambda number, arena: None, lambda number: None)
        self._slot = self._pool.acquire(self, 0.0)

    @property
    def arena(self) -> Arena | None:
        """Its staging memory, once something was staged."""
        return self._slot.arena

    def stage(self, step: int, state: State, *, sequence: int = 1, replace: bool = False) -> Save:
        flat = tree.flatten(state)
        plan = make_plan(structure_of(flat.containers))
        (offset,) = self._pool.lay_out(self._slot, plan, [flat.objects], None, lambda fit: fit())
        tensors = [tensor for tensors in flat.containers.values() for tensor in tensors.values()]
        for tensor, target in zip(tensors, self._slot.targets, strict=True):
            target.view.copy_(tensor)
        arena = self._slot.arena
        assert arena is not None
        base = arena.data_offset
        save = Save(
            attempt=1,
            save_id=sequence,
            arena=1,
            generation=arena.begin_generation(),
            step=step,
            session=self.name,
            sequence=sequence,
            rank=0,
            world_size=1,
            files=tuple(
                Extent(name=f.container, offset=base + f.offset, nbytes=f.nbytes)
                for f in plan.files
            ),
            objects=Extent(name=OBJECTS, offset=offset, nbytes=len(flat.objects)),
            parent=Parent(step=1, session=OLD),
            replace=replace,
            pickled=False,
            created_s=time.time(),
            torch_version="2.8",
            retry=False,
        )
        arena.mark_staged(wire.encode(save))
        return save

    def put(self, step: int, state: State, *, sequence: int = 1, replace: bool = False) -> Save:
        """Stage a save and write it; nothing is committed."""
        save = self.stage(step, state, sequence=sequence, replace=replace)
        self.write(save)
        return save

    def write(self, save: Save) -> RankRecord:
        assert self._slot.arena is not None
        return self.writer.write(save, self._slot.arena, lambda done, total: None)

    def commit(self, save: Save) -> CheckpointInfo:
        content = commit.commit(self.storage, self.lease, save, self.attempt)
        if save.replace:  # at once, where a daemon gives readers some time
            trash = Trash(self.storage)
            trash.adopt()
            trash.empty(everything=True)
        return content

    def save(
        self, step: int, state: State, *, sequence: int = 1, replace: bool = False
    ) -> CheckpointInfo:
        return self.commit(self.put(step, state, sequence=sequence, replace=replace))

    def delete(self, step: int, before: int, *, rollbacks: Rollbacks = Rollbacks()) -> str | None:  # noqa: B008
        """Delete a step; return the name of what is left of it, or raise why it stays."""
        result = delete_steps(self.storage, self.lease, [step], before, rollbacks=rollbacks)
        for error in result.failures.values():
            raise error
        return next(iter(result.trash), None)

    def recover(self) -> Recovery:
        return recover(self.storage, self.lease, self.attempt)

    def resume(self, save: Save) -> None:
        """What a respawned daemon does with a save that comes again."""
        if commit.find_record(self.storage, save) is None:
            self.write(dataclasses.replace(save, retry=True))
        self.commit(save)

    def end(self) -> None:
        """As if the daemon had died: its lease is free, memory stays with the trainer."""
        self.writer.close()
        self.lease.release()
        self._lease_storage.close()
        self.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def close(self) -> None:
        """As if the trainer had died as well."""
        self.end()
        self._pool.release(self)
        self._pool.close()

    def respawn(self) -> None:
        """A daemon in the place of a dead one, on the same staging memory."""
        self.storage = self._open_run(str(self.root))
        self.lease = self._take_lease()
        self.attempt = f"2-{os.getpid()}-{id(self.lease)}"
        self.writer = self._writer()

    def mortal(self, last: int) -> None:
        """From here on the daemon dies before its ``last``-th operation on storage."""
        self.writer.close()
        self.storage.close()
        self.storage = MortalStorage(Path(self.root), last)
        self.writer = self._writer()

    def _take_lease(self) -> Lease:
        self._lease_storage = self._open_run(str(self.root))
        return Lease(
            self._lease_storage, LeaseRecord.current(self.name, os.getpid()), 0.0, lambda: True
        )

    def _writer(self) -> Writer:
        return Writer(self.storage, self.attempt, threading.Event(), self.lease.check)


_Session = TypeVar("_Session", bound=Session)


def staged(
    root: Path, begin: Callable[[Path], _Session], *, replacing: bool
) -> tuple[_Session, Save]:
    """A session in a new run directory that has staged ``AFTER`` as step 100, which may be
    ``BEFORE`` until then.
    """
    root.mkdir()
    session = begin(root)
    if replacing:
        session.save(100, BEFORE)
    return session, session.stage(100, AFTER, sequence=2, replace=replacing)


def recovered(root: Path | str, open_run: Callable[[str], Storage] = PosixStorage) -> Recovery:
    """Return what a new session recovers, which then ends."""
    with Session(root, open_run=open_run) as session:
        return session.recover()


def entries(root: Path | str) -> list[str]:
    """All but the lease; ``root`` may be a URL."""
    is_url = "://" in str(root)
    names = (
        urls.open_for_writing(str(root)).list_directory("")
        if is_url
        else [each.name for each in Path(root).iterdir()]
    )
    return sorted(name for name in names if name != ".sidesave.lease")


def check(root: Path | str, step: int, state: State) -> None:
    """The step is there, whole, and holds that state; ``root`` may be a URL, in ``urls.using``."""
    path = f"{root}/{step_directory(step)}"
    report = verify(path)
    assert report.ok, report.faults
    assert same(loader.load(path), state)


def check_alone(root: Path | str, step: int, state: State) -> None:
    """The step is there as in :func:`check`, and nothing else."""
    assert entries(root) == [step_directory(step)]
    check(root, step, state)


def leave(root: Path, step: int, state: State, *, sequence: int = 1, replace: bool = False) -> Path:
    """A partial directory whose daemon died after its record and before the commit."""
    with Session(root, OLD) as dead:
        dead.put(step, state, sequence=sequence, replace=replace)
    return root / hidden_directory(step, OLD, "partial")


class Death(BaseException):
    """The daemon dies here: nothing of its code runs afterwards."""


class MortalStorage(Storage):
    """A run directory whose daemon dies before its ``last``-th operation; there is none after
    that.
    """

    def __init__(self, root: Path, last: int) -> None:
        self._real = PosixStorage(str(root))
        self.root = self._real.root
        self._left = last

    def live(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Death

    def free_nbytes(self) -> int:
        return self._real.free_nbytes()

    def close(self) -> None:
        self._real.close()

    def make_directory(self, name: str, mode: int) -> bool:
        self.live()
        return self._real.make_directory(name, mode)

    def list_directory(self, name: str) -> list[str]:
        return self._real.list_directory(name)

    def create(self, path: str, nbytes: int, final: str | None = None) -> OutputFile:
        self.live()
        return MortalFile(self, self._real.create(path, nbytes))

    def read(self, path: str, max_nbytes: int) -> bytes | None:
        return self._real.read(path, max_nbytes)

    def open(self, path: str) -> AbstractContextManager[InputFile]:
        return self._real.open(path)

    def publish(self, temporary: str, final: str) -> bool:
        self.live()
        return self._real.publish(temporary, final)

    def link(self, old: str, new: str) -> bool:
        self.live()
        return self._real.link(old, new)

    def replace(self, path: str, data: bytes) -> None:
        self.live()
        self._real.replace(path, data)

    def rename_directory(self, source: str, target: str) -> None:
        self.live()
        self._real.rename_directory(source, target)

    def open_to_readers(self, name: str) -> None:
        self.live()
        self._real.open_to_readers(name)

    def sync_directory(self, name: str) -> None:
        self.live()
        self._real.sync_directory(name)

    def remove(self, path: str) -> None:
        self.live()
        self._real.remove(path)

    def remove_tree(self, name: str) -> None:
        """As it is: file by file, and death may come between two."""
        for entry in self.list_directory(name):
            self.remove(f"{name}/{entry}")
        self.live()
        self._real.remove_tree(name)


class MortalFile(OutputFile):
    def __init__(self, storage: MortalStorage, file: OutputFile) -> None:
        self._storage = storage
        self._file = file

    def write_at(self, data: memoryview, offset: int) -> None:
        self._storage.live()
        self._file.write_at(data, offset)

    def finish(self, nbytes: int) -> None:
        self._storage.live()
        self._file.finish(nbytes)

    def close(self) -> None:
        self._file.close()


def vouched(body: bytes) -> bytes:
    """A manifest or record whose own digest is right, whatever it says."""
    rest = body[1:] if body.startswith(b"{") else body
    return b'{"xxh3_128":"' + tensor_file.digest(rest).hex().encode() + b'",' + rest
