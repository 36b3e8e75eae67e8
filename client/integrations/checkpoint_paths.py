"""Checkpoints under paths that a framework chooses, such as ``last.ckpt``: links to a run's steps.

A path exists as soon as the save is called, and never leads to a partial checkpoint. Until the
commit it links to a note through a descriptor of the saving process (``/proc/self/fd/N/NOTE``), so
it exists for this process and dangles for every other process, and for all of them once this one
was killed. At the commit it is linked to the step; a path that led to an earlier checkpoint leads
there until then. Notes are small files in the run directory, from which the next session learns
which paths a killed process left unfinished.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sidesave.client.checkpointer import Checkpointer
from sidesave.client.runs.links import replace_link
from sidesave.client.saving.handle import SaveHandle
from sidesave.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    SidesaveError,
    write_error,
)
from sidesave.stager.signal_safe import Monitor
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.format.names import parse_step_directory

logger = logging.getLogger(__name__)

PATH: Final = "path"
"""Metadata key: the path that the checkpoint was saved under, relative to the run directory."""
_NOTES: Final = ".sidesave.paths"
_PENDING: Final = re.compile(r"/proc/self/fd/\d+/([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class _Save:
    """A save that is not committed yet."""

    path: str
    note: str
    handle: SaveHandle


@dataclass(frozen=True, slots=True)
class _Note:
    """An action planned for a path, written to disk so that the next session can finish it.

    Attributes:
        save: Link the path to this step when the step is committed.
        drop: Delete this step once the path no longer leads to it.
        after: Remove the path when this step is committed, if it leads to ``drop`` or is one of the
            framework's own files.
    """

    path: str
    save: int | None = None
    drop: int | None = None
    after: int | None = None


class CheckpointPaths:
    """Saves under paths, into the run directory of a ``Checkpointer`` that nothing else uses.

    A run directory has one such object, on rank 0.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        """Finish or undo paths that a killed process left; raises ``WriteError`` if that fails."""
        self.checkpointer = checkpointer
        self._directory = os.path.realpath(checkpointer.directory)
        self._notes = os.path.join(self._directory, _NOTES)
        self._places = {self._directory}
        self._changes = Monitor()
        self._saves: dict[int, _Save] = {}
        self._removals: dict[str, _Note] = {}
        self._unwanted: dict[int, str] = {}
        self._latest = -1
        self._deletions = 0
        self._failure: OSError | None = None
        try:
            os.makedirs(self._notes, exist_ok=True)
            self._fd = os.open(self._notes, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._next = 1 + self._recover()
            except BaseException:  # also on an interrupt: the caller gets no object to close
                os.close(self._fd)
                raise
        except OSError as error:
            raise write_error(
                error, "cannot recover the paths of the run", self._directory
            ) from error

    # Saving ---------------------------------------------------------------------------------------

    def claim(self, path: str) -> tuple[int, str]:
        """Create ``path`` if missing, and return the next step and a note for it; see :meth:`save`.

        Raises:
            InvalidArgumentError: ``path`` is a directory that is not a checkpoint of this run.
            WriteError: The path cannot be created, or an earlier path could not be linked to its
                checkpoint.
        """
        self._raise_failure()
        if os.path.isdir(path) and not os.path.islink(path):
            raise InvalidArgumentError(
                f"{path} is a directory: save under another path, or remove it first"
            )
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            note = self._write(_Note(path, save=self._next))
            if not os.path.exists(path):
                _link(f"/proc/self/fd/{self._fd}/{note}", path)
        except OSError as error:
            raise write_error(error, "cannot make the path of a checkpoint", path) from error
        step = self._next
        self._next += 1
        return step, note

    def save(
        self,
        path: str,
        claim: tuple[int, str],
        state: Mapping[str, Any],
        metadata: Mapping[str, Any],
    ) -> SaveHandle:
        """Save ``state`` and link ``path`` to it at the commit.

        Returns as early as ``Checkpointer.save`` does, and raises what it raises; after an error
        the path is as it was before the claim.
        """
        step, note = claim
        try:
            handle = self.checkpointer.save(
                step, state, metadata={**metadata, PATH: self._relative(path)}
            )
        except Exception:
            # not BaseException: an interrupted save may still commit, so its note stays
            self._give_up(path, note)
            raise
        if handle.skipped:
            self._give_up(path, note)
            return handle
        with self._changes:
            self._saves[step] = _Save(path, note, handle)
        handle.committed.add_done_callback(lambda _: self._finish(step))
        return handle

    def remove(self, path: str) -> None:
        """Remove ``path`` and its checkpoint once earlier saves commit; if one fails, both stay."""
        with self._changes:
            own = max(
                (step for step, save in self._saves.items() if save.path == path), default=None
            )
            step = self._step_at(path) if own is None else own
            try:
                removal = _Note(path, drop=step, after=max(self._saves, default=self._latest))
                note = self._write(removal)
                if self._saves:
                    self._removals[note] = removal
                    return
                self._remove(note, removal)
            except OSError as error:
                raise write_error(error, "cannot remove a checkpoint", path) from error
        self._delete_unwanted()

    def wait_for(self, path: str) -> None:
        """Wait until the last save under ``path`` is committed and linked; raises its error."""
        with self._changes:
            own = [save for save in self._saves.values() if save.path == path]
        if own:
            error = own[-1].handle.committed.exception()
            self._changes.wait_for(lambda: own[-1] not in self._saves.values())
            if error is not None:
                raise error

    def close(self) -> None:
        """Wait for all saves, finish their paths, and close the checkpointer.

        Raises what ``Checkpointer.close`` raises, and ``WriteError`` for a path that could not be
        linked.
        """
        try:
            try:
                self.checkpointer.wait()
            finally:
                self._changes.wait_for(lambda: not self._saves and not self._deletions)
                self._settle()
                self._changes.wait_for(lambda: not self._deletions)
        finally:
            os.close(self._fd)
            self.checkpointer.close()
        self._raise_failure()

    # In the thread that runs callbacks of commits -------------------------------------------------

    def _finish(self, step: int) -> None:
        save = self._saves[step]
        is_committed = save.handle.committed.peek() is None
        if is_committed:
            self._latest = step
            with self._noting_failure(f"{save.path} does not lead to step {step}"):
                self._place(save.path, save.handle.committed.result(0))
                self._forget(save.note)
        else:
            self._give_up(save.path, save.note)
        while True:
            with self._noting_failure("checkpoints without a path are not deleted"):
                self._delete_unwanted()
            with self._changes:
                due = [note for note, removal in self._removals.items() if removal.after == step]
                removals = {note: self._removals.pop(note) for note in due}
                if not removals:
                    del self._saves[step]
                    self._changes.notify_all()
                    return
            for note, removal in removals.items():
                if is_committed:
                    with self._noting_failure(f"{removal.path} is not removed"):
                        self._remove(note, removal)
                else:
                    logger.warning(
                        "%s is not removed, because the save after it failed", removal.path
                    )
                    self._forget(note)

    @contextlib.contextmanager
    def _noting_failure(self, what: str) -> Generator[None]:
        try:
            yield
        except (OSError, SidesaveError) as error:
            logger.error("%s: %s", what, error)
            if isinstance(error, OSError):
                self._failure = error

    def _place(self, path: str, info: CheckpointInfo) -> None:
        """Link ``path`` to a checkpoint, and mark the one that it led to before for deletion."""
        place = os.path.realpath(info.path)
        self._places.add(os.path.dirname(place))
        before = self._step_at(path)
        if before == info.step:
            return
        note = None if before is None else self._write(_Note(path, drop=before))
        _link(os.path.relpath(place, os.path.realpath(os.path.dirname(path))), path)
        if before is not None and note is not None:
            self._unwanted[before] = note

    def _remove(self, note: str, removal: _Note) -> None:
        """Remove a path, unless it leads to another checkpoint in the meantime."""
        path = removal.path
        # a checkpoint that the framework has written itself
        if removal.drop is None and not os.path.islink(path):
            if os.path.isdir(path):
                shutil.rmtree(path)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        if removal.drop is not None and self._step_at(path) == removal.drop:
            dropping = self._write(_Note(path, drop=removal.drop))
            os.unlink(path)
            _sync(os.path.dirname(path))
            self._unwanted[removal.drop] = dropping
        self._forget(note)

    def _delete_unwanted(self) -> None:
        """Delete checkpoints that no path leads to, except the newest, which a run always keeps."""
        while True:
            with self._changes:  # the thread that runs callbacks of commits calls this too
                step = next((step for step in list(self._unwanted) if step != self._latest), None)
                if step is None:
                    return
                note = self._unwanted.pop(step)
                self._deletions += 1
            try:
                deletion = self.checkpointer.delete(step)
            except BaseException:
                # the note stays for the next session; close() must not wait for this deletion
                self._count_deleted()
                raise
            deletion.add_done_callback(lambda done, note=note: self._deleted(note, done))

    def _deleted(self, note: str, done: Any) -> None:
        error = done.exception()
        if error is None or isinstance(error, CheckpointNotFoundError):
            self._forget(note)
        else:
            logger.warning(
                "a checkpoint without a path is left for the next session to delete: %s", error
            )
        self._count_deleted()

    def _count_deleted(self) -> None:
        with self._changes:
            self._deletions -= 1
            self._changes.notify_all()

    def _give_up(self, path: str, note: str) -> None:
        """Remove ``path`` if it still waits for the save of ``note``, and remove the note."""
        with contextlib.suppress(OSError):
            if (found := _PENDING.fullmatch(os.readlink(path))) and found[1] == note:
                os.unlink(path)
        self._forget(note)

    # Leftovers of a killed process or an interrupted call -----------------------------------------

    def _recover(self) -> int:
        """Act on all notes; returns the highest step of the run."""
        checkpoints = self.checkpointer.checkpoints()
        steps = {info.step: info for info in checkpoints}
        self._places.update(os.path.realpath(os.path.dirname(info.path)) for info in checkpoints)
        self._latest = checkpoints[-1].step if checkpoints else -1
        with os.scandir(self._notes) as entries:
            notes = {entry.name: self._read(entry.path) for entry in entries}
        for note in notes.values():
            if (
                note.save in steps
                and (self._step_at(note.path) or -1) < note.save
                and os.path.lexists(note.path)
            ):
                self._place(note.path, steps[note.save])
        for name, note in notes.items():
            if note.save is not None and note.save not in steps and is_pending(note.path):
                os.unlink(note.path)
                self._lead_others(note.path, checkpoints)
            elif note.after in steps:
                self._remove(name, note)
                continue
            elif (
                note.after is None and note.drop in steps and self._step_at(note.path) != note.drop
            ):
                self._unwanted[note.drop] = name
                continue
            self._forget(name)
        self._delete_unwanted()
        return max(steps, default=-1)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise write_error(
                failure, "cannot link to a checkpoint", str(failure.filename)
            ) from failure

    def _settle(self) -> None:
        try:
            self._recover()
        except OSError as error:
            self._failure = self._failure or error

    def _lead_others(self, path: str, checkpoints: list[CheckpointInfo]) -> None:
        """Redirect links to the given-up ``path`` to the newest checkpoint in its folder."""
        folder = os.path.dirname(path)
        places = {
            info.step: self._absolute(info.metadata[PATH])
            for info in checkpoints
            if PATH in info.metadata
        }
        beside = [
            place
            for step, place in places.items()
            if os.path.dirname(place) == folder and self._step_at(place) == step
        ]
        with os.scandir(folder) as entries:
            links = [entry.path for entry in entries if entry.is_symlink()]
        for link in links:
            if os.path.normpath(os.path.join(folder, os.readlink(link))) == path:
                if beside:
                    _link(os.path.basename(beside[-1]), link)
                else:
                    os.unlink(link)

    # ----------------------------------------------------------------------------------------------

    def _step_at(self, path: str) -> int | None:
        """The step that a path leads to; None if the path is not a link to a step."""
        try:
            target = os.readlink(path)
        except OSError:
            return None
        place = os.path.normpath(os.path.join(os.path.realpath(os.path.dirname(path)), target))
        return (
            parse_step_directory(os.path.basename(place))
            if os.path.dirname(place) in self._places
            else None
        )

    def _relative(self, path: str) -> str:
        folder, name = os.path.split(path)
        return os.path.relpath(os.path.join(os.path.realpath(folder), name), self._directory)

    def _absolute(self, relative: str) -> str:
        return os.path.normpath(os.path.join(self._directory, relative))

    def _write(self, note: _Note) -> str:
        name = secrets.token_hex(8)
        with open(os.path.join(self._notes, name), "x", encoding="utf-8") as file:
            json.dump([self._relative(note.path), note.save, note.drop, note.after], file)
        return name

    def _read(self, place: str) -> _Note:
        """Read a note; a torn one is read as empty, for its action was never begun."""
        try:
            with open(place, encoding="utf-8") as file:
                relative, *steps = json.load(file)
        except (ValueError, TypeError):
            return _Note("")
        return _Note(self._absolute(relative), *steps)

    def _forget(self, note: str) -> None:
        with contextlib.suppress(OSError):  # a note that stays is harmless: its action is done
            os.unlink(os.path.join(self._notes, note))


def is_left_out(directory: str) -> bool:
    """Whether a run directory has notes of a process that still saves or was killed."""
    try:
        return bool(os.listdir(os.path.join(directory, _NOTES)))
    except FileNotFoundError:
        return False


def is_pending(path: str) -> bool:
    """Whether a path waits for a commit, or for the next session to finish or undo it."""
    try:
        return _PENDING.fullmatch(os.readlink(path)) is not None
    except OSError:
        return False


def _link(target: str, path: str) -> None:
    """Make ``path`` a link, durably and atomically, replacing any file."""
    replace_link(target, path)
    _sync(os.path.dirname(path))


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
