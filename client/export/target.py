"""Targets of an export: a new directory, or a new prefix in an object store.

A directory appears when it is complete. Object stores cannot rename directories: each object
appears when it is complete, and the objects of an export that fails are removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING

from sidesave.client.arguments import path_text, place_to_write
from sidesave.errors import InvalidArgumentError, NoSpaceError, SidesaveError, write_error
from sidesave.writer_daemon.storage import urls

if TYPE_CHECKING:
    from sidesave.writer_daemon.storage.remote import Bucket

Content = Iterable[bytes | memoryview]
"""Pieces of a file, in order; each is valid until the next one is requested."""


class ExportTarget(ABC):
    """The target of an export; ``path`` names it in messages."""

    path: str

    @abstractmethod
    def put(self, name: str, nbytes: int, content: Content) -> None:
        """Add a file of ``nbytes`` bytes; blocking.

        Raises ``WriteError``, and any error of ``content``.
        """


@contextlib.contextmanager
def new_target(target: str | os.PathLike[str], nbytes: int) -> Generator[ExportTarget]:
    """Create a target for ``nbytes`` bytes in total; it is removed if the ``with`` block raises.

    Raises:
        InvalidArgumentError: The target exists and is not empty, or its scheme cannot be written.
        NoSpaceError: There is not enough room.
        WriteError: Storage does not take it.
    """
    place = place_to_write(target)
    with (
        _new_prefix(place)
        if urls.is_url(place)
        else _new_directory(path_text(place), nbytes) as opened
    ):
        yield opened


# On a disk ----------------------------------------------------------------------------------------


class _Directory(ExportTarget):
    def __init__(self, path: str, hidden: str) -> None:
        self.path, self._hidden = path, hidden

    def put(self, name: str, nbytes: int, content: Content) -> None:
        path = os.path.join(self._hidden, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            for piece in content:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(os.path.dirname(path))


@contextlib.contextmanager
def _new_directory(directory: str, nbytes: int) -> Generator[ExportTarget]:
    parent, base = os.path.split(directory)
    with _writing(directory):
        if os.path.lexists(directory) and not (
            os.path.isdir(directory) and not os.listdir(directory)
        ):
            raise InvalidArgumentError(f"{directory} exists and is not empty")
        os.makedirs(parent, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < nbytes:
            raise NoSpaceError(
                errno.ENOSPC, f"{nbytes:,} bytes are needed, {free:,} are free", directory
            )
        hidden = os.path.join(parent, f".{base}.{secrets.token_hex(4)}.partial")
        os.mkdir(hidden)
        try:
            yield _Directory(directory, hidden)
            _sync_directory(hidden)
            os.rename(hidden, directory)
        except BaseException:  # an interrupt leaves no files either
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        _sync_directory(parent)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _writing(path: str) -> Generator[None]:
    try:
        yield
    except SidesaveError:
        raise
    except OSError as error:
        raise write_error(error, "cannot export", error.filename or path) from error


# In a store ---------------------------------------------------------------------------------------


class _Prefix(ExportTarget):
    def __init__(self, bucket: Bucket) -> None:
        self.path, self._bucket = bucket.root, bucket
        self.names: list[str] = []

    def put(self, name: str, nbytes: int, content: Content) -> None:
        from sidesave.writer_daemon.storage.remote import PART_NBYTES
        from sidesave.writer_daemon.storage.upload import AT_ONCE

        self.names.append(name)
        if nbytes <= PART_NBYTES:
            self._bucket.put(name, b"".join(map(bytes, content)))
            return
        failures: list[BaseException] = []

        def parts() -> Iterator[memoryview]:
            try:
                for piece in content:
                    for begin in range(0, len(piece), PART_NBYTES):
                        yield memoryview(bytes(piece[begin : begin + PART_NBYTES]))  # sent later
            except BaseException as error:  # also an interrupt; raised below
                failures.append(error)
                raise

        try:
            self._bucket.put_parts(name, nbytes, parts(), AT_ONCE)
        except BaseException:  # the library wraps errors of `parts`
            if failures:
                raise failures[0] from None
            raise


@contextlib.contextmanager
def _new_prefix(url: str) -> Generator[ExportTarget]:
    from sidesave.writer_daemon.storage.object_run import ObjectRun

    with contextlib.closing(urls.open_for_writing(url)) as storage:
        assert isinstance(storage, ObjectRun)
        if storage.bucket.has_any(""):
            raise InvalidArgumentError(f"{url} exists and is not empty")
        target = _Prefix(storage.bucket)
        try:
            yield target
        except BaseException:  # also on an interrupt no files are left
            with contextlib.suppress(SidesaveError):  # report the first error
                storage.bucket.remove(target.names)
            raise
