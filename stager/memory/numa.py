"""NUMA nodes: the node of a device, and the cores of a node that this process may use.

A page lies on the node of the core that first writes to it, or on the next node if that one is
full, unless the process has a memory policy. So the cores that threads run on decide where memory
and the daemon are placed. This needs no ``mbind`` or ``get_mempolicy``, which Docker's seccomp
profile refuses. The user's settings win: excluded cores stay excluded, and nothing is changed if a
memory policy is set.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from sidesave.stager.system_calls import usable_cpus

SYS: Final = Path("/sys")


def nodes() -> dict[int, frozenset[int]]:
    """Return the cores of each node that has cores; empty if the system does not report them."""
    cores_of: dict[int, frozenset[int]] = {}
    with contextlib.suppress(OSError, ValueError):
        for folder in sorted((SYS / "devices/system/node").glob("node[0-9]*")):
            cores = _numbers((folder / "cpulist").read_text())
            if cores:
                cores_of[int(folder.name.removeprefix("node"))] = cores
    return cores_of


def _numbers(text: str) -> frozenset[int]:
    """Parse a list of numbers as the kernel writes it: ``0-3,8``."""
    spans = [span.partition("-") for span in text.strip().split(",") if span]
    return frozenset(
        number for first, _, last in spans for number in range(int(first), int(last or first) + 1)
    )


def node_of(pci_address: str) -> int | None:
    """Return the node that a PCI device is on; None if the system does not report it."""
    try:
        node = int((SYS / "bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def has_policy() -> bool:
    """Whether this thread has a memory policy, for instance from ``numactl``.

    It is read from the thread's first mapping.
    """
    try:
        with open("/proc/thread-self/numa_maps") as maps:
            return maps.readline().split()[1:2] not in ([], ["default"])
    except OSError:
        return False


def cores_near(node: int | None) -> frozenset[int]:
    """Return the cores of ``node`` that this thread may use; empty if there is no choice.

    There is no choice if the machine has one node, if ``node`` is unknown, if this thread may use
    none of its cores or only its cores, or if a memory policy is set.
    """
    cores_of, usable = nodes(), usable_cpus()
    cores = cores_of.get(-1 if node is None else node, frozenset()) & usable
    if len(cores_of) < 2 or cores == usable or has_policy():
        return frozenset()
    return cores


def stay_near(node: int | None) -> None:
    """Keep all threads of this process on :func:`cores_near`, if not empty.

    This includes the threads that they start.
    """
    cores = cores_near(node)
    for thread in Path("/proc/self/task").iterdir() if cores else ():
        with contextlib.suppress(OSError):  # the thread has ended, or the call is refused
            os.sched_setaffinity(int(thread.name), cores)
