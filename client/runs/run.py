"""The checkpoints of one run, in its directory and in its fallback directories."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os

from sidesave.client import arguments
from sidesave.client.runs import finding
from sidesave.client.runs.mirror import MirrorReader
from sidesave.client.runs.view import RunView
from sidesave.errors import CheckpointNotFoundError, DirectoryInUseError, InvalidArgumentError
from sidesave.writer_daemon.checkpoints.catalog import Catalog
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo, in_commit_order
from sidesave.writer_daemon.checkpoints.replacement import step_of
from sidesave.writer_daemon.format import fallbacks, rollback
from sidesave.writer_daemon.format.names import parse_hidden_directory
from sidesave.writer_daemon.format.rollback import ROLLBACK_FILE
from sidesave.writer_daemon.lease.observer import current_holder
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)


class Run:
    """Knows the directories of a run, and which checkpoint a step means."""

    def __init__(self, directory: str, fallback: str, mirror: str = "") -> None:
        """Read nothing yet; an empty ``fallback`` or ``mirror`` is none."""
        self.directory = directory
        self.mirror = MirrorReader(directory, mirror)
        self.fallback = fallback
        self._catalogs: dict[str, Catalog] = {}
        self._elsewhere: list[str] = []  # fallback directories of earlier sessions
        self._lost: list[str] = []  # those that are not there

    def remember_fallbacks(self) -> None:
        """Note this session's fallback directory, and read those of earlier sessions."""
        self._elsewhere, self._lost = fallbacks.remember(self.directory, self.fallback)

    def has_leftovers_elsewhere(self) -> bool:
        """Whether a fallback directory has leftovers, which the daemon recovers on first use."""
        return any(map(_has_leftovers, [self.fallback, *self._elsewhere]))

    def warn_of_fallbacks(self, checkpoints: list[CheckpointInfo], *, alone: bool) -> None:
        """Warn of checkpoints in fallback directories of earlier sessions, not given to this one.

        Several ranks do not look there: for them that is an ``InvalidArgumentError``.
        """
        for place in self._lost:
            logger.warning("%s", self._lost_text(place))
        for place in self._elsewhere:
            lost = [info for info in checkpoints if os.path.dirname(info.path) == place]
            if lost and not alone:
                raise InvalidArgumentError(
                    f"the run has steps {_steps(lost)} in {place}, the fallback directory of a "
                    "session of one rank, where several ranks do not look: move them to "
                    f"{self.directory}, and remove {place}"
                )
            if lost:
                logger.warning(
                    "the run has steps %s in %s, the fallback directory of an earlier session: "
                    "they are loaded like the rest; pass fallback_directory to save and delete "
                    "there as well",
                    _steps(lost),
                    place,
                )

    def look(self, *, strict: bool = False, mirror: bool = True) -> RunView:
        """List checkpoints of all directories and the mirror; read what is new since the last look.

        Args:
            strict: Raise if the order of commits is not known in full: for a checkpoint in a newer
                format, or a damaged record of rollbacks.
            mirror: List the mirror too, which may take long.

        Raises:
            SidesaveError: A directory cannot be listed; or the mirror cannot, and there is no
                checkpoint elsewhere.
        """
        own = self._catalog(self.directory).look(strict=strict)
        here, left_out = own.checkpoints, [*own.left_out]
        for catalog in map(self._catalog, self._directories()[1:]):
            keys = {info.key for info in here}
            view = catalog.look(rollbacks=own.rollbacks, strict=strict)
            here = in_commit_order(
                [*here, *(info for info in view.checkpoints if info.key not in keys)]
            )
            left_out += view.left_out
        missing = tuple(map(self._lost_text, self._lost))
        view = RunView(
            self.directory,
            here,
            left_out,
            own.rollbacks,
            missing,
            is_mirror_known=not self.mirror.place,
        )
        return self.with_mirror(view, needed=not here, strict=strict) if mirror else view

    def with_mirror(self, view: RunView, *, needed: bool = False, strict: bool = False) -> RunView:
        """Return a view with the mirror added; raise if it is ``needed`` but cannot be listed."""
        if not self.mirror.place:
            return view
        mirror = self.mirror.look(rollbacks=view.rollbacks, needed=needed, strict=strict)
        if mirror is None:
            return view
        return dataclasses.replace(
            view, mirrored=mirror.checkpoints, mirror_left_out=mirror.left_out, is_mirror_known=True
        )

    def find(self, step: int, session: str) -> CheckpointInfo:
        """Return the current checkpoint that ``session`` saved as ``step``.

        Raises:
            CheckpointNotFoundError: It has been deleted, or replaced by another save of its step.
            SidesaveError: There is no checkpoint here, and the mirror cannot be listed.
        """
        view = self.look(mirror=False)
        info = view.find(step, session) or self.with_mirror(view, needed=not view.here).find(
            step, session
        )
        if info is None:
            raise CheckpointNotFoundError(
                errno.ENOENT, f"step {step} was removed since it was loaded", self.directory
            )
        return info

    def meant(self, which: int | str | os.PathLike[str] | None) -> tuple[int | None, str]:
        """The step meant, None for the latest; and its directory, empty for any of the run's.

        Raises:
            InvalidArgumentError: It is neither a step nor a path, or a checkpoint of another run.
            CheckpointNotFoundError: There is no checkpoint at that path.
        """
        if not isinstance(which, (str, os.PathLike)):
            return None if which is None else arguments.check_step(which), ""
        place = finding.place_of(which)
        if _are_one(place, self.directory):
            return None, ""
        info = self._own(place) or self._own(finding.locate(place))
        if info is None:
            raise InvalidArgumentError(
                f"{place} is no checkpoint of this run, which is {self.directory}, and what is "
                "saved next would not descend from it: load it with sidesave.load(path, into=...), "
                "or begin a new run with CheckpointManager.restore(sources=Source(path))"
            )
        return info

    def _own(self, place: str) -> tuple[int, str] | None:
        """Step and directory if ``place`` is the path of a checkpoint of this run."""
        parent, name = os.path.split(place)
        step = step_of(name)
        parents = [directory for directory in self._directories() if _are_one(parent, directory)]
        return (step, parents[0]) if step is not None and parents else None

    def give_up_after(self, info: CheckpointInfo, last: int, session: str) -> None:
        """Write down that the run continues from ``info``, giving up later saves, up to ``last``.

        Raises:
            DirectoryInUseError: The run is not ``session``'s any more.
        """
        with contextlib.closing(urls.open_for_writing(self.directory)) as storage:
            before = rollback.read(storage)
            after = before.going_back(info.sequence, last)
            if after == before:
                return
            holder = current_holder(storage)
            if holder is None or holder.session != session:
                text = (
                    f"the run has passed to {holder or 'nobody'}, so this session can neither go "
                    "back nor save"
                )
                raise DirectoryInUseError(errno.EBUSY, text, self.directory)
            ROLLBACK_FILE.write(storage, after)
        logger.warning(
            "the run goes on from step %d: what was saved after it is given up", info.step
        )

    def _directories(self) -> list[str]:
        """The directories that hold checkpoints."""
        further = filter(os.path.isdir, [self.fallback, *self._elsewhere])
        return [self.directory, *further]

    def _catalog(self, directory: str) -> Catalog:
        return self._catalogs.setdefault(directory, finding.catalog_of(directory))

    def _lost_text(self, place: str) -> str:
        return (
            f"{place}, the fallback directory that this run has saved to, is not there, and "
            "perhaps its newest checkpoint is: mount it, or remove "
            f"{self.directory}/{fallbacks.USED.name} to go on without it"
        )


def _has_leftovers(directory: str) -> bool:
    """Whether recovery may commit something unfinished; True also if that cannot be known."""
    try:
        hidden = (
            [parse_hidden_directory(name) for name in os.listdir(directory)] if directory else []
        )
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return any(
        parsed is not None and parsed[2].startswith(("partial", "salvage")) for parsed in hidden
    )


def _are_one(path: str, directory: str) -> bool:
    if urls.is_url(path) or urls.is_url(directory):
        return path == directory
    with contextlib.suppress(OSError):
        return os.path.samefile(path, directory)
    return False


def _steps(checkpoints: list[CheckpointInfo]) -> list[int]:
    return sorted(info.step for info in checkpoints)[-20:]
