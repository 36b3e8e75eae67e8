"""Where there are several NUMA nodes memory is made from the cores of one, unless somebody has said
otherwise.
"""

import ctypes
import errno
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from denied import NUMBERS
from machines import CORES, Populating, machine, needs_two_cores, populating, two_nodes

from sidesave.stager.memory import host_memory, numa
from sidesave.stager.memory.arena import PAGE, Arena

MIB = 1 << 20
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}.get(platform.machine())
FIRST, OTHERS = frozenset(CORES[:1]), frozenset(CORES[1:])


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(PAGE, 150 * MIB)  # three pieces
    yield made
    made.close()


@pytest.fixture
def of_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "SYS", two_nodes(tmp_path / "sys"))


def populate(arena: Arena, node: int | None) -> Populating:
    with populating() as found:
        host_memory.populate(arena, node)
    assert found.cores and os.fstat(arena.fd).st_blocks * 512 >= arena.nbytes
    return found


def in_a_thread(work: Callable[[], None]) -> None:
    """Run ``work`` where it may change what is the thread's own."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


# What the system tells ----------------------------------------------------------------------------


def test_the_cores_of_each_node_are_read_as_the_kernel_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(numa, "SYS", machine(tmp_path, {0: "0-2,8", 1: "", 12: "4"}))
    assert numa.nodes() == {0: frozenset({0, 1, 2, 8}), 12: frozenset({4})}, (
        "memory without cores is no place to be"
    )


def test_the_nodes_of_this_machine_have_its_cores():
    if not Path("/sys/devices/system/node").exists():
        pytest.skip("this kernel knows no nodes")
    assert frozenset().union(*numa.nodes().values()) >= set(CORES)


def test_the_node_of_a_device_is_read_or_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    devices = {"0000:17:00.0": 1, "0001:ca:00.0": 0, "0000:03:00.0": -1}
    monkeypatch.setattr(numa, "SYS", machine(tmp_path, {0: "0", 1: "1"}, devices))
    assert [numa.node_of(address) for address in [*devices, "0000:99:00.0", ""]] == [
        1,
        0,
        None,
        None,
        None,
    ]


# Memory -------------------------------------------------------------------------------------------


@needs_two_cores
@pytest.mark.usefixtures("of_two_nodes")
def test_memory_is_made_from_the_cores_of_its_node(arena: Arena):
    before = os.sched_getaffinity(0)
    for node, cores in ((0, FIRST), (1, OTHERS)):
        assert set(populate(arena, node).cores) == {cores}
        assert arena.node == node, "the daemon follows it there"
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(len(numa.nodes()) < 2, reason="needs a machine with several NUMA nodes")
def test_memory_lies_on_its_node():
    for node in [node for node in numa.nodes() if numa.cores_near(node)]:
        arena = Arena.create(PAGE, 64 * MIB)
        host_memory.populate(arena, node)
        maps = Path("/proc/self/numa_maps").read_text().splitlines()
        [line] = [line for line in maps if line.startswith(f"{arena.address:x} ")]
        pages = {int(where): int(count) for where, count in re.findall(r" N(\d+)=(\d+)", line)}
        arena.close()
        assert pages[node] >= 0.9 * sum(pages.values()), (
            "but for the first, which the caller writes"
        )


def test_on_a_machine_with_one_node_nothing_is_called(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[object] = []

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument is os.sched_setaffinity:
            calls.append(argument)

    every = f"0-{os.cpu_count()}"
    folders = {
        "one": {0: every},
        "some hidden": {0: str(CORES[0])},
        "one and memory": {0: every, 1: ""},
        "none": {},
    }
    for name, nodes in folders.items():
        monkeypatch.setattr(numa, "SYS", machine(tmp_path / name, nodes))
        assert populate(arena, 0) == Populating([frozenset(CORES)] * min(3, len(CORES)))
        assert arena.node is None
        sys.setprofile(watch)
        try:
            numa.stay_near(0)
        finally:
            sys.setprofile(None)
        assert not calls


@needs_two_cores
@pytest.mark.usefixtures("of_two_nodes")
def test_a_device_whose_node_nobody_tells_changes_nothing(arena: Arena):
    for node in (None, 7):
        assert populate(arena, node) == Populating([frozenset(CORES)] * min(3, len(CORES)))
        assert arena.node is None


# What others have set -----------------------------------------------------------------------------


@needs_two_cores
@pytest.mark.usefixtures("of_two_nodes")
@pytest.mark.parametrize("node", [0, 1, None])
def test_a_process_that_is_kept_on_some_cores_makes_its_memory_there(
    arena: Arena, node: int | None
):
    def work() -> None:
        os.sched_setaffinity(0, FIRST)
        assert populate(arena, node) == Populating([FIRST])
        assert arena.node is None, "the daemon is where it was started"
        numa.stay_near(node)
        assert os.sched_getaffinity(0) == FIRST

    in_a_thread(work)


@needs_two_cores
def test_of_a_node_only_cores_that_the_process_may_use_are_taken(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    most = (os.cpu_count() or 1) + 7
    monkeypatch.setattr(
        numa,
        "SYS",
        machine(tmp_path, {0: str(CORES[0]), 1: f"{CORES[1]}-{CORES[1]},{most}-{most + 8}"}),
    )
    assert set(populate(arena, 1).cores) == {frozenset(CORES[1:2])}


@needs_two_cores
@pytest.mark.skipif(SET_MEMPOLICY is None, reason="the number of set_mempolicy is not known here")
@pytest.mark.usefixtures("of_two_nodes")
@pytest.mark.parametrize("policy", [1, 2, 3], ids=["preferred", "bind", "interleave"])
def test_a_memory_policy_is_left_to_say_where_memory_lies(arena: Arena, policy: int):
    def work() -> None:
        nodes = ctypes.c_ulong(1)  # node 0
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(SET_MEMPOLICY, policy, ctypes.byref(nodes), 64):
            pytest.skip(f"set_mempolicy: {os.strerror(ctypes.get_errno())}")
        assert numa.has_policy()
        assert populate(arena, 1) == Populating([frozenset(CORES)] * min(3, len(CORES)))
        assert arena.node is None

    assert not numa.has_policy()
    in_a_thread(work)


REFUSED = """
import os, sys
from pathlib import Path
from denied import deny
from sidesave.stager.memory import host_memory, numa
from sidesave.stager.memory.arena import Arena
numa.SYS = Path(sys.argv[1])
before = os.sched_getaffinity(0)
try:
    deny(["sched_setaffinity"], int(sys.argv[2]))
except OSError as error:
    sys.exit(f"skipped: {error}")
arena = Arena.create(4096, 64 << 20)
host_memory.populate(arena, 1)
numa.stay_near(arena.node)
assert arena.node == 1 and os.sched_getaffinity(0) == before
assert os.fstat(arena.fd).st_blocks * 512 >= arena.nbytes
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


@needs_two_cores
@pytest.mark.skipif(not NUMBERS, reason="the numbers of system calls are not known here")
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_where_cores_cannot_be_chosen_memory_is_made_from_any(tmp_path: Path, code: int):
    command = [sys.executable, "-c", REFUSED, two_nodes(tmp_path / "sys"), str(code)]
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.stderr.startswith("skipped"):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
