"""Builds one manifest from the records of all ranks, which must add up to whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from sidesave.errors import IntegrityError, StateMismatchError
from sidesave.writer_daemon.format import layout
from sidesave.writer_daemon.format.layout import GroupSum, Table, TensorInfo
from sidesave.writer_daemon.format.manifest import FileRecord, Manifest, RankRecord
from sidesave.writer_daemon.format.names import record_file
from sidesave.writer_daemon.format.sealed_records import without_tables
from sidesave.writer_daemon.format.tensor_file import digest
from sidesave.writer_daemon.sealing.cipher import CIPHER

_MAX_SHOWN: Final = 8
NamesOf = Callable[[RankRecord], Collection[str]]
"""The FQNs of the tensors in the state of a rank, as far as they can be found out."""


def assemble(
    records: Sequence[RankRecord],
    where: str,
    *,
    opened: bool = False,
    names_of: NamesOf = lambda record: (),
) -> Manifest:
    """Return the manifest of a step, from its ranks' records in order.

    ``where`` and ``names_of`` are for messages. The manifest of an encrypted step has no names and
    tables, unless the caller has ``opened`` the records.

    Raises:
        IntegrityError: A record is of another save.
        StateMismatchError: Ranks disagree about shared tensors; the message names them.
    """
    first = records[0]
    for rank, record in enumerate(records):
        identity = (record.session, record.step, record.sequence, record.rank, record.world_size)
        if identity != (first.session, first.step, first.sequence, rank, len(records)):
            raise IntegrityError(f"{where}: the record of rank {rank} belongs to another save")
    table = _merge(records)
    _check_cells(table, records, names_of)
    _check_replicas(records)
    table, diverged = _add_compared(table, records)
    manifest = Manifest(
        step=first.step,
        session=first.session,
        sequence=first.sequence,
        world_size=first.world_size,
        parent=first.parent,
        pickled=any(record.pickled for record in records),
        created_s=first.created_s,
        torch_version=first.torch_version,
        nbytes=sum(record.nbytes for record in records),
        records=tuple(_entry(record) for record in records),
        table=table,
        treespecs=_representatives(records),
        diverged=diverged,
        metadata=first.metadata,
        cipher=CIPHER if first.sealed else "",
    )
    return manifest if opened or not first.sealed else without_tables(manifest)


def _entry(record: RankRecord) -> FileRecord:
    data = record.to_bytes()
    return FileRecord(record_file(record.rank), len(data), digest(data).hex())


def _merge(records: Iterable[RankRecord]) -> Table:
    records = list(records)
    try:
        return layout.merge(record.part.table for record in records)
    except ValueError as error:
        fqn = str(error)
    ranks = [record.rank for record in records if fqn in record.part.table.tensors]
    raise StateMismatchError(
        f"{fqn} is another tensor on rank {ranks[0]} than on rank {ranks[1]}: each is divided "
        "among ranks that do not hold the other. Save them under different names, or wrap the item "
        "in sidesave.PerRank"
    )


def _check_cells(table: Table, records: Sequence[RankRecord], names_of: NamesOf) -> None:
    """Check that each rank has written the cells that others expect and that its state names."""
    sums = table.sums()
    odd = {record.rank for record in records if record.part.cells != sums.get(record.rank, 0)}
    by_group: dict[str, dict[int, GroupSum]] = {}
    for record in records:
        for key, group in record.part.groups.items():
            by_group.setdefault(key, {})[record.rank] = group
    incomplete = False
    for members in by_group.values():
        expected = next(iter(members.values()))
        incomplete |= len(members) < expected.size
        odd |= {rank for rank, group in members.items() if group != expected}
    if not odd and not incomplete:
        return
    lines = _differences(records, odd, names_of)
    ranks = f"ranks {sorted(odd)[:_MAX_SHOWN]} hold" if odd else "some ranks hold"
    raise StateMismatchError(
        f"{ranks} other names, shapes or meshes of the tensors they share than the "
        f"rest{''.join(lines)}; every rank must save the same items in the same step, and what "
        "only some of them have in sidesave.PerRank"
    )


def _differences(
    records: Sequence[RankRecord], odd: Collection[int], names_of: NamesOf
) -> list[str]:
    """Name shared tensors that rank 0 has and one of ``odd`` (empty: any) lacks, or the reverse."""
    first, lines = {*names_of(records[0])}, list[str]()
    for record in records[1:]:
        if len(lines) >= _MAX_SHOWN:
            break
        if odd and 0 not in odd and record.rank not in odd:
            continue
        names = {*names_of(record)}
        for has, more, lacks in (
            (records[0], first - names, record),
            (record, names - first, records[0]),
        ):
            own = {key.removesuffix(f"@rank-{has.rank:05d}") for key in has.part.own.tensors}
            lines += [
                f"; {fqn} is on rank {has.rank} and not on rank {lacks.rank}"
                for fqn in sorted(more - own)
            ]
    return lines[:_MAX_SHOWN]


def _check_replicas(records: Iterable[RankRecord]) -> None:
    by_digest: dict[str, int] = {}
    for record in records:
        by_digest.setdefault(record.part.replica_digest, record.rank)
    if len(by_digest) > 1:
        ranks = sorted(by_digest.values())
        raise StateMismatchError(
            f"ranks {ranks[:8]} disagree on whether plain tensors of modules and optimizers "
            "differ; save again"
        )


def _add_compared(
    table: Table, records: Iterable[RankRecord]
) -> tuple[Table, dict[str, tuple[int, ...]]]:
    """Add the first holder's copy of each compared tensor; also return those that differ."""
    holders: dict[str, list[tuple[str, int, TensorInfo]]] = {}
    for record in records:
        for fqn, content in record.part.compared.items():
            holders.setdefault(fqn, []).append((content, record.rank, record.part.own.tensors[fqn]))
    tables = [table]
    diverged: dict[str, tuple[int, ...]] = {}
    by_rank: dict[int, dict[str, TensorInfo]] = {}
    for fqn, copies in holders.items():
        _, rank, tensor = copies[0]
        by_rank.setdefault(rank, {})[fqn] = tensor
        if len({content for content, _, _ in copies}) > 1:
            diverged[fqn] = tuple(rank for _, rank, _ in copies)
    tables += [layout.whole(tensors, rank) for rank, tensors in by_rank.items()]
    try:
        return layout.merge(tables), diverged
    except ValueError as error:
        raise StateMismatchError(
            f"{error} is divided among some ranks and whole on others"
        ) from error


def _representatives(records: Iterable[RankRecord]) -> tuple[int, ...]:
    """The first rank that has each distinct treespec."""
    ranks: dict[str, int] = {}
    for record in records:
        ranks.setdefault(record.part.treespec, record.rank)
    return tuple(ranks.values())
