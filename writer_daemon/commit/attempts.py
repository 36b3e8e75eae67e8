"""One attempt of one or several ranks to save a step: its directory, and how a rank ends it.

Rank 0's daemon aborts an attempt for all ranks: it renames the partial directory and leaves the
reason in it. Another rank's daemon refuses: it leaves a refusal in place of its record.
``coordination`` waits for the records and for the outcome.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Iterable
from typing import Final

from sidesave.errors import (
    IntegrityError,
    SidesaveError,
    StateMismatchError,
    WriteError,
    WriteStalledError,
)
from sidesave.writer_daemon.format.manifest import MAX_JSON_NBYTES
from sidesave.writer_daemon.format.names import (
    attempt_name,
    hidden_directory,
    parse_hidden_directory,
    record_file,
)
from sidesave.writer_daemon.format.refusal import Refusal
from sidesave.writer_daemon.protocol import Failed, Refuse, Save
from sidesave.writer_daemon.storage import Storage

logger = logging.getLogger(__name__)

ABORT: Final = "abort.json"


class GivenUp(Exception):
    """An attempt failed, whatever this rank may retry; ``reason`` is the error to report."""

    def __init__(self, reason: SidesaveError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def attempt_of(save: Save | Refuse) -> str:
    """The part of a directory's name that identifies this attempt."""
    return attempt_name(save.session, save.sequence, save.world_size)


def partial_of(save: Save | Refuse) -> str:
    """The directory that an attempt writes to."""
    return hidden_directory(save.step, attempt_of(save), "partial")


def refuse_aborted(storage: Storage, save: Save | Refuse) -> None:
    """Raise ``GivenUp`` if the attempt was aborted; a directory made now would have no owner."""
    reason = abort_reason(storage, save, storage.list_directory(""))
    if reason is not None:
        raise GivenUp(reason)


def _tombstone(names: Iterable[str], save: Save | Refuse) -> str | None:
    """The renamed directory of an aborted attempt; rank 0 may have meant another step by it."""
    end = f".{attempt_of(save)}.aborted"
    return next(
        (name for name in names if name.endswith(end) and parse_hidden_directory(name)), None
    )


def abort_reason(
    storage: Storage, save: Save | Refuse, names: Iterable[str]
) -> SidesaveError | None:
    """Why the attempt was aborted, by the run directory's names; None if it was not."""
    aborted = _tombstone(names, save)
    if aborted is None:
        return None
    if save.rank:
        tidy(lambda: _remove_late(storage, save, aborted))
    data = None
    with contextlib.suppress(WriteError):
        data = storage.read(f"{aborted}/{ABORT}", MAX_JSON_NBYTES)
    refusal = None
    if data is not None:
        with contextlib.suppress(IntegrityError):
            refusal = Refusal.from_bytes(data, aborted)
    if refusal is None:
        return WriteError(errno.ECONNABORTED, "rank 0 has given up this save", aborted)
    error = refusal.as_error()
    if refusal.step != save.step and isinstance(error, (StateMismatchError, WriteStalledError)):
        if isinstance(error, WriteStalledError):
            text = f"rank 0 saved step {refusal.step} where rank {save.rank} saves step {save.step}"
            error = StateMismatchError(
                f"{text}; every rank has to save the same steps in the same order. {error}"
            )
        error.saved_instead = refusal.step
    return error


def abort(storage: Storage, save: Save | Refuse, failure: Failed, attempt: str) -> str | None:
    """Abort an attempt for all ranks, free its space, and return the directory with the reason.

    Returns None if there is no such directory. Never raises ``WriteError``: ranks that do not see
    the abort end at their own deadline.
    """
    partial, aborted = partial_of(save), hidden_directory(save.step, attempt_of(save), "aborted")
    try:
        earlier = _tombstone(storage.list_directory(""), save)
        if earlier is not None:
            return earlier
        storage.make_directory(partial, 0o700)
        try:
            _write_refusal(storage, f"{partial}/{ABORT}", save, "aborted", failure, attempt)
        except WriteError as error:  # a full disk: renaming takes no space
            logger.warning(
                "the other ranks are not told why step %d was given up: %s", save.step, error
            )
        storage.rename_directory(partial, aborted)
    except WriteError as error:
        logger.warning("cannot be removed now, the next start tries again: %s", error)
        return None
    tidy(lambda: _free(storage, save, aborted))
    return aborted


def _free(storage: Storage, save: Save | Refuse, aborted: str) -> None:
    for _ in range(3):  # some may just be given a name
        names = set(storage.list_directory(aborted)) - {ABORT}
        for name in names:
            storage.remove(f"{aborted}/{name}")
        if not names:
            break
    for name in storage.list_directory(""):
        if name.endswith(f".{attempt_of(save)}.partial"):  # of ranks that save another step
            storage.remove_tree(name)


def tidy(remove: Callable[[], None]) -> None:
    """Try twice: leftovers take space until the session ends."""
    for _ in range(2):
        try:
            remove()
        except WriteError as error:
            logger.warning("left over: %s", error)
        else:
            break


def _remove_late(storage: Storage, save: Save | Refuse, aborted: str) -> None:
    """Remove what this rank has written since rank 0 removed the rest."""
    storage.remove_tree(partial_of(save))  # made again, or of another step
    # Written by a call that had found the directory before it was renamed.
    _remove_files(storage, aborted, save.rank)


def refuse(storage: Storage, save: Save | Refuse, failure: Failed, attempt: str) -> None:
    """Tell rank 0 that this rank's record will not come, and free the space.

    Never raises ``WriteError``: rank 0 ends at its deadline if it does not learn of it.

    Raises:
        GivenUp: The attempt was aborted before.
    """
    directory, record = partial_of(save), record_file(save.rank)
    try:
        reason = abort_reason(storage, save, storage.list_directory(""))
        if reason is not None:
            raise GivenUp(reason)
        storage.make_directory(directory, 0o700)
        if record in storage.list_directory(directory):  # it has been told before
            return
        _remove_files(storage, directory, save.rank)
        _write_refusal(storage, f"{directory}/{record}", save, "failed", failure, attempt)
    except SidesaveError as error:
        logger.warning("rank 0 is not told that step %d failed here: %s", save.step, error)


def _remove_files(storage: Storage, directory: str, rank: int) -> None:
    for name in storage.list_directory(directory):
        if f".rank-{rank:05d}." in name or name == record_file(rank):
            storage.remove(f"{directory}/{name}")


def _write_refusal(
    storage: Storage, path: str, save: Save | Refuse, status: str, failure: Failed, attempt: str
) -> None:
    content = Refusal(
        session=save.session,
        step=save.step,
        sequence=save.sequence,
        rank=save.rank,
        world_size=save.world_size,
        status=status,
        error=failure.error,
        message=failure.message,
        errno=failure.errno,
        path=failure.path,
    )
    directory, _, name = path.rpartition("/")
    storage.publish_bytes(directory, name, content.to_bytes(), attempt)
