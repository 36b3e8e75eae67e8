"""What the writer relies on, whatever the run directory lives on: one suite, subclassed once per
backend.
"""

import errno
import mmap
import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidesave.errors import WriteError
from sidesave.writer_daemon.storage import Storage

MIB = 1 << 20


def pages(data: bytes) -> memoryview:
    """``data`` as the writer hands it over: page-aligned memory, padded to whole pages."""
    buffer = mmap.mmap(-1, max(4096, -(-len(data) // 4096) * 4096))
    buffer[: len(data)] = data
    return memoryview(buffer)


def put(storage: Storage, path: str, data: bytes, final: str | None = None) -> None:
    """Write a whole file under its name, or under a temporary one where it is to be published as
    ``final``.
    """
    with storage.creating(path, len(data), final) as output:
        output.write_at(pages(data), 0)
        output.finish(len(data))


def get(storage: Storage, path: str) -> bytes:
    with storage.open(path) as source:
        return bytes(source.read_at(0, source.nbytes))


def noise(nbytes: int) -> bytes:
    return os.urandom(min(nbytes, 65536)) * (nbytes // 65536 + 1)


class StorageConformance:
    """The promises of ``Storage``. A backend's class provides ``storage``, fresh and empty for each
    test.
    """

    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        raise NotImplementedError

    # Files

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 3 * MIB + 5])
    def test_file_reads_back_with_its_length(self, storage: Storage, nbytes: int):
        data = noise(nbytes)[:nbytes]
        put(storage, "file", data)
        assert get(storage, "file") == data
        assert storage.read("file", nbytes) == data

    def test_chunks_may_be_written_in_any_order_by_several_threads(self, storage: Storage):
        data = noise(2 * MIB)[: 2 * MIB - 77]
        view = pages(data)
        with storage.creating("file", len(data)) as output:
            offsets = list(range(0, len(view), 256 << 10))
            threads = [
                threading.Thread(target=output.write_at, args=(view[offset:][: 256 << 10], offset))
                for offset in reversed(offsets)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            output.finish(len(data))
        assert get(storage, "file") == data

    def test_create_never_opens_an_existing_file(self, storage: Storage):
        put(storage, "file", b"first")
        with pytest.raises(WriteError) as caught:
            storage.create("file", 5)
        assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, f"{storage.root}/file")
        assert get(storage, "file") == b"first"

    def test_create_in_a_missing_directory_is_refused(self, storage: Storage):
        with pytest.raises(WriteError) as caught:
            storage.create("nowhere/file", 5)
        assert (caught.value.errno, caught.value.filename) == (
            errno.ENOENT,
            f"{storage.root}/nowhere/file",
        )
        assert storage.list_directory("") == []

    def test_file_is_published_once(self, storage: Storage):
        put(storage, ".file.1", b"first", "file")
        put(storage, ".file.2", b"second", "file")
        assert storage.publish(".file.1", "file")
        assert not storage.publish(".file.2", "file")
        assert get(storage, "file") == b"first"
        assert sorted(storage.list_directory("")) == [".file.2", "file"]

    def test_publishing_again_after_a_crash_replaces_nothing(self, storage: Storage):
        put(storage, ".file.1", b"content", "file")
        assert storage.publish(".file.1", "file")
        with pytest.raises(WriteError):
            storage.publish(".file.1", "file")
        assert get(storage, "file") == b"content"

    @pytest.mark.parametrize("nbytes", [5, 3 * MIB + 5])
    def test_a_file_that_has_a_further_name_outlives_the_first(self, storage: Storage, nbytes: int):
        data = noise(nbytes)[:nbytes]
        for name in ("old", "new"):
            storage.make_directory(name, 0o700)
        put(storage, "old/.file", data, "old/file")
        storage.publish("old/.file", "old/file")
        assert storage.link("old/file", "new/linked")
        storage.sync_directory("new")
        assert storage.list_directory("new") == ["linked"]
        storage.remove_tree("old")
        assert get(storage, "new/linked") == data

    def test_a_name_that_is_taken_is_not_linked_and_keeps_its_file(self, storage: Storage):
        put(storage, "old", b"old")
        put(storage, "new", b"new")
        assert not storage.link("old", "new")
        assert (get(storage, "old"), get(storage, "new")) == (b"old", b"new")

    def test_what_is_not_there_is_not_linked(self, storage: Storage):
        put(storage, "old", b"old")
        for old, new in (("missing", "new"), ("missing/file", "new")):
            assert not storage.link(old, new)
        assert storage.list_directory("") == ["old"]

    def test_read_is_limited(self, storage: Storage):
        put(storage, "file", b"12345")
        assert storage.read("file", 5) == b"12345"
        with pytest.raises(WriteError) as caught:
            storage.read("file", 4)
        assert caught.value.errno == errno.EFBIG
        assert storage.read("missing", 4) is None
        assert storage.read("missing/file", 4) is None

    def test_any_stretch_of_a_file_can_be_read(self, storage: Storage):
        data = noise(30_000)[:30_001]
        put(storage, "file", data)
        with storage.open("file") as source:

            @settings(max_examples=200)
            @given(st.integers(0, 31_000), st.integers(0, 31_000))
            def stretch(offset: int, nbytes: int) -> None:
                assert bytes(source.read_at(offset, nbytes)) == data[offset : offset + nbytes]

            assert source.nbytes == len(data)
            stretch()
            assert bytes(source.read_at(4095, 2)) == data[4095:4097]

    def test_missing_file_cannot_be_opened(self, storage: Storage):
        with pytest.raises(WriteError) as caught, storage.open("missing"):
            pass
        assert (caught.value.errno, caught.value.filename) == (
            errno.ENOENT,
            f"{storage.root}/missing",
        )

    def test_remove_may_be_repeated(self, storage: Storage):
        put(storage, "file", b"1")
        for _ in range(2):
            storage.remove("file")
        assert storage.list_directory("") == []

    def test_everything_can_be_synced(self, storage: Storage):
        storage.make_directory("step", 0o700)
        put(storage, "step/file", b"1")
        storage.sync_directory("step")
        storage.sync_directory("")
        with pytest.raises(WriteError) as caught:
            storage.sync_directory("none")
        assert caught.value.filename == f"{storage.root}/none"

    # Directories

    def test_directory_is_made_once(self, storage: Storage):
        assert storage.make_directory("step", 0o700)
        put(storage, "step/file", b"1")
        assert not storage.make_directory("step", 0o700)
        assert storage.list_directory("step") == ["file"]

    def test_missing_directory_lists_as_empty(self, storage: Storage):
        assert storage.list_directory("none") == []

    def test_listing_is_read_afresh(self, storage: Storage):
        for number in range(50):
            put(storage, f"file-{number:02}", b"")
            assert sorted(storage.list_directory("")) == [f"file-{n:02}" for n in range(number + 1)]

    def test_directory_is_renamed_with_its_content(self, storage: Storage):
        storage.make_directory(".partial", 0o700)
        put(storage, ".partial/file", b"1")
        storage.rename_directory(".partial", "step")
        assert storage.list_directory("") == ["step"]
        assert get(storage, "step/file") == b"1"

    @pytest.mark.parametrize("taken_by", ["an empty directory", "a full directory"])
    def test_rename_onto_an_existing_name_is_refused(self, storage: Storage, taken_by: str):
        storage.make_directory(".partial", 0o700)
        put(storage, ".partial/file", b"new")
        storage.make_directory("step", 0o700)
        if taken_by == "a full directory":
            put(storage, "step/file", b"old")
        with pytest.raises(WriteError) as caught:
            storage.rename_directory(".partial", "step")
        assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, f"{storage.root}/step")
        assert get(storage, ".partial/file") == b"new"
        assert sorted(storage.list_directory("")) == [".partial", "step"]

    def test_directory_is_exchanged_for_another(self, storage: Storage):
        for name in (".partial", "step"):
            storage.make_directory(name, 0o700)
            put(storage, f"{name}/file", name.encode())
        storage.exchange_directory(".partial", "step", ".replaced")
        assert sorted(storage.list_directory("")) == [".replaced", "step"]
        assert (get(storage, "step/file"), get(storage, ".replaced/file")) == (b".partial", b"step")

    def test_exchange_that_cannot_be_leaves_all_as_it_was(self, storage: Storage):
        storage.make_directory("step", 0o700)
        put(storage, "step/file", b"1")
        with pytest.raises(WriteError) as caught:
            storage.exchange_directory(".partial", "step", ".replaced")
        assert caught.value.errno == errno.ENOENT
        assert storage.list_directory("") == ["step"]
        assert get(storage, "step/file") == b"1"

    def test_name_of_a_removed_directory_is_free(self, storage: Storage):
        for content in (b"1", b"2"):
            storage.make_directory(".partial", 0o700)
            put(storage, ".partial/file", content)
            storage.rename_directory(".partial", "step")
            assert get(storage, "step/file") == content
            storage.rename_directory("step", ".trash")
            storage.remove_tree(".trash")
            assert storage.list_directory("") == []
            assert storage.read("step/file", 10) is None

    def test_small_file_is_replaced(self, storage: Storage):
        for content in (b"first", b"", b"third"):
            storage.replace("file", content)
            assert storage.read("file", 10) == content
        assert storage.list_directory("") == ["file"]

    def test_a_file_gets_its_name_in_a_folder_of_a_directory(self, storage: Storage):
        storage.make_directory("step", 0o700)
        storage.make_directory("step/folder", 0o777)
        assert storage.make_directory("step/folder", 0o777) is False
        with storage.creating("step/.temporary", 1, "step/folder/file") as output:
            output.write_all(b"1")
        assert storage.publish("step/.temporary", "step/folder/file")
        storage.publish_bytes("step", "folder/other", b"2", "attempt")
        storage.sync_directory("step/folder")
        assert storage.list_directory("step") == ["folder"]
        assert sorted(storage.list_directory("step/folder")) == ["file", "other"]
        assert (storage.read("step/folder/file", 9), storage.read("step/folder/other", 9)) == (
            b"1",
            b"2",
        )

    def test_tree_is_removed_with_all_that_is_in_it(self, storage: Storage):
        for name in ("step", "step/deep", "step/deep/er"):
            storage.make_directory(name, 0o700)
            put(storage, f"{name}/file", b"1")
        for _ in range(2):
            storage.remove_tree("step")
            assert storage.list_directory("") == []

    # Locks

    def test_a_file_is_shared_by_many_or_locked_by_one(self, storage: Storage):
        put(storage, "file", b"1")
        if storage.is_shared("file") is None:
            assert storage.share("file") is None
            pytest.skip("there are no locks")
        one, other = storage.share("file"), storage.share("file")
        assert one and other
        assert (storage.is_shared("file"), storage.is_locked("file")) == (True, False)
        with pytest.raises(WriteError) as caught:
            storage.lock("file")
        assert (caught.value.errno, caught.value.filename) == (errno.EAGAIN, f"{storage.root}/file")
        one()
        assert storage.is_shared("file")
        other()
        assert not storage.is_shared("file")
        unlock = storage.lock("file")
        assert unlock
        assert (storage.is_shared("file"), storage.is_locked("file")) == (False, True)
        with pytest.raises(WriteError) as caught:
            storage.share("file")
        assert (caught.value.errno, caught.value.filename) == (errno.EAGAIN, f"{storage.root}/file")
        unlock()
        again = storage.share("file")
        assert again
        again()

    def test_what_asks_for_a_lock_keeps_nobody_from_sharing(self, storage: Storage):
        put(storage, "file", b"1")
        if storage.is_shared("file") is None:
            pytest.skip("there are no locks")
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                storage.is_shared("file")

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            for _ in range(200):
                unshare = storage.share("file")
                assert unshare
                unshare()
        finally:
            stop.set()
            asking.join()

    def test_a_file_that_moves_stays_shared_and_nothing_else_takes_its_part(self, storage: Storage):
        storage.make_directory("step", 0o700)
        put(storage, "step/file", b"1")
        if storage.is_shared("step/file") is None:
            pytest.skip("there are no locks")
        unshare = storage.share("step/file")
        assert unshare
        storage.rename_directory("step", "trash")
        storage.make_directory("step", 0o700)
        put(storage, "step/file", b"2")
        assert not storage.is_shared("step/file")
        assert storage.is_shared("trash/file")
        unshare()
        assert not storage.is_shared("trash/file")

    def test_what_is_missing_is_shared_by_nobody(self, storage: Storage):
        if storage.is_shared("missing") is None:
            pytest.skip("there are no locks")
        assert storage.is_shared("missing") is False
        with pytest.raises(WriteError) as caught:
            storage.share("missing")
        assert (caught.value.errno, caught.value.filename) == (
            errno.ENOENT,
            f"{storage.root}/missing",
        )

    # Space and the end

    def test_free_space_is_known_or_said_to_be_plenty(self, storage: Storage):
        assert storage.free_nbytes() > 0

    def test_close_may_be_repeated(self, storage: Storage):
        storage.close()
        storage.close()
