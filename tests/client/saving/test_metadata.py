"""What a checkpoint is told about itself is there as long as the checkpoint is."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import DEADLINE_S, Orders, a_state

import sidesave
from sidesave.client.runs.finding import catalog_of
from sidesave.errors import InvalidArgumentError

TRICKY = {
    "records": 1,
    "metadata": {"metadata": '","metadata":"{', "records": [{"records": None}]},
    "format": "sidesave",
    "ünïcode \N{SNOWMAN}": '"\\\n',
    "loss": 1e-300,
}


@pytest.mark.parametrize("metadata", [{"metrics": {"loss": 0.25}}, TRICKY, {}, None])
def test_metadata_are_told_by_the_save_and_by_every_later_listing(
    tmp_path: Path, metadata: dict[str, Any] | None
):
    state = {
        "metadata": {"records": torch.ones(3)},
        "records": {"metadata": torch.zeros(2)},
        "plain": "metadata",
    }
    with sidesave.Checkpointer(tmp_path) as ckpt:
        told = ckpt.save(1, state, metadata=metadata).committed.result(DEADLINE_S)
    (info,) = catalog_of(str(tmp_path)).all()
    assert told == info
    assert told.metadata == info.metadata == (metadata or {})
    assert sidesave.verify(info.path).ok
    assert torch.equal(sidesave.load(info.path)["metadata"]["records"], torch.ones(3))
    manifest = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())
    assert json.loads(manifest.get("metadata", "{}")) == (metadata or {})


def test_a_metric_that_is_not_a_number_comes_back_as_such(tmp_path: Path):
    with sidesave.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, a_state(1), metadata={"loss": math.nan, "best": -math.inf}, blocking=True)
    (info,) = catalog_of(str(tmp_path)).all()
    assert math.isnan(info.metadata["loss"]) and info.metadata["best"] == -math.inf


def test_metadata_survive_the_daemon_and_the_session(tmp_path: Path, orders: Orders):
    run = tmp_path / "run"
    with sidesave.Checkpointer(run) as ckpt:
        orders.give("stop")
        handle = ckpt.save(1, a_state(1), metadata=TRICKY)
        pid, _ = orders.obeyed()
        os.kill(pid, signal.SIGKILL)
        assert handle.committed.result(DEADLINE_S).metadata == TRICKY
    with sidesave.Checkpointer(run) as ckpt:
        ckpt.load(into=a_state(2))
        ckpt.save(2, a_state(2), metadata={"n": 2}, blocking=True)
    assert [info.metadata for info in catalog_of(str(run)).all()] == [TRICKY, {"n": 2}]


def test_an_overwritten_step_has_the_new_metadata(tmp_path: Path):
    with sidesave.Checkpointer(tmp_path) as ckpt:
        for number in (1, 2):
            ckpt.save(1, a_state(number), metadata={"n": number}, overwrite=True, blocking=True)
    assert [info.metadata for info in catalog_of(str(tmp_path)).all()] == [{"n": 2}]


@pytest.mark.parametrize(
    "metadata",
    [
        {"loss": torch.tensor(1.0)},
        {"x": object()},
        [1],
        "text",
        {"x": "y" * (64 << 10)},
        {"x": "\ud800"},
        {("a",): 1},
    ],
    ids=["tensor", "object", "list", "text", "too much", "half a pair", "key"],
)
def test_metadata_that_are_no_plain_json_are_refused_and_nothing_is_saved(
    tmp_path: Path, metadata: Any
):
    with sidesave.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(InvalidArgumentError, match="metadata"):
            ckpt.save(1, a_state(1), metadata=metadata)
        assert ckpt.steps() == []
        ckpt.save(1, a_state(1), metadata={"x": "y" * (63 << 10)}, blocking=True)
    assert len(catalog_of(str(tmp_path)).all()[0].metadata["x"]) == 63 << 10
