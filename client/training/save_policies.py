"""Save policies: a step is saved, once, if any policy of a list says so.

Policies that depend only on the step number agree on every rank. Time, signals and requests reach
one rank first: such policies are *local*, and ranks agree on the step
(:mod:`sidesave.client.ranks.consensus`). This module does not import torch.
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
"""Signals that ask for a save but not for the end."""
_NOT_FOR_US: Final = frozenset(
    {
        signal.SIGKILL,
        signal.SIGSTOP,
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGCHLD,
    }
)
PolicyEvent = Literal["restore", "step", "close", "exception"]


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """The input of a policy's decision.

    Attributes:
        step: The last finished step.
        event: ``"step"`` after a training step; ``"restore"`` if there was nothing to restore;
            ``"close"`` at the end of the run; ``"exception"`` if an exception leaves the ``with``
            block.
        now_s: The monotonic clock, in seconds.
        saved_s: The time of the last save of any kind; before the first save, the time of the
            start.
        persistent_step: The last step that was saved or restored and is not ephemeral.
        persistent_s: The time of that save or restore.
        signal: A signal that has not been answered yet, or 0.
        requested: Whether a save was asked for.
        cost: Measured seconds that a save stalls training, and until its commit; None before the
            first commit.
        is_first: Whether ``step`` is the first one since the start or ``restore()``.
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
    """Base class: says when to save. Derive from it to write your own."""

    @property
    def is_local(self) -> bool:
        """Whether it uses more than ``step``, ``event`` and ``is_first``.

        Ranks may then find it due at different steps.
        """
        return False

    @abstractmethod
    def due(self, context: PolicyContext) -> bool:
        """Whether to save now; called after each step, so it must be quick.

        Also called at the other events of ``context``, but at ``"restore"`` not if it is local.
        """


class _Local(SavePolicy):
    @property
    def is_local(self) -> bool:
        """Clocks differ between ranks, and one rank is signalled or asked first."""
        return True


@dataclass(frozen=True, slots=True)
class EverySteps(SavePolicy):
    """Save every ``n`` steps: those with ``step % n == offset``.

    Step 0 is not saved, except with ``n=1``: ``AtSteps([0])`` asks for it, ``BeforeTraining()`` for
    the state before it.
    """

    n: int
    offset: int = 0

    def __post_init__(self) -> None:
        check_every("EverySteps", self.n, self.offset)

    def due(self, context: PolicyContext) -> bool:
        """Whether the step number matches."""
        return (
            context.event == "step"
            and context.step % self.n == self.offset
            and (context.step > 0 or self.n == 1)
        )


@dataclass(frozen=True, slots=True)
class EverySeconds(_Local):
    """Save when the last save of any kind is ``seconds`` old."""

    seconds: float

    def __post_init__(self) -> None:
        check_positive("EverySeconds", "seconds", self.seconds)

    def due(self, context: PolicyContext) -> bool:
        """Whether the time has passed."""
        return context.event == "step" and context.now_s - context.saved_s >= self.seconds


@dataclass(frozen=True, slots=True, init=False)
class AtSteps(SavePolicy):
    """Save these steps."""

    steps: tuple[int, ...]

    def __init__(self, steps: Iterable[int]) -> None:
        object.__setattr__(self, "steps", check_steps("AtSteps", steps))

    def due(self, context: PolicyContext) -> bool:
        """Whether the step is one of these."""
        place = bisect.bisect_left(self.steps, context.step)
        return context.event == "step" and self.steps[place : place + 1] == (context.step,)


@dataclass(frozen=True, slots=True)
class BeforeTraining(SavePolicy):
    """Save the initial state as step 0 if ``restore()`` finds no checkpoint.

    ``restore()`` of it returns 0, since no step has been trained. A later save of step 0 replaces
    it; if steps count from 1, it stays.
    """

    def due(self, context: PolicyContext) -> bool:
        """Whether nothing was restored."""
        return context.event == "restore"


@dataclass(frozen=True, slots=True)
class FirstStep(SavePolicy):
    """Save the first step after each start or resume: storage or memory problems show at once."""

    def due(self, context: PolicyContext) -> bool:
        """Whether this is the first step since the start or ``restore()``."""
        return context.is_first and context.event == "step"


@dataclass(frozen=True, slots=True)
class LastStep(SavePolicy):
    """Save the last step at ``close()``, unless it was saved."""

    def due(self, context: PolicyContext) -> bool:
        """Whether the run ends."""
        return context.event == "close"


@dataclass(frozen=True, slots=True)
class OnException(SavePolicy):
    """Save the last finished step if an exception leaves the ``with`` block; single process only.

    The current state is saved: after an exception between ``optimizer.step()`` and
    ``manager.step()`` it is one update further than its step says.
    """

    def due(self, context: PolicyContext) -> bool:
        """Whether an exception was raised."""
        return context.event == "exception"


@dataclass(frozen=True, slots=True)
class OnRequest(_Local):
    """Save on request: ``manager.request_save()``, or ``sidesave trigger RUN`` in another process.

    ``manager.request_stop()`` and ``sidesave trigger RUN --stop`` ask for a last save.
    """

    def due(self, context: PolicyContext) -> bool:
        """Whether a request is open; one save answers all requests."""
        return context.requested


@dataclass(frozen=True, slots=True, init=False)
class OnSignal(_Local):
    """Save at the next step after a signal, and exit if the signal means the end.

    ``manager.step()`` raises ``SystemExit(128 + number)`` once the checkpoint is committed,
    ``deadline_s`` seconds have passed, or a second signal comes. The save is staged by then in any
    case, and the daemon commits it after the trainer has gone, as long as its container lives.

    Args:
        *signals: The signals; SIGTERM if none is given.
        exit: Whether to exit; None exits for all but SIGUSR1 and SIGUSR2.
        deadline_s: How long to wait for the commit; None waits as long as the checkpointer's
            timeouts allow. Schedulers often kill what is left after 30 s.
    """

    signals: tuple[int, ...]
    exit: bool | None
    deadline_s: float | None

    def __init__(
        self,
        *signals: int,
        exit: bool | None = None,  # noqa: A002
        deadline_s: float | None = None,
    ) -> None:
        for number in signals:
            try:
                name = signal.Signals(number).name
            except ValueError:
                raise InvalidArgumentError(f"{brief(number)} is not a signal") from None
            if number in _NOT_FOR_US:
                raise InvalidArgumentError(f"{name} cannot ask for a save: it must not be handled")
        if len(set(signals)) < len(signals):
            raise InvalidArgumentError(f"OnSignal has a signal twice: {_names(signals)}")
        if deadline_s is not None:
            check_positive("OnSignal", "deadline_s", deadline_s)
        object.__setattr__(self, "signals", tuple(map(int, signals or (signal.SIGTERM,))))
        object.__setattr__(self, "exit", exit)
        object.__setattr__(self, "deadline_s", deadline_s)

    def due(self, context: PolicyContext) -> bool:
        """Whether one of its signals has arrived."""
        return context.signal in self.signals

    def ends(self, number: int) -> bool:
        """Whether to exit after the save."""
        return number not in _GO_ON if self.exit is None else self.exit


@dataclass(frozen=True, slots=True)
class OptimalInterval(_Local):
    """Save at Daly's interval, which loses least time for one failure in ``mtbf_s`` seconds.

    The cost of a save is measured. Until one is committed, saves are ``initial_s`` seconds apart.
    """

    mtbf_s: float
    initial_s: float = 60.0

    def __post_init__(self) -> None:
        check_mtbf(self.mtbf_s)
        check_positive("OptimalInterval", "initial_s", self.initial_s)

    def due(self, context: PolicyContext) -> bool:
        """Whether the interval for the measured cost has passed."""
        cost = context.cost
        interval_s = self.initial_s if cost is None else Advice.of(*cost, self.mtbf_s).interval_s
        return context.event == "step" and context.now_s - context.saved_s >= interval_s


@dataclass(frozen=True, slots=True)
class Ephemeral(SavePolicy):
    """Save only against failures: ``policy``'s saves are deleted once a newer one is committed.

    A step that another policy saves too is not ephemeral.

    Args:
        policy: When to save, such as ``EverySteps(50)``.
        cool_down_steps: Do not save within this number of steps after a persistent checkpoint.
        cool_down_s: The same in seconds.
    """

    policy: SavePolicy
    cool_down_steps: int = 0
    cool_down_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.policy, SavePolicy):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(
                f"Ephemeral takes a policy such as EverySteps(50), not {brief(self.policy)}"
            )
        if isinstance(self.policy, _ONCE):
            raise InvalidArgumentError(
                "Ephemeral takes a policy that comes due again and again, such as EverySteps(50), "
                f"not {self.policy!r}"
            )
        if type(self.cool_down_steps) is not int or self.cool_down_steps < 0:
            raise InvalidArgumentError(
                f"cool_down_steps must be an int, 0 or more, not {brief(self.cool_down_steps)}"
            )
        if self.cool_down_s:
            check_positive("Ephemeral", "cool_down_s", self.cool_down_s)

    @property
    def is_local(self) -> bool:
        """Whether its policy is local, or ``cool_down_s`` depends on the clock."""
        return self.policy.is_local or self.cool_down_s > 0

    def due(self, context: PolicyContext) -> bool:
        """Whether its policy is due and the last persistent checkpoint is old enough."""
        if (
            context.persistent_step is not None
            and context.step - context.persistent_step < self.cool_down_steps
        ):
            return False
        if (
            context.persistent_s is not None
            and context.now_s - context.persistent_s < self.cool_down_s
        ):
            return False
        return self.policy.due(context)


_ONCE: Final = (BeforeTraining, Ephemeral, FirstStep, LastStep, OnException, OnRequest, OnSignal)
"""Policies that are due once, not repeatedly."""


def check_save_policies(save: object) -> tuple[SavePolicy, ...]:
    """Return the policies in ``save=``: one or several, or a number of steps for ``EverySteps``.

    Raises ``InvalidArgumentError`` for values that are not policies, duplicates, or policies that
    contradict.
    """
    policies = _listed(save)
    signals: set[int] = set()
    for number, policy in enumerate(policies):
        if policy in policies[:number]:
            raise InvalidArgumentError(f"save has {policy!r} twice")
        if isinstance(policy, OnSignal):
            again = signals.intersection(policy.signals)
            if again:
                raise InvalidArgumentError(
                    f"two policies answer {_names(sorted(again))}; remove one of them"
                )
            signals.update(policy.signals)
        if isinstance(policy, Ephemeral):
            _refuse_never(policy, [other for other in policies if isinstance(other, EverySteps)])
    return policies


def _listed(save: object) -> tuple[SavePolicy, ...]:
    items = cast("Iterable[object]", save) if isinstance(save, Iterable) else (save,)
    policies: list[SavePolicy] = []
    for item in items:
        steps = as_index(item)
        policy = item if steps is None else EverySteps(steps)
        if not isinstance(policy, SavePolicy):
            what = (
                "a policy such as sidesave.EverySteps(500), several in a list, or a number of steps"
            )
            raise InvalidArgumentError(f"save takes {what}, not {brief(item)}")
        policies.append(policy)
    return tuple(policies)


def _refuse_never(ephemeral: Ephemeral, persistent: Iterable[EverySteps]) -> None:
    """Raise ``InvalidArgumentError`` if a persistent policy saves all steps of an ephemeral one."""
    policy = ephemeral.policy
    for other in persistent:
        if (
            isinstance(policy, EverySteps)
            and policy.n % other.n == 0
            and policy.offset % other.n == other.offset
        ):
            raise InvalidArgumentError(
                f"{ephemeral!r} has no effect: {other!r} saves all of its steps persistently; use "
                "an ephemeral policy that is due more often"
            )


def check_save_policies_for_ranks(policies: Sequence[SavePolicy]) -> None:
    """Raise ``InvalidArgumentError`` for policies that several ranks cannot follow together."""
    for policy in policies:
        if isinstance(policy, OnException):
            raise InvalidArgumentError(
                "OnException is for a single process: an exception on one rank leaves the others "
                "in the middle of a step, and a checkpoint needs all ranks"
            )
        if isinstance(policy, Ephemeral) and policy.cool_down_s and not policy.policy.is_local:
            raise InvalidArgumentError(
                f"the clocks of ranks differ, and {policy.policy!r} counts steps: use "
                "cool_down_steps instead"
            )


def _names(signals: Iterable[int]) -> str:
    return ", ".join(signal.Signals(number).name for number in signals)
