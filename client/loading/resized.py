"""Per-rank state loaded by another number of ranks: the values that each rank receives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from sidesave.client.loading import tensors
from sidesave.client.loading.load_filter import LoadFilter
from sidesave.client.loading.plan import filled
from sidesave.client.loading.selection import Selection
from sidesave.client.messages import few
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.client.reading.stored import FlatMap, Reader, fqn_of, own_name
from sidesave.client.targets.live_map import LiveMap
from sidesave.client.targets.tensor_memory import same_bits
from sidesave.errors import StateMismatchError
from sidesave.stager.state.annotations import PerRank
from sidesave.stager.state.treespec import Path
from sidesave.writer_daemon.format.layout import CHANGED, ROWS

logger = logging.getLogger(__name__)


def settle(
    reader: Reader,
    selection: Selection,
    wanted: LoadFilter,
    live: LiveMap | None,
    *,
    allow_pickle: bool,
) -> None:
    """Call the user's ``when_resized`` functions with all ranks' values, as their number changed.

    Everything else is rank 0's. If ranks differed and the user did not choose rank 0's, plain
    numbers cause a warning. So does anything else without a live target; with one it raises
    ``StateMismatchError``.
    """
    assert isinstance(reader, CheckpointReader)
    marks = live.marks if live is not None else {}
    names = {fqn_of(path): mark for path, mark in marks.items()}

    def mark_of(fqn: str) -> PerRank | None:
        name = wanted.renaming(fqn) or ""
        return next((mark for item, mark in names.items() if _is_in(name, item)), None)

    def is_concerned(fqn: str) -> bool:
        name = wanted.renaming(fqn) if wanted.selected(fqn) else None
        mark = mark_of(fqn)
        chosen = name is not None and (
            live is None or any(_is_in(name, item) for item in live.into)
        )
        return chosen and (mark is None or mark.when_resized is None)

    items = reader.record(0).part.per_rank
    warned: list[str] = []
    refused: list[str] = []
    for fqn, is_number in _differences(reader, is_concerned).items():
        item = next((item for item in items if _is_in(fqn, item)), None)
        alone = item is not None or mark_of(fqn) is not None
        (warned if live is None or (is_number and not alone) else refused).append(
            fqn if live is None else item or fqn
        )
    line = (
        f"{{}} differs between the {reader.manifest.world_size} ranks that have saved it, and "
        f"{reader.size} load"
    ).format
    if refused:
        lines = few(list(dict.fromkeys(refused)), line, "differ as well")
        raise StateMismatchError(
            f"{reader.path}: nothing was loaded:\n  "
            + "\n  ".join(lines)
            + "\nSay what each rank gets: "
            "sidesave.PerRank(x, when_resized='first') gives all of them what rank 0 had; "
            "PerRank(x, when_resized=f) "
            "gives each what f(values) returns there, where values is the list of what all ranks "
            "had, in their order"
        )
    if warned:
        lines = few(warned, line, "differ as well")
        logger.warning("loading %s: %s; rank 0's is taken", reader.path, "; ".join(lines))
    calls = {path: mark.when_resized for path, mark in marks.items() if callable(mark.when_resized)}
    parts = {path: part for path, part in selection.flat.parts(calls).items() if part.leaves}
    ranks = range(reader.manifest.world_size)
    every = (
        [_values(reader, rank, parts, wanted, live, allow_pickle) for rank in ranks]
        if parts
        else []
    )
    for path, part in parts.items():
        made = calls[path]([values[path] for values in every])
        selection.flat.replace(part, FlatMap.of(made, path))


def _differences(reader: CheckpointReader, wanted: Callable[[str], bool]) -> dict[str, bool]:
    """The FQNs of per-rank state that is not the same on all ranks, and whether it is a number.

    Leaves out shared tensors that differ. Reads all wanted per-rank state of all ranks.
    """
    table, first = reader.manifest.table.tensors, reader.read_treespec(0)
    own = [
        fqn
        for fqn, info in reader.record(0).part.own.tensors.items()
        if fqn not in table and not info.container.endswith((ROWS, CHANGED)) and wanted(fqn)
    ]
    differing: dict[str, bool] = {}
    for rank in range(1, reader.manifest.world_size):
        for fqn, is_number in first.differences(reader.read_treespec(rank), table.__contains__):
            if wanted(fqn):
                differing[fqn] = is_number and differing.get(fqn, True)
        others = reader.record(rank).part.own.tensors
        for fqn in own:
            name = own_name(fqn, rank)
            if fqn in differing or name not in others:
                continue
            if not same_bits(*reader.read((fqn, name)).values()):
                differing[fqn] = False
    return differing


def _values(
    reader: CheckpointReader,
    rank: int,
    paths: Collection[Path],
    wanted: LoadFilter,
    live: LiveMap | None,
    allow_pickle: bool,
) -> dict[Path, Any]:
    """The values that a rank saved at ``paths``."""
    with CheckpointReader(reader.path, rank) as other:
        selection = Selection(other, wanted, live, allow_pickle=allow_pickle)
        parts = selection.flat.parts(paths)
        for path, part in parts.items():
            if not part.leaves:
                raise StateMismatchError(f"{reader.path}: rank {rank} has not saved {fqn_of(path)}")
        nests: dict[Path, Any] = {}
        # each in memory of its own: a function may change what it is given
        for path, part in parts.items():
            values = tensors.read_tensors(
                other, selection.needed([*part.leaves.values()]), None, verify=True
            )
            filling = {at: filled(leaf, values) for at, leaf in part.leaves.items()}
            nests[path] = FlatMap(filling, part.containers).nest(path)
        return nests


def _is_in(fqn: str, item: str) -> bool:
    return fqn == item or fqn.startswith(f"{item}.")
