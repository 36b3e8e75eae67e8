"""Places where campaigns of kills save to, each with the points at which it kills a daemon."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from kill_states import Kind
from object_server import Killer, serving
from stores import strays
from trainers import DEADLINE_S, Orders, daemon, entries

import sidesave
from sidesave import Checkpointer, SaveHandle
from sidesave.client.runs.finding import catalog_of

STEPS_OF_A_SAVE = (
    *("got SAVE", "os.mkdir", "open", "os.link", "os.remove", "os.chmod", "os.rename"),
    *("sends WRITTEN", "sent WRITTEN", "sends COMMITTED", "sent COMMITTED"),
)
"""The operations and messages of the daemon while it saves to a disk."""


def without_path(step: str) -> str:
    """Return the kind of a reported step, without the path that it concerns."""
    return step if step.startswith(("sends ", "sent ", "got ")) else step.partition(" ")[0]


class Place(ABC):
    """A run directory or URL, a mirror if it has one, and a way to kill a daemon at a numbered
    point of a save.
    """

    points: ClassVar[frozenset[str]]
    """The kinds of point at which it can kill a daemon during a save."""

    def __init__(self, run: str, mirror: str | None = None) -> None:
        self.run, self.mirror = run, mirror

    @property
    def options(self) -> dict[str, Any]:
        """The options of a checkpointer that saves to this place."""
        return {} if self.mirror is None else {"mirror": self.mirror}

    def wait(self, handle: SaveHandle) -> None:
        """Wait until a save is everywhere where it belongs."""
        (handle.committed if self.mirror is None else handle.mirrored).result(DEADLINE_S)

    def check(self, kind: Kind, *steps: int) -> None:
        """These steps are all there is, whole and bit for bit, in the run and in its mirror."""
        for root in filter(None, (self.run, self.mirror)):
            paths = {info.step: info.path for info in catalog_of(root).all()}
            assert sorted(paths) == sorted(steps)
            for step in sorted(paths):
                report = sidesave.verify(paths[step])
                assert report.ok, report.faults
                assert kind.is_at(paths[step], step, kind.options()), (
                    f"step {step} in {root} holds another state"
                )
            if "://" in root:
                assert (found := strays(root)) == [], found
            else:
                assert (found := entries(root)) == [f"step-{step:08d}" for step in sorted(steps)], (
                    found
                )

    @abstractmethod
    def arm(self, ckpt: Checkpointer, number: int) -> None:
        """Kill the daemon at this point, counted from the next save on."""

    @abstractmethod
    def was_met(self) -> bool:
        """Return whether the point has come."""

    @abstractmethod
    def disarm(self) -> str:
        """Return the kind of point at which the daemon was killed, once that has happened, or "" if
        there is none.
        """


class _Disk(Place):
    """Points are the operations on storage and the messages of a daemon."""

    points = frozenset(STEPS_OF_A_SAVE)

    def __init__(self, folder: Path, orders: Orders, mirror: str | None = None) -> None:
        super().__init__(str(folder / "run"), mirror)
        self._orders = orders

    def arm(self, ckpt: Checkpointer, number: int) -> None:
        self._orders.give("kill", starting_at="got SAVE", after=number, every_step=True)

    def was_met(self) -> bool:
        return self._orders.was_obeyed()

    def disarm(self) -> str:
        return without_path(self._orders.obeyed()[1])


class _Store(Place):
    """Points are the requests to a store, of which each comes twice: it is carried out, or it is
    lost.
    """

    points = frozenset({"a request"})

    def __init__(self, killer: Killer, run: str, mirror: str | None = None) -> None:
        super().__init__(run, mirror)
        self._killer = killer

    def arm(self, ckpt: Checkpointer, number: int) -> None:
        after, is_lost = divmod(number, 2)
        self._killer.arm(daemon(ckpt), after=after, fault="cut" if is_lost else None)

    def was_met(self) -> bool:
        return not self._killer.is_armed

    def disarm(self) -> str:
        return "a request" if self._killer.disarm() else ""


PLACES = ("disk", "mirror", "store", "mirror in a store")


@contextlib.contextmanager
def place_of(
    name: str, folder: Path, orders: Orders, environment: Callable[[str, str], None]
) -> Iterator[Place]:
    """Make one of ``PLACES`` in a folder; clients of its store are configured by environment
    variables.
    """
    if name == "disk":
        yield _Disk(folder, orders)
    elif name == "mirror":
        yield _Disk(folder, orders, str(folder / "mirror"))
    else:
        (folder / "store" / "bucket").mkdir(parents=True)
        with serving(folder / "store") as server:
            server.announce(environment)
            url = "s3://bucket/run"
            yield (
                _Store(Killer(server), url)
                if name == "store"
                else _Store(Killer(server), str(folder / "run"), url)
            )
