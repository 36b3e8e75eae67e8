"""What a quick run leaves out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import campaigns
import pytest


def _family(name: str, count: int, *marks: str) -> list[Any]:
    return [
        Mock(nodeid=f"{name}[{number}]", get_closest_marker=lambda mark: mark if mark in marks else None)
        for number in range(count)
    ]


def test_three_quick_runs_take_all_of_a_family_and_each_of_them_a_third(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
):
    plugin: Any = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).parents[1] / "conftest.py"))
    monkeypatch.setattr(campaigns, "quick", True)
    large, small, other = _family("a::large", 15, "drawn"), _family("a::small", 2, "drawn"), _family("a::other", 9)
    taken: list[Any] = []
    for third in range(3):
        monkeypatch.setenv(campaigns._DRAWN, str(third))
        items, told = [*large, *small, *other], Mock()
        plugin._draw(SimpleNamespace(hook=told), items)
        of_large = [item for item in items if item in large]
        assert len(of_large) == 5 and items == [*of_large, *small, *other], "in their order"
        assert set(told.pytest_deselected.call_args.kwargs["items"]) == {*large} - {*of_large}
        taken += of_large
    assert sorted(map(id, taken)) == sorted(map(id, large))
