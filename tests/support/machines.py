"""Machines with several NUMA nodes, as ``/sys`` shows them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

CORES = sorted(os.sched_getaffinity(0))
"""Cores of this machine, of which nodes are made."""
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores, one for each node")


def machine(folder: Path, nodes: Mapping[int, str], devices: Mapping[str, int] | None = None) -> Path:
    """A ``/sys`` of nodes, with lists of cores as the kernel writes them, and of PCI devices, each with its node."""
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
