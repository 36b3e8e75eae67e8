"""Renaming: what a checkpoint calls one thing and its target another, put into the nest that the target expects.

Names are FQNs, in which a dot may stand within a key (a module's state is one dict of dotted keys) or between two. So
a new name alone does not say where a value goes: the target does, as far as it is known; behind that a value keeps the
keys that its name still ends with, and what is new in front of them is one key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, cast

from torch import nn

from sidesave.client.loading.flat import SEQUENCES, FlatMap, LiveMap, Path, fqn_of, prefixes
from sidesave.errors import InvalidArgumentError, brief
from sidesave.stager.state.treespec import with_metadata

Rename = Mapping[str, "str | None"] | Callable[[str], "str | None"]
"""Names in the checkpoint to those of the target, None to leave out: of leaves a function, of whole subtrees a dict."""

_EXTRA: Final = "_extra_state."


class Renaming:
    """New names of leaves. A dict takes each name's longest prefix that it has; what it has none of stays as it is."""

    def __init__(self, rename: Rename | None) -> None:
        """Check ``rename``; ``InvalidArgumentError`` when it is neither a dict of names nor a function."""
        self._prefixes: dict[str, str | None] | None = {}
        self._rename: Callable[[str], str | None] = self._by_prefix
        if callable(rename):
            self._prefixes, self._rename = None, rename
        elif isinstance(cast("object", rename), Mapping):
            for old, new in cast("Mapping[Any, Any]", rename).items():
                if not isinstance(old, str) or not old.strip(".") or not (new is None or isinstance(new, str)):
                    told = f"not {brief(old)} to {brief(new)}"
                    raise InvalidArgumentError(f"rename must map names to names or to None, {told}")
                self._prefixes[old.rstrip(".")] = None if new is None else new.rstrip(".")
        elif rename is not None:
            raise InvalidArgumentError(
                f"rename must be a dict of names or a function of one, not a {type(rename).__name__}"
            )
        self._known: dict[str, str | None] = {}

    def __bool__(self) -> bool:
        """Whether anything may be renamed."""
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
        """What names in the checkpoint begin with that get others; none of a function."""
        return list(self._prefixes or ())

    def origins(self, name: str) -> Sequence[str] | None:
        """What is called ``name`` when it has been renamed; None when that cannot be told, for a function."""
        if self._prefixes is None:
            return None
        found: list[str] = []
        for old, new in self._prefixes.items():
            if new == "":
                found.append(f"{old}.{name}")
            elif new is not None and (name == new or name.startswith(new + ".")):
                found.append(old + name[len(new) :])
        return [origin for origin in found if self._by_prefix(origin) == name] or [name]

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
    """Where the leaves of a checkpoint go in a live state, or in a fresh nest.

    Attributes:
        containers: Of the new places, those that keep their kind.
        partial: New names of what not all ranks have saved: leaves, and containers of them that keep their keys.
    """

    def __init__(self, saved: FlatMap, partial: Collection[str], live: LiveMap | None) -> None:
        """Of the leaves of ``saved``, of which the old names in ``partial`` are."""
        self._saved = saved
        self._old_partial = partial
        self._live = live
        self._metadata: dict[Path, dict[str, Any]] = {}
        self.containers: dict[Path, Any] = {}
        self.partial: set[str] = set()

    def where(self, old: Path, name: str) -> Path:
        """The place of a leaf that would be called ``name``."""
        return old if name == fqn_of(old) else self._moved(old, name)

    def place(self, old: Path, name: str) -> Path:
        """The place of a leaf that is called ``name`` from now on; with it go the kinds of what it is in."""
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
        """The containers, each module's with what is known of the versions of its submodules."""
        for path, metadata in self._metadata.items():
            known = getattr(self.containers.get(path), "_metadata", {})
            self.containers[path] = with_metadata({}, {**known, **metadata})
        return self.containers

    def _moved(self, old: Path, name: str) -> Path:
        """What the live state knows of the way; behind that the keys that the name still ends with, and one between."""
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
        """What a module's state says of the submodules that a leaf was in holds for those that it is in."""
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
    """With how many keys that are the same two paths begin."""
    count = 0
    for key, there in zip(one, other, strict=False):
        if type(key) is not type(there) or key != there:
            break
        count += 1
    return count


def refuse_two_in_one_place(names: Mapping[Path, str], places: Mapping[Path, Path]) -> None:
    """Raise ``InvalidArgumentError`` where two leaves would have one name, or one would be within another."""
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
