"""The daemon runs on the cores of the node that staging memory was made on for a device, unless it
was told where.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machines import CORES, needs_two_cores, populating, two_nodes
from trainers import ROOT, a_state, check, commit, wait_until

import sidesave
from sidesave.stager.memory import host_memory, numa
from sidesave.stager.memory.arena import PAGE, Arena

pytestmark = needs_two_cores
FIRST, OTHERS = frozenset(CORES[:1]), frozenset(CORES[1:])
Attach = Callable[[sidesave.Checkpointer, int, int], None]


@pytest.fixture(autouse=True)
def of_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process and its daemons are on a machine with two nodes."""
    folder = two_nodes(tmp_path / "sys")
    monkeypatch.setattr(numa, "SYS", folder)
    lines = [
        "from pathlib import Path",
        "from sidesave.stager.memory import numa",
        f"numa.SYS = Path({str(folder)!r})",
    ]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    path = [str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", ":".join(path))


@pytest.fixture
def attach() -> Iterator[Attach]:
    """Gives the daemon of a checkpointer memory that was made on a node, as for a device there."""
    made: list[Arena] = []

    def attach(ckpt: sidesave.Checkpointer, number: int, node: int) -> None:
        made.append(Arena.create(PAGE, PAGE))
        host_memory.populate(made[-1], node)
        ckpt.session.connection.attach(number, made[-1])

    yield attach
    for arena in made:
        arena.close()


def cores_of(ckpt: sidesave.Checkpointer) -> dict[str, frozenset[int]]:
    """The cores that each thread of the daemon may use."""
    found: dict[str, frozenset[int]] = {}
    for thread in Path(f"/proc/{ckpt.daemon_pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # one of a save has ended
            found[thread.name] = frozenset(os.sched_getaffinity(int(thread.name)))
    return found


def test_every_thread_of_the_daemon_runs_on_the_node_of_its_memory(run: Path, attach: Attach):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)  # its threads are there
        assert set(cores_of(ckpt).values()) == {frozenset(CORES)}, (
            "memory for no device is anywhere"
        )
        attach(ckpt, 99, 1)
        commit(ckpt, 2)
        wait_until(lambda: set(cores_of(ckpt).values()) == {OTHERS}, "the daemon has moved")
        attach(ckpt, 100, 0)
        commit(ckpt, 3, 4)  # in memory that was attached after that
        assert set(cores_of(ckpt).values()) == {OTHERS}, "it stays where it is"


def test_a_daemon_that_takes_the_place_of_another_goes_there_as_well(run: Path, attach: Attach):
    with sidesave.Checkpointer(run) as ckpt:
        attach(ckpt, 99, 1)
        first = ckpt.daemon_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        commit(ckpt, 1)
        assert ckpt.daemon_pid != first
        assert set(cores_of(ckpt).values()) == {OTHERS}, "its threads have come after its memory"
    check(run, 1)


@pytest.mark.parametrize("cpus", [CORES[:1], CORES], ids=["elsewhere", "there and elsewhere"])
def test_a_daemon_that_was_told_its_cores_stays_there(run: Path, attach: Attach, cpus: list[int]):
    with sidesave.Checkpointer(run, daemon=sidesave.DaemonOptions(cpus=tuple(cpus))) as ckpt:
        attach(ckpt, 99, 1)
        commit(ckpt, 1)  # in memory that was attached after that
        assert set(cores_of(ckpt).values()) == {frozenset(cpus)}
    check(run, 1)


def test_a_process_that_is_kept_on_some_cores_has_its_memory_and_its_daemon_there(
    run: Path, attach: Attach
):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, FIRST)
    try:
        with populating() as found, sidesave.Checkpointer(run) as ckpt:
            ckpt.prepare(a_state(1)).result(300)
            assert set(found.cores) == {FIRST} and not found.chosen
            os.sched_setaffinity(0, before)
            attach(ckpt, 99, 1)  # as of a process that may go there
            commit(ckpt, 1)
            assert set(cores_of(ckpt).values()) == {FIRST}
    finally:
        os.sched_setaffinity(0, before)
    check(run, 1)
