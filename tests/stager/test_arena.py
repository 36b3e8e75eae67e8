"""Staging memory: sealed, shared by descriptor, hidden from forks, and never more of it than there
is.
"""

import ctypes
import fcntl
import gc
import mmap
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sidesave.errors import HostMemoryError, ProtocolError
from sidesave.stager.memory import host_memory
from sidesave.stager.memory.arena import PAGE, Arena, page_up

MIB = 1 << 20
F_ADD_SEALS = 1033
SEAL_SHRINK_AND_GROW = 0x6


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(PAGE, 2 * MIB)
    yield made
    made.close()


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


_before: set[str] = set()
"""What other tests of this process have left to be collected."""


@pytest.fixture(autouse=True)
def nothing_of_others() -> Iterator[None]:
    """Arenas that were there before a test do not count in it."""
    gc.collect()
    _before.update(sidesave_maps() + sidesave_fds())
    yield
    _before.clear()


def sidesave_maps() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:sidesave" in line and line not in _before]


def sidesave_fds() -> list[str]:
    links: list[str] = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this very listing
            links.append(f"{fd.name}: {fd.readlink()}")
    return [link for link in links if "memfd:sidesave" in link and link not in _before]


def in_forked_child(check: Callable[[], object]) -> str:
    """What ``check`` says in a child made by ``os.fork``."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, repr(check()).encode())
        except BaseException as error:  # noqa: BLE001 - it must not get back into pytest
            os.write(writing, f"failed: {error!r}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {status}"
    return said


# Seals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, PAGE, 64 * MIB])
def test_the_memory_cannot_change_its_size(arena: Arena, nbytes: int):
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, nbytes)


def test_no_hole_can_be_punched_into_the_memory(arena: Arena):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    punch_hole_keep_size = 0x3
    assert libc.fallocate(arena.fd, punch_hole_keep_size, PAGE, PAGE) == -1
    assert os.strerror(ctypes.get_errno()) == "Operation not permitted"


def test_the_memory_can_be_mapped_for_reading_but_no_longer_for_writing(arena: Arena):
    arena.view(arena.data_offset, 5)[:] = b"hello"
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, arena.nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(arena.fd, b"other", arena.data_offset)
    with mmap.mmap(arena.fd, arena.nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        arena.view(arena.data_offset, 5)[:] = (
            b"HELLO"  # the mapping made before the seal still writes
        )
        assert mapped[arena.data_offset : arena.data_offset + 5] == b"HELLO"


def test_the_seals_are_sealed(arena: Arena):
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, F_ADD_SEALS, 0x8)


# Layout -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("descriptor_nbytes", "data_nbytes"), [(0, 0), (1, 1), (PAGE, PAGE), (PAGE + 1, 5 * PAGE - 1)]
)
def test_data_starts_on_a_page_behind_room_for_the_descriptor(
    descriptor_nbytes: int, data_nbytes: int
):
    arena = Arena.create(descriptor_nbytes, data_nbytes)
    try:
        assert arena.data_offset % PAGE == 0
        assert arena.data_offset >= PAGE + descriptor_nbytes
        assert arena.data_nbytes == page_up(data_nbytes)
        assert os.fstat(arena.fd).st_size == arena.nbytes
    finally:
        arena.close()


def test_bytes_outside_the_arena_cannot_be_viewed(arena: Arena):
    for offset, nbytes in [
        (-1, 1),
        (0, arena.nbytes + 1),
        (arena.nbytes, 1),
        (1, -1),
        (1 << 62, 1),
    ]:
        with pytest.raises(ValueError, match="outside an arena"):
            arena.view(offset, nbytes)
    assert arena.view(arena.nbytes, 0).nbytes == 0


def test_a_closed_arena_is_unmapped_and_refuses_views(arena: Arena):
    fds = open_fds()
    arena.close()
    arena.close()
    assert (arena.fd, arena.address) == (-1, 0)
    assert (sidesave_maps(), open_fds()) == ([], fds - 1)
    with pytest.raises(ValueError, match="outside an arena"):
        arena.view(0, 1)
    with pytest.raises(ValueError, match="closed"):
        _ = arena.generation


def test_a_forgotten_arena_gives_its_memory_back():
    fds = open_fds()
    arena = Arena.create(PAGE, PAGE)
    assert len(sidesave_maps()) == 1
    del arena
    gc.collect()
    assert (sidesave_maps(), open_fds()) == ([], fds)


def test_an_arena_beyond_any_address_space_is_refused_and_leaks_nothing():
    fds = open_fds()
    with pytest.raises(OSError, match=r"."):
        Arena.create(PAGE, 1 << 62)
    assert open_fds() == fds


# Attaching ----------------------------------------------------------------------------------------

ATTACHER = """
import os, socket, sys
from sidesave.stager.memory.arena import Arena
control = socket.socket(fileno=int(sys.argv[1]))
_, [fd], _, _ = socket.recv_fds(control, 1, 1)
arena = Arena.attach(fd)
def answer():
    maps = [line.split()[1] for line in open("/proc/self/maps") if "memfd:sidesave" in line]
    head = bytes(arena.view(arena.data_offset, 5))
    control.send(repr([arena.data_nbytes, head, arena.generation, arena.staged_descriptor(), maps]).encode())
answer()
control.recv(1)
arena.drop_pages(arena.data_offset, arena.data_nbytes)
answer()
"""  # noqa: E501


def test_another_process_attaches_by_descriptor_and_sees_what_is_written_later(arena: Arena):
    arena.begin_generation()
    arena.view(arena.data_offset, 5)[:] = b"first"
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        command = [sys.executable, "-c", ATTACHER, str(there.fileno())]
        with subprocess.Popen(command, pass_fds=[there.fileno()]) as child:
            there.close()
            here.settimeout(300)
            socket.send_fds(here, [b"x"], [arena.fd])
            assert here.recv(1000).decode() == repr([2 * MIB, b"first", 1, None, ["r--s"]])
            arena.view(arena.data_offset, 5)[:] = b"later"
            arena.mark_staged(b"save message")
            nbytes = arena.data_nbytes
            arena.close()  # as when the trainer dies: the daemon's mapping keeps the memory
            here.send(b"x")
            assert here.recv(1000).decode() == repr(
                [nbytes, b"later", 1, b"save message", ["r--s"]]
            )
            assert child.wait(300) == 0


def _memfd(content: bytes, nbytes: int, seals: int = SEAL_SHRINK_AND_GROW) -> int:
    fd = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.pwrite(fd, content, 0)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


def _header(nbytes: int, data_offset: int, magic: bytes = b"SIDESAV1") -> bytes:
    return struct.pack("<8sQQ", magic, nbytes, data_offset)


def _file() -> int:
    return os.open(__file__, os.O_RDONLY)


def _pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


FOREIGN: dict[str, Callable[[], int]] = {
    "file": _file,
    "pipe": _pipe,
    "directory": lambda: os.open("/", os.O_RDONLY),
    "not sealed": lambda: _memfd(_header(2 * PAGE, PAGE), 2 * PAGE, seals=0),
    "sealed against growth only": lambda: _memfd(_header(2 * PAGE, PAGE), 2 * PAGE, seals=0x4),
    "empty": lambda: _memfd(b"", 0),
    "less than a page": lambda: _memfd(_header(100, 100), 100),
    "zeros": lambda: _memfd(b"", 2 * PAGE),
    "other version": lambda: _memfd(_header(2 * PAGE, PAGE, magic=b"SIDESAV2"), 2 * PAGE),
    "other size stated": lambda: _memfd(_header(4 * PAGE, PAGE), 2 * PAGE),
    "data within the header": lambda: _memfd(_header(2 * PAGE, 0), 2 * PAGE),
    "data beyond the end": lambda: _memfd(_header(2 * PAGE, 3 * PAGE), 2 * PAGE),
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", FOREIGN)
def test_a_descriptor_that_is_no_sealed_arena_is_refused_and_closed(name: str):
    fds = open_fds()
    fd = FOREIGN[name]()
    with pytest.raises(ProtocolError):
        Arena.attach(fd)
    assert open_fds() == fds


def test_a_well_made_descriptor_is_not_refused():
    arena = Arena.attach(
        _memfd(_header(2 * PAGE, PAGE), 2 * PAGE)
    )  # or the cases above would prove nothing
    assert arena.data_nbytes == PAGE
    arena.close()


# What trainer and daemon say to each other through it ---------------------------------------------


def test_a_descriptor_counts_only_for_the_generation_it_was_staged_in(arena: Arena):
    reader = Arena.attach(os.dup(arena.fd))
    assert (reader.generation, reader.staged_descriptor()) == (0, None)
    assert arena.begin_generation() == 1
    assert reader.staged_descriptor() is None, "nothing is complete yet"
    arena.mark_staged(b"one")
    assert (reader.generation, reader.staged_descriptor()) == (1, b"one")
    assert arena.begin_generation() == 2
    assert (reader.generation, reader.staged_descriptor()) == (2, None), "being overwritten"
    arena.mark_staged(b"the second, longer")
    arena.begin_generation()
    arena.mark_staged(b"3")
    assert (reader.generation, reader.staged_descriptor()) == (3, b"3")
    reader.close()


def test_the_mark_of_what_is_final_starts_anew_with_each_generation_and_ends_when_it_is_staged(
    arena: Arena,
):
    reader = Arena.attach(os.dup(arena.fd))
    arena.begin_generation()
    assert reader.filled == 0
    arena.advance(arena.data_offset + 7)
    assert reader.filled == arena.data_offset + 7
    arena.mark_staged(b"one")
    assert reader.filled == arena.nbytes
    arena.begin_generation()
    assert reader.filled == 0
    reader.close()


def test_a_descriptor_fills_its_room_and_no_more(arena: Arena):
    room = arena.data_offset - PAGE
    arena.begin_generation()
    arena.view(arena.data_offset, 4)[:] = b"data"
    with pytest.raises(ValueError, match="does not fit"):
        arena.mark_staged(b"x" * (room + 1))
    assert arena.staged_descriptor() is None
    arena.mark_staged(b"x" * room)
    assert arena.staged_descriptor() == b"x" * room
    assert bytes(arena.view(arena.data_offset, 4)) == b"data"


def test_an_impossible_descriptor_length_is_no_descriptor(arena: Arena):
    arena.begin_generation()
    arena.mark_staged(b"fine")
    arena.view(136, 8)[:] = struct.pack("<Q", 1 << 60)
    assert arena.staged_descriptor() is None


def test_dropped_pages_leave_this_process_and_their_content_stays(arena: Arena):
    data = os.urandom(arena.data_nbytes)
    arena.view(arena.data_offset, len(data))[:] = data
    before = _resident_nbytes(arena)
    arena.drop_pages(arena.data_offset, arena.data_nbytes)
    assert before - _resident_nbytes(arena) >= len(data)
    assert bytes(arena.view(arena.data_offset, len(data))) == data


def test_pages_are_dropped_only_where_they_are_whole(arena: Arena):
    arena.view(arena.data_offset, arena.data_nbytes)[:] = b"x" * arena.data_nbytes
    before = _resident_nbytes(arena)
    arena.drop_pages(arena.data_offset + 1, 2 * PAGE)
    assert before - _resident_nbytes(arena) == PAGE
    arena.drop_pages(arena.data_offset + 1, PAGE)
    assert before - _resident_nbytes(arena) == PAGE, "no whole page lies in there"


def _resident_nbytes(arena: Arena) -> int:
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^{arena.address:08x}-.*?^Rss: +(\d+) kB", text, re.MULTILINE | re.DOTALL)
    assert found
    return int(found[1]) * 1024


# Forks --------------------------------------------------------------------------------------------


def test_a_forked_child_has_neither_the_mapping_nor_the_descriptor(arena: Arena):
    attached = Arena.attach(os.dup(arena.fd))
    assert (len(sidesave_maps()), len(sidesave_fds())) == (2, 2)
    assert (
        in_forked_child(lambda: (sidesave_maps(), sidesave_fds(), arena.fd, arena.address))
        == "([], [], -1, 0)"
    )
    assert (len(sidesave_maps()), len(sidesave_fds())) == (2, 2)
    attached.close()


def test_a_forked_child_that_collects_the_arena_unmaps_nothing_of_its_own(arena: Arena):
    address, nbytes = arena.address, arena.nbytes

    def reuse_the_address() -> bytes:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
        assert libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
        ctypes.memmove(address, b"mine", 4)
        arena.close()
        arena.__del__()
        gc.collect()
        return ctypes.string_at(address, 4)

    assert in_forked_child(reuse_the_address) == "b'mine'"
    arena.view(arena.data_offset, 1)[:] = b"x"  # and the parent's is untouched


# How much -----------------------------------------------------------------------------------------


def test_populating_allocates_every_page_and_keeps_what_is_there():
    arena = Arena.create(PAGE, 150 * MIB)  # three pieces, the last one short
    try:
        assert os.fstat(arena.fd).st_blocks * 512 <= 2 * MIB, "nothing is allocated ahead"
        host_memory.populate(arena)
        assert os.fstat(arena.fd).st_blocks * 512 >= arena.nbytes
        assert _resident_nbytes(arena) == arena.nbytes
        assert arena.data_nbytes == 150 * MIB
    finally:
        arena.close()


def test_populating_leaves_no_thread_and_the_callers_cores_alone(arena: Arena):
    cores, threads = os.sched_getaffinity(0), threading.active_count()
    host_memory.populate(arena)
    assert (os.sched_getaffinity(0), threading.active_count()) == (cores, threads)
    assert os.fstat(arena.fd).st_blocks * 512 >= arena.nbytes


def test_a_child_that_is_forked_meanwhile_does_not_keep_others_from_allocating(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
):
    """Such as a worker of a DataLoader, which lives as long as its epoch."""
    require, children = host_memory.require, list[int]()

    def fork(nbytes: int, purpose: str) -> None:
        if not children:
            children.append(os.fork())
            if not children[0]:
                signal.pause()
        require(nbytes, purpose)

    monkeypatch.setattr(host_memory, "require", fork)
    try:
        host_memory.populate(arena)
        lock = os.open("/dev/shm", os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_more_memory_than_there_is_is_refused_with_the_figures():
    with pytest.raises(
        HostMemoryError, match=r"a slot needs [\d,]+ MiB of host memory .* has [\d,]+ MiB left"
    ) as caught:
        host_memory.require(1 << 50, "a slot")
    assert "needs 1,073,741,824 MiB" in str(caught.value)
    assert isinstance(caught.value, MemoryError)
    host_memory.require(MIB, "a slot")


def test_what_is_available_is_no_more_than_the_kernel_says():
    text = Path("/proc/meminfo").read_text()
    found = re.search(r"^MemTotal: +(\d+) kB", text, re.MULTILINE)
    assert found
    assert 0 < host_memory.available_nbytes() < int(found[1]) * 1024


def test_an_arena_larger_than_the_machine_is_refused_before_a_page_is_allocated():
    arena = Arena.create(PAGE, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + (1 << 30))
    try:
        with pytest.raises(HostMemoryError, match="a staging slot needs"):
            host_memory.populate(arena)
        assert os.fstat(arena.fd).st_blocks * 512 <= MIB
    finally:
        arena.close()


CGROUP_MEMBER = """
import os, sys
from sidesave.errors import HostMemoryError
from sidesave.stager.memory import host_memory
from sidesave.stager.memory.arena import Arena
before = host_memory.cgroup_headroom_nbytes()
small = Arena.create(4096, 64 << 20)
host_memory.populate(small)
after = host_memory.cgroup_headroom_nbytes()
large = Arena.create(4096, 480 << 20)
try:
    host_memory.populate(large)
except HostMemoryError as error:
    print(before, after, error)
group = host_memory.tightest_cgroup()
memory = host_memory.NodeMemory.of(0.5, 0, [host_memory.memory_of_rank()] * 2)
print(group.limit_nbytes, memory.cgroup_ranks, memory.share_nbytes)
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 640 MiB, version 1 or 2."""
    unified = Path("/sys/fs/cgroup")
    root = unified / "memory"
    limit = "memory.limit_in_bytes"
    if not (root / limit).exists():
        root, limit = unified, "memory.max"
        with suppress(OSError):
            (unified / "cgroup.subtree_control").write_text("+memory")
    group = root / f"sidesave-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        try:
            (group / limit).write_text(str(640 * MIB))
        except OSError as error:
            pytest.skip(f"no memory cgroup can be limited: {error}")
        yield group
    finally:
        group.rmdir()


@pytest.mark.root
def test_a_cgroup_limit_is_refused_and_not_run_into(cgroup: Path):
    """A process over its limit is killed, not refused: so it must not get there, whatever the node
    still has.
    """

    def join() -> None:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, "-c", CGROUP_MEMBER],
        preexec_fn=join,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"(\d+) (\d+) (.*)\n(.*)\n", done.stdout)
    assert found, done.stdout
    assert int(found[1]) < 640 * MIB
    assert int(found[1]) - int(found[2]) > 60 * MIB, "what is populated is charged to the group"
    assert "a staging slot needs 480 MiB" in found[3]
    assert "the memory cgroup has" in found[3]
    assert found[4] == f"{640 * MIB} 2 {160 * MIB}", "a fraction counts for the limit"
