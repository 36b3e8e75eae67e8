"""Ranks of one job, and where they save."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_checks import Start
from rank_trainers import RankZygote, orders_to
from trainers import Orders, Traces


@pytest.fixture(scope="module")
def zygote() -> Iterator[RankZygote]:
    with contextlib.closing(Traces()) as traces, RankZygote(traces) as zygote:
        yield zygote


@pytest.fixture
def start(zygote: RankZygote, traces: Traces, tmp_path: Path) -> Iterator[Start]:
    """Starts the ranks of a job; see :meth:`RankZygote.start`."""
    folder = tmp_path / "groups"
    folder.mkdir()
    with contextlib.ExitStack() as jobs:
        yield lambda count, **options: jobs.enter_context(zygote.start(count, folder, traces, **options))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def ordered(tmp_path: Path) -> Iterator[tuple[Orders, dict[str, str]]]:
    """Orders to the daemons of one rank, and its environment."""
    with orders_to(tmp_path / "orders") as ordered:
        yield ordered
