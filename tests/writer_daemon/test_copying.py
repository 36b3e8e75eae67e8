"""The copier limits the pieces in memory, and copies each file once."""

import contextlib
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from sessions import Session, a_state
from trainers import DEADLINE_S

from sidesave.client.reading.verify import verify
from sidesave.errors import NoSpaceError
from sidesave.writer_daemon.checkpoints.copying import (
    CopyFlow,
    CopyObserver,
    copy_checkpoint,
    read_manifest,
)
from sidesave.writer_daemon.storage import InputFile, OutputFile, PosixStorage

pytestmark = pytest.mark.usefixtures("end_all")

STEP = "step-00000001"
FLOW = CopyFlow(tensor_files=2, pieces=3, piece_nbytes=64 << 10)


class Memory:
    """Counts the pieces that are read and not written yet; writes wait for as many as allowed."""

    def __init__(self) -> None:
        self.pieces = self.most = 0
        self._full, self._lock = threading.Event(), threading.Lock()

    def read(self) -> None:
        with self._lock:
            self.pieces += 1
            self.most = max(self.most, self.pieces)
            if self.pieces >= FLOW.pieces:
                self._full.set()

    def write(self) -> None:
        assert self._full.wait(DEADLINE_S)
        if self.pieces == FLOW.pieces:
            time.sleep(0.01)  # for a read that is too many
        with self._lock:
            self.pieces -= 1


class Source(PosixStorage):
    memory: Memory

    @contextlib.contextmanager
    def open(self, path: str) -> Generator[InputFile]:
        with super().open(path) as file:
            read_into = file.read_into

            def counted(offset: int, window: memoryview) -> int:
                self.memory.read()
                return read_into(offset, window)

            file.read_into = counted
            yield file


class Target(PosixStorage):
    memory: Memory

    def create(self, path: str, nbytes: int, final: str | None = None) -> OutputFile:
        file = super().create(path, nbytes, final)
        write_at = file.write_at

        def counted(data: memoryview, offset: int) -> None:
            write_at(data, offset)
            self.memory.write()

        if path.partition(".safetensors")[1]:
            file.write_at = counted
        return file


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def copy(source: PosixStorage, target: PosixStorage) -> None:
    copy_checkpoint(
        source, STEP, read_manifest(source, STEP), target, STEP, "1", FLOW, CopyObserver()
    )


def test_no_more_pieces_are_in_memory_than_the_flow_allows(
    session: Session, root: Path, target: Path
):
    session.save(1, a_state(1))
    memory = Memory()
    with (
        contextlib.closing(Source(str(root))) as source,
        contextlib.closing(Target(str(target))) as copied,
    ):
        source.memory = copied.memory = memory
        copy(source, copied)
    assert memory.most == FLOW.pieces
    assert verify(target / STEP).ok


def test_what_has_no_room_is_refused_before_a_tensor_is_copied(
    session: Session, root: Path, target: Path, monkeypatch: pytest.MonkeyPatch
):
    session.save(1, a_state(1))
    monkeypatch.setattr(PosixStorage, "free_nbytes", lambda self: 1000)
    with (
        contextlib.closing(PosixStorage(str(root))) as source,
        contextlib.closing(PosixStorage(str(target))) as copied,
        pytest.raises(NoSpaceError, match="1,000 are free"),
    ):
        copy(source, copied)
    assert not [path for path in (target / STEP).iterdir() if "safetensors" in path.name]
