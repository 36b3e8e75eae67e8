"""An object store with a run of two steps."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from object_server import ObjectServer, serving

from sidesave import Checkpointer


@pytest.fixture(scope="module")
def buckets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose ``bucket/run`` holds steps 1 and 2, of the module's ``state``."""
    run = tmp_path_factory.mktemp("buckets") / "bucket" / "run"
    run.mkdir(parents=True)
    with Checkpointer(run) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, request.module.state(step), files={"notes.txt": "a note"})
        checkpointer.wait()
    return run.parent.parent


@pytest.fixture
def server(buckets: Path) -> Iterator[ObjectServer]:
    with serving(buckets) as server:
        yield server
