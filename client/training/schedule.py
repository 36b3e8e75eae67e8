"""The schedule of a run: applies the save policies to the state of training. Saves nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sidesave.client import arguments
from sidesave.client.ranks.consensus import Agreement, PendingRequest
from sidesave.client.ranks.group import GroupWorld, World
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.training.intervals import SaveCost
from sidesave.client.training.metadata import Metrics
from sidesave.client.training.save_policies import (
    Ephemeral,
    OnRequest,
    OnSignal,
    PolicyContext,
    PolicyEvent,
    SavePolicy,
    check_save_policies_for_ranks,
)
from sidesave.client.training.signals import SignalCatcher
from sidesave.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class SaveDecision:
    """The actions for a step.

    Attributes:
        persistent: Save it persistently.
        ephemeral: Save it at least until the next save.
        stop: Ask the loop to end with this step.
        signal: Exit after this step because of this signal; 0 continues.
        together: Whether all ranks exit, so that they can save first.
        skips: Whether all ranks skip the save, because one has no free staging slot.
    """

    persistent: bool = False
    ephemeral: bool = False
    stop: bool = False
    signal: int = 0
    together: bool = True
    skips: bool = False


_NOTHING: Final = SaveDecision()


@dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint that a run resumed from."""

    step: int
    is_seed: bool
    is_ephemeral: bool


class Schedule:
    """Applies the policies of a run.

    Requests may come from any thread or signal handler, all else from one thread.

    Attributes:
        stepped: The last finished step; -1 before the first.
        metrics: The metrics of that step.
        saved_step: The step that was last saved or restored, if any.
        cost: The measured cost of saves.
        stopping: Whether the loop is asked to end with the last finished step.
        requested: Whether a requested save is still to come.
    """

    def __init__(self, policies: Sequence[SavePolicy]) -> None:
        """Catch the signals of ``policies``; ``InvalidArgumentError`` outside the main thread."""
        self.stepped = self._passed = -1
        self.metrics: Metrics | None = None
        self.saved_step: int | None = None
        self.cost = SaveCost()
        self.stopping = self.requested = False
        self._stop_asked = self._resumed = False
        self._is_first = True
        self._saved_s = time.monotonic()
        self._persistent: tuple[int, float] | None = None
        self._policies = tuple(policies)
        self._at_step = self._in_rounds = self._policies
        self._world: World | None = None
        self._agreement: Agreement | None = None
        self._is_busy: Callable[[], bool] = lambda: False
        self._signals = SignalCatcher(
            [each for each in self._policies if isinstance(each, OnSignal)], self._wake
        )

    def start(self, world: World, is_busy: Callable[[], bool] | None = None) -> None:
        """Start to agree with the other ranks of ``world``, if the policies need that.

        ``is_busy`` returns whether this rank has no free slot; due saves are skipped while it is
        true on any rank.

        Raises:
            InvalidArgumentError: Ranks cannot follow a policy together, or need a process group for
                it.
        """
        self._world = world
        if world.size == 1:
            return
        check_save_policies_for_ranks(self._policies)
        self._at_step = tuple(policy for policy in self._policies if not policy.is_local)
        self._in_rounds = tuple(policy for policy in self._policies if policy.is_local)
        if not self._in_rounds and is_busy is None:
            return
        if not isinstance(world, GroupWorld):
            what = (
                f"when {self._in_rounds[0]!r} is due"
                if self._in_rounds
                else 'what on_busy="skip" skips'
            )
            raise InvalidArgumentError(
                f"ranks have to agree {what}, and need a process group for it: call "
                "torch.distributed.init_process_group first (backend='gloo' does)"
            )
        self._is_busy = is_busy or self._is_busy
        self._agreement = Agreement(world.ranks, self._wish, self._is_busy)

    # Step by step ---------------------------------------------------------------------------------

    def pass_step(self, step: int, metrics: Metrics | None) -> SaveDecision:
        """Record that a step was finished; return the due actions unless it was saved already.

        Raises:
            InvalidArgumentError: The step is not larger than the one before.
            SidesaveError: Ranks could not agree.
        """
        step = arguments.check_step(step)
        if step <= self._passed or step < self.stepped:
            self.refuse(step)
        agreement = self._agreement
        agreed = None if agreement is None else agreement.pass_step(step)
        self.stepped, self._passed, self.metrics = step, step, metrics
        context = self._context("step")
        self._is_first = False
        persistent = context.requested and agreed is None
        ephemeral = False
        for policy in self._at_step:
            if policy.due(context):
                if isinstance(policy, Ephemeral):
                    ephemeral = True
                else:
                    persistent = True
        ending, together = self._signals.ending, True
        if agreed is not None:
            persistent, ephemeral = persistent or agreed.persistent, ephemeral or agreed.ephemeral
            self.stopping |= agreed.stop
            together = agreed.signal > 0
            # If the agreement is broken, a rank answers its signal alone.
            ending = agreed.signal or (
                ending if agreement is not None and agreement.is_broken else 0
            )
        if ending:
            return SaveDecision(persistent, ephemeral, signal=ending, together=together)
        if not (persistent or ephemeral) or step == self.saved_step:
            return _NOTHING
        if agreement is not None and agreement.busy and not (agreed or self.stopping):
            return SaveDecision(persistent, ephemeral, skips=True)
        if agreed is None:
            self.requested, self._signals.asking = False, 0
            stop, self._stop_asked = self._stop_asked, False  # also answers a request made just now
            self.stopping |= stop
        return SaveDecision(persistent, ephemeral, self.stopping)

    def note_finished(self, step: int, metrics: Metrics | None) -> int:
        """Record that a step to save is finished; ``InvalidArgumentError`` if a later one is."""
        step = arguments.check_step(step)
        if step < self.stepped:
            self.refuse(step)
        if step > self.stepped or metrics is not None:
            self.stepped, self.metrics = step, metrics
        return step

    def refuse(self, step: int) -> None:
        """Raise ``InvalidArgumentError`` for a step that is not larger than the one before."""
        hint = (
            "continue with the step that restore() returns"
            if self._resumed
            else (
                "step numbers must increase; to continue from an earlier checkpoint, call "
                "restore() first"
            )
        )
        raise InvalidArgumentError(f"step {step} does not come after step {self.stepped}: {hint}")

    def is_due(self, event: PolicyEvent) -> bool:
        """Whether a policy wants a save at an event other than a step.

        Before training, local policies are not asked: a request or a signal waits for a step.
        """
        context = self._context(event)
        asked = (each for each in self._at_step if event != "restore" or not each.is_local)
        return any(policy.due(context) for policy in asked)

    def note_save(self, step: int, *, ephemeral: bool, seed: bool) -> None:
        """Record that a save was called."""
        self._saved_s = time.monotonic()
        if not seed:
            self.saved_step = step
        if not ephemeral:
            self._persistent = (step, self._saved_s)

    def _context(self, event: PolicyEvent, step: int | None = None) -> PolicyContext:
        persistent_step, persistent_s = self._persistent or (None, None)
        return PolicyContext(
            self.stepped if step is None else step,
            event,
            time.monotonic(),
            self._saved_s,
            persistent_step,
            persistent_s,
            self._signals.current,
            self.requested,
            self.cost.known,
            self._is_first,
        )

    # Requests, signals and the other ranks --------------------------------------------------------

    def request(self, *, stop: bool) -> None:
        """Have the next possible step saved; ``stop`` makes :attr:`stopping` true from then on."""
        several = self._world is not None and self._world.size > 1
        if several and not any(isinstance(policy, OnRequest) for policy in self._policies):
            raise InvalidArgumentError(
                "ranks agree on requests only with the policy OnRequest(): add it to save="
            )
        self._stop_asked |= stop
        self.requested = True
        self._wake()

    def _wake(self) -> None:
        agreement = self._agreement
        if agreement is not None:
            agreement.poke()

    def _wish(self, passed: int, pending: PendingRequest) -> PendingRequest:
        """Return this rank's request to the others; called in the agreement's thread."""
        if pending.signal:
            return PendingRequest()
        signal, asking, requested = self._signals.ending, self._signals.asking, self.requested
        if asking:
            self._signals.asking = 0
        if requested:
            self.requested = False
        if pending and not (signal or asking or requested):
            return PendingRequest()  # policies by time stay due until the agreed save is made
        context = self._context("step", passed)
        # then it stays due
        busy = self._is_busy() or (self._agreement is not None and self._agreement.busy)
        due = [
            isinstance(policy, Ephemeral)
            for policy in self._in_rounds
            if not busy and policy.due(context)
        ]
        persistent = bool(signal or asking or requested) or not all(due)
        stop = requested and self._stop_asked
        self._stop_asked = self._stop_asked and not stop
        return PendingRequest(persistent, any(due), signal, stop)

    @property
    def ending(self) -> int:
        """The signal that asked for the end, or 0."""
        return self._signals.ending

    def begin_answer(self) -> None:
        """Record that earlier signals are being answered: they do not end a later wait."""
        self._signals.begin_answer()

    def await_save(self, handle: SaveHandle, number: int | None = None) -> bool:
        """Wait for a save until a signal asks for the end.

        After signal ``number``, it waits as long as the signal's policy allows. Returns whether the
        save is done. Either way it is staged, or has failed.
        """
        if number is not None and self._agreement is not None:
            self._agreement.announce_end()  # all ranks exit, each after its own wait
        return self._signals.wait(
            handle, None if number is None else self._signals.deadline_s(number)
        )

    # Beginning and end ----------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Start a new run."""
        self.stepped, self._passed, self.saved_step, self._saved_s = -1, -1, None, time.monotonic()

    def go_on(self, loaded: Resumed) -> None:
        """Continue from a checkpoint."""
        self._saved_s = time.monotonic()
        self.stepped = self._passed = loaded.step - loaded.is_seed
        self.saved_step = None if loaded.is_seed else loaded.step
        self._persistent = None if loaded.is_ephemeral else (loaded.step, self._saved_s)

    def resume(self) -> int:
        """Start counting steps on all ranks; return a signal for the end that any got, or 0."""
        assert self._world is not None
        self._resumed = self._is_first = True
        self.stopping = False
        if self._agreement is not None:
            self._agreement.begin(self.stepped)
        ending = self._signals.ending
        return max(self._world.gather("signals", ending)) if self._world.size > 1 else ending

    def finish(self, timeout_s: float, *, failing: bool) -> PendingRequest:
        """Record that there are no more steps, and leave the agreement.

        Returns what was agreed for a later step. Waits up to ``timeout_s`` seconds for other ranks;
        not at all if this rank is ``failing``.
        """
        if self._agreement is not None:
            return self._agreement.close(timeout_s, failing=failing)
        return PendingRequest(persistent=self.requested or self._signals.current > 0)

    def close(self) -> None:
        """Restore the signal handlers; idempotent."""
        self._signals.close()
