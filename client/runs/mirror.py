"""The client's side of a run's mirror: checks its place, and lists its checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
from typing import cast

from sidesave.client.arguments import path_text
from sidesave.client.runs import finding
from sidesave.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FormatVersionError,
    InvalidArgumentError,
    WriteError,
)
from sidesave.writer_daemon.checkpoints.catalog import CatalogView
from sidesave.writer_daemon.format import rollback
from sidesave.writer_daemon.format.rollback import ROLLBACK_FILE, Rollbacks
from sidesave.writer_daemon.mirror import identity
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)


def check_mirror(mirror: str | os.PathLike[str], directory: str, *, node_local: bool) -> str:
    """Normalize the path or URL of a run's mirror; ``InvalidArgumentError`` if it cannot be one."""
    text = str(os.fspath(mirror)) if isinstance(cast("object", mirror), (str, os.PathLike)) else ""
    place = urls.normalized(text, to_write=True) if urls.is_url(text) else path_text(mirror)
    if node_local:
        raise InvalidArgumentError(
            "node_local keeps a part on each node, a mirror whole checkpoints: not both"
        )
    if urls.is_url(directory):
        raise InvalidArgumentError(
            f"mirror={place}: the run directory must be on a disk, not {directory}"
        )
    if urls.is_url(place) and not urls.can_list(place):
        raise InvalidArgumentError(f"mirror={place}: nothing can be written to http")
    if lie_in_each_other(directory, place):
        raise InvalidArgumentError(
            f"mirror={place} and the run directory {directory} are inside one another"
        )
    return place


def lie_in_each_other(first: str, second: str) -> bool:
    """Whether two places of runs, paths or URLs, are equal or one is inside the other."""
    places = [place.removeprefix("file://") for place in (first, second)]
    if any(map(urls.is_url, places)):
        return f"{first}/".startswith(f"{second}/") or f"{second}/".startswith(f"{first}/")
    here, there = map(os.path.realpath, places)
    return os.path.commonpath([here, there]) in (here, there)


class MirrorReader:
    """Lists the checkpoints of a run's mirror; only the daemon writes there."""

    def __init__(self, directory: str, place: str) -> None:
        """Read nothing yet; an empty ``place`` means that there is no mirror."""
        self.place = place
        self._directory = directory
        self._catalog = finding.catalog_of(place)
        self._trouble = ""
        self._unreachable: WriteError | CheckpointError | None = None

    def was_unreachable(self, error: WriteError | CheckpointError | None) -> None:
        """Let the next :meth:`look` fail at once if a store did not answer, which takes minutes."""
        self._unreachable = error if urls.is_url(self.place) else None

    def look(
        self, *, rollbacks: Rollbacks, needed: bool, strict: bool = False
    ) -> CatalogView | None:
        """List the mirror's checkpoints, blocking; log and return None if that is not possible.

        Raises:
            SidesaveError: The mirror cannot be read, and is ``needed``: without it the run would
                start from scratch.
            FormatVersionError: A checkpoint is in a newer format, and ``strict`` is true.
        """
        try:
            error, self._unreachable = self._unreachable, None
            if error is not None:
                raise error
            view = self._list(rollbacks, strict=strict)
        except FormatVersionError:
            raise
        except (WriteError, CheckpointError) as error:
            if needed:
                text = (
                    "the run directory has no checkpoint, and its mirror, which may have some, "
                    "cannot be read"
                )
                error.add_note(f"{text}; to start from scratch all the same, leave mirror= out")
                raise error
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.warning("the mirror %s cannot be read now: %s", self.place, error)
            return None
        self._trouble = ""
        checkpoints = [dataclasses.replace(info, in_mirror=True) for info in view.checkpoints]
        return dataclasses.replace(view, checkpoints=checkpoints)

    def _list(self, rollbacks: Rollbacks, *, strict: bool) -> CatalogView:
        """List the mirror; raises if it belongs to another run."""
        try:
            view = self._catalog.look(rollbacks=rollbacks, strict=strict)
        except CheckpointNotFoundError as error:
            if error.errno != errno.ENOENT:
                raise
            view = CatalogView([], [], rollbacks)  # the directory will be created later
        # at the start of a session, or if the mirror may have been recreated
        if strict or not view.checkpoints:
            identity.check_identity(self._directory, self.place)
        if not view.checkpoints:
            identity.refuse_unmounted(self.place)
        return view

    def adopt_rollbacks(self, directory: str) -> None:
        """Copy the mirror's record of rollbacks to a run directory that has none."""
        if not self.place or os.path.exists(f"{directory}/{ROLLBACK_FILE.name}"):
            return
        rollbacks: Rollbacks | None = None
        with (
            contextlib.suppress(WriteError),
            contextlib.closing(urls.open_storage(self.place)) as storage,
        ):
            rollbacks = ROLLBACK_FILE.read(storage)
        if rollbacks is not None:
            rollback.write_in(directory, rollbacks)
