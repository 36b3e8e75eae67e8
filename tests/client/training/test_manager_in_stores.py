"""A ``CheckpointManager`` whose run directory is a URL."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from managers import Manage, managers_of
from trainers import DEADLINE_S, Orders, a_state, wait_until

import sidesave
from sidesave import (
    Checkpointer,
    CheckpointManager,
    EverySteps,
    KeepLatest,
    OnRequest,
    OnSignal,
    StagingOptions,
)
from sidesave.client.runs import finding
from sidesave.client.runs.save_requests import LISTENING, request_save
from sidesave.errors import InvalidArgumentError


@pytest.fixture
def manage_url(url: str) -> Iterator[Manage]:
    with managers_of(url) as manage:
        yield manage


def steps(url: str) -> list[int]:
    return [info.step for info in finding.find(url)]


def test_what_no_policy_keeps_is_deleted_and_the_run_resumes(manage_url: Manage, url: str) -> None:
    state: dict[str, Any] = {"x": 0, "y": a_state(1)["model"]}
    manager = manage_url(state, save=EverySteps(1), keep=KeepLatest(2))
    for step in range(5):
        state["x"] = step
        manager.step(step)
        manager.wait()
    wait_until(lambda: steps(url) == [3, 4])
    state = {"x": -1, "y": a_state(2)["model"]}
    manager = manage_url(state, save=EverySteps(1), keep=KeepLatest(2))
    assert manager.restore() == 5
    assert state["x"] == 4
    assert state["y"]["w"].equal(a_state(1)["model"]["w"])
    assert manager.rollback(3) == 4
    manager.close()
    manager = manage_url(state, save=EverySteps(1))
    assert manager.restore() == 4, "going back is written down in the store"


def test_pins_lie_in_the_store_and_hold(manage_url: Manage, url: str) -> None:
    manager = manage_url(keep=KeepLatest(1))
    manager.save(1, blocking=True)
    manager.pin(1)
    for step in (2, 3):
        manager.save(step, blocking=True)
    manager = manage_url(keep=KeepLatest(1))
    manager.save(4, blocking=True)
    manager.close()
    assert steps(url) == [1, 4]
    assert b'"steps":[1]' in (Path(url.removeprefix("file://")) / ".sidesave.pins").read_bytes()


def test_what_needs_files_beside_the_run_is_refused_or_left_out(
    manage_url: Manage, url: str
) -> None:
    with pytest.raises(InvalidArgumentError, match="names= needs links"):
        CheckpointManager(url, {"x": 0}, names="checkpoint-{step}")
    manager = manage_url(save=OnRequest())
    manager.request_save()
    handle = manager.step(1)
    assert handle is not None, "a request of this process needs no file"
    handle.committed.result(DEADLINE_S)
    with pytest.raises(InvalidArgumentError, match="local and mounted directories"):
        request_save(url)
    assert not (Path(url.removeprefix("file://")) / LISTENING).exists()


def test_the_end_that_a_signal_asks_for_comes_when_the_step_is_in_the_store(url: str) -> None:
    with CheckpointManager(url, {"x": 0}, save=OnSignal()) as manager:
        for step in range(3):
            manager.step(step)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            manager.step(3)
    assert ended.value.code == 128 + signal.SIGTERM
    assert steps(url) == [3]


# Saves that come faster than they are taken -------------------------------------------------------


def test_a_wait_for_a_slot_is_told_once_with_the_interval_that_can_be_kept(
    url: str, orders: Orders, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    with Checkpointer(url, staging=StagingOptions(slots=1)) as ckpt:
        session = ckpt.session
        acquire = session.pool.acquire
        # at first no upload has ended
        writes = iter([None, (13_000_000_000, 1200.0), (13_000_000_000, 1200.0)])

        def release_and_acquire(*arguments: Any) -> object:
            orders.release()  # the save before this one is held as long
            slot = acquire(*arguments)
            session.saves.last_write = next(writes)
            return slot

        monkeypatch.setattr(session.pool, "acquire", release_and_acquire)
        for step in (1, 3, 5):
            orders.give("hold", starting_at="sends WRITTEN", every_step=True)
            ckpt.save(step, a_state(step))
            orders.obeyed()
            ckpt.save(step + 1, a_state(step)).committed.result(DEADLINE_S)
    said = [record.getMessage() for record in caplog.records if "waited" in record.getMessage()]
    first, last = said
    assert first.startswith("step 4 has waited")
    assert "one save every 1200 s can be sustained" in first
    assert "(10.8 MB/s)" in first
    assert last.startswith("3 saves have waited for a staging slot")
    assert sidesave.latest(url) is not None
