"""How far campaigns go: each has a share of a time, and goes through its points in an order drawn
by chance.

A campaign is a slow test that takes the fixture ``share``. ``SIDESAVE_CAMPAIGN_MINUTES`` is how
long all campaigns of one ``scripts/test --all`` may take together; ``whole`` runs all their points.
``SIDESAVE_TEST_SEED=N``, as is printed, repeats what is drawn: values, the order of points, and of
a quick run the choice of tests.
"""

import itertools
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

_MINUTES = os.environ.get("SIDESAVE_CAMPAIGN_MINUTES") or "27"
_SEED = "SIDESAVE_TEST_SEED"
WHOLE = _MINUTES == "whole"
_STRIDE = 16
"""The distance between one point and the next if their number is not known, so that a short time
spans all.
"""
quick = False
"""Whether this run leaves out what is slow."""


def seed() -> int:
    """The seed of all that this run draws; its workers and other children have the same."""
    return int(os.environ.setdefault(_SEED, str(random.SystemRandom().randrange(10**6))))


def third(name: str, family: Sequence[T]) -> list[T]:
    """A third of it, which no order of its members decides; the three thirds make the whole. Two or
    fewer stay.
    """
    if len(family) <= 2:
        return list(family)
    return random.Random(name).sample(family, len(family))[seed() % 3 :: 3]


def sample(points: Iterable[T]) -> Iterator[T]:
    """All of them; in a quick run every third, from one of the first three on that is drawn by
    chance.
    """
    print(f"{_SEED}={seed()}")
    return itertools.islice(points, seed() % 3, None, 3) if quick else iter(points)


def length(whole: int) -> int:
    """A third of the given number of tries, where a campaign cannot end early; all of them in a
    whole run.
    """
    return whole if WHOLE else max(1, whole // 3)


def examples(whole: int) -> int:
    """How many examples of so many a property is tried on: in a quick run a quarter."""
    return whole // 4 if quick else whole


def seconds_of(minutes: Mapping[str, float], workers: int) -> dict[str, float]:
    """The seconds of each campaign: the minutes it asks for, or less if together they ask for more
    than there is.
    """
    wanted = sum(minutes.values())
    scale = 1.0 if WHOLE else min(1.0, float(_MINUTES) * workers / max(wanted, 1e-9))
    return {name: 60 * scale * each for name, each in minutes.items()}


class Share:
    """The time of one campaign, and the order of its points.

    A point that has begun is finished, and one is always run.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self.seconds = seconds
        self.chance = random.Random(f"{seed()} {name}")
        self._ran = self._count = 0
        self._past: list[int] = []

    def __str__(self) -> str:
        return f"{self._ran - len(self._past)} of {self._count or 'some'} points, {_SEED}={seed()}"

    def points(self, points: Iterable[T], *, part: float = 1.0) -> Iterator[T]:
        """The given points, until the time is over, or a ``part`` of it."""
        order = list(points)
        self._count += len(order)
        self.chance.shuffle(order)
        return self._in_time(order, part * self.seconds)

    def rounds(self, count: int, *, part: float = 1.0) -> Iterator[int]:
        """Numbers up to ``count``, in their order, until the time is over, or a ``part`` of it."""
        self._count += count
        return self._in_time(range(count), part * self.seconds)

    def numbers(self, *, patience: int = 1) -> Iterator[int]:
        """Numbers from 0 to an end that is not known yet: the caller passes each number behind it
        to ``is_past``.

        Args:
            patience: In a whole run, the number of those that are past the end before the campaign
                ends.
        """
        return self._in_time(self._numbers(patience if WHOLE else 1), self.seconds)

    def is_past(self, number: int) -> None:
        """Note that there is no point of this number."""
        self._past.append(number)
        self._count = min(self._past)

    def _numbers(self, patience: int) -> Iterator[int]:
        stride = 1 if WHOLE else _STRIDE
        for first in self.chance.sample(range(stride), stride):
            for number in itertools.count(first, stride):
                if len(self._past) >= patience and number >= sorted(self._past)[patience - 1]:
                    break
                yield number

    def _in_time(self, points: Iterable[T], seconds: float) -> Iterator[T]:
        print(f"{_SEED}={seed()}")
        end = time.monotonic() + seconds
        for count, point in enumerate(points):
            if count and not WHOLE and time.monotonic() > end:
                break
            self._ran += 1
            yield point
