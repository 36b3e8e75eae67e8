"""What happened to every save: with real daemons, after restarts, and with a log that is torn,
planted or full.
"""

import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from trainers import (
    DEADLINE_S,
    Orders,
    Traces,
    Trainer,
    a_state,
    await_end,
    check,
    end,
    kill_with_a_save_staged,
    pidfd_of,
    save_steps,
)

import sidesave
from sidesave.client.cli import console
from sidesave.client.options import Options
from sidesave.client.runs.finding import catalog_of
from sidesave.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    DaemonDiedError,
    HostMemoryError,
    NoSpaceError,
    ProtocolError,
    TornSnapshotError,
    WriteStalledError,
)
from sidesave.stager.memory import host_memory
from sidesave.writer_daemon import log, protocol, save_record, wire
from sidesave.writer_daemon.log import HISTORY_FILE, MAX_NBYTES, HistoryLog, read_history
from sidesave.writer_daemon.process import jobs
from sidesave.writer_daemon.process.server import Server
from sidesave.writer_daemon.save_record import SaveRecord, combine
from sidesave.writer_daemon.storage import PosixStorage

OLD, NEW = "0" * 16, "1" * 16


def outcomes(records: list[SaveRecord]) -> list[tuple[int, str]]:
    return [(record.step, record.outcome) for record in records]


def only(records: list[SaveRecord], step: int) -> SaveRecord:
    [record] = [record for record in records if record.step == step]
    return record


def eventually(records: Callable[[], list[SaveRecord]], *expected: tuple[int, str]) -> None:
    """These outcomes come, in time."""
    deadline = time.monotonic() + DEADLINE_S
    while outcomes(records()) != list(expected):
        assert time.monotonic() < deadline, records()
        time.sleep(0.01)


def a_record(
    step: int = 1, outcome: Any = "saving", session: str = OLD, **values: Any
) -> SaveRecord:
    record = SaveRecord(step=step, session=session, outcome=outcome, save_id=step)
    return replace(record, **values)


# With a daemon ------------------------------------------------------------------------------------


def test_committed_saves_of_two_sessions_stand_in_the_order_of_their_calls_with_their_figures(
    run: Path,
):
    began_s = time.time()
    for first in (1, 3):
        with sidesave.Checkpointer(run) as ckpt:
            infos = [
                ckpt.save(step, a_state(step)).committed.result() for step in (first, first + 1)
            ]
            told = ckpt.history()
        told_again, logged = ckpt.history(), sidesave.history(run)
        assert outcomes(told) == outcomes(told_again) == outcomes(logged)
    assert outcomes(logged) == [(step, "committed") for step in (1, 2, 3, 4)]
    assert [record.sequence for record in logged] == [1, 2, 3, 4]
    assert len({record.session for record in logged}) == 2
    for record in (*told[2:], *logged):
        assert record.called_s is not None
        assert began_s <= record.called_s <= time.time()
        assert None not in (record.stall_s, record.staged_s, record.written_s, record.committed_s)
        assert 0 < record.stall_s and 0 < record.staged_s <= record.committed_s + 0.1  # type: ignore[operator]
        assert record.written_s <= record.committed_s  # type: ignore[operator]
        assert (record.tries, record.error, record.path) == (1, None, None)
    last = only(logged, 4)
    assert (last.session, last.nbytes, last.called_s) == (
        infos[1].session,
        infos[1].nbytes,
        infos[1].created_s,
    )


def test_a_failed_save_is_in_the_history_with_its_reason(run: Path):
    with sidesave.Checkpointer(run, failures=sidesave.FailureOptions(tolerated=5)) as ckpt:
        (run / "step-00000002").mkdir()
        with pytest.warns(RuntimeWarning, match="step 2 failed"):
            error = ckpt.save(2, a_state(2)).committed.exception()
        assert isinstance(error, CheckpointExistsError)
        ckpt.save(3, a_state(3)).committed.result()
        told = ckpt.history()
    for records in (told, sidesave.history(run)):
        assert outcomes(records) == [(2, "failed"), (3, "committed")]
        assert records[0].error == "CheckpointExistsError"
        assert records[0].message is not None
        assert "the step exists" in records[0].message
        assert str(run / "step-00000002") in records[0].message


@pytest.mark.root
def test_a_full_disk_is_in_the_history_though_the_log_is_on_it(mount: Callable[..., Path]):
    small = mount("-t", "tmpfs", "-o", "size=8m", "none")
    with sidesave.Checkpointer(small, failures=sidesave.FailureOptions(tolerated=5)) as ckpt:
        ckpt.save(1, a_state(1)).committed.result()
        with pytest.warns(RuntimeWarning, match="step 2 failed"):
            assert isinstance(ckpt.save(2, a_state(2, 40)).committed.exception(), NoSpaceError)
        ckpt.save(3, a_state(3)).committed.result()
    records = sidesave.history(small)
    assert outcomes(records) == [(1, "committed"), (2, "failed"), (3, "committed")]
    assert (records[1].error, records[1].errno) == ("NoSpaceError", 28)


@pytest.mark.root
def test_a_save_that_went_elsewhere_is_in_the_history_with_its_place(
    mount: Callable[..., Path], tmp_path: Path
):
    small = mount("-t", "tmpfs", "-o", "size=8m", "none")
    with sidesave.Checkpointer(
        small, failures=sidesave.FailureOptions(fallback_directory=tmp_path / "other")
    ) as ckpt:
        ckpt.save(1, a_state(1)).committed.result()
        path = ckpt.save(2, a_state(2, 40)).committed.result().path
        told = ckpt.history()
    for records in (told, sidesave.history(small)):
        assert outcomes(records) == [(1, "committed"), (2, "committed")]
        assert [record.path for record in records] == [None, path]
    assert path == str(tmp_path / "other" / "step-00000002")


def test_a_skipped_save_is_in_the_history(run: Path, orders: Orders):
    with sidesave.Checkpointer(
        run, staging=sidesave.StagingOptions(slots=1, on_busy="skip")
    ) as ckpt:
        ckpt.save(1, a_state(1)).committed.result()
        orders.give("hold")
        ckpt.save(2, a_state(2))
        orders.obeyed()
        assert ckpt.save(3, a_state(3)).skipped
        assert outcomes(ckpt.history()) == [(1, "committed"), (2, "saving"), (3, "skipped")]
        orders.release()
    records = sidesave.history(run)
    assert outcomes(records) == [(1, "committed"), (2, "committed"), (3, "skipped")]
    assert records[2].called_s is not None


def test_a_save_that_found_no_slot_in_time_has_failed(
    run: Path, orders: Orders, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Options, "slot_patience_s", 0.01)
    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        orders.give("hold")
        ckpt.save(1, a_state(1))
        orders.obeyed()
        with pytest.raises(WriteStalledError):
            ckpt.save(2, a_state(2))
        orders.release()
    assert outcomes(sidesave.history(run)) == [(1, "committed"), (2, "failed")]
    assert only(sidesave.history(run), 2).error == "WriteStalledError"


def test_a_save_without_host_memory_has_failed(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "_mem_available", lambda: 0)
    with sidesave.Checkpointer(run) as ckpt, pytest.raises(HostMemoryError):
        ckpt.save(1, a_state(1, 40))
    [record] = sidesave.history(run)
    assert (record.outcome, record.error, record.sequence) == ("failed", "HostMemoryError", None)


def test_a_torn_snapshot_has_failed_and_its_daemon_has_been_told(run: Path):
    weight = torch.nn.Parameter(torch.zeros(1 << 16))
    state = {"weight": weight, "optimizer": torch.optim.SGD([weight], lr=0.1)}
    go_on = threading.Event()

    def wait() -> None:
        go_on.wait(DEADLINE_S)

    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(overlap=True)) as ckpt:
        ckpt.session.copier._starter.submit(wait)  # copies wait behind it
        handle = ckpt.save(1, state)
        weight.data.view(torch.uint8).random_()  # which no version counter and no hook notices
        go_on.set()
        assert isinstance(handle.committed.exception(DEADLINE_S), TornSnapshotError)
        assert outcomes(ckpt.history()) == [(1, "failed")]
        ckpt.wait()
    [record] = sidesave.history(run)
    assert (record.outcome, record.error, record.sequence) == ("failed", "TornSnapshotError", 1)


def test_a_save_under_way_is_told_as_such_here_and_elsewhere(run: Path, orders: Orders):
    with sidesave.Checkpointer(run) as ckpt:
        orders.give("hold")
        ckpt.save(1, a_state(1)).staged.result()
        orders.obeyed()
        for records in (ckpt.history(), sidesave.history(run)):
            assert outcomes(records) == [(1, "saving")]
        assert ckpt.history()[0].staged_s is not None
        orders.release()


def test_a_daemon_killed_and_replaced_makes_one_save_of_two_tries(run: Path, orders: Orders):
    with sidesave.Checkpointer(run) as ckpt:
        orders.give("kill", after=3)
        ckpt.save(1, a_state(1)).committed.result()
    [record] = sidesave.history(run)
    assert (record.outcome, record.tries) == ("committed", 2)


def test_daemons_killed_wherever_they_are_leave_one_record_of_each_save(run: Path, orders: Orders):
    with sidesave.Checkpointer(run) as ckpt:
        for step in range(8):
            orders.give("kill", after=2 * step)
            ckpt.save(step, a_state(step)).committed.result()
            orders.withdraw()
        told = ckpt.history()
    for records in (told, sidesave.history(run)):
        assert outcomes(records) == [(step, "committed") for step in range(8)]
        assert {record.tries for record in records} <= {1, 2}


def test_a_daemon_that_is_given_up_leaves_a_save_that_has_failed(run: Path, orders: Orders):
    ckpt = sidesave.Checkpointer(run)
    orders.give("exit", keep=True)
    assert isinstance(ckpt.save(1, a_state(1)).committed.exception(DEADLINE_S), DaemonDiedError)
    orders.withdraw()
    [record] = ckpt.history()
    assert (record.outcome, record.error) == ("failed", "DaemonDiedError")
    ckpt.close()
    assert outcomes(sidesave.history(run)) == [(1, "failed")]
    save_steps(run, 1)
    assert outcomes(sidesave.history(run)) == [(1, "failed"), (1, "committed")]


def test_a_daemon_that_does_not_listen_holds_up_no_save(run: Path, orders: Orders):
    with sidesave.Checkpointer(
        run, staging=sidesave.StagingOptions(slots=1, on_busy="skip")
    ) as ckpt:
        orders.give("stop")
        ckpt.save(0, a_state(0))
        pid, _ = orders.obeyed()
        for step in range(1, 3000):
            assert ckpt.save(step, {}).skipped
        told = ckpt.history()
        os.kill(pid, signal.SIGCONT)
    assert (told[-1].step, told[-1].outcome) == (2999, "skipped")
    assert len(told) >= 1000
    records = sidesave.history(run)
    assert outcomes(records)[:3] == [(0, "committed"), (1, "skipped"), (2, "skipped")]


# Unknown, and found out ---------------------------------------------------------------------------


@pytest.mark.parametrize("log", ["kept", "lost"])
def test_an_unknown_outcome_corrects_itself(log: str, run: Path, orders: Orders):
    ckpt = sidesave.Checkpointer(run)
    assert ckpt.daemon_pid is not None
    with pidfd_of(ckpt.daemon_pid) as pidfd:
        orders.give("hold", starting_at="os.rename")
        handle = ckpt.save(1, a_state(1))
        orders.obeyed()
        with pytest.raises(WriteStalledError):
            ckpt.close(0.01)
        assert isinstance(handle.committed.exception(), CommitUnknownError)
        assert outcomes(ckpt.history()) == [(1, "unknown")]
        assert ckpt.history()[0].error == "CommitUnknownError"
        assert outcomes(sidesave.history(run)) == [(1, "saving")], (
            "to others it is simply not finished yet"
        )
        orders.release()
        await_end(pidfd)
    if log == "lost":
        (run / HISTORY_FILE).unlink()
    [record] = ckpt.history()
    assert (record.outcome, record.error, record.message) == ("committed", None, None)
    assert outcomes(sidesave.history(run)) == ([] if log == "lost" else [(1, "committed")])


def _kill_both(run: Path, traces: Traces, orders: Orders, **order: Any) -> None:
    """A trainer that saves step 5 and its daemon are both killed, the daemon where ``order``
    says.
    """
    pid = kill_with_a_save_staged(traces, run, orders, "hold", **order)
    end(pid)


def test_a_save_that_died_with_its_session_is_unknown_until_it_is_removed(
    run: Path, orders: Orders, traces: Traces
):
    _kill_both(run, traces, orders, after=2)
    assert outcomes(sidesave.history(run)) == [(5, "unknown")], "what is there might be whole"
    with sidesave.Checkpointer(run) as ckpt:
        assert ckpt.recovered == ()
        assert [name[:15] for name in ckpt.removed] == [".step-00000005."]
        eventually(ckpt.history, (5, "removed"))
        ckpt.save(5, a_state(5))
    assert outcomes(sidesave.history(run)) == [(5, "removed"), (5, "committed")]


def test_a_save_that_the_next_session_finishes_is_recovered(
    run: Path, orders: Orders, traces: Traces
):
    _kill_both(run, traces, orders, starting_at="os.rename")
    assert outcomes(sidesave.history(run)) == [(5, "unknown")]
    with sidesave.Checkpointer(run) as ckpt:
        assert (ckpt.recovered, ckpt.removed) == (("step-00000005",), ())
        eventually(ckpt.history, (5, "recovered"))
    [record] = sidesave.history(run)
    assert (record.outcome, record.save_id, record.sequence, record.tries) == ("recovered", 1, 1, 1)


def test_what_was_recovered_without_its_record_is_in_the_history_all_the_same(
    run: Path, orders: Orders, traces: Traces
):
    _kill_both(run, traces, orders, starting_at="os.rename")
    (run / HISTORY_FILE).unlink()
    save_steps(run, 6)
    records = sidesave.history(run)
    assert outcomes(records) == [(5, "recovered"), (6, "committed")]
    assert records[0].called_s is not None
    assert records[0].nbytes is not None


def test_a_commit_that_nobody_was_left_to_write_down_is_known_when_the_checkpoint_is_long_gone(
    run: Path, orders: Orders, traces: Traces
):
    _kill_both(run, traces, orders, starting_at="os.rename", after=1)
    assert "saving" in (run / HISTORY_FILE).read_text()
    assert "committed" not in (run / HISTORY_FILE).read_text()
    assert outcomes(sidesave.history(run)) == [(5, "committed")]
    with sidesave.Checkpointer(run) as ckpt:
        assert (ckpt.recovered, ckpt.removed) == ((), ())
        ckpt.save(6, a_state(6))
    shutil.rmtree(run / "step-00000005")
    assert outcomes(sidesave.history(run)) == [(5, "committed"), (6, "committed")]
    assert only(sidesave.history(run), 5).tries == 1


def test_a_save_whose_trainer_was_killed_while_it_staged_has_failed(
    run: Path, orders: Orders, traces: Traces
):
    with Trainer(traces, "hold_while_staging", run) as trainer:
        [pid] = trainer.expect("ready")
        with pidfd_of(int(pid)) as pidfd:
            trainer.go_on()
            trainer.expect("copying")
            trainer.kill()
            await_end(pidfd)
    [record] = sidesave.history(run)
    assert (record.step, record.outcome) == (5, "failed")


def test_a_failed_save_that_turns_out_to_be_committed_is_told_as_committed(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        info = ckpt.save(1, a_state(1)).committed.result()
    stalled = a_record(
        1, "failed", info.session, sequence=info.sequence, error="WriteStalledError", message="late"
    )
    (run / HISTORY_FILE).write_bytes(
        stalled.to_line() + replace(stalled, save_id=2, sequence=7).to_line()
    )
    assert outcomes(sidesave.history(run)) == [(1, "committed"), (1, "failed")]


# The log itself -----------------------------------------------------------------------------------


def test_damage_costs_the_lines_it_hits_and_no_more(run: Path):
    save_steps(run, 1, 2, 3)
    log = run / HISTORY_FILE
    lines = [line for line in log.read_bytes().split(b"\n") if b'"step":2' not in line]
    torn = lines[-2][: len(lines[-2]) // 2]
    log.write_bytes(
        b"\n".join([b"\0" * 4096, *lines, b'{"step":9}', b"\xff\xfe garbage", b"[" * 100_000, torn])
    )
    assert outcomes(sidesave.history(run)) == [(1, "committed"), (3, "committed")]
    save_steps(run, 4)
    assert outcomes(sidesave.history(run)) == [(1, "committed"), (3, "committed"), (4, "committed")]


@pytest.mark.parametrize("obstacle", ["directory", "link", "dangling link", "pipe"])
def test_a_log_that_cannot_be_written_fails_no_save(obstacle: str, run: Path, tmp_path: Path):
    run.mkdir()
    target = tmp_path / "precious"
    if obstacle == "link":
        target.write_text("unchanged")
    match obstacle:
        case "directory":
            (run / HISTORY_FILE).mkdir()
        case "pipe":
            os.mkfifo(run / HISTORY_FILE)
        case _:
            (run / HISTORY_FILE).symlink_to(target)
    with sidesave.Checkpointer(run) as ckpt:
        for step in (1, 2):
            ckpt.save(step, a_state(step)).committed.result()
        assert outcomes(ckpt.history()) == [(1, "committed"), (2, "committed")]
    assert sidesave.history(run) == []
    assert target.exists() is (obstacle == "link")
    assert obstacle != "link" or target.read_text() == "unchanged"


@pytest.mark.root
def test_a_read_only_log_fails_no_save(run: Path):
    run.mkdir()
    log = run / HISTORY_FILE
    log.touch()
    if subprocess.run(["mount", "--bind", log, log]).returncode:
        pytest.skip("cannot mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", log], check=True)
        with sidesave.Checkpointer(run) as ckpt:
            ckpt.save(1, a_state(1)).committed.result()
            assert outcomes(ckpt.history()) == [(1, "committed")]
    finally:
        subprocess.run(["umount", log], check=True)
    assert log.read_bytes() == b""


@pytest.mark.root
def test_lines_that_a_full_disk_refuses_are_written_once_there_is_room(
    mount: Callable[..., Path], caplog: pytest.LogCaptureFixture
):
    small = mount("-t", "tmpfs", "-o", "size=1m", "none")
    storage = PosixStorage(str(small))
    log = HistoryLog(storage)
    log.append(a_record(0))
    filler = small / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    for step in range(1, 200):
        log.append(a_record(step))
    assert len(read_history(str(small))) < 200
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "it complains once"
    filler.unlink()
    log.append(a_record(200))
    log.close()
    storage.close()
    assert [record.step for record in read_history(str(small))] == list(range(201))


def test_the_log_stays_small_and_keeps_the_newest(tmp_path: Path):
    log = HistoryLog(PosixStorage(str(tmp_path)))
    largest = 0
    for step in range(2000):
        log.append(a_record(step, called_s=float(step)))
        log.append(a_record(step, tries=1))
        log.append(a_record(step, "failed", error="NoSpaceError", message="x" * 400))
        if step % 20 == 0:
            largest = max(largest, (tmp_path / HISTORY_FILE).stat().st_size)
    log.close()
    assert MAX_NBYTES // 2 < largest < MAX_NBYTES + 1000
    records = read_history(str(tmp_path))
    assert [record.step for record in records] == list(range(records[0].step, 2000))
    assert 1000 < len(records) < 2000
    assert {
        (record.outcome, record.tries, record.called_s == record.step) for record in records
    } == {("failed", 1, True)}
    assert [path.name for path in tmp_path.iterdir()] == [HISTORY_FILE]


def test_a_log_that_cannot_be_made_smaller_is_still_read_and_written(tmp_path: Path):
    (tmp_path / f"{HISTORY_FILE}.new").mkdir()
    log = HistoryLog(PosixStorage(str(tmp_path)))
    for step in range(7000):
        log.append(a_record(step, "failed", message="x" * 100))
    log.close()
    assert read_history(str(tmp_path))[-1].step == 6999


def test_a_log_that_was_removed_begins_anew(tmp_path: Path):
    log = HistoryLog(PosixStorage(str(tmp_path)))
    log.append(a_record(1))
    (tmp_path / HISTORY_FILE).unlink()
    log.append(a_record(2))
    log.close()
    assert [record.step for record in read_history(str(tmp_path))] == [2]


def test_there_is_no_history_where_there_is_no_run(tmp_path: Path):
    assert sidesave.history(tmp_path) == []
    with pytest.raises(CheckpointNotFoundError):
        sidesave.history(tmp_path / "nowhere")


def test_a_run_that_was_copied_elsewhere_has_its_history(run: Path, tmp_path: Path):
    with sidesave.Checkpointer(run) as ckpt:
        ckpt.save(1, a_state(1)).committed.result()
        shutil.copytree(run, tmp_path / "copy")
    assert outcomes(sidesave.history(tmp_path / "copy")) == [(1, "committed")]


# Records ------------------------------------------------------------------------------------------

SECONDS = st.none() | st.floats(0, 1e9)
RECORDS = st.builds(
    SaveRecord,
    step=st.integers(0, 10**18),
    session=st.sampled_from([OLD, NEW]),
    outcome=st.sampled_from(
        ["saving", "unknown", "skipped", "failed", "removed", "committed", "recovered"]
    ),
    save_id=st.none() | st.integers(0, 1 << 40),
    sequence=st.none() | st.integers(0, 1 << 40),
    error=st.none() | st.text(max_size=20),
    message=st.none() | st.text(max_size=100),
    errno=st.none() | st.integers(0, 200),
    path=st.none() | st.text(max_size=100),
    nbytes=st.none() | st.integers(0, 1 << 60),
    called_s=SECONDS,
    stall_s=SECONDS,
    staged_s=SECONDS,
    written_s=SECONDS,
    committed_s=SECONDS,
    tries=st.integers(0, 9),
)


@given(RECORDS)
def test_a_record_comes_back_from_its_line(record: SaveRecord):
    line = record.to_line()
    assert line.count(b"\n") == 2
    assert SaveRecord.from_line(line.strip(b"\n")) == record


@given(RECORDS, st.data())
def test_a_damaged_line_is_no_record(record: SaveRecord, data: st.DataObject):
    line = bytearray(record.to_line().strip(b"\n"))
    position = data.draw(st.integers(0, len(line) - 1))
    line[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match=r"."):
        SaveRecord.from_line(bytes(line))


@pytest.mark.parametrize(
    "values",
    [
        {"step": -1},
        {"step": True},
        {"step": None},
        {"session": "../../etc"},
        {"outcome": "fine"},
        {"outcome": ["failed"]},
        {"called_s": 1e300},
        {"called_s": float("nan")},
        {"tries": 1 << 63},
        {"message": 5},
        {"nbytes": 1.5},
    ],
)
def test_a_line_of_nonsense_is_no_record_though_its_digest_is_right(values: dict[str, Any]):
    body = json.dumps({"step": 1, "session": OLD, "outcome": "failed", **values}).encode()
    with pytest.raises(ValueError, match=r"."):
        SaveRecord.from_line(xxhash.xxh3_64_hexdigest(body).encode() + b" " + body)


def test_a_line_of_a_later_version_is_read_as_far_as_it_is_known():
    body = b'{"step":1,"session":"%s","outcome":"failed","weather":"fine"}' % OLD.encode()
    assert SaveRecord.from_line(
        xxhash.xxh3_64_hexdigest(body).encode() + b" " + body
    ) == SaveRecord(step=1, session=OLD, outcome="failed")


@given(st.lists(RECORDS, max_size=30))
def test_combining_what_was_combined_changes_nothing(records: list[SaveRecord]):
    once = combine(records)
    assert len(once) <= len(records)
    assert {record.session for record in once} == {record.session for record in records}


def test_outcomes_give_way_only_to_what_is_more_certain():
    cases: dict[tuple[Any, ...], str] = {
        ("saving", "committed"): "committed",
        ("saving", "failed", "saving"): "failed",
        ("saving", "unknown", "committed"): "committed",
        ("failed", "removed"): "failed",
        ("unknown", "removed"): "removed",
        ("failed", "recovered"): "recovered",
        ("committed", "failed"): "committed",
        ("committed", "recovered"): "committed",
        ("skipped", "saving"): "skipped",
    }
    for lines, expected in cases.items():
        [record] = combine(a_record(1, outcome, error=f"{outcome} error") for outcome in lines)
        assert (record.outcome, record.error) == (expected, f"{expected} error"), lines


def test_lines_of_recovery_find_the_save_they_are_about():
    first, second = (
        a_record(5, "committed", save_id=1, sequence=1),
        a_record(5, "saving", save_id=2, sequence=2),
    )
    removed = SaveRecord(step=5, session=OLD, outcome="removed")
    restored = SaveRecord(step=5, session=OLD, outcome="recovered", sequence=1)
    other = SaveRecord(step=5, session=NEW, outcome="removed")
    found = combine([first, second, removed, restored, other])
    assert [(record.save_id, record.outcome) for record in found] == [
        (1, "committed"),
        (2, "removed"),
        (None, "removed"),
    ]


# What a daemon is told ----------------------------------------------------------------------------


NOTE = protocol.Note(
    attempt=1,
    save_id=1,
    step=1,
    outcome="failed",
    sequence=None,
    error=None,
    message=None,
    errno=None,
    called_s=1.0,
    staged_s=None,
)


@pytest.mark.parametrize(
    "values", [{"outcome": "fine"}, {"step": -1}, {"called_s": float("inf")}, {"errno": -5}]
)
def test_a_note_of_nonsense_is_refused(values: dict[str, Any]):
    lines: list[SaveRecord] = []
    recorder = log.Recorder(OLD, lines.append)
    recorder.note(NOTE)
    with pytest.raises(ProtocolError):
        recorder.note(replace(NOTE, **values))
    assert outcomes(lines) == [(1, "failed")]


def test_a_note_is_read_before_the_trainers_end_that_was_sent_after_it():
    """They take two channels, and the daemon may look at the second one first."""
    lines: list[SaveRecord] = []
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    with ours, theirs:
        server = Server(theirs)
        server._jobs, server._history = jobs.Jobs(1), log.Recorder(OLD, lines.append)
        ours.send(wire.encode(NOTE))
        server._accept(protocol.Drain(attempt=1))
    assert outcomes(lines) == [(1, "failed")]


def test_the_history_keeps_no_handle_and_no_exception_alive(run: Path):
    with sidesave.Checkpointer(run, failures=sidesave.FailureOptions(tolerated=5)) as ckpt:
        (run / "step-00000002").mkdir()
        handle = ckpt.save(1, a_state(1))
        handle.committed.result()
        gone = weakref.ref(handle)
        with pytest.warns(RuntimeWarning, match="step 2 failed"):
            error = ckpt.save(2, a_state(2)).committed.exception()
        error_gone = weakref.ref(error)
        ckpt.save(3, a_state(3)).committed.result()
        del handle, error
        gc.collect()
        assert gone() is None
        assert error_gone() is None
        assert outcomes(ckpt.history()) == [(1, "committed"), (2, "failed"), (3, "committed")]


def test_the_log_goes_with_the_directory_that_was_opened(tmp_path: Path):
    (tmp_path / "run").mkdir()
    with contextlib.closing(PosixStorage(str(tmp_path / "run"))) as storage:
        log = HistoryLog(storage)
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        log.append(a_record(1))
        assert [record.step for record in log.records()] == [1]
        log.close()
    assert list((tmp_path / "run").iterdir()) == []
    assert [record.step for record in read_history(str(tmp_path / "moved"))] == [1]


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += atoll(getenv("CLOCK_AHEAD_S"));
    return failed;
}
"""


@pytest.mark.slow
def test_clock_before_1970_fails_no_save_and_drops_no_line(
    run: Path, tmp_path: Path, traces: Traces
):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True
    )
    shown_s = -10 * 86_400
    ahead_s = str(shown_s - int(time.time()))
    with Trainer(
        traces, "save_at", run, shown_s, LD_PRELOAD=str(library), CLOCK_AHEAD_S=ahead_s
    ) as trainer:
        [line] = trainer.lines()
        assert trainer.end() == 0, trainer.complaints()
    assert line == "committed 0.0 0.0"
    [info] = catalog_of(str(run)).all()
    assert info.created_s == 0.0
    check(run, 1)


@pytest.mark.parametrize(
    ("shown_s", "noted_s"), [(-5.0, 0.0), (5.0, 5.0), (4e11, 253_402_214_399.0)]
)
def test_time_of_a_record_is_one_that_can_be_shown(
    monkeypatch: pytest.MonkeyPatch, shown_s: float, noted_s: float
):
    monkeypatch.setattr(time, "time", lambda: shown_s)
    assert save_record.wall_clock_s() == noted_s
    assert console.when(noted_s)
    assert console.when(shown_s)
