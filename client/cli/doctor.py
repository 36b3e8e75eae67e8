"""``sidesave doctor``: checks what sidesave needs from a machine and a directory.

The checks try what they can, and write only into a temporary subdirectory, which is removed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import secrets
import shutil
import subprocess
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from sidesave.client.cli.directory_checks import examine_directory
from sidesave.client.cli.finding import Finding, Verdict, gb, run
from sidesave.stager.memory import host_memory, numa
from sidesave.stager.memory.arena import PAGE, Arena, madvise
from sidesave.stager.system_calls import CALLS, usable_cpus

_MIB: Final = 1 << 20
_OLDEST_KERNEL: Final = (5, 3)  # pidfd_open; F_SEAL_FUTURE_WRITE is of 5.1
_OLDEST_TORCH: Final = (2, 8)
_MADV_POPULATE_WRITE: Final = 23
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC  # PROC_PID_INIT_INO in the kernel's sources
_OUTLIVE: Final = (
    "have it live on for as long as a save takes: sh -c 'python train.py; code=$?; sleep 60; exit "
    "$code'"
)


def examine(
    place: Path | str,
    state_nbytes: int | None = None,
    world_size: int = 1,
    ranks_per_node: int | None = None,
) -> Generator[Finding]:
    """Run all checks on a directory or URL, yielding each finding as soon as it is known.

    A directory that does not exist is not created: its nearest existing parent is checked instead.
    With ``state_nbytes`` the last finding estimates the cost of saves of such a state.
    """
    yield from run("versions", _versions, "pip install -U 'torch>=2.8'")
    yield from run("memfd", _memfd, CALLS["memfd_create"].remedy)
    yield from run("pidfd", _pidfd, CALLS["pidfd_open"].remedy)
    yield from run("populate", _populate, CALLS["memfd_create"].remedy)
    yield from run("host memory", _host_memory, "see whether /proc and /sys/fs/cgroup are mounted")
    yield from run("open files", _open_files, "")
    yield from run(
        "GPU", _gpu, "repair the torch installation: python -c 'import torch; torch.cuda.init()'"
    )
    yield from run(
        "NUMA", _numa, "repair the torch installation: python -c 'import torch; torch.cuda.init()'"
    )
    yield from run(
        "sockets",
        _sockets,
        "set TMPDIR to a writable directory whose path is shorter than 70 characters",
    )
    yield from _survival()
    if isinstance(place, str):
        from sidesave.client.cli.store_checks import examine_store

        yield from examine_store(place)
    else:
        yield from _in_scratch(place)
    if state_nbytes is not None:
        cost = partial(_cost, place, state_nbytes, world_size, ranks_per_node)
        yield from run("cost", cost, "use more nodes, or nodes and a disk with more room")


def _in_scratch(directory: Path) -> Generator[Finding]:
    while not directory.exists():
        directory = directory.parent
    scratch = directory / f".sidesave-doctor-{secrets.token_hex(8)}"
    try:  # begins before mkdir, because SIGTERM can come at any time
        try:
            scratch.mkdir(0o700)
        except OSError as error:
            why = f"cannot write to {directory}: {error.strerror}"
            remedy = "choose another directory, or have its mode, mount or quota changed"
            yield Finding("directory", "fail", why, remedy)
        else:
            yield from examine_directory(directory, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _cost(
    place: Path | str, nbytes: int, world_size: int, ranks_per_node: int | None
) -> Iterator[Verdict]:
    from sidesave.client.planning import plan

    cost = plan(nbytes, place, world_size=world_size, ranks_per_node=ranks_per_node, probe=True)
    yield "warn" if cost.shortage() else "ok", str(cost), cost.shortage()


# The machine --------------------------------------------------------------------------------------


def _versions() -> Iterator[Verdict]:
    kernel, torch = platform.release(), importlib.metadata.version("torch")
    detail = f"Linux {kernel}, Python {platform.python_version()}, torch {torch}"
    if _numbers(kernel) < _OLDEST_KERNEL:
        yield "fail", detail, "sidesave needs Linux 5.3 or newer"
    elif _numbers(torch) < _OLDEST_TORCH:
        yield "fail", detail, "sidesave needs torch 2.8 or newer: pip install -U torch"
    else:
        yield "ok", detail, ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _memfd() -> Iterator[Verdict]:
    Arena.create(PAGE, PAGE).close()
    yield "ok", "shared memory can be created, sealed and mapped", ""


def _pidfd() -> Iterator[Verdict]:
    os.close(os.pidfd_open(os.getpid()))
    yield "ok", "the death of the other process can be watched", ""


def _populate() -> Iterator[Verdict]:
    arena = Arena.create(PAGE, _MIB)
    try:
        code = madvise(arena.address, arena.nbytes, _MADV_POPULATE_WRITE)
    finally:
        arena.close()
    if code:
        why = f"MADV_POPULATE_WRITE: {os.strerror(code)}; staging memory is touched page by page"
        yield (
            "warn",
            why,
            (
                "use Linux 5.14 or newer, or call prepare() early: the first save waits for this "
                "memory"
            ),
        )
    else:
        yield "ok", "MADV_POPULATE_WRITE allocates staging memory", ""


def _host_memory() -> Iterator[Verdict]:
    available, tightest = host_memory.available_nbytes(), host_memory.tightest_cgroup()
    group = "no cgroup limit"
    if tightest is not None:
        limit, left = gb(tightest.limit_nbytes), gb(host_memory.cgroup_headroom_nbytes())
        group = f"the tightest memory cgroup allows {limit} and has {left} left"
    detail = (
        f"{gb(available)} can be allocated ({group}): a staging slot for a state of up to that "
        f"size, or two, where saves overlap, for one of up to {gb(available / 2)}"
    )
    if available < 2 << 30:
        yield "warn", detail, "give the job more memory"
    else:
        yield "ok", detail, ""


def _cgroups(controller: str) -> Iterator[tuple[Path, str]]:
    """Yield roots of hierarchies that can have a controller, each with this process's group."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers == "":
                yield Path("/sys/fs/cgroup"), name.lstrip("/")
            elif controller in controllers.split(","):
                yield Path("/sys/fs/cgroup", controller.removeprefix("name=")), name.lstrip("/")


def _open_files() -> Iterator[Verdict]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < 256:
        yield "warn", f"at most {limit}", "ulimit -n 1024"
    else:
        yield "ok", f"at most {limit:,}; sidesave keeps fewer than 50", ""


def _gpu() -> Iterator[Verdict]:
    import torch

    from sidesave.stager.memory.pinning import PinnedRange

    if not torch.cuda.is_available():
        yield "ok", "none that torch can use; tensors are copied within the call of save()", ""
        return
    arena = Arena.create(PAGE, 64 * _MIB)
    try:
        host_memory.populate(arena)
        name = torch.cuda.get_device_name()
        started = time.monotonic()
        PinnedRange(
            torch.device("cuda", torch.cuda.current_device()), arena.address, arena.nbytes
        ).close()
        yield "ok", f"{name}; 64 MiB pinned and unpinned in {time.monotonic() - started:.3f} s", ""
    except RuntimeError as error:
        remedy = (
            "saves work, but copies from the GPU are slow; look for the driver's reason in dmesg"
        )
        yield "warn", f"staging memory cannot be pinned: {error}", remedy
    finally:
        arena.close()


def _numa() -> Iterator[Verdict]:
    import torch

    from sidesave.stager.devices.kinds import pci_address

    devices = [
        torch.device("cuda", index)
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    yield from placements([numa.node_of(pci_address(device)) for device in devices])


def placements(gpus: Sequence[int | None]) -> Iterator[Verdict]:
    """Yield where sidesave places memory and daemon for visible GPUs, given their NUMA nodes."""
    nodes, usable = numa.nodes(), usable_cpus()
    if len(nodes) < 2:
        detail = (
            "one node: there is nothing to choose"
            if nodes
            else "the system reports no nodes: any memory is used"
        )
        yield "ok", detail, ""
    elif numa.has_policy():
        yield (
            "ok",
            f"{len(nodes)} nodes; the memory policy of this process places the staging memory",
            "",
        )
    elif not gpus:
        yield (
            "ok",
            (
                f"{len(nodes)} nodes, no GPU: staging memory and the daemon are near the cores of "
                "the process"
            ),
            "",
        )
    else:
        for node in dict.fromkeys(gpus):
            cores = nodes.get(-1 if node is None else node, frozenset()) & usable
            which = "GPU " + _ranges(index for index, other in enumerate(gpus) if other == node)
            if node is None:
                detail = (
                    f"{which} on a node that the system does not report: staging memory and the "
                    "daemon go anywhere"
                )
                yield (
                    "warn",
                    detail,
                    "see nvidia-smi topo -m; numactl --cpunodebind=N --membind=N python train.py",
                )
            elif not cores:
                detail = (
                    f"{which} on node {node}, but this process may only use cores of others "
                    f"({_ranges(usable)})"
                )
                bind = f"numactl --cpunodebind={node} --membind={node} python train.py"
                yield (
                    "warn",
                    detail,
                    f"for a rank that trains there: {bind}, or torchrun --numa-binding=node",
                )
            else:
                yield (
                    "ok",
                    (
                        f"{which} on node {node}: staging memory goes there, the daemon to cores "
                        f"{_ranges(cores)}"
                    ),
                    "",
                )


def _ranges(numbers: Iterable[int]) -> str:
    """Format numbers like the kernel: ``0-3,8``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)


def _sockets() -> Iterator[Verdict]:
    from sidesave.client.daemon_link.socket_dir import socket_directory

    directory = Path(socket_directory())
    directory.rmdir()
    yield "ok", f"in {directory.parent}", ""


# What would kill the daemon with the trainer ------------------------------------------------------


def _survival() -> Iterator[Finding]:
    """Look for what ends the daemon when the trainer dies, assuming it starts like this process."""
    checks = (_container, _service, _slurm, _oom_group)
    threats = [finding for check in checks for finding in run("survival", check, "")]
    yield from threats or [
        Finding("survival", "ok", "nothing found that ends the daemon when the trainer dies")
    ]


def _container() -> Iterator[Verdict]:
    if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
        comm = Path("/proc/1/comm").read_text().strip()
        detail = (
            f"in a container: when its process 1 ({comm}) ends, the daemon is killed, even while "
            "it writes"
        )
        yield "warn", detail, f"if process 1 is the trainer or waits for nothing else, {_OUTLIVE}"


def _service() -> Iterator[Verdict]:
    groups = [*_cgroups("name=systemd")]
    unit, path = next(
        ((Path(name).name, name) for _, name in groups if name.endswith(".service")), ("", "")
    )
    if not unit:
        return
    manager = "--user" if "user@" in path else "--system"
    command = ["systemctl", manager, "show", "-p", "KillMode,TimeoutStopUSec", unit]
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        facts = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    mode, grace = (
        facts.get("KillMode", "unknown KillMode"),
        facts.get("TimeoutStopUSec", "TimeoutStopSec"),
    )
    if mode == "control-group":
        yield (
            "ok",
            (
                f"in {unit}: systemd asks the daemon to end, it finishes its save, and has {grace} "
                "for that"
            ),
            "",
        )
    elif mode not in ("process", "none"):
        detail = f"in {unit} ({mode}): systemd may kill the daemon when the trainer ends"
        yield (
            "warn",
            detail,
            "set KillMode=control-group, and TimeoutStopSec to more than a save takes",
        )


def _slurm() -> Iterator[Verdict]:
    if "SLURM_JOB_ID" in os.environ:
        detail = (
            "in a Slurm job: when the tasks of a step have ended, its other processes are killed, "
            "also the daemon"
        )
        yield "warn", detail, f"start the trainer from a script, and {_OUTLIVE}"


def _oom_group() -> Iterator[Verdict]:
    for root, name in _cgroups("memory"):
        for group in (root / name, *(root / name).parents):
            with contextlib.suppress(OSError):
                if (group / "memory.oom.group").read_text().strip() == "1":
                    detail = (
                        f"{group} has memory.oom.group: running out of memory kills its processes "
                        "all at once"
                    )
                    yield (
                        "warn",
                        detail,
                        (
                            "leave headroom besides the staging slots; Kubernetes: "
                            "singleProcessOOMKill"
                        ),
                    )
                    return
