"""Where an export goes: a new directory, which appears once all of it is on disk, or a new prefix in an object store.

A store has no directories to rename: each object appears whole, and what an export that fails has put is removed.
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
"""Pieces of a file, in order, each of which is valid until the next one is asked for."""


class Target(ABC):
    """The place of an export. ``path`` is what is said of it."""

    path: str

    @abstractmethod
    def put(self, name: str, nbytes: int, content: Content) -> None:
        """Add a file of ``nbytes`` bytes; blocking. Raises ``WriteError``, and whatever ``content`` raises."""


@contextlib.contextmanager
def new_target(target: str | os.PathLike[str], nbytes: int) -> Generator[Target]:
    """A new place for files of ``nbytes`` bytes in all; nothing is left of it when the block raises.

    Raises:
        InvalidArgumentError: It is there, and not empty; or nothing can be written there.
        NoSpaceError: There is not enough room.
        WriteError: Storage does not take it.
    """
    place = place_to_write(target)
    with _new_prefix(place) if urls.is_url(place) else _new_directory(path_text(place), nbytes) as opened:
        yield opened


# On a disk -------------------------------------------------------------------------------------------------------


class _Directory(Target):
    def __init__(self, path: str, hidden: str) -> None:
        self.path, self._hidden = path, hidden

    def put(self, name: str, nbytes: int, content: Content) -> None:
        with open(os.path.join(self._hidden, name), "xb") as file:
            for piece in content:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def _new_directory(directory: str, nbytes: int) -> Generator[Target]:
    parent, base = os.path.split(directory)
    with _writing(directory):
        if os.path.lexists(directory) and not (os.path.isdir(directory) and not os.listdir(directory)):
            raise InvalidArgumentError(f"{directory} is there already, and not empty")
        os.makedirs(parent, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < nbytes:
            raise NoSpaceError(errno.ENOSPC, f"{nbytes:,} bytes are needed, {free:,} are free", directory)
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


# In a store ------------------------------------------------------------------------------------------------------


class _Prefix(Target):
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
                        yield memoryview(bytes(piece[begin : begin + PART_NBYTES]))  # which is sent after the next came
            except BaseException as error:  # an interrupt too: told below
                failures.append(error)
                raise

        try:
            self._bucket.put_parts(name, nbytes, parts(), AT_ONCE)
        except BaseException:  # the library's own, of whatever the parts have raised
            if failures:  # what the library makes of it says less
                raise failures[0] from None
            raise


@contextlib.contextmanager
def _new_prefix(url: str) -> Generator[Target]:
    from sidesave.writer_daemon.storage.object_run import ObjectRun

    with contextlib.closing(urls.open_for_writing(url)) as storage:
        assert isinstance(storage, ObjectRun)
        if storage.bucket.has_any(""):
            raise InvalidArgumentError(f"{url} is there already, and not empty")
        target = _Prefix(storage.bucket)
        try:
            yield target
        except BaseException:  # an interrupt leaves no files either
            with contextlib.suppress(SidesaveError):  # what went wrong first is told
                storage.bucket.remove(target.names)
            raise
