"""A checkpoint to load."""

import shutil
from pathlib import Path

import pytest
from loads import live

from sidesave import Checkpointer


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ``live(3)``."""
    run = tmp_path_factory.mktemp("run")
    with Checkpointer(run) as checkpointer:
        return Path(checkpointer.save(7, live(3), blocking=True).committed.result())


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged."""
    return shutil.copytree(original, tmp_path / original.name)
