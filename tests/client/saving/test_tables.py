"""Tables of rows by id: what is saved of them, and that any number of ranks gets each row once."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import output
from hypothesis import given, settings
from hypothesis import strategies as st
from object_server import serving
from row_tables import GrowingTable
from safetensors import safe_open
from torch import nn
from trainers import DEADLINE_S, daemon, save, stopped

import sidesave
from sidesave.client import increments
from sidesave.client.loading.load import LoadRequest
from sidesave.errors import (
    IntegrityError,
    StagingError,
    StateMismatchError,
    UnsupportedValueError,
    WriteError,
)
from sidesave.stager import tables
from sidesave.stager.tables import BUCKETS, RowImage, bucket_of

ROWS = "users@rows.rank-00000.safetensors"
CHANGED = "users@changed.rank-00000.safetensors"


def grown(count: int = 3000, seed: int = 0) -> GrowingTable:
    table = GrowingTable(seed=seed)
    table.train(range(-count // 3, count - count // 3))
    return table


def save_table(
    ckpt: sidesave.Checkpointer, step: int, table: GrowingTable, **others: Any
) -> dict[int, Any]:
    ckpt.save(step, {"users": table, **others}).committed.result(DEADLINE_S)
    return table.values()


def loaded(path: str | Path, **options: Any) -> dict[int, Any]:
    table = GrowingTable(seed=5)
    table.train([1, 2, 10**15])  # which are forgotten
    sidesave.load(path, into={"users": table}, **options)
    return table.values()


def share(path: str | Path, rank: int, size: int) -> dict[int, Any]:
    """What one of so many ranks gets."""
    table = GrowingTable()
    LoadRequest(into={"users": table}, rank=rank, size=size).read(path).apply()
    return table.values()


def step_of(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


# Buckets ------------------------------------------------------------------------------------------


def splitmix64(number: int) -> int:
    """The finalizer, as docs/format.md states it."""
    mask = (1 << 64) - 1
    mixed = number & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_a_bucket_is_the_hash_that_the_format_states(ids: list[int]):
    tensor, buckets = (
        torch.tensor(ids, dtype=torch.int64),
        [splitmix64(each) % 1024 for each in ids],
    )
    assert bucket_of(tensor).tolist() == tables.buckets_on_host(tensor).tolist() == buckets
    assert sidesave.owner_of(tensor, 7).tolist() == [bucket % 7 for bucket in buckets]


def test_the_vectors_in_the_format_are_right():
    text = Path(__file__).parents[3].joinpath("docs/format.md").read_text()
    vectors = {0: 0, 1: 485, -1: 379, 10**12: 47, -(1 << 63): 394}
    for number, bucket in vectors.items():
        assert splitmix64(number) % 1024 == bucket
        assert f"`{number}` is in {bucket}" in text


# Whole saves --------------------------------------------------------------------------------------


def test_a_table_comes_back_and_what_was_there_before_is_forgotten(run: Path):
    table, layer = grown(), nn.Linear(3, 3)
    with sidesave.Checkpointer(run) as ckpt:
        truth = save_table(ckpt, 1, table, layer=layer)
        into: dict[str, Any] = {"users": GrowingTable(), "layer": nn.Linear(3, 3)}
        ckpt.load(1, into=into)
    assert into["users"].values() == truth
    assert torch.equal(into["layer"].weight, layer.weight)
    assert loaded(run) == truth
    assert sidesave.verify(run).ok


@pytest.mark.parametrize("size", [1, 3, 8, 2000])
def test_any_number_of_ranks_gets_each_row_once(run: Path, size: int):
    with sidesave.Checkpointer(run) as ckpt:
        truth = save_table(ckpt, 1, grown())
    ranks = range(size) if size < 10 else (0, 7, 1023, 1024, 1999)
    shares = [share(run, rank, size) for rank in ranks]
    together = {each: row for rows in shares for each, row in rows.items()}
    assert sum(map(len, shares)) == len(together)
    assert together == (
        truth
        if size < 10
        else {each: row for each, row in truth.items() if splitmix64(each) % 1024 in {0, 7, 1023}}
    )


def test_stock_readers_open_what_is_saved_and_find_rows_by_bucket(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        truth = save_table(ckpt, 1, grown())
    with safe_open(step_of(run, 1) / ROWS, "pt") as file:
        offsets, ids, weight = (
            file.get_tensor(f"users.{name}") for name in ("offsets", "ids", "weight")
        )
    assert (offsets.shape, int(offsets[0]), int(offsets[-1])) == ((BUCKETS + 1,), 0, len(truth))
    for bucket in (0, 500, 1023):
        found = ids[offsets[bucket] : offsets[bucket + 1]].tolist()
        assert {*found} == {each for each in truth if splitmix64(each) % 1024 == bucket}
    assert {each: row.tolist() for each, row in zip(ids.tolist(), weight, strict=True)} == {
        each: row[0] for each, row in truth.items()
    }


def test_an_empty_table_is_saved_and_loaded(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        save_table(ckpt, 1, GrowingTable())
        save_table(ckpt, 2, GrowingTable())
    assert loaded(run) == {}
    assert sidesave.verify(run).ok


def test_without_into_a_table_is_its_ids_and_columns(run: Path):
    save(run, {"deep": {"tables": [grown()]}})
    (table,) = sidesave.load(run)["deep"]["tables"]
    assert {name: tuple(value.shape) for name, value in table.items()} == {
        "ids": (3000,),
        "weight": (3000, 4),
        "sum": (3000, 4),
        "count": (3000,),
    }


def test_rows_are_put_where_they_go_chunk_by_chunk(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables, "CHUNK_NBYTES", 1 << 12)
    chunks: list[int] = []

    class Chunked(GrowingTable):
        def rows(self, chunk_rows: int, columns: Sequence[str]) -> Iterable[Any]:
            for ids, values in super().rows(chunk_rows, columns):
                chunks.append(len(ids) if columns else 0)
                yield ids, values

        def insert(self, ids: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> None:
            chunks.append(len(ids))
            super().insert(ids, columns)

    table = Chunked()
    table.train(range(3000))
    with sidesave.Checkpointer(run) as ckpt:
        truth = save_table(ckpt, 1, table)
    into = Chunked()
    sidesave.load(run, into={"users": into})
    assert into.values() == truth
    assert max(chunks) == (1 << 12) // (8 + 16 + 16 + 4)


def test_memory_grows_with_the_table_a_quarter_at_a_time(run: Path):
    table = GrowingTable(width=64)
    table.train(range(4000))
    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        sizes, truth = list[int](), dict[int, Any]()
        for step in range(8):
            table.clear()  # so that all of it is saved
            table.train(range(4000 + 400 * step))
            truth = save_table(ckpt, step, table)
            sizes.append(ckpt.session.pool._slots[0].arena_id)
    assert sizes == [1, 1, 1, 2, 2, 2, 2, 3], "rows by the hundred: 40 fit 50, 52 fit 65"
    into = GrowingTable(width=64)
    sidesave.load(run, into={"users": into})
    assert into.values() == truth


def test_what_else_is_saved_keeps_its_plan_while_a_table_grows(run: Path):
    table, model = grown(100), nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        firsts, truth = set[int](), dict[int, Any]()
        for step in range(4):
            table.train(range(100 * step, 100 * step + 150))
            truth = save_table(ckpt, step, table, model=model)
            plan = ckpt.session.pool._slots[0].plan
            assert plan is not None
            firsts.add(id(plan.first))
        assert len(firsts) == 1
    into: dict[str, Any] = {
        "users": GrowingTable(),
        "model": nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))),
    }
    sidesave.load(run, into=into)
    assert into["users"].values() == truth
    for name, value in model.state_dict().items():
        assert torch.equal(into["model"].state_dict()[name], value)


def test_what_is_frozen_or_prepared_beside_a_table_is_as_ever(run: Path):
    table, base = grown(100), torch.rand(200_000)
    bias = torch.zeros(3)
    state = {"base": sidesave.Frozen({"w": base}), "users": table, "bias": bias}
    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        ckpt.prepare(state).result(DEADLINE_S)
        arena = ckpt.session.pool._slots[0].arena_id
        for step in range(5):
            bias.fill_(step)
            table.train(range(20 * step, 20 * step + 10))
            if step == 3:
                base.add_(1)
            ckpt.save(step, state).committed.result(DEADLINE_S)
            back = sidesave.load(step_of(run, step), include=["base", "bias"])
            assert torch.equal(back["base"]["w"], base)
            assert torch.equal(back["bias"], bias)
            assert loaded(step_of(run, step)) == table.values()
        assert ckpt.session.pool._slots[0].arena_id == arena
    assert (step_of(run, 2) / "base@frozen.rank-00000.safetensors").stat().st_nlink == 3


# What fits, and what does not ---------------------------------------------------------------------


def test_some_columns_and_some_tables_are_loaded_by_pattern(run: Path):
    table = grown()
    with sidesave.Checkpointer(run) as ckpt:
        truth = save_table(ckpt, 1, table, items=grown(50, seed=1))
    fresh = GrowingTable()
    sidesave.load(run, into={"users": fresh}, include="users.weight")
    assert {each: row[0] for each, row in fresh.values().items()} == {
        each: row[0] for each, row in truth.items()
    }
    assert not any(any(row[1]) or row[2] for row in fresh.values().values()), (
        "what is left out is what a new row has"
    )
    fresh = GrowingTable()
    sidesave.load(run, into={"users": fresh}, exclude=["users.count", "items"])
    assert {each: row[:2] for each, row in fresh.values().items()} == {
        each: row[:2] for each, row in truth.items()
    }
    assert {*sidesave.load(run, include="users.sum")["users"]} == {"ids", "sum"}
    fresh = GrowingTable()
    sidesave.load(run, into={"clients": fresh}, include="users", rename={"users": "clients"})
    assert fresh.values() == truth
    two = {"users.ids": "users.ids", "users.weight": "users.weight", "items.sum": "users.sum"}
    with pytest.raises(StateMismatchError, match="the table would get columns of items, users"):
        sidesave.load(run, into={"users": fresh}, rename=two.get, strict=False)
    with pytest.raises(StateMismatchError, match="columns without their ids"):
        sidesave.load(
            run,
            into={"users": fresh},
            rename=lambda fqn: fqn if fqn == "users.sum" else None,
            strict=False,
        )
    assert fresh.values() == truth


def test_dense_comes_from_one_checkpoint_and_tables_from_another(run: Path, tmp_path: Path):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with sidesave.Checkpointer(run) as ckpt:
        save_table(ckpt, 1, grown(), dense=first)
    with sidesave.Checkpointer(tmp_path / "other") as ckpt:
        truth = save_table(ckpt, 1, grown(90, seed=7), dense=second)
    into: dict[str, Any] = {"users": GrowingTable(), "dense": nn.Linear(2, 2)}
    sources = [
        sidesave.Source(run, include="dense"),
        sidesave.Source(tmp_path / "other", include="users"),
    ]
    sidesave.load_sources(sources, into)
    assert into["users"].values() == truth
    assert torch.equal(into["dense"].weight, first.weight)
    both = [sidesave.Source(run), sidesave.Source(tmp_path / "other", include="users.sum")]
    with pytest.raises(
        StateMismatchError, match="has other columns of the table users than an earlier source"
    ):
        sidesave.load_sources(both, into)
    assert into["users"].values() == truth
    sidesave.load_sources([sidesave.Source(run), sidesave.Source(tmp_path / "other")], into)
    assert into["users"].values() == truth


@pytest.mark.parametrize(
    ("into", "what"),
    [
        (
            {"users": GrowingTable(width=5)},
            r"users\.weight: rows of torch.float32 \[4\] in the checkpoint",
        ),
        ({"users": nn.Linear(2, 2)}, r"users"),
        ({"users": torch.zeros(3)}, r"users"),
        ({"users": {"weight": torch.zeros(3000, 4)}}, "rows of a table"),
        ({"dense": GrowingTable()}, r"dense\.ids"),
        ({"plain": GrowingTable()}, "the target is a table of rows by id"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_and_nothing_is_touched(
    run: Path, into: dict[str, Any], what: str
):
    plain = {
        "ids": torch.arange(3),
        "weight": torch.zeros(3, 4),
        "sum": torch.zeros(3, 4),
        "count": torch.zeros(3),
    }
    with sidesave.Checkpointer(run) as ckpt:
        save_table(ckpt, 1, grown(), dense=nn.Linear(2, 2), plain=plain)
    (target,) = into.values()
    if isinstance(target, GrowingTable):
        target.train([4])
    with pytest.raises(StateMismatchError, match=what):
        sidesave.load(run, into=into)
    if isinstance(target, GrowingTable):
        assert [*target.values()] == [4]


class Odd(GrowingTable):
    """A table whose column is called or made in another way."""

    def __init__(self, name: str, column: sidesave.Column) -> None:
        super().__init__()
        self.odd = {name: column}

    def columns(self) -> dict[str, sidesave.Column]:
        return self.odd


class Nearly(torch.nn.Linear):
    """A module that would be saved without its rows."""

    columns, num_rows, rows, clear = (
        GrowingTable.columns,
        GrowingTable.num_rows,
        GrowingTable.rows,
        GrowingTable.clear,
    )


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Nearly(1, 1), r"a Nearly lacks insert\(\)"),
        (sidesave.Replicated(GrowingTable()), "divided among ranks by id"),
        (sidesave.PerRank({"in": GrowingTable()}), "divided among ranks by id"),
        (sidesave.Frozen(GrowingTable()), "divided among ranks by id"),
        (Odd("ids", sidesave.Column(torch.float32)), "'ids' is not a valid name"),
        (Odd("a.b", sidesave.Column(torch.float32)), r"'a\.b' is not a valid name"),
        (Odd("a", sidesave.Column(torch.complex128)), "a column of torch.complex128"),
    ],
)
def test_what_cannot_be_saved_of_a_table_is_refused_by_name(run: Path, value: Any, why: str):
    with sidesave.Checkpointer(run) as ckpt, pytest.raises(UnsupportedValueError, match=why):
        ckpt.save(1, {"users": value})


def test_a_tensor_with_the_name_of_a_column_is_refused(run: Path):
    with (
        sidesave.Checkpointer(run) as ckpt,
        pytest.raises(UnsupportedValueError, match=r"users\.sum: a tensor and a part of a table"),
    ):
        ckpt.save(1, {"users": grown(10), "users.sum": torch.zeros(2)})


class Restless(GrowingTable):
    """A table that says one thing and gives another."""

    how = ""

    def rows(self, chunk_rows: int, columns: Sequence[str]) -> Iterable[Any]:
        for ids, values in super().rows(chunk_rows, columns):
            if self.how == "more" or (self.how == "others" and columns):
                yield ids + 1, values
            if self.how == "kind":
                yield ids.int(), values
            if self.how == "width":
                yield ids, {name: value[..., None] for name, value in values.items()}
            if self.how == "lacks":
                yield ids, {}
            if self.how != "fewer" or not columns:
                yield ids, values


@pytest.mark.parametrize("how", ["more", "others", "fewer", "kind", "width", "lacks"])
def test_a_table_that_changes_during_the_call_fails_the_save_and_the_next_one_works(
    run: Path, how: str
):
    table = Restless()
    table.train(range(100))
    with sidesave.Checkpointer(run) as ckpt:
        table.how = how
        with pytest.raises(StagingError, match="users: the table"):
            ckpt.save(1, {"users": table})
        table.how = ""
        truth = save_table(ckpt, 2, table)
    assert [path.name for path in run.glob("step-*")] == ["step-00000002"]
    assert loaded(run) == truth


class Doubled(GrowingTable):
    """A table that yields some rows a second time."""

    twice: Sequence[int] = ()

    def num_rows(self) -> int:
        return super().num_rows() + len(self.twice)

    def changed_since(self, token: object) -> sidesave.RowChanges | None:
        changes = super().changed_since(token)
        return changes and dataclasses.replace(changes, num_rows=changes.num_rows + len(self.twice))

    def _rows(self, places: list[int], chunk_rows: int, columns: Sequence[str]) -> Iterable[Any]:
        return super()._rows(
            [*places, *(self.places[each] for each in self.twice)], chunk_rows, columns
        )


@pytest.mark.parametrize("sorted_together", [1, tables._SORTED_ROWS])
@pytest.mark.parametrize("saved_before", [False, True])
def test_a_table_that_yields_ids_twice_is_refused_by_name_and_the_next_save_works(
    run: Path, monkeypatch: pytest.MonkeyPatch, *, saved_before: bool, sorted_together: int
):
    monkeypatch.setattr(tables, "_SORTED_ROWS", sorted_together)
    table = Doubled()
    table.train(range(1000))
    with sidesave.Checkpointer(run) as ckpt:
        if saved_before:  # then what has changed is staged, and not all rows
            save_table(ckpt, 0, table)
            table.train([7, 4])
        table.twice = [7, 4, 7]
        with pytest.raises(
            UnsupportedValueError, match="users: the table yields 2 ids more than once: 4, 7;"
        ):
            ckpt.save(1, {"users": table, "dense": torch.ones(3)})
        table.twice = []
        truth = save_table(ckpt, 2, table)
    assert not step_of(run, 1).exists()
    assert loaded(run) == truth


def test_a_removed_id_may_be_told_twice(run: Path):
    class Forgetful(GrowingTable):
        def changed_since(self, token: object) -> sidesave.RowChanges | None:
            changes = super().changed_since(token)
            return changes and dataclasses.replace(changes, removed=changes.removed.repeat(2))

    table = Forgetful()
    table.train(range(100))
    with sidesave.Checkpointer(run) as ckpt:
        save_table(ckpt, 1, table)
        table.remove([3, 5])
        truth = save_table(ckpt, 2, table)
    assert not is_full(run, 2)
    assert loaded(run) == truth


def test_where_insert_raises_other_objects_are_as_before(run: Path):
    class Full(GrowingTable):
        def insert(self, ids: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> None:
            raise MemoryError("no room")

    layer = nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(layer.parameters(), lr=1.0), 2)
    with sidesave.Checkpointer(run) as ckpt:
        save_table(ckpt, 1, grown(), layer=layer, scheduler=scheduler)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with torch.no_grad():
        layer.weight.add_(1)
    scheduler.last_epoch = 77
    with pytest.raises(
        StateMismatchError,
        match=r"users: this Full raised MemoryError.*no room; not put back: users",
    ):
        sidesave.load(run, into={"users": Full(), "layer": layer, "scheduler": scheduler})
    assert scheduler.last_epoch == 77
    assert torch.equal(layer.weight, before["weight"] + 1)


# What has changed ---------------------------------------------------------------------------------


def is_full(run: Path, step: int) -> bool:
    return not (step_of(run, step) / CHANGED).exists()


def inode(run: Path, step: int) -> int:
    return (step_of(run, step) / ROWS).stat().st_ino


def test_a_save_holds_what_has_changed_since_the_last_full_one_beside_a_link_to_it(run: Path):
    table = grown()
    truths: list[dict[int, Any]] = []
    with sidesave.Checkpointer(run) as ckpt:
        for step in range(4):
            truths.append(save_table(ckpt, step, table))
            table.train(range(10 * step, 10 * step + 10))
            table.train([10**9 + step])
            table.remove([-step - 1, 10 * step + 3])
    assert [is_full(run, step) for step in range(4)] == [True, False, False, False]
    assert len({inode(run, step) for step in range(4)}) == 1
    with safe_open(step_of(run, 2) / CHANGED, "pt") as file:
        assert len(file.get_tensor("users.changed.ids")) == 20
        assert {*file.get_tensor("users.removed.ids").tolist()} == {-1, -2, 3, 13}
    for step in (0, 2):
        shutil.rmtree(step_of(run, step))
    for step in (1, 3):
        assert sidesave.verify(step_of(run, step)).ok
        assert loaded(step_of(run, step)) == truths[step]
        assert {
            each: row
            for rank in range(3)
            for each, row in share(step_of(run, step), rank, 3).items()
        } == truths[step]


def test_a_row_that_was_removed_and_is_back_is_there(run: Path):
    table = grown(100)
    with sidesave.Checkpointer(run) as ckpt:
        save_table(ckpt, 1, table)
        table.remove([1, 2])
        table.train([1])
        truth = save_table(ckpt, 2, table)
    assert loaded(run) == truth


def test_where_much_has_changed_all_rows_are_saved(run: Path):
    table = grown(1000)
    with sidesave.Checkpointer(run) as ckpt:
        save_table(ckpt, 1, table)
        table.train(range(300))
        save_table(ckpt, 2, table)
        table.remove([-1])
        save_table(ckpt, 3, table)
        save_table(ckpt, 4, table)
    assert [is_full(run, step) for step in (1, 2, 3, 4)] == [True, False, True, False]
    assert inode(run, 3) == inode(run, 4) != inode(run, 2)


def test_one_of_twenty_saves_holds_all_rows(run: Path):
    table, truth = grown(1000), dict[int, Any]()
    with sidesave.Checkpointer(run) as ckpt:
        for step in range(2 * increments.EVERY + 1):
            truth = save_table(ckpt, step, table)
    assert [step for step in range(2 * increments.EVERY + 1) if is_full(run, step)] == [0, 20, 40]
    assert loaded(run) == truth


def test_what_is_not_committed_is_not_linked_to(run: Path):
    table = grown(300)
    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=2)) as ckpt:
        handles = [ckpt.save(step, {"users": table}) for step in (1, 2)]
        for handle in handles:
            handle.committed.result(DEADLINE_S)
        save_table(ckpt, 3, table)
    assert is_full(run, 1)
    assert not is_full(run, 3)


def test_another_table_of_that_name_is_saved_whole(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        save_table(ckpt, 1, grown(300))
        truth = save_table(ckpt, 2, grown(300, seed=4))
    assert is_full(run, 2)
    assert loaded(run) == truth


def test_after_a_load_all_rows_are_saved(run: Path):
    table = grown(300)
    with sidesave.Checkpointer(run) as ckpt:
        save_table(ckpt, 1, table)
        table.train([5])
        save_table(ckpt, 2, table)
        ckpt.load(1, into={"users": table})
        truth = save_table(ckpt, 3, table)
    assert is_full(run, 3)
    assert loaded(run) == truth


def test_where_every_step_with_its_rows_is_gone_a_save_fails_and_the_next_one_holds_all(run: Path):
    table = grown(300)
    with sidesave.Checkpointer(run) as ckpt:
        save_table(ckpt, 1, table)
        shutil.rmtree(step_of(run, 1))
        handle = ckpt.save(2, {"users": table})
        with pytest.raises(
            WriteError, match=r"steps 1 with all rows of .* are deleted or damaged .*does not exist"
        ):
            handle.committed.result(DEADLINE_S)
        truth = save_table(ckpt, 3, table)
    assert loaded(run) == truth
    assert is_full(run, 3)


def test_a_step_that_was_replaced_is_not_linked_to(run: Path):
    table = grown(300)
    with sidesave.Checkpointer(run) as ckpt:
        save_table(ckpt, 1, table)
        table.train([1])
        save_table(ckpt, 2, table)
        ckpt.save(1, {"other": 1}, overwrite=True).committed.result(DEADLINE_S)
        truth = save_table(ckpt, 3, table)
    assert not is_full(run, 3)
    assert inode(run, 3) == inode(run, 2)
    assert loaded(run) == truth


@pytest.mark.parametrize("replacing", ["its changes", "all of another", "no rows"])
def test_a_step_may_be_replaced_while_it_is_linked_to(run: Path, replacing: str):
    table, other = grown(300), grown(300, seed=8)
    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=3)) as ckpt:
        save_table(ckpt, 1, table)
        with stopped(daemon(ckpt)):  # so that both are called before one of them is committed
            table.train([1])
            state = {
                "its changes": {"users": table},
                "all of another": {"users": other},
                "no rows": {"n": 1},
            }[replacing]
            first = {"its changes": table.values(), "all of another": other.values()}.get(replacing)
            handles = [ckpt.save(1, state, overwrite=True)]
            table.train([2])
            handles.append(ckpt.save(2, {"users": table}))
        for handle in handles:
            handle.committed.result(DEADLINE_S)
        assert loaded(step_of(run, 2)) == table.values()
        assert first is None or loaded(step_of(run, 1)) == first


def test_rows_that_another_save_has_put_in_the_place_of_a_step_are_not_taken_for_those_of_the_first(
    run: Path,
):
    table, other = grown(300), grown(300, seed=8)
    with sidesave.Checkpointer(run) as ckpt:
        save_table(ckpt, 1, table)
        bases = ckpt.session.increments._bases
        base = bases["users"]
        ckpt.save(1, {"users": other}, overwrite=True).committed.result(DEADLINE_S)
        bases["users"] = base
        ckpt.session.increments._latest.clear()  # as where another process has replaced it
        table.train([1])
        with pytest.raises(WriteError, match=r"are deleted or damaged .* is of save 2 "):
            ckpt.save(2, {"users": table}).committed.result(DEADLINE_S)
        truth = save_table(ckpt, 2, table)
    assert loaded(step_of(run, 1)) == other.values()
    assert loaded(step_of(run, 2)) == truth


def test_in_a_store_rows_are_copied_by_the_store(tmp_path: Path):
    pytest.importorskip("obstore")
    url = f"file://{tmp_path}/run"
    table = grown(300)
    with sidesave.Checkpointer(url) as ckpt:
        save_table(ckpt, 1, table)
        table.train([1])
        truth = save_table(ckpt, 2, table)
    assert loaded(f"{url}/step-00000002") == truth


@pytest.mark.parametrize("damaged", [False, True])
def test_where_a_store_does_not_copy_rows_are_sent_again_and_compared(
    tmp_path: Path, *, damaged: bool
):
    (tmp_path / "bucket").mkdir()
    table = GrowingTable(2000)
    table.train(range(2500))  # some 40 MB
    with (
        serving(tmp_path) as server,
        sidesave.Checkpointer("s3://bucket/run", storage_options=server.options) as ckpt,
    ):
        save_table(ckpt, 1, table)
        server.fault = lambda request, number: 400 if request.method == "COPY" else None
        if damaged:
            [rows] = tmp_path.glob(f"bucket/run/step-00000001.*/{ROWS}")
            with rows.open("r+b") as file:
                file.seek(-5, os.SEEK_END)
                file.write(b"wrong")
        table.train([1])
        handle = ckpt.save(2, {"users": table})
        if damaged:
            with pytest.raises(WriteError, match="are deleted or damaged"):
                handle.committed.result(DEADLINE_S)
            handle = ckpt.save(3, {"users": table})
        at = handle.committed.result(DEADLINE_S).path
        assert sidesave.verify(at, storage_options=server.options).ok
        again = GrowingTable(2000)
        sidesave.load(at, into={"users": again}, storage_options=server.options)
        assert again.values() == table.values()


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["train", "remove", "save", "load", "clear"]),
            st.lists(st.integers(-5, 40), min_size=1, max_size=8),
        ),
        max_size=14,
    )
)
def test_whatever_is_done_to_a_table_each_step_holds_what_it_was(
    tmp_path_factory: pytest.TempPathFactory, orders: list[tuple[str, list[int]]]
):
    run = tmp_path_factory.mktemp("run")
    table = grown(60)
    truths: dict[int, dict[int, Any]] = {}
    steps = itertools.count()
    with sidesave.Checkpointer(run) as ckpt:
        for what, ids in [*orders, ("save", [0])]:
            match what:
                case "train":
                    table.train([*dict.fromkeys(ids)])
                case "remove":
                    table.remove({*ids} & table.places.keys())
                case "clear":
                    table.clear()
                case "load" if truths:
                    step = [*truths][ids[0] % len(truths)]
                    ckpt.load(step, into={"users": table})
                    assert table.values() == truths[step]
                case "save":
                    step = next(steps)
                    truths[step] = save_table(ckpt, step, table)
                case _:
                    pass
    for step, truth in truths.items():
        assert loaded(step_of(run, step)) == truth
        assert {
            each: row for rank in (0, 1) for each, row in share(step_of(run, step), rank, 2).items()
        } == truth


# Damage -------------------------------------------------------------------------------------------


def _forge(monkeypatch: pytest.MonkeyPatch, forge: Any) -> None:
    """Have rows changed behind the back of who saves them, before digests are made."""
    fill = RowImage.fill

    def filled(self: RowImage, views: Mapping[str, torch.Tensor]) -> None:
        fill(self, views)
        forge({name.rpartition(".")[2]: view for name, view in views.items()})

    monkeypatch.setattr(RowImage, "fill", filled)


def _swap(views: dict[str, torch.Tensor]) -> None:
    views["ids"][[0, -1]] = views["ids"][[-1, 0]]


def _double(views: dict[str, torch.Tensor]) -> None:
    begin = int(views["offsets"][:-1][views["offsets"].diff() > 1][0])
    views["ids"][begin + 1] = views["ids"][begin]


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize(
    "end", ["rows.rank-00000.safetensors", "changed.rank-00000.safetensors", "*"]
)
@pytest.mark.parametrize("gone", [True, False])
def test_what_else_was_saved_loads_where_the_files_of_a_table_are_gone_or_short(
    tmp_path: Path, scheme: str, end: str, *, gone: bool
):
    if scheme:
        pytest.importorskip("obstore")
    url, table, layer = f"{scheme}{tmp_path}/run", grown(300), nn.Linear(2, 2)
    with sidesave.Checkpointer(url) as ckpt:
        save_table(ckpt, 1, table)
        table.train([1])
        save_table(ckpt, 2, table, layer=layer, epoch=3)
    files = [*tmp_path.glob(f"run/step-00000002*/users@{end}")]
    assert files
    for file in files:
        file.unlink() if gone else os.truncate(file, 100)
    path = f"{url}/step-00000002"
    chosen: list[dict[str, Any]] = [{"exclude": "users"}, {"include": ["layer", "epoch"]}]
    for options in chosen:
        into: dict[str, Any] = {"layer": nn.Linear(2, 2), "epoch": 0}
        sidesave.load(path, into=into, **options)
        assert into["epoch"] == 3
        assert all(
            torch.equal(value, into["layer"].state_dict()[name])
            for name, value in layer.state_dict().items()
        )
        assert {*sidesave.load(path, **options)} == {"layer", "epoch"}
    for targets in ({"users": GrowingTable()}, None):
        with pytest.raises(IntegrityError, match="users@"):
            sidesave.load(path, into=targets)
    assert {fault.file.partition(".")[0] for fault in sidesave.verify(path).faults} <= {
        "users@rows",
        "users@changed",
    }


@pytest.mark.parametrize(
    ("forge", "why"),
    [
        (_swap, "rows in the wrong bucket"),
        (_double, "is twice there, saved by rank 0 and by rank 0"),
        (lambda views: views["offsets"][5].add_(10**6), "does not say where the rows are"),
        (lambda views: views["offsets"][0].add_(1), "does not say where the rows are"),
        (lambda views: views["offsets"][-1].add_(-1), "does not say where the rows are"),
    ],
)
def test_rows_that_are_not_as_the_format_says_are_refused_by_load_and_told_by_verify(
    run: Path, monkeypatch: pytest.MonkeyPatch, forge: Any, why: str
):
    with sidesave.Checkpointer(run) as ckpt:
        _forge(monkeypatch, forge)
        save_table(ckpt, 1, grown())
    with pytest.raises(IntegrityError, match=why):
        sidesave.load(run, into={"users": GrowingTable()})
    (fault,) = sidesave.verify(run).faults
    assert (fault.file, fault.fqns) == (ROWS, ("users",))
    assert why in str(fault)


def test_the_command_line_shows_and_verifies_tables(run: Path):
    table = grown(100)
    with sidesave.Checkpointer(run) as ckpt:
        save_table(ckpt, 1, table)
        table.train([1])
        save_table(ckpt, 2, table)
    assert "users" in output("show", step_of(run, 2))
    output("verify", step_of(run, 2))
    assert "users" in output("diff", step_of(run, 1), step_of(run, 2))
