"""The ranks that save together, and how they agree: when a session begins and when it loads, never to save.

They use the process group if there is one, else storage; then the launcher only tells how many there are. Its facts do
not identify a run: the id that torchrun sets is often "none", and its restart count repeats.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from sidesave.client import arguments
from sidesave.errors import (
    DaemonStartError,
    IntegrityError,
    InvalidArgumentError,
    ProtocolError,
    SidesaveError,
    WriteError,
    from_wire,
)
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.format import manifest
from sidesave.writer_daemon.storage import Storage, urls

RENDEZVOUS: Final = ".sidesave.rendezvous"
HERE: Final = "here."
AGREE_TIMEOUT_S: Final = 300.0
"""How long ranks wait for each other in storage; a process group has its own timeout."""
TOLD_AFTER_S: Final = 5.0
"""After this long a rank says whom it waits for, as it may be that nobody else is to come."""
_MAX_POLL_S: Final = 0.25
_MAX_POLL_STORE_S: Final = 1.0
_VISIBLE_WITHIN_S: Final = 20.0
"""How long a network file system may take to show to one rank what another has written."""

logger = logging.getLogger(__name__)


class World(ABC):
    """The ranks of a session; ``ranks`` are their global ranks, and this one is number ``rank`` of them."""

    rank: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks that save together."""
        return len(self.ranks)

    @abstractmethod
    def _exchange(self, value: Any) -> list[Any]: ...

    def close(self) -> None:
        """Leave, without waiting; nothing is exchanged afterwards."""
        return

    def gather(self, about: str, value: Any) -> list[Any]:
        """Exchange a value of plain JSON types with all ranks. Blocking; all ranks must call it.

        Raises:
            InvalidArgumentError: Ranks exchange different things, for they have not called the same; raised by all.
        """
        gathered = self._exchange([about, value])
        for rank, (theirs, _) in zip(self.ranks, gathered, strict=True):
            if theirs != gathered[0][0]:
                raise InvalidArgumentError(
                    f"ranks are out of step: rank {self.ranks[0]} has come to {gathered[0][0]!r}, rank {rank} to "
                    f"{theirs!r}. All must make checkpointers, and load, in the same order; threads that do so at the "
                    "same time need a process_group each"
                )
        return [value for _, value in gathered]

    def require_alike(self, **arguments: Any) -> None:
        """Raise ``InvalidArgumentError`` on all ranks unless all were given the same. All ranks must call it."""
        gathered = self.gather(" and ".join(arguments), arguments)
        for rank, theirs in zip(self.ranks, gathered, strict=True):
            for name, value in theirs.items():
                if value != gathered[0][name]:
                    raise InvalidArgumentError(
                        f"rank {self.ranks[0]} was given {name}={gathered[0][name]}, and rank {rank} {name}={value}; "
                        "all ranks need the same"
                    )

    @contextlib.contextmanager
    def raise_together(self, what: str) -> Generator[None]:
        """Raise on all ranks what one rank raises in this block, naming the rank. All ranks must enter it.

        Of several errors all ranks raise the first rank's kind, so that they go on alike; ``IntegrityError``, after
        which a caller may try another checkpoint, only if there is no other kind. An error that is not ours, such as
        ``KeyboardInterrupt``, is raised as it is on its own rank.
        """
        own: BaseException | None = None
        try:
            yield
        except BaseException as error:
            if self.size == 1:
                raise
            own = error
        if self.size == 1:
            return
        try:
            answers = self.gather(what, None if own is None else _told(own))
        except Exception:  # of whatever kind the group raises: what this rank has to tell comes first
            if own is not None:
                raise own from None
            raise
        failures = [(rank, answer) for rank, answer in zip(self.ranks, answers, strict=True) if answer is not None]
        if not failures:
            return
        rank, (name, message, number, path) = min(failures, key=lambda each: each[1][0] == IntegrityError.__name__)
        if own is not None and (type(own).__name__ == name or not isinstance(own, SidesaveError)):
            raise own
        raise from_wire(name, f"rank {rank} {what}: {message}", number, path) from own


def _told(error: BaseException) -> list[Any]:
    """The form in which an error is sent to other ranks: name, message, errno and path."""
    if not isinstance(error, SidesaveError):
        return [SidesaveError.__name__, f"{type(error).__name__}: {error}"[:4000], None, None]
    failure = protocol.failure(0, None, error)
    return [failure.error, failure.message, failure.errno, failure.path]


class Alone(World):
    """A single process."""

    rank = 0
    ranks = (0,)

    def _exchange(self, value: Any) -> list[Any]:
        return [value]


def _tell_waiting(whom: str) -> None:
    logger.warning(
        "waiting for %s to make a Checkpointer too; pass distributed=False where this process is to save alone", whom
    )


class GroupWorld(World):
    """The ranks of a process group."""

    def __init__(self, group: torch.distributed.ProcessGroup | None) -> None:
        self._group = group
        self.ranks = tuple(torch.distributed.get_process_group_ranks(group))
        rank = torch.distributed.get_rank(group)
        if rank < 0:
            raise InvalidArgumentError("this process is not part of process_group")
        self.rank = rank
        self._have_met = False

    def _exchange(self, value: Any) -> list[Any]:
        """One collective of the group, with its timeout."""
        values: list[Any] = [None] * self.size
        timer = threading.Timer(TOLD_AFTER_S, _tell_waiting, (f"all {self.size} ranks of the process group",))
        if not self._have_met:
            timer.start()
        try:
            torch.distributed.all_gather_object(values, json.dumps(value), group=self._group)
        finally:
            timer.cancel()
        self._have_met = True
        return [json.loads(each) for each in values]


class StorageWorld(World):
    """Ranks of a launcher without a process group: they meet in the run directory, on a disk or in an object store.

    Rank 0 answers each ``join.<rank>.<nonce>`` with ``met.<rank>.<nonce>.<its own nonce>``. A rank trusts only files
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
            names = self._until(lambda names: [] if any(name.startswith(prefix) for name in names) else [0])
            met = [name for name in names if name.startswith(prefix)]
            self._meeting = met[0].removeprefix(prefix)
            self._remove([own, *met])

    def _exchange(self, value: Any) -> list[Any]:
        """Write a file and wait for those of the others; rank 0 also admits ranks that still join."""
        prefix = f"{self._meeting}.{self._round}."
        self._round += 1
        self._put(f"{prefix}{self.rank}", json.dumps(value).encode())

        def missing(names: list[str]) -> list[int]:
            if self.rank == 0:
                self._welcome(names)
            return [rank for rank in self.ranks if f"{prefix}{rank}" not in names]

        self._until(missing)
        values = [self._read(f"{prefix}{rank}") for rank in self.ranks]
        # Whoever has written for this round has read all of the one before.
        self._remove([f"{self._meeting}.{self._round - 2}.{self.rank}"])
        if self.rank == 0 and self._round == 1:  # all are here, and what else is there is of runs before
            names = self._storage.list_directory(RENDEZVOUS)
            ours = f"{self._meeting}."
            self._remove([name for name in names if not name.removeprefix(".").startswith(ours)])
        return values

    def close(self) -> None:
        """Leave. The last rank to do so removes all files, since only then everybody has read them."""
        with contextlib.suppress(OSError):
            self._put(f"{self._meeting}.left.{self.rank}", b"")
            names = self._storage.list_directory(RENDEZVOUS)
            if {f"{self._meeting}.left.{rank}" for rank in self.ranks} <= set(names):
                self._remove([name for name in names if name.removeprefix(".").startswith(f"{self._meeting}.")])
        self._storage.close()

    def _welcome(self, names: list[str]) -> None:
        answered = {name.rpartition(".")[0].removeprefix("met.") for name in names if name.startswith("met.")}
        for name in names:
            joining = name.removeprefix("join.")
            if name != joining and joining.count(".") == 1 and joining not in answered:
                self._put(f"met.{joining}.{self._meeting}", b"")

    def _until(self, missing: Callable[[list[str]], list[int]]) -> list[str]:
        """The names in storage once nobody is ``missing`` in them."""
        start, is_reported = time.monotonic(), self._round > 1
        delay_s = max(0.002, self._storage.round_trip_s)
        max_delay_s = _MAX_POLL_STORE_S if self._storage.round_trip_s else _MAX_POLL_S
        while ranks := missing(names := self._storage.list_directory(RENDEZVOUS)):
            waited_s = time.monotonic() - start
            whom = f"ranks {', '.join(map(str, ranks[:8]))}" + f" and {len(ranks) - 8} more" * (len(ranks) > 8)
            if waited_s > AGREE_TIMEOUT_S:
                raise DaemonStartError(
                    f"{whom} did not come to {self._storage.root} within {AGREE_TIMEOUT_S:g} s: all {self.size} ranks "
                    "that the launcher has told of must open the same, shared directory; pass distributed=False for a "
                    "process that saves alone"
                )
            if waited_s > TOLD_AFTER_S and not is_reported:
                is_reported = True
                _tell_waiting(f"{whom} of {self.size} that the launcher has told of, in {self._storage.root}")
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
            raise ProtocolError(f"{self._storage.root}/{RENDEZVOUS}/{name} is malformed: {error}") from error

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                self._storage.remove(f"{RENDEZVOUS}/{name}")


class NodeWorld(World):
    """The ranks of a world that see one directory: they save together, and agree with all ranks."""

    def __init__(self, world: World, members: Sequence[int], number: int, count: int) -> None:
        """``members`` are the node's ranks, by their numbers in ``world``; this is node ``number`` of ``count``."""
        self.rank = members.index(world.rank)
        self.ranks = tuple(world.ranks[member] for member in members)
        self.number, self.count = number, count
        self._world = world

    def _exchange(self, value: Any) -> list[Any]:
        """With the ranks of all nodes."""
        return self._world._exchange(value)


def find_node(world: World, directory: str, *, node_local: bool) -> World:
    """The ranks that share this directory: all of them, unless each node is to have its own.

    Ranks leave files there and look whose they see. In a directory that all share, the file of rank 0 is enough.

    Raises:
        InvalidArgumentError: The ranks see something else than ``node_local`` says; raised on every rank.
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
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        gathered = world.gather("hosts", [nonce, socket.gethostname(), boot_id])
        ranks = {f"{HERE}{each}": rank for rank, (each, _, _) in enumerate(gathered if node_local else gathered[:1])}
        deadline = time.monotonic() + (0 if node_local else _VISIBLE_WITHIN_S)
        with world.raise_together("cannot list the run directory"):
            while True:
                seen = sorted(ranks[name] for name in storage.list_directory(RENDEZVOUS) if name in ranks)
                if len(seen) == len(ranks) or time.monotonic() >= deadline:
                    break
                time.sleep(0.05)
        views = [tuple(view) for view in world.gather("ranks that are seen", seen)]
    hosts = [(host, boot) for _, host, boot in gathered]
    if not node_local:
        if () in views:
            rank, first = views.index(()), world.ranks[0]
            raise InvalidArgumentError(
                f"rank {world.ranks[rank]} on {hosts[rank][0]} does not see in {directory} what rank {first} on "
                f"{hosts[0][0]} has written there: all ranks must share one directory; pass node_local=True where each "
                "node keeps its own part"
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
    """Remove leftovers of ranks that were killed while they looked for each other; for the holder of the directory."""
    storage = urls.open_for_writing(directory)
    try:
        with contextlib.suppress(WriteError):
            for name in storage.list_directory(RENDEZVOUS):
                if name.startswith((HERE, f".{HERE}")):
                    storage.remove(f"{RENDEZVOUS}/{name}")
    finally:
        storage.close()


def _check_nodes(views: list[tuple[int, ...]], hosts: list[tuple[str, str]], directory: str) -> None:
    for rank, view in enumerate(views):
        if rank not in view or any(views[other] != view for other in view):
            raise InvalidArgumentError(
                f"the ranks that see each other in {directory} are not the same for all of them: with node_local=True "
                "each node needs one directory of its own"
            )
        if len({hosts[other] for other in view}) > 1:
            names = sorted({hosts[other][0] for other in view})
            raise InvalidArgumentError(f"{directory} is shared by {', '.join(names)}: leave node_local=True out")


def find_world(
    directory: str,
    distributed: bool,
    process_group: torch.distributed.ProcessGroup | None,
    *,
    node_local: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> World:
    """The ranks that this process saves with: those of the process group, else those the launcher names.

    Raises:
        InvalidArgumentError: Both ``process_group`` and ``distributed=False``; the launcher tells nonsense; or it tells
            of several ranks that have neither a process group nor, with ``node_local``, a directory to meet in.
        DaemonStartError: The other ranks did not come.
    """
    if node_local and urls.is_url(directory):
        raise InvalidArgumentError(f"{directory}: node_local is for disks of nodes, and an object store is none")
    if not distributed:
        if process_group is not None:
            raise InvalidArgumentError("distributed=False saves alone, and process_group with others: pass one of them")
        return Alone()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        group = GroupWorld(process_group)
        return group if group.size > 1 else Alone()
    rank, size = (_from_environment(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    if not 0 <= rank < size:
        raise InvalidArgumentError(f"the environment says RANK={rank} and WORLD_SIZE={size}")
    if size == 1:
        return Alone()
    if node_local:
        raise InvalidArgumentError(
            f"node_local needs a process group, for nodes without a common disk cannot meet, and rank {rank} has none: "
            "call torch.distributed.init_process_group first"
        )
    with urls.using(storage_options):  # what is opened keeps them
        return StorageWorld(directory, rank, size)


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError as error:
        raise InvalidArgumentError(f"the environment says {name}={text!r}") from error
