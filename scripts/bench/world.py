"""Rank processes on this machine, joined by gloo, that do what they are told, and the states that
they can hold.
"""

import math
import multiprocessing
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import sidesave
from scripts.bench.peers import DEADLINE_S
from scripts.bench.state import SIZES, ByteTransformer, TrainState

P = ParamSpec("P")
T = TypeVar("T")
PARTS = 16  # tensors of a rank where only their bytes count
WIDTH = 1024
# what takes its time
IMPORTS = ["scripts.bench.load", "scripts.bench.world", "sidesave.client.checkpointer"]


@dataclass(slots=True)
class Rank:
    """What one rank process holds; the functions that take one run there, when the parent asks for
    them.
    """

    number: int
    size: int
    state: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    checkpointer: Any = None
    handle: Any = None

    def hold(self, state: dict[str, Any], tensors: list[Tensor]) -> int:
        """Have this state to save, whose local tensors are these; returns their bytes."""
        self.state, self.tensors = state, tensors
        return sum(tensor.nbytes for tensor in tensors)


def serve(parent: Connection, number: int, size: int, meeting: Path) -> None:
    """Be a rank: do what comes, answer with what came of it, end when the parent does."""
    # as torchrun does: ranks whose threads spin for each other make everything slow
    torch.set_num_threads(1)
    deadline = timedelta(seconds=DEADLINE_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=number, world_size=size, timeout=deadline
    )
    rank = Rank(number, size)
    try:
        while True:
            function, args, options = parent.recv()
            try:
                answer = True, function(rank, *args, **options)
            except Exception:  # noqa: BLE001 - told to the parent, which raises it
                answer = False, traceback.format_exc()
            parent.send(answer)
    except EOFError:
        if rank.checkpointer is not None:
            rank.checkpointer.close()
        dist.destroy_process_group()


class World:
    """So many rank processes with one process group.

    Args:
        size: How many.
        folder: Where they meet.
    """

    _numbers = count()

    def __init__(self, size: int, folder: Path) -> None:
        """Start them, forked from a process that has imported everything; the first function waits
        for them.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTS)
        meeting = folder / f"meeting-{next(self._numbers)}"
        self.size = size
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for number in range(size):
            ours, theirs = context.Pipe()
            self._processes.append(
                context.Process(target=serve, args=(theirs, number, size, meeting), daemon=True)
            )
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)

    def all(
        self, function: Callable[Concatenate[Rank, P], T], *args: P.args, **options: P.kwargs
    ) -> list[T]:
        """Run a function in all ranks at once; what each returns. ``RuntimeError`` as soon as one
        raises.
        """
        return self._ask(range(self.size), function, args, options)

    def each(
        self, function: Callable[Concatenate[Rank, P], T], *args: P.args, **options: P.kwargs
    ) -> list[T]:
        """Run a function in one rank after the other."""
        return [self._ask([number], function, args, options)[0] for number in range(self.size)]

    def _ask(self, ranks: Sequence[int], *request: Any) -> list[Any]:
        for number in ranks:
            self._pipes[number].send(request)
        asked = {self._pipes[number]: number for number in ranks}
        answers: dict[int, Any] = {}
        while asked:
            for pipe in wait(list(asked)):
                number = asked.pop(pipe)  # type: ignore[arg-type]
                well, answer = self._pipes[number].recv()
                if not well:
                    raise RuntimeError(f"rank {number} of {self.size}:\n{answer}")
                answers[number] = answer
        return [answers[number] for number in ranks]

    def close(self, patience_s: float = 60.0) -> None:
        """Let the ranks close their checkpointers and end."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(patience_s)
            process.kill()


@contextmanager
def worlds(sizes: Sequence[int], folder: Path) -> Iterator[list[World]]:
    """Worlds of these sizes, side by side."""
    with ExitStack() as stack:
        started: list[World] = []
        for size in sizes:
            started.append(World(size, folder))
            stack.callback(started[-1].close)
        try:
            yield started
        except BaseException:  # an interrupt too
            for world in started:
                world.close(0.0)  # ranks may wait for one that has failed
            raise


# What a rank can be told to hold ------------------------------------------------------------------


def build_own(rank: Rank, nbytes: int) -> int:
    """Hold plain tensors of so many bytes, which belong to this rank."""
    tensors = {f"part{index}": torch.rand(nbytes // 4 // PARTS) for index in range(PARTS)}
    return rank.hold({"data": sidesave.PerRank(tensors)}, list(tensors.values()))


def build_sharded(rank: Rank, nbytes: int) -> int:
    """Hold so many bytes of a module that FSDP2 has sharded; all of it is as many times larger as
    there are ranks.
    """
    rows = rank.size * max(1, nbytes // 4 // PARTS // WIDTH)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, rows, bias=False) for _ in range(PARTS)))
    shard(rank, model)
    return rank.hold(
        {"model": model}, [local(parameter).uniform_() for parameter in model.parameters()]
    )


def build_replicated(rank: Rank, size: str) -> int:
    """Hold a model and its AdamW as every other rank does."""
    state = TrainState(size)
    return rank.hold(state.live(), state.tensors())


def build_giant(rank: Rank, size: str) -> int:
    """Hold about as many bytes as such a model alone, nearly all of them in one tensor, as every
    other rank does.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(12 * SIZES[size].layers * SIZES[size].width ** 2 // WIDTH, WIDTH)
    )
    model.extend(nn.LayerNorm(WIDTH) for _ in range(PARTS))
    return rank.hold({"model": model}, list(model.state_dict().values()))


def build_transformer(rank: Rank, size: str) -> int:
    """Hold a model that FSDP2 has sharded, and its AdamW after one step."""
    with torch.device("meta"):
        model = ByteTransformer(SIZES[size])
    shard(rank, model, *model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        local(parameter).uniform_()
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    rank.state = {"model": model, "optimizer": optimizer}
    return rank.hold(rank.state, [part for _, part in sharded(rank)])


def shard(rank: Rank, model: nn.Module, *blocks: nn.Module) -> None:
    """Shard a model on the meta device over all ranks, and give it memory."""
    mesh = init_device_mesh("cpu", (rank.size,))
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh)
    model.to_empty(device="cpu")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def sharded(rank: Rank) -> Iterator[tuple[Tensor, Tensor]]:
    """What each sharded tensor of :func:`build_transformer` shall hold here, and this rank's part
    of it.
    """
    model, optimizer = rank.state["model"], rank.state["optimizer"]
    for name, parameter in model.named_parameters():
        for key, tensor in {"": parameter, **optimizer.state[parameter]}.items():
            if isinstance(tensor, DTensor):
                part = local(tensor)
                first = (
                    rank.number
                    * math.ceil(tensor.shape[0] / rank.size)
                    * math.prod(tensor.shape[1:])
                )
                values = torch.arange(first, first + part.numel()) + zlib.crc32(
                    f"{name}.{key}".encode()
                )
                yield (values % 65521).to(part.dtype).view(part.shape), part


def fill(rank: Rank) -> None:
    """Give every sharded tensor the values that :func:`check` expects, whatever the number of
    ranks.
    """
    for expected, part in sharded(rank):
        part.copy_(expected)


def check(rank: Rank) -> None:
    """All sharded tensors are as :func:`fill` had left them before they were saved."""
    for expected, part in sharded(rank):
        if not torch.equal(part, expected):
            raise AssertionError("what was loaded is not what was saved")
