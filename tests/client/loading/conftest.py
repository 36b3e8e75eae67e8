"""A checkpoint to load."""

import shutil
from pathlib import Path

import pytest
from loads import live
from trainers import save


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ``live(3)``."""
    run = tmp_path_factory.mktemp("run")
    return save(run, live(3), 7)


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged."""
    return shutil.copytree(original, tmp_path / original.name)
