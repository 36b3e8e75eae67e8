"""The suite of all storages, and what is their own, on POSIX file systems of several kinds."""

import errno
import fcntl
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from storage_suite import MIB, StorageConformance, get, noise, pages, put

from sidesave.errors import NoSpaceError, WriteError
from sidesave.writer_daemon.storage import PosixStorage, Storage


def names(folder: str | Path) -> list[str]:
    return [path.name for path in Path(folder).iterdir()]


class PosixConformance(StorageConformance):
    """What only a POSIX file system has: links, modes, and a root that may be moved or deleted.

    Nor does an object keep a prefix of its name from being there, or is a file there before it has
    its final name.
    """

    @pytest.fixture
    def root(self) -> Iterator[Path]:
        raise NotImplementedError

    @pytest.fixture
    def storage(self, root: Path) -> Iterator[Storage]:
        storage = PosixStorage(str(root))
        yield storage
        storage.close()

    @pytest.fixture
    def outside(self, root: Path) -> Path:
        """A directory beside the run directory that no operation may reach."""
        outside = root.with_name("outside")
        outside.mkdir()
        (outside / "precious").write_text("precious")
        return outside

    def test_file_is_there_under_its_temporary_name(self, storage: Storage):
        put(storage, ".file.1", b"first", "file")
        put(storage, ".file.2", b"second", "file")
        assert get(storage, ".file.1") == b"first"
        assert storage.publish(".file.1", "file")
        assert not storage.publish(".file.2", "file")
        assert get(storage, ".file.2") == b"second"

    def test_directory_is_not_made_in_the_place_of_a_file(self, storage: Storage):
        put(storage, "step", b"1")
        with pytest.raises(WriteError) as caught:
            storage.make_directory("step", 0o700)
        assert caught.value.errno == errno.EEXIST

    def test_rename_onto_a_file_is_refused(self, storage: Storage):
        storage.make_directory(".partial", 0o700)
        put(storage, ".partial/file", b"new")
        put(storage, "step", b"old")
        with pytest.raises(WriteError) as caught:
            storage.rename_directory(".partial", "step")
        assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, f"{storage.root}/step")
        assert get(storage, ".partial/file") == b"new"
        assert sorted(storage.list_directory("")) == [".partial", "step"]

    def test_removing_a_tree_follows_no_link(self, storage: Storage, root: Path, outside: Path):
        (root / "step").mkdir()
        (root / "step/link").symlink_to(outside)
        (root / "step/file-link").symlink_to(outside / "precious")
        storage.remove_tree("step")
        assert not (root / "step").exists()
        (root / "step").symlink_to(outside)
        storage.remove_tree("step")
        assert not (root / "step").is_symlink()
        assert (outside / "precious").read_text() == "precious"

    def test_a_tree_of_any_depth_is_removed(self, storage: Storage, root: Path):
        (root / "step").mkdir()
        fd = os.open(root / "step", os.O_RDONLY)
        # deeper than Python recurses, with a path that is longer than the kernel takes
        for _ in range(1100):
            os.mkdir("deep", dir_fd=fd)
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
            below = os.open("deep", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
        os.close(fd)
        storage.remove_tree("step")
        assert not (root / "step").exists()

    def test_nothing_is_written_or_read_through_a_link(
        self, storage: Storage, root: Path, outside: Path
    ):
        (root / "dangling").symlink_to(outside / "new")
        (root / "link").symlink_to(outside / "precious")
        (root / "folder").symlink_to(outside)
        put(storage, ".temporary", b"1")
        refused: list[Callable[[], object]] = [
            lambda: storage.create("dangling", 1),
            lambda: storage.create("link", 1),
            lambda: storage.read("link", 100),
            lambda: get(storage, "link"),
            lambda: storage.list_directory("folder"),
            lambda: storage.make_directory("folder", 0o700),
            lambda: storage.rename_directory(".temporary", "dangling"),
        ]
        for operation in refused:
            with pytest.raises(WriteError):
                operation()
        assert not storage.publish(".temporary", "dangling")
        assert names(outside) == ["precious"]

    def test_moved_run_directory_is_still_the_one_written_to(self, storage: Storage, root: Path):
        moved = root.with_name("moved")
        root.rename(moved)
        root.mkdir()
        put(storage, ".file", b"1")
        storage.publish(".file", "file")
        assert names(moved) == ["file"]
        assert names(root) == []

    def test_deleted_run_directory_is_a_typed_error(self, storage: Storage, root: Path):
        root.rmdir()
        for operation in (
            lambda: storage.make_directory("step", 0o700),
            lambda: storage.create("file", 1),
        ):
            with pytest.raises(WriteError) as caught:
                operation()
            assert caught.value.errno == errno.ENOENT
        assert storage.list_directory("") == []

    @pytest.mark.parametrize("umask", [0o022, 0o027, 0o002, 0o077])
    def test_unfinished_is_private_and_finished_follows_the_umask(
        self, storage: Storage, root: Path, umask: int
    ):
        before = os.umask(umask)
        try:
            storage.make_directory(".partial", 0o700)
            put(storage, ".partial/file", b"1")
            assert stat.S_IMODE((root / ".partial").stat().st_mode) == 0o700
            storage.open_to_readers(".partial")
        finally:
            os.umask(before)
        assert stat.S_IMODE((root / ".partial").stat().st_mode) == 0o777 & ~umask
        assert stat.S_IMODE((root / ".partial/file").stat().st_mode) == 0o666 & ~umask

    def test_set_group_id_of_a_shared_directory_is_kept(self, storage: Storage, root: Path):
        root.chmod(0o2775)
        storage.make_directory(".partial", 0o700)
        storage.open_to_readers(".partial")
        assert (root / ".partial").stat().st_mode & stat.S_ISGID

    @pytest.mark.parametrize("count", [0, 1, 511, 4096, 4097, 9 * 512, 64 << 10])
    def test_short_write_goes_on_where_it_stopped(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch, count: int
    ):
        data, write = noise(MIB)[: MIB - 5], os.pwrite
        shorts = [count, count, 64 << 10, count]

        def pwrite(fd: int, buffer: memoryview, offset: int) -> int:
            if not shorts or len(buffer) <= 64 << 10:
                return write(fd, buffer, offset)
            done, block = shorts.pop(), 4096 if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else 1
            write(fd, buffer[: done - done % block], offset)
            return done

        with storage.creating("file", len(data)) as output:
            monkeypatch.setattr(os, "pwrite", pwrite)
            output.write_at(pages(data), 0)
            output.finish(len(data))
        monkeypatch.undo()
        assert shorts == []
        assert get(storage, "file") == data

    def test_write_that_gets_nowhere_is_an_error(
        self, storage: Storage, root: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(os, "pwrite", lambda fd, buffer, offset: 0)
        with storage.creating("file", 8192) as output, pytest.raises(WriteError) as caught:
            output.write_at(pages(b"1" * 8192), 0)
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, f"{root}/file")
        assert "cannot write 8,192 bytes at byte 0" in str(caught.value)

    @pytest.mark.parametrize("count", [1, 511, 4096, 4097, 64 << 10])
    def test_short_read_goes_on_where_it_stopped(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch, count: int
    ):
        data, read, read_direct = noise(MIB)[: MIB - 5], os.read, os.preadv
        put(storage, "file", data)
        shorts = [count, 64 << 10, count]

        def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
            return min(read_direct(fd, buffers, offset), shorts.pop() if shorts else MIB)

        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(os, "read", lambda fd, nbytes: read(fd, min(nbytes, count * 97)))
        assert get(storage, "file") == data
        assert storage.read("file", MIB) == data
        assert shorts == []

    def test_read_that_gets_nowhere_is_an_error(
        self, storage: Storage, root: Path, monkeypatch: pytest.MonkeyPatch
    ):
        put(storage, "file", noise(MIB)[:MIB])
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 17)
        with pytest.raises(WriteError) as caught:
            get(storage, "file")
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, f"{root}/file")

    def test_rename_that_was_carried_out_and_fails_all_the_same_is_none(
        self, storage: Storage, root: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """A network file system repeats a request whose answer was lost, and finds nothing left to
        rename.
        """
        rename = os.rename

        def late(*names: str, **fds: int) -> None:
            rename(*names, **fds)
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")

        storage.make_directory(".partial", 0o700)
        monkeypatch.setattr(os, "rename", late)
        storage.rename_directory(".partial", "step")
        assert names(root) == ["step"]
        with pytest.raises(WriteError):
            storage.rename_directory(".partial", "other")

    def test_something_else_in_the_place_of_a_file_blocks_nobody(
        self, storage: Storage, root: Path
    ):
        os.mkfifo(root / "fifo")
        (root / "folder").mkdir()
        for name in ("fifo", "folder"):
            for operation in (
                lambda name=name: storage.read(name, 100),
                lambda name=name: get(storage, name),
            ):
                with pytest.raises(WriteError) as caught:
                    operation()
                assert caught.value.errno in (errno.ENXIO, errno.EISDIR)
                assert caught.value.filename == f"{root}/{name}"

    def test_something_else_in_the_place_of_a_lock_blocks_nobody(
        self, storage: Storage, root: Path, outside: Path
    ):
        os.mkfifo(root / "fifo")
        (root / "link").symlink_to(outside / "precious")
        for operation in (storage.share, storage.lock):
            unlock = operation("fifo")
            assert unlock
            unlock()
        for operation in (storage.share, storage.is_shared, storage.lock):
            with pytest.raises(WriteError) as caught:
                operation("link")
            assert caught.value.errno == errno.ELOOP

    def test_a_share_ends_with_its_process(self, storage: Storage, root: Path):
        (root / "file").write_text("1")
        code = (
            "import sys\n"
            "from sidesave.writer_daemon.storage import PosixStorage\n"
            "unshare = PosixStorage(sys.argv[1]).share('file')\n"
            "print('shared' if unshare else 'not to be had', flush=True)\n"
            "sys.stdin.read()\n"
        )
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [sys.executable, "-c", code, root], stdin=pipe, stdout=pipe
        ) as holder:
            try:
                assert holder.stdout is not None and holder.stdout.readline() == b"shared\n"
                assert storage.is_shared("file")
            finally:
                holder.kill()
            holder.wait()
            assert storage.is_shared("file") is False

    @pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
    def test_where_the_system_has_no_locks_nothing_is_shared(
        self, storage: Storage, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ):
        def refuse(fd: int, kind: int) -> None:
            raise OSError(code, os.strerror(code))

        (root / "file").write_text("1")
        monkeypatch.setattr(fcntl, "flock", refuse)
        before = len(names("/proc/self/fd"))
        assert storage.share("file") is None
        assert len(names("/proc/self/fd")) == before

    def test_error_of_close_is_none_of_the_files(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ):
        """By then fsync has told what became of it; the descriptor is gone either way."""
        close = os.close

        def late(fd: int) -> None:
            close(fd)
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "close", late)
        put(storage, "file", b"1")
        assert get(storage, "file") == b"1"
        assert storage.list_directory("") == ["file"]
        storage.close()
        monkeypatch.undo()

    def test_no_descriptor_is_left_open(self, storage: Storage):
        put(storage, "warm-up", b"1")
        before = len(names("/proc/self/fd"))
        put(storage, "file", b"1" * 5000)
        get(storage, "file")
        storage.list_directory("")
        for failing in ("file", "none/file"):
            with pytest.raises(WriteError):
                storage.create(failing, 1)
        storage.make_directory("folder", 0o700)
        for operation in (lambda: storage.read("folder", 9), lambda: get(storage, "folder")):
            with pytest.raises(WriteError):
                operation()
        for operation in (storage.share, storage.lock):
            unlock = operation("file")
            assert unlock
            unlock()
        storage.is_shared("file")
        assert len(names("/proc/self/fd")) == before


class TestLocalDisk(PosixConformance):
    """Where pytest keeps its files: ext4 on the machines this was written on."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        (tmp_path / "run").mkdir()
        return tmp_path / "run"

    def test_file_is_published_once_where_there_are_no_hard_links(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ):
        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
        self.test_file_is_published_once(storage)

    def test_missing_root_is_a_typed_error(self, root: Path):
        with pytest.raises(WriteError) as caught:
            PosixStorage(f"{root}/none")
        assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, f"{root}/none")

    def test_writing_goes_past_the_page_cache(self, storage: Storage, root: Path):
        with storage.creating("file", 8192) as output:
            flags = [
                int(line.split()[1], 8)
                for fd in names("/proc/self/fd")
                if os.path.realpath(f"/proc/self/fd/{fd}") == f"{root}/file"
                for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
                if line.startswith("flags:")
            ]
            output.finish(0)
        if not any(flag & os.O_DIRECT for flag in flags):
            pytest.skip(f"the file system of {root} does not support O_DIRECT")

    @pytest.mark.skipif(shutil.which("fiu-run") is None, reason="needs fiu-run (Debian: fiu-utils)")
    @pytest.mark.parametrize("point", ["posix/io/sync/fsync", "posix/io/rw/pwrite"])
    def test_error_of_the_medium_is_a_typed_error(self, root: Path, point: str):
        code = (
            "import mmap, sys\n"
            "from sidesave.errors import WriteError\n"
            "from sidesave.writer_daemon.storage import PosixStorage\n"
            "storage = PosixStorage(sys.argv[1])\n"
            "try:\n"
            "    with storage.creating('file', 4096) as output:\n"
            "        output.write_at(memoryview(mmap.mmap(-1, 4096)), 0)\n"
            "        output.finish(4096)\n"
            "except WriteError as error:\n"
            "    print(error.errno, error.filename)\n"
        )
        fault = f"enable name={point},failinfo={errno.EIO}"
        command = ["fiu-run", "-x", "-c", fault, sys.executable, "-c", code, root]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.stdout.startswith(f"{errno.EIO} {root}/file"), done.stderr


class TestTmpfs(PosixConformance):
    @pytest.fixture
    def root(self) -> Iterator[Path]:
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("/dev/shm is not writable")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            (Path(name) / "run").mkdir()
            yield Path(name) / "run"


@pytest.mark.root
class TestWithoutDirectIo(PosixConformance):
    """ramfs: no O_DIRECT, no fallocate, no word about free space."""

    @pytest.fixture
    def root(self, mount: Callable[..., Path]) -> Path:
        root = mount("-t", "ramfs", "none") / "run"
        root.mkdir()
        return root

    def test_the_file_system_refuses_direct_io(self, root: Path):
        with pytest.raises(OSError, match="Invalid argument"):
            os.open(root / "file", os.O_CREAT | os.O_RDWR | os.O_DIRECT)


class SmallDisk(PosixConformance):
    """A file system of a few megabytes, to be filled."""

    def test_what_does_not_fit_is_refused_with_the_figures_before_a_byte_is_written(
        self, storage: Storage, root: Path
    ):
        free = storage.free_nbytes()
        wanted = free + 5 * MIB
        with pytest.raises(NoSpaceError) as caught:
            storage.create("file", wanted)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, f"{root}/file")
        assert f"{wanted:,}" in str(caught.value)
        assert f"{free:,}" in str(caught.value)
        assert storage.list_directory("") == [], "a refused file takes no space"
        assert storage.free_nbytes() == free

    def test_space_that_runs_out_under_way_is_a_typed_error(self, storage: Storage, root: Path):
        data = pages(noise(storage.free_nbytes() + 5 * MIB))
        with storage.creating("file", 0) as output, pytest.raises(NoSpaceError) as caught:
            output.write_at(data, 0)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, f"{root}/file")
        assert re.search(
            r"cannot write [\d,]+ bytes at byte [\d,]+ \([\d,]+ bytes.* are free\)",
            str(caught.value),
        )

    def test_there_is_room_again_after_a_removal(self, storage: Storage):
        nbytes = storage.free_nbytes() // 2
        for _ in range(4):
            storage.make_directory("step", 0o700)
            put(storage, "step/file", noise(nbytes)[:nbytes])
            storage.remove_tree("step")


@pytest.mark.root
class TestSmallExt4(SmallDisk):
    @pytest.fixture
    def root(self, mount: Callable[..., Path], tmp_path: Path) -> Path:
        return loop_mounted(mount, tmp_path, "ext4")


@pytest.mark.root
class TestWithoutPreallocation(SmallDisk):
    """ext2: no fallocate, so that only the file system's own figures tell what fits."""

    @pytest.fixture
    def root(self, mount: Callable[..., Path], tmp_path: Path) -> Path:
        return loop_mounted(mount, tmp_path, "ext2")


@pytest.mark.root
class TestSmallTmpfs(SmallDisk):
    @pytest.fixture
    def root(self, mount: Callable[..., Path]) -> Path:
        root = mount("-t", "tmpfs", "-o", "size=8m", "none") / "run"
        root.mkdir()
        return root


def loop_mounted(mount: Callable[..., Path], folder: Path, kind: str) -> Path:
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    make = shutil.which(f"mkfs.{kind}") or shutil.which(f"mkfs.{kind}", path="/usr/sbin:/sbin")
    if make is None:
        pytest.skip(f"needs mkfs.{kind}")
    subprocess.run([make, "-q", "-F", image], check=True, capture_output=True)
    root = mount("-o", "loop", image) / "run"
    root.mkdir()
    return root


def test_reading_the_umask_never_changes_it(tmp_path: Path):
    """Another thread of the trainer may create a file at that moment: it must not become
    world-writable.
    """
    seen: set[int] = set()
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            status = Path("/proc/self/status").read_text()
            seen.add(int(status.partition("Umask:")[2].split()[0], 8))

    watcher = threading.Thread(target=watch)
    before = os.umask(0o077)
    try:
        watcher.start()
        for number in range(300):
            storage = PosixStorage(str(tmp_path))
            storage.make_directory(f"{number}", 0o700)
            storage.open_to_readers(f"{number}")
            storage.close()
    finally:
        stop.set()
        watcher.join()
        os.umask(before)
    assert seen == {0o077}
