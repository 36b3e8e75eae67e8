"""Lists the checkpoints of a run directory, and the ancestors of what is saved next."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import errno
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from sidesave.client import encryption
from sidesave.client.runs.info import CheckpointInfo
from sidesave.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FormatVersionError,
    IntegrityError,
    KeyMissingError,
    WriteError,
    WrongKeyError,
    write_error,
)
from sidesave.writer_daemon.format import rollback
from sidesave.writer_daemon.format.integrity import NO_SUCH_FILE
from sidesave.writer_daemon.format.manifest import (
    MANIFEST,
    MAX_JSON_NBYTES,
    Head,
    parse_hidden_directory,
    parse_metadata,
    parse_step_directory,
    step_directory,
)
from sidesave.writer_daemon.format.rollback import Rollbacks
from sidesave.writer_daemon.format.sealed_records import open_metadata
from sidesave.writer_daemon.storage import ReadStorage, urls

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_TRIES: Final = 20
"""A reader that is overtaken this often by a writer that replaces one step again and again gives up."""

_AT_ONCE: Final = 16
"""Manifests that are read from a store at a time."""
_LOOKS: Final = 5
"""A checkpoint that is not to be seen at so many looks, one right after the other, is not there."""


def scan(directory: str, *, refuse_newer: bool = False, rollbacks: Rollbacks | None = None) -> list[CheckpointInfo]:
    """Every committed checkpoint of a run directory, ordered by :func:`in_order`. Reads the disk.

    One whose manifest is damaged or gone, or of a newer format, is left out with a warning. A step that is being
    replaced at this moment is found under its old directory.

    Args:
        directory: The run directory.
        refuse_newer: Raise for a newer format: the order of commits cannot be gone on with when a part of it is not
            known.
        rollbacks: Where the run has gone back, if that is not written down in this directory.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        FormatVersionError: A checkpoint is in a newer format, and ``refuse_newer`` is true.
        IntegrityError: What is written down of going back is damaged, and ``refuse_newer`` is true.
    """
    if urls.is_url(directory):
        return _scan_url(directory, rollbacks, refuse_newer=refuse_newer)
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(error.errno, "there is no run directory", directory) from error
    except OSError as error:
        raise write_error(error, "cannot list the run directory", directory) from error
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    committed = {name: step for name, step in steps.items() if name[0] != "." or step_directory(step) not in steps}
    if rollbacks is None:
        rollbacks = read_rollbacks(directory, strict=refuse_newer)

    def read(path: str) -> CheckpointInfo:
        return Attempts(path).read(read_info)

    return _listed(directory, committed, read, rollbacks, refuse_newer=refuse_newer)


def _scan_url(url: str, rollbacks: Rollbacks | None, *, refuse_newer: bool) -> list[CheckpointInfo]:
    """:func:`scan` of a prefix in a store: one request lists it, and each manifest is one, many at once."""
    with contextlib.closing(urls.open_storage(url)) as storage:
        if rollbacks is None:
            rollbacks = _read_rollbacks(storage, strict=refuse_newer)
        steps = {name: step for name in storage.list_directory("") if (step := parse_step_directory(name)) is not None}
        with ThreadPoolExecutor(_AT_ONCE, "sidesave-scan") as pool:
            paths = [f"{url}/{name}" for name in steps]
            asked = {path: pool.submit(contextvars.copy_context().run, read_info, path, storage) for path in paths}

        def read(path: str) -> CheckpointInfo:
            return asked[path].result()

        return _listed(url, steps, read, rollbacks, refuse_newer=refuse_newer)


def _listed(
    directory: str,
    steps: Mapping[str, int],
    read: Callable[[str], CheckpointInfo],
    rollbacks: Rollbacks,
    *,
    refuse_newer: bool,
) -> list[CheckpointInfo]:
    """Those that can be read of directories' names and their steps."""
    checkpoints: list[CheckpointInfo] = []
    for name, step in steps.items():
        path = os.path.join(directory, name)
        try:
            info = read(path)
        except FileNotFoundError as error:
            if os.path.isdir(path):  # else removed or replaced since it was listed
                logger.warning("not listed: %s", error)
            continue
        except FormatVersionError as error:
            if refuse_newer:
                raise
            logger.warning("not listed: %s", error)
            continue
        except (IntegrityError, OSError) as error:
            logger.warning("not listed: %s", error)
            continue
        if info.step == step:
            checkpoints.append(dataclasses.replace(info, given_up=not rollbacks.order(info.sequence)[0]))
        else:
            logger.warning("not listed: %s says that it is step %d", path, info.step)
    return in_order(checkpoints)


def in_order(checkpoints: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Sort by commit, but the latest last: after a rollback, the checkpoint that the run went back to."""
    ordered = sorted(checkpoints, key=lambda info: info.sequence)
    if ordered:
        ordered.append(ordered.pop(ordered.index(max(ordered, key=lambda info: info.order))))
    return ordered


def read_rollbacks(directory: str, *, strict: bool) -> Rollbacks:
    """Where the run was rolled back. If unreadable: with ``strict`` an error, else a warning and nothing."""
    try:
        with contextlib.closing(urls.open_storage(directory)) as storage:
            return _read_rollbacks(storage, strict=strict)
    except WriteError as error:
        if strict:
            raise
        logger.warning("%s", error)
        return Rollbacks()


def _read_rollbacks(storage: ReadStorage, *, strict: bool) -> Rollbacks:
    try:
        return rollback.read(storage)
    except (CheckpointError, WriteError) as error:
        if strict:
            raise
        logger.warning("%s", error)
        return Rollbacks()


def has_leftovers(directory: str) -> bool:
    """Whether there is something unfinished that recovery may commit; true also if that cannot be known."""
    try:
        hidden = [parse_hidden_directory(name) for name in os.listdir(directory)] if directory else []
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return any(parsed is not None and parsed[2].startswith(("partial", "salvage")) for parsed in hidden)


class Attempts:
    """Attempts to read checkpoints; if one is replaced meanwhile, its successor is read.

    ::

        for attempt in Attempts(path):
            with attempt as [place]:
                return read(place)

    Without this a step that is being replaced would look damaged to its reader, or not there. What is raised, or is
    :attr:`in_doubt`, counts when the checkpoints are still the same afterwards.

    Attributes:
        in_doubt: To be set in an attempt: what was read may be wrong, and does not count if there was a replacement.
    """

    def __init__(self, *paths: str, locate: Callable[[], str] | None = None) -> None:
        """``locate`` gives the current directory if the one given is gone."""
        self._paths: tuple[str, ...] = paths
        self._locate = locate
        self._over = self.in_doubt = False
        self._tries = 0
        self._seen: list[tuple[str, object]] = []

    def read(self, read: Callable[[str], T]) -> T:
        """Call ``read`` on the only path."""
        for attempt in self:
            with attempt as (place,):
                return read(place)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def __iter__(self) -> Iterator[Attempts]:
        while not self._over:
            yield self

    def __enter__(self) -> list[str]:
        self._over, self.in_doubt = True, False
        self._tries += 1
        self._seen = [_seen(path) for path in self._paths]
        return [place for place, _ in self._seen]

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Whether to suppress the error and try again."""
        if not (isinstance(error, (CheckpointError, OSError)) if error else self.in_doubt):
            return False
        if self._tries < _MAX_TRIES and [_seen(path) for path in self._paths] != self._seen:
            self._over = False
        elif self._locate is not None and isinstance(error, CheckpointNotFoundError):
            paths = (self._locate(),)
            if paths != self._paths:
                self._paths, self._tries, self._over = paths, 0, False
        return error is not None and not self._over


def _seen(path: str) -> tuple[str, object]:
    """The current path of a checkpoint, and its identity."""
    place = whereabouts(path)
    return place, identity(place)


def whereabouts(path: str) -> str:
    """The current path of a checkpoint; a hidden name while it is being replaced, or if that was interrupted."""
    parent, name = os.path.split(path)
    step = step_of(name)
    if step is None or urls.is_url(path):
        return path
    current = os.path.join(parent, step_directory(step))
    for _ in range(_LOOKS):  # it may get its name back, or go, between a look and the next
        if os.path.isdir(current):
            break
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                other = os.path.join(parent, name)
                if name.startswith(".") and step_of(name) == step and os.path.isdir(other):
                    return other
    return current


def step_of(name: str) -> int | None:
    """The step of a checkpoint by its directory's name, also while it is being replaced; None for other names."""
    hidden = parse_hidden_directory(name)
    return hidden[0] if hidden is not None and hidden[2] == "replaced" else parse_step_directory(name)


def identity(path: str) -> tuple[int, int] | None:
    """What distinguishes a directory from another one of that name, and from itself while it is being removed."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns


def left_out(directory: str, checkpoints: Iterable[CheckpointInfo]) -> list[tuple[int, str]]:
    """Step directories that are not among ``checkpoints``, damaged ones for instance: steps and paths."""
    listed = {info.path for info in checkpoints}
    steps = ((parse_step_directory(name), os.path.join(directory, name)) for name in _names(directory))
    found = sorted((step, path) for step, path in steps if step is not None and path not in listed)
    return [(step, path) for step, path in found if has_manifest(path)] if urls.is_url(directory) else found


def _names(directory: str) -> list[str]:
    if not urls.is_url(directory):
        return os.listdir(directory)
    with contextlib.closing(urls.open_storage(directory)) as storage:
        return storage.list_directory("")


def refuse_newer_damaged(directory: str, checkpoints: list[CheckpointInfo], elsewhere: Collection[int] = ()) -> None:
    """Raise ``IntegrityError`` if a directory that :func:`scan` left out has a later step than the newest.

    Steps that are ``elsewhere`` do not matter.

    Its place in the order of commits is not known: taking an older checkpoint then has to be the caller's decision.
    """
    newest = checkpoints[-1].step if checkpoints else -1
    for step, path in left_out(directory, checkpoints):
        try:
            if step >= newest and step not in elsewhere:
                read_info(path)
        except (FileNotFoundError, IntegrityError) as error:
            if os.path.isdir(path) or (urls.is_url(path) and isinstance(error, IntegrityError)):
                raise IntegrityError(
                    f"{error}; take an older one by its step or path, or with load(fallback=True) of a Checkpointer"
                ) from error


def read_info(path: str, storage: ReadStorage | None = None) -> CheckpointInfo:
    """Facts about the checkpoint in ``path``, from its verified manifest.

    ``storage`` is that of its run, where that is open.
    """
    parent, name = urls.parent_of(path)
    manifest = os.path.join(path, MANIFEST)
    opened = urls.open_storage(parent) if storage is None else storage
    try:
        data = opened.read(f"{name}/{MANIFEST}", MAX_JSON_NBYTES)
        if data is None:
            raise CheckpointNotFoundError(errno.ENOENT, "there is no manifest", manifest)
        head = Head.from_bytes(data, manifest)
        about = _metadata(opened, name, head, manifest)
    except WriteError as error:
        if error.errno not in NO_SUCH_FILE:
            raise
        raise IntegrityError(f"{manifest}: {error.strerror}") from error
    finally:
        if storage is None:
            opened.close()
    return CheckpointInfo(head.step, path, head.nbytes, head.session, head.sequence, head.parent, head.created_s, about)


def _metadata(storage: ReadStorage, name: str, head: Head, path: str) -> dict[str, Any]:
    """The user's metadata; of an encrypted checkpoint, unless its key is at hand, none."""
    if not (head.cipher and head.metadata):
        return parse_metadata(head.metadata, path)
    try:
        key = encryption.open_keys(storage, name, head.session).save_key(head.sequence)
    except (KeyMissingError, WrongKeyError):
        return {}
    return parse_metadata(open_metadata(head.metadata, key, path), path)


def has_manifest(url: str) -> bool:
    """Whether there is one in the directory of this URL, without which nothing is there; one request."""
    parent, name = urls.parent_of(url)
    with contextlib.closing(urls.open_storage(parent)) as storage:
        try:
            return storage.read(f"{name}/{MANIFEST}", MAX_JSON_NBYTES) is not None
        except WriteError as error:
            if error.errno == errno.EFBIG:
                return True
            raise


def lineage(checkpoints: Iterable[CheckpointInfo], newest: tuple[int, str] | None) -> set[int]:
    """The steps that ``newest`` (step, session) descends from, and its own.

    What a session has saved before, after it was resumed from the same parent, is an ancestor; going back within a
    session makes another parent. Then the chain goes on at the parent.
    """
    by_session: dict[str, list[CheckpointInfo]] = {}
    checkpoints = list(checkpoints)
    oldest: int | None = None
    for info in checkpoints:
        by_session.setdefault(info.session, []).append(info)
    steps: set[int] = set()
    visited: set[tuple[int, str]] = set()
    while newest is not None and newest not in visited:
        visited.add(newest)
        step, session = newest
        saved = sorted(by_session.get(session, []), key=lambda info: info.sequence)
        upto = [info for info in saved if info.step == step] or [info for info in saved if info.step < step]
        if not saved and oldest is not None:
            # All of that session was deleted, and with it where it came from: nothing older counts as given up.
            steps.update(info.step for info in checkpoints if info.sequence < oldest)
            break
        if not upto:  # removed since, with all that came before
            newest = saved[0].parent if saved else None
            oldest = saved[0].sequence if saved else None
            continue
        tip = upto[-1]
        oldest = saved[0].sequence
        steps.update(info.step for info in saved if info.parent == tip.parent and info.sequence <= tip.sequence)
        newest = tip.parent
    return steps
