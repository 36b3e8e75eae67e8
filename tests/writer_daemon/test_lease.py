"""One writer at a time: on local file systems, on network file systems that lie, and against those
that come back.

As a script this module is another process that wants the same directory:
``python test_lease.py NAME ARGUMENTS`` runs the function of that name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import campaigns
import pytest
from campaigns import Share
from hypothesis import given
from hypothesis import strategies as st
from network_storage import ELSEWHERE, PERIOD_S, NetworkStorage
from trainers import ROOT, SUPPORT

from sidesave.errors import DirectoryInUseError, NoSpaceError, WriteError
from sidesave.writer_daemon.format.names import LEASE_DIRECTORY
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.lease.observer import STILL_PERIODS, Observer, current_holder
from sidesave.writer_daemon.lease.record import LeaseRecord
from sidesave.writer_daemon.storage import PosixStorage, Storage

SESSIONS = [f"{number:016x}" for number in range(100)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{SUPPORT}"}


KINDS: dict[str, Callable[[str, int | None], Storage]] = {
    "local": lambda root, seed: PosixStorage(root),
    "network": NetworkStorage,
}


# Other processes ----------------------------------------------------------------------------------


def hold(root: str, kind: str) -> None:
    """Take the lease, say so, and keep it."""
    lease = Lease(
        KINDS[kind](root, None), LeaseRecord.current(SESSIONS[60], os.getpid()), 60.0, lambda: True
    )
    os.write(1, b"held\n")
    os.read(0, 1)
    lease.release()


def contend(root: str, kind: str, seed: str) -> None:
    """Take the lease again and again; mark in a journal when it is held, which no two may be at
    once.
    """
    chance = random.Random(int(seed))
    journal = os.open(f"{root}/journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    storage = KINDS[kind](root, int(seed))
    for turn in range(10**9):
        try:
            lease = Lease(
                storage,
                LeaseRecord.current(f"{chance.getrandbits(64):016x}", os.getpid()),
                60.0,
                lambda: True,
                1.0,
            )
        except DirectoryInUseError:
            time.sleep(chance.uniform(0, 0.01))
            continue
        who = f"{os.getpid()}.{turn}"
        os.write(journal, f"begin {who} {lease.epoch}\n".encode())
        for _ in range(chance.randrange(6)):
            time.sleep(chance.uniform(0, 0.02))  # what a writer does all day
            lease.check()
            os.write(journal, f"holds {who}\n".encode())
        os.write(journal, f"end {who}\n".encode())
        if chance.random() < 0.9:
            lease.release()
        else:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    sys.exit()


# Helpers ------------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[list[Lease]]:
    """Leases to be released at the end of the test."""
    leases: list[Lease] = []
    yield leases
    for lease in leases:
        lease.release()


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, root: Path) -> Iterator[Storage]:
    """A run directory on each kind of file system; the network one is honest."""
    storage = KINDS[request.param](str(root), None)
    yield storage
    storage.close()


@pytest.fixture
def network(root: Path) -> Iterator[Storage]:
    storage = NetworkStorage(str(root))
    yield storage
    storage.close()


Take = Callable[..., Lease]


@pytest.fixture
def take(taken: list[Lease]) -> Take:
    def take(storage: Storage, session: int = 1, *, timeout_s: float = 0.0, **facts: Any) -> Lease:
        holder = dataclasses.replace(LeaseRecord.current(SESSIONS[session], os.getpid()), **facts)
        taken.append(Lease(storage, holder, timeout_s, lambda: True, PERIOD_S))
        return taken[-1]

    return take


def files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / LEASE_DIRECTORY).iterdir())


def leave(root: Path, content: bytes | LeaseRecord, epoch: int = 7) -> Path:
    """A lease whose holder is no process of this test."""
    (root / LEASE_DIRECTORY).mkdir(exist_ok=True)
    path = root / f"{LEASE_DIRECTORY}/{epoch}"
    path.write_bytes(content if isinstance(content, bytes) else content.to_bytes())
    return path


def a_holder(**facts: Any) -> LeaseRecord:
    holder = LeaseRecord.current(SESSIONS[50], os.getpid())
    return dataclasses.replace(holder, epoch=7, token="t", period_s=PERIOD_S, **facts)


def lost(lease: Lease) -> str:
    with pytest.raises(WriteError) as caught:
        lease.check()
    assert caught.value.errno == errno.ESTALE
    assert str(caught.value.filename).startswith(f"{lease._storage.root}/{LEASE_DIRECTORY}/")
    return str(caught.value)


def ended_process() -> tuple[int, int]:
    """Pid and start time of a process that has ended."""
    with subprocess.Popen(["sleep", "60"]) as process:
        holder = LeaseRecord.current(SESSIONS[0], process.pid)
        process.kill()
    return process.pid, holder.trainer_started


# Taking and giving back ---------------------------------------------------------------------------


def test_live_holder_refuses_the_second_by_name(storage: Storage, take: Take):
    lease = take(storage, 1)
    with pytest.raises(DirectoryInUseError) as caught:
        take(storage, 2, timeout_s=3600.0)  # which is not waited for
    for name in (SESSIONS[1], str(os.getpid()), os.uname().nodename, storage.root):
        assert name in str(caught.value)
    assert caught.value.errno == errno.EBUSY
    lease.check()


def test_released_lease_goes_to_the_next_with_a_higher_epoch(
    storage: Storage, root: Path, take: Take
):
    for epoch in (1, 2, 3):
        lease = take(storage, epoch)
        assert lease.epoch == epoch
        assert files(root) == [f"{epoch}", f"{epoch}.spare"]
        lease.check()
        lease.release()
        lease.release()
        assert "the lease file was changed" in lost(lease)


def test_lease_of_another_host_that_was_released_is_free_at_once(
    network: Storage, root: Path, take: Take
):
    leave(root, a_holder(boot_id=ELSEWHERE, released=True))
    assert take(network).epoch == 8
    assert files(root) == ["8", "8.spare"]


def test_forked_child_gives_nothing_back(storage: Storage, take: Take):
    lease = take(storage)
    child = os.fork()
    if child == 0:
        lease.release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    lease.check()
    with pytest.raises(DirectoryInUseError):
        take(storage, 2)


def test_program_that_was_started_meanwhile_does_not_inherit_the_lease(
    storage: Storage, take: Take
):
    lease = take(storage)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as process:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # a file that it has read as it started
                assert LEASE_DIRECTORY not in str(link.readlink())
        lease.release()
        take(storage, 2)
        process.kill()


# Who is dead --------------------------------------------------------------------------------------


def test_ended_process_gives_way_at_once(storage: Storage, root: Path, take: Take):
    pid, started = ended_process()
    leave(root, a_holder(pid=pid, started=started))
    assert take(storage, timeout_s=3600.0).epoch == 8  # which is not waited for


@pytest.fixture
def another(root: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a process that holds the lease."""
    with contextlib.ExitStack() as stack:

        def another(kind: str, *prefix: str) -> subprocess.Popen[bytes]:
            command = [*prefix, sys.executable, __file__, "hold", str(root), kind]
            process = stack.enter_context(
                subprocess.Popen(
                    command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            if process.stdout.readline() != b"held\n":
                assert prefix, "it does not take the lease"
                pytest.skip(f"cannot run {prefix[0]}")
            return process

        yield another


@pytest.mark.parametrize("kind", KINDS)
def test_killed_holder_gives_way_at_once(
    root: Path, kind: str, another: Callable[..., subprocess.Popen[bytes]], take: Take
):
    holder = another(kind)
    with contextlib.closing(KINDS[kind](str(root), None)) as storage:
        with pytest.raises(
            DirectoryInUseError, match=f"daemon {holder.pid} .*(holds the lock|process runs)"
        ):
            take(storage)
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(DirectoryInUseError):
            take(storage)
        holder.kill()
        holder.wait()
        began = time.monotonic()
        assert take(storage, timeout_s=60.0).epoch == 2
        took_s = time.monotonic() - began
        print(f"{took_s:.3f} s")
        assert took_s < 30, "it has waited for somebody who is dead"


@pytest.mark.root
def test_holder_in_another_container_is_judged_by_its_lock(
    root: Path, another: Callable[..., subprocess.Popen[bytes]], take: Take
):
    holder = another("local", "unshare", "--pid", "--fork", "--kill-child")
    with contextlib.closing(PosixStorage(str(root))) as storage:
        with pytest.raises(DirectoryInUseError, match=r"daemon 1 .*holds the lock"):
            take(storage)
        holder.kill()
        _await(lambda: storage.is_locked(f"{LEASE_DIRECTORY}/1") is False)
        assert take(storage, timeout_s=60.0).epoch == 2


def test_locks_count_where_one_kernel_writes(root: Path):
    (root / "file").write_text("")
    with contextlib.closing(PosixStorage(str(root))) as storage:
        assert storage.is_locked("file") is False
        assert storage.is_locked("missing") is False
        unlock = storage.lock("file")
        if unlock is None:
            pytest.skip("the temporary directory is on a network file system")
        assert storage.is_locked("file") is True
        with pytest.raises(WriteError) as caught:
            storage.lock("file")
        assert caught.value.errno == errno.EAGAIN
        unlock()
        assert storage.is_locked("file") is False
    with contextlib.closing(PosixStorage("/proc")) as storage:  # on no list of local file systems
        assert storage.lock("version") is None
        assert storage.is_locked("version") is None


@pytest.mark.root
def test_locks_count_on_every_local_mount(mount: Callable[..., Path], tmp_path: Path):
    upper = mount("-t", "tmpfs", "none")
    for name in ("lower", "upper", "work"):
        (upper / name).mkdir()
    options = ",".join(f"{name}dir={upper / name}" for name in ("lower", "upper", "work"))
    for point in (
        upper,
        mount("--bind", upper / "lower"),
        mount("-t", "overlay", "-o", options, "none"),
    ):
        (point / "file").write_text("")
        with contextlib.closing(PosixStorage(str(point))) as storage:
            assert storage.is_locked("file") is False


def test_later_process_with_the_pid_of_the_holder_is_not_taken_for_it(
    storage: Storage, root: Path, take: Take
):
    leave(root, a_holder(started=a_holder().started - 1))
    assert take(storage).epoch == 8


def test_lease_from_before_a_reboot_is_dead_at_once_on_a_local_file_system(root: Path, take: Take):
    leave(root, a_holder(boot_id=ELSEWHERE))
    with contextlib.closing(PosixStorage(str(root))) as storage:
        assert take(storage).epoch == 8


def test_copied_directory_is_not_held_by_the_holder_of_the_original(root: Path, take: Take):
    with contextlib.closing(PosixStorage(str(root))) as storage:
        take(storage)
        copy = root.with_name("copy")
        subprocess.run(["cp", "-a", root, copy], check=True)
        with contextlib.closing(PosixStorage(str(copy))) as other:
            take(other, 2).check()


@pytest.mark.parametrize(
    "facts", [{"boot_id": ELSEWHERE}, {"pid_namespace": 1}], ids=["host", "container"]
)
def test_silent_holder_elsewhere_is_dead_after_three_periods_and_not_before(
    network: Storage, root: Path, take: Take, facts: dict[str, Any]
):
    pid, started = ended_process()  # which proves nothing: it may be anybody's there
    leave(root, a_holder(pid=pid, started=started, **facts))
    began = time.monotonic()
    assert take(network, timeout_s=0.0).epoch == 8
    assert time.monotonic() - began > STILL_PERIODS * PERIOD_S


@pytest.mark.parametrize(
    "facts", [{"boot_id": ELSEWHERE}, {"pid_namespace": 1}], ids=["host", "container"]
)
def test_counting_holder_elsewhere_is_alive(
    network: Storage, root: Path, take: Take, facts: dict[str, Any]
):
    class Waiting(NetworkStorage):
        """Reads a record when it has changed: a busy machine may keep the holder from counting for
        a while.
        """

        before: bytes | None = None

        def read(self, path: str, max_nbytes: int) -> bytes | None:
            _await(lambda: super(Waiting, self).read(path, max_nbytes) != self.before)
            self.before = super().read(path, max_nbytes)
            return self.before

    lease = take(network, started=1, **facts)  # that no process here is this one says nothing
    with contextlib.closing(Waiting(str(root))) as watched:
        for _ in range(3):
            with pytest.raises(DirectoryInUseError, match=f"{SESSIONS[1]}.*its counter advances"):
                take(watched, 2)
    lease.check()


def test_storage_that_hung_for_all_is_no_proof_of_death(root: Path):
    class Hanging(NetworkStorage):
        hangs_s = 0.0

        def read(self, path: str, max_nbytes: int) -> bytes | None:
            time.sleep(self.hangs_s)
            return super().read(path, max_nbytes)

    leave(root, a_holder(boot_id=ELSEWHERE))
    storage = Hanging(str(root))
    observer = Observer(storage, PERIOD_S)
    assert observer.look().alive is None
    storage.hangs_s = 4 * PERIOD_S
    assert observer.look().alive is None
    storage.hangs_s = 0.0
    assert observer.look().alive is None
    storage.close()


def test_half_a_record_is_read_again(root: Path, take: Take):
    class Torn(NetworkStorage):
        torn = 0

        def read(self, path: str, max_nbytes: int) -> bytes | None:
            data = super().read(path, max_nbytes)
            self.torn += 1
            return data[:300] if data is not None and self.torn % 2 else data

    storage = Torn(str(root))
    lease = take(storage, 1)
    for _ in range(3):
        lease.check()
        with pytest.raises(DirectoryInUseError, match=SESSIONS[1]):
            take(storage, 2)
    storage.close()


# What else may be in its place --------------------------------------------------------------------


@pytest.mark.drawn
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"null",
        b"[1]",
        b"\xff" * 4096,
        b"[" * 4000,
        a_holder().to_bytes()[:200],
        b"x" * 100_000,
    ],
    ids=lambda content: repr(content[:8]),
)
def test_garbage_is_replaced_where_nobody_keeps_it_alive(
    storage: Storage, root: Path, take: Take, content: bytes
):
    leave(root, content)
    assert take(storage).epoch == 8
    assert files(root) == ["8", "8.spare"]


@pytest.mark.parametrize("what", ["link", "dangling link", "fifo"])
def test_what_is_no_file_is_no_lease(storage: Storage, root: Path, take: Take, what: str):
    path = leave(root, b"")
    path.unlink()
    target = root.with_name("target")
    if what == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    if what == "link":
        target.write_bytes(a_holder().to_bytes())
    assert take(storage).epoch == 8
    assert files(root) == ["8", "8.spare"]
    assert not target.exists() or target.read_bytes() == a_holder().to_bytes()


def test_folder_in_the_place_of_a_lease_stops_nobody(storage: Storage, root: Path, take: Take):
    (root / LEASE_DIRECTORY / "7").mkdir(parents=True)
    assert take(storage).epoch == 8


@pytest.mark.parametrize("what", ["file", "link"])
def test_something_else_in_the_place_of_the_directory_is_a_typed_error(
    storage: Storage, root: Path, take: Take, what: str
):
    path, outside = root / LEASE_DIRECTORY, root.with_name("outside")
    outside.mkdir()
    path.symlink_to(outside) if what == "link" else path.write_text("{}")
    with pytest.raises(WriteError) as caught:
        take(storage)
    assert str(caught.value.filename) == str(path)
    assert list(outside.iterdir()) == []


def test_names_of_others_are_left_alone(storage: Storage, root: Path, take: Take):
    leave(root, a_holder(released=True))
    for name in (".nfs0001", "notes", "007", "-1", "\u0667"):
        (root / LEASE_DIRECTORY / name).write_text("")
    assert take(storage).epoch == 8
    assert files(root) == sorted([".nfs0001", "-1", "8", "8.spare", "notes", "\u0667"]), (
        "007 is a remnant of epoch 7"
    )


def test_remnants_of_killed_challengers_go_with_the_next_start(
    storage: Storage, root: Path, take: Take
):
    leave(root, a_holder(released=True))
    for name in (
        "6",
        "7.spare",
        "7.takeover",
        "7.0123456789abcdef",
        "7.takeover.0123456789abcdef",
        "7.x.probe",
    ):
        (root / LEASE_DIRECTORY / name).write_text("")
    assert take(storage).epoch == 8
    assert files(root) == ["8", "8.spare"]


@given(st.binary(max_size=200) | st.just(b'{"epoch": NaN}'))
def test_random_bytes_are_no_record(data: bytes):
    assert LeaseRecord.from_bytes(data) is None


@given(st.sampled_from([field.name for field in dataclasses.fields(LeaseRecord)]), st.data())
def test_record_with_a_field_of_another_kind_is_none(name: str, data: st.DataObject):
    import json

    body = json.loads(a_holder().to_bytes())
    kinds = {str: st.text(), int: st.integers(), float: st.floats(), bool: st.booleans()}
    other = data.draw(
        st.one_of(
            *(values for kind, values in kinds.items() if kind is not type(body[name])), st.none()
        )
    )
    assert LeaseRecord.from_bytes(json.dumps(body | {name: other}).encode()) is None
    del body[name]
    assert LeaseRecord.from_bytes(json.dumps(body).encode()) is None
    assert LeaseRecord.from_bytes(a_holder().to_bytes()) == a_holder()


@pytest.mark.parametrize("field", ["pid", "trainer_pid", "started"])
@pytest.mark.parametrize(
    "value", [0, -1, 2**31, 2**64, 10**3000], ids=["0", "-1", "2^31", "2^64", "10^3000"]
)
def test_odd_number_in_a_record_raises_nothing(field: str, value: int):
    holder = a_holder(**{field: value})
    assert holder.lives() in (True, False)
    assert holder.trainer_is_gone() in (True, False)
    assert not holder.kill(), "it is no process but this one"


# Losing it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", ["removed", "replaced", "overwritten", "emptied", "directory removed", "overtaken"]
)
def test_lease_that_was_lost_by_hand_allows_no_commit(
    storage: Storage, root: Path, take: Take, damage: str
):
    lease = take(storage)
    path = root / LEASE_DIRECTORY / "1"
    match damage:
        case "removed":
            path.unlink()
        case "replaced":
            (root / "new").write_bytes(a_holder(boot_id=ELSEWHERE).to_bytes())
            (root / "new").rename(path)
        case "overwritten":
            path.write_bytes(a_holder().to_bytes())
        case "emptied":
            path.write_bytes(b"")
        case "directory removed":
            path.parent.rename(root / "aside")
        case _:
            (root / LEASE_DIRECTORY / "2").write_bytes(a_holder().to_bytes())
    if damage == "overwritten" and storage.is_locked("x") is None:
        return  # there the next beat of the counter may have written it anew
    lost(lease)


def test_holder_of_a_removed_lease_does_not_disturb_its_successor(
    storage: Storage, root: Path, take: Take
):
    first = take(storage, 1)
    (root / LEASE_DIRECTORY / "1").unlink()
    second = take(storage, 2)
    assert second.epoch == 1, "nothing is left that tells of the first one"
    first.tell_trainer_gone()
    lost(first)
    first.release()
    second.check()
    with pytest.raises(DirectoryInUseError, match=SESSIONS[2]):
        take(storage, 3)


def test_later_daemon_of_a_session_fences_the_earlier_one(storage: Storage, take: Take):
    first = take(storage, 1)
    second = take(storage, 1, timeout_s=60.0)
    assert second.epoch == 2
    assert SESSIONS[1] in lost(first)
    first.release()
    second.check()


# Taking over --------------------------------------------------------------------------------------


def test_daemon_elsewhere_without_a_trainer_is_asked_then_left_without_the_lease(
    network: Storage, root: Path, take: Take
):
    class Asking(NetworkStorage):
        def publish(self, temporary: str, final: str) -> bool:
            published = super().publish(temporary, final)
            if final.endswith(".takeover"):
                _await(lambda: first.end_by < float("inf"))  # it was told by when to leave
            return published

    first = take(network, 1, boot_id=ELSEWHERE)
    _tell_trainer_gone(first, network)
    with contextlib.closing(Asking(str(root))) as asking:
        second = take(asking, 2, timeout_s=4 * PERIOD_S)
        assert second.epoch == 2
        assert SESSIONS[2] in lost(first)
        assert first.end_by < time.monotonic() + 4 * PERIOD_S
        first.release()
        second.check()
        second.release()


def test_daemon_without_a_trainer_that_leaves_in_time_is_waited_for(storage: Storage, take: Take):
    first = take(storage, 1)
    _tell_trainer_gone(first, storage)
    leaving = threading.Thread(
        target=lambda: (_await(lambda: first.end_by < float("inf")), first.release())
    )
    leaving.start()
    second = take(storage, 2, timeout_s=60.0)
    leaving.join()
    assert second.epoch == 2
    second.check()


@pytest.mark.parametrize("within_s", ["NaN", "-1", "1" + "0" * 400, "[]", "[" * 2000, '"soon"'])
def test_a_request_to_leave_that_makes_no_sense_is_none(
    storage: Storage, root: Path, take: Take, within_s: str
):
    lease = take(storage, 1)
    (root / LEASE_DIRECTORY / "1.takeover").write_text(f'{{"within_s": {within_s}}}')
    asked = threading.Event()
    read = lease._read_request

    def note() -> float:
        try:
            return read()
        finally:
            asked.set()

    lease._read_request = note
    lease.tell_trainer_gone()
    assert asked.wait(60.0)
    assert lease.end_by == float("inf")
    lease.release()
    assert not lease._thread.is_alive()
    record = LeaseRecord.from_bytes((root / LEASE_DIRECTORY / "1").read_bytes())
    assert record is not None and record.released


def test_daemon_with_a_trainer_is_not_asked_to_leave(storage: Storage, root: Path, take: Take):
    take(storage, 1)
    with pytest.raises(DirectoryInUseError):
        take(storage, 2, timeout_s=60.0)
    assert files(root) == ["1", "1.spare"]


@pytest.mark.parametrize("state", ["alive", "without a trainer", "released"])
def test_later_daemon_of_a_session_refuses_a_directory_that_another_session_had_since(
    storage: Storage, root: Path, take: Take, state: str
):
    first = take(storage, 1)
    if state == "without a trainer":
        _tell_trainer_gone(first, storage)
    elif state == "released":
        first.release()
    with pytest.raises(WriteError, match=f"{SESSIONS[1]}.* has used this directory since"):
        Lease(
            storage,
            LeaseRecord.current(SESSIONS[2], os.getpid()),
            0.0,
            lambda: True,
            PERIOD_S,
            resumes=True,
        )
    assert "1.takeover" not in files(root), "nobody is asked to leave"
    if state != "released":
        first.check()


def test_holder_that_is_replaced_between_two_looks_is_not_taken_for_nobody(
    storage: Storage, root: Path, take: Take
):
    first = take(storage, 1)

    class Overtaken(PosixStorage):
        """A daemon that finds the lease of one daemon listed, and reads it once the next one has
        tidied it away.
        """

        def read(self, path: str, max_nbytes: int) -> bytes | None:
            if path == f"{LEASE_DIRECTORY}/1":
                first.release(final=False)
                successors.append(
                    Lease(
                        storage,
                        LeaseRecord.current(SESSIONS[1], os.getpid()),
                        0.0,
                        lambda: True,
                        PERIOD_S,
                    )
                )
            return super().read(path, max_nbytes)

    successors: list[Lease] = []
    with contextlib.closing(Overtaken(str(root))) as slow:
        holder = current_holder(slow)
    assert len(successors) == 1 and not (root / LEASE_DIRECTORY / "1").exists()
    assert holder is not None and (holder.session, holder.epoch) == (SESSIONS[1], 2)
    successors[0].release()


def _tell_trainer_gone(lease: Lease, storage: Storage) -> None:
    """And wait until it can be read, which it is told by and by."""
    lease.tell_trainer_gone()
    _await(lambda: (holder := current_holder(storage)) is not None and holder.trainer_gone)


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Space and permission -----------------------------------------------------------------------------


@pytest.mark.root
def test_full_disk_lets_the_holder_go_and_the_next_one_in(mount: Callable[..., Path], take: Take):
    root = mount("-t", "tmpfs", "-o", "size=256k", "none")
    with contextlib.closing(PosixStorage(str(root))) as storage:
        lease = take(storage, 1)
        filler = root / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096) == 4096:
                pass
        for session in range(2, 6):
            lease.check()
            lease.release()
            lease = take(storage, session)
            assert lease.epoch == session
        (root / f"{LEASE_DIRECTORY}/5.spare").unlink()
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            file.write(b"x" * 4096)
        lease.release()
        with pytest.raises(NoSpaceError):
            take(storage, 6)
        assert files(root) == ["5"]


@pytest.mark.root
def test_read_only_file_system_is_a_typed_error(mount: Callable[..., Path], take: Take):
    root = mount("-t", "tmpfs", "none")
    with contextlib.closing(PosixStorage(str(root))) as storage:
        take(storage, 1).release()
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        with pytest.raises(WriteError) as caught:
            take(storage, 2)
        assert caught.value.errno == errno.EROFS


# Races --------------------------------------------------------------------------------------------


def test_of_threads_that_take_it_at_once_one_gets_it(root: Path, take: Take):
    for kind, seed in [("local", 0), *(("network", seed) for seed in range(12))]:
        barrier = threading.Barrier(4)
        won: list[Lease] = []

        def attempt(
            session: int,
            kind: str = kind,
            seed: int = seed,
            barrier: threading.Barrier = barrier,
            won: Any = won,
        ) -> None:
            storage = KINDS[kind](str(root), 10 * seed + session)
            barrier.wait()
            with contextlib.suppress(DirectoryInUseError):
                won.append(take(storage, session))

        threads = [threading.Thread(target=attempt, args=(session,)) for session in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [lease] = won
        lease.check()
        lease.release()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_processes_that_die_at_any_moment_never_hold_it_two_at_a_time(
    root: Path, kind: str, take: Take, share: Share
):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    processes: list[subprocess.Popen[bytes]] = []
    kills, begun, journal = 0, 0, root / "journal"
    journal.touch()
    deadline = time.monotonic() + 500
    try:
        for _ in share.rounds(1000):
            begun = journal.read_bytes().count(b"begin")
            if begun >= 60 and kills >= 40:
                break
            assert time.monotonic() < deadline
            while len(processes) < 4:
                processes.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            __file__,
                            "contend",
                            root,
                            kind,
                            str(chance.randrange(10**6)),
                        ],
                        env=ENVIRONMENT,
                        stderr=subprocess.PIPE,
                    )
                )
            # on a busy machine they need longer to come so far
            longest_s = 0.5 * max(1.0, kills / (10 + begun))
            time.sleep(chance.uniform(0, longest_s))
            victim = processes.pop(chance.randrange(4))
            victim.kill()
            assert victim.stderr is not None
            complaints = victim.stderr.read().decode()
            victim.stderr.close()
            assert victim.wait() == -signal.SIGKILL, complaints
            kills += 1
    finally:
        for process in processes:
            process.kill()
            assert process.stderr is not None
            process.stderr.close()
            process.wait()
    lines = [line.split(" ") for line in journal.read_text().splitlines()]
    present, epoch, turns = "", 0, 0
    for what, who, *rest in lines:
        if what == "begin":
            assert int(rest[0]) > epoch, "every taking has a higher epoch"
            present, epoch, turns = who, int(rest[0]), turns + 1
        else:
            assert who == present, f"{who} {what} while {present} holds it"
    assert turns >= 60 or not campaigns.WHOLE
    with contextlib.closing(PosixStorage(str(root))) as storage:
        # which may leave what somebody has begun who was killed before the same number
        take(storage, 1).release()
        lease = take(storage, 2)
        assert files(root) == [f"{lease.epoch}", f"{lease.epoch}.spare"]
    print(f"{turns} turns, {kills} kills")
