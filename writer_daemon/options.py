"""The options of the writer daemon; ``Checkpointer`` checks them, BOOT carries them unchanged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """How the writer daemon runs, and how long it waits.

    Attributes:
        nice: Niceness, 0 to 19.
        cpus: Cores it may use; empty means all, or those of the GPU's NUMA node if the machine has
            several nodes.
        stall_timeout_s: A save fails with ``WriteStalledError`` after this many seconds without a
            byte moved. None means 300 on a disk, and 900 in an object store, whose requests are
            tried again for minutes.
        takeover_timeout_s: Seconds to wait at the start for a daemon that still writes here: that
            of a dead trainer, or one that an interrupted ``close()`` of this process left.
        commit_timeout_s: Seconds that a rank whose part is written waits for the other ranks.
    """

    nice: int = 0
    cpus: tuple[int, ...] = ()
    stall_timeout_s: float | None = None
    takeover_timeout_s: float = 60.0
    commit_timeout_s: float = 600.0
