"""What campaigns share."""

from pathlib import Path

import pytest
from hostile_bytes import SEED
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
