"""Ranks that keep to nodes: they obey what :mod:`rank_trainers` knows, and can be told to load,
fail and agree.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

import forks
import rank_trainers
from rank_trainers import Actor, Rank

if TYPE_CHECKING:
    from torch import nn

    from sidesave.client.ranks.group import World

PER_NODE = 2
_CLONE_NEWUTS = 0x04000000


class NodeRank(Rank):
    """A rank that is a :class:`NodeActor`."""

    script = __file__


# In a rank ----------------------------------------------------------------------------------------


class NodeActor(Actor):
    """What such a rank can be told to do."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._worlds: dict[str, World] = {}

    def open(self, run: str, *, in_turn: bool = False, **options: Any) -> dict[str, Any]:
        """Make a checkpointer; a path with ``{node}`` in it is another one for each two ranks, or
        for every other.
        """
        node = self.rank % PER_NODE if in_turn else self.rank // PER_NODE
        return super().open(run.replace("{node}", str(node)), **options)

    def build(self, name: str, *arguments: Any, **options: Any) -> None:
        """Make a state, which knows its "step"."""
        super().build(name, *arguments, **options)
        self.state["step"] = 0

    def open_in_groups(self, run: str, *groups: list[int]) -> None:
        """Make a checkpointer of the ranks of that group which this one is in, or of the last."""
        import torch.distributed as dist

        made = [dist.new_group(group) for group in groups]
        number = next(
            (number for number, group in enumerate(groups) if self.rank in group), len(groups) - 1
        )
        super().open(run.replace("{group}", str(number)), process_group=made[number])

    def load(self, step: int | None = None, **options: Any) -> Any:
        """Load into the state, and say what that has as its "step"."""
        self.ckpt.load(step, into=self.state, **options)
        return self.state["step"]

    def build_apart(self, seed: int = 0, *, flat: bool = False) -> None:
        """Make a state of state dicts, as torch takes them from a sharded model and its
        optimizer.
        """
        from torch.distributed.checkpoint import state_dict as torch_state_dict

        self._trained = state = over_nodes(self.rank, self.size, seed)
        self._options = torch_state_dict.StateDictOptions(flatten_optimizer_state_dict=flat)
        model, optimizer = torch_state_dict.get_state_dict(
            state["model"], state["optimizer"], options=self._options
        )
        self.state = {"model": model, "optimizer": optimizer, "step": 0}

    def set_apart(self) -> None:
        """Give the model and its optimizer what the state dicts hold."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            self._trained["model"],
            self._trained["optimizer"],
            model_state_dict=self.state["model"],
            optim_state_dict=self.state["optimizer"],
            options=self._options,
        )
        self.state = self._trained

    def digests(self) -> dict[str, str]:
        """What this rank holds, tensors by their bytes."""
        import torch
        import xxhash
        from torch.distributed.tensor import DTensor

        found = {
            key: repr(value)
            for key, value in self.state.items()
            if isinstance(value, (int, str, list))
        }
        for fqn, tensor in rank_trainers._tensors(self.state):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            data = (
                local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                if local.numel()
                else b""
            )
            found[fqn] = f"{local.dtype} {tuple(local.shape)} {xxhash.xxh3_64_hexdigest(data)}"
        return found

    def move_to_host(self, name: str) -> bool:
        """From now on this process, and what it starts, is on a host of that name; False if that
        cannot be.
        """
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS):
            return False
        socket.sethostname(name)
        os.environ.pop(forks.ADDRESS, None)  # there are no forks on that host
        return True

    def fail_at(self, method: str, error: str | None) -> None:
        """Have a method of the state's module "fragile" raise, or not any more."""
        self.state["fragile"].raising = {method: error}

    def outcome(self, command: str, *arguments: Any, **options: Any) -> str:
        """What becomes of a command that may raise what is no ``Exception``."""
        try:
            return f"done: {getattr(self, command)(*arguments, **options)}"
        except BaseException as error:  # noqa: BLE001 - it is the test's to judge
            return f"{type(error).__name__}: {error}"

    def agree(self, run: str, error: str | None = None) -> None:
        """Agree with the other ranks that all is well; it is not, where there is an error."""
        from sidesave.client.ranks.meeting import find_world

        if run not in self._worlds:
            self._worlds[run] = find_world(run, distributed=True, process_group=None)
        with self._worlds[run].raise_together("cannot jump"):
            _raise(error)


def _raise(error: str | None) -> None:
    import builtins

    from sidesave import errors

    if error is not None:
        raise getattr(errors if hasattr(errors, error) else builtins, error)("on purpose")


# States -------------------------------------------------------------------------------------------


def over_nodes(rank: int, size: int, seed: int = 0) -> dict[str, Any]:
    """Cut over all ranks, one layer so small that the last ranks have nothing of it."""
    from torch.distributed.fsdp import fully_shard

    model = _layers(seed)
    fully_shard(model, mesh=rank_trainers._mesh(size, names=("dp",)))
    return {"model": model, "optimizer": rank_trainers._adam(model)}


def replicas_across_nodes(rank: int, size: int, seed: int = 0) -> dict[str, Any]:
    """Cut within each node, and the same on all nodes."""
    from torch.distributed.fsdp import fully_shard

    model = _layers(seed)
    fully_shard(
        model, mesh=rank_trainers._mesh(size // PER_NODE, PER_NODE, names=("replicate", "shard"))
    )
    return {"model": model, "optimizer": rank_trainers._adam(model)}


def replicas_within_nodes(rank: int, size: int, seed: int = 0) -> dict[str, Any]:
    """Cut over the nodes, and the same on all ranks of a node."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    ranks = torch.arange(size).view(-1, PER_NODE).T.contiguous()
    model = _layers(seed)
    fully_shard(model, mesh=DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")))
    return {"model": model, "optimizer": rank_trainers._adam(model)}


def alike(rank: int, size: int, seed: int = 0) -> dict[str, Any]:
    """The same on all ranks, and a tensor of each rank's own."""
    # which one rank after another has to get back
    return rank_trainers.small(rank if seed == 0 else -1, size, seed)


def fragile(rank: int, size: int, seed: int = 0) -> dict[str, Any]:
    """With a module that may be told to raise."""
    return {"model": rank_trainers._model(seed), "fragile": _fragile(seed)}


def replicated_pairs(rank: int, size: int, seed: int = 0) -> dict[str, Any]:
    """Cut over two ranks, with as many replicas as there are pairs."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = rank_trainers._mesh(size // PER_NODE, PER_NODE, names=("replicate", "shard"))
    torch.manual_seed(seed)
    return {"cut": {"w": distribute_tensor(torch.rand(7, 3), mesh, [Replicate(), Shard(0)])}}


def pairs(rank: int, size: int, seed: int = 0) -> dict[str, Any]:
    """Each pair of ranks has a model of its own, cut over the two."""
    from torch.distributed.fsdp import fully_shard

    mesh = rank_trainers._mesh(size // PER_NODE, PER_NODE, names=("pair", "shard"))
    model = _layers(seed + rank // PER_NODE)
    fully_shard(model, mesh=mesh["shard"])
    return {**rank_trainers.small(rank if seed == 0 else -1, size), "model": model}


def tied(rank: int, size: int, seed: int = 0) -> dict[str, Any]:
    """Two layers share a weight, of which the last rank holds nothing; and the tensors that all
    hold are spread.
    """
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = rank_trainers._mesh(size, names=("dp",))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(size - 1, 50_000), nn.Linear(50_000, size - 1))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=mesh)
    held = {
        str(number): distribute_tensor(torch.rand(300_000), mesh, [Replicate()])
        for number in range(3)
    }
    return {"model": model, "held": held}


def with_local_parts(rank: int, size: int, seed: int = 0) -> dict[str, Any]:
    """What is cut, and beside it this rank's part as a tensor of its own."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    from sidesave import PerRank

    torch.manual_seed(seed)
    mesh = rank_trainers._mesh(size, names=("dp",))
    first, second = (distribute_tensor(torch.rand(7), mesh, [Shard(0)]) for _ in range(2))
    return {
        "own": PerRank({"first": first}),
        "cut": {"first": first, "second": second},
        "local": {"second": second.to_local()},
    }


def _layers(seed: int) -> nn.Module:
    from torch import nn

    return nn.Sequential(*rank_trainers._model(seed), nn.Linear(4, 2))


def _fragile(seed: int) -> nn.Module:
    import torch
    from torch import nn

    class Fragile(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.raising: dict[str, str | None] = {}

        def state_dict(self, *arguments: Any, **options: Any) -> Any:
            _raise(self.raising.get("state_dict"))
            return super().state_dict(*arguments, **options)

        def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
            _raise(self.raising.get("load_state_dict"))
            return super().load_state_dict(*arguments, **options)

    torch.manual_seed(seed)
    return Fragile()


if __name__ == "__main__":
    states = (
        over_nodes,
        replicas_across_nodes,
        replicas_within_nodes,
        alike,
        fragile,
        replicated_pairs,
        pairs,
        tied,
        with_local_parts,
    )
    rank_trainers.STATES.update((state.__name__, state) for state in states)
    rank_trainers.obey(NodeActor, *sys.argv[1:])
