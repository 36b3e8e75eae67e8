"""The cost of saves: statistics, log lines, records and Prometheus text of real saves."""

import gc
import logging
import math
import os
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import DEADLINE_S, Orders, a_state

import sidesave
from sidesave.client.reporting.prometheus import Collector, prometheus_text, write_prometheus_file
from sidesave.client.reporting.stats import (
    BOUNDS_S,
    SaveStats,
    describe,
    format_bytes,
    format_seconds,
)
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.saving.save import Save
from sidesave.errors import (
    CommitUnknownError,
    DaemonDiedError,
    InvalidArgumentError,
    NoSpaceError,
    SidesaveError,
)
from sidesave.stager.copy.copier import StagingCopy
from sidesave.writer_daemon.save_record import PHASES, SaveRecord

STATE = {"x": torch.zeros(1 << 18)}


class Told:
    """An observer that keeps the records of saves that have ended, and can be waited for."""

    def __init__(self) -> None:
        self.records: list[SaveRecord] = []
        self._changed = threading.Condition()

    def __call__(self, record: SaveRecord) -> None:
        with self._changed:
            if record.outcome != "saving":
                self.records.append(record)
                self._changed.notify_all()

    def wait(self, count: int) -> list[SaveRecord]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.records) >= count, DEADLINE_S)
            return list(self.records)


def a_save(
    step: int, *phases: str, ago_s: float = 0.0, error: SidesaveError | None = None, **facts: Any
) -> SaveRecord:
    """The record of a save that has reached these phases, which needs no daemon."""
    save = Save(
        SaveHandle(step), StagingCopy.__new__(StagingCopy), step=step, sequence=step, error=error
    )
    save.called -= ago_s
    save.called_s -= ago_s
    for phase in phases:
        save.reach(phase)
    return replace(save.record("session", "/run"), **facts)


def skipped(step: int, ago_s: float = 0.0) -> SaveRecord:
    return a_save(step, ago_s=ago_s, outcome="skipped")


# Saves --------------------------------------------------------------------------------------------


def test_every_save_is_one_record_one_line_and_part_of_the_sums(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="sidesave.client.reporting.stats")
    told, before, stats = Told(), time.time(), SaveStats()
    with sidesave.Checkpointer(tmp_path, observers=[stats, told]) as checkpointer:
        handles = [checkpointer.save(step, STATE) for step in range(3)]
        infos = [handle.committed.result() for handle in handles]
        records = told.wait(3)
        history = checkpointer.history()
    assert [(record.step, record.outcome, record.error) for record in records] == [
        (step, "committed", None) for step in range(3)
    ]
    assert records == stats.records()
    for record, info, logged in zip(records, infos, history, strict=True):
        assert (
            record.staged_s is not None
            and record.written_s is not None
            and record.committed_s is not None
        )
        assert record.stall_s is not None and 0 < record.stall_s
        assert record.staged_s <= record.written_s <= record.committed_s == record.ended_s
        assert record.nbytes == info.nbytes
        # with the headers of this rank's files
        assert record.rank_nbytes is not None and record.rank_nbytes >= 1 << 20
        assert record.called_s == info.created_s
        assert (record.called_s or 0) + record.committed_s >= before
        assert replace(logged, tries=record.tries) == record
    summary = stats.summary()
    assert summary.counts == {"committed": 3, "failed": 0, "skipped": 0, "unknown": 0}
    assert summary.under_way == 0
    assert summary.nbytes == sum(record.rank_nbytes or 0 for record in records)
    assert (summary.staging_nbytes or 0) >= 1 << 20
    for phase in PHASES:
        seconds = sorted(record.seconds(phase) or 0 for record in records)
        spread = summary.spread(phase)
        assert (spread.count, spread.max_s, spread.median_s) == (3, seconds[2], seconds[1])
        assert spread.total_s == pytest.approx(sum(seconds))
        assert sum(spread.classes) == 3
    assert summary.stall_share == pytest.approx(summary.stall_s / summary.wall_s)
    assert (
        summary.bandwidth
        == sorted((record.rank_nbytes or 0) / (record.written_s or 1) for record in records)[1]
    )
    assert summary.last_committed_step == 2
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name == "sidesave.client.reporting.stats"
    ]
    assert [line.partition(":")[0] for line in lines] == [
        f"step {step} committed" for step in range(3)
    ]
    first = records[0]
    times = [f"{phase} {format_seconds(first.seconds(phase) or 0)}" for phase in PHASES]
    assert (
        lines[0]
        == f"step 0 committed: {', '.join([format_bytes(infos[0].nbytes), *times])}"
        == describe(first)
    )
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_observers_hear_of_a_save_when_it_begins_and_when_it_has_ended(tmp_path: Path):
    heard: list[tuple[int, str, bool]] = []

    def observe(record: SaveRecord) -> None:
        heard.append(
            (record.step, record.outcome, threading.current_thread() is threading.main_thread())
        )

    with sidesave.Checkpointer(tmp_path, observers=(observe,)) as checkpointer:
        checkpointer.save(1, STATE)
        checkpointer.wait()  # returns after the observers
        assert heard == [(1, "saving", True), (1, "committed", False)]
        checkpointer.save(2, STATE, blocking=True)  # likewise
        assert heard[2:] == [(2, "saving", True), (2, "committed", False)]


def test_a_synchronous_save_stalls_until_it_is_committed(tmp_path: Path):
    stats = SaveStats()
    with sidesave.Checkpointer(tmp_path, observers=[stats]) as checkpointer:
        checkpointer.save(1, STATE, blocking=True)
        [record] = stats.records()
    assert (
        record.committed_s is not None
        and record.stall_s is not None
        and record.committed_s <= record.stall_s
    )


def test_a_save_under_way_is_counted_as_such_until_it_ends(tmp_path: Path, orders: Orders):
    stats = SaveStats()
    with sidesave.Checkpointer(tmp_path, observers=[stats]) as checkpointer:
        orders.give("hold", after=2)
        checkpointer.save(1, STATE)
        orders.obeyed()
        assert (stats.summary().under_way, stats.records()) == (1, [])
        orders.release()
        checkpointer.wait()
        assert (stats.summary().under_way, stats.summary().counts["committed"]) == (0, 1)


def test_a_failed_save_is_logged_at_warning_level_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    told, stats = Told(), SaveStats()
    with sidesave.Checkpointer(tmp_path, observers=[stats, told]) as checkpointer:
        (tmp_path / "step-00000001").mkdir()
        checkpointer.save(1, STATE)
        with pytest.raises(sidesave.errors.CheckpointExistsError):
            checkpointer.wait()
        checkpointer.save(2, STATE).committed.result()
        first, second = told.wait(2)
    assert (first.outcome, second.outcome) == ("failed", "committed")
    assert first.error == "CheckpointExistsError"
    assert first.message is not None and first.message.startswith("the step exists")
    assert first.staged_s is not None
    assert first.committed_s is None and first.nbytes is None
    [line] = [
        record
        for record in caplog.records
        if record.levelno == logging.WARNING and "stats" in record.name
    ]
    assert line.getMessage().startswith("step 1 failed: 1.05 MB, stall ")
    assert "CheckpointExistsError" in line.getMessage()
    summary = stats.summary()
    assert (summary.counts["failed"], summary.committed.count, summary.stall.count) == (1, 1, 2)
    assert summary.nbytes == second.rank_nbytes


def test_a_skipped_save_is_counted_with_its_stall(
    tmp_path: Path, orders: Orders, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="sidesave.client.reporting.stats")
    told, stats = Told(), SaveStats()
    staging = sidesave.StagingOptions(slots=1, on_busy="skip")
    with sidesave.Checkpointer(tmp_path, staging=staging, observers=[stats, told]) as checkpointer:
        orders.give("hold", after=2)
        checkpointer.save(1, STATE)
        orders.obeyed()
        assert checkpointer.save(2, STATE).skipped
        assert [(record.step, record.outcome) for record in told.wait(1)] == [(2, "skipped")]
        orders.release()
        checkpointer.wait()
    assert stats.summary().counts == {"committed": 1, "failed": 0, "skipped": 1, "unknown": 0}
    assert stats.summary().stall.count == 2
    assert caplog.messages[0].startswith("step 2 skipped: all slots were busy, stall ")


@pytest.mark.parametrize(
    "error", [CommitUnknownError(5, "who knows", "run"), DaemonDiedError("it died")]
)
def test_a_save_of_which_nobody_can_tell_is_unknown(error: SidesaveError):
    stats = SaveStats()
    stats(a_save(1, "staged", error=error))
    assert stats.summary().counts["unknown"] == 1


def test_a_call_that_raises_is_a_failed_save_and_lost_time(tmp_path: Path):
    stats = SaveStats()
    with sidesave.Checkpointer(tmp_path, observers=[stats]) as checkpointer:
        checkpointer.save(1, STATE, blocking=True)
        with pytest.raises(sidesave.errors.CheckpointExistsError):
            checkpointer.save(1, STATE)
        with pytest.raises(sidesave.errors.UnsupportedValueError):
            checkpointer.save(2, {"x": object()})
        _, exists, unsupported = stats.records()
    assert (exists.step, exists.outcome, exists.error) == (1, "failed", "CheckpointExistsError")
    assert (unsupported.step, unsupported.outcome, unsupported.error) == (
        2,
        "failed",
        "UnsupportedValueError",
    )
    assert unsupported.stall_s is not None and unsupported.stall_s == unsupported.ended_s
    assert stats.summary().under_way == 0


# Observers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_an_observer_that_raises_is_logged_and_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: type[BaseException]
):
    told, stats = Told(), SaveStats()

    def broken(record: SaveRecord) -> None:
        if record.outcome != "saving" or error is ZeroDivisionError:
            raise error(record.step)

    with sidesave.Checkpointer(tmp_path, observers=[broken, stats, told]) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, STATE).committed.result()
        told.wait(2)
        checkpointer.wait()
    assert stats.summary().counts["committed"] == 2
    raised = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert raised == [error] * (4 if error is ZeroDivisionError else 2)


def test_an_interrupt_in_an_observer_ends_the_call_and_nothing_is_left(tmp_path: Path):
    stats = SaveStats()

    def interrupt(record: SaveRecord) -> None:
        if record.outcome == "saving" and record.step == 1:
            raise KeyboardInterrupt

    with sidesave.Checkpointer(tmp_path, observers=[stats, interrupt]) as checkpointer:
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1, STATE)
        checkpointer.save(2, STATE, blocking=True)
        assert [(record.step, record.outcome) for record in stats.records()] == [
            (1, "failed"),
            (2, "committed"),
        ]
        assert stats.summary().under_way == 0


def test_the_statistics_that_a_later_observer_asks_for_include_its_save(tmp_path: Path):
    counts: list[int] = []
    stats = SaveStats()

    def count(record: SaveRecord) -> None:
        counts.append(stats.summary().counts["committed"])

    with sidesave.Checkpointer(tmp_path, observers=[stats, count]) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, STATE, blocking=True)
    assert counts == [0, 1, 1, 2]


@pytest.mark.parametrize("observers", [print, [1], "ab", None])
def test_observers_that_are_no_functions_are_refused(tmp_path: Path, observers: Any):
    for kind in (sidesave.Checkpointer, sidesave.CheckpointManager):
        state = [{"x": 1}] if kind is sidesave.CheckpointManager else []
        with pytest.raises(InvalidArgumentError, match="observers must be a sequence of functions"):
            kind(tmp_path / "run", *state, observers=observers)


# Bounds -------------------------------------------------------------------------------------------


def test_sums_are_of_the_whole_run_while_single_saves_are_forgotten():
    stats = SaveStats()
    for step in range(1500):
        stats(skipped(step, ago_s=1))
    assert [record.step for record in stats.records()] == list(range(500, 1500))
    assert (stats.summary().counts["skipped"], stats.summary().stall.count) == (1500, 1500)
    assert stats.summary().stall_s >= 1500
    assert stats.summary().wall_s >= 1


def test_an_idle_or_new_run_has_figures_too():
    summary = SaveStats().summary()
    assert (summary.stall_share, summary.bandwidth, summary.last_committed_step) == (0, None, None)
    assert str(summary).startswith("no saves; 0 B, stall 0 ms")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1_418_000_000, "1.42 GB"),
        (999_999, "1000 kB"),
        (10**20, "100000 PB"),
    ],
)
def test_bytes_as_text(nbytes: int, text: str):
    assert format_bytes(nbytes) == text


def test_seconds_as_text():
    assert [format_seconds(s) for s in (0.0, 0.0213, 0.52, 83.1, 12345)] == [
        "0 ms",
        "21.3 ms",
        "0.52 s",
        "83.10 s",
        "12345.00 s",
    ]


# Prometheus ---------------------------------------------------------------------------------------


def a_run() -> SaveStats:
    """One save of each outcome, and durations on both ends of the classes."""
    stats = SaveStats()
    for step, stall_s in enumerate((0.0, 0.001, 7, 5000)):
        stats(skipped(step, stall_s))
    stats(a_save(5, "staged", error=NoSpaceError(28, "full", "run")))
    stats(a_save(6, "staged", error=DaemonDiedError("it died")))
    phases = ("staged", "written", "committed")
    stats(
        a_save(
            7, *phases, outcome="committed", nbytes=12345, rank_nbytes=12345, staging_nbytes=54321
        )
    )
    return stats


def parsed(text: str) -> dict[str, Any]:
    parser = pytest.importorskip("prometheus_client.parser")
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def value(family: Any, suffix: str = "", **labels: str) -> float:
    [found] = [
        s.value for s in family.samples if s.name == family.name + suffix and s.labels == labels
    ]
    return found


def by_name(family: Any) -> list[Any]:
    return sorted(
        (sample.name, sorted(sample.labels.items()), sample.value) for sample in family.samples
    )


def test_prometheus_reads_the_text_and_finds_every_figure():
    stats = a_run()
    labels = {"run": 'a "quoted"\\\nname', "rank": "3"}
    families = parsed(prometheus_text(stats.summary(), labels))
    for outcome, count in stats.summary().counts.items():
        assert value(families["sidesave_saves"], "_total", **labels, outcome=outcome) == count
    assert families["sidesave_saves"].type == "counter"
    assert value(families["sidesave_checkpoint_bytes"], "_total", **labels) == 12345
    assert value(families["sidesave_last_committed_step"], **labels) == 7
    assert value(families["sidesave_last_commit_timestamp_seconds"], **labels) == pytest.approx(
        time.time(), abs=60
    )
    assert value(families["sidesave_saves_under_way"], **labels) == 0
    assert value(families["sidesave_staging_bytes"], **labels) == 54321
    assert value(families["sidesave_stall_ratio"], **labels) == pytest.approx(1, abs=0.01)
    for phase in PHASES:
        family, spread = families[f"sidesave_save_{phase}_seconds"], stats.summary().spread(phase)
        assert family.type == "histogram"
        assert (
            value(family, "_count", **labels)
            == spread.count
            == value(family, "_bucket", **labels, le="+Inf")
        )
        assert value(family, "_sum", **labels) == pytest.approx(spread.total_s)
        buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
        assert buckets == sorted(buckets) and len(buckets) == len(BOUNDS_S) + 1
    stall = families["sidesave_save_stall_seconds"]
    assert value(stall, "_bucket", **labels, le="5") < value(stall, "_bucket", **labels, le="10")
    assert value(stall, "_bucket", **labels, le="1000") == value(stall, "_count", **labels) - 1
    assert all(family.documentation for family in families.values())


def test_what_is_not_known_yet_has_no_sample():
    families = parsed(prometheus_text(SaveStats().summary()))
    assert families["sidesave_last_committed_step"].samples == []
    assert value(families["sidesave_saves"], "_total", outcome="failed") == 0


def test_a_registry_of_prometheus_client_serves_the_same_figures():
    registry = pytest.importorskip("prometheus_client").CollectorRegistry()
    stats = a_run()
    Collector(stats.summary, {"rank": "0"}).register(registry)
    assert (
        registry.get_sample_value("sidesave_saves_total", {"rank": "0", "outcome": "skipped"}) == 4
    )
    served = pytest.importorskip("prometheus_client").generate_latest(registry).decode()
    ours = parsed(prometheus_text(stats.summary(), {"rank": "0"}))
    for name, family in parsed(served).items():
        known = {"sidesave_stall_ratio"}  # which goes down as time goes on
        assert name in known or by_name(family) == by_name(ours[name])
    stats(skipped(9))
    assert (
        registry.get_sample_value("sidesave_saves_total", {"rank": "0", "outcome": "skipped"}) == 5
    )


def test_the_file_is_replaced_whole_and_readable_for_the_exporter(tmp_path: Path):
    path = tmp_path / "sidesave.prom"
    path.write_text("old")
    with path.open() as old:
        write_prometheus_file(path, a_run().summary())
        assert old.read() == "old"
    assert "sidesave_saves" in parsed(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in tmp_path.iterdir()] == ["sidesave.prom"]


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "sidesave.prom").mkdir()
    with pytest.raises(IsADirectoryError):
        write_prometheus_file(tmp_path / "sidesave.prom", SaveStats().summary())
    with pytest.raises(FileNotFoundError):
        write_prometheus_file(tmp_path / "nowhere" / "sidesave.prom", SaveStats().summary())
    assert [entry.name for entry in tmp_path.iterdir()] == ["sidesave.prom"]


@pytest.mark.parametrize("name", ["", "le", "outcome", "a-b", "1st", "__name__", "größe"])
def test_a_label_that_prometheus_would_refuse_is_refused(name: str):
    with pytest.raises(InvalidArgumentError, match="label"):
        prometheus_text(SaveStats().summary(), {name: "x"})


def test_the_text_needs_no_library_and_a_collector_names_its_extra():
    code = """
import sys
sys.modules["prometheus_client"] = None
from sidesave.client.reporting.prometheus import Collector, prometheus_text
from sidesave.client.reporting.stats import SaveStats
assert "sidesave_saves_total" in prometheus_text(SaveStats().summary())
try: Collector(SaveStats().summary)
except ModuleNotFoundError as error: assert "pip install 'sidesave[metrics]'" in str(error)
else: raise AssertionError
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


# Many threads -------------------------------------------------------------------------------------


def test_no_save_is_lost_or_counted_twice_when_saves_end_in_many_threads():
    stats = SaveStats()
    for step in range(300):
        stats(a_save(step))
    assert stats.summary().under_way == 300
    start = threading.Barrier(3)

    def finish(first: int) -> None:
        start.wait(DEADLINE_S)
        for step in range(first, 300, 3):
            stats(a_save(step, "staged", "written", "committed", outcome="committed"))

    threads = [threading.Thread(target=finish, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(record.step for record in stats.records()) == list(range(300))
    assert (stats.summary().counts["committed"], stats.summary().under_way) == (300, 0)
    assert not math.isnan(stats.summary().stall_share)


def test_records_hold_no_state_of_the_run(tmp_path: Path):
    told, stats = Told(), SaveStats()
    with sidesave.Checkpointer(tmp_path, observers=[stats, told]) as checkpointer:
        handle = checkpointer.save(1, a_state(1))
        handle.committed.result()
        told.wait(1)
        gone = weakref.ref(handle)
        del handle
    del checkpointer
    gc.collect()
    assert gone() is None
