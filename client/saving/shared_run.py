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
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.runs.run import Run
from sidesave.client.saving.in_flight import SavesInFlight
from sidesave.client.saving.lineage import Lineage
from sidesave.errors import CheckpointNotFoundError, IntegrityError

logger = logging.getLogger(__name__)


class SharedRun:
    """Lists the checkpoints that exist for all ranks, and goes on from one of them."""

    def __init__(
        self,
        world: World,
        node: World,
        run: Run,
        session_id: str,
        saves: SavesInFlight,
        lineage: Lineage,
        complete: Collection[tuple[str, int]],
    ) -> None:
        """See ``run`` as ``world`` does; of earlier sessions every node has its part of the ``complete`` ones."""
        self._world = world
        self._node = node
        self._run = run
        self._session_id = session_id
        self._saves = saves
        self._lineage = lineage
        self._complete = complete

    def checkpoints(self) -> list[CheckpointInfo]:
        """The checkpoints; of nodes that keep their own parts those of earlier sessions that every node has."""
        scanned, _ = self._run.scan_all()
        if not isinstance(self._node, NodeWorld):
            return scanned
        return [
            info
            for info in scanned
            if info.session == self._session_id or (info.session, info.sequence) in self._complete
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
        step, candidates, checkpoints = self._candidates(which, fallback=fallback)
        for info in candidates:
            try:
                with self._world.raise_together(f"cannot load step {info.step}"):
                    loaded = request.read(info.path)
            except IntegrityError as error:
                if info is candidates[-1]:
                    raise
                logger.warning("step %d does not verify, trying another one: %s", info.step, error)
                continue
            with self._world.raise_together(f"cannot give its objects what it has loaded of step {info.step}"):
                state = loaded.apply()
            self._lineage.go_back_to(info, checkpoints)
            if step is not None:
                with self._world.raise_together(f"cannot write down that it goes on from step {info.step}"):
                    if self._node.rank == 0:
                        self._run.give_up_after(info, self._lineage.sequence, self._session_id)
            seconds = time.monotonic() - began
            logger.info("loaded step %d: %d bytes read in %.2f s", info.step, loaded.nbytes_read, seconds)
            return state
        raise AssertionError("unreachable: the last candidate returns or raises")

    def ancestor(self, upto: int) -> int:
        """The newest step, up to ``upto``, that training descends from; the same on all ranks, which all ask."""
        steps: list[int] = []
        with self._world.raise_together("finds nothing to go back to"):
            if self._world.rank == 0:
                self._saves.settle(None)
                ancestors = self._lineage.ancestors
                steps = [info.step for info in self.checkpoints() if info.step <= upto and info.step in ancestors][-1:]
                if not steps:
                    text = f"there is no checkpoint to go back to, up to step {upto}"
                    raise CheckpointNotFoundError(errno.ENOENT, text, self._run.directory)
        return self._world.gather("the step to go back to", steps)[0][0]

    def _candidates(
        self, which: int | str | os.PathLike[str] | None, *, fallback: bool
    ) -> tuple[int | None, list[CheckpointInfo], list[CheckpointInfo]]:
        """The step that all ranks mean, what to try to load, best first, and all there is; as rank 0 sees it."""
        world, leads = self._world, self._node.rank == 0
        chosen: list[list[CheckpointInfo]] = []
        checkpoints: list[CheckpointInfo] = []
        step: int | None = None
        within = ""
        is_path = isinstance(which, (str, os.PathLike))
        if world.size > 1:  # first, so that what one rank does not find means the same to all
            world.require_alike(step="a path" if is_path else arguments.as_index(which), fallback=fallback)
        with world.raise_together("cannot tell what to load"):
            step, within = self._run.meant(which)
            self._saves.settle(step)
            if leads:
                checkpoints, _ = self._run.scan_all()
        if world.size > 1:
            if is_path:
                world.require_alike(step=step)
            answers = world.gather("checkpoints", to_json(checkpoints) if leads else None)
            checkpoints = common([from_json(answer, self._run.directory) for answer in answers if answer is not None])
        with world.raise_together("finds a damaged checkpoint"):
            if leads and not fallback:
                self._run.refuse_damaged(step, checkpoints)
        with world.raise_together("finds nothing to load"):
            if world.rank == 0:
                in_parts = isinstance(self._node, NodeWorld)
                chosen = [self._run.choose(step, checkpoints, within=within, fallback=fallback, in_parts=in_parts)]
        if world.size > 1:
            candidates = world.gather("candidates", to_json([info for infos in chosen for info in infos]))[0]
            chosen = [from_json(candidates, self._run.directory)]
        return step, chosen[0], checkpoints


def common(views: list[list[CheckpointInfo]]) -> list[CheckpointInfo]:
    """The checkpoints of which every node has its part, as the first one has them."""
    keys = [{(info.step, info.session, info.sequence) for info in view} for view in views]
    return [info for info in views[0] if all((info.step, info.session, info.sequence) in known for known in keys)]


def to_json(checkpoints: list[CheckpointInfo]) -> list[Any]:
    """Checkpoints as one rank sends them to the others."""
    return [info.to_json() for info in checkpoints]


def from_json(infos: list[Any], directory: str) -> list[CheckpointInfo]:
    """The checkpoints that another rank has sent, located in ``directory``."""
    return [CheckpointInfo.from_json(info, directory) for info in infos]
