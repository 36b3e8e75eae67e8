"""When to save: small policies that combine in a list; a step is saved when any of them says so, and once.

What follows from the number of a step alone is the same on every rank. Time, signals and requests are seen by one rank
first: such policies are *local*, and several ranks agree on the step (:mod:`sidesave.client.ranks.consensus`).
Nothing here imports torch.
"""

from __future__ import annotations

import bisect
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from sidesave.client.arguments import as_index
from sidesave.client.training.intervals import Advice, check_mtbf
from sidesave.client.training.keep_policies import check_every, check_positive, check_steps
from sidesave.errors import InvalidArgumentError, brief

_GO_ON: Final = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""Signals that ask for a save and mean no end."""
_NOT_FOR_US: Final = frozenset(
    {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGCHLD}
)
PolicyEvent = Literal["restore", "step", "close", "exception"]


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy decides from.

    Attributes:
        step: The step that has just been finished, or the last one that was.
        event: ``"step"`` after a training step; ``"restore"`` when there was nothing to restore; ``"close"`` at the
            end of the run; ``"exception"`` when the ``with`` block is left by one.
        now_s: Now, in seconds of the monotonic clock.
        saved_s: When the last save was, of whatever kind; when the run began, before the first one.
        persistent_step: The last step that was saved, or restored, and is not ephemeral.
        persistent_s: When that was.
        signal: A signal that has come and is not yet answered, or 0.
        requested: Whether a save was asked for.
        cost: How long a save stalls training, and takes to be committed, in seconds, as measured; None at first.
        is_first: Whether ``step`` is the first one since training began or was resumed.
    """

    step: int
    event: PolicyEvent
    now_s: float
    saved_s: float
    persistent_step: int | None
    persistent_s: float | None
    signal: int
    requested: bool
    cost: tuple[float, float] | None
    is_first: bool = False


class SavePolicy(ABC):
    """Says when to save; to write another one, derive from this."""

    @property
    def is_local(self) -> bool:
        """Whether ranks may find it due at different steps: by more than ``step``, ``event`` and ``is_first``."""
        return False

    @abstractmethod
    def due(self, context: PolicyContext) -> bool:
        """Whether to save now; called after each step, so it has to be quick."""


@dataclass(frozen=True, slots=True)
class EverySteps(SavePolicy):
    """Save every ``n`` steps: those with ``step % n == offset``.

    Step 0 is none of them, unless every step is: ``AtSteps([0])`` asks for it, ``BeforeTraining()`` for what was there
    before it.
    """

    n: int
    offset: int = 0

    def __post_init__(self) -> None:
        """Check."""
        check_every("EverySteps", self.n, self.offset)

    def due(self, context: PolicyContext) -> bool:
        """By the number."""
        return context.event == "step" and context.step % self.n == self.offset and (context.step > 0 or self.n == 1)


@dataclass(frozen=True, slots=True)
class EverySeconds(SavePolicy):
    """Save when the last save, of whatever kind, is ``seconds`` old."""

    seconds: float

    def __post_init__(self) -> None:
        """Check."""
        check_positive("EverySeconds", "seconds", self.seconds)

    @property
    def is_local(self) -> bool:
        """Clocks differ."""
        return True

    def due(self, context: PolicyContext) -> bool:
        """By the clock."""
        return context.event == "step" and context.now_s - context.saved_s >= self.seconds


@dataclass(frozen=True, slots=True, init=False)
class AtSteps(SavePolicy):
    """Save these steps."""

    steps: tuple[int, ...]

    def __init__(self, steps: Iterable[int]) -> None:
        """Any number of steps."""
        object.__setattr__(self, "steps", check_steps("AtSteps", steps))

    def due(self, context: PolicyContext) -> bool:
        """By the number."""
        place = bisect.bisect_left(self.steps, context.step)
        return context.event == "step" and self.steps[place : place + 1] == (context.step,)


@dataclass(frozen=True, slots=True)
class BeforeTraining(SavePolicy):
    """Save what training begins with, when ``restore()`` finds nothing: a seed, as step 0.

    ``restore()`` of such a checkpoint returns 0, for no step has been trained, and a later save of step 0 takes its
    place. Where steps are counted from 1 it stays.
    """

    def due(self, context: PolicyContext) -> bool:
        """When a run begins."""
        return context.event == "restore"


@dataclass(frozen=True, slots=True)
class FirstStep(SavePolicy):
    """Save the first step after each start, resumed or not: what is wrong with storage or memory shows at once."""

    def due(self, context: PolicyContext) -> bool:
        """Once after each start, and each ``restore()``."""
        return context.is_first and context.event == "step"


@dataclass(frozen=True, slots=True)
class LastStep(SavePolicy):
    """Save the last step at ``close()``, unless it was saved."""

    def due(self, context: PolicyContext) -> bool:
        """When a run ends well."""
        return context.event == "close"


@dataclass(frozen=True, slots=True)
class OnException(SavePolicy):
    """Save the last finished step when the ``with`` block is left by an exception, for a process that saves alone.

    What is saved is the state as it is then: after an exception between ``optimizer.step()`` and ``manager.step()`` it
    is one update further than its name says.
    """

    def due(self, context: PolicyContext) -> bool:
        """When a run ends badly."""
        return context.event == "exception"


@dataclass(frozen=True, slots=True)
class OnRequest(SavePolicy):
    """Save when asked to: by ``manager.request_save()``, or from another process by ``sidesave trigger RUN``.

    ``manager.request_stop()`` and ``sidesave trigger RUN --stop`` ask for a last save.
    """

    @property
    def is_local(self) -> bool:
        """One rank is asked."""
        return True

    def due(self, context: PolicyContext) -> bool:
        """Once for each request, however many came meanwhile."""
        return context.requested


@dataclass(frozen=True, slots=True, init=False)
class OnSignal(SavePolicy):
    """Save at the next step after a signal; for one that means the end, leave then.

    Leaving is ``SystemExit(128 + number)`` out of ``manager.step()``, once the checkpoint is committed or
    ``deadline_s`` seconds have passed; a second signal ends the wait as well. It is staged by then in any case, and the
    daemon commits it after the trainer has gone, while its container lives.

    Args:
        *signals: Which ones; SIGTERM if none is given.
        exit: Whether to leave; None leaves for all but SIGUSR1 and SIGUSR2.
        deadline_s: How long to wait for the commit; None as long as it takes, which the timeouts of the checkpointer
            bound. Schedulers kill what is still there after a grace of, often, 30 s.
    """

    signals: tuple[int, ...]
    exit: bool | None
    deadline_s: float | None

    def __init__(self, *signals: int, exit: bool | None = None, deadline_s: float | None = None) -> None:  # noqa: A002
        """One policy for one or more signals."""
        for number in signals:
            try:
                name = signal.Signals(number).name
            except ValueError:
                raise InvalidArgumentError(f"{brief(number)} is no signal") from None
            if number in _NOT_FOR_US:
                raise InvalidArgumentError(f"{name} cannot ask for a save: no handler may answer it")
        if len(set(signals)) < len(signals):
            raise InvalidArgumentError(f"OnSignal has a signal twice: {_names(signals)}")
        if deadline_s is not None:
            check_positive("OnSignal", "deadline_s", deadline_s)
        object.__setattr__(self, "signals", tuple(map(int, signals or (signal.SIGTERM,))))
        object.__setattr__(self, "exit", exit)
        object.__setattr__(self, "deadline_s", deadline_s)

    @property
    def is_local(self) -> bool:
        """One process is signalled."""
        return True

    def due(self, context: PolicyContext) -> bool:
        """When one of its signals has come."""
        return context.signal in self.signals

    def ends(self, number: int) -> bool:
        """Whether to leave after the save."""
        return number not in _GO_ON if self.exit is None else self.exit


@dataclass(frozen=True, slots=True)
class OptimalInterval(SavePolicy):
    """Save as often as loses least, by Daly's formula, for one failure in ``mtbf_s`` seconds.

    What a save costs is measured; before the first is, it waits ``initial_s`` seconds.
    """

    mtbf_s: float
    initial_s: float = 60.0

    def __post_init__(self) -> None:
        """Check."""
        check_mtbf(self.mtbf_s)
        check_positive("OptimalInterval", "initial_s", self.initial_s)

    @property
    def is_local(self) -> bool:
        """Clocks and costs differ."""
        return True

    def due(self, context: PolicyContext) -> bool:
        """By the clock and the measured cost."""
        if context.event != "step":
            return False
        interval_s = self.initial_s if context.cost is None else Advice.of(*context.cost, self.mtbf_s).interval_s
        return context.now_s - context.saved_s >= interval_s


@dataclass(frozen=True, slots=True)
class OverheadBudget(SavePolicy):
    """Save as often as takes no more than a ``fraction`` of the time that training has, 0.01 for one per cent.

    What a save costs is measured: the stall of the call; before the first is, it waits ``initial_s`` seconds. A save
    comes no sooner than the one before it is committed.
    """

    fraction: float
    initial_s: float = 60.0

    def __post_init__(self) -> None:
        """Check."""
        check_positive("OverheadBudget", "fraction", self.fraction)
        if self.fraction >= 1:
            raise InvalidArgumentError(f"fraction of OverheadBudget must be below 1, not {self.fraction!r}")
        check_positive("OverheadBudget", "initial_s", self.initial_s)

    @property
    def is_local(self) -> bool:
        """Clocks and costs differ."""
        return True

    def due(self, context: PolicyContext) -> bool:
        """By the clock and the measured cost."""
        if context.event != "step":
            return False
        interval_s = self.initial_s
        if context.cost is not None:
            stall_s, commit_s = context.cost
            interval_s = max(commit_s, stall_s / self.fraction)
        return context.now_s - context.saved_s >= interval_s


@dataclass(frozen=True, slots=True)
class Ephemeral(SavePolicy):
    """Saves against failures only: what ``policy`` saves is deleted once a newer checkpoint is committed.

    A step that another policy saves as well is no ephemeral one.

    Args:
        policy: When; on a schedule of its own, such as ``EverySteps(50)``.
        cool_down_steps: Not so soon after a step that lasts.
        cool_down_s: The same in seconds.
    """

    policy: SavePolicy
    cool_down_steps: int = 0
    cool_down_s: float = 0.0

    def __post_init__(self) -> None:
        """Check."""
        if not isinstance(self.policy, SavePolicy):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(f"Ephemeral takes a policy such as EverySteps(50), not {brief(self.policy)}")
        if isinstance(self.policy, _ONCE):
            raise InvalidArgumentError(
                f"Ephemeral takes a policy that comes due again and again, such as EverySteps(50), not {self.policy!r}"
            )
        if type(self.cool_down_steps) is not int or self.cool_down_steps < 0:
            raise InvalidArgumentError(f"cool_down_steps must be an int, 0 or more, not {brief(self.cool_down_steps)}")
        if self.cool_down_s:
            check_positive("Ephemeral", "cool_down_s", self.cool_down_s)

    @property
    def is_local(self) -> bool:
        """If its policy is, or the clock decides."""
        return self.policy.is_local or self.cool_down_s > 0

    def due(self, context: PolicyContext) -> bool:
        """When its policy is, and no persistent checkpoint is that young."""
        if context.persistent_step is not None and context.step - context.persistent_step < self.cool_down_steps:
            return False
        if context.persistent_s is not None and context.now_s - context.persistent_s < self.cool_down_s:
            return False
        return self.policy.due(context)


_ONCE: Final = (BeforeTraining, Ephemeral, FirstStep, LastStep, OnException, OnRequest, OnSignal)
"""What comes due for a reason, and not again and again."""


def check_save_policies(save: object) -> tuple[SavePolicy, ...]:
    """The policies that ``save=`` means: one or several, or a number of steps, which is ``EverySteps``.

    Raises ``InvalidArgumentError`` for what is no policy, is given twice, or contradicts another.
    """
    policies = _listed(save)
    signals: set[int] = set()
    for number, policy in enumerate(policies):
        if policy in policies[:number]:
            raise InvalidArgumentError(f"save has {policy!r} twice")
        if isinstance(policy, OnSignal):
            again = signals.intersection(policy.signals)
            if again:
                raise InvalidArgumentError(f"two policies answer {_names(sorted(again))}; one of them has to go")
            signals.update(policy.signals)
        if isinstance(policy, Ephemeral):
            _refuse_never(policy, [other for other in policies if isinstance(other, EverySteps)])
    return policies


def _listed(save: object) -> tuple[SavePolicy, ...]:
    items = cast("Iterable[object]", save) if isinstance(save, Iterable) else (save,)
    found: list[SavePolicy] = []
    for item in items:
        steps = as_index(item)
        policy = item if steps is None else EverySteps(steps)
        if not isinstance(policy, SavePolicy):
            what = "a policy such as sidesave.EverySteps(500), several in a list, or a number of steps"
            raise InvalidArgumentError(f"save takes {what}, not {brief(item)}")
        found.append(policy)
    return tuple(found)


def _refuse_never(ephemeral: Ephemeral, persistent: Iterable[EverySteps]) -> None:
    """An ephemeral save each of whose steps is saved for good as well would never be one."""
    policy = ephemeral.policy
    for other in persistent:
        if isinstance(policy, EverySteps) and policy.n % other.n == 0 and policy.offset % other.n == other.offset:
            raise InvalidArgumentError(
                f"{ephemeral!r} never comes to anything: {other!r} saves all of its steps for good; take an "
                "ephemeral policy that comes due more often"
            )


def check_save_policies_for_ranks(policies: Sequence[SavePolicy]) -> None:
    """Raise ``InvalidArgumentError`` for what ranks that save together cannot do alike."""
    for policy in policies:
        if isinstance(policy, OnException):
            raise InvalidArgumentError(
                "OnException is for a process that saves alone: an exception on one rank leaves the others in the "
                "middle of a step, and a checkpoint takes all of them"
            )
        if isinstance(policy, Ephemeral) and policy.cool_down_s and not policy.policy.is_local:
            raise InvalidArgumentError(
                f"the clocks of ranks differ, and {policy.policy!r} goes by steps: give cool_down_steps instead"
            )


def _names(signals: Iterable[int]) -> str:
    return ", ".join(signal.Signals(number).name for number in signals)
