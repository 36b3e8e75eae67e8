"""The result of ``save()``: four futures, progress, and facts about a checkpoint once it exists."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from sidesave.errors import SidesaveError
from sidesave.stager.signal_safe import Monitor
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Outcome(Future[T]):
    """A future of a save. A failure read from it counts as reported, and no other call raises it.

    An interrupt in the main thread leaves it intact, and an error in a callback ends no thread of
    ours.
    """

    def __init__(self) -> None:
        """Make it open."""
        super().__init__()
        self._condition: Any = Monitor()

    def resolve(self, result: T) -> None:
        """Set the result, unless the future has failed in this moment, in another thread."""
        with contextlib.suppress(InvalidStateError):
            self.set_result(result)

    def fail(self, error: Exception) -> None:
        """Give it a failure, unless it has its outcome."""
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> T:
        """As of any future."""
        self.exception(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As of any future."""
        error = self.peek(timeout)
        if isinstance(error, SidesaveError):
            error.was_read = True
        return error

    def peek(self, timeout: float | None = None) -> BaseException | None:
        """Like :meth:`exception`, for internal use; the failure does not count as reported."""
        if not self._condition.wait_for(self.done, timeout):
            raise TimeoutError
        return super().exception(0)

    def _invoke_callbacks(self) -> None:
        callbacks: list[Callable[[Future[T]], object]] = getattr(self, "_done_callbacks")  # noqa: B009 - not in its type
        for callback in callbacks:
            try:
                callback(self)
            except BaseException:  # the user's code; the others are to be called all the same
                logger.exception(
                    "a callback of a save's future raised; set a flag there that the training loop "
                    "reads"
                )


class SaveHandle:
    """One save and its futures, which any thread may wait for.

    Cancelling a future has no effect on the save. A failure is reported once: after it was read
    from one of the futures, neither the next ``save()`` nor ``wait()`` nor ``close()`` raises it
    again.

    Attributes:
        step: The step being saved.
        staged: Done when the state is in staging memory: everything may be changed, and the save
            survives the trainer.
        written: Done when this rank's bytes are durable.
        committed: Done when the checkpoint is visible and durable on all ranks; its result
            describes it.
        mirrored: Done when the checkpoint is in the mirror, visible and durable there; its result
            is the path or URL. Without a mirror it has failed, with ``InvalidArgumentError``. What
            fails here fails nothing else.
        skipped: Whether nothing was saved because every slot was busy (``on_busy="skip"``); the
            futures are cancelled.
        nbytes: Bytes that this rank has to write, 0 until that is known.
        nbytes_written: How many of them storage has taken.
    """

    def __init__(self, step: int, *, skipped: bool = False) -> None:
        """Make a handle with open futures, or with cancelled ones."""
        self.step = step
        self.skipped = skipped
        self.staged: Outcome[None] = Outcome()
        self.written: Outcome[None] = Outcome()
        self.committed: Outcome[CheckpointInfo] = Outcome()
        self.mirrored: Outcome[str] = Outcome()
        self.nbytes = self.nbytes_written = 0
        for future in (self.staged, self.written, self.committed, self.mirrored):
            if skipped:
                future.cancel()
            else:
                future.set_running_or_notify_cancel()  # from here on cancel() is refused

    @property
    def progress(self) -> float:
        """The part of the bytes storage has taken, 0.0 to 1.0; 1.0 does not yet mean durable."""
        return self.nbytes_written / self.nbytes if self.nbytes else 0.0

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.committed.done()

    def __repr__(self) -> str:
        """Step and state."""
        if self.skipped:
            state = "skipped"
        elif self.committed.done():
            state = "failed" if self.committed.peek() else "committed"
        else:
            state = (
                "written" if self.written.done() else "staged" if self.staged.done() else "staging"
            )
        return f"<SaveHandle step={self.step} {state}>"

    def commit(self, info: CheckpointInfo) -> None:
        """For the saver: resolve the futures up to ``committed``."""
        self.staged.resolve(None)
        self.written.resolve(None)
        self.committed.resolve(info)

    def fail(self, error: Exception) -> None:
        """For whoever saves: fail the futures that are still open."""
        for future in (self.staged, self.written, self.committed, self.mirrored):
            future.fail(error)  # what was reached stays reached
