"""Machines with several NUMA nodes, as ``/sys`` shows them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

CORES = sorted(os.sched_getaffinity(0))
"""Cores of this machine, of which nodes are made."""
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores, one for each node")


def machine(
    folder: Path, nodes: Mapping[int, str], devices: Mapping[str, int] | None = None
) -> Path:
    """A ``/sys`` of nodes, with lists of cores as the kernel writes them, and of PCI devices, each
    with its node.
    """
    for node, cores in nodes.items():
        path = folder / f"devices/system/node/node{node}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(f"{cores}\n")
    for address, node in (devices or {}).items():
        path = folder / "bus/pci/devices" / address
        path.mkdir(parents=True)
        (path / "numa_node").write_text(f"{node}\n")
    return folder


def two_nodes(folder: Path, devices: Mapping[str, int] | None = None) -> Path:
    """A machine of this one's cores: the first one is node 0, all others are node 1."""
    return machine(folder, {0: str(CORES[0]), 1: ",".join(map(str, CORES[1:]))}, devices)


@dataclass
class Populating:
    """The cores that each thread which populates may run on, at its end, and how often they have
    chosen them.
    """

    cores: list[frozenset[int]] = field(default_factory=list[frozenset[int]])
    chosen: int = 0


@contextlib.contextmanager
def populating() -> Iterator[Populating]:
    """Watches the threads that populate memory meanwhile."""
    found = Populating()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument is os.sched_setaffinity:
            found.chosen += 1
        if event == "return" and frame.f_code.co_qualname == "populate.<locals>.work":
            found.cores.append(frozenset(os.sched_getaffinity(0)))

    threading.setprofile(watch)
    try:
        yield found
    finally:
        threading.setprofile(None)
