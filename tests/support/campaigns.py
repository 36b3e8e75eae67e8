"""How far campaigns go: through a third of their points in each run, other ones each time.

``SIDESAVE_CAMPAIGN=whole scripts/test --all`` goes through all of them; 0, 1 or 2, as is printed, through one third.
"""

import itertools
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

_CHOSEN = os.environ.get("SIDESAVE_CAMPAIGN", "")
WHOLE = _CHOSEN == "whole"
STRIDE = 1 if WHOLE else 3
_DRAWN = "SIDESAVE_TEST_THIRD"
quick = False
"""Whether this run leaves out what is slow."""


def _first_of_a_third() -> int:
    return 0 if WHOLE else int(_CHOSEN or random.SystemRandom().randrange(STRIDE))


def _first() -> int:
    first = _first_of_a_third()
    print(f"SIDESAVE_CAMPAIGN={_CHOSEN or first}")
    return first


def draw() -> None:
    """For this run and its workers: which third of each family of tests a quick run takes."""
    os.environ[_DRAWN] = str(_first_of_a_third())


def drawn() -> int:
    return int(os.environ[_DRAWN])


def third(name: str, family: Sequence[T]) -> list[T]:
    """A third of it, which no order of its members decides; the three thirds make the whole. Two or fewer stay."""
    if len(family) <= 2:
        return list(family)
    return random.Random(name).sample(family, len(family))[drawn() :: 3]


def some(points: Sequence[T]) -> list[T]:
    """Every third of them, from one of the first three on that is drawn by chance."""
    return list(points[_first() :: STRIDE])


def numbers() -> Iterator[int]:
    """The same of 0, 1, 2 and so on without an end."""
    return itertools.count(_first(), STRIDE)


def sample(points: Iterable[T]) -> Iterator[T]:
    """All of them; in a quick run every third, from one of the first three on that is drawn by chance."""
    return itertools.islice(points, _first(), None, STRIDE) if quick else iter(points)


def length(whole: int) -> int:
    """How many of so many tries, or seconds."""
    return max(1, whole // STRIDE)


def examples(whole: int) -> int:
    """How many examples of so many a property is tried on: in a quick run a quarter."""
    return whole // 4 if quick else whole
