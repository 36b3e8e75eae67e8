"""What tests inherit from who runs them: nothing that decides how they, or the trainers they start,
end.
"""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

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
    here = (
        f"{__file__}::"
        f"{test_a_child_of_a_test_ignores_and_blocks_nothing_and_leaves_no_core.__name__}"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path / 'base'}",
        here,
    ]
    done = subprocess.run(
        command,
        preexec_fn=_as_some_callers_do,
        restore_signals=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
