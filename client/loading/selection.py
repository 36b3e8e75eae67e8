"""What is loaded of a checkpoint: which leaves, and where they go in the target."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch

from sidesave.client.loading import keeping, optimizers
from sidesave.client.loading.flat import SEQUENCES, FlatMap, LiveMap, Path, Slot, fqn_of, prefixes
from sidesave.client.loading.keeping import KEEP_CURRENT
from sidesave.client.loading.messages import Mismatches
from sidesave.client.loading.rename import Rename, Renamed, Renaming, refuse_two_in_one_place
from sidesave.client.loading.tensors import EnumLoad, Pickled, TensorLoad
from sidesave.client.messages import few
from sidesave.client.reading import filters
from sidesave.client.reading.checkpoint_reader import CheckpointReader, Reader
from sidesave.client.reading.filters import Pattern, listed, selector
from sidesave.errors import IntegrityError, InvalidArgumentError, StateMismatchError, WriteError
from sidesave.stager.state.treespec import TreeSpec, Unbuilt

logger = logging.getLogger(__name__)


_ASKED: Final = 64
"""So many ranks are asked for what they have alone, when a pattern matches nothing that this one sees."""


class LoadFilter:
    """What is wanted of a checkpoint, checked.

    Attributes:
        selected: Whether a name of the checkpoint is chosen.
        renaming: Gives the target's names for those.
        cast_to: The dtype for floating-point tensors.
        patterns: The patterns and old names, which should match something in the checkpoint.
        is_partial: Whether patterns leave something out, so that the target may have more than there is.
    """

    def __init__(
        self,
        include: str | Sequence[str] | None,
        exclude: str | Sequence[str] | None,
        rename: Rename | None,
        dtype: torch.dtype | None,
        *,
        strict: bool = True,
    ) -> None:
        """``InvalidArgumentError`` for what cannot be; ``strict`` if a pattern that matches nothing is an error."""
        if dtype is not None and not dtype.is_floating_point:
            raise InvalidArgumentError(f"dtype casts floating-point tensors, so it cannot be {dtype}")
        self.cast_to = dtype
        self.selected: Callable[[str], bool] = selector(include, exclude)
        self.renaming = Renaming(rename)
        self.is_partial = include is not None or exclude is not None
        self._strict = strict
        self.patterns: list[Pattern] = [
            *(Pattern("include", text) for text in listed(include, "include") or ()),
            *(Pattern("exclude", text) for text in listed(exclude, "exclude") or ()),
            *(Pattern("rename", text) for text in self.renaming.rules()),
        ]

    def leaves_out(self, name: str) -> bool:
        """Whether patterns leave out what the target calls ``name``."""
        if not self.is_partial:
            return False
        origins = self.renaming.origins(name)
        return origins is not None and not any(map(self.selected, origins))

    def refuse_unmatched(self, reader: Reader, fqns: Sequence[str], live: LiveMap | None) -> None:
        """Raise, or log, what matches nothing: misspelt, most likely, so that all is loaded, or not what was meant.

        A live target tells of old names itself: what they were to become is missing there, unless the checkpoint has
        the new names already, as later ones of the same run do.
        """
        unmatched = filters.unmatched(self.patterns, fqns)
        if live is not None and any(pattern.kind == "exclude" for pattern in unmatched):
            # It may exclude what only the target has.
            new = map(fqn_of, live.everything())
            known = {origin for name in new for origin in self.renaming.origins(name) or (name,)}
            unknown = filters.unmatched(unmatched, known)
            unmatched = [pattern for pattern in unmatched if pattern.kind != "exclude" or pattern in unknown]
        elsewhere = _names_of_others(reader)
        while unmatched and (names := next(elsewhere, None)) is not None:
            unmatched = filters.unmatched(unmatched, names)
        if not unmatched:
            return
        hints = filters.Hints(fqns, reader.treespec.keys())
        wrong = [each for each in unmatched if self._strict and not (each.kind == "rename" and live is not None)]
        lines = few(wrong or unmatched, hints.line, "match nothing")
        if wrong:
            raise StateMismatchError(f"{reader.path} does not fit, and nothing was loaded:\n  " + "\n  ".join(lines))
        logger.warning("loading %s: %s", reader.path, "; ".join(lines))


def _names_of_others(reader: Reader) -> Iterator[list[str]]:
    """What other ranks have saved, of which this one does not see what they have for themselves alone."""
    if not isinstance(reader, CheckpointReader):
        return
    for rank in range(min(reader.manifest.world_size, _ASKED)):
        if rank != reader.rank:
            with contextlib.suppress(IntegrityError, WriteError):  # what nobody needs may be damaged
                yield names_in(reader.read_treespec(rank))


def names_in(treespec: TreeSpec) -> list[str]:
    """The names of all leaves."""
    found: list[str] = []
    treespec.build(lambda ref: None, only=lambda fqn: bool(found.append(fqn)), unpickle=Pickled)
    return found


class Selection:
    """What is loaded of one checkpoint.

    Attributes:
        flat: The leaves by their places in the target, with :class:`TensorLoad` and :class:`Pickled` for what has to be
            read, and what the target has where that stays.
        partial: The names in it of what not all ranks have saved.
        where: The checkpoint.
        kept: The places of what is as the target has it.
        unasked: The items of the checkpoint that are chosen, and that the target has none for.
        given: The objects that take their state whole and have some here.
        incomplete: Those of them that keep something.
        found: Parameters of optimizers that only the target, or only the checkpoint, has.
        by_position: Optimizers of which no names tell which state is of which parameter, and shapes do not either.
    """

    def __init__(self, reader: Reader, wanted: LoadFilter, live: LiveMap | None, *, allow_pickle: bool) -> None:
        """Choose what ``live`` has an item for, all where that is None; nothing is unpickled, and no tensor read.

        Raises ``StateMismatchError`` when patterns of a strict filter match nothing, or when what they leave out of an
        optimizer, or of another object that takes its state whole, cannot stay as it is.
        """
        self.where = reader.path
        self.renaming = wanted.renaming
        self._reader = reader
        self._cast_to = wanted.cast_to
        self._unpickle = Pickled if allow_pickle else None
        self.kept: set[Path] = set()
        partial: set[str] = set()
        nest, parameters = reader.treespec.unbuilt(unpickle=self._unpickle, partial=partial)
        self._nest = nest
        saved = FlatMap.of(nest, is_whole=_whole(wanted, live))
        saved.leaves.pop((), None)
        fqns = [fqn_of(path) for path in saved.leaves]
        wanted.refuse_unmatched(reader, fqns, live)
        renamed = Renamed(saved, partial, live)
        names = {
            path: name
            for path, fqn in zip(saved.leaves, fqns, strict=True)
            if wanted.selected(fqn) and (name := self.renaming(fqn)) is not None
        }
        places = {path: renamed.where(path, name) for path, name in names.items()}
        if live is not None:
            places = {path: new for path, new in places.items() if new[0] in live.into}
        asked = {path[0] for path in places}
        unasked = (path[0] for path in names if path[0] not in asked and path[0] not in partial)
        self.unasked = dict.fromkeys(map(str, unasked))
        if self.renaming:
            for path in places:
                renamed.place(path, names[path])
            refuse_two_in_one_place(names, places)
            saved.containers, partial = renamed.finished(), renamed.partial
        self.partial: Collection[str] = partial
        if live is not None and wanted.patterns:
            everywhere = (
                renamed.where(path, self.renaming(fqn) or fqn) for path, fqn in zip(saved.leaves, fqns, strict=True)
            )
            self._refuse_broken_lists(live, saved, everywhere, places.values())
        slots = {path: live.slot(new) for path, new in places.items()} if live else {}
        staying = _left_out(saved, places, slots) if wanted.patterns or self.renaming else {}
        self.flat = FlatMap({}, saved.containers)
        for path, leaf in saved.leaves.items():
            if path in places:
                self.flat.leaves[places[path]] = self._value(leaf)
            elif path in staying:
                slot, new = staying[path]
                keeps = not keeping.is_structure(slot, new)
                self.flat.leaves[new] = KEEP_CURRENT if keeps else self._value(leaf)
        whole = {slot.path: slot for slot in slots.values() if slot is not None and slot.is_whole}
        self.found = Mismatches()
        self.by_position: list[str] = []
        if live is not None:
            starts = {slot: old[: len(old) - len(places[old]) + len(slot.path)] for old, slot in slots.items() if slot}
            for slot in whole.values():
                if isinstance(slot.target, torch.optim.Optimizer):
                    self._arrange(slot, parameters.get(fqn_of(starts[slot]), []), live, wanted)
        self.given = {path for path, slot in whole.items() if not slot.is_plain}
        self.incomplete = {slot.path for slot, _ in staying.values()} & self.given
        if wanted.patterns or self.renaming or any(leaf is KEEP_CURRENT for leaf in self.flat.leaves.values()):
            self._keep_current(list(whole.values()), wanted)

    def _value(self, leaf: Any) -> Any:
        """What stands for a leaf while nothing is read."""
        if not isinstance(leaf, Unbuilt):
            return leaf
        value = leaf.build(lambda ref: TensorLoad(ref, leaf=leaf), self._unpickle)
        if leaf.member is not None:
            return EnumLoad(leaf.fqn, *leaf.member, value)
        if isinstance(value, TensorLoad):
            value.look_up(self._reader, self._cast_to)
        return value

    def _arrange(self, slot: Slot, fqns: list[list[str]], live: LiveMap, wanted: LoadFilter) -> None:
        """Put the state of an optimizer into the order of its parameters here, if their names tell it."""
        saved = self.flat.below(slot.path)
        renamed = [[self.renaming(name) for name in group] for group in fqns]
        arranged = optimizers.arrange(slot, saved, renamed, live, self.partial)
        if arranged is None:
            self.by_position += [slot.fqn] if optimizers.is_ambiguous(slot, saved) else []
            return
        if arranged.problems:
            self._refuse(few(arranged.problems, str, "do not fit"))
        for name in arranged.missing:
            (self.found.kept if wanted.leaves_out(name) else self.found.missing).append(f"{slot.fqn}[{name}]")
        for name in arranged.unexpected:
            if wanted.leaves_out(name):
                self.unasked[f"{slot.fqn}[{name}]"] = None
            else:
                self.found.unexpected.append(f"{slot.fqn}[{name}]")
        self._replace(saved, arranged.flat)

    def _replace(self, saved: FlatMap, found: FlatMap) -> None:
        """Have something else in the place of a part."""
        others = {path: leaf for path, leaf in self.flat.leaves.items() if path not in saved.leaves}
        self.flat = FlatMap(others | found.leaves, {**self.flat.containers, **found.containers})

    def _keep_current(self, slots: Iterable[Slot], wanted: LoadFilter) -> None:
        """Put what targets have in the place of what is left out of their states."""
        problems: list[str] = []
        for slot in slots:
            if slot.path in self.flat.leaves:
                continue
            saved = self.flat.below(slot.path)
            if not wanted.is_partial and not any(leaf is KEEP_CURRENT for leaf in saved.leaves.values()):
                continue
            found, wrong = keeping.keep_current(slot, saved, wanted.leaves_out)
            problems += wrong
            self.kept.update(path for path, leaf in found.leaves.items() if leaf is not saved.leaves.get(path))
            self._replace(saved, found)
        if problems:
            self._refuse(few(problems, str, "cannot stay"))

    def _refuse_broken_lists(
        self, live: LiveMap, saved: FlatMap, everywhere: Iterable[Path], chosen: Iterable[Path]
    ) -> None:
        """What is left of a list closes up, and would come to stand in the wrong places."""

        def items(places: Iterable[Path]) -> dict[Path, set[Any]]:
            found: dict[Path, set[Any]] = {}
            for path in places:
                slot = live.slot(path)
                for end in range(1, len(path)):
                    around = path[:end]
                    within = slot is not None and slot.is_plain and end >= len(slot.path)
                    like = saved.containers.get(around) if within else live.containers.get(around)
                    if type(like) in SEQUENCES:
                        found.setdefault(around, set()).add(path[end])
            return found

        there = items(everywhere)
        hint = "of a list in into= no single item can be left out; put them into a dict, by names"
        broken = [f"{fqn_of(path)}: {hint}" for path, some in items(chosen).items() if some != there.get(path)]
        if broken:
            self._refuse(few(broken, str, "are broken"))

    def _refuse(self, lines: Sequence[str]) -> NoReturn:
        raise StateMismatchError(f"{self.where} does not fit, and nothing was loaded:\n  " + "\n  ".join(lines))

    def items(self) -> list[str]:
        """The names at the top of the checkpoint."""
        return self._reader.treespec.keys()

    def names(self) -> list[str]:
        """Everything that the checkpoint has, whatever is chosen of it, under its new names; and what is at the top."""
        fqns = map(fqn_of, FlatMap.of(self._nest).leaves)
        return [*self.items(), *(self.renaming(fqn) or fqn for fqn in fqns)]

    def needed(self, leaves: Iterable[Any]) -> list[TensorLoad | Pickled]:
        """Those of the leaves that have to be read of this checkpoint, each once."""
        mine = {id(leaf) for leaf in self.flat.leaves.values() if isinstance(leaf, (TensorLoad, Pickled))}
        return [leaf for leaf in {id(leaf): leaf for leaf in leaves}.values() if id(leaf) in mine]

    def check_apart(self, leaves: Iterable[Any], *, live: bool) -> None:
        """Tensors that are not the same on the ranks that have saved them, and of which none is this rank's.

        Of buffers, and where no live object takes them, the first rank's are taken, with a warning.
        """
        found = [(leaf, leaf.ref.fqn) for leaf in self.needed(leaves) if isinstance(leaf, TensorLoad)]
        odd = {fqn: (leaf, ranks) for leaf, fqn in found if (ranks := self._reader.differing(fqn))}
        strict = {fqn: ranks for fqn, (leaf, ranks) in odd.items() if live and not leaf.is_buffer}
        told = strict or {fqn: ranks for fqn, (_, ranks) in odd.items()}
        lines = [f"{fqn} differs between ranks {_brief(ranks)}" for fqn, ranks in list(told.items())[:20]]
        lines += [f"and {len(told) - 20} more"] if len(told) > 20 else []
        if strict:
            text = "\n  ".join(["nothing was loaded:", *lines])
            raise StateMismatchError(f"{text}\nload with as many ranks, or leave it out with exclude=")
        if odd:
            where = "and this is another number of ranks, or one that had none"
            logger.warning("loading %s: %s, %s; of each the first rank's is taken", self.where, "; ".join(lines), where)


def _whole(wanted: LoadFilter, live: LiveMap | None) -> Callable[[Path], bool]:
    """Tells which plain data need not be taken apart: nothing speaks of what is in it, and nothing live is there."""
    if wanted.patterns or wanted.renaming:
        return lambda path: False
    if live is None:
        return bool
    optimizers = {path for path, slot in live.slots.items() if isinstance(slot.target, torch.optim.Optimizer)}
    return lambda path: bool(path) and path not in live.containers and optimizers.isdisjoint(prefixes(path))


def _left_out(
    saved: FlatMap, places: Mapping[Path, Path], slots: Mapping[Path, Slot | None]
) -> dict[Path, tuple[Slot, Path]]:
    """Leaves that are not chosen, and belong to a state of which something is; and their places there."""
    origins: dict[Path, Slot] = {}
    for old, new in places.items():
        slot = slots.get(old)
        if slot is not None and slot.is_whole:
            end = len(old) - len(new) + len(slot.path)
            if end > 0 and old[end:] == new[len(slot.path) :]:
                origins[old[:end]] = slot
    taken, found = set(places.values()), dict[Path, tuple[Slot, Path]]()
    for old in saved.leaves if origins else ():
        origin = next((node for node in reversed(prefixes(old)) if node in origins), None)
        if old not in places and origin is not None:
            slot = origins[origin]
            new = (*slot.path, *old[len(origin) :])
            if new not in taken:
                taken.add(new)
                found[old] = slot, new
    return found


def _brief(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
