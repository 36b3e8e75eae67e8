"""Processes that are forked for tests look and end as started ones do; who is killed while asking
for one ends none.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest

WAIT = "import os; os.write(1, b'.'); os.read(0, 1)"


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    with forks.wanted(daemons=True):
        yield


def test_it_ends_as_it_would_have():
    done = forks.run(
        [sys.executable, "-c", "import sys; print(input()); sys.exit(sys.argv[1])", "no"], "said\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "said\n", "no\n")
    with forks.popen(
        [sys.executable, "-c", WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert (
            process.stdout is not None and process.stdout.read(1) == b"." and process.poll() is None
        )
        process.kill()
        assert process.wait() == -signal.SIGKILL


def test_proc_shows_its_command_line_and_environment():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with forks.popen(
        [sys.executable, "-c", WAIT, "word"], env={"A": "b", "TMPDIR": "/c"}, **pipes
    ) as process:
        assert process.stdout is not None and process.stdout.read(1) == b"."
        shown = Path(f"/proc/{process.pid}")
        executable, *arguments = (shown / "cmdline").read_bytes().decode().split("\0")
        assert str(Path(executable)) == sys.executable  # which is longer by slashes
        assert arguments == ["-c", WAIT, "word", ""]
        assert (shown / "environ").read_bytes().rstrip(b"\0").split(b"\0") == [b"A=b", b"TMPDIR=/c"]


@pytest.mark.parametrize("request_", [b"", b"\5", b"\xe8\3\0\0{", b"\2\0\0\0"])
def test_who_is_killed_while_it_asks_ends_nothing(request_: bytes):
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect("\0" + os.environ[forks.ADDRESS])
            asking.sendall(request_)
    null = os.open(os.devnull, os.O_RDWR)
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with forks._Popen(os.environ[forks.ADDRESS], command, stdin=null, stderr=null) as process:
        assert process.wait() == 3
    os.close(null)


END = """
import atexit, sys, threading
atexit.register(print, "registered")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
print("told", end="\\n")
"""


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("", 0),
        ("sys.exit()", 0),
        ("sys.exit('no')", 1),
        ("sys.exit(7)", 7),
        ("1 / 0", 1),
        ("sys.exit(-1)", 255),
    ],
)
def test_its_end_is_that_of_any_interpreter(quick: bool, last: str, code: int):
    with forks.wanted(daemons=True, quick_ends=quick):
        done = forks.run([sys.executable, "-c", END + last])
    assert (done.returncode, done.stdout.split()) == (code, ["told", "thread", "registered"])
    assert ("ZeroDivisionError" in done.stderr, done.stderr == "no\n") == (
        last == "1 / 0",
        "no" in last,
    )


@pytest.mark.parametrize("quick", [True, False])
def test_an_interrupt_that_nobody_minds_ends_it_by_that_signal(quick: bool):
    with forks.wanted(daemons=True, quick_ends=quick):
        done = forks.run([sys.executable, "-c", "raise KeyboardInterrupt"])
    assert done.returncode == -signal.SIGINT
