"""Files on their way into an object store: in order, whole or not at all, and in little memory."""

import errno
import mmap
import os
import subprocess
import sys
import threading

import pytest
from object_server import ObjectServer

from sidesave.errors import WriteError
from sidesave.writer_daemon.storage.remote import Bucket
from sidesave.writer_daemon.storage.upload import AT_ONCE, StreamedOutput

MIB = 1 << 20
CHUNK_NBYTES = 16 * MIB


@pytest.fixture
def bucket(server: ObjectServer) -> Bucket:
    return Bucket("s3://bucket/run", server.options)


def noise(nbytes: int) -> memoryview:
    buffer = mmap.mmap(-1, -(-nbytes // 4096) * 4096)
    buffer[:] = (os.urandom(65537) * (len(buffer) // 65537 + 1))[: len(buffer)]
    return memoryview(buffer)


def upload(
    output: StreamedOutput, data: memoryview, nbytes: int, threads: int = 4
) -> list[BaseException]:
    """As the writer does: several threads, each with the next chunk; what they have raised."""
    offsets = iter(range(0, nbytes, CHUNK_NBYTES))
    lock, errors = threading.Lock(), list[BaseException]()

    def work() -> None:
        try:
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                output.write_at(data[offset : offset + CHUNK_NBYTES], offset)
        except WriteError as error:
            errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return errors


@pytest.mark.parametrize("nbytes", [MIB + 1, 5 * MIB, 5 * MIB + 1, 16 * MIB, 37 * MIB + 5])
def test_a_large_file_arrives_as_it_was_written(server: ObjectServer, bucket: Bucket, nbytes: int):
    data = noise(nbytes)
    output = StreamedOutput(bucket, "file", nbytes)
    assert upload(output, data, nbytes) == []
    output.finish(nbytes)
    output.close()
    assert (server.root / "bucket/run/file").read_bytes() == bytes(data[:nbytes])
    parts = -(-nbytes // (5 * MIB))
    expected = {"PUT": 1} if parts == 1 else {"START": 1, "PART": parts, "COMPLETE": 1}
    assert {method: server.count(method) for method in expected} == expected
    assert len(server.requests) == sum(expected.values())
    assert server.most_at_once <= AT_ONCE


def test_nothing_is_there_before_the_end_or_after_it_was_given_up(
    server: ObjectServer, bucket: Bucket
):
    data = noise(40 * MIB)
    output = StreamedOutput(bucket, "file", 40 * MIB)
    output.write_at(data[:CHUNK_NBYTES], 0)
    assert bucket.list_all("") == []
    output.close()
    with pytest.raises(WriteError) as caught:
        output.write_at(data[CHUNK_NBYTES : 2 * CHUNK_NBYTES], CHUNK_NBYTES)
    assert caught.value.errno == errno.ECANCELED
    assert bucket.list_all("") == []
    assert server.uploads == {}, "its parts are removed"


@pytest.mark.parametrize("method", ["START", "PART", "COMPLETE"])
def test_who_writes_is_told_of_what_the_store_refuses(
    server: ObjectServer, bucket: Bucket, method: str
):
    server.fault = lambda request, number: 403 if request.method == method else None
    data = noise(40 * MIB)
    output = StreamedOutput(bucket, "file", 40 * MIB)
    errors = upload(output, data, 40 * MIB)
    if not errors:
        with pytest.raises(WriteError) as caught:
            output.finish(40 * MIB)
        errors = [caught.value]
    output.close()
    assert all(isinstance(error, WriteError) and error.errno == errno.EACCES for error in errors)
    assert bucket.list_all("") == []


def test_one_file_at_a_time_is_uploaded(server: ObjectServer, bucket: Bucket):
    data = noise(20 * MIB)
    outputs = [StreamedOutput(bucket, f"file-{number}", 20 * MIB) for number in range(3)]
    for output in outputs:
        assert upload(output, data, 20 * MIB) == []
        output.finish(20 * MIB)
    keys = [request.key for request in server.requests if request.method in ("START", "COMPLETE")]
    assert keys == sorted(keys)


@pytest.mark.slow
def test_an_upload_of_256_mib_takes_less_than_48_mib_of_memory(server: ObjectServer):
    """In a process like the daemon's: without torch, and what is uploaded lies in shared memory."""
    code = """
import mmap, os, pathlib, sys, threading
from sidesave.writer_daemon.storage.remote import Bucket
from sidesave.writer_daemon.storage.upload import AT_ONCE, StreamedOutput
assert "torch" not in sys.modules
nbytes, chunk = 256 << 20, 16 << 20
fd = os.memfd_create("arena")
os.ftruncate(fd, nbytes)
data = memoryview(mmap.mmap(fd, nbytes))
for offset in range(0, nbytes, 1 << 20):
    data[offset : offset + (1 << 20)] = os.urandom(1 << 20)
most, stop = 0, threading.Event()
def watch():
    global most
    while not stop.wait(0.002):
        status = pathlib.Path("/proc/self/status").read_text()
        most = max(most, int(status.partition("RssAnon:")[2].split()[0]) << 10)
watcher = threading.Thread(target=watch)
watcher.start()
output = StreamedOutput(Bucket("s3://bucket/run", {}), "file", nbytes)
offsets, lock = iter(range(0, nbytes, chunk)), threading.Lock()
def work():
    while True:
        with lock:
            offset = next(offsets, None)
        if offset is None:
            return
        output.write_at(data[offset : offset + chunk], offset)
workers = [threading.Thread(target=work) for _ in range(4)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
output.finish(nbytes)
output.close()
stop.set()
watcher.join()
print(most)
"""
    environment = os.environ | {name.upper(): value for name, value in server.options.items()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (server.root / "bucket/run/file").stat().st_size == 256 * MIB
    assert int(done.stdout) < 48 * MIB
