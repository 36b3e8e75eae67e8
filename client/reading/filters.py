"""Patterns of FQNs: the names they select, and misspelt patterns, which match nothing."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from sidesave.client.messages import Names
from sidesave.errors import InvalidArgumentError, brief

_SHOWN: Final = 10
_NUMBER: Final = re.compile(r"\.\d+(?=\.|$)")


def selector(
    include: str | Sequence[str] | None, exclude: str | Sequence[str] | None
) -> Callable[[str], bool]:
    """Return a function that says whether an FQN is selected.

    An FQN is selected if it matches a pattern in ``include`` (None: any) and none in ``exclude``.
    Names below a matching name match, too.
    """
    wanted, unwanted = listed(include, "include"), listed(exclude, "exclude") or []

    def selected(fqn: str) -> bool:
        return (wanted is None or _any(fqn, wanted)) and not _any(fqn, unwanted)

    return selected


def listed(patterns: str | Sequence[str] | None, what: str) -> list[str] | None:
    """Patterns as a list; ``InvalidArgumentError`` for anything else."""
    if patterns is None:
        return None
    given = cast("object", patterns)
    items = (
        [given]
        if isinstance(given, str)
        else list(cast("list[object]", given))
        if _is_iterable(given)
        else [given]
    )
    for item in items:
        if not isinstance(item, str):
            raise InvalidArgumentError(f"{what} takes patterns of names, not {brief(item)}")
    return cast("list[str]", items)


def subtrees(fqns: Iterable[str]) -> set[str]:
    """The names and all their parents."""
    nodes: set[str] = set()
    for fqn in fqns:
        end = len(fqn)
        while end > 0 and fqn[:end] not in nodes:
            nodes.add(fqn[:end])
            end = fqn.rfind(".", 0, end)
    return nodes


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern, or an old name in a ``rename`` dict."""

    kind: Literal["include", "exclude", "rename"]
    text: str


def unmatched(patterns: Sequence[Pattern], fqns: Iterable[str]) -> list[Pattern]:
    """The patterns that match none of these names."""
    if not patterns:
        return []
    known = subtrees(fqns)
    rest = [pattern for pattern in patterns if pattern.text not in known]
    return [
        pattern
        for pattern in rest
        if pattern.kind == "rename"
        or not any(fnmatch.fnmatchcase(fqn, pattern.text) for fqn in known)
    ]


def patterns(
    include: str | Sequence[str] | None, exclude: str | Sequence[str] | None
) -> list[Pattern]:
    """The patterns of a choice; ``InvalidArgumentError`` for anything else."""
    return [
        *(Pattern("include", text) for text in listed(include, "include") or ()),
        *(Pattern("exclude", text) for text in listed(exclude, "exclude") or ()),
    ]


class Hints:
    """Suggestions for patterns that match nothing."""

    def __init__(self, fqns: Iterable[str], items: Sequence[str]) -> None:
        """Suggest from ``fqns``, their parents, and the ``items`` at the top."""
        known = subtrees(fqns)
        self._items = ", ".join(
            [*map(repr, items[:_SHOWN]), *(["..."] if len(items) > _SHOWN else [])]
        )
        self._names = Names(known)
        self._patterns = Names(_NUMBER.sub(".*", fqn) for fqn in known)

    def line(self, pattern: Pattern) -> str:
        """The problem with a pattern, and similar names."""
        names = self._patterns if "*" in pattern.text else self._names
        hint = names.hint(pattern.text) or f"; it has {self._items}"
        return f"{pattern.kind}: nothing in the checkpoint is called {pattern.text!r}{hint}"


def _is_iterable(value: object) -> bool:
    return hasattr(value, "__iter__")


def _any(fqn: str, patterns: Iterable[str]) -> bool:
    return any(_matches(fqn, pattern) for pattern in patterns)


def _matches(fqn: str, pattern: str) -> bool:
    return (
        fnmatch.fnmatchcase(fqn, pattern)
        or fqn.startswith(pattern + ".")
        or fnmatch.fnmatchcase(fqn, pattern + ".*")
    )
