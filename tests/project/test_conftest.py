"""What tests inherit from who runs them: nothing that decides how they, or the trainers they start, end.

And what a quick run leaves out.
"""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import campaigns
import pytest

LOOK = """
import json, resource, signal, sys
ignored = [int(n) for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN]
blocked = [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
print(json.dumps([ignored, blocked, handler, resource.getrlimit(resource.RLIMIT_CORE)[0]]))
"""


def test_a_child_of_a_test_ignores_and_blocks_nothing_and_leaves_no_core():
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    of_python = [int(signal.SIGPIPE), int(signal.SIGXFSZ)]
    assert json.loads(done.stdout) == [of_python, [], True, 0]


def _as_some_callers_do() -> None:
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, numbers)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))


@pytest.mark.slow
def test_so_it_is_where_the_caller_ignores_and_blocks_everything(tmp_path: Path):
    here = f"{__file__}::{test_a_child_of_a_test_ignores_and_blocks_nothing_and_leaves_no_core.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}", here]
    done = subprocess.run(
        command,
        preexec_fn=_as_some_callers_do,
        restore_signals=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
