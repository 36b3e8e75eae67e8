"""The end of a manager: by ``close()``, an exception, a signal, exit, or because it was dropped."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from typing import Final, NoReturn

from sidesave.client.runs.save_requests import TriggerWatch
from sidesave.client.saving.closing import EXIT_TIMEOUT_S, AtExit
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.training.background import AGREE_TO_END_S, Background
from sidesave.client.training.managed_state import ManagedState
from sidesave.client.training.save_policies import PolicyEvent
from sidesave.client.training.schedule import Schedule
from sidesave.errors import SidesaveError
from sidesave.stager import signal_safe

logger = logging.getLogger(__name__)

_SETTLED_TIMEOUT_S: Final = 5.0
_UNSETTLED_TIMEOUT_S: Final = 0.1


class Ending:
    """Ends a manager once. The manager alone refers to it, so that both are dropped together.

    Attributes:
        closed: Whether the manager has ended.
    """

    def __init__(self, schedule: Schedule, background: Background, managed: ManagedState) -> None:
        self.closed = False
        self._pid = os.getpid()
        self._schedule, self._background, self._managed = schedule, background, managed
        self._dropped = weakref.finalize(
            self, _end_dropped, self._pid, schedule, background.trigger
        )
        self._dropped.atexit = False  # it is closed first, which saves the last step
        _managers.add(self)

    def save_and_leave(self, number: int, *, together: bool) -> NoReturn:
        """Save the last finished step if all ranks do, then raise ``SystemExit`` for a signal."""
        self._schedule.begin_answer()
        handle, step = self._managed.last, self._schedule.stepped
        if not together:
            logger.error(
                "step %d is not saved before the end: another rank has failed or died", step
            )
        elif self._managed.has_unsaved_step():
            try:
                handle = self._managed.save_at_last()
            except SidesaveError as error:
                logger.error("step %d is not saved before the end: %s", step, error)
        self.leave(number, handle)

    def leave(self, number: int, handle: SaveHandle | None) -> NoReturn:
        """Raise ``SystemExit`` for a signal, after waiting for ``handle`` as its policy says."""
        if handle is not None and not self._schedule.await_save(handle, number):
            logger.warning(
                "signal %d: exiting before step %d is committed; the daemon commits it",
                number,
                handle.step,
            )
        self.closed = True
        settled = handle is None or handle.done()
        # errors of saves, already raised by a wait or logged
        with contextlib.suppress(SidesaveError):
            self._stop(_SETTLED_TIMEOUT_S if settled else _UNSETTLED_TIMEOUT_S)
        raise SystemExit(128 + number)

    def close(self, event: PolicyEvent | None, error: BaseException | None = None) -> None:
        """Save the last finished step if a policy says so at ``event``, wait, and stop. Idempotent.

        Does nothing in a forked child. Raises the error of a failed save.
        """
        if self.closed or self._pid != os.getpid():
            return
        self.closed = True
        try:
            schedule = self._schedule
            schedule.begin_answer()
            left = schedule.finish(AGREE_TO_END_S, failing=event != "close")
            due = event is not None and (
                schedule.is_due(event) or (event == "close" and bool(left))
            )
            if due and self._managed.has_unsaved_step():
                ephemeral = left.ephemeral and not left.persistent and not schedule.is_due("close")
                self._managed.save_at_last(ephemeral=ephemeral, exception=error)
            if self._managed.last is not None and not schedule.ending:
                schedule.await_save(self._managed.last)
            if schedule.ending:
                self.leave(schedule.ending, self._managed.last)
        finally:
            self._stop(EXIT_TIMEOUT_S)

    def _stop(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for saves and deletions; raises the error of a failed save."""
        self._dropped.detach()
        self._background.stop(timeout_s)
        _managers.open.discard(self)


def _close_at_exit(ending: Ending) -> None:
    with contextlib.suppress(SystemExit):  # from a signal; the interpreter ends anyway
        ending.close(None)


_managers: Final = AtExit(_close_at_exit, lambda: None)


def _end_dropped(pid: int, schedule: Schedule, trigger: TriggerWatch | None) -> None:
    """Stop the threads of a manager dropped without ``close()``; its checkpointer closes itself."""
    if pid != os.getpid():
        return

    def work() -> None:
        if trigger is not None:
            trigger.close()
        schedule.finish(AGREE_TO_END_S, failing=True)

    schedule.close()
    signal_safe.start(work, "sidesave-close-manager")
