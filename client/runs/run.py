"""The checkpoints of one run, in its directory and in its fallback directories."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterable

from sidesave.client import arguments
from sidesave.client.runs import catalog, finding
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.runs.mirror import MirrorView
from sidesave.errors import CheckpointNotFoundError, DirectoryInUseError, IntegrityError, InvalidArgumentError
from sidesave.writer_daemon.format import fallbacks, rollback
from sidesave.writer_daemon.format.manifest import step_directory
from sidesave.writer_daemon.format.rollback import Rollbacks
from sidesave.writer_daemon.lease.lease import current_holder
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)


class Run:
    """Knows the directories of a run, and which checkpoint a step means."""

    def __init__(self, directory: str, fallback: str, mirror: str = "") -> None:
        """Read nothing yet; an empty ``fallback`` or ``mirror`` is none."""
        self.directory = directory
        self.mirror = MirrorView(directory, mirror)
        self._fallback = fallback
        self._elsewhere: list[str] = []  # fallback directories of earlier sessions
        self._lost: list[str] = []  # those that are not there

    def remember_fallbacks(self) -> None:
        """Note this session's fallback directory, and read those of earlier sessions."""
        self._elsewhere, self._lost = fallbacks.remember(self.directory, self._fallback)

    def has_leftovers_elsewhere(self) -> bool:
        """Whether a fallback directory has something unfinished, which the daemon recovers on first use."""
        return any(map(catalog.has_leftovers, [self._fallback, *self._elsewhere]))

    def tell_elsewhere(self, checkpoints: list[CheckpointInfo], *, alone: bool) -> None:
        """Warn of checkpoints in fallback directories of earlier sessions that this one was not given.

        Several ranks do not look there: for them that is an ``InvalidArgumentError``.
        """
        for place in self._lost:
            logger.warning("%s", self._lost_text(place))
        for place in self._elsewhere:
            lost = [info for info in checkpoints if os.path.dirname(info.path) == place]
            if lost and not alone:
                raise InvalidArgumentError(
                    f"the run has steps {_steps(lost)} in {place}, the fallback directory of a session of one rank, "
                    f"where several ranks do not look: move them to {self.directory}, and remove {place}"
                )
            if lost:
                logger.warning(
                    "the run has steps %s in %s, the fallback directory of an earlier session: they are loaded like "
                    "the rest; pass fallback_directory to save and delete there as well",
                    _steps(lost),
                    place,
                )

    def scan(self, *, refuse_newer: bool = False) -> list[CheckpointInfo]:
        """The checkpoints of all directories, the latest last; see :func:`catalog.scan`."""
        rollbacks = catalog.read_rollbacks(self.directory, strict=refuse_newer)
        checkpoints = catalog.scan(self.directory, refuse_newer=refuse_newer, rollbacks=rollbacks)
        for directory in self._directories()[1:]:
            known = {(info.session, info.sequence) for info in checkpoints}
            further = catalog.scan(directory, refuse_newer=refuse_newer, rollbacks=rollbacks)
            checkpoints += [info for info in further if (info.session, info.sequence) not in known]
        return catalog.in_order(checkpoints)

    def scan_all(self, *, refuse_newer: bool = False) -> tuple[list[CheckpointInfo], bool]:
        """:meth:`scan`, and what the mirror alone has; and whether that could be read.

        Raises:
            SidesaveError: It could not be read, and there is no checkpoint elsewhere.
        """
        checkpoints = self.scan(refuse_newer=refuse_newer)
        reached = self.mirror.look(needed=not checkpoints, refuse_newer=refuse_newer)
        if self.mirror.place:
            rollbacks = catalog.read_rollbacks(self.directory, strict=refuse_newer)
            checkpoints = catalog.in_order([*checkpoints, *self.mirror.beside(checkpoints, rollbacks)])
        return checkpoints, reached

    def read(self, step: int, session: str) -> CheckpointInfo:
        """The current checkpoint that ``session`` saved as ``step``.

        Raises:
            CheckpointNotFoundError: It has been deleted, or replaced by another save of its step.
        """
        for directory in self._directories():
            with contextlib.suppress(CheckpointNotFoundError):
                info = catalog.Attempts(os.path.join(directory, step_directory(step))).read(catalog.read_info)
                if info.session == session:
                    return info
        for info in self.mirror.beside([], Rollbacks()):
            if (info.step, info.session) == (step, session):
                return info
        raise CheckpointNotFoundError(errno.ENOENT, f"step {step} was removed since it was loaded", self.directory)

    def meant(self, which: int | str | os.PathLike[str] | None) -> tuple[int | None, str]:
        """The step that is meant, None for the latest; and its directory, empty for any of the run's.

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
                f"{place} is no checkpoint of this run, which is {self.directory}, and what is saved next would not "
                "descend from it: load it with sidesave.load(path, into=...), or begin a new run with "
                "CheckpointManager.restore(sources=Source(path))"
            )
        return info

    def _own(self, place: str) -> tuple[int, str] | None:
        """Step and directory if ``place`` is the path of a checkpoint of this run."""
        parent, name = os.path.split(place)
        step = catalog.step_of(name)
        parents = [directory for directory in self._directories() if _are_one(parent, directory)]
        return (step, parents[0]) if step is not None and parents else None

    def refuse_damaged(self, step: int | None, checkpoints: list[CheckpointInfo]) -> None:
        """Raise the problem with a damaged ``step``, or with one newer than all ``checkpoints``."""
        elsewhere = {info.step for info in checkpoints if info.in_mirror}
        if step is None:
            if self._lost:
                raise IntegrityError(self._lost_text(self._lost[0]))
            for directory in self._directories():
                catalog.refuse_newer_damaged(directory, checkpoints, elsewhere)
            return
        if step in elsewhere:
            return
        for path in self._left_out(step, checkpoints):
            try:
                catalog.read_info(path)
            except FileNotFoundError:
                if all(info.step != step for info in checkpoints):
                    raise

    def choose(
        self, step: int | None, checkpoints: list[CheckpointInfo], *, within: str, fallback: bool, in_parts: bool
    ) -> list[CheckpointInfo]:
        """The checkpoints to try for ``step``, None for the latest: best first; only one without ``fallback``.

        Behind each comes its copy in the mirror.

        The ``step`` has to be in the directory ``within``, unless that is empty. With ``in_parts`` every node keeps its
        own part, and ``checkpoints`` are those of which all nodes have theirs.

        Raises:
            CheckpointNotFoundError: There is no such step, or no checkpoint.
            IntegrityError: The checkpoint that the run went back to is gone.
        """
        places = [info for info in checkpoints if within in ("", os.path.dirname(info.path))]
        wanted = [info for info in places if info.step == step or (step is None and not info.given_up)]
        left_out = self._left_out(step, checkpoints) if step is not None and not wanted else []
        if left_out and fallback:
            wanted = [info for info in checkpoints if step is None or info.step < step]
        if not wanted:
            if step is None and checkpoints:
                text = "the checkpoint that the run went back to is not there any more; load one of those given up"
                raise IntegrityError(f"{self.directory}: {text} by its step: {_steps(checkpoints)}")
            if in_parts and (left_out or not checkpoints):
                sought = "checkpoint" if step is None else f"step {step}"
                text = f"there is no {sought} of which every node has its part"
                raise CheckpointNotFoundError(errno.ENOENT, text, self.directory)
            raise finding.not_found(within or self.directory, places, step)
        best = max(wanted, key=lambda info: info.order)
        older = [info for info in checkpoints if info.sequence < best.sequence and info.given_up <= best.given_up]
        older.sort(key=lambda info: info.sequence, reverse=True)
        chosen = [best, *older] if fallback else [best]
        return [place for info in chosen for place in (info, self.mirror.copy_of(info)) if place is not None]

    def give_up_after(self, info: CheckpointInfo, last: int, session: str) -> None:
        """Write down that the run continues from ``info``, and that later saves, up to ``last``, are given up.

        Raises:
            DirectoryInUseError: The run is not ``session``'s any more.
        """
        before = catalog.read_rollbacks(self.directory, strict=True)
        after = before.going_back(info.sequence, last)
        if after == before:
            return
        with contextlib.closing(urls.open_for_writing(self.directory)) as storage:
            holder = current_holder(storage)
            if holder is None or holder.session != session:
                text = f"the run has passed to {holder or 'nobody'}, so this session can neither go back nor save"
                raise DirectoryInUseError(errno.EBUSY, text, self.directory)
            rollback.write(storage, after)
        logger.warning("the run goes on from step %d: what was saved after it is given up", info.step)

    def _directories(self) -> list[str]:
        """The directories that hold checkpoints."""
        further = filter(os.path.isdir, [self._fallback, *self._elsewhere])
        return [self.directory, *further]

    def _left_out(self, step: int, checkpoints: Iterable[CheckpointInfo]) -> list[str]:
        """The directories with the name of a step that are not among ``checkpoints``."""
        pairs = (pair for directory in self._directories() for pair in catalog.left_out(directory, checkpoints))
        return [path for number, path in pairs if number == step]

    def _lost_text(self, place: str) -> str:
        return (
            f"{place}, the fallback directory that this run has saved to, is not there, and perhaps its newest "
            f"checkpoint is: mount it, or remove {self.directory}/{fallbacks.USED} to go on without it"
        )


def _are_one(path: str, directory: str) -> bool:
    if urls.is_url(path) or urls.is_url(directory):
        return path == directory
    with contextlib.suppress(OSError):
        return os.path.samefile(path, directory)
    return False


def _steps(checkpoints: list[CheckpointInfo]) -> list[int]:
    return sorted(info.step for info in checkpoints)[-20:]
