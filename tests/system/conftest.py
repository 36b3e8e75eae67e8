"""What campaigns share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_bytes import SEED
from object_server import ObjectServer, serving
from trainers import Traces


@pytest.fixture
def seed() -> None:
    """Told when a test fails, so that it can be run again as it was."""
    print(f"SIDESAVE_TEST_SEED={SEED}")


@pytest.fixture
def run(tmp_path: Path, traces: Traces, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory; daemons started by this very process leave no traces either."""
    monkeypatch.setenv("TMPDIR", traces.folder)
    return tmp_path / "run"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    """An object store with an empty bucket of the name ``bucket``."""
    (tmp_path / "store" / "bucket").mkdir(parents=True)
    with serving(tmp_path / "store") as server:
        yield server
