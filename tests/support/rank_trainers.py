"""Trainers that are the ranks of one job, each a process of its own, which do what a test tells
them one by one.

As a script this module is a rank: it obeys one command after another, each a method of
:class:`Actor`, in its main thread.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers import DEADLINE_S, Orders, Traces, Trainer, await_removal, grouped, say

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch
    from torch import nn

    import sidesave
    from sidesave.writer_daemon.format.manifest import Manifest, RankRecord


# In the test --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What a command has come to: a value of plain JSON types, or an error."""

    value: Any
    error: str | None
    message: str

    def get(self) -> Any:
        assert self.error is None, f"{self.error}: {self.message}"
        return self.value


class Rank(Trainer):
    """One rank; commands are obeyed in the order in which they are told."""

    script = __file__

    def __init__(
        self, traces: Traces, rank: int, size: int, meeting: str, environment: Mapping[str, str]
    ) -> None:
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        own["TMPDIR"] = "/tmp"  # by which it is no process of ``traces``, as its daemons are
        super().__init__(traces, rank, size, meeting, traces.folder, umask=-1, **own, **environment)

    def tell(self, command: str, *arguments: object, **options: object) -> None:
        """Have a command obeyed, without waiting; a rank that was killed does not mind."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._to, json.dumps([command, arguments, options]).encode() + b"\n")

    def answer(self, timeout_s: float = DEADLINE_S) -> Answer:
        """Block until the next command that was told is done."""
        for line in self.lines(timeout_s):
            return Answer(*json.loads(line))
        raise AssertionError(f"the rank ended: {self.complaints()}")

    def do(self, command: str, *arguments: object, **options: object) -> Any:
        """Have a command obeyed; its value."""
        self.tell(command, *arguments, **options)
        return self.answer().get()


class Ranks:
    """The ranks of one job, from their start to the end of the ``with`` block, which they do not
    survive.

    Args:
        count: The world size.
        folder: For the file through which they find each other; it is made if need be.
        traces: Where their daemons keep their sockets.
        kind: What each of them is.
        group: Whether they have a process group.
        environments: Variables of single ranks, and of their daemons.
    """

    def __init__(
        self,
        count: int,
        folder: Path,
        traces: Traces,
        *,
        kind: type[Rank] = Rank,
        group: bool = True,
        environments: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        meeting = str(folder / f"group-{secrets.token_hex(8)}") if group else ""
        self._ranks = [
            kind(traces, rank, count, meeting, (environments or {}).get(rank, {}))
            for rank in range(count)
        ]
        self.daemons: list[int] = []
        """The pids of their first daemons, once :meth:`open` has been called."""

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks)

    def __getitem__(self, rank: int) -> Rank:
        return self._ranks[rank]

    def tell(self, command: str, *arguments: object, **options: object) -> None:
        """Tell all of them the same."""
        for rank in self:
            rank.tell(command, *arguments, **options)

    def answers(self, timeout_s: float = DEADLINE_S) -> list[Answer]:
        """Block until all of them have answered."""
        return [rank.answer(timeout_s) for rank in self]

    def do(self, command: str, *arguments: object, **options: object) -> list[Any]:
        """Have all of them obey a command at the same time; their values."""
        self.tell(command, *arguments, **options)
        return [answer.get() for answer in self.answers()]

    def attempt(self, command: str, *arguments: object, **options: object) -> list[Answer]:
        """Have all of them obey a command at the same time, which may fail."""
        self.tell(command, *arguments, **options)
        return self.answers()

    def open(self, run: object, **options: object) -> list[dict[str, Any]]:
        """Have all of them make a checkpointer of one directory; what each of them says of it."""
        opened = self.do("open", str(run), **options)
        self.daemons = [each["daemon"] for each in opened]
        return opened

    def begin(self, state: str, run: object, **options: object) -> Ranks:
        """Have all of them make a state of that name, and a checkpointer of one directory."""
        self.do("build", state)
        self.open(run, **options)
        return self

    def save(self, step: int, **options: object) -> list[dict[str, Any]]:
        """Have all of them save a step and wait for it; the checkpoint as each of them sees it."""
        self.do("save", step, **options)
        return self.do("committed", step)

    def fail(self, step: int) -> list[Answer]:
        """Wait until the save of a step has failed on all of them, and take note of it; their
        errors.
        """
        answers = self.attempt("committed", step)
        assert all(answer.error for answer in answers), answers
        return answers

    def kill(self) -> None:
        """SIGKILL to all of them, as a launcher does it."""
        for rank in self:
            rank.signal(signal.SIGKILL)
        for rank in self:
            rank.end()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for rank in self:
            rank.__exit__()


@contextlib.contextmanager
def orders_to(folder: Path) -> Iterator[tuple[Orders, dict[str, str]]]:
    """Orders to the daemons of single ranks: of those that are started with the environment that
    comes with it.
    """
    environment: dict[str, str] = {}
    with contextlib.closing(Orders(folder, environment.__setitem__)) as orders:
        yield orders, environment


def leftovers(run: str | os.PathLike[str]) -> list[str]:
    """What a run directory holds beside steps, lease, history, going back, and where ranks met."""
    await_removal(run)
    own = (
        ".sidesave.lease",
        ".sidesave.history",
        ".sidesave.rendezvous",
        ".sidesave.rollback",
        ".sidesave.keys",
    )
    names = (path.name for path in Path(run).iterdir())
    return sorted(name for name in names if name not in own and not name.startswith("step-"))


# What is on disk ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A checkpoint, read with stock safetensors: what each tensor file says for itself, put
    together.

    Attributes:
        manifest: What was committed.
        records: What each rank says of itself.
        tensors: The tensors that the manifest describes; of one that differs between ranks what the
            first holder has.
        files: For each tensor file by name all it holds, by FQN.
    """

    manifest: Manifest
    records: list[RankRecord]
    tensors: dict[str, torch.Tensor]
    files: dict[str, dict[str, torch.Tensor]]

    def of_rank(self, rank: int) -> dict[str, torch.Tensor]:
        """What the files of one rank hold."""
        found: dict[str, torch.Tensor] = {}
        for name, tensors in self.files.items():
            if f".rank-{rank:05d}." in name:
                assert not found.keys() & tensors.keys(), "one FQN twice"
                found |= tensors
        return found

    def nbytes(self, rank: int) -> int:
        """Bytes of tensors that one rank has written."""
        return sum(tensor.nbytes for tensor in self.of_rank(rank).values())


def stored(path: str | os.PathLike[str]) -> Stored:
    """Read a checkpoint after verifying it, without any code of ours for tensors.

    Every element of every tensor is there just once, but for copies that a rank's own record tells
    of; those that the manifest does not know to differ are equal.
    """
    import torch
    from safetensors import safe_open

    import sidesave
    from sidesave.writer_daemon.format.manifest import Manifest, RankRecord

    report = sidesave.verify(path)
    assert report.ok, report.faults
    folder = Path(path)
    manifest = Manifest.from_bytes((folder / "manifest.json").read_bytes(), "manifest.json")
    records = [
        RankRecord.from_bytes((folder / record.name).read_bytes(), record.name)
        for record in manifest.records
    ]
    files: dict[str, dict[str, torch.Tensor]] = {}
    pieces: dict[str, list[tuple[str, list[int], torch.Tensor]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            metadata = json.loads((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            files[file.name] = {fqn: opened.get_tensor(fqn) for fqn in opened.keys()}  # noqa: SIM118 - it is no dict
        for fqn, tensor in files[file.name].items():
            pieces.setdefault(fqn, []).append((file.name, metadata[fqn]["saved_offsets"], tensor))
    tensors: dict[str, torch.Tensor] = {}
    for fqn, info in manifest.table.tensors.items():
        owners = {
            f"{info.container}.rank-{rank:05d}.safetensors"
            for rank in manifest.table.layout(fqn).owners
        }
        whole = torch.zeros(info.shape, dtype=pieces[fqn][0][2].dtype)
        seen = torch.zeros(info.shape, dtype=torch.int32)
        copies: list[tuple[str, torch.Tensor]] = []
        for name, offsets, piece in pieces.pop(fqn):
            if name not in owners:
                copies.append((name, piece))
                continue
            box = tuple(
                slice(start, start + size) for start, size in zip(offsets, piece.shape, strict=True)
            )
            whole[box] = piece
            seen[box] += 1
        assert bool((seen == 1).all()), f"{fqn} is not there just once"
        for name, copy in copies:
            assert fqn in records[_rank_of(name)].part.own.tensors, (
                f"{name} holds {fqn}, which nobody knows of"
            )
            assert fqn in manifest.diverged or torch.equal(copy, whole), (
                f"{name} holds another {fqn}"
            )
        tensors[fqn] = whole
    for fqn, found in pieces.items():
        [(name, _, _)] = found
        assert fqn in records[_rank_of(name)].part.own.tensors, (
            f"{name} holds {fqn}, which nobody knows of"
        )
    return Stored(manifest, records, tensors, files)


def _rank_of(name: str) -> int:
    return int(name.split(".")[-2].removeprefix("rank-"))


def same_tensors(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Fails unless both hold the same names and the same bits."""
    import torch

    assert sorted(found) == sorted(expected), sorted(found.keys() ^ expected.keys())
    for fqn, tensor in expected.items():
        assert found[fqn].dtype == tensor.dtype and torch.equal(found[fqn], tensor), (
            f"{fqn} is another"
        )


# In a rank ----------------------------------------------------------------------------------------


def obey(kind: type[Actor], rank: str, size: str, meeting: str, folder: str) -> None:
    """Be a rank, with daemons that use that folder: obey command after command until the test is
    gone.
    """
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    # of what torch does itself, in some versions
    warnings.simplefilter("ignore", DeprecationWarning)
    actor = kind(int(rank), int(size))
    if meeting:
        import datetime

        import torch.distributed

        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=int(rank),
            world_size=int(size),
            timeout=datetime.timedelta(seconds=DEADLINE_S),
        )
    with os.fdopen(0, "rb", closefd=False) as orders:
        for line in orders:
            command, arguments, options = json.loads(line)
            try:
                told: list[Any] = [getattr(actor, command)(*arguments, **options), None, ""]
            except Exception as error:  # noqa: BLE001 - it is the test's to judge
                told = [None, type(error).__name__, str(error)]
            say(json.dumps(told))
    os._exit(9)


class Actor:
    """What a rank can be told to do."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.state: dict[str, Any] = {}
        self.handles: dict[int, sidesave.SaveHandle] = {}
        self.deletions: dict[int, Future[None]] = {}
        self.logged: list[str] = []
        self._ckpt: sidesave.Checkpointer | None = None

    @property
    def ckpt(self) -> sidesave.Checkpointer:
        assert self._ckpt is not None
        return self._ckpt

    def open(self, run: str, **options: Any) -> dict[str, Any]:
        """Make a checkpointer; a path with ``{rank}`` in it is another one on each rank."""
        import sidesave

        self._ckpt = ckpt = sidesave.Checkpointer(run.format(rank=self.rank), **grouped(options))
        return {
            "daemon": ckpt.daemon_pid,
            "session": ckpt.session.id,
            "latest": ckpt.latest_step(),
            "recovered": ckpt.recovered,
            "removed": ckpt.removed,
        }

    def build(self, name: str, *arguments: Any, **options: Any) -> None:
        """Make the state that is saved from now on: one of those below."""
        self.state = STATES[name](self.rank, self.size, *arguments, **options)

    def truth(self, path: str) -> None:
        """Write down the state with all shards put together, as rank 0 sees it; a collective."""
        import torch

        found = dict(_whole_tensors(self.state))
        if self.rank == 0:
            torch.save(found, path)

    def mine(self, path: str) -> None:
        """Write down what this rank holds of a state without shards; ``{rank}`` in the path stands
        for its number.
        """
        import torch

        torch.save(dict(_whole_tensors(self.state)), path.format(rank=self.rank))

    def train(self) -> None:
        """Take one step of each optimizer, with gradients that all ranks compute alike."""
        _step(self.state)

    def change(self, fqn: str, number: float) -> None:
        """Fill one tensor."""
        import torch

        with torch.no_grad():
            dict(_tensors(self.state))[fqn].fill_(number)

    def listen(self, path: str = os.devnull) -> None:
        """Keep what is logged at WARNING from now on, and append it to a file at once."""
        import logging

        def emit(record: logging.LogRecord) -> None:
            self.logged.append(record.getMessage())
            with Path(path).open("a") as file:
                file.write(record.getMessage() + "\n")

        listener = logging.Handler(logging.WARNING)
        listener.emit = emit
        logging.getLogger("sidesave").addHandler(listener)

    def heard(self) -> list[str]:
        """What was logged since the last call."""
        heard, self.logged = self.logged, []
        return heard

    def number(self, fqn: str) -> float:
        """What a tensor is filled with."""
        tensor = dict(_tensors(self.state))[fqn]
        assert (tensor == tensor.flatten()[0]).all()
        return float(tensor.flatten()[0])

    def data(self) -> Any:
        """The item of that name, as numbers."""
        value = self.state["data"]
        value = getattr(value, "value", value)
        value = getattr(value, "state", value)
        return {
            key: item.tolist() if hasattr(item, "tolist") else item for key, item in value.items()
        }

    def zero(self) -> None:
        """Forget what the tensors hold."""
        import torch

        with torch.no_grad():
            for _, tensor in _tensors(self.state):
                tensor.zero_()

    def put(self, key: str, value: Any) -> None:
        """Add an item of plain data, or take it away: None."""
        self.state.pop(key, None)
        if value is not None:
            self.state[key] = value

    def restructure(self, number: int | None) -> None:
        """Make the tensors of the state others than with any other number, or what they were:
        None.
        """
        import torch

        self.state.pop("more", None)
        if number is not None:
            self.state["more"] = torch.zeros(number + 1)

    def name_tensor(self, name: str) -> None:
        """Add a tensor of that name."""
        import torch

        self.state[name] = torch.zeros(2)

    def spoil(self, name: str = "spoilt") -> None:
        """Add an item that cannot be saved."""
        self.state[name] = object()

    def save(self, step: int, **options: Any) -> None:
        self.handles[step] = self.ckpt.save(step, self.state, **options)

    def staged(self, step: int) -> None:
        self.handles[step].staged.result(DEADLINE_S)

    def written(self, step: int) -> None:
        self.handles[step].written.result(DEADLINE_S)

    def committed(self, step: int) -> dict[str, Any]:
        """Wait for the outcome; whoever has heard of a failure here does not hear of it again."""
        info = self.handles[step].committed.result(DEADLINE_S)
        return {
            "step": info.step,
            "path": info.path,
            "nbytes": info.nbytes,
            "sequence": info.sequence,
        }

    def mirrored(self, step: int) -> str:
        """Wait until a save is in the mirror; where it is there."""
        return self.handles[step].mirrored.result(DEADLINE_S)

    def outcome(self, step: int) -> str:
        """Wait for the outcome and leave a failure to be raised by the next call."""
        concurrent.futures.wait([self.handles[step].committed], DEADLINE_S)
        error = self.handles[step].committed.peek()
        return "committed" if error is None else type(error).__name__

    def forgive(self) -> None:
        """Have failures that no call has raised yet forgotten."""
        import sidesave

        with contextlib.suppress(sidesave.SidesaveError):
            self.ckpt.session.saves.raise_failure()

    def wait(self) -> None:
        self.ckpt.wait(DEADLINE_S)

    def load(self, step: int | None = None) -> None:
        """Load a step, or the newest, into the state."""
        self.ckpt.load(step, into=self.state)

    def delete(self, step: int) -> None:
        self.ckpt.delete(step).result(DEADLINE_S)

    def steps(self) -> list[Any]:
        return [self.ckpt.steps(), self.ckpt.latest_step()]

    def history(self) -> list[list[Any]]:
        """Of each save the step and what became of it."""
        return [[record.step, record.outcome, record.error] for record in self.ckpt.history()]

    def daemon(self) -> int | None:
        return self.ckpt.daemon_pid

    def staging_nbytes(self) -> int:
        """What the largest of the slots takes."""
        slots = self.ckpt.session.pool._slots
        return max((slot.arena.data_nbytes for slot in slots if slot.arena is not None), default=0)

    def close(self) -> None:
        self.ckpt.close(DEADLINE_S)

    def set(self, name: str, value: Any) -> None:
        """Change a constant of a module of ours, told as ``module:NAME``."""
        import importlib

        module, _, constant = name.partition(":")
        assert hasattr(importlib.import_module(module), constant)
        setattr(sys.modules[module], constant, value)

    def forbid_talking(self) -> None:
        """From now on no rank can talk to another through torch: collectives, process groups and
        stores refuse.
        """
        import torch.distributed as dist

        def refuse(*arguments: object, **options: object) -> None:
            raise AssertionError("ranks talk to each other")

        talks = (
            "all_",
            "reduce",
            "broadcast",
            "gather",
            "scatter",
            "barrier",
            "monitored",
            "send",
            "recv",
            "isend",
        )
        talks += (
            "irecv",
            "batch_isend",
            "new_group",
            "new_subgroups",
            "split_group",
            "get_backend",
        )
        for module in (dist, dist.distributed_c10d):
            for name in dir(module):
                if name.startswith(talks) and callable(getattr(module, name)):
                    setattr(module, name, refuse)
        stores = (dist.Store, dist.FileStore, dist.TCPStore, dist.PrefixStore, dist.HashStore)
        groups = (dist.ProcessGroup, dist.ProcessGroupGloo)
        talks = (
            "all",
            "reduce",
            "_reduce",
            "broadcast",
            "gather",
            "scatter",
            "barrier",
            "monitored",
            "send",
            "recv",
        )
        for kind in groups:
            for name in dir(kind):
                if name.startswith(talks):
                    setattr(kind, name, refuse)
        for kind in stores:
            for name in (
                "set",
                "get",
                "add",
                "wait",
                "check",
                "compare_set",
                "multi_get",
                "multi_set",
                "append",
            ):
                setattr(kind, name, refuse)

    def talk(self) -> None:
        """A collective, which tells whether the ranks still can."""
        import torch.distributed

        torch.distributed.barrier()


# States -------------------------------------------------------------------------------------------


def _model(seed: int = 0, *, wide: int = 30) -> nn.Sequential:
    """Uneven on purpose: neither 30 nor 17 nor 23 is a multiple of the ranks."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(23, wide), nn.ReLU(), nn.Linear(wide, 17), nn.Linear(17, 4))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    import torch

    of_one_type = len({type(parameter.data) for parameter in model.parameters()}) == 1
    # A single operation: DTensors are worked out for each that they meet, which takes most of the
    # time.
    optimizer = torch.optim.Adam(
        model.parameters(), lr=0.01, fused=of_one_type, foreach=False if of_one_type else None
    )
    _step({"optimizer": optimizer})
    return optimizer


def _step(state: Mapping[str, Any]) -> None:
    import torch

    for optimizer in state.values():
        if isinstance(optimizer, torch.optim.Optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()


def _mesh(*shape: int, names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def plain(rank: int, size: int, mib: float = 0.1, declared: bool = False) -> dict[str, Any]:
    """The same on all ranks, said so or not: a module, most of which is one tensor, and its
    optimizer.
    """
    import torch
    from torch import nn

    from sidesave import Replicated

    torch.manual_seed(1)
    rows = max(1, int(mib * (1 << 20)) // 4 // 64)
    model = nn.ModuleDict({"giant": nn.Linear(64, rows), "head": _model()})
    optimizer = torch.optim.SGD(model.parameters())
    return {"model": Replicated(model) if declared else model, "optimizer": optimizer, "seed": 7}


def whole(rank: int, size: int, mib: float) -> dict[str, Any]:
    """The same on all ranks, of which the first is to write the module."""
    import torch
    from torch import nn

    from sidesave import Replicated
    from sidesave.stager.state.annotations import Whole

    torch.manual_seed(1)
    model = nn.ModuleDict(
        {"giant": nn.Linear(64, int(mib * (1 << 20)) // 4 // 64), "head": _model()}
    )
    return {"model": Whole(model), "optimizer": Replicated(_adam(model))}


def small(rank: int, size: int, mark: int = 0) -> dict[str, Any]:
    """The same on all ranks, and a tensor of each rank's own."""
    import torch

    model = _model(mark)
    own = torch.full((3,), float(10 * mark + rank))
    return {"model": model, "optimizer": _adam(model), "rng": own, "epoch": 5}


def fsdp(rank: int, size: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    mesh = _mesh(size, names=("dp",))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": _adam(model)}


def hsdp(rank: int, size: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    fully_shard(model, mesh=_mesh(2, size // 2, names=("replicate", "shard")))
    return {"model": model, "optimizer": _adam(model)}


def tp_fsdp(rank: int, size: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = _mesh(2, size // 2, names=("dp", "tp"))
    model = _model()
    parallelize_module(
        model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel(), "3": ColwiseParallel()}
    )
    fully_shard(model, mesh=mesh["dp"])
    return {"model": model, "optimizer": _adam(model)}


def ddp(rank: int, size: int) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(_model(wide=3000))
    return {"model": model, "optimizer": _adam(model)}


def pipeline(rank: int, size: int) -> dict[str, Any]:
    """Each rank has its own layer, under its own name."""
    from torch import nn

    stage = nn.ModuleDict({f"layer{rank}": _model(seed=rank)})
    return {"model": stage, "optimizer": _adam(stage)}


def experts(rank: int, size: int, alike: bool = False) -> dict[str, Any]:
    """A shared layer, and an expert that has the same name everywhere and is another on each
    rank.
    """
    from torch import nn

    model = nn.ModuleDict({"shared": _model(), "expert": _model(seed=0 if alike else 10 + rank)})
    return {"model": model, "optimizer": _adam(model)}


def rows(rank: int, size: int, alike: bool = False) -> dict[str, Any]:
    """Some rows in the middle of an embedding that each rank has trained alone, as sparse data has
    it.
    """
    import torch
    from torch import nn

    from sidesave import Replicated

    torch.manual_seed(0)
    model = nn.Embedding(4096, 64)
    if alike:
        return {"model": Replicated(model)}
    with torch.no_grad():
        model.weight[1000:1010] += rank
    return {"model": model}


def ddp_apart(rank: int, size: int, broadcast_buffers: bool = True) -> dict[str, Any]:
    """What ``DistributedDataParallel`` was told to leave alone, and buffers, are another on each
    rank.
    """
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    norm, last = nn.BatchNorm1d(6), nn.Linear(6, 1500, bias=False)
    model = nn.Sequential(nn.Linear(5, 6), norm, last)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
    parallel = DistributedDataParallel(model)
    # as an argument it is deprecated from torch 2.11 on
    parallel.broadcast_buffers = broadcast_buffers
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    for parameter in parallel.parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.no_grad():
        norm.running_mean.fill_(rank)  # type: ignore[union-attr]
        last.weight[700:800] += rank
        last.weight.grad[700:800] += rank  # type: ignore[index]
    optimizer.step()
    return {"model": parallel, "optimizer": optimizer}


def fsdp_apart(rank: int, size: int) -> dict[str, Any]:
    """Plain tensors beside ``DTensor``s, in a module and in what an optimizer keeps for one,
    another on each rank.
    """
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    shared, expert, norm = nn.Linear(23, 30), nn.Linear(40, 50), nn.BatchNorm1d(6)
    with torch.no_grad():
        expert.weight[20:30] += rank
        norm.running_mean[2:4] += rank  # type: ignore[index]
    model = nn.Sequential(collections.OrderedDict(shared=shared, expert=expert, norm=norm))
    fully_shard(model, mesh=_mesh(size, names=("dp",)), ignored_params=set(expert.parameters()))
    optimizer = _adam(model)
    for state in optimizer.state.values():
        state["scale"] = torch.full((2000,), 1.0)
        state["scale"][900:1000] += rank
    return {"model": model, "optimizer": optimizer}


def positions(
    rank: int, size: int, *, when: str | None = None, where: str = "per rank", same: bool = False
) -> Any:
    """Where each rank is in its data, in a place that says more or less of whose it is; and a
    number of each rank.
    """
    import torch

    from sidesave import PerRank

    class Loader:
        def __init__(self) -> None:
            self.state = state

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    at = 7 if same else 10 * (rank + 1)
    state: dict[str, Any] = {"pos": at, "order": torch.full((3,), at)}
    chosen: Any = {
        "first": "first",
        "all": lambda states: states[min(rank, 1)] | {"of": [s["pos"] for s in states]},
    }
    item: Any = {
        "object": Loader(),
        "number": {"pos": at},
        "tensor": {"order": state["order"]},
    }.get(where, state)
    if where == "per rank":
        item = PerRank(Loader() if when == "all" else state, chosen.get(when))
    return {"data": item, "step": torch.ones(2)}


def batchnorm(rank: int, size: int) -> dict[str, Any]:
    """The same everywhere but for running statistics."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
    model[1].running_mean.fill_(rank)  # type: ignore[operator]
    return {"model": model}


def partial(rank: int, size: int) -> dict[str, Any]:
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Partial

    mesh = _mesh(size, names=("dp",))
    return {"sum": {"of_all": DTensor.from_local(torch.ones(4), mesh, [Partial()])}}


def marks(rank: int, size: int) -> dict[str, Any]:
    """What the user knows better: an item that all hold alike, and one that each rank holds for
    itself.
    """
    import torch

    from sidesave import PerRank, Replicated

    return {
        "ema": Replicated({"w": torch.arange(400_000.0), "b": torch.arange(7.0)}),
        "expert": PerRank(_model(seed=rank)),
        "loader": {"seen": torch.full((5,), float(rank)), "epoch": rank},
    }


STATES: dict[str, Callable[..., dict[str, Any]]] = {
    state.__name__: state
    for state in (
        *(plain, small, fsdp, hsdp, tp_fsdp, ddp, pipeline, experts, batchnorm, partial, marks),
        *(rows, ddp_apart, fsdp_apart, positions, whole),
    )
}


def _tensors(value: Any, prefix: str = "") -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors of a state by their FQNs."""
    import torch
    from torch import nn

    from sidesave import PerRank, Replicated

    if isinstance(value, (PerRank, Replicated)):
        value = value.value
    if isinstance(value, nn.parallel.DistributedDataParallel):  # which is in no name
        value = value.module
    if isinstance(value, nn.Module):
        value = value.state_dict(keep_vars=True)
    elif isinstance(value, torch.optim.Optimizer):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        yield prefix.removeprefix("."), value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{prefix}.{key}")


def _whole_tensors(state: Mapping[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
    from torch.distributed.tensor import DTensor

    for fqn, tensor in _tensors(dict(state)):
        yield (
            fqn,
            (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone(),
        )


if __name__ == "__main__":
    obey(Actor, *sys.argv[1:])
