"""Files on their way into an object store: small ones in one request, large ones in parts while they are written."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator
from typing import Final

from sidesave.errors import SidesaveError, WriteError
from sidesave.writer_daemon.storage.base import OutputFile
from sidesave.writer_daemon.storage.remote import PART_NBYTES, Bucket

BUFFERED_NBYTES: Final = 1 << 20
"""Up to this size a file is kept until it is published, so that it has its name only if that is free."""
AT_ONCE: Final = 6
"""Parts under way at a time: those that end together leave a link idle for a round trip, and with more it is idle less.
They are sent from the memory that they were written from, and are not copied: of a copy, whose pieces have memory of
their own, that is 30 MiB, and two pieces more."""
_uploads = threading.Semaphore(1)
"""Files are uploaded one after the other; what ends one, and begins the next, goes on at the same time."""


class BufferedOutput(OutputFile):
    """A small file, in memory until it is finished and published; then each :meth:`finish` replaces the object."""

    def __init__(self, bucket: Bucket, key: str, *, published: bool) -> None:
        """Write to ``key``; one that counts as ``published`` has no other name, and must not be there."""
        self._bucket, self._key = bucket, key
        self._data = bytearray()
        self._is_new = published
        self._published = published
        self._lock = threading.Lock()

    def write_at(self, data: memoryview, offset: int) -> None:
        with self._lock:
            if len(self._data) < offset + len(data):
                self._data.extend(bytes(offset + len(data) - len(self._data)))
            self._data[offset : offset + len(data)] = data

    def finish(self, nbytes: int) -> None:
        with self._lock:
            del self._data[nbytes:]
            self._data.extend(bytes(nbytes - len(self._data)))
            if not self._published:
                return
            if not self._is_new:
                self._bucket.put(self._key, bytes(self._data))
            elif not self._bucket.create(self._key, bytes(self._data)):
                raise WriteError(errno.EEXIST, "cannot create: there is such a file", self._bucket.full(self._key))
            self._is_new = False

    def publish(self) -> bool:
        """Give it its name; False where that is taken."""
        with self._lock:
            self._published = self._published or self._bucket.create(self._key, bytes(self._data))
            return self._published

    def close(self) -> None:
        return


class StreamedOutput(OutputFile):
    """A large file, which is uploaded while it is written, by a thread of its own; nothing is there before the end."""

    def __init__(self, bucket: Bucket, key: str, nbytes: int) -> None:
        """Upload ``nbytes`` bytes as ``key``, from the first write on."""
        self._bucket, self._key, self._nbytes = bucket, key, nbytes
        self._changed = threading.Condition()
        self._waiting: dict[int, memoryview] = {}
        self._taken = 0
        """Up to this byte the upload has all it needs."""
        self._over = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def write_at(self, data: memoryview, offset: int) -> None:
        data = data[: max(0, self._nbytes - offset)]
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._upload, name="sidesave-upload", daemon=True)
                self._thread.start()
            self._waiting[offset] = data
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._over or self._taken >= offset + len(data))
            self._raise_failure()

    def finish(self, nbytes: int) -> None:
        if nbytes != self._nbytes:
            text = f"{nbytes:,} bytes were written, {self._nbytes:,} were announced"
            raise WriteError(errno.EINVAL, text, self._bucket.full(self._key))
        assert self._thread is not None
        self._thread.join()
        with self._changed:
            self._raise_failure()

    def publish(self) -> bool:
        """True: it has had its name since it was finished, and what another try had put there was the same."""
        return True

    def close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self._thread is not None:  # it reads memory of the caller's
            self._thread.join()

    def _raise_failure(self) -> None:
        failure = self._failure
        if failure is None and self._over and self._taken < self._nbytes:
            failure = WriteError(errno.ECANCELED, "the upload was given up", self._bucket.full(self._key))
        if failure is not None:
            if isinstance(failure, SidesaveError):
                raise failure
            text = f"the upload has ended: {failure!r:.300}"
            raise WriteError(errno.EIO, text, self._bucket.full(self._key)) from failure

    def _upload(self) -> None:
        try:
            with contextlib.ExitStack() as turn:
                turn.enter_context(_uploads)
                self._bucket.put_parts(self._key, self._nbytes, self._parts(turn), AT_ONCE)
        except BaseException as error:  # noqa: BLE001 - it belongs to who writes
            with self._changed:
                self._failure = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _parts(self, turn: contextlib.ExitStack) -> Iterator[memoryview]:
        """The file from its beginning to its end, in pieces, each as soon as it is written.

        Once the last one is under way the ``turn`` is the next file's, so that its first pieces follow at once.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._taken in self._waiting)
                if self._over:
                    raise WriteError(errno.ECANCELED, "the upload was given up", self._bucket.full(self._key))
                part = self._waiting[self._taken]
            for begin in range(0, len(part), PART_NBYTES):
                yield part[begin : begin + PART_NBYTES]
            with self._changed:
                del self._waiting[self._taken]
                self._taken += len(part)
                self._changed.notify_all()
                if self._taken >= self._nbytes:
                    turn.close()
                    return
