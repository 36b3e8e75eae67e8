"""How the ranks of a job find each other: by the process group, else in the run directory.

Without a process group only the launcher says how many there are. Its variables do not identify a
run: the id that torchrun sets is often "none", and its restart count repeats.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from sidesave.client import arguments
from sidesave.client.ranks.group import (
    TOLD_AFTER_S,
    Alone,
    GroupWorld,
    NodeWorld,
    World,
    is_initialized,
    of_group,
    warn_of_waiting,
)
from sidesave.errors import (
    DaemonStartError,
    InvalidArgumentError,
    ProtocolError,
    WriteError,
    listed,
)
from sidesave.stager.system_calls import boot_id
from sidesave.writer_daemon.format import manifest
from sidesave.writer_daemon.storage import Storage, urls

RENDEZVOUS: Final = ".sidesave.rendezvous"
HERE: Final = "here."
AGREE_TIMEOUT_S: Final = 300.0
"""Seconds that ranks wait for each other in storage; a process group has its own timeout."""
_MAX_POLL_S: Final = 0.25
_MAX_POLL_STORE_S: Final = 1.0
_VISIBLE_WITHIN_S: Final = 20.0
"""Seconds that a network file system may take to show one rank what another has written."""


class StorageWorld(World):
    """Ranks of a launcher without a process group: they meet in the run directory.

    The run directory is on a disk or in an object store. Rank 0 answers each
    ``join.<rank>.<nonce>`` with ``met.<rank>.<nonce>.<its own nonce>``. A rank trusts only files
    with its own nonce. No leftover of an earlier run has it, and it proves that storage is shared.
    """

    def __init__(self, directory: str, rank: int, size: int) -> None:
        """Meet the other ranks; blocks for up to five minutes."""
        self.rank, self.ranks = rank, tuple(range(size))
        arguments.make_directory(directory)
        self._storage = urls.open_for_writing(directory)
        self._storage.make_directory(RENDEZVOUS, 0o770)
        self._round = 0
        self._nonce = secrets.token_hex(8)
        self._meeting = self._nonce
        if rank:
            own = f"join.{rank}.{self._nonce}"
            self._put(own, b"")
            prefix = f"met.{rank}.{self._nonce}."
            names = self._until(
                lambda names: [] if any(name.startswith(prefix) for name in names) else [0]
            )
            met = [name for name in names if name.startswith(prefix)]
            self._meeting = met[0].removeprefix(prefix)
            self._remove([own, *met])

    def _exchange(self, value: Any) -> list[Any]:
        """Write a file and wait for those of the other ranks.

        Rank 0 also admits ranks that still join.
        """
        prefix = f"{self._meeting}.{self._round}."
        self._round += 1
        self._put(f"{prefix}{self.rank}", json.dumps(value).encode())

        def missing(names: list[str]) -> list[int]:
            if self.rank == 0:
                self._welcome(names)
            return [rank for rank in self.ranks if f"{prefix}{rank}" not in names]

        self._until(missing)
        values = [self._read(f"{prefix}{rank}") for rank in self.ranks]
        # A rank that has written for this round has read everything of the previous one.
        self._remove([f"{self._meeting}.{self._round - 2}.{self.rank}"])
        if self.rank == 0 and self._round == 1:  # all ranks are here; other files are old
            names = self._storage.list_directory(RENDEZVOUS)
            ours = f"{self._meeting}."
            self._remove([name for name in names if not name.removeprefix(".").startswith(ours)])
        return values

    def close(self) -> None:
        """Leave the session.

        The last rank to do so removes all files, since only then all ranks have read them.
        """
        with contextlib.suppress(OSError):
            self._put(f"{self._meeting}.left.{self.rank}", b"")
            names = self._storage.list_directory(RENDEZVOUS)
            if {f"{self._meeting}.left.{rank}" for rank in self.ranks} <= set(names):
                self._remove(
                    [
                        name
                        for name in names
                        if name.removeprefix(".").startswith(f"{self._meeting}.")
                    ]
                )
        self._storage.close()

    def _welcome(self, names: list[str]) -> None:
        answered = {
            name.rpartition(".")[0].removeprefix("met.")
            for name in names
            if name.startswith("met.")
        }
        for name in names:
            joining = name.removeprefix("join.")
            if name != joining and joining.count(".") == 1 and joining not in answered:
                self._put(f"met.{joining}.{self._meeting}", b"")

    def _until(self, missing: Callable[[list[str]], list[int]]) -> list[str]:
        """The names in storage, once no rank is ``missing`` in them."""
        start, is_reported = time.monotonic(), self._round > 1
        delay_s = max(0.002, self._storage.round_trip_s)
        max_delay_s = _MAX_POLL_STORE_S if self._storage.round_trip_s else _MAX_POLL_S
        while ranks := missing(names := self._storage.list_directory(RENDEZVOUS)):
            waited_s = time.monotonic() - start
            whom = f"ranks {listed(ranks, 8)}"
            if waited_s > AGREE_TIMEOUT_S:
                raise DaemonStartError(
                    f"{whom} did not come to {self._storage.root} within {AGREE_TIMEOUT_S:g} s: "
                    f"all {self.size} ranks named by the launcher must open the same, shared "
                    "directory; pass distributed=False for a process that saves alone"
                )
            if waited_s > TOLD_AFTER_S and not is_reported:
                is_reported = True
                warn_of_waiting(
                    f"{whom} of {self.size} named by the launcher, in {self._storage.root}"
                )
            time.sleep(random.uniform(0.5, 1) * delay_s)
            delay_s = min(max_delay_s, 1.5 * delay_s)
        return names

    def _put(self, name: str, data: bytes) -> None:
        self._storage.publish_bytes(RENDEZVOUS, name, data, self._nonce)

    def _read(self, name: str) -> Any:
        data = self._storage.read(f"{RENDEZVOUS}/{name}", manifest.MAX_JSON_NBYTES)
        try:
            return json.loads(data or b"")
        except ValueError as error:
            raise ProtocolError(
                f"{self._storage.root}/{RENDEZVOUS}/{name} is malformed: {error}"
            ) from error

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                self._storage.remove(f"{RENDEZVOUS}/{name}")


def find_node(world: World, directory: str, *, node_local: bool) -> World:
    """The ranks that share this directory: all of them, unless each node is to have its own.

    Each rank writes a file there and looks for those of other ranks. In a shared directory, rank
    0's file is enough.

    Raises:
        InvalidArgumentError: The files contradict ``node_local``; raised on every rank.
    """
    if not isinstance(world, GroupWorld):
        return world
    world.require_alike(node_local=node_local)
    nonce = secrets.token_hex(8)
    seen: list[int] = []
    with contextlib.ExitStack() as opened:
        with world.raise_together("cannot write to the run directory"):
            storage = urls.open_for_writing(directory)
            opened.callback(storage.close)
            storage.make_directory(RENDEZVOUS, 0o770)
            if node_local or world.rank == 0:
                opened.callback(_discard, storage, f"{RENDEZVOUS}/{HERE}{nonce}")
                storage.publish_bytes(RENDEZVOUS, f"{HERE}{nonce}", b"", nonce)
        gathered = world.gather("hosts", [nonce, socket.gethostname(), boot_id()])
        ranks = {
            f"{HERE}{each}": rank
            for rank, (each, _, _) in enumerate(gathered if node_local else gathered[:1])
        }
        deadline = time.monotonic() + (0 if node_local else _VISIBLE_WITHIN_S)
        with world.raise_together("cannot list the run directory"):
            while True:
                seen = sorted(
                    ranks[name] for name in storage.list_directory(RENDEZVOUS) if name in ranks
                )
                if len(seen) == len(ranks) or time.monotonic() >= deadline:
                    break
                time.sleep(0.05)
        views = [tuple(view) for view in world.gather("ranks that are seen", seen)]
    hosts = [(host, boot) for _, host, boot in gathered]
    if not node_local:
        if () in views:
            rank, first = views.index(()), world.ranks[0]
            raise InvalidArgumentError(
                f"rank {world.ranks[rank]} on {hosts[rank][0]} does not see in {directory} what "
                f"rank {first} on {hosts[0][0]} has written there: all ranks must share one "
                "directory; pass node_local=True where each node keeps its own part"
            )
        return world
    _check_nodes(views, hosts, directory)
    nodes = sorted(set(views))
    if len(nodes) == 1:
        return world
    number = nodes.index(views[world.rank])
    return NodeWorld(world, nodes[number], number, len(nodes))


def _discard(storage: Storage, path: str) -> None:
    with contextlib.suppress(OSError):
        storage.remove(path)


def tidy(directory: str) -> None:
    """Remove leftovers of ranks that were killed while they looked for each other.

    Only the directory's holder may call this.
    """
    storage = urls.open_for_writing(directory)
    try:
        with contextlib.suppress(WriteError):
            for name in storage.list_directory(RENDEZVOUS):
                if name.startswith((HERE, f".{HERE}")):
                    storage.remove(f"{RENDEZVOUS}/{name}")
    finally:
        storage.close()


def _check_nodes(
    views: list[tuple[int, ...]], hosts: list[tuple[str, str]], directory: str
) -> None:
    for rank, view in enumerate(views):
        if rank not in view or any(views[other] != view for other in view):
            raise InvalidArgumentError(
                f"the ranks that see each other in {directory} are not the same for all of them: "
                "with node_local=True each node needs one directory of its own"
            )
        if len({hosts[other] for other in view}) > 1:
            names = sorted({hosts[other][0] for other in view})
            raise InvalidArgumentError(
                f"{directory} is shared by {', '.join(names)}: leave node_local=True out"
            )


def find_world(
    directory: str,
    distributed: bool,
    process_group: torch.distributed.ProcessGroup | None,
    *,
    node_local: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> World:
    """Return the ranks that this process saves with.

    They are those of the process group, else those named by the launcher.

    Raises:
        InvalidArgumentError: Both ``process_group`` and ``distributed=False`` are given; the
            launcher's variables are invalid; or they name several ranks that have neither a process
            group nor, with ``node_local``, a directory to meet in.
        DaemonStartError: The other ranks did not come.
    """
    if node_local and urls.is_url(directory):
        raise InvalidArgumentError(
            f"{directory}: node_local needs disks of nodes, and an object store has none"
        )
    if not distributed:
        if process_group is not None:
            raise InvalidArgumentError(
                "distributed=False saves alone, and process_group with others: pass one of them"
            )
        return Alone()
    if is_initialized():
        return of_group(process_group)
    rank, size = (
        _from_environment(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    if not 0 <= rank < size:
        raise InvalidArgumentError(f"the environment says RANK={rank} and WORLD_SIZE={size}")
    if size == 1:
        return Alone()
    if node_local:
        raise InvalidArgumentError(
            "node_local needs a process group, for nodes without a common disk cannot meet, and "
            f"rank {rank} has none: call torch.distributed.init_process_group first"
        )
    with urls.using(storage_options):  # what is opened keeps them
        return StorageWorld(directory, rank, size)


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError as error:
        raise InvalidArgumentError(f"the environment says {name}={text!r}") from error
