"""What saves cost, as statistics, log lines, events and Prometheus text tell it of real saves."""

import gc
import logging
import math
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import DEADLINE_S, Orders, a_state

import sidesave
from sidesave.client.reporting.prometheus import Collector, prometheus_text, write_prometheus_file
from sidesave.client.reporting.stats import (
    BOUNDS_S,
    PHASES,
    SaveEvent,
    SaveStats,
    format_bytes,
    format_seconds,
    seconds_of,
)
from sidesave.client.saving.handle import SaveHandle
from sidesave.errors import CommitUnknownError, DaemonDiedError, InvalidArgumentError, NoSpaceError

STATE = {"x": torch.zeros(1 << 18)}


class Told:
    """A callback that can be waited for."""

    def __init__(self) -> None:
        self.events: list[SaveEvent] = []
        self._changed = threading.Condition()

    def __call__(self, event: SaveEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(self, count: int) -> list[SaveEvent]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.events) >= count, DEADLINE_S)
            return list(self.events)


def save(
    stats: SaveStats, checkpointer: sidesave.Checkpointer, step: int, state: Any = STATE, **how: Any
) -> SaveHandle:
    called = time.monotonic()
    handle = checkpointer.save(step, state, **how)
    stats.watch(handle, called, time.monotonic())
    return handle


def ended(stats: SaveStats, step: int, error: Exception | None = None) -> SaveHandle:
    """Watch a handle to its end, which needs no daemon."""
    handle, now = SaveHandle(step), time.monotonic()
    stats.watch(handle, now, now)
    handle.staged.resolve(None)
    if error is not None:
        handle.fail(error)
    return handle


# Saves -----------------------------------------------------------------------------------------------------------


def test_every_save_is_one_event_one_line_and_part_of_the_sums(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="sidesave.client.reporting.stats")
    told, before = Told(), time.time()
    stats = SaveStats([told])
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        handles = [save(stats, checkpointer, step) for step in range(3)]
        infos = [handle.committed.result() for handle in handles]
        events = told.wait(3)
    assert [(event.step, event.outcome, event.error) for event in events] == [(s, "committed", None) for s in range(3)]
    assert events == stats.events()
    for event, info in zip(events, infos, strict=True):
        assert event.staged_s is not None and event.written_s is not None and event.committed_s is not None
        assert 0 < event.stall_s
        assert event.staged_s <= event.written_s <= event.committed_s == event.ended_s
        assert event.checkpoint_nbytes == info.nbytes
        assert event.nbytes >= 1 << 20  # this rank's files, their headers included
        assert event.called_s == pytest.approx(info.created_s, abs=1)
        assert event.called_s + event.committed_s >= before
    summary = stats.summary()
    assert summary.counts == {"committed": 3, "failed": 0, "skipped": 0, "unknown": 0}
    assert summary.under_way == 0
    assert summary.nbytes == sum(event.nbytes for event in events)
    for phase in PHASES:
        seconds = sorted(seconds_of(event, phase) or 0 for event in events)
        spread = summary.spread(phase)
        assert (spread.count, spread.max_s, spread.median_s) == (3, seconds[2], seconds[1])
        assert spread.total_s == pytest.approx(sum(seconds))
        assert sum(spread.classes) == 3
    assert summary.stall_share == pytest.approx(summary.stall_s / summary.wall_s)
    assert summary.bandwidth == sorted(event.nbytes / (event.written_s or 0) for event in events)[1]
    assert summary.last_committed_step == 2
    lines = [record.getMessage() for record in caplog.records if record.name == "sidesave.client.reporting.stats"]
    assert [line.partition(":")[0] for line in lines] == [f"step {step} committed" for step in range(3)]
    first = events[0]
    times = [f"{phase} {format_seconds(seconds_of(first, phase) or 0)}" for phase in PHASES]
    assert lines[0] == f"step 0 committed: {', '.join([format_bytes(infos[0].nbytes), *times])}"
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_a_synchronous_save_stalls_until_it_is_committed(tmp_path: Path):
    told = Told()
    stats = SaveStats([told])
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        save(stats, checkpointer, 1, blocking=True)
    [event] = told.wait(1)
    assert event.committed_s is not None and event.committed_s <= event.stall_s


def test_a_save_under_way_is_counted_as_such_until_it_ends(tmp_path: Path, orders: Orders):
    told = Told()
    stats = SaveStats([told])
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        orders.give("hold", after=2)
        handle = save(stats, checkpointer, 1)
        orders.obeyed()
        assert (stats.summary().under_way, stats.events()) == (1, [])
        orders.release()
        handle.committed.result()
        told.wait(1)
    assert (stats.summary().under_way, stats.summary().counts["committed"]) == (0, 1)


def test_a_failed_save_is_told_at_warning_level_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    told = Told()
    stats = SaveStats([told])
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        (tmp_path / "step-00000001").mkdir()
        save(stats, checkpointer, 1)
        with pytest.raises(sidesave.errors.CheckpointExistsError):
            checkpointer.wait()
        save(stats, checkpointer, 2).committed.result()
        first, second = told.wait(2)
    assert (first.outcome, second.outcome) == ("failed", "committed")
    assert first.error is not None and first.error.startswith("CheckpointExistsError: the step exists")
    assert first.staged_s is not None
    assert first.committed_s is None and first.checkpoint_nbytes is None
    [line] = [record for record in caplog.records if record.levelno == logging.WARNING and "stats" in record.name]
    assert line.getMessage().startswith("step 1 failed: 1.05 MB, stall ")
    assert "CheckpointExistsError" in line.getMessage()
    summary = stats.summary()
    assert (summary.counts["failed"], summary.committed.count, summary.stall.count) == (1, 1, 2)
    assert summary.nbytes == second.nbytes


def test_a_skipped_save_is_counted_with_its_stall(tmp_path: Path, orders: Orders, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="sidesave.client.reporting.stats")
    told = Told()
    stats = SaveStats([told])
    with sidesave.Checkpointer(tmp_path, slots=1, on_busy="skip") as checkpointer:
        orders.give("hold", after=2)
        handle = save(stats, checkpointer, 1)
        orders.obeyed()
        assert save(stats, checkpointer, 2).skipped
        assert [(event.step, event.outcome) for event in told.wait(1)] == [(2, "skipped")]
        orders.release()
        handle.committed.result()
        told.wait(2)
    assert stats.summary().counts == {"committed": 1, "failed": 0, "skipped": 1, "unknown": 0}
    assert stats.summary().stall.count == 2
    assert caplog.messages[0].startswith("step 2 skipped: all slots were busy, stall ")


@pytest.mark.parametrize("error", [CommitUnknownError(5, "who knows", "run"), DaemonDiedError("it died")])
def test_a_save_of_which_nobody_can_tell_is_unknown(error: Exception):
    stats = SaveStats()
    ended(stats, 1, error)
    assert stats.summary().counts["unknown"] == 1


def test_a_call_that_raises_is_a_failed_save_and_lost_time():
    stats = SaveStats()
    now = time.monotonic()
    stats.refused(7, NoSpaceError(28, "full", "run"), now - 2, now)
    [event] = stats.events()
    assert (event.step, event.outcome, event.stall_s) == (7, "failed", pytest.approx(2))
    assert event.error is not None and event.error.startswith("NoSpaceError")
    assert stats.summary().wall_s >= 2
    assert 0 < stats.summary().stall_share <= 1


def test_a_save_that_is_committed_before_it_is_said_to_be_staged_ends_once_and_whole():
    told = Told()
    stats = SaveStats([told])
    handle, now = SaveHandle(3), time.monotonic()
    stats.watch(handle, now, now)
    handle.written.resolve(None)
    handle.committed.resolve(sidesave.CheckpointInfo(3, "x", 1, "s", 1, None, 0.0))
    assert told.events == []
    handle.staged.resolve(None)
    [event] = told.events
    assert event.committed_s is not None and event.staged_s is not None
    assert event.outcome == "committed"


# Callbacks -------------------------------------------------------------------------------------------------------


def test_a_callback_that_raises_is_logged_and_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    told = Told()

    def broken(event: SaveEvent) -> None:
        raise ZeroDivisionError(event.step)

    stats = SaveStats([broken, told])
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            save(stats, checkpointer, step).committed.result()
        told.wait(2)
        checkpointer.wait()
    assert stats.summary().counts["committed"] == 2
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError] * 2


def test_the_statistics_that_a_callback_asks_for_include_its_save(tmp_path: Path):
    counts: list[int] = []
    told = Told()
    stats = SaveStats()
    stats.callbacks += [lambda event: counts.append(stats.summary().counts["committed"]), told]
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            save(stats, checkpointer, step)
            told.wait(step)
    assert counts == [1, 2]


# Bounds ----------------------------------------------------------------------------------------------------------


def test_sums_are_of_the_whole_run_while_single_saves_are_forgotten():
    stats = SaveStats()
    now = time.monotonic()
    for step in range(1500):
        stats.watch(SaveHandle(step, skipped=True), now - 1, now)
    assert [event.step for event in stats.events()] == list(range(500, 1500))
    assert (stats.summary().counts["skipped"], stats.summary().stall.count) == (1500, 1500)
    assert stats.summary().stall_s == pytest.approx(1500)


def test_a_failure_is_remembered_without_what_its_frames_hold():
    class Held:
        pass

    def fail(stats: SaveStats) -> weakref.ref[Held]:
        held = Held()
        try:
            raise NoSpaceError(28, "full", "run")
        except NoSpaceError as error:
            stats.refused(1, error, 0, 0)
        return weakref.ref(held)

    stats = SaveStats()
    held = fail(stats)
    gc.collect()
    assert held() is None
    assert stats.events()[0].error is not None


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


# Prometheus ------------------------------------------------------------------------------------------------------


def a_run() -> SaveStats:
    """One save of each outcome, and durations on both ends of the classes."""
    stats = SaveStats()
    now = time.monotonic()
    for step, stall_s in enumerate((0.0005, 0.001, 7, 5000)):
        stats.watch(SaveHandle(step, skipped=True), now - stall_s, now)
    ended(stats, 5, NoSpaceError(28, "full", "run"))
    ended(stats, 6, DaemonDiedError("it died"))
    handle = ended(stats, 7)
    handle.nbytes = 12345
    handle.written.resolve(None)
    handle.committed.resolve(sidesave.CheckpointInfo(7, "x", 12345, "s", 1, None, 0.0))
    return stats


def parsed(text: str) -> dict[str, Any]:
    parser = pytest.importorskip("prometheus_client.parser")
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def value(family: Any, suffix: str = "", **labels: str) -> float:
    [found] = [s.value for s in family.samples if s.name == family.name + suffix and s.labels == labels]
    return found


def by_name(family: Any) -> list[Any]:
    return sorted((sample.name, sorted(sample.labels.items()), sample.value) for sample in family.samples)


def test_prometheus_reads_the_text_and_finds_every_figure():
    stats = a_run()
    labels = {"run": 'a "quoted"\\\nname', "rank": "3"}
    families = parsed(prometheus_text(stats, labels))
    for outcome, count in stats.summary().counts.items():
        assert value(families["sidesave_saves"], "_total", **labels, outcome=outcome) == count
    assert families["sidesave_saves"].type == "counter"
    assert value(families["sidesave_checkpoint_bytes"], "_total", **labels) == 12345
    assert value(families["sidesave_last_committed_step"], **labels) == 7
    assert value(families["sidesave_last_commit_timestamp_seconds"], **labels) == pytest.approx(time.time(), abs=60)
    assert value(families["sidesave_saves_under_way"], **labels) == 0
    assert value(families["sidesave_stall_ratio"], **labels) == pytest.approx(1, abs=0.01)
    for phase in PHASES:
        family, spread = families[f"sidesave_save_{phase}_seconds"], stats.summary().spread(phase)
        assert family.type == "histogram"
        assert value(family, "_count", **labels) == spread.count == value(family, "_bucket", **labels, le="+Inf")
        assert value(family, "_sum", **labels) == pytest.approx(spread.total_s)
        buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
        assert buckets == sorted(buckets) and len(buckets) == len(BOUNDS_S) + 1
    stall = families["sidesave_save_stall_seconds"]
    assert value(stall, "_bucket", **labels, le="5") < value(stall, "_bucket", **labels, le="10")
    assert value(stall, "_bucket", **labels, le="1000") == value(stall, "_count", **labels) - 1
    assert all(family.documentation for family in families.values())


def test_what_is_not_known_yet_has_no_sample():
    families = parsed(prometheus_text(SaveStats()))
    assert families["sidesave_last_committed_step"].samples == []
    assert value(families["sidesave_saves"], "_total", outcome="failed") == 0


def test_a_registry_of_prometheus_client_serves_the_same_figures():
    registry = pytest.importorskip("prometheus_client").CollectorRegistry()
    stats = a_run()
    Collector(stats, {"rank": "0"}).register(registry)
    assert registry.get_sample_value("sidesave_saves_total", {"rank": "0", "outcome": "skipped"}) == 4
    served = pytest.importorskip("prometheus_client").generate_latest(registry).decode()
    ours = parsed(prometheus_text(stats, {"rank": "0"}))
    for name, family in parsed(served).items():
        known = {"sidesave_stall_ratio"}  # which goes down as time goes on
        assert name in known or by_name(family) == by_name(ours[name])
    stats.watch(SaveHandle(9, skipped=True), 0, 0)
    assert registry.get_sample_value("sidesave_saves_total", {"rank": "0", "outcome": "skipped"}) == 5


def test_the_file_is_replaced_whole_and_readable_for_the_exporter(tmp_path: Path):
    path = tmp_path / "sidesave.prom"
    path.write_text("old")
    with path.open() as old:
        write_prometheus_file(path, a_run())
        assert old.read() == "old"
    assert "sidesave_saves" in parsed(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in tmp_path.iterdir()] == ["sidesave.prom"]


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "sidesave.prom").mkdir()
    with pytest.raises(IsADirectoryError):
        write_prometheus_file(tmp_path / "sidesave.prom", SaveStats())
    with pytest.raises(FileNotFoundError):
        write_prometheus_file(tmp_path / "nowhere" / "sidesave.prom", SaveStats())
    assert [entry.name for entry in tmp_path.iterdir()] == ["sidesave.prom"]


@pytest.mark.parametrize("name", ["", "le", "outcome", "a-b", "1st", "__name__", "größe"])
def test_a_label_that_prometheus_would_refuse_is_refused(name: str):
    with pytest.raises(InvalidArgumentError, match="label"):
        prometheus_text(SaveStats(), {name: "x"})


def test_the_text_needs_no_library_and_a_collector_names_its_extra():
    code = """
import sys
sys.modules["prometheus_client"] = None
from sidesave.client.reporting.prometheus import Collector, prometheus_text
from sidesave.client.reporting.stats import SaveStats
assert "sidesave_saves_total" in prometheus_text(SaveStats())
try: Collector(SaveStats())
except ModuleNotFoundError as error: assert "pip install 'sidesave[metrics]'" in str(error)
else: raise AssertionError
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# Many threads ----------------------------------------------------------------------------------------------------


def test_no_save_is_lost_or_counted_twice_when_futures_end_in_many_threads():
    told = Told()
    stats = SaveStats([told])
    handles = [SaveHandle(step) for step in range(300)]
    for handle in handles:
        stats.watch(handle, 0, 0)
    start = threading.Barrier(3)

    def finish(name: str) -> None:
        start.wait(DEADLINE_S)
        for handle in handles:
            info = sidesave.CheckpointInfo(handle.step, "x", 1, "s", 1, None, 0.0) if name == "committed" else None
            getattr(handle, name).resolve(info)

    threads = [threading.Thread(target=finish, args=(name,)) for name in ("staged", "written", "committed")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(event.step for event in told.events) == list(range(300))
    assert stats.summary().counts["committed"] == 300
    assert not math.isnan(stats.summary().stall_share)


def test_watching_holds_no_state_of_the_run(tmp_path: Path):
    told = Told()
    stats = SaveStats([told])
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        handle = save(stats, checkpointer, 1, a_state(1))
        handle.committed.result()
        told.wait(1)
        gone = weakref.ref(handle)
        del handle
    del checkpointer
    gc.collect()
    assert gone() is None
