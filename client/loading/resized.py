"""What another number of ranks than has saved a checkpoint gets of the state that each of them had for itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, cast

from sidesave.client.loading.selection import Choice, Selection, filled
from sidesave.client.messages import few
from sidesave.client.reading.checkpoint_reader import CheckpointReader, Reader, open_checkpoint
from sidesave.errors import StateMismatchError
from sidesave.stager.state.annotations import PerRank, Replicated

logger = logging.getLogger(__name__)

_Path = tuple[Any, ...]


def settle(
    reader: Reader, selection: Selection, choice: Choice, into: Mapping[str, Any] | None, *, allow_pickle: bool
) -> None:
    """Put into a nest what functions of the user's make of all ranks' values, where the number of ranks is another one.

    All else is rank 0's in it. Where that is not what all had, and the user has not asked for it, plain numbers are
    told in a warning; anything else too if there is no live object, or else it raises ``StateMismatchError``.
    """
    if not (isinstance(reader, CheckpointReader) and reader.resized):
        return
    marks = dict(_marks(into or {}, ()))
    names = {".".join(map(str, path)): mark for path, mark in marks.items()}

    def mark_of(fqn: str) -> PerRank | None:
        name = choice.renaming(fqn) or ""
        return next((mark for item, mark in names.items() if _is_in(name, item)), None)

    def wanted(fqn: str) -> bool:
        name = choice.renaming(fqn) if choice.selected(fqn) else None
        mark = mark_of(fqn)
        chosen = name is not None and (into is None or any(_is_in(name, item) for item in into))
        return chosen and (mark is None or mark.when_resized is None)

    items = reader.record(0).part.per_rank
    told: list[str] = []
    refused: list[str] = []
    for fqn, is_number in reader.differences(wanted).items():
        item = next((item for item in items if _is_in(fqn, item)), None)
        alone = item is not None or mark_of(fqn) is not None
        (told if into is None or (is_number and not alone) else refused).append(fqn if into is None else item or fqn)
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
    if told:
        lines = few(told, line, "differ as well")
        logger.warning("loading %s: %s; rank 0's is taken", reader.path, "; ".join(lines))
    for path, mark in marks.items():
        holder = _holder(selection.nest, path)
        if callable(mark.when_resized) and holder is not None:
            ranks = range(reader.manifest.world_size)
            values = [_value(reader, rank, path, choice, into, allow_pickle) for rank in ranks]
            holder[path[-1]] = mark.when_resized(values)


def _value(
    reader: CheckpointReader, rank: int, path: _Path, choice: Choice, into: Mapping[str, Any] | None, allow_pickle: bool
) -> Any:
    """What a rank has saved of the item at ``path``."""
    with open_checkpoint(reader.path, rank) as other:
        selection = Selection(other, choice, into, allow_pickle=allow_pickle)
        holder = _holder(selection.nest, path)
        if holder is None:
            raise StateMismatchError(f"{reader.path}: rank {rank} has not saved {'.'.join(map(str, path))}")
        part = {"value": holder[path[-1]]}
        return filled(part, selection.read(selection.needed(part), None, verify=True))["value"]


def _marks(target: Any, path: _Path) -> Iterator[tuple[_Path, PerRank]]:
    """The ``PerRank`` items of a target, the outermost ones."""
    if isinstance(target, PerRank):
        yield path, target
    elif isinstance(target, Replicated):
        yield from _marks(target.value, path)
    elif type(target) is dict:
        for key, item in cast("dict[Any, Any]", target).items():
            yield from _marks(item, (*path, key))
    elif type(target) is list:
        for index, item in enumerate(cast("list[Any]", target)):
            yield from _marks(item, (*path, index))


def _holder(nest: Any, path: _Path) -> Any:
    """What holds the item at ``path`` in a nest; None if there is none."""
    for depth, key in enumerate(path):
        if not (key in nest if isinstance(nest, dict) else isinstance(nest, list) and key < len(cast("Any", nest))):
            return None
        if depth == len(path) - 1:
            return cast("Any", nest)
        nest = cast("Any", nest)[key]
    return None


def _is_in(fqn: str, item: str) -> bool:
    return fqn == item or fqn.startswith(f"{item}.")
