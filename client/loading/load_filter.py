"""The choice of what to load of a checkpoint: patterns, a dtype, and new names.

Names are FQNs. A dot may stand within a key (a module's state is one dict of dotted keys) or
between two keys. So a new name alone does not define a place. The target does, as far as it has the
name. After that a value keeps the old keys with which its name still ends, and the new part before
them is one key.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import nn

from sidesave.client.messages import few
from sidesave.client.reading import filters
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.client.reading.filters import Pattern, selector
from sidesave.client.reading.stored import SEQUENCES, FlatMap, Pickled, Reader, fqn_of, prefixes
from sidesave.client.targets.live_map import Kind, LiveMap
from sidesave.errors import (
    IntegrityError,
    InvalidArgumentError,
    StateMismatchError,
    WriteError,
    brief,
)
from sidesave.stager.state.treespec import Path, TreeSpec, with_metadata
from sidesave.stager.wrappers import PARTS

logger = logging.getLogger(__name__)

Rename = Mapping[str, "str | None"] | Callable[[str], "str | None"]
"""A dict of prefixes, or a function, from saved names to the target's; None leaves a name out."""

_EXTRA: Final = "_extra_state."
_ASKED: Final = 64
"""Number of ranks whose own state is searched for a pattern that matches nothing on this one."""


class Renaming:
    """New names of leaves. A dict replaces the longest prefix that it has; other names stay.

    Attributes:
        renames: Whether there is anything to rename.
        rules: The prefixes that are renamed; none for a function.
    """

    def __init__(self, rename: Rename | None) -> None:
        """Check ``rename``; ``InvalidArgumentError`` if not a dict of names or a function."""
        self._prefixes: dict[str, str | None] | None = {}
        self._rename: Callable[[str], str | None] = self._by_prefix
        if callable(rename):
            self._prefixes, self._rename = None, rename
        elif isinstance(cast("object", rename), Mapping):
            for old, new in cast("Mapping[Any, Any]", rename).items():
                if (
                    not isinstance(old, str)
                    or not old.strip(".")
                    or not (new is None or isinstance(new, str))
                ):
                    raise InvalidArgumentError(
                        f"rename must map names to names or to None, not {brief(old)} to "
                        f"{brief(new)}"
                    )
                self._prefixes[old.rstrip(".")] = None if new is None else new.rstrip(".")
        elif rename is not None:
            raise InvalidArgumentError(
                "rename must be a dict of names or a function of one, not a "
                f"{type(rename).__name__}"
            )
        self._known: dict[str, str | None] = {}
        self.renames = self._prefixes != {}
        self.rules = list(self._prefixes or ())

    def __call__(self, fqn: str) -> str | None:
        """The new name of a leaf; None to leave it out."""
        if not self.renames:
            return fqn
        if fqn not in self._known:
            name = cast("object", self._rename(fqn))
            if name is not None and (not isinstance(name, str) or not name):
                raise InvalidArgumentError(
                    f"rename made {brief(name)} of {fqn}: that is neither a name nor None"
                )
            self._known[fqn] = name
        return self._known[fqn]

    def origins(self, name: str) -> Sequence[str] | None:
        """The old names that become ``name``; None for a function, which cannot be inverted."""
        if self._prefixes is None:
            return None
        origins: list[str] = []
        for old, new in self._prefixes.items():
            if new == "":
                origins.append(f"{old}.{name}")
            elif new is not None and (name == new or name.startswith(new + ".")):
                origins.append(old + name[len(new) :])
        return [origin for origin in origins if self._by_prefix(origin) == name] or [name]

    def _by_prefix(self, fqn: str) -> str | None:
        assert self._prefixes is not None
        end = len(fqn)
        while end > 0:
            if fqn[:end] in self._prefixes:
                new = self._prefixes[fqn[:end]]
                return None if new is None else new + fqn[end:] if new else fqn[end + 1 :]
            end = fqn.rfind(".", 0, end)
        return fqn


class Renamed:
    """The places of a checkpoint's renamed leaves in a live state, or in a fresh nest.

    Attributes:
        containers: The new containers that keep their kind, by path.
        partial: New names of leaves that not all ranks saved, and of their containers that keep
            their keys.
    """

    def __init__(self, saved: FlatMap, partial: Collection[str], live: LiveMap | None) -> None:
        """``partial`` are the old names of values that only some ranks saved."""
        self._saved = saved
        self._old_partial = partial
        self._live = live
        self._metadata: dict[Path, dict[str, Any]] = {}
        self.containers: dict[Path, Any] = {}
        self.partial: set[str] = set()

    def where(self, old: Path, name: str) -> Path:
        """The place of a leaf under its new ``name``."""
        return old if name == fqn_of(old) else self._moved(old, name)

    def place(self, old: Path, name: str) -> Path:
        """The place of a leaf under its new ``name``; notes the kinds of the containers there."""
        new = self.where(old, name)
        head = _alike(old, new)
        tail = (
            len(old)
            if head == len(old) == len(new)
            else min(_alike(old[::-1], new[::-1]), len(old) - head)
        )
        for end in range(1, min(head, len(old))):
            self.containers[new[:end]] = self._saved.containers[old[:end]]
        for end in range(1, min(tail + 1, len(old), len(new))):
            self.containers[new[:-end]] = self._saved.containers[old[:-end]]
        for node in prefixes(new[:-1]):
            around = self._live.containers.get(node) if self._live else None
            if type(around) in SEQUENCES:
                self.containers.setdefault(node, around)
        if len(old) > 1 and len(new) > 1:
            self._keep_metadata(old, new)
        above = next(
            (end for end in range(1, len(old) + 1) if fqn_of(old[:end]) in self._old_partial), None
        )
        if self._old_partial and above is not None:
            keeps = range(min(tail + 1, len(old) - above + 1, len(new)))
            self.partial.update(fqn_of(new[: len(new) - end]) for end in (0, *keeps))
        return new

    def finished(self) -> dict[Path, Any]:
        """The containers; those of modules with the known versions of their submodules."""
        for path, metadata in self._metadata.items():
            known = getattr(self.containers.get(path), "_metadata", {})
            self.containers[path] = with_metadata({}, {**known, **metadata})
        return self.containers

    def _moved(self, old: Path, name: str) -> Path:
        """The live path as far as it goes, at most one new key, and old keys ending ``name``."""
        guided = self._live.guide(name) if self._live else ()
        known = fqn_of(guided)
        if known == name:
            return guided
        rest = name[len(known) + 1 :] if guided else name
        # one key for each name
        if self._live and isinstance(self._live.containers.get(guided), nn.Module):
            end = rest.find(_EXTRA)
            if end < 0:
                return (*guided, rest)
            end += len(_EXTRA) - 1
            guided, rest = (*guided, rest[:end]), rest[end + 1 :]
        kept = 0
        while not guided and kept < len(old) - 1 and rest.startswith(f"{old[kept]}."):
            rest = rest[len(str(old[kept])) + 1 :]
            kept += 1
        head = guided or old[:kept]
        tail: Path = ()
        for end in range(len(old), kept, -1):
            key, around = old[end - 1], self._saved.containers.get(old[: end - 1])
            if rest == str(key) and type(around) not in SEQUENCES:
                return (*head, key, *tail)
            if not rest.endswith(f".{key}"):
                break
            tail, rest = (key, *tail), rest[: -len(str(key)) - 1]
        item, dot, inner = rest.partition(".")
        return (*head, rest, *tail) if head or not dot else (item, inner, *tail)

    def _keep_metadata(self, old: Path, new: Path) -> None:
        """Take over the versions of the submodules that held a leaf to those that will hold it."""
        known = getattr(self._saved.containers.get(old[:-1]), "_metadata", None)
        before, key = old[-1], new[-1]
        while known and isinstance(key, str) and key and before:
            key, _, last = key.rpartition(".")
            before, _, last_before = before.rpartition(".")
            if last != last_before:
                return
            if before in known:
                self._metadata.setdefault(new[:-1], {}).setdefault(key, known[before])


def without_wrappers(
    places: Iterable[Path], live: LiveMap
) -> tuple[dict[Path, Path], dict[Path, Path]]:
    """The places of leaves that were saved under the names of wrappers.

    State of wrappers that the target has goes to the objects they wrap. In other names, the parts
    that wrappers add are dropped if the target has no such name, and no other name, on either side,
    differs by such parts only.

    Returns the places known by the types of wrappers, and those known by their names only.
    """
    moved: dict[Path, Path] = {}
    by_name: dict[Path, Path] = {}
    places = list(places)
    for path, wrapped in live.wrapped.items():
        below = [place for place in places if len(place) > len(path) and place[: len(path)] == path]
        saved, own, free = (
            {place[len(path)] for place in below},
            wrapped.names.keys(),
            {*wrapped.names.values()},
        )
        if saved & (own - free) and not saved & (free - own):
            names = wrapped.names
            moved |= {
                at: (*path, names[at[len(path)]], *at[len(path) + 1 :])
                for at in below
                if at[len(path)] in names
            }
    left = [place for place in places if place not in moved]
    odd = [
        place
        for place in left
        if place not in live.slots and not PARTS.isdisjoint(fqn_of(place).split("."))
    ]
    if all(live.slot(place) is not None or place in live.containers for place in odd):
        return moved, by_name
    alike: dict[Any, tuple[dict[Path, list[Path]], list[Path]]] = {}
    for place in left:
        alike.setdefault(_bare(place), ({}, []))[0].setdefault(_tensor_of(place), []).append(place)
    for path, slot in live.slots.items():
        if slot.kind in (Kind.TENSOR, Kind.EXTRA):
            alike.setdefault(_bare(path), ({}, []))[1].append(path)
    for heads, targets in alike.values():
        if len(heads) == len(targets) == 1:
            (head, leaves), target = *heads.items(), targets[0]
            parts = iter(fqn_of(head).split("."))
            if head != target and all(part in parts for part in fqn_of(target).split(".")):
                by_name |= {leaf: (*target, *leaf[len(head) :]) for leaf in leaves}
    return moved, by_name


def _tensor_of(place: Path) -> Path:
    """The place of a tensor, or of the extra state that a leaf is in."""
    ends = (end for end, key in enumerate(place, 1) if str(key).endswith("_extra_state"))
    return place[: next(ends, len(place))]


def _bare(place: Path) -> tuple[Any, ...]:
    """The common part of the names of a tensor that differ by parts of wrappers only."""
    inner = fqn_of(_tensor_of(place)[1:]).split(".")
    return (place[0], *(part for part in inner if part not in PARTS))


def _alike(one: Path, other: Path) -> int:
    """The number of leading keys that two paths share."""
    count = 0
    for key, other_key in zip(one, other, strict=False):
        if type(key) is not type(other_key) or key != other_key:
            break
        count += 1
    return count


def refuse_two_in_one_place(names: Mapping[Path, str], places: Mapping[Path, Path]) -> None:
    """Raise ``InvalidArgumentError`` if two leaves get one name, or one lands inside another."""
    taken: dict[Path, Path] = {}
    for old, new in places.items():
        if taken.setdefault(new, old) != old:
            raise InvalidArgumentError(
                f"rename puts both {fqn_of(taken[new])} and {fqn_of(old)} in one place, "
                f"{names[old]}"
            )
    for old, new in places.items():
        for node in prefixes(new[:-1]):
            if node in taken:
                raise InvalidArgumentError(
                    f"rename puts both {fqn_of(taken[node])} and {fqn_of(old)} in one place, "
                    f"{names[taken[node]]}"
                )


class LoadFilter:
    """The checked choice of what to load from a checkpoint.

    Attributes:
        selected: Whether a name in the checkpoint is chosen.
        renaming: The new names.
        cast_to: The dtype for floating-point parameters and buffers.
        patterns: The patterns and old names, each of which should match something in the
            checkpoint.
        is_partial: Whether there are patterns, so that the target may have more than the
            checkpoint.
        freed: Names in the checkpoint by those of the target, for leaves saved under the names of
            wrappers.
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
            raise InvalidArgumentError(
                f"dtype casts floating-point tensors, so it cannot be {dtype}"
            )
        self.cast_to = dtype
        self.selected: Callable[[str], bool] = selector(include, exclude)
        self.renaming = Renaming(rename)
        self.is_partial = include is not None or exclude is not None
        self.freed: dict[str, str] = {}
        self._strict = strict
        self.patterns = [
            *(filters.patterns(include, exclude) if self.is_partial else ()),
            *(Pattern("rename", text) for text in self.renaming.rules),
        ]

    def leaves_out(self, name: str) -> bool:
        """Whether patterns leave out what the target calls ``name``."""
        if not self.is_partial:
            return False
        origins = [self.freed[name]] if name in self.freed else self.renaming.origins(name)
        return origins is not None and not any(map(self.selected, origins))

    def refuse_unmatched(self, reader: Reader, fqns: Collection[str], live: LiveMap | None) -> None:
        """Raise for patterns that match nothing, probably misspelt; without ``strict``, log them.

        Old names of a rename are only logged with a live target: there the new names are missing,
        unless the checkpoint already has them, as later ones of the same run do.
        """
        unmatched = filters.unmatched(self.patterns, fqns)
        if live is not None and any(pattern.kind == "exclude" for pattern in unmatched):
            # It may exclude names that only the target has.
            new = map(fqn_of, live.everything())
            known = {origin for name in new for origin in self.renaming.origins(name) or (name,)}
            unknown = filters.unmatched(unmatched, known)
            unmatched = [
                pattern for pattern in unmatched if pattern.kind != "exclude" or pattern in unknown
            ]
        elsewhere = _names_of_others(reader)
        while unmatched and (names := next(elsewhere, None)) is not None:
            unmatched = filters.unmatched(unmatched, names)
        if not unmatched:
            return
        hints = filters.Hints(fqns, reader.treespec.keys())
        wrong = [
            each
            for each in unmatched
            if self._strict and not (each.kind == "rename" and live is not None)
        ]
        lines = few(wrong or unmatched, hints.line, "match nothing")
        if wrong:
            raise StateMismatchError(
                f"{reader.path} does not fit, and nothing was loaded:\n  " + "\n  ".join(lines)
            )
        logger.warning("loading %s: %s", reader.path, "; ".join(lines))


def _names_of_others(reader: Reader) -> Iterator[list[str]]:
    """The names that other ranks saved, with their per-rank state, which this rank does not see."""
    if not isinstance(reader, CheckpointReader):
        return
    for rank in range(min(reader.manifest.world_size, _ASKED)):
        if rank != reader.rank:
            # treespecs that are not needed may be damaged
            with contextlib.suppress(IntegrityError, WriteError):
                yield names_in(reader.read_treespec(rank))


def names_in(treespec: TreeSpec) -> list[str]:
    """The names of all leaves of a treespec."""
    return [*treespec.leaves(unpickle=Pickled).names().values()]
