"""``sidesave mirror``: what a mirror lacks, copied by hand."""

import shutil
from pathlib import Path

from commands import output
from loads import flip_bit
from mirrors import check_mirror, committed_in
from trainers import DEADLINE_S, a_state, daemon, end, save_steps

import sidesave


def test_a_run_is_copied_to_a_place_that_it_has_not_had(run: Path, place: str):
    with sidesave.Checkpointer(run) as ckpt:
        for step in (1, 2):
            ckpt.save(step, a_state(step), blocking=True)
        assert place in output("mirror", run, place)  # the run is live
    check_mirror(place, 1, 2)
    assert "0 B" in output("mirror", run, place)


def test_a_run_remembers_its_mirror(run: Path, place: str):
    with sidesave.Checkpointer(
        run, mirror=sidesave.MirrorOptions(place=place, bandwidth=1)
    ) as ckpt:
        ckpt.save(1, a_state(1), blocking=True)
        pid = daemon(ckpt)
    end(pid)  # in the middle of its work, for days
    assert not committed_in(place)
    output("mirror", run)
    check_mirror(place, 1)


def test_a_daemon_that_mirrors_alone_is_asked_to_leave(run: Path, place: str):
    with sidesave.Checkpointer(
        run, mirror=sidesave.MirrorOptions(place=place, bandwidth=1)
    ) as ckpt:
        ckpt.save(1, a_state(1), blocking=True)
    output("mirror", run)
    check_mirror(place, 1)


def test_the_mirror_of_a_live_run_is_its_own(run: Path, place: str):
    with sidesave.Checkpointer(run, mirror=place) as ckpt:
        ckpt.save(1, a_state(1)).mirrored.result(DEADLINE_S)
        assert "is using it" in output("mirror", run, status=1)


def test_a_run_that_has_had_none_asks_where(run: Path):
    save_steps(run, 1)
    assert "TARGET" in output("mirror", run, status=2)


def test_a_damaged_checkpoint_is_left_out_and_told_of(run: Path, place: str):
    save_steps(run, 1, 2)
    flip_bit(next(run.glob("step-00000001/model*.safetensors")))
    assert "step-00000001 is left out" in output("mirror", run, place, status=1)
    check_mirror(place, 2)
    assert sorted(committed_in(place)) == [2]


def test_what_was_deleted_in_a_mirror_is_removed(run: Path, tmp_path: Path):
    save_steps(run, 1)
    place = tmp_path / "mirror"
    output("mirror", run, place)
    shutil.copytree(
        place / "step-00000001", trash := place / ".step-00000000.0123456789abcdef.trash"
    )
    output("mirror", run, place)
    assert not trash.exists()
    check_mirror(str(place), 1)
