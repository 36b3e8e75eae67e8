"""Parts of messages: similar names, lines for the first few of many, sizes and durations."""

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
"""Number of names examined before and after, in the order of names read forward and backward."""
_LIKE: Final = 0.75
"""Minimum similarity of two names."""
_NUMBER: Final = re.compile(r"\d+")
_MAX_LENGTH: Final = 400
"""Longest name compared; the time is proportional to the product of both lengths."""


class Names:
    """Names, ordered so that those that begin or end like another one are found at once."""

    def __init__(self, names: Iterable[str]) -> None:
        """Sort ``names``: a fraction of a second for a hundred thousand of them."""
        self._forward = sorted({name for name in names if len(name) <= _MAX_LENGTH})
        self._backward = sorted(name[::-1] for name in self._forward)

    def closest_matches(self, name: str, count: int = 3) -> list[str]:
        """Up to ``count`` names like ``name``, the most similar first; takes some milliseconds."""
        if len(name) > _MAX_LENGTH:
            return []
        candidates = {
            *_around(self._forward, name),
            *(other[::-1] for other in _around(self._backward, name[::-1])),
        }
        numbers = _NUMBER.findall(name)  # with others it is another layer, and no misspelling
        alike = [
            other for other in candidates if other != name and _NUMBER.findall(other) == numbers
        ]
        return difflib.get_close_matches(name, sorted(alike), n=count, cutoff=_LIKE)

    def hint(self, name: str) -> str:
        """The part of a message that lists names like ``name``: in parentheses, or empty."""
        near = self.closest_matches(name)
        return f" (near: {', '.join(near)})" if near else ""


def _around(ordered: list[str], name: str) -> list[str]:
    at = bisect_left(ordered, name)
    return ordered[max(at - _NEIGHBOURS, 0) : at + _NEIGHBOURS]


def few(names: Sequence[_T], line: Callable[[_T], str], what: str) -> list[str]:
    """Lines for the first ten items, and one with the number of those left out (``more``)."""
    more = len(names) - SHOWN
    return [*map(line, names[:SHOWN]), *([f"... and {more} more {what}"] if more > 0 else [])]


def format_bytes(nbytes: int) -> str:
    """``1.42 GB``."""
    power = min(5, (len(str(nbytes)) - 1) // 3)
    count = nbytes / 1000**power
    return (
        f"{count:.{max(0, 3 - len(str(int(count))))}f} {('kB', 'MB', 'GB', 'TB', 'PB')[power - 1]}"
        if power
        else f"{nbytes} B"
    )


def format_seconds(seconds: float) -> str:
    """``21 ms``, ``0.52 s``."""
    return f"{seconds * 1000:.3g} ms" if seconds < 0.1 else f"{seconds:.2f} s"
