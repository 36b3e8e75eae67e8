"""Renaming: what a checkpoint calls one thing and its target another, put into the nest that the target expects.

Names are FQNs, in which a dot may stand within a key (a module's state is one dict of dotted keys) or between two. So
a new name alone does not say where a value goes: the target does, as far as it is known; behind that a value keeps the
keys that its name still ends with, and what is new in front of them is one key.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

from torch import nn

from sidesave.client.loading.plan import DICTS, SEQUENCES, unwrap
from sidesave.errors import InvalidArgumentError, brief
from sidesave.stager.state.tree import Stateful
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


def leaves(nest: Mapping[str, Any]) -> list[Any]:
    """The leaves of a nest as a skeleton builds it, in its order; containers without anything in them are leaves."""
    found: list[Any] = []

    def visit(items: Iterable[Any]) -> None:
        for item in items:
            if type(item) in DICTS and item:
                visit(cast("dict[Any, Any]", item).values())
            elif type(item) in SEQUENCES and item:
                visit(cast("Sequence[Any]", item))
            else:
                found.append(item)

    visit(nest.values())
    return found


class _Node:
    """A container in the making: of the kind of ``like``, a plain dict where that is None."""

    __slots__ = ("items", "like", "metadata")

    def __init__(self, like: Any) -> None:
        self.like = like
        self.items: dict[Any, Any] = {}
        self.metadata: dict[str, dict[str, Any]] = {}

    def take_metadata(self, key: Any, holder: Any, old: Any) -> None:
        """What a module's state said of the submodules that ``old`` was in holds for those that ``key`` is in."""
        known: dict[str, dict[str, Any]] = getattr(holder, "_metadata", {})
        while known and isinstance(key, str) and key and old:
            key, _, last = key.rpartition(".")
            old, _, before = old.rpartition(".")
            if last != before:
                break
            if old in known:
                self.metadata.setdefault(key, known[old])

    def finished(self) -> Any:
        kind = cast("type[Any]", type(self.like))
        make = cast("Callable[[Any], Any]", kind)
        items = {key: item.finished() if isinstance(item, _Node) else item for key, item in self.items.items()}
        if kind in SEQUENCES:
            ordered = [items[index] for index in sorted(items)]
            return collections.deque(ordered, self.like.maxlen) if kind is collections.deque else make(ordered)
        if kind is collections.defaultdict:
            return collections.defaultdict(self.like.default_factory, items)
        found = make(items) if kind in DICTS else items
        return with_metadata(found, self.metadata) if self.metadata else found


_Steps = list[tuple[Any, Any]]
"""A way down: of each step the container that it is taken in, None for a new one, and the key."""


class Rearrangement:
    """A nest whose leaves have new names, put together again.

    Attributes:
        partial: New names of what is partial in the old nest: leaves, and containers of them that keep their keys.
    """

    def __init__(
        self, renaming: Callable[[str], str | None], into: Mapping[str, Any] | None, partial: set[str]
    ) -> None:
        """Rename to the names of ``into``, where there is one; ``partial`` are old names."""
        self._renaming = renaming
        self._into = into
        self._old_partial = partial
        self.partial: set[str] = set()
        self._root = _Node(None)
        self._taken: dict[tuple[Any, ...], str] = {}
        self._keys: dict[int, dict[str, Any]] = {}
        self._states: dict[int, Any] = {}

    def build(
        self, nest: Mapping[str, Any], fqns: Sequence[str], others: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The new nest, of the leaves of the old one, which have these names; ``others`` take the place of some.

        Raises ``InvalidArgumentError`` when two of them would have one name, or one would be within another.
        """
        for fqn, (steps, value) in zip(fqns, _walk(nest, []) if nest else (), strict=True):
            name = self._renaming(fqn)
            assert name is not None, "what is left out is not in the nest"
            steps = _with_indices(steps, fqn)
            new = steps if name == fqn else self._moved(name, steps)
            if self._old_partial:
                self._mark(fqn, name, steps)
            self._put(new, others.get(fqn, value) if others else value, fqn, name, steps[-1])
        return cast("dict[str, Any]", self._root.finished())

    def _put(self, steps: _Steps, value: Any, fqn: str, name: str, origin: tuple[Any, Any]) -> None:
        node, path = self._root, ()
        for at, (_, key) in enumerate(steps):
            path = (*path, key)
            last = at == len(steps) - 1
            if last and key not in node.items:
                node.items[key] = value
                node.take_metadata(key, *origin)
                self._taken[path] = fqn
                return
            if not last:
                below = node.items.setdefault(key, _Node(steps[at + 1][0]))
                if isinstance(below, _Node):
                    node = below
                    continue
            other = self._taken.get(path) or next(
                taken for place, taken in self._taken.items() if place[: len(path)] == path
            )
            raise InvalidArgumentError(f"rename puts both {other} and {fqn} in one place, {name}")

    def _moved(self, name: str, steps: _Steps) -> _Steps:
        """Where a leaf goes that is called ``name`` from now on, and was at ``steps`` before."""
        guided, begin, target = self._guided(name)
        if begin > len(name):
            return guided
        if isinstance(target, nn.Module):  # its state has one key for each name
            extra = name.find(_EXTRA, begin)
            if extra < 0:
                return [*guided, (None, name[begin:])]
            end = extra + len(_EXTRA) - 1
            return [*guided, (None, name[begin:end]), *_aligned(name, end + 1, steps)]
        new = _aligned(name, begin, steps)
        if not guided and new[0][0] is None and "." in new[0][1]:  # the item, and the rest
            item, _, rest = new[0][1].partition(".")
            new[:1] = [(None, item), (None, rest)]
        return [*guided, *new]

    def _guided(self, name: str) -> tuple[_Steps, int, Any]:
        """How far the target tells the way to ``name``; where what is left of it begins, and the target there."""
        steps: _Steps = []
        target: Any = self._into
        begin = 0
        while begin <= len(name):
            target = unwrap(target)
            if isinstance(target, Stateful) and not isinstance(target, (type, dict, nn.Module)):
                if id(target) not in self._states:
                    self._states[id(target)] = target.state_dict()
                target = self._states[id(target)]
            step = self._step(target, name, begin)
            if step is None:
                break
            key, begin = step
            steps.append((target if type(target) in SEQUENCES else None, key))
            target = cast("Any", target)[key]
        return steps, begin, target

    def _step(self, target: Any, name: str, begin: int) -> tuple[Any, int] | None:
        """A key of the target that ``name`` has at ``begin``, the longest, and where what comes behind it begins."""
        if type(target) in SEQUENCES:
            index = name[begin:].partition(".")[0]
            known = index.isdecimal() and int(index) < len(cast("list[Any]", target))
            return (int(index), begin + len(index) + 1) if known else None
        if not isinstance(target, Mapping):
            return None
        place = id(cast("object", target))
        if place not in self._keys:
            self._keys[place] = {str(key): key for key in cast("Mapping[Any, Any]", target)}
        keys = self._keys[place]
        end = len(name)
        while end > begin:
            if name[begin:end] in keys:
                return keys[name[begin:end]], end + 1
            end = name.rfind(".", begin, end)
        return None

    def _mark(self, fqn: str, name: str, steps: _Steps) -> None:
        """Take over what is known to be partial of a leaf, and of the containers above it that keep their keys."""
        whole = {fqn[:end] for end in (*(at for at, letter in enumerate(fqn) if letter == "."), len(fqn))}
        heads = whole & self._old_partial
        if not heads:
            return
        above = len(min(heads, key=len))
        self.partial.add(name)
        for _, key in reversed(steps):
            text = f".{key}"
            if not (fqn.endswith(text) and name.endswith(text)):
                break
            fqn, name = fqn[: -len(text)], name[: -len(text)]
            if len(fqn) < above:
                break
            self.partial.add(name)


def _walk(value: Any, steps: _Steps) -> Iterator[tuple[_Steps, Any]]:
    """Every leaf, and the way to it."""
    if type(value) in DICTS and value:
        for key, item in cast("dict[Any, Any]", value).items():
            yield from _walk(item, [*steps, (value, key)])
    elif type(value) in SEQUENCES and value:
        for index, item in enumerate(cast("Sequence[Any]", value)):
            yield from _walk(item, [*steps, (value, index)])
    else:
        yield steps, value


def _with_indices(steps: _Steps, fqn: str) -> _Steps:
    """The way to a leaf with the indices of sequences as the name has them: items before may have been left out."""
    found: _Steps = []
    at = 0
    for holder, key in steps:
        if type(holder) in SEQUENCES:
            key = int(fqn[at:].partition(".")[0])
        found.append((holder, key))
        at += len(str(key)) + 1
    return found


def _aligned(name: str, begin: int, steps: _Steps) -> _Steps:
    """``name`` from ``begin`` on, in keys: at both ends those that the leaf had before, and one key between them."""
    kept, at, first = 0, 0, 0
    while kept < len(steps) - 1 and name.startswith(f"{steps[kept][1]}.", at):
        at += len(str(steps[kept][1])) + 1
        kept += 1
        if at == begin:
            first = kept
    if begin and not first:
        kept, at = 0, begin
    head, tail = steps[first:kept] if at > begin else [], list[tuple[Any, Any]]()
    rest = name[at:]
    for holder, key in reversed(steps[kept:]):
        if rest == str(key) and type(holder) not in SEQUENCES:
            return [*head, (holder, key), *tail]
        if not rest.endswith(f".{key}"):
            break
        tail.insert(0, (holder, key))
        rest = rest[: -len(str(key)) - 1]
    return [*head, (None, rest), *tail]
