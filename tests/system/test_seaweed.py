"""Runs in an object store as people have it, and mirrors there, whose trainers and daemons are
killed in uploads.
"""

import itertools
import time
from pathlib import Path

import pytest
from campaigns import Share
from commands import output
from mirrors import MirrorTrainer, check_mirror, check_there
from stores import kill_both, kill_both_again_and_again, strays
from trainers import DEADLINE_S, Traces

from sidesave import Checkpointer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MIB = 16
"""Of a state that is mirrored: several parts."""


@pytest.fixture(autouse=True)
def credentials(weed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in weed.items():
        monkeypatch.setenv(name.upper(), value)


def test_nothing_that_was_committed_is_lost_where_both_are_killed_at_any_moment(
    traces: Traces, share: Share
) -> None:
    kill_both_again_and_again("s3://bucket/straight", traces, share.chance, share.rounds(12))


def test_a_mirror_goes_on_where_both_were_killed_and_lacks_nothing_in_the_end(
    run: Path, traces: Traces, share: Share
) -> None:
    chance, place = share.chance, "s3://bucket/mirror"
    saved: set[int] = set()
    for first in (2 * number for number in share.rounds(12)):
        with MirrorTrainer(traces, "save_and_mirror", run, place, 0, first, 2, MIB) as trainer:
            [pid] = trainer.expect("ready")
            # saved, and two are mirrored
            for _line in itertools.islice(trainer.lines(), chance.randrange(4)):
                pass
            time.sleep(chance.random() * 0.2)  # it is somewhere in an upload
            kill_both(chance, trainer, int(pid))
            told = {
                int(line.split(" ")[1]) for line in trainer.heard if line.startswith("mirrored ")
            }
        check_there(place, told, mib=MIB)
        saved |= told
    with Checkpointer(run, mirror=place) as ckpt:
        saved |= {*ckpt.steps()}
        ckpt.wait(DEADLINE_S, mirrored=True)
    check_mirror(place, *saved, mib=MIB)
    assert strays(place) == [".sidesave.mirror-id"]
    assert "0 B" in output("mirror", run, place)
    traces.check()
