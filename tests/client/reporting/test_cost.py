"""The cost of saves: its log lines, ``sidesave.plan`` and the budget for a node."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from row_tables import GrowingTable
from trainers import stopped

import sidesave
from sidesave import Checkpointer, Replicated, StagingOptions
from sidesave.client.cost import CostEstimate, CostReport, Durations
from sidesave.client.messages import format_bytes
from sidesave.errors import HostMemoryError, InvalidArgumentError, UnsupportedValueError
from sidesave.stager.memory import host_memory
from sidesave.stager.memory.host_memory import MemoryCgroup, NodeMemory
from sidesave.writer_daemon.save_record import SaveRecord

MIB = 1 << 20
STATE = {"weights": torch.ones(2 * MIB), "step": 3}
SLOT_NBYTES = 8 * MIB + 64 * 1024
"""About what it takes."""


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    """Returns level and text of the lines about cost that were logged since the last call."""
    caplog.set_level(logging.INFO)

    def taken() -> list[tuple[str, str]]:
        records = [each for each in caplog.records if each.name == "sidesave.client.cost"]
        caplog.clear()
        return [(each.levelname, each.getMessage()) for each in records]

    return taken


def saved(run: Path, steps: int = 3, **staging: Any) -> int:
    """Save in a session of its own; return the host memory of its slots."""
    with Checkpointer(run, staging=StagingOptions(**staging)) as checkpointer:
        first = (checkpointer.latest_step() or 0) + 1
        for step in range(first, first + steps):
            checkpointer.save(step, STATE, blocking=True)
        return checkpointer.session.pool.nbytes


# Log lines ----------------------------------------------------------------------------------------


def test_the_first_save_says_what_it_costs_and_the_next_session_says_it_in_one_line(
    tmp_path: Path, logged: Callable[[], list[tuple[str, str]]]
):
    nbytes = saved(tmp_path)
    (first, before), (second, after) = logged()
    assert first == second == "INFO"
    memory = f"saves take {format_bytes(nbytes)} of host memory, and as much again while two"
    assert before.startswith(memory) and before.endswith("are available")
    assert after.startswith(memory) and "holds training for" in after
    assert "is durable after" in after and "apart do not wait for one another" in after
    saved(tmp_path)
    [(level, line)] = logged()
    assert level == "INFO" and "is durable after" in line


def test_prepare_says_it_before_the_memory_is_taken(
    tmp_path: Path,
    logged: Callable[[], list[tuple[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(host_memory, "_mem_available", lambda: 1000)
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(HostMemoryError):
        checkpointer.prepare(STATE).result(60)
    [(_, line)] = logged()
    assert line.endswith("1.00 kB are available")


def test_a_budget_for_one_slot_is_warned_of_and_kept(
    tmp_path: Path, logged: Callable[[], list[tuple[str, str]]]
):
    with Checkpointer(
        tmp_path, staging=StagingOptions(node_memory_bytes=SLOT_NBYTES * 3 // 2)
    ) as checkpointer:
        checkpointer.save(1, STATE, blocking=True)
        with stopped(checkpointer.daemon_pid or 0):
            checkpointer.save(2, STATE)
            assert checkpointer.session.pool.is_busy()
        checkpointer.save(3, STATE)
        assert checkpointer.session.pool.nbytes <= SLOT_NBYTES
    warnings = [text for level, text in logged() if level == "WARNING"]
    assert len(warnings) == 1
    assert "room for 1 of 2 staging slots" in warnings[0]
    assert sidesave.load(tmp_path)["step"] == 3


def test_memory_that_is_left_for_one_slot_is_warned_of_once_all_ranks_have_one(
    tmp_path: Path,
    logged: Callable[[], list[tuple[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare(STATE).result(60)
        monkeypatch.setattr(host_memory, "_mem_available", lambda: 1000)
        checkpointer.save(1, STATE, blocking=True)
        checkpointer.save(2, STATE, blocking=True)
    levels = [level for level, _ in logged()]
    assert levels == ["INFO", "INFO", "WARNING"]


def test_only_the_first_rank_of_a_node_says_it(logged: Callable[[], list[tuple[str, str]]]):
    reached = {"laid_out": 1.0, "staged": 2.0, "written": 3.0, "committed": 4.0}
    for leads in (True, False):
        report = CostReport(NodeMemory(leads=leads), 2)
        report.before(1000)
        report.committed(1000, reached)
        assert len(logged()) == 2 * leads


def test_a_share_is_that_of_the_machine_and_of_the_cgroup(monkeypatch: pytest.MonkeyPatch):
    gathered = [["a", "x"], ["a", "x"], ["b", "x"], ["a", "y"], ["a", "x"]]
    memory = NodeMemory.of(4000, 3, gathered)
    assert (memory.ranks, memory.cgroup_ranks, memory.leads) == (4, 1, False)
    assert memory.share_nbytes == 1000
    assert NodeMemory.of(4000, 2, gathered) == NodeMemory(4000, 1, 1, True, 4000)
    assert NodeMemory.of(None, 0, gathered) == NodeMemory(None, 4, 3, True)
    monkeypatch.setattr(host_memory, "_meminfo", lambda name: 8000)
    monkeypatch.setattr(host_memory, "tightest_cgroup", lambda: None)
    assert NodeMemory.of(0.5, 0, gathered).share_nbytes == 1000
    monkeypatch.setattr(host_memory, "tightest_cgroup", lambda: MemoryCgroup("x", 1200, 600))
    assert NodeMemory.of(0.5, 0, gathered).share_nbytes == 200
    assert NodeMemory.of(4000, 0, gathered).share_nbytes == 1000
    monkeypatch.setattr(host_memory, "cgroup_headroom_nbytes", lambda: 600)
    assert NodeMemory.of(None, 0, gathered).available_nbytes(50) == 250
    assert NodeMemory.of(100, 0, gathered).available_nbytes(50) == 25


@pytest.mark.parametrize("amount", [0, -1, 0.0, 1.5, True, "1GB", float("nan")])
def test_a_budget_that_is_none_is_refused(tmp_path: Path, amount: Any):
    options = StagingOptions(node_memory_bytes=amount)
    with pytest.raises(InvalidArgumentError, match=r"StagingOptions\.node_memory_bytes must be"):
        Checkpointer(tmp_path, staging=options)
    with pytest.raises(InvalidArgumentError, match=r"StagingOptions\.node_memory_bytes must be"):
        sidesave.plan(STATE, tmp_path, staging=options)


def test_durations_are_those_of_committed_saves():
    record = SaveRecord(
        step=1,
        session="0" * 16,
        outcome="committed",
        nbytes=1000,
        staged_s=1.0,
        written_s=3.0,
        committed_s=4.0,
    )
    failed = SaveRecord(step=2, session="0" * 16, outcome="failed", nbytes=10**9, staged_s=99.0)
    durations = Durations.of([record, failed])
    assert durations is not None
    assert durations == Durations(nbytes=1000, hold_s=1.0, written_s=3.0, durable_s=4.0)
    assert durations.scaled(500) == Durations(nbytes=500, hold_s=0.5, written_s=1.5, durable_s=2.0)
    assert Durations.of([failed]) is None


# sidesave.plan ------------------------------------------------------------------------------------


def test_what_is_planned_is_what_is_taken(tmp_path: Path):
    cost = sidesave.plan(STATE, tmp_path / "run")
    assert (cost.slots, cost.ranks_on_node, cost.fitting_slots) == (2, 1, 2)
    assert cost.durable_s is cost.hold_s is cost.interval_s is None
    assert not (tmp_path / "run").exists()
    assert saved(tmp_path / "run") == cost.slot_nbytes
    later = sidesave.plan(STATE, tmp_path / "run")
    twice = sidesave.plan({**STATE, "more": torch.ones(2 * MIB)}, tmp_path / "run")
    assert later.durable_s and later.hold_s and later.interval_s and twice.durable_s
    assert later.hold_s < later.interval_s <= later.durable_s
    assert twice.durable_s == pytest.approx(2 * later.durable_s, rel=0.01)


def test_tensors_without_values_and_numbers_of_bytes_can_be_planned(tmp_path: Path):
    with torch.device("meta"):
        model = torch.nn.Linear(1000, 1000)
    real = sidesave.plan({"model": torch.nn.Linear(1000, 1000)}, tmp_path)
    assert sidesave.plan({"model": model}, tmp_path).slot_nbytes == real.slot_nbytes
    assert sidesave.plan(10**6, tmp_path).slot_nbytes == 10**6
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(UnsupportedValueError):
        checkpointer.save(1, {"model": model})


def test_ranks_divide_the_state(tmp_path: Path):
    whole = sidesave.plan({"weights": Replicated(torch.ones(4 * MIB))}, tmp_path)
    cost = sidesave.plan(
        {"weights": Replicated(torch.ones(4 * MIB))}, tmp_path, world_size=16, ranks_per_node=4
    )
    assert cost.slot_nbytes == pytest.approx(whole.slot_nbytes / 16, abs=64 << 10)
    assert cost.ranks_on_node == 4
    assert cost.available_nbytes == pytest.approx(whole.available_nbytes / 4, rel=0.2)
    assert "on each rank" in str(cost) and "on this node with its 4 ranks" in str(cost)


def test_the_rows_of_a_table_are_planned(tmp_path: Path):
    table = GrowingTable(width=64)
    table.train(range(1000))
    state = {"table": table}
    cost = sidesave.plan(state, tmp_path)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, blocking=True)
        assert checkpointer.session.pool.nbytes == cost.slot_nbytes > 1000 * 64 * 4


def test_a_state_that_does_not_fit_is_refused_with_the_amounts(tmp_path: Path):
    with pytest.raises(HostMemoryError, match=r"needs 1\.00 PB of host memory, and each"):
        sidesave.plan(10**15, tmp_path)
    cost = sidesave.plan(
        10**15, tmp_path, world_size=8, staging=StagingOptions(node_memory_bytes=10**15)
    )
    assert cost.fitting_slots == 1
    assert "room for 1 of 2 staging slots of 125 TB for each rank" in cost.shortage()


@pytest.mark.parametrize("place", ["directory", "new directory", "store"])
def test_a_probe_measures_the_speed_and_leaves_nothing(tmp_path: Path, place: str):
    (tmp_path / "store").mkdir()
    where = {
        "directory": str(tmp_path),
        "new directory": str(tmp_path / "new" / "run"),
        "store": f"file://{tmp_path}/store/run",
    }[place]
    cost = sidesave.plan(256 * MIB, where, probe=True)
    twice = sidesave.plan(256 * MIB, where, world_size=2, ranks_per_node=1, probe=True)
    assert cost.durable_s and twice.durable_s and cost.hold_s is None
    assert twice.slot_nbytes == 128 * MIB
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"world_size": 0},
        {"world_size": 2, "ranks_per_node": 3},
        {"ranks_per_node": 0},
        {"world_size": "2"},
    ],
)
def test_ranks_that_cannot_be_are_refused(tmp_path: Path, arguments: dict[str, Any]):
    with pytest.raises(InvalidArgumentError, match="must be an int from 1 to"):
        sidesave.plan(STATE, tmp_path, **arguments)


def test_a_state_of_no_bytes_is_refused(tmp_path: Path):
    with pytest.raises(InvalidArgumentError, match="1 byte or more"):
        sidesave.plan(0, tmp_path)


def test_a_cost_without_shortage_says_nothing_of_one():
    cost = CostEstimate(slot_nbytes=10, slots=2, ranks_on_node=1, available_nbytes=20)
    assert cost.shortage() == ""
