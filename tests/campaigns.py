"""How far campaigns go: through a third of their points in each run, other ones each time.

``SIDESAVE_CAMPAIGN=whole scripts/test --all`` goes through all of them.
"""

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

WHOLE = os.environ.get("SIDESAVE_CAMPAIGN") == "whole"
STRIDE = 1 if WHOLE else 3


def some(points: Sequence[T]) -> list[T]:
    """Every third of them, from one of the first three on that is drawn by chance."""
    return list(points[random.SystemRandom().randrange(STRIDE) :: STRIDE])


def numbers() -> Iterator[int]:
    """The same of 0, 1, 2 and so on without an end."""
    return itertools.count(random.SystemRandom().randrange(STRIDE), STRIDE)


def length(whole: int) -> int:
    """How many of so many tries, or seconds."""
    return max(1, whole // STRIDE)
