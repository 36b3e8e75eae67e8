"""Without the system calls that containers, old kernels and file systems refuse: it works, or says
what is missing.
"""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from campaigns import Share
from denied import NUMBERS
from trainers import DEADLINE_S, Traces, Trainer, check_step

from sidesave.client.cli import directory_checks
from sidesave.client.runs.finding import catalog_of
from sidesave.stager.system_calls import CALLS, hint, needs

QUICK = [
    ("eventfd2", errno.ENOSYS),
    ("setsid", errno.EPERM),
    ("flock", errno.ENOSYS),
    ("fallocate", errno.EPERM),
    ("linkat", errno.ENOSYS),
    ("fchmodat", errno.EPERM),
    ("fsync", errno.EPERM),
]
NUMBERS_KNOWN = pytest.mark.skipif(
    not NUMBERS, reason=f"the numbers of system calls on {os.uname().machine} are not known here"
)


def attempt(traces: Traces, run: Path, names: str, code: int) -> str:
    """Save and load without these calls; what is wrong with what it came to, if anything."""
    run.mkdir()
    with Trainer(traces, "save_without", run, names, code) as trainer:
        lines = list(trainer.lines(2 * DEADLINE_S))
    traces.await_ends()
    committed = {int(line.split()[1]) for line in lines if line.startswith("committed")}
    for info in catalog_of(str(run)).all():
        check_step(info.path, info.step, 0.1)
        committed.discard(info.step)
    outcome = lines[-1] if lines else "it ended without a word"
    if outcome.startswith("skipped"):
        pytest.skip(f"seccomp is not allowed here: {outcome}")
    if outcome == "fine":
        return "" if committed <= {1} else "a checkpoint that was committed is not there"
    if committed:
        return f"steps {committed} were committed and are not there"
    can_do_without = all(CALLS[name].without for name in names.split(",")) and "," not in names
    names_it = any(
        hint(name, OSError(code, "")).replace('"', '\\"') in outcome for name in names.split(",")
    )
    return "" if outcome.startswith("refused") and names_it and not can_do_without else outcome


def campaign(traces: Traces, folder: Path, cases: Iterable[tuple[str, int]]) -> None:
    wrong: dict[str, str] = {}
    for names, code in cases:
        case = f"{names}-{errno.errorcode[code]}"
        fault = attempt(traces, folder / case, names, code)
        if fault:
            wrong[case] = fault
    assert not wrong, "\n".join(f"{case}: {fault}" for case, fault in wrong.items())


@NUMBERS_KNOWN
def test_what_is_refused_is_done_without_or_named(traces: Traces, tmp_path: Path):
    campaign(traces, tmp_path, QUICK)


@NUMBERS_KNOWN
@pytest.mark.slow
def test_each_system_call_that_is_refused_is_done_without_or_named(
    traces: Traces, tmp_path: Path, share: Share
):
    cases = [(name, code) for name in CALLS for code in (errno.ENOSYS, errno.EPERM)]
    campaign(traces, tmp_path, share.points([*cases, ("linkat,renameat2", errno.EPERM)]))


@NUMBERS_KNOWN
@pytest.mark.parametrize(
    "name", ["memfd_create", "setsid", "flock", "madvise", "fsync", "renameat2"]
)
def test_doctor_finds_what_is_refused(traces: Traces, tmp_path: Path, name: str):
    with Trainer(traces, "examine_without", tmp_path, name, errno.EPERM) as trainer:
        [line] = trainer.lines(DEADLINE_S)
    if line.startswith("skipped"):
        pytest.skip(f"seccomp is not allowed here: {line}")
    call = CALLS[name]
    assert line.startswith(
        f"{'warn' if call.without else 'fail'} {name} is refused: it {call.purpose}"
    )
    assert call.without in line and line.endswith(call.remedy)


def test_doctor_tries_every_call_of_the_list(tmp_path: Path):
    assert {name for name, _ in directory_checks.system_call_attempts(tmp_path)} == CALLS.keys()


def test_every_call_of_the_list_can_be_taken_away():
    if NUMBERS:
        assert NUMBERS.keys() == CALLS.keys()


def test_error_of_a_refused_call_names_it_what_needs_it_and_what_to_do():
    with (
        pytest.raises(
            PermissionError, match=r"memfd_create holds staging memory.*seccomp"
        ) as caught,
        needs("memfd_create"),
    ):
        raise PermissionError(errno.EPERM, "no")
    assert caught.value.errno == errno.EPERM
    with pytest.raises(OSError, match=r"^\[Errno 24\] many$"), needs("memfd_create"):
        raise OSError(errno.EMFILE, "many")
    assert "overlay" in hint("renameat", OSError(errno.EXDEV, ""))
    assert hint("fsync", OSError(errno.EXDEV, "")) == ""
