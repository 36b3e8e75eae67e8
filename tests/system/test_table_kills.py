"""Tables of several ranks, which are killed and come back in another number; and SIGKILL at each step of a save."""

import os
import signal
from pathlib import Path
from typing import Any

import campaigns
import pytest
from rank_trainers import Ranks
from row_tables import GrowingTable
from table_trainers import TableRank, TableTrainer, a_table, change, commit, train_to
from trainers import Orders, Traces, entries

import sidesave
from sidesave.errors import IntegrityError


def rows_of(ranks: Ranks) -> dict[int, Any]:
    """All rows, each of which is on one rank."""
    every = [row for rows in ranks.do("rows") for row in rows]
    rows = {each: tuple(values) for each, *values in every}
    assert len(rows) == len(every)
    return rows


def loaded(path: Path) -> dict[int, Any]:
    table = GrowingTable()
    sidesave.load(path, into={"tables": {"users": table}})
    return table.values()


def trained_to(step: int) -> dict[int, Any]:
    """What one process has that nothing befalls."""
    table = GrowingTable()
    train_to(table, step)
    return table.values()


@pytest.mark.parametrize("sizes", [(2, 3), pytest.param((4, 3, 8), marks=pytest.mark.slow)])
def test_a_table_that_is_trained_killed_and_resharded_is_bit_for_bit_what_one_process_trains(
    run: Path, tmp_path: Path, traces: Traces, sizes: tuple[int, ...]
):
    step = 0
    for size in sizes:
        with Ranks(size, tmp_path / str(size), traces, kind=TableRank) as ranks:
            ranks.do("make")
            ranks.open(run)
            if step:
                ranks.do("load")
                assert rows_of(ranks) == trained_to(step)
            for _ in range(3):
                step += 1
                ranks.do("train_to", step)
                ranks.save(step)
            ranks.do("train_to", step + 1)
            assert rows_of(ranks) == trained_to(step + 1)
            ranks.kill()  # with a step that nobody has saved
    for each in range(1, step + 1):
        path = run / f"step-{each:08d}"
        assert loaded(path) == trained_to(each)
        assert sidesave.verify(path).ok
    assert [*(run / f"step-{step:08d}").glob("*@changed.rank-00002.safetensors")]
    traces.check()


def test_an_id_that_two_ranks_have_is_told_by_verify_and_refused_by_load(run: Path, tmp_path: Path, traces: Traces):
    with Ranks(3, tmp_path, traces, kind=TableRank) as ranks:
        ranks.do("make")
        ranks.open(run)
        for rank, ids in enumerate(([1, 2, 3], [4, 5], [6, 2, 7])):
            ranks[rank].do("own", ids)
        ranks.save(1)
        path = run / "step-00000001"
        why = "of the table tables.users the id 2 is twice there, saved by rank 0 and by rank 2"
        assert {answer.error for answer in ranks.attempt("load")} == {"IntegrityError"}
    (fault,) = sidesave.verify(path).faults
    assert why in str(fault)
    with pytest.raises(IntegrityError, match=why):
        loaded(path)
    traces.check()


def test_nodes_with_disks_of_their_own_do_not_save_tables(tmp_path: Path, traces: Traces):
    with Ranks(2, tmp_path, traces, kind=TableRank) as ranks:
        ranks.do("make")
        ranks.open(tmp_path / "rank-{rank}", node_local=True)
        assert {answer.error for answer in ranks.attempt("save", 1)} == {"UnsupportedValueError"}


# One process ---------------------------------------------------------------------------------------------------------


def check(run: Path, steps: range) -> None:
    assert entries(run) == [f"step-{step:08d}" for step in steps]
    truth = a_table()
    for step in steps:
        path = run / f"step-{step:08d}"
        table = GrowingTable()
        into = sidesave.load(path, into={"users": table, "step": -1})
        assert into["step"] == step
        assert table.values() == truth.values()
        change(truth, step + 1)
        assert sidesave.verify(path).ok


def is_linked(run: Path, step: int) -> bool:
    return (run / f"step-{step:08d}" / "users@rows.rank-00000.safetensors").stat().st_nlink > 1


@pytest.mark.parametrize("after", [0, 1, 2])
def test_daemon_killed_at_a_link_the_save_commits_and_the_next_ones_link_again(
    run: Path, orders: Orders, traces: Traces, after: int
):
    table = a_table()
    with sidesave.Checkpointer(run) as ckpt:
        for step in range(4):
            commit(ckpt, step, table)
            if step == 0:
                orders.give("kill", starting_at="os.link", after=after, every_step=True)
            change(table, step + 1)
        orders.obeyed()
    check(run, range(4))
    assert all(is_linked(run, step) for step in range(4))
    traces.check()


@pytest.mark.parametrize("code", ["EXDEV", "EPERM", "EMLINK"])
def test_where_nothing_can_be_linked_the_rows_are_copied(run: Path, orders: Orders, traces: Traces, code: str):
    table = a_table()
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 0, table)
        orders.give(code, starting_at="os.link")
        for step in (1, 2):
            change(table, step)
            commit(ckpt, step, table)
        orders.obeyed()
    check(run, range(3))
    assert (run / "step-00000001" / "users@changed.rank-00000.safetensors").exists()
    traces.check()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_daemon_killed_at_every_step_of_a_save_of_changes_every_save_commits(
    run: Path, orders: Orders, traces: Traces, capsys: pytest.CaptureFixture[str]
):
    killed_at: list[str] = []
    table = a_table()
    step = late = 0
    with sidesave.Checkpointer(run) as ckpt:
        for after in campaigns.numbers():
            commit(ckpt, step, table)
            orders.give("kill", starting_at="got SAVE", after=after, every_step=True)
            for is_second in (False, True):  # the last step of a save may come after its commit is known
                late += is_second and not orders.was_obeyed()
                step += 1
                change(table, step)
                commit(ckpt, step, table)
            killed_at.append(orders.obeyed()[1])
            step += 1
            change(table, step)
            if late > 8 // campaigns.STRIDE:
                break
    assert any(each.startswith("os.link") for each in killed_at)
    check(run, range(step))
    traces.check()
    with capsys.disabled():
        print(f"\n{len(killed_at)} kills of the daemon at every step of a save of changes; {step} saves, none lost")


@pytest.mark.usefixtures("started_daemons")
def test_trainer_killed_with_changes_staged_they_commit(run: Path, orders: Orders, traces: Traces):
    with TableTrainer(traces, "save_changes", run, 3) as trainer:
        [pid] = trainer.expect("ready")
        orders.give("stop", starting_at="got SAVE", every_step=True)
        trainer.go_on()
        trainer.expect("staged")
        orders.obeyed()
        trainer.kill()
    os.kill(int(pid), signal.SIGCONT)
    traces.await_ends()
    with sidesave.Checkpointer(run):
        pass
    check(run, range(4))
    assert is_linked(run, 3)
