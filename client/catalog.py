"""Which checkpoints a run directory holds, and which of them are ancestors of what is saved next."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from sidesave.client.handle import CheckpointInfo
from sidesave.errors import CheckpointNotFoundError, IntegrityError
from sidesave.writer_daemon.manifest import (
    MANIFEST,
    MAX_JSON_NBYTES,
    Head,
    parse_hidden_directory,
    parse_step_directory,
    step_directory,
)

logger = logging.getLogger(__name__)


def scan(directory: str) -> list[CheckpointInfo]:
    """Every committed checkpoint of a run directory, in the order of their commits; read afresh.

    One whose manifest is damaged is left out, with a warning. A step that is being replaced at this moment is found
    under its old directory.

    Raises:
        CheckpointNotFoundError: There is no such directory.
    """
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(error.errno, "there is no run directory", directory) from error
    committed = {name: step for name in names if (step := parse_step_directory(name)) is not None}
    for name in names:
        hidden = parse_hidden_directory(name)
        if hidden is not None and hidden[2] == "replaced" and step_directory(hidden[0]) not in committed:
            committed[name] = hidden[0]
    found: list[CheckpointInfo] = []
    for name, step in committed.items():
        path = os.path.join(directory, name)
        try:
            info = read_info(path)
        except FileNotFoundError:
            continue  # removed or replaced since it was listed
        except (IntegrityError, OSError) as error:
            logger.warning("not listed: %s", error)
            continue
        if info.step == step:
            found.append(info)
        else:
            logger.warning("not listed: %s says that it is step %d", path, info.step)
    return sorted(found, key=lambda info: info.sequence)


def refuse_newer_damaged(directory: str, checkpoints: list[CheckpointInfo]) -> None:
    """Raise ``IntegrityError`` when a directory that :func:`scan` had to leave out is of a later step than the newest.

    Its place in the order of commits is not known: taking an older checkpoint then has to be the caller's decision.
    """
    newest = checkpoints[-1].step if checkpoints else -1
    listed = {info.step for info in checkpoints}
    steps = (parse_step_directory(name) for name in os.listdir(directory))
    for step in sorted(step for step in steps if step is not None and step > newest and step not in listed):
        try:
            read_info(os.path.join(directory, step_directory(step)))
        except FileNotFoundError:
            continue
        except IntegrityError as error:
            raise IntegrityError(f"{error}; load(fallback=True) takes the newest that verifies") from error


def read_info(path: str) -> CheckpointInfo:
    """Facts about the checkpoint in ``path``, from its manifest, whose digest is checked."""
    manifest = os.path.join(path, MANIFEST)
    with open(manifest, "rb") as file:
        head = Head.from_bytes(file.read(MAX_JSON_NBYTES), manifest)
    return CheckpointInfo(head.step, path, head.nbytes, head.session, head.sequence, head.parent, head.created_s)


def lineage(checkpoints: Iterable[CheckpointInfo], newest: tuple[int, str] | None) -> set[int]:
    """The steps that ``newest`` (step, session) descends from, itself included.

    What a session has saved before, after it was resumed from the same parent, is an ancestor; going back within a
    session makes another parent. Then the chain goes on at the parent.
    """
    by_session: dict[str, list[CheckpointInfo]] = {}
    for info in checkpoints:
        by_session.setdefault(info.session, []).append(info)
    steps: set[int] = set()
    visited: set[tuple[int, str]] = set()
    while newest is not None and newest not in visited:
        visited.add(newest)
        step, session = newest
        saved = sorted(by_session.get(session, []), key=lambda info: info.sequence)
        upto = [info for info in saved if info.step == step] or [info for info in saved if info.step < step]
        if not upto:  # removed since, with all that came before
            newest = saved[0].parent if saved else None
            continue
        tip = upto[-1]
        steps.update(info.step for info in saved if info.parent == tip.parent and info.sequence <= tip.sequence)
        newest = tip.parent
    return steps
