"""Runs with a mirror: trainers and daemons that are killed or leave, and the sessions that follow
them.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import output
from loads import flip_bit
from mirrors import MirrorTrainer, check_mirror, check_there, committed_in
from trainers import (
    DEADLINE_S,
    Traces,
    a_state,
    await_end,
    check,
    daemon,
    end,
    pidfd_of,
    same,
    save_steps,
    staging_memory,
    wait_until,
)

import sidesave
from sidesave.errors import (
    CheckpointNotFoundError,
    DirectoryInUseError,
    IntegrityError,
    InvalidArgumentError,
    SidesaveError,
    WriteError,
    WriteStalledError,
)
from sidesave.writer_daemon import protocol

SLOW = 1
"""Bytes per second: the first piece of a copy goes, and nothing after it for days."""


def test_what_is_committed_is_mirrored(run: Path, place: str):
    with sidesave.Checkpointer(run, mirror=place) as ckpt:
        handles = [ckpt.save(step, a_state(step)) for step in range(3)]
        ckpt.wait(DEADLINE_S, mirrored=True)
        assert [handle.mirrored.result(0) for handle in handles] == [
            f"{place}/step-{step:08d}" for step in range(3)
        ]
        check_mirror(place, 0, 1, 2)
    check(run, 0, 1, 2)


def test_large_files_are_mirrored(run: Path, place: str):
    with sidesave.Checkpointer(run, mirror=place) as ckpt:
        ckpt.save(1, a_state(1, 24)).mirrored.result(DEADLINE_S)
    check_mirror(place, 1, mib=24)


def test_without_a_mirror_the_future_says_so(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        handle = ckpt.save(1, a_state(1), blocking=True)
        with pytest.raises(InvalidArgumentError, match="mirror="):
            handle.mirrored.result(0)
        with pytest.raises(InvalidArgumentError, match="mirror="):
            ckpt.wait(mirrored=True)


@pytest.mark.parametrize("where", ["run", "run/inside", "."])
def test_a_mirror_cannot_lie_in_its_run(run: Path, where: str):
    with pytest.raises(InvalidArgumentError, match="are inside one another"):
        sidesave.Checkpointer(run, mirror=run.parent / where)


def test_a_mirror_cannot_be_on_a_web_server(run: Path):
    with pytest.raises(InvalidArgumentError, match="http"):
        sidesave.Checkpointer(run, mirror="https://example.org/run")


def test_earlier_checkpoints_are_mirrored_by_a_session_that_has_one(run: Path, place: str):
    save_steps(run, 1)
    save_steps(run, 2, mirror=place)
    check_mirror(place, 1, 2)


def test_a_daemon_goes_on_when_its_trainer_was_killed(run: Path, place: str, traces: Traces):
    with MirrorTrainer(traces, "save_and_mirror", run, place, 0, 1, 4) as trainer:
        trainer.expect("saved")
        trainer.kill()
    traces.check()
    check_mirror(place, 1, 2, 3, 4)


def test_the_next_session_finishes_what_trainer_and_daemon_left(
    run: Path, place: str, traces: Traces
):
    with MirrorTrainer(traces, "save_and_mirror", run, place, SLOW, 1, 3) as trainer:
        [pid] = trainer.expect("ready")
        trainer.expect("saved")
        trainer.kill()
        end(int(pid))
    check_mirror(place)
    assert not committed_in(place)
    save_steps(run, 4, mirror=place)
    check_mirror(place, 1, 2, 3, 4)


def test_who_waits_for_the_mirror_waits_for_what_earlier_sessions_have_left(
    run: Path, place: str, traces: Traces
):
    with MirrorTrainer(traces, "save_and_mirror", run, place, SLOW, 1, 3) as trainer:
        [pid] = trainer.expect("ready")
        trainer.expect("saved")
        trainer.kill()
        end(int(pid))
    slow = sidesave.Checkpointer(run, mirror=sidesave.MirrorOptions(place=place, bandwidth=SLOW))
    with slow as ckpt, pytest.raises(WriteStalledError, match="earlier sessions"):
        ckpt.wait(0.01, mirrored=True)
    with sidesave.Checkpointer(run, mirror=place) as ckpt:
        ckpt.wait(DEADLINE_S, mirrored=True)
        check_there(place, {1, 2, 3})


def test_a_session_begins_at_once_while_the_daemon_before_it_still_mirrors(run: Path, place: str):
    with sidesave.Checkpointer(
        run, mirror=sidesave.MirrorOptions(place=place, bandwidth=SLOW)
    ) as ckpt:
        handle = ckpt.save(1, a_state(1), blocking=True)
        before = daemon(ckpt)
    with pytest.raises(SidesaveError, match="closed before step 1 was mirrored"):
        handle.mirrored.result(0)
    wait_until(lambda: not [each for each in staging_memory(before) if "stderr" not in each])
    with pidfd_of(before) as pidfd:
        # without a mirror: nobody asks that daemon to leave
        with sidesave.Checkpointer(run) as ckpt:
            ckpt.save(2, a_state(2), blocking=True)
            os.kill(before, 0)
        with sidesave.Checkpointer(run, mirror=place) as ckpt:
            ckpt.save(3, a_state(3))
            await_end(pidfd)  # it has been asked
            ckpt.wait(DEADLINE_S, mirrored=True)
    check_mirror(place, 1, 2, 3)


def test_a_daemon_that_gets_a_signal_leaves_the_mirror_to_the_next_one(run: Path, place: str):
    with sidesave.Checkpointer(run, mirror=place) as ckpt:
        first = ckpt.save(1, a_state(1))
        end(daemon(ckpt), signal.SIGTERM)
        second = ckpt.save(2, a_state(2))
        assert [each.mirrored.result(DEADLINE_S) for each in (first, second)]
    check_mirror(place, 1, 2)


def test_a_signal_ends_a_daemon_that_mirrors_alone(run: Path, place: str):
    with sidesave.Checkpointer(
        run, mirror=sidesave.MirrorOptions(place=place, bandwidth=SLOW)
    ) as ckpt:
        ckpt.save(1, a_state(1), blocking=True)
        pid = daemon(ckpt)
    end(pid, signal.SIGTERM)
    assert not committed_in(place)


def test_another_job_is_refused_the_mirror_and_saves_without(tmp_path: Path, place: str):
    with sidesave.Checkpointer(tmp_path / "one", mirror=place) as one:
        one.save(1, a_state(1)).mirrored.result(DEADLINE_S)  # from here on it has the mirror
        with sidesave.Checkpointer(
            tmp_path / "other", mirror=place, daemon=sidesave.DaemonOptions(takeover_timeout_s=0.2)
        ) as other:
            handle = other.save(2, a_state(2), blocking=True)
            with pytest.raises(DirectoryInUseError):
                handle.mirrored.result(DEADLINE_S)
            with pytest.raises(DirectoryInUseError):
                other.save(3, a_state(3), blocking=True).mirrored.result(DEADLINE_S)
        one.save(4, a_state(4)).mirrored.result(DEADLINE_S)
    check(tmp_path / "other", 2, 3)
    assert sorted(committed_in(place)) == [1, 4]


def test_a_mirror_that_is_away_is_tried_again_and_what_was_deleted_meanwhile_is_told(
    run: Path, tmp_path: Path
):
    place = tmp_path / "away" / "mirror"
    save_steps(run, 0)
    place.parent.touch()  # a file where a directory is to be
    with sidesave.Checkpointer(run, mirror=place) as ckpt:
        first, second = (ckpt.save(step, a_state(step)) for step in (1, 2))
        ckpt.wait(DEADLINE_S)
        with pytest.raises(WriteStalledError, match=r"\[1, 2\] were not mirrored"):
            ckpt.wait(0.01, mirrored=True)
        ckpt.delete(1).result(DEADLINE_S)
        place.parent.unlink()
        place.mkdir(parents=True)
        second.mirrored.result(DEADLINE_S)
        ckpt.wait(DEADLINE_S, mirrored=True)
        with pytest.raises(CheckpointNotFoundError, match="before it was copied"):
            first.mirrored.result(DEADLINE_S)
    check_mirror(str(place), 0, 2)
    check(run, 0, 2)


def test_a_step_that_an_earlier_session_saved_again_is_deleted_once_that_is_mirrored(
    run: Path, place: str
):
    slow = sidesave.MirrorOptions(place=place, bandwidth=1)
    with sidesave.Checkpointer(run, mirror=place) as ckpt:
        ckpt.save(1, a_state(0)).mirrored.result(DEADLINE_S)
    with sidesave.Checkpointer(run, mirror=slow) as ckpt:
        ckpt.save(1, a_state(1), overwrite=True, blocking=True)
        ckpt.save(2, a_state(2), blocking=True)
    with (
        sidesave.Checkpointer(run, mirror=slow) as ckpt,
        pytest.raises(InvalidArgumentError, match="the mirror may have only the older save"),
    ):
        ckpt.delete(1).result(DEADLINE_S)
    with sidesave.Checkpointer(run, mirror=place) as ckpt:
        ckpt.wait(DEADLINE_S, mirrored=True)
        ckpt.delete(1).result(DEADLINE_S)
        assert same(ckpt.load(1), a_state(1))


def test_a_run_whose_disk_is_gone_goes_on_from_the_mirror(run: Path, place: str):
    with sidesave.Checkpointer(run, mirror=place) as ckpt:
        for step in (1, 2):
            ckpt.save(step, a_state(step))
        ckpt.wait(DEADLINE_S, mirrored=True)
        last = ckpt.save(3, a_state(3))
        before = last.committed.result(DEADLINE_S)
        ckpt.wait(DEADLINE_S, mirrored=True)
    shutil.rmtree(run)
    with sidesave.Checkpointer(run, mirror=place) as ckpt:
        assert ckpt.latest_step() == 3
        assert ckpt.steps() == [1, 2, 3]
        assert same(ckpt.load(), a_state(3))
        after = ckpt.save(4, a_state(4)).committed.result(DEADLINE_S)
        assert after.sequence > before.sequence
        assert after.parent == (3, before.session)
        ckpt.wait(DEADLINE_S, mirrored=True)
        assert same(ckpt.load(1), a_state(1))
    check(run, 4)
    check_mirror(place, 1, 2, 3, 4)


def test_where_a_run_went_back_outlives_its_disk(run: Path, place: str):
    with sidesave.Checkpointer(run, mirror=place) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, a_state(step), blocking=True)
        ckpt.load(1)
        ckpt.save(4, a_state(4))
        ckpt.wait(DEADLINE_S, mirrored=True)
    shutil.rmtree(run)
    with sidesave.Checkpointer(run, mirror=place) as ckpt:
        assert ckpt.latest_step() == 4
        assert same(ckpt.load(), a_state(4))
        ckpt.save(2, a_state(2), blocking=True)  # it was given up, so it may be saved again


def test_a_damaged_local_copy_is_no_loss(run: Path, place: str):
    save_steps(run, 1, mirror=place)
    flip_bit(next(run.glob("step-00000001/model*.safetensors")))
    with sidesave.Checkpointer(run, mirror=place) as ckpt:
        assert same(ckpt.load(), a_state(1))


@pytest.mark.parametrize("step", [None, 3])
def test_an_earlier_save_in_the_mirror_does_not_hide_a_damaged_one(
    run: Path, place: str, step: int | None
):
    save_steps(run, 2, 3, mirror=place)
    with sidesave.Checkpointer(run) as ckpt:
        ckpt.load(2)
        ckpt.save(3, a_state(4), blocking=True)
    flip_bit(run / "step-00000003" / "manifest.json")
    with (
        sidesave.Checkpointer(run, mirror=place) as ckpt,
        pytest.raises(IntegrityError, match="step-00000003"),
    ):
        ckpt.load(step)


def test_an_empty_run_with_a_mirror_that_cannot_be_read_does_not_begin_anew(
    run: Path, tmp_path: Path
):
    place = tmp_path / "mirror"
    place.touch()  # no directory: it cannot be listed
    with pytest.raises(SidesaveError) as caught:
        sidesave.Checkpointer(run, mirror=place)
    assert not isinstance(caught.value, InvalidArgumentError)


def test_a_run_with_checkpoints_goes_on_where_its_mirror_cannot_be_read(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    place = tmp_path / "mirror"
    place.touch()
    with sidesave.Checkpointer(run) as ckpt:
        before = ckpt.save(1, a_state(1)).committed.result(DEADLINE_S)
    with sidesave.Checkpointer(run, mirror=place) as ckpt:
        assert same(ckpt.load(), a_state(1))
        after = ckpt.save(2, a_state(2)).committed.result(DEADLINE_S)
        # places that the mirror may have given away stay free
        assert after.sequence > before.sequence + 1
    assert "cannot be read now" in caplog.text


def test_what_waits_and_how_fast_it_goes_is_seen_from_inside_and_outside(run: Path, place: str):
    rate = 4 << 20
    stats = sidesave.reporting.SaveStats()

    def status() -> sidesave.MirrorStatus:
        found = ckpt.mirror_status()
        assert found is not None
        return found

    with sidesave.Checkpointer(
        run, mirror=sidesave.MirrorOptions(place=place, bandwidth=rate)
    ) as ckpt:  # it takes eight seconds
        first, second = (ckpt.save(step, a_state(step, 16)) for step in (1, 2))
        # of each
        nbytes, _ = (handle.committed.result(DEADLINE_S).nbytes for handle in (first, second))
        wait_until(lambda: status().nbytes_per_s > 0)
        now = status()
        assert (
            now.checkpoints in (1, 2)
            and now.nbytes == now.checkpoints * nbytes
            and now.error is None
        )
        assert now.nbytes_per_s < 8 * rate  # a piece is 4 MiB, and the first one goes at once
        assert "sidesave_mirror_backlog_bytes" in sidesave.reporting.prometheus_text(
            stats.summary(status())
        )
        [view] = [
            each for each in json.loads(output("top", "--json")) if each["pid"] == ckpt.daemon_pid
        ]
        assert view["mirror"]["nbytes"] == view["mirror"]["checkpoints"] * nbytes
    with sidesave.Checkpointer(run, mirror=place) as ckpt:
        ckpt.save(3, a_state(3))
        ckpt.wait(DEADLINE_S, mirrored=True)
        wait_until(lambda: status().checkpoints == 0)
        assert (status().nbytes, status().nbytes_per_s, status().last_step) == (0, 0.0, 3)
        assert "last step 3" in output("top", "--once").replace("\n", " ")


def test_what_a_mirror_fails_of_is_seen_until_it_works(run: Path, tmp_path: Path):
    (tmp_path / "away").touch()
    save_steps(run, 0)
    with sidesave.Checkpointer(run, mirror=tmp_path / "away" / "mirror") as ckpt:
        wait_until(
            lambda: (status := ckpt.mirror_status()) is not None and status.error is not None
        )
        [view] = [
            each for each in json.loads(output("top", "--json")) if each["pid"] == ckpt.daemon_pid
        ]
        assert "mount its file system" in view["mirror"]["error"]
        (tmp_path / "away").unlink()
        (tmp_path / "away" / "mirror").mkdir(parents=True)
        wait_until(lambda: (status := ckpt.mirror_status()) is not None and status.last_step == 0)
        assert (status := ckpt.mirror_status()) is not None and status.error is None


def test_a_mirror_whose_log_is_gone_is_told_of_and_nothing_of_it_is_removed(
    run: Path, tmp_path: Path
):
    store, away = tmp_path / "mirror", tmp_path / "away"
    with sidesave.Checkpointer(run, mirror=f"file://{store}") as ckpt:
        for step in (1, 2):
            ckpt.save(step, a_state(step))
        ckpt.wait(DEADLINE_S, mirrored=True)
        ckpt.delete(1)
    before = {path: path.read_bytes() for path in store.glob("step-*/*")}
    (store / ".sidesave.log").rename(away)
    with sidesave.Checkpointer(run, mirror=f"file://{store}") as ckpt:
        wait_until(
            lambda: (status := ckpt.mirror_status()) is not None and status.error is not None
        )
        assert (status := ckpt.mirror_status()) is not None
        assert isinstance(status.error, IntegrityError) and "restore the log" in str(status.error)
        assert before == {path: path.read_bytes() for path in store.glob("step-*/*")}
        assert not (store / ".sidesave.log").exists()
        away.rename(store / ".sidesave.log")
        ckpt.save(3, a_state(3)).mirrored.result(DEADLINE_S)
    check_mirror(f"file://{store}", 1, 2, 3)


def test_a_step_that_went_to_the_fallback_is_named_by_its_number(
    mount: Callable[..., Path], tmp_path: Path
):
    run = mount("-t", "tmpfs", "-o", "size=4m", "none") / "run"
    with sidesave.Checkpointer(
        run,
        mirror=tmp_path / "mirror",
        failures=sidesave.FailureOptions(fallback_directory=tmp_path / "fallback"),
    ) as ckpt:
        messages: list[protocol.Mirrored] = []
        mirroring = ckpt.session.saves.mirroring
        receive = mirroring.receive

        def note(message: protocol.Message) -> None:
            if isinstance(message, protocol.Mirrored):
                messages.append(message)
            receive(message)

        mirroring.receive = note
        with pytest.raises(WriteError, match="fallback directory"):
            ckpt.save(7, a_state(7, 8)).mirrored.result(DEADLINE_S)
        assert [message.name for message in messages] == ["step-00000007"]
        with pidfd_of(daemon(ckpt)) as pidfd:
            ckpt.close()
            await_end(pidfd)
