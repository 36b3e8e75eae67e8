"""Selects the leaves of a checkpoint to load, and their places in the target."""

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
from sidesave.client.loading.rename import Rename, Renamed, Renaming, refuse_two_in_one_place, without_wrappers
from sidesave.client.loading.tensors import EnumLoad, Pickled, TensorLoad
from sidesave.client.messages import few
from sidesave.client.reading import filters
from sidesave.client.reading.checkpoint_reader import CheckpointReader, Reader
from sidesave.client.reading.filters import Pattern, listed, selector
from sidesave.errors import IntegrityError, InvalidArgumentError, StateMismatchError, WriteError
from sidesave.stager.state.treespec import TreeSpec, Unbuilt

logger = logging.getLogger(__name__)


_ASKED: Final = 64
"""The number of ranks whose own state is searched for a pattern that matches nothing on this one."""


class LoadFilter:
    """What to load of a checkpoint, checked.

    Attributes:
        selected: Whether a name in the checkpoint is chosen.
        renaming: The new names.
        cast_to: The dtype for floating-point tensors.
        patterns: The patterns and old names, each of which should match something in the checkpoint.
        is_partial: Whether there are patterns, so that the target may have more than the checkpoint.
        freed: Names in the checkpoint by those of the target, of what is saved under the names of wrappers.
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
        """Check the arguments; with ``strict`` a pattern that matches nothing will be an error."""
        if dtype is not None and not dtype.is_floating_point:
            raise InvalidArgumentError(f"dtype casts floating-point tensors, so it cannot be {dtype}")
        self.cast_to = dtype
        self.selected: Callable[[str], bool] = selector(include, exclude)
        self.renaming = Renaming(rename)
        self.is_partial = include is not None or exclude is not None
        self.freed: dict[str, str] = {}
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
        origins = [self.freed[name]] if name in self.freed else self.renaming.origins(name)
        return origins is not None and not any(map(self.selected, origins))

    def refuse_unmatched(self, reader: Reader, fqns: Sequence[str], live: LiveMap | None) -> None:
        """Raise for patterns that match nothing, which are most likely misspelt; without ``strict``, log them.

        Old names of a rename are only logged with a live target: there the new names are missing, unless the checkpoint
        already has them, as later ones of the same run do.
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
    """The names that other ranks saved, with their per-rank state, which this rank does not see."""
    if not isinstance(reader, CheckpointReader):
        return
    for rank in range(min(reader.manifest.world_size, _ASKED)):
        if rank != reader.rank:
            with contextlib.suppress(IntegrityError, WriteError):  # what nobody needs may be damaged
                yield names_in(reader.read_treespec(rank))


def names_in(treespec: TreeSpec) -> list[str]:
    """The names of all leaves of a treespec."""
    names: list[str] = []
    treespec.build(lambda ref: None, only=lambda fqn: bool(names.append(fqn)), unpickle=Pickled)
    return names


class Selection:
    """What is loaded of one checkpoint.

    Attributes:
        flat: The leaves by their places in the target: :class:`TensorLoad` and :class:`Pickled` for what must be read,
            and the target's current values where those stay.
        partial: New names of what not all ranks saved.
        where: The checkpoint.
        kept: The places where the target keeps its current value.
        unasked: Chosen items of the checkpoint that the target has not.
        given: The objects that take their state whole and are given some.
        incomplete: Those of them that keep something.
        mismatches: Parameters of optimizers that only the target, or only the checkpoint, has.
        by_position: Optimizers for which neither names nor shapes tell which state is of which parameter.
    """

    def __init__(self, reader: Reader, wanted: LoadFilter, live: LiveMap | None, *, allow_pickle: bool) -> None:
        """Choose what ``live`` has an item for; everything without ``live``. No tensor is read, nothing is unpickled.

        Raises ``StateMismatchError`` if a pattern of a strict filter matches nothing, or if something that is left out
        of an object that takes its state whole cannot stay as it is.
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
        if wanted.patterns:
            names |= _ids_beside(saved, names)
        places = {path: renamed.where(path, name) for path, name in names.items()}
        freed: dict[str, str] = {}  # new names of what is saved under the names of wrappers
        if live is not None:
            others = {
                path: renamed.where(path, name)
                for path, fqn in zip(saved.leaves, fqns, strict=True)
                if path not in places and (name := self.renaming(fqn)) is not None
            }
            every = {path: new for path, new in (places | others).items() if new[0] in live.into}
            moved, by_name = without_wrappers(every.values(), live)
            moved |= by_name
            guessed = [fqn_of(path) for path, new in places.items() if new in by_name]
            if guessed:
                odd = ", ".join(few(guessed, str, "are such"))
                logger.warning("loading %s: what wrappers add is dropped from names: %s", self.where, odd)
            freed = {fqn_of(path): fqn_of(moved[new]) for path, new in every.items() if new in moved}
            wanted.freed = {name: fqn for fqn, name in freed.items()}
            names |= {path: freed[fqn] for path in names if (fqn := fqn_of(path)) in freed} if freed else {}
            places = {path: moved.get(new, new) for path, new in places.items() if new[0] in live.into}
        asked = {path[0] for path in places}
        unasked = (path[0] for path in names if path[0] not in asked and path[0] not in partial)
        self.unasked = dict.fromkeys(map(str, unasked))
        if self.renaming or freed:
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
        self.mismatches = Mismatches()
        self.by_position: list[str] = []
        if live is not None:
            starts = {slot: old[: len(old) - len(places[old]) + len(slot.path)] for old, slot in slots.items() if slot}
            for slot in whole.values():
                if isinstance(slot.target, torch.optim.Optimizer):
                    groups = parameters.get(fqn_of(starts[slot]), [])
                    renamed_groups = [[freed.get(name) or self.renaming(name) for name in group] for group in groups]
                    self._arrange(slot, renamed_groups, live, wanted)
        self.given = {path for path, slot in whole.items() if not slot.is_plain}
        self.incomplete = {slot.path for slot, _ in staying.values()} & self.given
        if wanted.patterns or self.renaming or any(leaf is KEEP_CURRENT for leaf in self.flat.leaves.values()):
            self._keep_current(list(whole.values()), wanted)

    def _value(self, leaf: Any) -> Any:
        """The placeholder of a leaf that is not read yet."""
        if not isinstance(leaf, Unbuilt):
            return leaf
        value = leaf.build(lambda ref: TensorLoad(ref, leaf=leaf), self._unpickle)
        if leaf.member is not None:
            return EnumLoad(leaf.fqn, *leaf.member, value)
        if isinstance(value, TensorLoad):
            value.look_up(self._reader, self._cast_to)
        return value

    def _arrange(self, slot: Slot, fqns: list[list[str | None]], live: LiveMap, wanted: LoadFilter) -> None:
        """Put the state of an optimizer into the order of its live parameters, if names tell it."""
        saved = self.flat.below(slot.path)
        arranged = optimizers.arrange(slot, saved, fqns, live, self.partial)
        if arranged is None:
            self.by_position += [slot.fqn] if optimizers.is_ambiguous(slot, saved) else []
            return
        if arranged.problems:
            self._refuse(few(arranged.problems, str, "do not fit"))
        for name in arranged.missing:
            (self.mismatches.kept if wanted.leaves_out(name) else self.mismatches.missing).append(f"{slot.fqn}[{name}]")
        for name in arranged.unexpected:
            if wanted.leaves_out(name):
                self.unasked[f"{slot.fqn}[{name}]"] = None
            else:
                self.mismatches.unexpected.append(f"{slot.fqn}[{name}]")
        self._replace(saved, arranged.flat)

    def _replace(self, saved: FlatMap, replacement: FlatMap) -> None:
        """Replace a part of ``flat``."""
        others = {path: leaf for path, leaf in self.flat.leaves.items() if path not in saved.leaves}
        self.flat = FlatMap(others | replacement.leaves, {**self.flat.containers, **replacement.containers})

    def _keep_current(self, slots: Iterable[Slot], wanted: LoadFilter) -> None:
        """Fill in the targets' current values for what is left out of their states."""
        problems: list[str] = []
        for slot in slots:
            if slot.path in self.flat.leaves:
                continue
            saved = self.flat.below(slot.path)
            if not wanted.is_partial and not any(leaf is KEEP_CURRENT for leaf in saved.leaves.values()):
                continue
            given, wrong = keeping.keep_current(slot, saved, wanted.leaves_out)
            problems += wrong
            self.kept.update(path for path, leaf in given.leaves.items() if leaf is not saved.leaves.get(path))
            self._replace(saved, given)
        if problems:
            self._refuse(few(problems, str, "cannot stay"))

    def _refuse_broken_lists(
        self, live: LiveMap, saved: FlatMap, everywhere: Iterable[Path], chosen: Iterable[Path]
    ) -> None:
        """Raise if an item of a live list is left out: the others would close up, and land in the wrong places."""

        def items(places: Iterable[Path]) -> dict[Path, set[Any]]:
            by_list: dict[Path, set[Any]] = {}
            for path in places:
                slot = live.slot(path)
                for end in range(1, len(path)):
                    around = path[:end]
                    within = slot is not None and slot.is_plain and end >= len(slot.path)
                    like = saved.containers.get(around) if within else live.containers.get(around)
                    if type(like) in SEQUENCES:
                        by_list.setdefault(around, set()).add(path[end])
            return by_list

        every = items(everywhere)
        hint = "of a list in into= no single item can be left out; put them into a dict, by names"
        broken = [f"{fqn_of(path)}: {hint}" for path, some in items(chosen).items() if some != every.get(path)]
        if broken:
            self._refuse(few(broken, str, "are broken"))

    def _refuse(self, lines: Sequence[str]) -> NoReturn:
        raise StateMismatchError(f"{self.where} does not fit, and nothing was loaded:\n  " + "\n  ".join(lines))

    def items(self) -> list[str]:
        """The names at the top of the checkpoint."""
        return self._reader.treespec.keys()

    def names(self) -> list[str]:
        """All names in the checkpoint, chosen or not, under their new names; and the items at the top."""
        fqns = map(fqn_of, FlatMap.of(self._nest).leaves)
        return [*self.items(), *(self.renaming(fqn) or fqn for fqn in fqns)]

    def needed(self, leaves: Iterable[Any]) -> list[TensorLoad | Pickled]:
        """Those of ``leaves`` that must be read from this checkpoint, each once."""
        own = {id(leaf) for leaf in self.flat.leaves.values() if isinstance(leaf, (TensorLoad, Pickled))}
        return [leaf for leaf in {id(leaf): leaf for leaf in leaves}.values() if id(leaf) in own]

    def check_diverged(self, leaves: Iterable[Any], *, live: bool) -> None:
        """Raise ``StateMismatchError`` for tensors that differed between ranks, of which none is this rank's.

        Buffers, and tensors that no live object takes, come from the first rank, with a warning.
        """
        loads = [(leaf, leaf.ref.fqn) for leaf in self.needed(leaves) if isinstance(leaf, TensorLoad)]
        odd = {fqn: (leaf, ranks) for leaf, fqn in loads if (ranks := self._reader.differing(fqn))}
        strict = {fqn: ranks for fqn, (leaf, ranks) in odd.items() if live and not leaf.is_buffer}
        shown = strict or {fqn: ranks for fqn, (_, ranks) in odd.items()}
        lines = [f"{fqn} differs between ranks {_brief(ranks)}" for fqn, ranks in list(shown.items())[:20]]
        lines += [f"and {len(shown) - 20} more"] if len(shown) > 20 else []
        if strict:
            text = "\n  ".join(["nothing was loaded:", *lines])
            raise StateMismatchError(f"{text}\nload with as many ranks, or leave it out with exclude=")
        if odd:
            logger.warning(
                "loading %s: %s, and this is another number of ranks, or one that had none; "
                "of each the first rank's is taken",
                self.where,
                "; ".join(lines),
            )


def _ids_beside(saved: FlatMap, names: Mapping[Path, str]) -> dict[Path, str]:
    """The new names of the ids of tables of which columns alone are chosen."""
    tables = {path[:-1]: name.rpartition(".")[0] for path, name in names.items()}
    return {
        path: f"{tables[path[:-1]]}.{path[-1]}"
        for path, leaf in saved.leaves.items()
        if isinstance(leaf, Unbuilt) and leaf.is_ids and path not in names and path[:-1] in tables
    }


def _whole(wanted: LoadFilter, live: LiveMap | None) -> Callable[[Path], bool]:
    """Says which plain data may stay one leaf: no pattern or rename reaches into it, and nothing live is there."""
    if wanted.patterns or wanted.renaming:
        return lambda path: False
    if live is None:
        return bool
    optimizers = {path for path, slot in live.slots.items() if isinstance(slot.target, torch.optim.Optimizer)}
    return lambda path: bool(path) and path not in live.containers and optimizers.isdisjoint(prefixes(path))


def _left_out(
    saved: FlatMap, places: Mapping[Path, Path], slots: Mapping[Path, Slot | None]
) -> dict[Path, tuple[Slot, Path]]:
    """Leaves that are not chosen, of states of which others are; with their slots and places."""
    origins: dict[Path, Slot] = {}
    for old, new in places.items():
        slot = slots.get(old)
        if slot is not None and slot.is_whole:
            end = len(old) - len(new) + len(slot.path)
            if end > 0 and old[end:] == new[len(slot.path) :]:
                origins[old[:end]] = slot
    taken, left_out = set(places.values()), dict[Path, tuple[Slot, Path]]()
    for old in saved.leaves if origins else ():
        origin = next((node for node in reversed(prefixes(old)) if node in origins), None)
        if old not in places and origin is not None:
            slot = origins[origin]
            new = (*slot.path, *old[len(origin) :])
            if new not in taken:
                taken.add(new)
                left_out[old] = slot, new
    return left_out


def _brief(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
