"""Estimates and logs the cost of saves, in host memory and seconds, before they are made."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sidesave.client.messages import format_bytes, format_seconds
from sidesave.stager.memory.host_memory import NodeMemory
from sidesave.writer_daemon.save_record import SaveRecord

logger = logging.getLogger(__name__)

_SAMPLES: Final = 20
"""The number of latest saves whose durations count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """How long a save takes, in seconds from its call on.

    Attributes:
        nbytes: Size of the checkpoint.
        hold_s: Until the state was staged; None if unknown.
        written_s: Until this rank's bytes were durable.
        durable_s: Until the checkpoint was committed.
    """

    nbytes: float
    hold_s: float | None
    written_s: float
    durable_s: float

    @classmethod
    def of(cls, records: Iterable[SaveRecord]) -> Durations | None:
        """Return medians of the latest committed saves; None without any."""
        known = [
            (record.nbytes, record.staged_s, record.written_s, record.committed_s)
            for record in records
            if record.nbytes and record.staged_s and record.written_s and record.committed_s
        ]
        if not known:
            return None
        nbytes, hold_s, written_s, durable_s = map(
            statistics.median, zip(*known[-_SAMPLES:], strict=True)
        )
        return cls(nbytes=nbytes, hold_s=hold_s, written_s=written_s, durable_s=durable_s)

    def scaled(self, nbytes: float) -> Durations:
        """Return the durations of a save of ``nbytes``, at the same speed."""
        factor = nbytes / self.nbytes
        return Durations(
            nbytes=nbytes,
            hold_s=None if self.hold_s is None else factor * self.hold_s,
            written_s=factor * self.written_s,
            durable_s=factor * self.durable_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    """The staging memory that saves of a state need, and how long they are expected to take.

    ``str()`` of it is a line for people.

    Attributes:
        slot_nbytes: Host memory of one staging slot of a rank. Each save under way needs one.
        slots: The most slots that a rank makes (``StagingOptions.slots``).
        ranks_on_node: Ranks that share the memory of a node.
        available_nbytes: Host memory that the slots of one rank can have: its share of the budget
            or, if less, of what is available.
        hold_s: Seconds from the call until the state is staged, for which ``save()`` blocks or an
            optimizer step on the GPU is held; None if unknown.
        durable_s: Seconds from the call until the checkpoint is committed; None if unknown.
        interval_s: The shortest interval in seconds between saves at which none waits for another,
            with one slot; None if unknown.
    """

    slot_nbytes: int
    slots: int
    ranks_on_node: int
    available_nbytes: int
    hold_s: float | None = None
    durable_s: float | None = None
    interval_s: float | None = None

    @property
    def fitting_slots(self) -> int:
        """The number of slots of a rank for which there is memory, 0 to :attr:`slots`."""
        return min(self.slots, self.available_nbytes // max(1, self.slot_nbytes))

    def __str__(self) -> str:
        memory = f"saves take {format_bytes(self.slot_nbytes)} of host memory"
        if self.ranks_on_node > 1:
            node = format_bytes(self.slot_nbytes * self.ranks_on_node)
            memory += f" on each rank, {node} on this node with its {self.ranks_on_node} ranks"
        if self.fitting_slots > 1:
            memory += ", and as much again while two overlap"
        available = format_bytes(self.available_nbytes)
        each = " for each rank" if self.ranks_on_node > 1 else ""
        text = f"{memory}; {available} are available{each}"
        if self.durable_s is None or self.interval_s is None:
            return text
        hold = (
            "" if self.hold_s is None else f"holds training for {format_seconds(self.hold_s)} and "
        )
        return (
            f"{text}; a save {hold}is durable after {format_seconds(self.durable_s)}, and saves "
            f"that begin {format_seconds(self.interval_s)} apart do not wait for one another"
        )

    def shortage(self) -> str:
        """Return what a lack of memory for all slots means for training; empty without one."""
        if self.fitting_slots >= self.slots:
            return ""
        after = (
            "" if self.interval_s is None else f", {format_seconds(self.interval_s)} after its call"
        )
        each = " for each rank" if self.ranks_on_node > 1 else ""
        return (
            f"host memory has room for {self.fitting_slots} of {self.slots} staging slots of "
            f"{format_bytes(self.slot_nbytes)}{each} ({format_bytes(self.available_nbytes)} are "
            "available): a save that finds them busy waits, or is skipped, until one is "
            f"durable{after}; give the job more memory, or set StagingOptions.slots to "
            f"{self.fitting_slots}"
        )


class CostReport:
    """Logs what the saves of a session cost, on the first rank of each node."""

    def __init__(self, memory: NodeMemory, slots: int) -> None:
        """Log nothing yet."""
        self.durations: Durations | None = None
        """Those of the run's latest saves; None if they are not known."""
        self._memory = memory
        self._slots = slots
        self._slot_nbytes = 0
        self._has_warned = False
        self._is_over = not memory.leads

    def before(self, slot_nbytes: int) -> None:
        """Log the memory that a state takes, before its first slot is made; and seconds if known.

        Does nothing the second time.
        """
        if not self._slot_nbytes and not self._is_over:
            self._slot_nbytes = slot_nbytes
            cost = self._cost(0)
            logger.info("%s", cost)
            # What is available may already be less by the slots of other ranks, unlike the budget.
            if self._memory.budget is not None and cost.fitting_slots:
                self._warn(cost)

    def committed(self, nbytes: int, reached: Mapping[str, float]) -> None:
        """Log what was not known before the first save.

        Args:
            nbytes: Size of its checkpoint.
            reached: The times of its phases, see :attr:`Save.reached`.
        """
        if self._is_over:
            return
        self._is_over = True
        is_new = self.durations is None
        if is_new:
            began = reached["laid_out"]
            self.durations = Durations(
                nbytes=nbytes,
                hold_s=reached["staged"] - began,
                written_s=reached["written"] - began,
                durable_s=reached["committed"] - began,
            )
        cost = self._cost(self._slot_nbytes)
        if is_new:
            logger.info("%s", cost)
        self._warn(cost)

    def _warn(self, cost: CostEstimate) -> None:
        shortage = cost.shortage()
        if shortage and not self._has_warned:
            self._has_warned = True
            logger.warning("%s", shortage)

    def _cost(self, used_nbytes: int) -> CostEstimate:
        known = self.durations
        return CostEstimate(
            slot_nbytes=self._slot_nbytes,
            slots=self._slots,
            ranks_on_node=self._memory.ranks,
            available_nbytes=self._memory.available_nbytes(used_nbytes),
            hold_s=known and known.hold_s,
            durable_s=known and known.durable_s,
            interval_s=known and known.written_s,
        )
