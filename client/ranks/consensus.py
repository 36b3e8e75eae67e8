"""How ranks agree on the step to save if one rank sees a reason that others do not.

Such reasons are time, signals and requests.

A thread on each rank takes part, about once a second, in a *round*: one ``all_reduce(MAX)`` of a
few integers on a gloo group of its own. Training never takes part, and no step waits for another
rank, unless it is about to break a promise.

Before a rank enters a round it *promises* a step: until the round has ended, its training will not
get past the call ``pass_step(s)`` of any ``s`` at or beyond the promise. The round's result, on all
ranks, is the highest promise, P, and whether any rank wishes a save. If one does, the first step at
or beyond P is saved, by all ranks:

- *No rank has passed it.* During the round, no rank got past its own promise, and P is no less than
  any of them. (The lowest promise would not do: a rank that is ahead may have passed it.)
- *All ranks save the same step.* Ranks call ``pass_step`` with the same numbers, so the first one
  at or beyond P is the same. A rank that passes ``s`` without knowing the outcome of a round has
  promised more than ``s`` in it, hence P > s: of all that was agreed for steps up to ``s``, every
  rank knows everything when it passes ``s``.
- *No deadlock.* A rank that waits for the end of a round waits for threads, which wait for no
  training.

A promise is a few steps ahead, the number that fits into two rounds, so that training reaches it
only if a round takes unusually long. Longer steps need no margin: the end of the running step is
far enough ahead.

A rank that closes says so in its last round, which ends the thread on all ranks.
:meth:`Agreement.close` returns what was agreed and not reached, that round included, and every rank
saves its last step for it. If a rank closes because it has failed, other ranks cannot count on it,
and everything that was agreed is cancelled.

A round also reports whether any rank has no staging slot left. This holds for the steps from P on,
until a later round says otherwise, and so it is the same at each step on all ranks. If a later
round has a lower P, its result replaces the earlier one: no rank has passed that P, so no rank has
used the result for the higher one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, cast

import torch

from sidesave.errors import SidesaveError

logger = logging.getLogger(__name__)

_PERIOD_S: Final = 1.0
_TIMEOUT_S: Final = 300.0
"""Seconds that a round waits for a rank that is alive but does not take part."""
_FIRST_MARGIN: Final = 2
_GOING_ON: Final = 0
_FINISHING: Final = 1
_FAILING: Final = 2


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """The wishes of a rank for the next possible step.

    Attributes:
        persistent: Save a checkpoint that is kept.
        ephemeral: Save a checkpoint that the next one replaces.
        signal: Number of a signal that requests a last save and the end of the loop; 0 for none.
        stop: Whether to ask the loop to end.
    """

    persistent: bool = False
    ephemeral: bool = False
    signal: int = 0
    stop: bool = False

    def __bool__(self) -> bool:
        return self != _NOTHING

    def __or__(self, other: PendingRequest) -> PendingRequest:
        return PendingRequest(
            self.persistent or other.persistent,
            self.ephemeral or other.ephemeral,
            max(self.signal, other.signal),
            self.stop or other.stop,
        )


_NOTHING: Final = PendingRequest()


class Agreement:
    """One rank's part in the agreement.

    The training thread calls :meth:`pass_step`; any thread may call the other methods.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        wish: Callable[[int, PendingRequest], PendingRequest],
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create the group, which blocks until all ``ranks`` do so, and start the thread.

        Args:
            ranks: Global ranks.
            wish: Called in the thread before each round, with the last step passed and what is
                agreed for later steps; returns what this rank wants beyond that.
            is_busy: Called in the thread before each round; returns whether this rank has no
                staging slot left.
        """
        self.busy = False
        """Whether, as of the last step passed, a rank had no slot left."""
        self._is_busy = is_busy
        self._busy: list[tuple[int, bool]] = []
        self._wish = wish
        self._changed = threading.Condition()
        self._passed = -1
        self._promise: int | None = None
        self._agreed: list[tuple[int, PendingRequest]] = []
        self._ending = _GOING_ON
        self._closing = _GOING_ON
        self._pokes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._pace = _Pace()
        group = torch.distributed.new_group(
            list(ranks),
            timeout=timedelta(seconds=_TIMEOUT_S),
            backend="gloo",
            use_local_synchronization=True,
        )
        # It lives as long as the default group.
        self._group = cast("torch.distributed.ProcessGroup", group)
        self._thread = threading.Thread(target=self._work, name="sidesave-agreement", daemon=True)
        self._thread.start()

    @property
    def is_broken(self) -> bool:
        """Whether a rank has failed or died, so that no save can be agreed on any more."""
        return self._ending == _FAILING

    def poke(self) -> None:
        """Enter the next round at once; may be called by a signal handler."""
        self._pokes.put(None)

    def begin(self, passed: int) -> None:
        """Continue training after step ``passed``, on all ranks."""
        with self._changed:
            self._passed = passed
            self._pace = _Pace()

    def pass_step(self, step: int) -> PendingRequest:
        """Pass a step; return what all ranks agreed to do at it.

        Blocks only at a step promised not to be passed before a round has ended, and only until it
        has.

        Raises:
            SidesaveError: The round has not ended within its timeout.
        """
        with self._changed:
            deadline = 0.0
            while self._promise is not None and step >= self._promise:
                deadline = deadline or time.monotonic() + _TIMEOUT_S + _PERIOD_S
                if not self._changed.wait(deadline - time.monotonic()):
                    raise SidesaveError(
                        f"step {step} waits for other ranks to agree whether it is saved, and "
                        f"after {_TIMEOUT_S:g} s not all have answered"
                    )
            self._passed = step
            due = PendingRequest()
            while self._agreed and self._agreed[0][0] <= step:
                due |= self._agreed.pop(0)[1]
            while self._busy and self._busy[0][0] <= step:
                self.busy = self._busy.pop(0)[1]
            return due

    def announce_end(self, *, failing: bool = False) -> None:
        """Make the next round the last, on all ranks."""
        self._closing = _FAILING if failing else _FINISHING
        self.poke()

    def close(self, timeout_s: float, *, failing: bool = False) -> PendingRequest:
        """End the thread on all ranks; return what was agreed for a step not reached yet.

        Gives up after ``timeout_s`` seconds if the other ranks no longer take part. Idempotent.
        """
        self.announce_end(failing=failing)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning(
                "other ranks have not answered the close of this one within %g s", timeout_s
            )
            return PendingRequest()
        with self._changed:
            left, self._agreed = self._agreed, []
        due = PendingRequest()
        for _, wish in left:
            due |= wish
        return due

    # The thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._ending == _GOING_ON:
                self._sleep()
                self._round()
        except BaseException as error:  # noqa: BLE001 - a rank or its group failed; reported later
            with self._changed:
                self._promise = None
                self._ending = _FAILING
                self._forget()
                self._changed.notify_all()
            log = logger.debug if self._closing else logger.warning
            log(
                "ranks cannot agree on saves any more, those by time, signal or request end: %s",
                error,
            )

    def _sleep(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._pokes.get(timeout=_PERIOD_S)
        while not self._pokes.empty():
            self._pokes.get()

    def _round(self) -> None:
        closing = self._closing
        with self._changed:
            pending = PendingRequest()
            for _, agreed in self._agreed:
                pending |= agreed
            passed = self._passed
        wish = PendingRequest() if closing else self._wish(passed, pending)
        with self._changed:
            self._promise = self._passed + self._pace.margin(self._passed)
            busy = self._is_busy()
            words = [
                self._promise,
                wish.persistent,
                wish.ephemeral,
                wish.signal,
                wish.stop,
                closing,
                busy,
            ]
        agreed = torch.tensor(words, dtype=torch.int64, device="cpu")
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX, group=self._group)
        step, persistent, ephemeral, signal, stop, ending, busy = cast("list[int]", agreed.tolist())
        wish = PendingRequest(bool(persistent), bool(ephemeral), signal, bool(stop))
        with self._changed:
            self._promise = None
            self._ending = ending
            self._busy = [
                *(said for said in self._busy if said[0] < step),
                (step, bool(busy) and ending == _GOING_ON),
            ]
            if ending == _FAILING:
                self._forget()
            elif wish:
                self._agreed.append((step, wish))
                self._agreed.sort(key=lambda each: each[0])
            self._changed.notify_all()

    def _forget(self) -> None:
        """Cancel everything that was agreed."""
        self._agreed.clear()
        self._busy.clear()
        self.busy = False


class _Pace:
    """The number of steps that fit into two rounds, by the speed between earlier rounds."""

    def __init__(self) -> None:
        self._seen: tuple[int, float] | None = None

    def margin(self, passed: int) -> int:
        """How many steps beyond ``passed`` to promise."""
        now_s = time.monotonic()
        before, self._seen = self._seen, (passed, now_s)
        if before is None:
            return _FIRST_MARGIN
        elapsed_s = max(now_s - before[1], 1e-3)
        return 1 + math.ceil(max(0, passed - before[0]) * 2 * max(_PERIOD_S, elapsed_s) / elapsed_s)
