"""The whole scripts in docs/integrations, run as by a user: pasted, killed on the way, and run
again.

Imports nothing but the standard library. As a script, for an environment in which only a wheel and
a framework are installed: ``python guides.py NAME``, in an empty directory.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "integrations"
STEPS = 100
"""How many steps each of them trains."""


def script(name: str, heading: str = "## A whole script") -> str:
    """The code under a heading of a guide."""
    text = (GUIDES / f"{name}.md").read_text()
    found = re.search(rf"^{heading}\n.*?```python\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    assert found, f"{name}.md has no code under {heading}"
    return found[1]


def kill_and_run_again(name: str, folder: Path, **options: Any) -> tuple[int, int]:
    """Kill the script of a guide when a step is committed, and run it again to its end; the steps
    that each has run.
    """
    (folder / "train.py").write_text(script(name))
    options |= {
        "cwd": folder,
        "stdout": subprocess.PIPE,
        "text": True,
        "env": {**os.environ, "OMP_NUM_THREADS": "1"},
    }
    command = [sys.executable, "-u", "-W", "ignore", "train.py"]
    before = 0
    with subprocess.Popen(command, **options) as process:
        assert process.stdout is not None
        for line in process.stdout:
            before += "loss" in line
            if before > 25 and [*(folder / "runs" / "exp1").glob("step-*")]:
                break
        process.kill()
    assert process.returncode == -9, f"it has ended by itself: {process.returncode}"
    lines = subprocess.run(command, check=True, **options).stdout.splitlines()
    after = sum("loss" in line for line in lines)
    assert STEPS - before <= after < STEPS, f"{before} steps, and then {after}"
    return before, after


if __name__ == "__main__":
    print(
        "steps before the kill, and after it: {}, {}".format(
            *kill_and_run_again(sys.argv[1], Path.cwd())
        )
    )
