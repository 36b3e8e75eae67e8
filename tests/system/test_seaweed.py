"""Runs in an object store as people have it, and mirrors there, whose trainers and daemons are killed in uploads."""

import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path

import campaigns
import pytest
from commands import output
from hostile_bytes import SEED
from mirrors import MirrorTrainer, check_mirror, check_there
from seaweed import seaweed
from stores import strays
from trainers import DEADLINE_S, Traces, Trainer, a_state, end, same, size_of

import sidesave
from sidesave import Checkpointer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MIB = 16
"""Of a state that is mirrored: several parts."""


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with seaweed(tmp_path_factory.mktemp("weed")) as options:
        yield options


@pytest.fixture(autouse=True)
def credentials(weed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in weed.items():
        monkeypatch.setenv(name.upper(), value)


def kill_both(chance: random.Random, trainer: Trainer, daemon: int) -> None:
    killed = [trainer.kill, lambda: end(daemon)]
    chance.shuffle(killed)
    for kill in killed:
        with contextlib.suppress(ProcessLookupError):  # a daemon whose trainer was first may be through
            kill()


@pytest.mark.usefixtures("seed")
def test_nothing_that_was_committed_is_lost_where_both_are_killed_at_any_moment(traces: Traces) -> None:
    chance, url = random.Random(SEED), "s3://bucket/straight"
    committed: set[int] = set()
    first = 1
    for _ in range(campaigns.length(12)):
        with Trainer(traces, "keep_saving", url, first, 6, 0) as trainer:
            [pid] = trainer.expect("ready")
            trainer.go_on()
            until = chance.randrange(1, 12)  # of what it says
            for count, _line in enumerate(trainer.lines(), 1):
                if count == until:
                    break
            kill_both(chance, trainer, int(pid))
            committed |= {int(line.split(" ")[1]) for line in trainer.heard if line.startswith("committed ")}
        with Checkpointer(url) as ckpt:
            first = (ckpt.latest_step() or 0) + 1
        found = {info.step: info for info in sidesave.find(url)}
        assert committed <= found.keys()
        assert strays(url) == []
    for step, info in ((info.step, info) for info in sidesave.find(url)):
        assert sidesave.verify(info).ok
        assert same(sidesave.load(info), a_state(step, size_of(step)))
    traces.check()


@pytest.mark.usefixtures("seed")
def test_a_mirror_goes_on_where_both_were_killed_and_lacks_nothing_in_the_end(run: Path, traces: Traces) -> None:
    chance, place = random.Random(SEED), "s3://bucket/mirror"
    saved: set[int] = set()
    for first in range(0, 2 * campaigns.length(12), 2):
        with MirrorTrainer(traces, "save_and_mirror", run, place, 0, first, 2, MIB) as trainer:
            [pid] = trainer.expect("ready")
            for _line in itertools.islice(trainer.lines(), chance.randrange(4)):  # saved, and two are mirrored
                pass
            time.sleep(chance.random() * 0.2)  # it is somewhere in an upload
            kill_both(chance, trainer, int(pid))
            told = {int(line.split(" ")[1]) for line in trainer.heard if line.startswith("mirrored ")}
        check_there(place, told, mib=MIB)
        saved |= told
    with Checkpointer(run, mirror=place) as ckpt:
        saved |= {*ckpt.steps()}
        ckpt.wait(DEADLINE_S, mirrored=True)
    check_mirror(place, *saved, mib=MIB)
    assert strays(place) == [".sidesave.mirror-id"]
    assert "0 B" in output("mirror", run, place)
    traces.check()
