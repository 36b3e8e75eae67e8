"""The output directory of a ``transformers.Trainer`` while it trains: saves, links, deletions."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sidesave.client import arguments
from sidesave.client.checkpointer import Checkpointer
from sidesave.client.loading.load import load
from sidesave.client.options import CheckpointerOptions
from sidesave.client.runs import finding
from sidesave.client.runs.links import Links
from sidesave.client.runs.pins import Pins
from sidesave.client.saving.handle import Outcome, SaveHandle
from sidesave.client.training.keep_policies import KeepPolicy
from sidesave.client.training.retention import Retention
from sidesave.errors import InvalidArgumentError
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.format.names import parse_step_directory, step_directory
from sidesave.writer_daemon.storage import urls

STATE: Final = "trainer_state.json"
BEST: Final = "trainer_best_step"
"""Metadata key: the best step when the checkpoint was saved."""
NAME: Final = re.compile(r"checkpoint-(\d+)\Z")
_CLOSE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _SaveTotalLimit(KeepPolicy):
    """Keep ``limit`` checkpoints as the trainer does: the latest, the best, the newest others."""

    limit: int

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """Return the steps to keep."""
        newest_first = [info.step for info in reversed(checkpoints)]
        best = checkpoints[-1].metadata.get(BEST) if checkpoints else None
        first = list(
            dict.fromkeys([*newest_first[:1], *(step for step in newest_first if step == best)])
        )
        return list(dict.fromkeys([*first, *newest_first]))[: max(self.limit, len(first))]


class TrainingRun:
    """The output directory of a trainer while it trains."""

    def __init__(self, checkpointer: Checkpointer, limit: int | None) -> None:
        self._checkpointer = checkpointer
        self._session = session = checkpointer.session
        self._directory = checkpointer.directory
        self._world = session.world
        self._saves: dict[int, SaveHandle] = {}  # those under way
        self._told: list[Outcome[None]] = []
        self._retention: Retention | None = None
        if session.leads:
            policies = None if limit is None or limit <= 0 else (_SaveTotalLimit(limit),)
            links = Links(self._directory, _name)
            self._retention = Retention(session, policies, Pins(self._directory), links)

    def check(self, items: dict[str, Any], files: dict[str, bytes]) -> None:
        """Raise on all ranks what saving these would raise, as far as known before training."""
        with self._world.raise_together("cannot save its state"):
            arguments.encode_files(files)
            self._checkpointer.check(items)

    def save(
        self,
        step: int,
        items: dict[str, Any],
        files: dict[str, str | bytes],
        metadata: dict[str, Any],
    ) -> None:
        """Save, replacing the step if it exists. Returns when training may continue."""
        call = functools.partial(
            self._checkpointer.save, step, items, overwrite=True, metadata=metadata, files=files
        )
        handle = call() if self._retention is None else self._retention.save(call)
        if handle.skipped:
            return
        told = Outcome[None]()
        handle.committed.add_done_callback(lambda _: told.resolve(None))  # after those of retention
        self._saves = {other: each for other, each in self._saves.items() if not each.done()} | {
            step: handle
        }
        self._told = [each for each in self._told if not each.done()] + [told]

    def has(self, step: int) -> bool:
        """Whether a step is committed or being saved."""
        handle = self._saves.get(step)
        if handle is not None and not handle.done():
            return True
        return os.path.isdir(os.path.join(self._directory, step_directory(step)))

    def settle(self) -> None:
        """Wait until all saves are committed and named, on all ranks.

        Raises what ``Checkpointer.wait`` raises.
        """
        self._checkpointer.wait()
        self.name()

    def name(self) -> None:
        """Wait until all committed checkpoints have their names, on all ranks."""
        with self._world.raise_together("cannot name its checkpoints"):
            for each in self._told:
                each.result()
            if self._retention is not None:
                with self._retention.reading(None):  # waits for the work that retention has begun
                    pass

    def newest(self) -> str | None:
        """Return the path to resume from: the latest of sidesave or the trainer itself; or None."""
        path: str | None = None
        with self._world.raise_together("cannot decide what to resume"):
            if self._world.rank == 0:
                path = self._newest()
        return self._world.gather("what to resume", path)[0]

    def _newest(self) -> str | None:
        found = self._checkpointer.checkpoints()
        latest = found[-1] if found else None
        if latest is not None and urls.is_url(latest.path):
            raise InvalidArgumentError(
                f"the latest checkpoint is only in the mirror, {latest.path}: fetch it with "
                "sidesave.fetch() and pass its path as resume_from_checkpoint"
            )
        stock: dict[int, str] = {}
        for entry in os.scandir(self._directory):
            named = NAME.match(entry.name)
            if named and not entry.is_symlink() and os.path.exists(os.path.join(entry.path, STATE)):
                stock[int(named[1])] = entry.path
        step = max(stock, default=-1)
        if latest is None or step > latest.step:
            return stock.get(step)
        return latest.path

    def located(self, path: str) -> str:
        """Return the path of a checkpoint whose link may not exist yet."""
        named = NAME.search(path.rstrip("/"))
        if named and not os.path.exists(path) and _is_in(path, self._directory):
            return os.path.join(self._directory, step_directory(int(named[1])))
        return path

    def load(self, path: str, into: dict[str, Any]) -> None:
        """Load into live objects on all ranks or none; go back to the step if it is this run's."""
        real = os.path.realpath(path)
        step = parse_step_directory(os.path.basename(real))
        if step is None or not _is_in(real, self._directory):
            pickled = self._session.options.allow_pickle
            with self._world.raise_together(f"cannot load {path}"):
                load(path, into=into, allow_pickle=pickled)
            return
        with contextlib.ExitStack() as spared:
            with self._world.raise_together("cannot keep the checkpoint while it loads"):
                if self._retention is not None:
                    spared.enter_context(self._retention.reading(step))
            self._checkpointer.load(step, into=into)
        if self._retention is not None:
            for info in finding.find(self._directory):
                link = os.path.join(self._directory, f"checkpoint-{info.step}")
                if info.given_up and os.path.islink(link):
                    os.unlink(link)

    def close(self) -> None:
        """Wait for all saves to end, and for retention's deletions."""
        self._session.saves.wait(None)
        if self._retention is not None:
            self._retention.close(_CLOSE_TIMEOUT_S)


@contextlib.contextmanager
def open_run(
    directory: str, limit: int | None, options: CheckpointerOptions
) -> Generator[TrainingRun]:
    """Open the output directory for a training; ``limit`` is the trainer's ``save_total_limit``."""
    with Checkpointer(directory, **options) as checkpointer:
        run = TrainingRun(checkpointer, limit)
        try:
            run.name()
            yield run
        finally:
            run.close()


def _name(info: CheckpointInfo) -> str | None:
    """Return the name of a checkpoint's link; None if the run went back behind the checkpoint.

    Without a link it is not resumed.
    """
    return None if info.given_up else f"checkpoint-{info.step}"


def _is_in(path: str, directory: str) -> bool:
    return os.path.realpath(os.path.dirname(os.path.abspath(path))) == os.path.realpath(directory)
