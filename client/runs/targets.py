"""What a command is to work on: a checkpoint, or a run directory, as people write them."""

from __future__ import annotations

import errno
from pathlib import Path

from sidesave.client.arguments import path_text
from sidesave.client.runs import catalog
from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError
from sidesave.writer_daemon.format.manifest import (
    MANIFEST,
    parse_hidden_directory,
    parse_step_directory,
    step_directory,
)


def find_directory(path: str) -> Path:
    """A directory that can be looked into; raises ``CheckpointNotFoundError`` and ``InvalidArgumentError``."""
    found = Path(path_text(path))
    if not found.is_dir():
        raise CheckpointNotFoundError(errno.ENOENT, "there is no such directory", str(found))
    directory = found.resolve()
    hidden = parse_hidden_directory(directory.name)
    if hidden is not None and hidden[2] != "replaced":
        raise InvalidArgumentError(f"{directory} is an unfinished checkpoint, or one on its way out")
    return directory


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory is one checkpoint, be its manifest there or not; else it is a run directory."""
    return (directory / MANIFEST).exists() or parse_step_directory(directory.name) is not None


def find_checkpoint(path: str, step: int | None = None) -> Path:
    """The checkpoint that is meant: ``path`` itself, or one of the run directory ``path``, the latest by default."""
    directory = find_directory(path)
    if is_checkpoint(directory):
        if step is not None:
            raise InvalidArgumentError(f"--step chooses in a run directory, and {directory} is one checkpoint")
        return directory
    if step is not None and (directory / step_directory(step)).is_dir():
        return directory / step_directory(step)
    found = catalog.scan(str(directory))
    wanted = [info for info in found if step is None or info.step == step]
    if not wanted:
        others = [info.step for info in found][-20:]
        raise CheckpointNotFoundError(
            2, f"no step {step} among {others}" if found else "no checkpoints", str(directory)
        )
    return Path(wanted[-1].path)


def find_run(path: str) -> Path:
    """A run directory; one checkpoint is refused."""
    directory = find_directory(path)
    if is_checkpoint(directory):
        raise InvalidArgumentError(f"{directory} is one checkpoint; its run directory is {directory.parent}")
    return directory


def all_checkpoints(run: Path) -> list[Path]:
    """Every checkpoint of a run directory by step, those with a damaged manifest included."""
    steps = {entry: step for entry in run.iterdir() if (step := parse_step_directory(entry.name)) is not None}
    steps |= {Path(info.path): info.step for info in catalog.scan(str(run))}
    return sorted(steps, key=lambda path: steps[path])
