"""Parts of messages: names similar to a missing one, and the first few of many."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

_T = TypeVar("_T")
SHOWN: Final = 10
"""Lines of each kind."""

_NEIGHBOURS: Final = 40
"""So many before and behind are looked at, in the order of the names read forward and in that of them read backward."""
_LIKE: Final = 0.75
"""So much of two names must be the same."""
_NUMBER: Final = re.compile(r"\d+")
_MAX_LENGTH: Final = 400
"""Comparing two names takes the product of their lengths."""


class Names:
    """Names, ordered so that those that begin or end like another one are found at once."""

    def __init__(self, names: Iterable[str]) -> None:
        """Sort ``names``: a fraction of a second for a hundred thousand of them."""
        self._forward = sorted({name for name in names if len(name) <= _MAX_LENGTH})
        self._backward = sorted(name[::-1] for name in self._forward)

    def closest_matches(self, name: str, count: int = 3) -> list[str]:
        """Up to ``count`` names that are like ``name``, the most similar first; some milliseconds."""
        if len(name) > _MAX_LENGTH:
            return []
        candidates = {*_around(self._forward, name), *(other[::-1] for other in _around(self._backward, name[::-1]))}
        numbers = _NUMBER.findall(name)  # with others it is another layer, and no misspelling
        alike = [other for other in candidates if other != name and _NUMBER.findall(other) == numbers]
        return difflib.get_close_matches(name, sorted(alike), n=count, cutoff=_LIKE)

    def hint(self, name: str) -> str:
        """The part of a message that lists names like ``name``: in parentheses, or empty."""
        near = self.closest_matches(name)
        return f" (near: {', '.join(near)})" if near else ""


def _around(ordered: list[str], name: str) -> list[str]:
    at = bisect_left(ordered, name)
    return ordered[max(at - _NEIGHBOURS, 0) : at + _NEIGHBOURS]


def few(names: Sequence[_T], line: Callable[[_T], str], what: str) -> list[str]:
    """A line of each of the first ten, and how many ``more`` there are."""
    more = len(names) - SHOWN
    return [*map(line, names[:SHOWN]), *([f"... and {more} more {what}"] if more > 0 else [])]
