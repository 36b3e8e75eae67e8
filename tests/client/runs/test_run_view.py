"""One look at a run: its checkpoints in several places, and which of them a step means."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest

from sidesave.client.runs.view import RunView
from sidesave.errors import CheckpointNotFoundError, IntegrityError
from sidesave.writer_daemon.checkpoints.catalog import LeftOut
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.format.rollback import Rollbacks


def info(
    step: int, root: str = "/run", *, session: str = "session", given_up: bool = False
) -> CheckpointInfo:
    path = f"{root}/step-{step:08d}"
    in_mirror = root == "/mirror"
    return CheckpointInfo(
        step, path, 0, session, step, None, float(step), given_up=given_up, in_mirror=in_mirror
    )


def view(*here: int, mirrored: Iterable[int] = (), damaged: Iterable[int] = ()) -> RunView:
    left_out = [
        LeftOut(step, f"/run/step-{step:08d}", IntegrityError(f"step {step} is damaged"))
        for step in damaged
    ]
    copies = [info(step, "/mirror") for step in mirrored]
    return RunView("/run", [info(step) for step in here], left_out, Rollbacks(), mirrored=copies)


def tried(
    of: RunView, step: int | None, *, fallback: bool = False, in_parts: bool = False
) -> list[str]:
    chosen = of.to_try(step, within="", fallback=fallback, in_parts=in_parts)
    return [f"{'mirror' if each.in_mirror else 'here'} {each.step}" for each in chosen]


def test_a_save_in_two_places_is_one_checkpoint():
    both = view(1, 3, mirrored=[1, 2])
    assert [(each.step, each.in_mirror) for each in both.all] == [(1, False), (2, True), (3, False)]
    replaced = dataclasses.replace(view(1), mirrored=[info(1, "/mirror", session="other")])
    assert [each.session for each in replaced.all] == ["other", "session"]


def test_the_copy_in_the_mirror_is_tried_after_the_checkpoint_and_older_ones_only_as_a_fallback():
    both = view(1, 3, mirrored=[1, 2, 3])
    assert tried(both, None) == ["here 3", "mirror 3"]
    assert tried(both, 2) == ["mirror 2"]
    assert tried(both, 3, fallback=True) == ["here 3", "mirror 3", "mirror 2", "here 1", "mirror 1"]


def test_what_was_given_up_is_the_latest_for_nobody_and_can_be_asked_for():
    gone_back = dataclasses.replace(view(), here=[info(3, given_up=True), info(2)])
    assert tried(gone_back, None, fallback=True) == ["here 2"]
    assert tried(gone_back, 3) == ["here 3"]
    with pytest.raises(IntegrityError, match="went back to no longer exists"):
        tried(dataclasses.replace(view(), here=[info(3, given_up=True)]), None)


def test_a_damaged_step_is_raised_if_it_is_meant_or_may_be_the_latest():
    both = view(1, 3, damaged=[2])
    both.refuse_damaged(None)
    both.refuse_damaged(1)
    with pytest.raises(IntegrityError, match="step 2 is damaged"):
        both.refuse_damaged(2)
    view(1, mirrored=[2], damaged=[2]).refuse_damaged(2)
    view(1, mirrored=[2], damaged=[2]).refuse_damaged(None)
    assert tried(both, 2, fallback=True) == ["here 1"]
    with pytest.raises(CheckpointNotFoundError, match="no step 2"):
        tried(both, 2)


@pytest.mark.parametrize("step", [None, 3])
def test_a_given_up_or_older_copy_in_the_mirror_does_not_hide_damage(
    tmp_path: Path, step: int | None
):
    lost = LeftOut(3, str(tmp_path), IntegrityError("step 3 is damaged"), sequence=3)
    same = info(3, "/mirror")
    copies = {
        "given up": dataclasses.replace(same, given_up=True),
        "older": dataclasses.replace(same, sequence=2),
        "same": same,
    }
    refused: list[str] = []
    for name, copied in copies.items():
        try:
            dataclasses.replace(view(1), left_out=[lost], mirrored=[copied]).refuse_damaged(step)
        except IntegrityError:
            refused.append(name)
    assert refused == ["given up", "older"]


def test_a_checkpoint_that_some_nodes_lack_does_not_count():
    limited = view(1, 2).limited_to({info(1).key})
    assert tried(limited, None, in_parts=True) == ["here 1"]
    limited.refuse_damaged(2)
    assert tried(limited, 2, fallback=True, in_parts=True) == ["here 1"]
    with pytest.raises(CheckpointNotFoundError, match="every node has its part"):
        tried(limited, 2, in_parts=True)
    with pytest.raises(CheckpointNotFoundError, match="every node has its part"):
        tried(view(1).limited_to(()), None, in_parts=True)


def test_a_view_says_whether_a_sequence_may_be_unknown():
    assert view(1, mirrored=[1]).is_complete
    assert not view(1, damaged=[2]).is_complete
    assert not dataclasses.replace(view(1), is_mirror_known=False).is_complete
    assert not dataclasses.replace(view(1), mirror_left_out=view(damaged=[2]).left_out).is_complete
