"""NUMA nodes: which one a device is on, and which of its cores this process may use.

A page lies on the node of the core that first writes to it, on the next one where that is full, or where the memory
policy of the process says. So memory gets its node, and the daemon its place, by the cores that threads run on, and no
call is needed that a container's seccomp profile refuses, as Docker's does ``mbind`` and ``get_mempolicy``. What
somebody has set is kept: cores that were taken away stay away, and with a memory policy nothing is done at all.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from sidesave.stager.system_calls import usable_cpus

SYS: Final = Path("/sys")


def nodes() -> dict[int, frozenset[int]]:
    """The cores of each node that has some; empty where the system does not tell."""
    cores_of: dict[int, frozenset[int]] = {}
    with contextlib.suppress(OSError, ValueError):
        for folder in sorted((SYS / "devices/system/node").glob("node[0-9]*")):
            cores = _numbers((folder / "cpulist").read_text())
            if cores:
                cores_of[int(folder.name.removeprefix("node"))] = cores
    return cores_of


def _numbers(text: str) -> frozenset[int]:
    """The numbers of a list as the kernel writes it: ``0-3,8``."""
    spans = [span.partition("-") for span in text.strip().split(",") if span]
    return frozenset(number for first, _, last in spans for number in range(int(first), int(last or first) + 1))


def node_of(pci_address: str) -> int | None:
    """The node that a PCI device is on; None where the system does not tell."""
    try:
        node = int((SYS / "bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def has_policy() -> bool:
    """Whether this thread has a memory policy, from ``numactl`` for instance: its first mapping shows it."""
    try:
        with open("/proc/thread-self/numa_maps") as maps:
            return maps.readline().split()[1:2] not in ([], ["default"])
    except OSError:
        return False


def cores_near(node: int | None) -> frozenset[int]:
    """The cores of ``node`` that this thread may use; empty where there is nothing to choose.

    That is with one node, an unknown one, none of its cores or no others to use, or a memory policy.
    """
    known, usable = nodes(), usable_cpus()
    cores = known.get(-1 if node is None else node, frozenset()) & usable
    return frozenset() if len(known) < 2 or cores == usable or has_policy() else cores


def stay_near(node: int | None) -> None:
    """Keep all threads of this process, and those that they start, on :func:`cores_near`, if there are any."""
    cores = cores_near(node)
    for thread in Path("/proc/self/task").iterdir() if cores else ():
        with contextlib.suppress(OSError):  # it has ended, or this is refused: it runs anywhere
            os.sched_setaffinity(int(thread.name), cores)
