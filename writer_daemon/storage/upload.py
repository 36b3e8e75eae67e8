"""Uploads to an object store: small files in one request, large ones in parts while written."""

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
"""Files up to this size are buffered until published, then created only if their name is free."""
AT_ONCE: Final = 6
"""Parts in flight at a time.

With few parts the link idles for a round trip after those that end together. Parts are sent from
the caller's memory without a copy.
"""
_uploads = threading.Semaphore(1)
"""Files are uploaded one after the other; the end of one overlaps the beginning of the next."""


class BufferedOutput(OutputFile):
    """A small file, in memory until published; then each :meth:`finish` replaces the object."""

    def __init__(self, bucket: Bucket, key: str, *, published: bool) -> None:
        """Write to ``key``.

        With ``published`` the first :meth:`finish` creates the object, which must not exist.
        """
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
                raise WriteError(
                    errno.EEXIST, "cannot create: the file exists", self._bucket.full(self._key)
                )
            self._is_new = False

    def publish(self) -> bool:
        """Create the object; return False if the name is taken."""
        with self._lock:
            self._published = self._published or self._bucket.create(self._key, bytes(self._data))
            return self._published

    def close(self) -> None:
        return


class StreamedOutput(OutputFile):
    """A large file that a thread uploads during the write; the object appears only at the end."""

    def __init__(self, bucket: Bucket, key: str, nbytes: int) -> None:
        """Prepare the upload of ``nbytes`` bytes as ``key``; it starts at the first write."""
        self._bucket, self._key, self._nbytes = bucket, key, nbytes
        self._changed = threading.Condition()
        self._waiting: dict[int, memoryview] = {}
        self._taken = 0
        """Bytes that the upload has consumed."""
        self._over = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def write_at(self, data: memoryview, offset: int) -> None:
        data = data[: max(0, self._nbytes - offset)]
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._upload, name="sidesave-upload", daemon=True
                )
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
        """Return True: :meth:`finish` made the object; another attempt stored the same bytes."""
        return True

    def close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self._thread is not None:  # it reads the caller's memory
            self._thread.join()

    def _raise_failure(self) -> None:
        failure = self._failure
        if failure is None and self._over and self._taken < self._nbytes:
            failure = WriteError(
                errno.ECANCELED, "the upload was canceled", self._bucket.full(self._key)
            )
        if failure is not None:
            if isinstance(failure, SidesaveError):
                raise failure
            text = f"the upload failed: {failure!r:.300}"
            raise WriteError(errno.EIO, text, self._bucket.full(self._key)) from failure

    def _upload(self) -> None:
        try:
            with contextlib.ExitStack() as turn:
                turn.enter_context(_uploads)
                self._bucket.put_parts(self._key, self._nbytes, self._parts(turn), AT_ONCE)
        except BaseException as error:  # noqa: BLE001 - raised in the writing thread
            with self._changed:
                self._failure = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _parts(self, turn: contextlib.ExitStack) -> Iterator[memoryview]:
        """Yield the file in order, in parts, each as soon as it is written.

        Closes ``turn`` when the last part is sent, so that the next file's upload begins
        immediately.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._taken in self._waiting)
                if self._over:
                    raise WriteError(
                        errno.ECANCELED, "the upload was canceled", self._bucket.full(self._key)
                    )
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
