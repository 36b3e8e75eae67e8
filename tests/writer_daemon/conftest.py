"""A run directory, and a session in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sessions import Session


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty run directory."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def session(root: Path) -> Iterator[Session]:
    """A session that ends as if its daemon had died."""
    session = Session(root)
    yield session
    session.end()
