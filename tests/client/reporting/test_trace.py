"""A trace of real saves beside training steps: what a viewer needs to draw it, and what may not be
missing.
"""

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import Orders

import sidesave
from sidesave.client.reporting.trace import Trace
from sidesave.errors import InvalidArgumentError
from sidesave.writer_daemon.save_record import SaveRecord

PHASES = ["staging", "writing", "commit"]


def bars(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The bars of each track by its title, in the order of their begins, a parent before its
    children.
    """
    events = json.loads(path.read_text())["traceEvents"]
    titles = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    tracks: dict[str, list[dict[str, Any]]] = {title: [] for title in titles.values()}
    for event in events:
        assert event["ph"] in "XM"
        if event["ph"] == "X":
            assert isinstance(event["ts"], int) and event["ts"] >= 0
            assert isinstance(event["dur"], int) and event["dur"] >= 0
            tracks[titles[event["tid"]]].append(event)
    return {
        title: sorted(found, key=lambda bar: (bar["ts"], -bar["dur"]))
        for title, found in tracks.items()
    }


def end(bar: dict[str, Any]) -> int:
    return bar["ts"] + bar["dur"]


def check_nesting(track: list[dict[str, Any]]) -> None:
    """As viewers ask for it: of two bars of a track one holds the other, or they lie apart."""
    for first, second in itertools.combinations(track, 2):
        apart = end(first) <= second["ts"] or end(second) <= first["ts"]
        assert apart or (first["ts"] <= second["ts"] and end(second) <= end(first)), (first, second)


def phases_of(track: list[dict[str, Any]], save: dict[str, Any]) -> list[dict[str, Any]]:
    found = [
        bar
        for bar in track
        if bar["name"] in PHASES and bar["args"]["step"] == save["args"]["step"]
    ]
    return sorted(found, key=lambda bar: PHASES.index(bar["name"]))


def a_record(step: int, called: float, ended_s: float, **other: Any) -> SaveRecord:
    facts: dict[str, Any] = {"outcome": "committed", "nbytes": 1, "rank_nbytes": 1, "stall_s": 0.0}
    facts |= {
        "staged_s": ended_s / 4,
        "written_s": ended_s / 2,
        "committed_s": ended_s,
        "ended_s": ended_s,
    }
    return SaveRecord(
        step=step, session="0123456789abcdef", called=called, called_s=called, **(facts | other)
    )


def test_steps_calls_and_the_phases_of_each_save_nest_and_leave_no_gap(tmp_path: Path):
    with (
        Trace(tmp_path / "trace.json", rank=3) as trace,
        sidesave.Checkpointer(tmp_path / "run", observers=[trace.save]) as checkpointer,
    ):
        for step in range(6):
            began = time.monotonic()
            checkpointer.save(step, {"x": torch.full((1 << 18,), float(step))})
            trace.step(step, began, time.monotonic())
    tracks = bars(tmp_path / "trace.json")
    assert [bar["name"] for bar in tracks["training steps"]] == [
        f"step {step}" for step in range(6)
    ]
    calls = tracks["calls of save(): training waits"]
    assert [bar["args"]["step"] for bar in calls] == list(range(6))
    for call, step in zip(calls, tracks["training steps"], strict=True):
        assert step["ts"] <= call["ts"] and end(call) <= end(step)
    saved: list[int] = []
    for title, track in tracks.items():
        check_nesting(track)
        if not title.startswith("saves "):
            continue
        for save in [bar for bar in track if bar["name"] not in PHASES]:
            saved.append(save["args"]["step"])
            phases = phases_of(track, save)
            assert [bar["name"] for bar in phases] == PHASES
            edges = [save["ts"], *map(end, phases)]
            assert edges == [*(bar["ts"] for bar in phases), end(save)], "a gap, or an overlap"
            assert save["args"]["outcome"] == "committed"
            assert save["args"]["nbytes"] > 1 << 20
    assert sorted(saved) == list(range(6))
    document = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in document["traceEvents"]} == {3}
    [*_, last] = tracks["training steps"]
    assert 0 <= time.time() - (document["otherData"]["clock began"] + end(last) / 1e6) < 600


def test_saves_that_overlap_lie_on_tracks_of_their_own(tmp_path: Path, orders: Orders):
    trace = Trace(tmp_path / "trace.json")
    with sidesave.Checkpointer(tmp_path / "run", observers=[trace.save]) as checkpointer:
        orders.give("hold", after=2)
        for step in (1, 2):
            checkpointer.save(step, {"x": torch.zeros(3)}).staged.result()
        orders.obeyed()
        orders.release()
    trace.close()
    tracks = bars(tmp_path / "trace.json")
    assert [tracks[f"saves {lane}"][0]["args"]["step"] for lane in (1, 2)] == [1, 2]
    for track in tracks.values():
        check_nesting(track)


def test_tracks_are_used_again_and_records_may_come_in_any_order(tmp_path: Path):
    trace = Trace(tmp_path / "trace.json")
    for record in (
        a_record(2, 1.0, 9.0),
        a_record(1, 0.0, 10.0),
        a_record(3, 10.0, 1.0),
        a_record(4, 10.5, 1.0),
    ):
        trace.save(record)
    trace.close()
    tracks = bars(tmp_path / "trace.json")
    lanes = {
        title: [b["args"]["step"] for b in track if "save" in b["name"]]
        for title, track in tracks.items()
    }
    assert (lanes["saves 1"], lanes["saves 2"]) == ([1, 3], [2, 4])
    for track in tracks.values():
        check_nesting(track)


def test_a_failed_save_ends_in_the_phase_in_which_it_failed(tmp_path: Path):
    trace = Trace(tmp_path / "trace.json")
    full: dict[str, Any] = {"outcome": "failed", "error": "NoSpaceError", "message": "full: run"}
    full |= {"written_s": None, "committed_s": None}
    trace.save(a_record(5, 10.0, 2.0, **full))
    trace.save(a_record(6, 11.0, 1.0, **full, staged_s=None))
    trace.close()
    tracks = bars(tmp_path / "trace.json")
    first, second = (
        bar
        for title in ("saves 1", "saves 2")
        for bar in tracks[title]
        if bar["name"] not in PHASES
    )
    assert (first["args"]["outcome"], second["args"]["outcome"]) == ("failed", "failed")
    assert first["args"]["error"] == "NoSpaceError: full: run"
    names = [
        [bar["name"] for bar in phases_of(tracks[title], save)]
        for title, save in (("saves 1", first), ("saves 2", second))
    ]
    assert names == [["staging", "writing"], ["staging"]]
    assert end(phases_of(tracks["saves 1"], first)[-1]) == end(first)


def test_phases_keep_their_order_where_reports_crossed_each_other(tmp_path: Path):
    trace = Trace(tmp_path / "trace.json")
    trace.save(a_record(1, 0.0, 1.0, staged_s=1.2, written_s=0.9, committed_s=1.0))
    trace.close()
    track = bars(tmp_path / "trace.json")["saves 1"]
    check_nesting(track)
    save, *_ = track
    assert [end(bar) for bar in phases_of(track, save)] == [900_000, 900_000, 1_000_000]


def test_a_skipped_save_is_a_call_and_nothing_else(tmp_path: Path):
    trace = Trace(tmp_path / "trace.json")
    trace.save(replace(a_record(4, 1.0, 1.0), outcome="saving", ended_s=None))
    trace.save(a_record(4, 1.0, 1.0, outcome="skipped", stall_s=1.0))
    trace.close()
    [title] = [title for title, track in bars(tmp_path / "trace.json").items() if track]
    assert title.startswith("calls")


def test_a_trace_can_be_written_at_any_time_and_is_closed_once(tmp_path: Path):
    trace = Trace(tmp_path / "trace.json")
    trace.step(1, 0.0, 1.0)
    trace.write(tmp_path / "early.json")
    assert not (tmp_path / "trace.json").exists()
    trace.step(2, 1.0, 2.0)
    trace.close()
    (tmp_path / "trace.json").rename(tmp_path / "moved.json")
    trace.step(3, 2.0, 3.0)
    trace.close()
    assert not (tmp_path / "trace.json").exists()
    assert len(bars(tmp_path / "early.json")["training steps"]) == 1
    assert len(bars(tmp_path / "moved.json")["training steps"]) == 2


def test_memory_is_bounded_and_what_is_left_out_is_said(tmp_path: Path):
    trace = Trace(tmp_path / "trace.json", max_steps=10, max_saves=5)
    for step in range(100):
        trace.step(step, step, step + 0.5)
        trace.save(a_record(step, step, 0.5))
    trace.close()
    tracks = bars(tmp_path / "trace.json")
    assert [bar["args"]["step"] for bar in tracks["training steps"]] == list(range(90, 100))
    assert [bar["args"]["step"] for bar in tracks["saves 1"] if bar["name"] not in PHASES] == list(
        range(95, 100)
    )
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["left out"] == 185
    with pytest.raises(InvalidArgumentError):
        Trace(tmp_path / "trace.json", max_steps=0)


def test_an_empty_trace_is_one_that_opens(tmp_path: Path):
    Trace(tmp_path / "trace.json").close()
    assert bars(tmp_path / "trace.json")["training steps"] == []
