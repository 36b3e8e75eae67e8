"""The tensors of a state, as they are, and which ranks hold them.

One memory region is collected once: tied weights become a second reference to the first FQN.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import xxhash
from torch import nn

from sidesave.errors import UnsupportedValueError
from sidesave.stager import torch_private
from sidesave.stager.state import sharding
from sidesave.stager.state.annotations import Compared, Frozen, PerRank, Replicated, Whole
from sidesave.stager.state.dtypes import CARRIERS, NAMES, dtype_name
from sidesave.stager.state.flat_state import FROZEN, FlatState, TableItem, container_name
from sidesave.stager.state.recall import Taken
from sidesave.stager.state.sharding import Grid
from sidesave.stager.state.tags import SPARSE_PARTS, Packed, Tag, pack
from sidesave.stager.tables import IDS, RowTable, checked_columns


class NoValuesYet(UnsupportedValueError):
    """A tensor that may get values before it is saved."""


class TensorCollector:
    """Puts tensors into a :class:`FlatState`, without a copy, and gives the nodes that stand for them."""

    def __init__(self, flat: FlatState, ranks: tuple[int, ...] | None, disjoint: Sequence[Taken] = ()) -> None:
        """Fill ``flat``; ``ranks`` are those that save together, None for one alone.

        Of ``disjoint`` no two share names or memory.
        """
        self.flat = flat
        self._disjoint, self._follows = disjoint, True
        self.container = ""
        self._shared_digest = xxhash.xxh3_128()
        self._ranks = ranks
        self._scope: tuple[int, ...] | None = None  # who may write a plain tensor; () is not known, None this rank
        self._pinned = False  # inside PerRank, where nothing is shared
        self._frozen = False  # inside Frozen
        self._annotations = 0  # around what is being encoded
        self._held_by: dict[int, tuple[int, ...]] = {}  # by id what DistributedDataParallel and its optimizers hold
        self._count = 0
        self._by_address: dict[int, list[tuple[torch.Tensor, Grid | None, Any]]] = {}
        self._by_id: dict[int, str] = {}  # FQNs of what has no address that would tell it from others
        self._ties: list[str] = []  # FQNs that were met again
        self.again: list[Taken] = []
        self._tensors: list[Sequence[torch.Tensor]] = []  # of each of them
        self._names: dict[int, str] = {}  # FQNs of those tensors, by id
        self.origins: list[Any] = []  # these, and containers and FQNs of all other tensors, in order

    @property
    def shared_digest(self) -> str:
        """The digest of all that :meth:`shared` has encoded."""
        return self._shared_digest.hexdigest()

    def annotated(self, value: Replicated | PerRank | Frozen, encode: Callable[[], Any], fqn: str) -> Any:
        """Encode an item of which the user has said something."""
        self._annotations += 1
        try:
            return self._annotated(value, encode, fqn)
        finally:
            self._annotations -= 1

    def _annotated(self, value: Replicated | PerRank | Frozen, encode: Callable[[], Any], fqn: str) -> Any:
        if isinstance(value, Replicated):
            return self.shared(encode, fqn, said=value)
        if isinstance(value, PerRank):
            return self.per_rank(encode, fqn)
        before, self._frozen = self._frozen, True
        try:
            return encode()
        finally:
            self._frozen = before

    def shared(self, encode: Callable[[], Any], fqn: str, *, said: Replicated | None = None) -> Any:
        """Encode an item whose names all ranks share; ``said`` may tell that its plain tensors are alike too."""
        if self._ranks is None or self._pinned:
            return encode()
        before = self._scope
        alike = said is not None and not isinstance(said, Compared)
        holders = self._ranks[:1] if isinstance(said, Whole) else self._ranks if alike else ()
        self._scope = before or holders  # what is around it may have said so already
        try:
            node = encode()
        finally:
            self._scope = before
        if before is None:
            self._shared_digest.update(pack([fqn, node]))
        return node

    def per_rank(self, encode: Callable[[], Any], fqn: str) -> Any:
        """Encode an item that each rank has for itself."""
        self.flat.per_rank.append(fqn)
        before, self._scope, self._pinned = (self._scope, self._pinned), None, True
        try:
            return encode()
        finally:
            self._scope, self._pinned = before

    def fqns_of(self, parameters: Sequence[torch.Tensor]) -> list[str | None]:
        """The FQNs that the memory of parameters has been collected under, None where it has not been."""
        if self.again and not self._names:
            for taken, tensors in zip(self.again, self._tensors, strict=True):
                self._names.update(zip(map(id, tensors), taken.fqns, strict=True))
        names = self._names
        return [names.get(id(parameter)) or self._fqn_of(parameter) for parameter in parameters]

    def has_again(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors belong to what was taken again, after :meth:`fqns_of`."""
        return self._names.keys() >= {*map(id, parameters)}

    def _fqn_of(self, parameter: torch.Tensor) -> str | None:
        fqn = self._by_id.get(id(parameter))
        if fqn is None and not is_dtensor(parameter):
            for other, _, node in self._at(parameter.data_ptr()) or ():
                if other is parameter or _same_region(other, parameter):
                    return str(node[1])
        return fqn

    @property
    def place(self) -> tuple[Any, ...] | None:
        """All that an item's nodes and grids depend on, except its name; None where that cannot be compared."""
        return None if self._held_by else (self.container, self._scope, self._pinned, self._frozen)

    def take_again(self, taken: Taken, tensors: Sequence[torch.Tensor]) -> bool:
        """Collect the tensors of an item as before; False where other tensors have taken their memory or names."""
        if not (
            taken.fqns.keys().isdisjoint(self.flat.fresh)
            and taken.addresses.keys().isdisjoint(self._by_address)
            and (self._is_next(taken) or all(_are_disjoint(taken, other) for other in self.again))
        ):
            return False
        self._count += len(taken.fqns)
        items, containers = zip(taken.fqns, tensors, strict=True), self.flat.containers
        if taken.changing:
            containers.setdefault(self.container, {}).update(itertools.islice(items, taken.changing))
        if taken.changing < len(taken.fqns):
            containers.setdefault(self.container + FROZEN, {}).update(items)
        if self._frozen:
            self.flat.frozen.update(dict.fromkeys(taken.fqns))
        self.flat.grids.update(taken.grids)
        self.flat.undeclared.update(taken.undeclared)
        self.again.append(taken)
        self._tensors.append(tensors)
        self.origins.append(taken)
        return True

    def _is_next(self, taken: Taken) -> bool:
        """Whether all that was taken again so far, and this, are known to be disjoint."""
        number = len(self.again)
        self._follows = self._follows and number < len(self._disjoint) and self._disjoint[number] is taken
        return self._follows

    def observe(self, encode: Callable[[], Any]) -> tuple[Any, Callable[[Sequence[torch.Tensor]], Taken | None]]:
        """What ``encode`` returns, and what makes of it and of what it has collected something to be taken again.

        That is given the tensors of a witness, and returns None where some are others, or are tied to what is outside.
        """
        flat, containers = self.flat, (self.container, self.container + FROZEN)
        before = [len(flat.containers.get(container, ())) for container in containers]
        count = self._count
        grids, undeclared, ties, by_id = len(flat.grids), len(flat.undeclared), len(self._ties), len(self._by_id)
        node = encode()
        changing, frozen = (
            [*itertools.islice(flat.containers.get(container, {}).items(), begin, None)]
            for container, begin in zip(containers, before, strict=True)
        )
        items = changing + frozen

        def taken(tensors: Sequence[torch.Tensor]) -> Taken | None:
            indices = {id(tensor): index for index, tensor in enumerate(tensors)}
            picks = tuple(indices.get(id(tensor), -1) for _, tensor in items)
            fqns = {fqn: number for number, (fqn, _) in enumerate(items)}
            elsewhere = self._count - count != len(items)
            if -1 in picks or elsewhere or by_id != len(self._by_id) or not fqns.keys() >= {*self._ties[ties:]}:
                return None
            addresses: dict[int, tuple[int, ...]] = {}
            for number, (_, tensor) in enumerate(items):
                addresses[tensor.data_ptr()] = (*addresses.get(tensor.data_ptr(), ()), number)
            return Taken(
                Packed(node),
                fqns,
                len(changing),
                picks,
                addresses,
                dict(itertools.islice(flat.grids.items(), grids, None)),
                dict(itertools.islice(flat.undeclared.items(), undeclared, None)),
            )

        return node, taken

    def _at(self, address: int) -> list[tuple[torch.Tensor, Grid | None, Any]] | None:
        """The tensors collected at an address, None if there are none."""
        collected = self._by_address.get(address)
        if collected is None:
            for taken, tensors in zip(self.again, self._tensors, strict=True):
                if (numbers := taken.addresses.get(address)) is not None:
                    # Without a grid: what is remembered are plain tensors, whatever share of them this rank has.
                    collected, fqns = list[tuple[torch.Tensor, Grid | None, Any]](), [*taken.fqns]
                    collected += [(tensors[number], None, [Tag.TENSOR, fqns[number]]) for number in numbers]
                    self._by_address[address] = collected
        return collected

    def meet_stateful(self, fqn: str) -> None:
        """Note an object with a state dict: unless it is part of what is shared, each rank has one for itself."""
        if self._scope is None and not self._pinned:
            self.flat.per_rank.append(fqn)

    def meet_module(self, module: nn.Module) -> None:
        """Note a module, and who holds its tensors if it tells; before they are encoded."""
        self.flat.modules.append(module)
        if self._ranks is not None:
            self._held_by.update(_held_by_data_parallel(module, self._ranks))

    def meet_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer, and that ranks which hold a parameter alike hold its states alike."""
        self.flat.optimizers.append(optimizer)
        if self._ranks is not None:
            self._held_by.update(self._ranks_of_states(optimizer))

    def subclass(self, value: torch.Tensor, fqn: str) -> Any:
        """The node of a parameter, a buffer or a ``DTensor``; any other subclass is refused."""
        if nn.parameter.is_lazy(value):
            raise NoValuesYet(f"{fqn}: a lazy parameter has no values; run a forward pass first")
        if isinstance(value, (nn.Parameter, nn.Buffer)):
            plain = value.detach()
            if type(plain) is torch.Tensor:
                return self.tensor(plain, fqn, origin=value)
        if is_dtensor(value):
            return self._dtensor(value, fqn)
        kind, cure = type(value), "save its local part or its dequantized value"
        if kind.__qualname__ == "ShardedTensor":
            cure = "with device_mesh= FullyShardedDataParallel gives a DTensor in its place, which can be saved"
        raise UnsupportedValueError(f"{fqn}: a {kind.__module__}.{kind.__qualname__} is not a plain tensor; {cure}")

    def _dtensor(self, value: torch.Tensor, fqn: str) -> Any:
        local = cast("Any", value).to_local()
        if self._ranks is None and local.shape != value.shape:
            raise UnsupportedValueError(
                f"{fqn}: it is divided among ranks, and this process saves alone; let all ranks save together"
            )
        if self._ranks is None or self._pinned:
            node = self.tensor(local, fqn, origin=value)
        else:
            self._shared_digest.update(fqn.encode("utf-8", "surrogatepass"))
            node = self.tensor(local, fqn, grid=sharding.describe(value, fqn), origin=value)
        self._by_id[id(value)] = str(node[1])
        return node

    def table(self, value: RowTable, fqn: str) -> Any:
        """The node of a table, whose rows are looked at only when they are staged."""
        if self._annotations or self._scope is not None:
            raise UnsupportedValueError(
                f"{fqn}: rows of a table are divided among ranks by id; take it out of Replicated, PerRank, Frozen"
            )
        columns = checked_columns(value, fqn, NAMES)
        self.flat.tables[fqn] = TableItem(value, columns, container_name(fqn))
        return [Tag.TABLE, {name: [Tag.ROWS, fqn, name] for name in (IDS, *columns)}]

    def tensor(
        self, value: torch.Tensor, fqn: str, *, grid: Grid | None = None, origin: torch.Tensor | None = None
    ) -> Any:
        """The node of a plain tensor, cut as ``grid`` says and detached from ``origin``."""
        if value.layout is not torch.strided:
            return self._sparse(value, fqn)
        dtype = value.dtype
        if value.is_meta:
            raise NoValuesYet(f"{fqn}: a meta tensor has no values; materialize it first")
        if value._is_zerotensor():
            raise UnsupportedValueError(f"{fqn}: a tensor of zeros without memory; clone it first")
        if value.is_nested or (dtype not in NAMES and dtype not in CARRIERS):
            kind = "a nested tensor" if value.is_nested else dtype
            raise UnsupportedValueError(f"{fqn}: {kind} cannot be saved")
        address = value.data_ptr() or (0 if grid is None else _address_of_empty(value, grid))
        others = self._at(address) if address else None
        if others is not None:
            for other, other_grid, node in others:
                if _same_region(value, other) and grid == other_grid:  # else a tensor and this rank's part of it
                    self._ties.append(node[1])
                    return node
        node: list[Any] = [Tag.TENSOR, fqn]
        stored = value
        origin = value if origin is None else origin
        if self._ranks is not None and not self._pinned:
            self._share(value, fqn, grid, origin)
        carrier = CARRIERS.get(dtype)
        if carrier is not None:
            node.append(dtype_name(dtype))
            stored = value.detach().resolve_conj().resolve_neg()
            stored = torch.view_as_real(stored) if carrier.pair else stored.view(carrier.dtype)
            if carrier.pair and fqn in self.flat.grids:
                self.flat.grids[fqn] = _paired(self.flat.grids[fqn])
        self._add(fqn, stored, frozen=self._frozen or is_idle(origin))
        if others is not None:
            others.append((value, grid, node))
        elif address:
            self._by_address[address] = [(value, grid, node)]
        else:
            self._by_id[id(origin)] = fqn
        return node

    def _ranks_of_states(self, optimizer: torch.optim.Optimizer) -> dict[int, tuple[int, ...]]:
        """The ranks that hold each optimizer state of ``DistributedDataParallel`` parameters, by id.

        It has all ranks change its parameters alike.
        """
        return {
            id(value): self._held_by[id(parameter)]
            for parameter, state in optimizer.state.items()
            if id(parameter) in self._held_by
            for value in state.values()
            if isinstance(value, torch.Tensor)
        }

    def _share(self, value: torch.Tensor, fqn: str, grid: Grid | None, origin: torch.Tensor) -> None:
        """Note which ranks hold a tensor, where it is not this rank's own; ``origin`` is what it was detached from."""
        if grid is None and self._scope is not None:
            ranks = self._scope or self._held_by.get(id(origin))
            if ranks:
                # What the first rank writes of Whole counts as its load, where the rest is divided.
                grid = sharding.whole(tuple(value.shape), ranks, self._ranks if self._scope else None)
            else:
                self.flat.undeclared[fqn] = None
        if grid is not None:
            self.flat.grids[fqn] = grid

    def _add(self, fqn: str, tensor: torch.Tensor, *, frozen: bool) -> None:
        if fqn in self.flat.fresh or fqn == "__metadata__" or any(fqn in taken.fqns for taken in self.again):
            raise UnsupportedValueError(
                f"{fqn}: two tensors of the state have this name, or it is reserved; rename one"
            )
        self.flat.fresh[fqn] = tensor
        container = self.container + FROZEN if frozen else self.container
        if self._frozen:
            self.flat.frozen[fqn] = None
        self.origins.append((container, fqn))
        self._count += 1
        try:
            self.flat.containers[container][fqn] = tensor
        except KeyError:
            self.flat.containers[container] = {fqn: tensor}

    def _sparse(self, value: torch.Tensor, fqn: str) -> Any:
        parts = SPARSE_PARTS.get(value.layout)
        if parts is None or value.is_meta:
            raise UnsupportedValueError(f"{fqn}: tensors of layout {value.layout} on {value.device} cannot be saved")
        value = value.detach()
        nodes = {part.strip("_"): self.tensor(getattr(value, part)(), f"{fqn}.{part.strip('_')}") for part in parts}
        coalesced = value.is_coalesced() if value.layout is torch.sparse_coo else None
        return [Tag.SPARSE, str(value.layout).removeprefix("torch."), list(value.shape), coalesced, nodes]


def _are_disjoint(one: Taken, other: Taken) -> bool:
    return one.fqns.keys().isdisjoint(other.fqns) and one.addresses.keys().isdisjoint(other.addresses)


def _held_by_data_parallel(module: nn.Module, ranks: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """The ranks that hold each tensor that ``DistributedDataParallel`` keeps equal, by the tensor's id.

    That is its parameters, and buffers if it broadcasts them, which it does from the first rank of its group: that
    one's count. Not what it was told to ignore, under any of its names.
    """
    parallel = sys.modules.get("torch.nn.parallel")
    if parallel is None or not isinstance(module, parallel.DistributedDataParallel):
        return {}
    replicas = cast("Any", module)
    group = tuple(torch.distributed.get_process_group_ranks(replicas.process_group))
    parameters = list(replicas.module.named_parameters(remove_duplicate=False))
    buffers = list(replicas.module.named_buffers(remove_duplicate=False)) if replicas.broadcast_buffers else []
    first = tuple(rank for rank in group if rank in ranks)[:1]
    holders_by_id = {id(tensor): group for _, tensor in parameters} | {id(tensor): first for _, tensor in buffers}
    ignored = {id(tensor) for name, tensor in (*parameters, *buffers) if name in replicas.parameters_to_ignore}
    return {each: holders for each, holders in holders_by_id.items() if each not in ignored}


def _same_region(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.device == b.device
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


@functools.lru_cache(maxsize=256)
def _paired(grid: Grid) -> Grid:
    """The grid of complex numbers that are stored as pairs; one object for each, as plans are found by it."""
    return replace(grid, shape=(*grid.shape, 2), cuts=(*grid.cuts, (0, 2)))


def is_dtensor(value: object) -> bool:
    """Whether a value is a ``DTensor``; without importing what it comes from, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_idle(value: object) -> bool:
    """Whether a value is a parameter that is not trained, which has a file with what is ``Frozen``."""
    return isinstance(value, nn.Parameter) and not value.requires_grad


def _address_of_empty(shard: torch.Tensor, grid: Grid) -> int:
    """What tells an empty shard from others, for tied tensors have to be tied on all ranks; 0 where nothing does.

    It has no address. But memory of its own, of the size that a shard has elsewhere, is that of no other tensor.
    """
    storage = shard.untyped_storage()
    most = math.prod(max(map(operator.sub, borders[1:], borders)) for borders in grid.cuts) * shard.element_size()
    return -torch_private.storage_id(storage) if storage.nbytes() <= most else 0
