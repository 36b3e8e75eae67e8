"""Which checkpoint is loaded, what it descends from, and which step may be saved again."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from loads import flip_bit, with_manifest

import sidesave
from sidesave import Checkpointer
from sidesave.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatVersionError,
    IntegrityError,
    StateMismatchError,
)

# Which checkpoint ---------------------------------------------------------------------------------


def state_of(step: int) -> dict[str, Any]:
    return {"x": {"w": torch.full((300,), float(step))}, "step": step}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 10, 20 and 30."""
    with Checkpointer(tmp_path) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, state_of(step))
    return tmp_path


def test_the_newest_or_the_step_asked_for_is_loaded(run: Path):
    with Checkpointer(run) as checkpointer:
        assert checkpointer.load()["step"] == 30
        assert checkpointer.load(20)["step"] == 20
        assert checkpointer.load(step=10)["step"] == 10
        with pytest.raises(CheckpointNotFoundError, match=r"no step 15; there are \[10, 20, 30\]"):
            checkpointer.load(15)


def test_fallback_takes_the_newest_older_one_that_verifies(
    run: Path, caplog: pytest.LogCaptureFixture
):
    flip_bit(run / "step-00000030" / "x.rank-00000.safetensors", -1)
    (run / "step-00000020" / "x.rank-00000.xxh3").unlink()
    with Checkpointer(run) as checkpointer:
        weight = torch.zeros(300)
        for step in (None, 20):
            with pytest.raises(IntegrityError):
                checkpointer.load(step, into={"x": {"w": weight}})
        assert not weight.any()
        with caplog.at_level(logging.WARNING):
            checkpointer.load(into={"x": {"w": weight}}, fallback=True)
        assert (weight == 10).all()
        passed_over = [
            record.message for record in caplog.records if "does not verify" in record.message
        ]
        assert [message[:7] for message in passed_over] == ["step 30", "step 20"]
        info = checkpointer.save(15, state_of(15), blocking=True).committed.result()
        assert info.parent is not None
        assert info.parent[0] == 10


def test_fallback_raises_when_nothing_verifies(run: Path):
    for step in (10, 20, 30):
        flip_bit(run / f"step-000000{step}" / "x.rank-00000.safetensors", -1)
    with Checkpointer(run) as checkpointer, pytest.raises(IntegrityError, match="step-00000010"):
        checkpointer.load(fallback=True)


def test_fallback_does_not_go_forward(run: Path):
    flip_bit(run / "step-00000010" / "x.rank-00000.safetensors", -1)
    with Checkpointer(run) as checkpointer, pytest.raises(IntegrityError):
        checkpointer.load(10, fallback=True)


def test_fallback_is_for_damage_and_not_for_a_state_that_does_not_fit(run: Path):
    with Checkpointer(run) as checkpointer, pytest.raises(StateMismatchError):
        checkpointer.load(into={"x": {"w": torch.zeros(7)}}, fallback=True)


def test_a_step_with_a_damaged_manifest_is_damaged_and_not_missing(run: Path):
    flip_bit(run / "step-00000020" / "manifest.json", -3)
    with Checkpointer(run) as checkpointer:
        with pytest.raises(IntegrityError, match=r"step-00000020/manifest\.json"):
            checkpointer.load(20)
        assert checkpointer.load(20, fallback=True)["step"] == 10
        assert checkpointer.steps() == [10, 30]


def test_a_run_directory_with_a_newer_format_is_refused_as_such(run: Path):
    with_manifest(run / "step-00000030", lambda body: body.update(version=2))
    with pytest.raises(FormatVersionError), Checkpointer(run) as checkpointer:
        checkpointer.load()


# Lineage ------------------------------------------------------------------------------------------


def test_a_checkpoint_names_the_one_it_was_resumed_from(run: Path):
    with Checkpointer(run) as first:
        assert first.load()["step"] == 30
        info = first.save(40, state_of(40), blocking=True).committed.result()
    assert info.parent is not None
    assert info.parent[0] == 30
    assert info.parent[1] != info.session
    with Checkpointer(run) as second:
        second.load(20)
        info = second.save(25, state_of(25), blocking=True).committed.result()
    assert info.parent is not None
    assert info.parent[0] == 20


def test_after_going_back_the_newest_is_what_was_saved_last(run: Path):
    with Checkpointer(run) as checkpointer:
        checkpointer.load(10)
        checkpointer.save(15, state_of(15), blocking=True)
        assert checkpointer.latest_step() == 15
        assert checkpointer.steps() == [10, 15, 20, 30]
        assert checkpointer.load()["step"] == 15
    with Checkpointer(run) as checkpointer:
        assert checkpointer.load()["step"] == 15


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_superseded_step_can_be_saved_again_and_an_ancestor_cannot(
    run: Path, restarts: bool, own: bool
):
    """``own``: the steps gone back over are of the same session. ``restarts``: a new one goes on
    from where it went.
    """
    checkpointer = Checkpointer(run)
    try:
        if own:
            for step in (40, 50, 60):
                checkpointer.save(step, state_of(step))
            checkpointer.wait()
        steps = (40, 50, 60) if own else (10, 20, 30)
        checkpointer.load(steps[0])
        checkpointer.save(steps[0] + 5, state_of(1), blocking=True)
        if restarts:
            checkpointer.close()
            checkpointer = Checkpointer(run)
        for taken in (steps[0], steps[0] + 5):
            with pytest.raises(CheckpointExistsError, match=f"step {taken}"):
                checkpointer.save(taken, state_of(taken))
        info = checkpointer.save(steps[1], state_of(99), blocking=True).committed.result()
        assert sidesave.load(info)["step"] == 99
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(steps[1], state_of(1))
        assert checkpointer.latest_step() == steps[1]
        assert checkpointer.load(steps[2])["step"] == steps[2], "abandoned, and still there"
    finally:
        checkpointer.close()


def test_an_existing_step_is_replaced_only_on_request(run: Path):
    with Checkpointer(run) as checkpointer:
        with pytest.raises(CheckpointExistsError) as caught:
            checkpointer.save(30, state_of(31))
        assert caught.value.filename == str(run / "step-00000030")
        assert checkpointer.load(30)["step"] == 30
        checkpointer.save(30, state_of(31), overwrite=True, blocking=True)
        assert checkpointer.load(30)["step"] == 31
        checkpointer.save(20, state_of(21), overwrite=True, blocking=True)
        assert (checkpointer.latest_step(), checkpointer.steps()) == (20, [10, 20, 30])
    assert sorted(path.name for path in run.iterdir() if "step" in path.name) == [
        "step-00000010",
        "step-00000020",
        "step-00000030",
    ]


def test_a_step_that_is_on_its_way_is_taken(run: Path):
    with Checkpointer(run) as checkpointer:
        checkpointer.save(40, {"x": torch.ones(1 << 20)})
        with pytest.raises(CheckpointExistsError, match="step 40 is already saved or being saved"):
            checkpointer.save(40, state_of(40))
