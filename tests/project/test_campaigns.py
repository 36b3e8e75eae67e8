"""The tests that a quick run leaves out, and the time of each campaign of a long run."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import campaigns
import pytest
from campaigns import Share, seconds_of


def _family(name: str, count: int, *marks: str) -> list[Any]:
    return [
        Mock(
            nodeid=f"{name}[{number}]",
            get_closest_marker=lambda mark: mark if mark in marks else None,
        )
        for number in range(count)
    ]


def test_three_quick_runs_take_all_of_a_family_and_each_of_them_a_third(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
):
    plugin: Any = pytestconfig.pluginmanager.get_plugin(
        str(Path(__file__).parents[1] / "conftest.py")
    )
    monkeypatch.setattr(campaigns, "quick", True)
    large, small, other = (
        _family("a::large", 15, "drawn"),
        _family("a::small", 2, "drawn"),
        _family("a::other", 9),
    )
    taken: list[Any] = []
    for third in range(3):
        monkeypatch.setenv("SIDESAVE_TEST_SEED", str(third))
        items, told = [*large, *small, *other], Mock()
        plugin._draw(SimpleNamespace(hook=told), items)
        of_large = [item for item in items if item in large]
        assert len(of_large) == 5 and items == [*of_large, *small, *other], "in their order"
        assert set(told.pytest_deselected.call_args.kwargs["items"]) == {*large} - {*of_large}
        taken += of_large
    assert sorted(map(id, taken)) == sorted(map(id, large))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the campaigns of a test, in seconds."""
    now = [0.0]
    monkeypatch.setattr(campaigns, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(campaigns, "WHOLE", False)
    monkeypatch.setenv("SIDESAVE_TEST_SEED", "7")
    return now


def _run(points: Iterable[int], clock: list[float], seconds: float = 1.0) -> list[int]:
    """Go through points that take some seconds each."""
    ran: list[int] = []
    for point in points:
        ran.append(point)
        clock[0] += seconds
    return ran


def test_the_time_is_divided_by_what_campaigns_ask_for_and_none_gets_more(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(campaigns, "WHOLE", False)
    monkeypatch.setattr(campaigns, "_MINUTES", "6")
    assert seconds_of({"a": 10, "b": 20}, workers=2) == pytest.approx({"a": 240, "b": 480})
    assert seconds_of({"a": 1, "b": 2}, workers=2) == {"a": 60, "b": 120}
    assert seconds_of({}, workers=2) == {}


def test_a_campaign_ends_after_its_time_and_runs_one_point_on_however_slow_a_machine(
    clock: list[float],
):
    share = Share("a", 10)
    assert len(_run(share.points(range(60)), clock)) == 11, "the last one began in time"
    assert str(share) == "11 of 60 points, SIDESAVE_TEST_SEED=7"
    assert len(_run(Share("a", 10).points(range(60)), clock, 1000)) == 1
    assert sorted(_run(Share("a", 10).points(range(60)), clock, 0.01)) == [*range(60)]


def test_a_seed_repeats_the_order_of_points_and_another_one_has_another(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
):
    first = _run(Share("a", 10).points(range(60)), clock)
    assert _run(Share("a", 10).points(range(60)), clock) == first
    assert _run(Share("b", 10).points(range(60)), clock) != first
    monkeypatch.setenv("SIDESAVE_TEST_SEED", "8")
    assert _run(Share("a", 10).points(range(60)), clock) != first


@pytest.mark.parametrize("is_whole", [False, True])
def test_points_whose_number_is_not_known_are_all_run_once_and_few_behind_them(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, is_whole: bool
):
    monkeypatch.setattr(campaigns, "WHOLE", is_whole)
    share = Share("a", 1000)
    ran: list[int] = []
    for number in share.numbers():
        ran.append(number)
        if number >= 45:
            share.is_past(number)
    assert sorted(number for number in ran if number < 45) == [*range(45)]
    assert len(ran) - 45 <= 16
    assert is_whole == (ran == [*range(46)])


def test_a_whole_run_goes_through_all_points_whatever_the_time(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(campaigns, "WHOLE", True)
    assert sorted(_run(Share("a", 1).points(range(60)), clock)) == [*range(60)]
    assert seconds_of({"a": 1000}, workers=1) == {"a": 60_000}


def test_a_run_prints_how_many_points_each_campaign_ran_and_the_seed(tmp_path: Path):
    (tmp_path / "conftest.py").symlink_to(Path(__file__).parents[1] / "conftest.py")
    (tmp_path / "test_it.py").write_text(
        "def test_all(share):\n    assert len([*share.points(range(3))]) == 3\n"
    )
    support = Path(campaigns.__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "1",
        "-c",
        "/dev/null",
        "--rootdir",
        tmp_path,
        tmp_path,
    ]
    environment = os.environ | {
        "PYTHONPATH": f"{support}:{os.environ.get('PYTHONPATH', '')}",
        "SIDESAVE_TEST_SEED": "7",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (
        "test_it.py::test_all: 3 of 3 points, SIDESAVE_TEST_SEED=7" in done.stdout.splitlines()
    ), done.stdout
