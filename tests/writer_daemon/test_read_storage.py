"""What readers rely on, of every storage alike: a local disk, object stores of several kinds, and a
real server.
"""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import stores

from sidesave.errors import WriteError
from sidesave.writer_daemon.storage import ReadStorage, urls
from sidesave.writer_daemon.storage.remote import HEAD_NBYTES, ObjectStorage

LARGE = bytes(range(256)) * (3 * HEAD_NBYTES // 512)
FILES = {
    ".sidesave.rollback": b"back",
    "step-00000001/manifest.json": b"{}",
    "step-00000001/large.rank-00000.safetensors": LARGE,
    "step-00000001/empty.xxh3": b"",
    "step-00000001/a%20@b.bin": b"odd",
    "step-00000002/manifest.json": b"{ }",
}
KINDS = {
    "local": stores.local,
    "file": stores.by_file,
    "memory": stores.in_memory,
    "s3": stores.by_s3,
    "http": stores.by_http,
}


@pytest.fixture(params=[*KINDS, pytest.param("seaweed", marks=pytest.mark.slow)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ReadStorage]:
    directory = tmp_path / "run"
    for name, content in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    kind: str = request.param
    kinds = KINDS if kind in KINDS else {kind: stores.in_seaweed(request.getfixturevalue("weed"))}
    with contextlib.ExitStack() as opened:
        place, options = opened.enter_context(kinds[kind](directory))
        opened.enter_context(urls.using(options))
        yield opened.enter_context(contextlib.closing(urls.open_storage(place)))


def test_a_small_file_comes_whole(storage: ReadStorage):
    for name, content in FILES.items():
        assert storage.read(name, len(LARGE)) == content


def test_what_is_not_there_is_none(storage: ReadStorage):
    for name in (
        "none",
        "step-00000001/none",
        "step-00000003/manifest.json",
        "step-00000001/manifest.json/none",
    ):
        assert storage.read(name, 100) is None


def test_a_file_over_the_limit_is_an_error_that_names_it(storage: ReadStorage):
    assert storage.read("step-00000002/manifest.json", 3) == b"{ }"
    with pytest.raises(WriteError) as raised:
        storage.read("step-00000002/manifest.json", 2)
    assert raised.value.errno == errno.EFBIG
    assert raised.value.filename == f"{storage.root}/step-00000002/manifest.json"


def test_directories_are_listed_one_level_deep(storage: ReadStorage):
    if not storage.can_list:
        with pytest.raises(ValueError, match="cannot list"):
            storage.list_directory("")
        return
    assert sorted(storage.list_directory("")) == [
        ".sidesave.rollback",
        "step-00000001",
        "step-00000002",
    ]
    names = ["a%20@b.bin", "empty.xxh3", "large.rank-00000.safetensors", "manifest.json"]
    assert sorted(storage.list_directory("step-00000001")) == names
    assert storage.list_directory("step-00000003") == []


def test_any_range_of_an_open_file_can_be_read(storage: ReadStorage):
    spans = [
        (0, 8),
        (0, len(LARGE)),
        (HEAD_NBYTES - 3, 7),
        (len(LARGE) - 5, 5),
        (4096, 8192),
        (HEAD_NBYTES + 1, 1000),
    ]
    with storage.open("step-00000001/large.rank-00000.safetensors") as file:
        assert file.nbytes == len(LARGE)
        for offset, nbytes in spans:
            assert bytes(file.read_at(offset, nbytes)) == LARGE[offset : offset + nbytes]
        assert bytes(file.read_at(len(LARGE) - 5, 100)) == LARGE[-5:]
        assert bytes(file.read_at(len(LARGE), 1)) == b""
        each = [bytes(data) for data in file.read_each(iter(spans * 4))]
        assert each == [LARGE[offset : offset + nbytes] for offset, nbytes in spans] * 4


def test_an_empty_file_is_no_error(storage: ReadStorage):
    with storage.open("step-00000001/empty.xxh3") as file:
        assert (file.nbytes, bytes(file.read_at(0, 10))) == (0, b"")


def test_to_open_what_is_not_there_is_an_error_with_its_path(storage: ReadStorage):
    with pytest.raises(WriteError) as raised, storage.open("step-00000001/none"):
        pass
    assert raised.value.filename == f"{storage.root}/step-00000001/none"
    assert isinstance(raised.value.errno, int)


def test_ranges_are_read_into_the_memory_given(storage: ReadStorage):
    if not isinstance(storage, ObjectStorage):
        pytest.skip("a local file is read by its descriptor")
    memory = bytearray(b"x" * 1000)
    path = "step-00000001/large.rank-00000.safetensors"
    assert storage.read_into(path, 300_000, memoryview(memory)[100:900]) == 800
    assert memory == b"x" * 100 + LARGE[300_000:300_800] + b"x" * 100
    assert storage.read_into(path, len(LARGE) - 10, memoryview(memory)) == 10
    assert storage.read_into(path, len(LARGE) + 10, memoryview(memory)) == 0
