"""Per-rank state of a checkpoint that another number of ranks loads: what each rank gets."""

from __future__ import annotations

import logging
from typing import Any

from sidesave.client.loading import tensors
from sidesave.client.loading.flat import FlatMap, LiveMap, Path, fqn_of
from sidesave.client.loading.plan import filled
from sidesave.client.loading.selection import LoadFilter, Selection
from sidesave.client.messages import few
from sidesave.client.reading.checkpoint_reader import CheckpointReader, Reader
from sidesave.errors import StateMismatchError
from sidesave.stager.state.annotations import PerRank

logger = logging.getLogger(__name__)


def settle(
    reader: Reader, selection: Selection, wanted: LoadFilter, live: LiveMap | None, *, allow_pickle: bool
) -> None:
    """If the number of ranks changed, call the user's ``when_resized`` functions with the values of all ranks.

    Everything else is rank 0's. Where ranks differed and the user did not ask for rank 0's, plain numbers are warned
    of. So is anything else without a live target; with one it raises ``StateMismatchError``.
    """
    if not (isinstance(reader, CheckpointReader) and reader.resized):
        return
    marks = live.marks if live is not None else {}
    names = {fqn_of(path): mark for path, mark in marks.items()}

    def mark_of(fqn: str) -> PerRank | None:
        name = wanted.renaming(fqn) or ""
        return next((mark for item, mark in names.items() if _is_in(name, item)), None)

    def is_concerned(fqn: str) -> bool:
        name = wanted.renaming(fqn) if wanted.selected(fqn) else None
        mark = mark_of(fqn)
        chosen = name is not None and (live is None or any(_is_in(name, item) for item in live.into))
        return chosen and (mark is None or mark.when_resized is None)

    items = reader.record(0).part.per_rank
    warned: list[str] = []
    refused: list[str] = []
    for fqn, is_number in reader.differences(is_concerned).items():
        item = next((item for item in items if _is_in(fqn, item)), None)
        alone = item is not None or mark_of(fqn) is not None
        (warned if live is None or (is_number and not alone) else refused).append(fqn if live is None else item or fqn)
    line = (
        f"{{}} differs between the {reader.manifest.world_size} ranks that have saved it, and {reader.size} load".format
    )
    if refused:
        lines = few(list(dict.fromkeys(refused)), line, "differ as well")
        raise StateMismatchError(
            f"{reader.path}: nothing was loaded:\n  " + "\n  ".join(lines) + "\nSay what each rank gets: "
            "sidesave.PerRank(x, when_resized='first') gives all of them what rank 0 had; PerRank(x, when_resized=f) "
            "gives each what f(values) returns there, where values is the list of what all ranks had, in their order"
        )
    if warned:
        lines = few(warned, line, "differ as well")
        logger.warning("loading %s: %s; rank 0's is taken", reader.path, "; ".join(lines))
    for path, mark in marks.items():
        part = selection.flat.below(path).leaves
        if callable(mark.when_resized) and part:
            ranks = range(reader.manifest.world_size)
            values = [_value(reader, rank, path, wanted, live, allow_pickle) for rank in ranks]
            made = FlatMap.of(mark.when_resized(values), path)
            others = {at: leaf for at, leaf in selection.flat.leaves.items() if at not in part}
            selection.flat = FlatMap(others | made.leaves, {**selection.flat.containers, **made.containers})


def _value(
    reader: CheckpointReader, rank: int, path: Path, wanted: LoadFilter, live: LiveMap | None, allow_pickle: bool
) -> Any:
    """The value that a rank saved at ``path``."""
    with CheckpointReader(reader.path, rank) as other:
        selection = Selection(other, wanted, live, allow_pickle=allow_pickle)
        part = selection.flat.below(path)
        if not part.leaves:
            raise StateMismatchError(f"{reader.path}: rank {rank} has not saved {fqn_of(path)}")
        values = tensors.read_tensors(other, selection.needed(part.leaves.values()), None, verify=True)
        return FlatMap({at: filled(leaf, values) for at, leaf in part.leaves.items()}, part.containers).nest(path)


def _is_in(fqn: str, item: str) -> bool:
    return fqn == item or fqn.startswith(f"{item}.")
