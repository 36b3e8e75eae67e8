"""SIGKILL of daemons and trainers, for each kind of state in each place: no acknowledged save is
lost or damaged.

`test_crash_points` kills plain saves to a disk while they start, recover and end, too.
"""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random

import campaigns
import pytest
from campaigns import Share
from kill_places import PLACES, STEPS_OF_A_SAVE, Place, place_of
from kill_states import KINDS, KillTrainer, Kind
from trainers import DEADLINE_S, Orders, Traces, daemon, end

from sidesave import Checkpointer, SaveHandle
from sidesave.client.daemon_link import restarts
from sidesave.errors import IntegrityError, WriteError

_POINTS = (
    *((step, 0) for step in (*STEPS_OF_A_SAVE, "sends PROGRESS", "sent PROGRESS")),
    *(("os.link", after) for after in range(1, 6)),
)
_BUSY = pytest.mark.timeout(1200)
"""A campaign starts hundreds of processes, which takes long on a busy machine."""


def everywhere(minutes: Callable[[str], float] | None = None) -> pytest.MarkDecorator:
    """Run a test for each kind of state in each place, as a campaign of this many minutes in each
    place.
    """
    cases = [
        pytest.param(
            kind, place, marks=[pytest.mark.slow(minutes=minutes(place))] if minutes else []
        )
        for kind in KINDS
        for place in PLACES
    ]
    return pytest.mark.parametrize(("kind", "place"), cases, indirect=True)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "encrypted":
        pytest.importorskip(
            "cryptography", reason="needs cryptography: pip install 'sidesave[encryption]'"
        )
    return KINDS[request.param]()


@pytest.fixture
def place(
    request: pytest.FixtureRequest, tmp_path: Path, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    monkeypatch.setattr(restarts, "_MAX_PAUSE_S", 0.05)
    name = getattr(request, "param", "disk")
    with place_of(name, tmp_path, orders, monkeypatch.setenv) as place:
        yield place


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> Random:
    """Random numbers, which SIDESAVE_TEST_SEED repeats."""
    print(f"SIDESAVE_TEST_SEED={campaigns.seed()}")
    return Random(f"{campaigns.seed()} {request.node.name}")


class Saver:
    """Saves step after step of one kind to one place, from this process."""

    def __init__(self, kind: Kind, place: Place) -> None:
        self._kind, self._place = kind, place
        self.ckpt = Checkpointer(place.run, **place.options, **kind.options())
        self.count = 0

    def save(self) -> SaveHandle:
        self.count += 1
        return self.ckpt.save(self.count - 1, self._kind.at(self.count - 1))

    def commit(self) -> None:
        self._place.wait(self.save())

    def check(self) -> None:
        """All saves are there, and one of the last two links files where that is possible."""
        self._place.check(self._kind, *range(self.count))
        if self._kind.links and "://" not in self._place.run:
            last = [
                Path(self._place.run) / f"step-{step:08d}"
                for step in (self.count - 2, self.count - 1)
            ]
            assert any(path.stat().st_nlink > 1 for each in last for path in each.iterdir())


# The daemon ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_daemon_killed_at_a_step_of_a_save_the_save_commits_and_later_ones_link_again(
    kind: Kind, place: Place, orders: Orders, traces: Traces
):
    saver = Saver(kind, place)
    with saver.ckpt:
        for step, after in campaigns.sample(_POINTS):
            saver.commit()  # by a daemon that links the next
            orders.give("kill", starting_at=step, after=after, every_step=True)
            for _ in range(2):  # a step may come after the commit is known
                saver.commit()
            reached = orders.obeyed()[1]
            assert after or reached.startswith(step)
        saver.commit()
        saver.commit()
    saver.check()
    traces.check()


@_BUSY
@everywhere(lambda place: 0.25 if place == "disk" else 0.1)
def test_daemon_killed_at_every_step_of_a_save_every_save_commits(
    kind: Kind, place: Place, traces: Traces, share: Share, capsys: pytest.CaptureFixture[str]
):
    killed_at: Counter[str] = Counter()
    saver = Saver(kind, place)
    with saver.ckpt:
        for number in share.numbers(patience=9):
            saver.commit()  # by a daemon that links the next
            place.arm(saver.ckpt, number)
            saver.commit()
            if not place.was_met():
                share.is_past(number)
            saver.commit()  # a step may come after the commit is known
            killed_at[place.disarm()] += 1
        saver.commit()
        saver.commit()
    assert killed_at.keys() >= place.points or not campaigns.WHOLE
    saver.check()
    traces.check()
    with capsys.disabled():
        print(f"\n{killed_at.total()} kills of the daemon; {saver.count} saves, none lost")


@pytest.mark.drawn
@everywhere()
def test_some_daemons_killed_at_random_instants_lose_no_save(
    kind: Kind, place: Place, traces: Traces, chance: Random
):
    kill_at_random(kind, place, traces, chance, range(4))


@_BUSY
@everywhere(lambda place: 0.06)
def test_many_daemons_killed_at_random_instants_lose_no_save(
    kind: Kind, place: Place, traces: Traces, chance: Random, share: Share
):
    kill_at_random(kind, place, traces, chance, share.rounds(60))


def kill_at_random(
    kind: Kind, place: Place, traces: Traces, chance: Random, rounds: Iterable[int]
) -> None:
    saver = Saver(kind, place)
    with saver.ckpt:
        for _ in rounds:
            saver.commit()  # by a daemon that lives
            pid = daemon(saver.ckpt)
            handles = [saver.save() for _ in range(2)]
            if chance.random() < 0.5:
                handles[0].committed.result(DEADLINE_S)
            time.sleep(chance.random() * 0.1)
            acknowledged = [handle.step for handle in handles if handle.committed.done()]
            end(pid)
            assert {*acknowledged} <= {*saver.ckpt.steps()}
            for handle in handles:
                place.wait(handle)
        saver.commit()
        saver.commit()
    saver.check()
    traces.check()


# The trainer, and both ----------------------------------------------------------------------------


@pytest.mark.drawn
@everywhere()
@pytest.mark.parametrize("daemon_dies", [False, True], ids=["trainer", "both"])
def test_a_staged_save_is_finished_by_the_daemon_and_a_written_one_by_the_next_session(
    kind: Kind, place: Place, orders: Orders, traces: Traces, chance: Random, daemon_dies: bool
):
    moment = chance.choice(["got SAVE", "sends WRITTEN", "sends COMMITTED"])
    print(f"moment: {moment}")
    name = next(name for name in KINDS if type(kind) is KINDS[name])
    with KillTrainer(
        traces, "save_staged", name, place.run, json.dumps(place.options), 3
    ) as trainer:
        pid = trainer.stage(orders, starting_at=moment, every_step=True)
        trainer.kill()
    if daemon_dies:
        end(pid)
    else:
        os.kill(pid, signal.SIGCONT)
    traces.await_ends()
    with Checkpointer(place.run, **place.options, **kind.options()) as ckpt:
        is_lost = daemon_dies and moment == "got SAVE"
        assert ckpt.recovered == (
            ("step-00000003",) if daemon_dies and moment == "sends WRITTEN" else ()
        )
        assert ckpt.latest_step() == (2 if is_lost else 3)
        place.wait(ckpt.save(4, kind.at(4)))
    place.check(kind, *range(3), *([] if is_lost else [3]), 4)
    traces.check()


# Operations that fail -----------------------------------------------------------------------------


@pytest.mark.drawn
@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("operation", ["os.mkdir", "open", "os.link"])
def test_an_operation_that_fails_costs_one_save_at_most_and_an_impossible_link_none(
    kind: Kind, place: Place, orders: Orders, traces: Traces, operation: str
):
    faults = [(code, after) for code in ("ENOSPC", "EIO", "EDQUOT", "EROFS") for after in (0, 1, 4)]
    impossible = ["EXDEV", "EPERM", "EMLINK"] if operation == "os.link" and kind.links else []
    saver = Saver(kind, place)
    lost: set[int] = set()
    with saver.ckpt:
        saver.commit()
        for code, after in [*faults, *((code, 0) for code in impossible)]:
            orders.give(code, starting_at=operation, after=after)
            handle = saver.save()
            failure = handle.committed.exception(DEADLINE_S)
            orders.obeyed()
            if failure is not None:
                assert (
                    isinstance(failure, (WriteError, IntegrityError)) and code not in impossible
                ), failure
                lost.add(handle.step)
            saver.commit()
    place.check(kind, *({*range(saver.count)} - lost))
    traces.check()
