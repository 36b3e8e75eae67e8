"""Selects the leaves of a checkpoint to load, and their places in the target."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from sidesave.client.loading import keeping, optimizers
from sidesave.client.loading.fitting import Mismatches
from sidesave.client.loading.keeping import KEEP_CURRENT
from sidesave.client.loading.load_filter import (
    LoadFilter,
    Renamed,
    names_in,
    refuse_two_in_one_place,
    without_wrappers,
)
from sidesave.client.loading.tensors import EnumLoad, TensorLoad
from sidesave.client.messages import few
from sidesave.client.reading.stored import SEQUENCES, FlatMap, Pickled, Reader, fqn_of, prefixes
from sidesave.client.targets.live_map import WHOLE, Kind, LiveMap, Slot
from sidesave.errors import StateMismatchError, listed
from sidesave.stager.state.treespec import Path, Unbuilt
from sidesave.stager.wrappers import PARTS

logger = logging.getLogger(__name__)


class Selection:
    """The part of one checkpoint that is loaded.

    Attributes:
        flat: The leaves by their places in the target: :class:`TensorLoad` and :class:`Pickled` for
            values to read, and the target's current values where it keeps those.
        partial: New names of values that only some ranks saved.
        where: The checkpoint.
        kept: The places where the target keeps its current value.
        unasked: Selected items of the checkpoint that the target lacks.
        given: The objects that take their state as a whole and receive one.
        incomplete: Those of them that keep some of their own.
        mismatches: Parameters of optimizers that only the target, or only the checkpoint, has.
        by_position: Optimizers for which neither names nor shapes assign states to parameters.
        has_differing: Whether there can be tensors that differ between ranks.
    """

    def __init__(
        self, reader: Reader, wanted: LoadFilter, live: LiveMap | None, *, allow_pickle: bool
    ) -> None:
        """Select items that ``live`` has, or all without it; reads no tensor and unpickles nothing.

        Raises ``StateMismatchError`` if a pattern of a strict filter matches nothing, or if an
        object that takes its state as a whole cannot keep its own value of a part left out.
        """
        self.where = reader.path
        self.has_differing = reader.has_differing
        self.renaming = wanted.renaming
        renames = self.renaming.renames
        self._reader = reader
        self._cast_to = wanted.cast_to
        self._unpickle = Pickled if allow_pickle else None
        self.kept: set[Path] = set()
        every = reader.treespec.leaves(unpickle=self._unpickle, apart=_apart(wanted, live))
        saved, fqns, partial = FlatMap(every.leaves, every.containers), every.names(), every.partial
        self._containers, self._states = saved.containers, dict[Path, bool]()
        if wanted.patterns:
            wanted.refuse_unmatched(reader, fqns.values(), live)
        may_be_wrapped = live is not None and (
            bool(live.wrapped) or renames or _have_parts(fqns.values())
        )
        renamed = Renamed(saved, partial, live) if renames or may_be_wrapped else None
        names = fqns
        if wanted.is_partial or renames:
            chosen = {
                path: self.renaming(fqn) for path, fqn in fqns.items() if wanted.selected(fqn)
            }
            names = {path: name for path, name in chosen.items() if name is not None}
        if wanted.patterns:
            names |= _ids_beside(saved, names)

        def where(path: Path, name: str) -> Path:
            return path if renamed is None or name == fqns[path] else renamed.where(path, name)

        places = (
            {path: where(path, name) for path, name in names.items()}
            if renames
            else {at: at for at in names}
        )
        freed: dict[str, str] = {}  # new names of leaves saved under the names of wrappers
        if live is not None:
            moved = self._moved(fqns, places, where, live) if may_be_wrapped else {}
            if moved:
                freed = {fqns[path]: fqn_of(new) for path, new in moved.items()}
                names = {path: freed.get(fqns[path], name) for path, name in names.items()}
            wanted.freed = {name: fqn for fqn, name in freed.items()}
            places = {
                path: moved.get(path, new) for path, new in places.items() if new[0] in live.into
            }
        asked = {path[0] for path in places}
        unasked = (path[0] for path in names if path[0] not in asked and path[0] not in partial)
        self.unasked = dict.fromkeys(map(str, unasked))
        if renamed is not None and (renames or freed):
            for path in places:
                renamed.place(path, names[path])
            refuse_two_in_one_place(names, places)
            saved.containers, partial = renamed.finished(), renamed.partial
        self.partial: Collection[str] = partial
        if live is not None and wanted.patterns:
            everywhere = (where(path, self.renaming(fqn) or fqn) for path, fqn in fqns.items())
            self._refuse_broken_lists(live, saved, everywhere, places.values())
        slots = {path: live.slot(new) for path, new in places.items()} if live else {}
        staying = _left_out(saved, places, slots) if wanted.patterns or renames else {}
        self.flat = FlatMap({}, saved.containers)
        for path, leaf in saved.leaves.items():
            if path in places:
                self.flat.leaves[places[path]] = self._value(leaf, path, slots.get(path))
            elif path in staying:
                slot, new = staying[path]
                keeps = not keeping.is_structure(slot, new)
                self.flat.leaves[new] = KEEP_CURRENT if keeps else self._value(leaf, path, slot)
        whole = {
            slot.path: slot
            for slot in dict.fromkeys(slots.values())
            if slot is not None and slot.kind in WHOLE
        }
        self.mismatches = Mismatches()
        self.by_position: list[str] = []
        optimized = {path: slot for path, slot in whole.items() if slot.kind is Kind.OPTIMIZER}
        if live is not None and optimized:
            starts = {
                slot: old[: len(old) - len(places[old]) + len(slot.path)]
                for old, slot in slots.items()
                if slot is not None and slot.path in optimized
            }
            for path, saved_state in self.flat.parts(optimized).items():
                groups = every.parameters.get(starts[optimized[path]], [])
                if renames or freed:
                    groups = [
                        [freed.get(name) or self.renaming(name) for name in group]
                        for group in groups
                    ]
                self._arrange(optimized[path], saved_state, groups, live, wanted)
        self.given = {path for path, slot in whole.items() if slot.kind is not Kind.PLAIN}
        self.incomplete = {slot.path for slot, _ in staying.values()} & self.given
        if (
            wanted.patterns
            or renames
            or any(leaf is KEEP_CURRENT for leaf in self.flat.leaves.values())
        ):
            self._keep_current(whole, wanted)

    def _value(self, leaf: Any, path: Path, slot: Slot | None) -> Any:
        """The placeholder of a leaf that is not read yet."""
        if not isinstance(leaf, Unbuilt):
            return leaf
        unpickle = pickle.loads if self._unpickle else None
        ref = leaf.plain_tensor
        if ref is not None:  # as most are
            value = TensorLoad(ref, leaf=leaf, unpickle=unpickle)
        else:
            value = leaf.build(
                lambda ref: TensorLoad(ref, leaf=leaf, unpickle=unpickle), self._unpickle
            )
        if ref is None and leaf.member is not None:
            return EnumLoad(leaf.fqn, *leaf.member, value)
        if isinstance(value, TensorLoad):
            value.look_up(self._reader)
            if self._cast_to is not None and self._is_weight(value, path, slot, self._cast_to):
                value.cast(self._cast_to)
        return value

    def _is_weight(
        self, load: TensorLoad, path: Path, slot: Slot | None, dtype: torch.dtype
    ) -> bool:
        """Whether ``dtype=`` casts a tensor, saved at ``path``, whose target is ``slot``.

        This applies to the tensors of a module, the columns of a table, and a live tensor that has
        this dtype. Without a live target, the container decides: not the state of an optimizer, not
        the extra state of a module, and elsewhere no scalar, which may be a counter.
        """
        if slot is not None and slot.owner is not None and slot.kind is not Kind.EXTRA:
            return True
        if slot is not None and isinstance(slot.target, torch.Tensor):
            return isinstance(slot.target, nn.Parameter) or slot.target.dtype == dtype
        if slot is not None and slot.kind is Kind.OPTIMIZER:
            return False
        for end in range(1, len(path)):
            container = self._containers.get(path[:end])
            if getattr(container, "_metadata", None) is not None:  # a module's
                return end == len(path) - 1 and not str(path[-1]).endswith("_extra_state")
            if path[:end] not in self._states:
                self._states[path[:end]] = optimizers.is_state(container)
            if self._states[path[:end]]:
                return False
        return bool(load.shape) or bool(load.ref.table)

    def _moved(
        self,
        fqns: Mapping[Path, str],
        places: Mapping[Path, Path],
        where: Callable[[Path, str], Path],
        live: LiveMap,
    ) -> dict[Path, Path]:
        """The new places of leaves that were saved under the names of wrappers, chosen or not."""
        others = {
            path: where(path, name)
            for path, fqn in fqns.items()
            if path not in places and (name := self.renaming(fqn)) is not None
        }
        every = {path: new for path, new in {**places, **others}.items() if new[0] in live.into}
        moved, by_name = without_wrappers(every.values(), live)
        moved |= by_name
        guessed = [fqns[path] for path, new in places.items() if new in by_name]
        if guessed:
            odd = ", ".join(few(guessed, str, "are such"))
            logger.warning(
                "loading %s: what wrappers add is dropped from names: %s", self.where, odd
            )
        return {path: moved[new] for path, new in every.items() if new in moved}

    def _arrange(
        self,
        slot: Slot,
        saved: FlatMap,
        fqns: Sequence[Sequence[str | None]],
        live: LiveMap,
        wanted: LoadFilter,
    ) -> None:
        """Put an optimizer's state into the order of its live parameters, if names define it."""
        # With names, only states of ranks with the same names were merged.
        arranged = optimizers.arrange(slot, saved, fqns, live, () if fqns else self.partial)
        if arranged is None:
            self.by_position += [slot.fqn] if optimizers.is_ambiguous(slot, saved) else []
            return
        if arranged.problems:
            self._refuse(few(arranged.problems, str, "do not fit"))
        for name in arranged.missing:
            (self.mismatches.kept if wanted.leaves_out(name) else self.mismatches.missing).append(
                f"{slot.fqn}[{name}]"
            )
        self.mismatches.unexpected += [
            f"{slot.fqn}[{name}]" for name in arranged.unexpected if not wanted.leaves_out(name)
        ]
        if arranged.flat is not saved:
            self.flat.replace(saved, arranged.flat)

    def _keep_current(self, slots: Mapping[Path, Slot], wanted: LoadFilter) -> None:
        """Fill in the targets' current values for parts left out of their states."""
        problems: list[str] = []
        for path, saved in self.flat.parts(
            [path for path in slots if path not in self.flat.leaves]
        ).items():
            slot = slots[path]
            if not wanted.is_partial and not any(
                leaf is KEEP_CURRENT for leaf in saved.leaves.values()
            ):
                continue
            given, wrong = keeping.keep_current(slot, saved, wanted.leaves_out)
            problems += wrong
            self.kept.update(
                path for path, leaf in given.leaves.items() if leaf is not saved.leaves.get(path)
            )
            self.flat.replace(saved, given)
        if problems:
            self._refuse(few(problems, str, "cannot stay"))

    def _refuse_broken_lists(
        self, live: LiveMap, saved: FlatMap, everywhere: Iterable[Path], chosen: Iterable[Path]
    ) -> None:
        """Raise if an item of a live list is left out: later ones would load into wrong places."""

        def items(places: Iterable[Path]) -> dict[Path, set[Any]]:
            by_list: dict[Path, set[Any]] = {}
            for path in places:
                slot = live.slot(path)
                for end in range(1, len(path)):
                    around = path[:end]
                    within = slot is not None and slot.kind is Kind.PLAIN and end >= len(slot.path)
                    like = saved.containers.get(around) if within else live.containers.get(around)
                    if type(like) in SEQUENCES:
                        by_list.setdefault(around, set()).add(path[end])
            return by_list

        every = items(everywhere)
        hint = "of a list in into= no single item can be left out; put them into a dict, by names"
        broken = [
            f"{fqn_of(path)}: {hint}"
            for path, some in items(chosen).items()
            if some != every.get(path)
        ]
        if broken:
            self._refuse(few(broken, str, "are broken"))

    def _refuse(self, lines: Sequence[str]) -> NoReturn:
        raise StateMismatchError(
            f"{self.where} does not fit, and nothing was loaded:\n  " + "\n  ".join(lines)
        )

    def items(self) -> list[str]:
        """The names at the top of the checkpoint."""
        return self._reader.treespec.keys()

    def names(self) -> list[str]:
        """All new names of the checkpoint's leaves, selected or not, and the items at the top."""
        fqns = names_in(self._reader.treespec)
        return [*self.items(), *(self.renaming(fqn) or fqn for fqn in fqns)]

    def needed(self, leaves: Iterable[Any]) -> list[TensorLoad | Pickled]:
        """Those of ``leaves`` that must be read from this checkpoint, each once."""
        own = {
            id(leaf)
            for leaf in self.flat.leaves.values()
            if isinstance(leaf, (TensorLoad, Pickled))
        }
        return [leaf for leaf in {id(leaf): leaf for leaf in leaves}.values() if id(leaf) in own]

    def check_diverged(self, leaves: Iterable[Any], *, live: bool) -> None:
        """Raise ``StateMismatchError`` for tensors that differed between ranks other than this one.

        Buffers, and tensors that no live object takes, come from the first rank, with a warning.
        """
        if not self.has_differing:
            return
        tensors = [leaf for leaf in self.needed(leaves) if isinstance(leaf, TensorLoad)]
        loads = [(leaf, part.ref.fqn) for leaf in tensors for part in (leaf.parts or [leaf])]
        odd = {fqn: (leaf, ranks) for leaf, fqn in loads if (ranks := self._reader.differing(fqn))}
        strict = {fqn: ranks for fqn, (leaf, ranks) in odd.items() if live and not leaf.is_buffer}
        shown = strict or {fqn: ranks for fqn, (_, ranks) in odd.items()}
        lines = few(
            [*shown.items()],
            lambda each: f"{each[0]} differs between ranks {listed(each[1], 8)}",
            "tensors",
        )
        if strict:
            text = "\n  ".join(["nothing was loaded:", *lines])
            raise StateMismatchError(
                f"{text}\nload with as many ranks, or leave it out with exclude="
            )
        if odd:
            logger.warning(
                "loading %s: %s, and this is another number of ranks, or one that had none; of "
                "each the first rank's is taken",
                self.where,
                "; ".join(lines),
            )


def _have_parts(fqns: Iterable[str]) -> bool:
    """Whether one of these names has a part that wrappers add."""
    text = ".\n.".join(fqns)
    return any(f".{part}." in f".{text}." for part in PARTS)


def _ids_beside(saved: FlatMap, names: Mapping[Path, str]) -> dict[Path, str]:
    """The new names of tables' ids, for tables with only columns selected."""
    tables = {path[:-1]: name.rpartition(".")[0] for path, name in names.items()}
    return {
        path: f"{tables[path[:-1]]}.{path[-1]}"
        for path, leaf in saved.leaves.items()
        if isinstance(leaf, Unbuilt) and leaf.is_ids and path not in names and path[:-1] in tables
    }


def _apart(wanted: LoadFilter, live: LiveMap | None) -> dict[Path, bool] | None:
    """The containers of plain data to take apart: a pattern, a rename or a live object is within.

    In those that are true, this also applies to all within; None is all containers.
    """
    if wanted.patterns or wanted.renaming.renames:
        return None
    if live is None:
        return {}
    optimizers = {path: True for path, slot in live.slots.items() if slot.kind is Kind.OPTIMIZER}
    return dict.fromkeys(live.containers, False) | optimizers


def _left_out(
    saved: FlatMap, places: Mapping[Path, Path], slots: Mapping[Path, Slot | None]
) -> dict[Path, tuple[Slot, Path]]:
    """Leaves that are not selected, in states with others that are; with their slots and places."""
    origins: dict[Path, Slot] = {}
    for old, new in places.items():
        slot = slots.get(old)
        if slot is not None and slot.kind in WHOLE:
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
