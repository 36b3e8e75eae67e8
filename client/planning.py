"""Estimates the cost of saves before a job runs, and measures the speed of a directory."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from sidesave.client import arguments
from sidesave.client.cost import CostEstimate, Durations
from sidesave.client.increments import Increments
from sidesave.client.messages import format_bytes
from sidesave.client.options import PathLike, StagingOptions, check_staging
from sidesave.client.ranks.group import World
from sidesave.client.saving.planner import Planner
from sidesave.errors import HostMemoryError, InvalidArgumentError
from sidesave.stager.copy.pool import slot_nbytes
from sidesave.stager.memory.host_memory import NodeMemory, memory_of_rank
from sidesave.writer_daemon.log import read_history
from sidesave.writer_daemon.storage import Storage, urls

PIECE_NBYTES: Final = 16 << 20
SPEED_NBYTES: Final = 256 << 20
_SPEED_DEADLINE_S: Final = 10.0
_SPEED_THREADS: Final = 4


def plan(
    state: Mapping[str, Any] | int,
    directory: PathLike,
    *,
    world_size: int = 1,
    ranks_per_node: int | None = None,
    staging: StagingOptions = StagingOptions(),
    probe: bool = False,
) -> CostEstimate:
    """Return what saves of a state will cost, before the job is queued.

    Reads the history of the run, and saves nothing. The durations are those of its latest saves,
    scaled to the state's size.

    Args:
        state: What each rank would pass to ``save()``, or the number of bytes of a state that the
            ranks divide evenly. Tensors may be on the device ``"meta"``. Several ranks stage plain
            tensors whole, to compare them: wrap in ``Replicated`` what is equal on all ranks, and
            what FSDP will shard. An optimizer that has not stepped has no state yet: AdamW will add
            two tensors for each parameter.
        directory: The run directory or URL; it need not exist. Credentials for the probe of a store
            come from the environment.
        world_size: Number of ranks.
        ranks_per_node: Number of them that share a node; None means all.
        staging: The options of the checkpointer. With an int as ``node_memory_bytes`` the memory of
            this machine does not matter.
        probe: If the run has no history, write a temporary file of 256 MiB to measure the speed. It
            is the speed of one node.

    Raises:
        HostMemoryError: Not even one staging slot fits; with the amounts.
        InvalidArgumentError: An argument is invalid.
        UnsupportedValueError: The state holds something that cannot be saved.
        WriteError: The probe cannot be written.
    """
    place = arguments.place_to_write(directory)
    ranks = check_ranks(world_size, ranks_per_node)
    check_staging(staging)
    nbytes, slot = _sizes(state, world_size)
    budget = staging.node_memory_bytes
    memory = NodeMemory.of(budget, 0, [memory_of_rank()] * ranks)
    known = None if urls.is_url(place) else Durations.of(read_history(place))
    if known is not None:
        known = known.scaled(nbytes)
    elif probe:
        seconds = ranks * slot / _write_speed(place)
        known = Durations(nbytes=nbytes, hold_s=None, written_s=seconds, durable_s=seconds)
    cost = CostEstimate(
        slot_nbytes=slot,
        slots=staging.slots,
        ranks_on_node=ranks,
        available_nbytes=memory.share_nbytes
        if isinstance(budget, int)
        else memory.available_nbytes(),
        hold_s=known and known.hold_s,
        durable_s=known and known.durable_s,
        interval_s=known and known.written_s,
    )
    if not cost.fitting_slots:
        raise HostMemoryError(
            f"a staging slot needs {format_bytes(slot)} of host memory, and each rank can have "
            f"{format_bytes(cost.available_nbytes)} (ranks on a node: {ranks}); use nodes with "
            "more memory, more nodes, or a larger StagingOptions.node_memory_bytes"
        )
    return cost


def check_ranks(world_size: int, ranks_per_node: int | None) -> int:
    """Return the number of ranks on a node; raise ``InvalidArgumentError`` if there are none."""
    ranks = world_size if ranks_per_node is None else ranks_per_node
    for name, count in (("world_size", world_size), ("ranks_per_node", ranks)):
        if type(count) is not int or not 1 <= count <= world_size:
            raise InvalidArgumentError(f"{name} must be an int from 1 to world_size, not {count!r}")
    return ranks


class _Planned(World):
    """Ranks that do not exist yet; this process plans for the first one."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.ranks = tuple(range(size))

    def _exchange(self, value: Any) -> list[Any]:
        raise NotImplementedError


def _sizes(state: Mapping[str, Any] | int, world_size: int) -> tuple[int, int]:
    """Return the bytes of a state, and of a staging slot of the first rank."""
    if isinstance(state, int):
        if state < 1:
            raise InvalidArgumentError(f"a state has 1 byte or more, not {state!r}")
        return state, -(-state // world_size)
    planner = Planner(
        _Planned(world_size), Increments(links=False), allow_pickle=True, file_nbytes=None
    )
    flat = planner.flatten(state, meta=True)
    tensors = [tensor for each in flat.containers.values() for tensor in each.values()]
    shards = planner.plan(flat)
    nbytes = sum(tensor.nbytes for tensor in tensors) + len(flat.objects)
    parts = [*filter(None, (flat.objects, shards.table, shards.unshared_table))]
    return nbytes + sum(table.room_nbytes for table in shards.tables), slot_nbytes(
        shards.plan, parts
    )


# Speed --------------------------------------------------------------------------------------------


def _write_speed(place: str) -> float:
    """Return the bytes per second that ``place``, or its nearest existing parent, takes."""
    while not urls.is_url(place) and not os.path.isdir(place):
        place = os.path.dirname(place)
    with contextlib.closing(urls.open_for_writing(place)) as storage:
        name = f".sidesave-plan-{secrets.token_hex(8)}"
        try:
            return write_speed(storage, name)
        finally:
            storage.remove(name)


def write_speed(storage: Storage, name: str) -> float:
    """Write a file of 256 MiB like the daemon does; return the bytes per second until durable."""
    with mmap.mmap(-1, PIECE_NBYTES) as buffer, memoryview(buffer) as piece:
        piece[:] = os.urandom(PIECE_NBYTES)
        with storage.creating(name, SPEED_NBYTES) as output:
            return speed_of(
                lambda offset: output.write_at(piece, offset), lambda: output.finish(SPEED_NBYTES)
            )


def speed_of(work: Callable[[int], object], finish: Callable[[], object] = lambda: None) -> float:
    """Return the bytes per second of ``work`` on consecutive pieces of 16 MiB in four threads.

    None starts after ten seconds.
    """
    started = time.monotonic()

    def one(offset: int) -> int:
        if time.monotonic() - started > _SPEED_DEADLINE_S:
            return 0
        work(offset)
        return PIECE_NBYTES

    with ThreadPoolExecutor(_SPEED_THREADS) as pool:
        nbytes = sum(pool.map(one, range(0, SPEED_NBYTES, PIECE_NBYTES)))
    finish()
    return nbytes / (time.monotonic() - started)
