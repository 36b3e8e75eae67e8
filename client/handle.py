"""What ``save()`` returns: three futures, a number for progress, and facts about the checkpoint once it exists."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from sidesave.errors import InvalidArgumentError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A committed checkpoint.

    Attributes:
        step: The step it was saved as.
        path: Its directory.
        nbytes: Bytes of tensors and plain data, over all ranks.
        session: The run, a random nonce of 16 hex digits, that wrote it.
        sequence: Its place in the order of commits; ``latest`` is the highest.
        parent: Step and session of the checkpoint that the run was resumed from, if any.
        created_s: When ``save()`` was called, in seconds since the epoch.
        metadata: What ``save()`` was told about it, metrics for instance.
    """

    step: int
    path: str
    nbytes: int
    session: str
    sequence: int
    parent: tuple[int, str] | None
    created_s: float
    metadata: dict[str, Any] = field(default_factory=dict[str, Any], compare=False)

    def to_json(self) -> list[Any]:
        """For another rank, which may see the run directory under another path."""
        return [
            self.step,
            os.path.basename(self.path),
            self.nbytes,
            self.session,
            self.sequence,
            self.parent,
            self.created_s,
            self.metadata,
        ]

    @classmethod
    def from_json(cls, body: list[Any], directory: str) -> CheckpointInfo:
        """What another rank has told, of a run that this one finds in ``directory``."""
        step, name, nbytes, session, sequence, parent, created_s, metadata = body
        path = os.path.join(directory, name)
        parent = None if parent is None else tuple(parent)
        return cls(step, path, nbytes, session, sequence, parent, created_s, metadata)

    def __fspath__(self) -> str:
        """The directory: an info can be given wherever a path is expected."""
        return self.path


class SaveHandle:
    """One save on its way. The futures may be waited for from any thread; cancelling them has no effect on the save.

    Attributes:
        step: The step being saved.
        staged: Done when the state is in staging memory: everything may be changed, and the save survives the trainer.
        written: Done when this rank's bytes are durable.
        committed: Done when the checkpoint is visible and durable on all ranks; its result describes it.
        skipped: Whether nothing was saved because every slot was busy (``on_busy="skip"``); the futures are cancelled.
    """

    def __init__(self, step: int, *, skipped: bool = False) -> None:
        """Make a handle with open futures, or with cancelled ones."""
        self.step = step
        self.skipped = skipped
        self.staged: Future[None] = Future()
        self.written: Future[None] = Future()
        self.committed: Future[CheckpointInfo] = Future()
        self._nbytes_written = 0
        self._nbytes_total = 0
        for future in (self.staged, self.written, self.committed):
            if skipped:
                future.cancel()
            else:
                future.set_running_or_notify_cancel()  # from here on cancel() is refused

    @property
    def progress(self) -> float:
        """The part of the bytes that storage has taken, 0.0 to 1.0; 1.0 does not yet mean durable."""
        return self._nbytes_written / self._nbytes_total if self._nbytes_total else 0.0

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.committed.done()

    def __repr__(self) -> str:
        """Step and state."""
        if self.skipped:
            state = "skipped"
        elif self.committed.done():
            state = "failed" if self.committed.exception() else "committed"
        else:
            state = "written" if self.written.done() else "staged" if self.staged.done() else "staging"
        return f"<SaveHandle step={self.step} {state}>"

    @staticmethod
    def _resolve(future: Future[T], value: T) -> None:
        with contextlib.suppress(InvalidStateError):  # the save failed in this moment, in another thread
            future.set_result(value)

    def _fail(self, error: Exception) -> None:
        for future in (self.staged, self.written, self.committed):
            with contextlib.suppress(InvalidStateError):  # what was reached stays reached
                future.set_exception(error)


def path_text(path: str | os.PathLike[str]) -> str:
    """A path or URL as text, local paths made absolute."""
    try:
        text: str | bytes = os.fspath(cast("str | bytes", path))
    except TypeError:
        text = b""
    if isinstance(text, bytes) or "\0" in text:
        raise InvalidArgumentError(f"a path must be a str or an os.PathLike of one, not {path!r}")
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))
