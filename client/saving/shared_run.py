"""A run as all ranks of a session see it: they load the same checkpoint, or none of them does."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Collection
from typing import Any

from sidesave.client import arguments
from sidesave.client.loading.load import LoadRequest
from sidesave.client.ranks.group import NodeWorld, World
from sidesave.client.runs.run import Run
from sidesave.client.runs.view import RunView
from sidesave.client.saving.lineage import Lineage
from sidesave.client.saving.saves import Saves
from sidesave.errors import CheckpointNotFoundError, IntegrityError
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.format.rollback import Rollbacks

logger = logging.getLogger(__name__)


class SharedRun:
    """Lists the checkpoints that exist for all ranks, and goes on from one of them."""

    def __init__(
        self,
        world: World,
        node: World,
        run: Run,
        session_id: str,
        saves: Saves,
        lineage: Lineage,
        complete: Collection[tuple[str, int]],
    ) -> None:
        """See ``run`` as ``world`` does.

        The ``complete`` checkpoints are those of earlier sessions with parts on every node.
        """
        self._world = world
        self._node = node
        self._run = run
        self._session_id = session_id
        self._saves = saves
        self._lineage = lineage
        self._complete = complete

    def checkpoints(self) -> list[CheckpointInfo]:
        """The checkpoints; with node-local parts, earlier sessions' only if every node has them."""
        checkpoints = self._run.look().all
        if not isinstance(self._node, NodeWorld):
            return checkpoints
        return [
            info
            for info in checkpoints
            if info.session == self._session_id or info.key in self._complete
        ]

    def load(
        self,
        which: int | str | os.PathLike[str] | None,
        request: LoadRequest,
        *,
        fallback: bool,
    ) -> dict[str, Any]:
        """Read the checkpoint that ``which`` names into live objects, and go on from there."""
        began = time.monotonic()
        step, candidates, checkpoints, rollbacks = self._candidates(which, fallback=fallback)
        for info in candidates:
            try:
                with self._world.raise_together(f"cannot load step {info.step}"):
                    loaded = request.read(info.path)
            except IntegrityError as error:
                if info is candidates[-1]:
                    raise
                logger.warning(
                    "step %d does not verify, so another copy or an older step is tried: %s",
                    info.step,
                    error,
                )
                continue
            with self._world.raise_together(
                f"cannot give its objects what it has loaded of step {info.step}"
            ):
                state = loaded.apply()
            since = self._lineage.go_back_to(info, checkpoints, rollbacks)
            if step is not None:
                with self._world.raise_together(
                    f"cannot write down that it goes on from step {info.step}"
                ):
                    if self._node.rank == 0:
                        self._run.give_up_after(info, since, self._session_id)
            seconds = time.monotonic() - began
            level = logging.INFO if info is candidates[0] else logging.WARNING
            logger.log(
                level,
                "loaded step %d: %d bytes read in %.2f s",
                info.step,
                loaded.nbytes_read,
                seconds,
            )
            return state
        raise AssertionError("unreachable: the last candidate returns or raises")

    def ancestor(self, upto: int) -> int:
        """The newest ancestor step up to ``upto``, the same on all ranks; all must call this."""
        steps: list[int] = []
        with self._world.raise_together("finds nothing to go back to"):
            if self._world.rank == 0:
                self._saves.settle(None)
                ancestors = self._lineage.ancestors
                steps = [
                    info.step
                    for info in self.checkpoints()
                    if info.step <= upto and info.step in ancestors
                ][-1:]
                if not steps:
                    text = f"there is no checkpoint to go back to, up to step {upto}"
                    raise CheckpointNotFoundError(errno.ENOENT, text, self._run.directory)
        return self._world.gather("the step to go back to", steps)[0][0]

    def _candidates(
        self, which: int | str | os.PathLike[str] | None, *, fallback: bool
    ) -> tuple[int | None, list[CheckpointInfo], list[CheckpointInfo], Rollbacks]:
        """The step that all ranks mean, and what rank 0 sees.

        That is what to try to load, best first; all checkpoints; and where the run went back.
        """
        world = self._world
        chosen: list[CheckpointInfo] = []
        checkpoints: list[CheckpointInfo] = []
        rollbacks = Rollbacks()
        view: RunView | None = None
        step: int | None = None
        within = ""
        is_path = isinstance(which, (str, os.PathLike))
        if world.size > 1:  # first, so that what one rank does not find means the same to all
            world.require_alike(
                step="a path" if is_path else arguments.as_index(which), fallback=fallback
            )
        with world.raise_together("cannot tell what to load"):
            step, within = self._run.meant(which)
            self._saves.settle(step)
            if self._node.rank == 0:
                view = self._run.look()
                checkpoints, rollbacks = view.all, view.rollbacks
        if world.size > 1:
            if is_path:
                world.require_alike(step=step)
            answers = world.gather(
                "checkpoints", None if view is None else [rollbacks.pairs, to_json(checkpoints)]
            )
            views = [answer for answer in answers if answer is not None]
            checkpoints = common([from_json(infos, self._run.directory) for _, infos in views])
            rollbacks = Rollbacks.of(views[0][0])
            view = None if view is None else view.limited_to({info.key for info in checkpoints})
        with world.raise_together("finds a damaged checkpoint"):
            if view is not None and not fallback:
                view.refuse_damaged(step)
        with world.raise_together("finds nothing to load"):
            if world.rank == 0 and view is not None:
                in_parts = isinstance(self._node, NodeWorld)
                chosen = view.to_try(step, within=within, fallback=fallback, in_parts=in_parts)
        if world.size > 1:
            chosen = from_json(world.gather("candidates", to_json(chosen))[0], self._run.directory)
        return step, chosen, checkpoints, rollbacks


def common(views: list[list[CheckpointInfo]]) -> list[CheckpointInfo]:
    """The checkpoints of which every node has its part, as the first one has them."""
    keys = [{info.key for info in view} for view in views]
    return [info for info in views[0] if all(info.key in known for known in keys)]


def to_json(checkpoints: list[CheckpointInfo]) -> list[Any]:
    """Checkpoints as one rank sends them to the others."""
    return [info.to_json() for info in checkpoints]


def from_json(infos: list[Any], directory: str) -> list[CheckpointInfo]:
    """The checkpoints that another rank has sent, located in ``directory``."""
    return [CheckpointInfo.from_json(info, directory) for info in infos]
