"""Renaming: finds the place in the target of a leaf that the checkpoint calls by another name.

Names are FQNs, in which a dot may stand within a key (a module's state is one dict of dotted keys) or between two keys.
So a new name alone does not say where a value goes. The target says so as far as it knows the name. After that a value
keeps the old keys that its name still ends with, and the new part in front of them is one key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, cast

from torch import nn

from sidesave.client.loading.flat import SEQUENCES, FlatMap, LiveMap, Path, fqn_of, prefixes
from sidesave.errors import InvalidArgumentError, brief
from sidesave.stager.state.treespec import with_metadata
from sidesave.stager.wrappers import plain_names, without_parts

Rename = Mapping[str, "str | None"] | Callable[[str], "str | None"]
"""From names in the checkpoint to those in the target, None to leave out: a dict of prefixes, or a function."""

_EXTRA: Final = "_extra_state."


class Renaming:
    """New names of leaves. A dict replaces the longest prefix that it has; other names stay."""

    def __init__(self, rename: Rename | None) -> None:
        """Check ``rename``; ``InvalidArgumentError`` if it is neither a dict of names nor a function."""
        self._prefixes: dict[str, str | None] | None = {}
        self._rename: Callable[[str], str | None] = self._by_prefix
        if callable(rename):
            self._prefixes, self._rename = None, rename
        elif isinstance(cast("object", rename), Mapping):
            for old, new in cast("Mapping[Any, Any]", rename).items():
                if not isinstance(old, str) or not old.strip(".") or not (new is None or isinstance(new, str)):
                    raise InvalidArgumentError(
                        f"rename must map names to names or to None, not {brief(old)} to {brief(new)}"
                    )
                self._prefixes[old.rstrip(".")] = None if new is None else new.rstrip(".")
        elif rename is not None:
            raise InvalidArgumentError(
                f"rename must be a dict of names or a function of one, not a {type(rename).__name__}"
            )
        self._known: dict[str, str | None] = {}

    def __bool__(self) -> bool:
        return self._prefixes != {}

    def __call__(self, fqn: str) -> str | None:
        """The new name of a leaf; None to leave it out."""
        if not self:
            return fqn
        if fqn not in self._known:
            name = cast("object", self._rename(fqn))
            if name is not None and (not isinstance(name, str) or not name):
                raise InvalidArgumentError(f"rename made {brief(name)} of {fqn}: that is neither a name nor None")
            self._known[fqn] = name
        return self._known[fqn]

    def rules(self) -> list[str]:
        """The prefixes that are renamed; none for a function."""
        return list(self._prefixes or ())

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
    """Where the renamed leaves of a checkpoint go in a live state, or in a fresh nest.

    Attributes:
        containers: The new containers that keep their kind, by path.
        partial: New names of leaves that not all ranks saved, and of their containers that keep their keys.
    """

    def __init__(self, saved: FlatMap, partial: Collection[str], live: LiveMap | None) -> None:
        """``partial`` are the old names of what not all ranks saved."""
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
        tail = len(old) if head == len(old) == len(new) else min(_alike(old[::-1], new[::-1]), len(old) - head)
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
        above = next((end for end in range(1, len(old) + 1) if fqn_of(old[:end]) in self._old_partial), None)
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
        """The path in the live state as far as it goes, at most one new key, and the old keys that end ``name``."""
        guided = self._live.guide(name) if self._live else ()
        known = fqn_of(guided)
        if known == name:
            return guided
        rest = name[len(known) + 1 :] if guided else name
        if self._live and isinstance(self._live.containers.get(guided), nn.Module):  # one key for each name
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
                f"rename puts both {fqn_of(taken[new])} and {fqn_of(old)} in one place, {names[old]}"
            )
    for old, new in places.items():
        for node in prefixes(new[:-1]):
            if node in taken:
                raise InvalidArgumentError(
                    f"rename puts both {fqn_of(taken[node])} and {fqn_of(old)} in one place, {names[taken[node]]}"
                )


# What wraps a module -----------------------------------------------------------------------------------------------


def moves(places: Collection[Path], live: LiveMap, *, foreign: bool) -> dict[Path, Path]:
    """Names at ``places`` that only wrappers make other ones than a module has; with those that it has.

    Earlier versions saved the names of wrappers: those that the module itself has are known. In ``foreign`` files, of
    which no module is known, the parts that wrappers add are. A name that the module has stays, and so does one where
    two would fall together.
    """
    taken = {*places}
    origins: dict[Path, list[Path]] = {}
    for place in dict.fromkeys(places):
        module = next((node for node in prefixes(place[:-1]) if node in live.plain), None)
        if module is None or place in live.slots:
            continue
        end = len(module)
        if not isinstance(place[end], str) or place[: end + 1] in live.slots:
            continue
        without = without_parts(place[end]) if foreign else place[end]
        name = (*module, live.plain[module].get(place[end], without))
        if name in live.slots and name not in taken:
            known = origins.setdefault(name, [])
            known += [place[: end + 1]] if place[: end + 1] not in known else []
    return {keys[0]: name for name, keys in origins.items() if len(keys) == 1}


def move(path: Path, moved: Mapping[Path, Path]) -> Path:
    """Where ``path`` is when what :func:`moves` has found has moved."""
    node = next((node for node in prefixes(path) if node in moved), None)
    return path if node is None else (*moved[node], *path[len(node) :])


def as_named_by(module: nn.Module, state: dict[Any, Any], plain: Mapping[Any, Any]) -> Any:
    """The state of a module by the names that it has itself, those of its wrappers included."""
    own = {name: key for key, name in plain.items()}
    named = {own.get(name, name): value for name, value in state.items()}
    metadata: dict[str, Any] | None = getattr(state, "_metadata", None)
    if metadata is None:
        return named
    paths = [path for path, _ in cast("Any", module).named_modules(remove_duplicate=False)]
    if not all(path in metadata for path in paths):  # else it was saved with the names of wrappers
        without: dict[str, str] = plain_names(module, paths)
        plain_path = {path: without.get(path, path) for path in paths}
        metadata = {**metadata, **{path: metadata[old] for path, old in plain_path.items() if old in metadata}}
    return with_metadata(named, metadata)
