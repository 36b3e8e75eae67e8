"""Patterns of FQNs: which names they choose, and which of them speak of nothing, as those do that are misspelt."""

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


def selector(include: str | Sequence[str] | None, exclude: str | Sequence[str] | None) -> Callable[[str], bool]:
    """Whether an FQN matches one of the patterns in ``include``, None for any, and none of those in ``exclude``.

    What is below a name that matches, matches too.
    """
    wanted, unwanted = listed(include, "include"), listed(exclude, "exclude") or []

    def selected(fqn: str) -> bool:
        return (wanted is None or _any(fqn, wanted)) and not _any(fqn, unwanted)

    return selected


def listed(patterns: str | Sequence[str] | None, what: str) -> list[str] | None:
    """Patterns as a list; ``InvalidArgumentError`` for what is none."""
    if patterns is None:
        return None
    found = cast("object", patterns)
    items = [found] if isinstance(found, str) else list(cast("list[object]", found)) if _is_iterable(found) else [found]
    for item in items:
        if not isinstance(item, str):
            raise InvalidArgumentError(f"{what} takes patterns of names, not {brief(item)}")
    return cast("list[str]", items)


def subtrees(fqns: Iterable[str]) -> set[str]:
    """Names, and the names that they are below."""
    found: set[str] = set()
    for fqn in fqns:
        end = len(fqn)
        while end > 0 and fqn[:end] not in found:
            found.add(fqn[:end])
            end = fqn.rfind(".", 0, end)
    return found


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a caller says of names in a checkpoint: a pattern, or an old name in a dict of new ones."""

    kind: Literal["include", "exclude", "rename"]
    text: str


def unmatched(patterns: Sequence[Pattern], fqns: Iterable[str]) -> list[Pattern]:
    """Those that speak of none of these names."""
    if not patterns:
        return []
    known = subtrees(fqns)
    rest = [pattern for pattern in patterns if pattern.text not in known]
    return [
        pattern
        for pattern in rest
        if pattern.kind == "rename" or not any(fnmatch.fnmatchcase(fqn, pattern.text) for fqn in known)
    ]


class Hints:
    """What may have been meant by patterns that match nothing."""

    def __init__(self, fqns: Iterable[str], items: Sequence[str]) -> None:
        """Among the names ``fqns``, what they are below, and the ``items`` at their top."""
        known = subtrees(fqns)
        self._items = ", ".join([*map(repr, items[:_SHOWN]), *(["..."] if len(items) > _SHOWN else [])])
        self._names = Names(known)
        self._patterns = Names(_NUMBER.sub(".*", fqn) for fqn in known)

    def line(self, pattern: Pattern) -> str:
        """What is the matter with a pattern, and what is like it."""
        names = self._patterns if "*" in pattern.text else self._names
        hint = names.hint(pattern.text) or f"; it has {self._items}"
        return f"{pattern.kind}: nothing in the checkpoint is called {pattern.text!r}{hint}"


def _is_iterable(value: object) -> bool:
    return hasattr(value, "__iter__")


def _any(fqn: str, patterns: Iterable[str]) -> bool:
    return any(_matches(fqn, pattern) for pattern in patterns)


def _matches(fqn: str, pattern: str) -> bool:
    return (
        fnmatch.fnmatchcase(fqn, pattern) or fqn.startswith(pattern + ".") or fnmatch.fnmatchcase(fqn, pattern + ".*")
    )
