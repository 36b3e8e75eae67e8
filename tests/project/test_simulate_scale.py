"""The model of many ranks: what must hold whatever its inputs are, and its constants against what
is really written.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainers import ROOT

import sidesave
from scripts import simulate_scale
from scripts.simulate_scale import Inputs, commit_s
from sidesave.writer_daemon.commit import coordination
from sidesave.writer_daemon.commit.manifest_builder import assemble
from sidesave.writer_daemon.process import worker

DEFAULTS = Inputs()


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "scripts.simulate_scale", *arguments]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300
    ).stdout


def test_a_tree_of_records_helps_many_ranks_and_not_a_few():
    assert commit_s(DEFAULTS.tree, 100_000) < commit_s(DEFAULTS.flat, 100_000) / 10
    assert commit_s(DEFAULTS.tree, 8) > commit_s(DEFAULTS.flat, 8)


@pytest.mark.parametrize("world_size", [8, 300, 5_000, 100_000])
def test_more_tensors_never_make_anything_cheaper(world_size: int):
    few, many = Inputs(fqns=1_000), Inputs(fqns=50_000)
    for name in ("flat", "tree", "dcp", "others", "writing"):
        less, more = getattr(few, name)(world_size), getattr(many, name)(world_size)
        assert all(more[term] >= less[term] for term in less), name
        assert name in ("writing", "others") or sum(more.values()) > sum(less.values())


def test_each_change_helps_where_there_are_many_ranks():
    costs = [
        commit_s(commit, 100_000)
        for name, commit in simulate_scale.changes(DEFAULTS).items()
        if "tree" not in name
    ]
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) == len(costs) > 2


def test_no_group_is_better_than_the_best():
    best = sum(DEFAULTS.tree(20_000, DEFAULTS.best_group(20_000)).values())
    assert best <= min(
        sum(DEFAULTS.tree(20_000, size).values()) for size in (32, 128, 200, 256, 4096)
    )


def test_records_and_manifest_of_four_ranks_have_the_bytes_of_the_model():
    model = Inputs(fqns=40, layouts=3)
    records = simulate_scale.make_records(4, 40, 3)
    assert sum(len(record.to_bytes()) for record in records) == pytest.approx(
        model.records_nbytes(4), rel=0.1
    )
    assert len(assemble(records, "").to_bytes()) == pytest.approx(model.manifest_nbytes(4), rel=0.1)


def test_what_a_save_really_writes_has_the_files_and_bytes_of_the_model(tmp_path: Path):
    tensors = {f"layers.{index}.attention.weight": torch.zeros(2, 3) for index in range(200)}
    state = {"model": tensors, "optimizer": {"moment": torch.zeros(3)}, "loss": torch.zeros(1)}
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        info = checkpointer.save(1, state).committed.result(300)
    written = {path.name: path.stat().st_size for path in Path(info.path).iterdir()}
    model = Inputs(fqns=202, layouts=1)
    assert len(written) - 1 == model.files  # and the manifest
    assert written["rank-00000.json"] == pytest.approx(model.records_nbytes(1), rel=0.25)
    assert written["manifest.json"] == pytest.approx(model.manifest_nbytes(1), rel=0.25)


def test_the_pauses_of_the_model_are_those_of_the_code():
    drawn = 0.75  # the mean of what `_polls` draws
    assert pytest.approx(drawn * coordination._MAX_POLL_S) == DEFAULTS.poll_s
    assert pytest.approx(drawn * coordination._MAX_SLOW_POLL_S) == DEFAULTS.wait_s
    assert pytest.approx(drawn * coordination._MAX_ASKING_POLL_S) == DEFAULTS.ask_s
    assert pytest.approx(coordination._RANKS_PER_SECOND / drawn) == DEFAULTS.wait_rate
    assert pytest.approx(coordination._MAX_POLL_S) == DEFAULTS.max_idle_s
    assert coordination._READERS == DEFAULTS.readers
    assert worker._CHECK_LEASE_S == DEFAULTS.lease_every_s


def test_plans_of_dcp_have_the_bytes_of_the_model():
    found = simulate_scale.measure_dcp(4, 50)
    assert found["item_nbytes"] == pytest.approx(DEFAULTS.item_nbytes, rel=0.25)
    assert found["result_nbytes"] == pytest.approx(DEFAULTS.result_nbytes, rel=0.25)


@pytest.mark.slow
def test_the_command_prints_every_world_and_draws(tmp_path: Path):
    chart = tmp_path / "chart.svg"
    printed = run("--ranks", "8,100000", "--chart", str(chart))
    for name in ("flat", "tree", "plan", "failures"):
        assert name in printed
    assert sum(line.startswith("| 100,000 ") for line in printed.splitlines()) == 4
    assert chart.read_text().rstrip().endswith("</svg>")


def test_a_real_run_is_put_beside_the_model(tmp_path: Path):
    modelled = commit_s(Inputs(fqns=10).flat, 4)
    runs = tmp_path / "runs.json"
    runs.write_text(json.dumps([{"ranks": 4, "commit_s": 3 * modelled, "manifest_nbytes": 1}]))
    row = run("--validate", str(runs), "--fqns", "10").splitlines()[-2]
    assert [cell.strip() for cell in row.split("|")][6:8] == ["3", "<0.001"]
