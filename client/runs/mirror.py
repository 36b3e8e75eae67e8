"""The mirror of a run as its client sees it: where it is, and what is there."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
from typing import Final, cast

from sidesave.client.arguments import path_text
from sidesave.client.runs import catalog
from sidesave.client.runs.info import CheckpointInfo
from sidesave.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FormatVersionError,
    InvalidArgumentError,
    WriteError,
    brief,
)
from sidesave.writer_daemon.format import rollback
from sidesave.writer_daemon.format.rollback import Rollbacks
from sidesave.writer_daemon.mirror import identity
from sidesave.writer_daemon.storage import urls
from sidesave.writer_daemon.storage.atomic import replace_file

logger = logging.getLogger(__name__)

_MAX_NBYTES: Final = 16 << 20


def check_mirror(mirror: str | os.PathLike[str] | None, directory: str, *, node_local: bool) -> str:
    """The place of a run's mirror, empty for None; ``InvalidArgumentError`` where it cannot be one."""
    if mirror is None:
        return ""
    text = str(os.fspath(mirror)) if isinstance(cast("object", mirror), (str, os.PathLike)) else ""
    place = urls.normalized(text, to_write=True) if urls.is_url(text) else path_text(mirror)
    if node_local:
        raise InvalidArgumentError("node_local keeps a part on each node, a mirror whole checkpoints: not both")
    if urls.is_url(directory):
        raise InvalidArgumentError(f"mirror={place}: a mirror is of a run directory on a disk, not of {directory}")
    if urls.is_url(place) and not urls.can_list(place):
        raise InvalidArgumentError(f"mirror={place}: nothing can be written to http")
    if lie_in_each_other(directory, place):
        raise InvalidArgumentError(f"mirror={place} and the run directory {directory} lie in each other")
    return place


def lie_in_each_other(first: str, second: str) -> bool:
    """Whether of two places of runs, paths or URLs, one is the other one, or in it."""
    places = [place.removeprefix("file://") for place in (first, second)]
    if any(map(urls.is_url, places)):
        return f"{first}/".startswith(f"{second}/") or f"{second}/".startswith(f"{first}/")
    here, there = map(os.path.realpath, places)
    return os.path.commonpath([here, there]) in (here, there)


def check_bandwidth(bandwidth: object, mirror: object) -> int:
    """Bytes per second, 0 for None; ``InvalidArgumentError`` for no number, or where there is no mirror."""
    if bandwidth is None:
        return 0
    if type(bandwidth) is not int or bandwidth < 1:
        raise InvalidArgumentError(f"mirror_bandwidth must be an int, 1 or more, or None, not {brief(bandwidth)}")
    if mirror is None:
        raise InvalidArgumentError("mirror_bandwidth is that of a mirror, and there is none: name it with mirror=")
    return bandwidth


class MirrorView:
    """What the mirror of a run holds. Nothing is written there: that is the daemon's."""

    def __init__(self, directory: str, place: str) -> None:
        """Look at nothing yet; an empty ``place`` is no mirror, and holds nothing."""
        self.place = place
        self._directory = directory
        self._checkpoints: list[CheckpointInfo] = []

    def look(self, *, needed: bool, refuse_newer: bool = False) -> bool:
        """List what is there, blocking; whether that was possible.

        Raises:
            SidesaveError: It was not, and it is ``needed``: without it the run would begin anew.
            FormatVersionError: A checkpoint is in a newer format, and ``refuse_newer`` is true.
        """
        if not self.place:
            return True
        try:
            found = self._list(refuse_newer=refuse_newer)
        except FormatVersionError:
            raise
        except (WriteError, CheckpointError) as error:
            if needed:
                text = "the run directory has no checkpoint, and its mirror cannot be read: where to go on is not known"
                error.add_note(f"{text}; to begin anew all the same, leave mirror= out")
                raise error
            logger.warning("the mirror %s cannot be read now: %s", self.place, error)
            return False
        self._checkpoints = [dataclasses.replace(info, in_mirror=True) for info in found]
        return True

    def _list(self, *, refuse_newer: bool) -> list[CheckpointInfo]:
        """The checkpoints of the mirror that the run has had, or of one that may be begun."""
        try:
            found = catalog.scan(self.place, refuse_newer=refuse_newer)
        except CheckpointNotFoundError as error:
            if error.errno != errno.ENOENT:
                raise
            identity.check_identity(self._directory, self.place)
            identity.refuse_unmounted(self.place)
            return []  # a directory that is still to be made
        if refuse_newer or not found:  # at the start of a session, or where it may have begun anew
            identity.check_identity(self._directory, self.place)
        if not found:
            identity.refuse_unmounted(self.place)
        return found

    def scan(self) -> list[CheckpointInfo]:
        """All checkpoints that are there, read afresh; nothing where that is not possible, which is logged."""
        return [*self._checkpoints] if self.look(needed=False) else []

    def adopt_rollbacks(self, directory: str) -> None:
        """Where the run directory does not say where the run has gone back, and the mirror does, write that down."""
        if not self.place or os.path.exists(f"{directory}/{rollback.ROLLBACK_FILE}"):
            return
        data: bytes | None = None
        with contextlib.suppress(WriteError), contextlib.closing(urls.open_storage(self.place)) as storage:
            rollback.read(storage)  # which says what is wrong with it
            data = storage.read(rollback.ROLLBACK_FILE, _MAX_NBYTES)
        if data is not None:
            replace_file(f"{directory}/{rollback.ROLLBACK_FILE}", data, "cannot write down that the run has gone back")

    def beside(self, checkpoints: list[CheckpointInfo], rollbacks: Rollbacks) -> list[CheckpointInfo]:
        """What is there and not among ``checkpoints``."""
        known = {(info.session, info.sequence) for info in checkpoints}
        return [
            dataclasses.replace(info, given_up=not rollbacks.order(info.sequence)[0])
            for info in self._checkpoints
            if (info.session, info.sequence) not in known
        ]

    def copy_of(self, info: CheckpointInfo) -> CheckpointInfo | None:
        """The same checkpoint, as it lies here."""
        key = (info.session, info.sequence)
        copies = [each for each in self._checkpoints if (each.session, each.sequence) == key and not info.in_mirror]
        return dataclasses.replace(copies[0], given_up=info.given_up) if copies else None
