"""Tables of several ranks, which are killed and replaced by another number of ranks."""

from pathlib import Path
from typing import Any

import pytest
from rank_trainers import Ranks
from row_tables import GrowingTable
from table_trainers import TableRank, train_to
from trainers import Traces

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


def test_an_id_that_two_ranks_have_is_told_by_verify_and_refused_by_load(
    run: Path, tmp_path: Path, traces: Traces
):
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
