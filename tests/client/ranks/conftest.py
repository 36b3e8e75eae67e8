"""Ranks of one job, and where they save."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_server import ObjectServer
from rank_checks import Place, Start
from rank_trainers import Ranks, orders_to
from trainers import Orders, Traces


@pytest.fixture
def start(traces: Traces, tmp_path: Path) -> Iterator[Start]:
    """Starts the ranks of a job; see :class:`Ranks`."""
    with contextlib.ExitStack() as jobs:
        yield lambda count, **options: jobs.enter_context(
            Ranks(count, tmp_path / "groups", traces, **options)
        )


@pytest.fixture(params=["disk", pytest.param("store", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where ranks save that do not mind what it is."""
    return tmp_path / "run" if request.param == "disk" else f"file://{tmp_path}/store/run"


@pytest.fixture
def server(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    """An object store that ranks and the commands of the test find by the environment."""
    server.announce(monkeypatch.setenv)
    return server


@pytest.fixture
def ordered(tmp_path: Path) -> Iterator[tuple[Orders, dict[str, str]]]:
    """Orders to the daemons of one rank, and its environment."""
    with orders_to(tmp_path / "orders") as ordered:
        yield ordered
