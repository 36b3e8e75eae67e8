"""The tensors of a state, without copies, and which ranks hold them.

One memory region is collected once: tied weights become a second reference to the first FQN.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Generator, Sequence
from typing import Any, Final

import torch
import xxhash
from torch import nn

from sidesave.errors import UnsupportedValueError
from sidesave.stager import data_parallel, ownership, sharding, torch_private
from sidesave.stager.dtypes import CARRIERS, NAMES, QUANTIZED, dtype_name
from sidesave.stager.sharding import Grid, is_dtensor
from sidesave.stager.state.annotations import Around, Frozen, PerRank, Replicated
from sidesave.stager.state.flat_state import FROZEN, FlatState, TableItem, container_name
from sidesave.stager.state.recall import CachedPart, Encoding, Recall
from sidesave.stager.state.tags import Packed, Tag, pack
from sidesave.stager.state.tensor_nodes import inner_parts, memory_format
from sidesave.stager.tables import IDS, RowTable, checked_columns

_local_steps: Final = data_parallel.LocalSteps()
ownership.watch_steps(_local_steps)


class NoValuesYet(UnsupportedValueError):
    """A tensor that may get values before it is saved."""


class TensorCollector:
    """Collects tensors in a :class:`FlatState`, without a copy, and returns their nodes."""

    def __init__(self, ranks: tuple[int, ...] | None, recall: Recall | None) -> None:
        """Start empty; ``ranks`` save together, or are None if this process saves alone.

        Items that ``recall`` has cached are reused.
        """
        self.flat = FlatState()
        self.container = ""
        self.refused: list[UnsupportedValueError] = []
        """Why values of the state cannot be saved; an item with one is not cached."""
        self.takes_meta = False
        self._recall = recall
        self._disjoint = () if recall is None else recall.sequence  # share no names or memory
        self._follows = True
        self._shared_digest = xxhash.xxh3_128()
        self.ranks = ranks
        self._around = Around()
        self.in_process_group = (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        )
        self._holders = data_parallel.Holders(ranks) if self.in_process_group else None
        self._unplaced: tuple[torch.optim.Optimizer, Any, bool] | None = None
        self._placed: dict[int, tuple[bool, str]] = {}  # see :func:`sharding.placements_of_states`
        self._numbering: list[tuple[torch.optim.Optimizer, Any]] = []  # and nodes to add FQNs to
        self._by_address: dict[int, list[tuple[torch.Tensor, Grid | None, Any]]] = {}
        self._by_id: dict[int, str] = {}  # FQNs of tensors that no address identifies
        self._ties: list[str] = []  # FQNs that were met again
        self._cached: list[CachedPart] = []  # the parts that are reused
        self._tensors: list[Sequence[torch.Tensor]] = []  # those of each reused part
        self._names: dict[int, str] = {}  # FQNs of reused tensors, by id
        # reused parts, and container and FQN of other tensors, in order
        self._origins: list[Any] = []

    # Contexts, within which the encoder encodes ----------------------------------------------

    @contextlib.contextmanager
    def module(self, module: nn.Module, fqn: str, depth: int) -> Generator[Encoding]:
        """Within this a module is encoded, unless its node is given; notes its tensors' ranks."""
        self.flat.modules.append(module)
        if self._holders is not None:
            self._holders.add_module(module)
        encoding = Encoding()
        remembered = self.remembered(module, module, fqn, depth, encoding)
        with self._within(self._around.shared(self.ranks), encoding, fqn), remembered:
            yield encoding

    @contextlib.contextmanager
    def optimizer(
        self, optimizer: torch.optim.Optimizer, saved: Any, fqn: str, *, is_numbered: bool
    ) -> Generator[Encoding]:
        """Within this an optimizer's ``state_dict()`` is encoded; notes the ranks of its states.

        If it ``is_numbered`` (numbers stand for parameters), FQNs are added to its node. Raises
        ``UnsupportedValueError`` if part of its state is on ranks that do not save along.
        """
        if self._holders is not None:
            self._holders.add_optimizer(
                optimizer, fqn, is_torchs_own=ownership.is_torchs_own(optimizer)
            )
        self.flat.optimizers.append(optimizer)
        self._unplaced = optimizer, saved, is_numbered
        encoding = Encoding()
        with self._within(self._around.shared(self.ranks), encoding, fqn):
            yield encoding
        # the state may be freed now, and other tensors get its ids
        self._unplaced, self._placed = None, {}
        if is_numbered:
            self._numbering.append((optimizer, encoding.node))

    @contextlib.contextmanager
    def annotated(self, value: Replicated | PerRank | Frozen, fqn: str) -> Generator[Encoding]:
        """Within this the value of an annotation is encoded."""
        if isinstance(value, PerRank):
            self.flat.per_rank.append(fqn)
        encoding = Encoding()
        with self._within(self._around.inside(value, self.ranks), encoding, fqn):
            yield encoding

    @contextlib.contextmanager
    def in_full(self) -> Generator[None]:
        """Within this every node is encoded: cached ones cannot be looked into."""
        recall, self._recall = self._recall, None
        try:
            yield
        finally:
            self._recall = recall

    @contextlib.contextmanager
    def _within(self, around: Around, encoding: Encoding, fqn: str) -> Generator[None]:
        outer, self._around = self._around, around
        try:
            yield
        finally:
            self._around = outer
        # the outermost item whose names all ranks share
        if outer.scope is None and around.scope is not None:
            self._shared_digest.update(pack([fqn, encoding.node]))

    @contextlib.contextmanager
    def remembered(
        self, source: Any, what: Any, fqn: str, depth: int, encoding: Encoding | None = None
    ) -> Generator[Encoding]:
        """Within this a part of the state is encoded unless its node is given; see ``Recall``."""
        encoding, recall = encoding or Encoding(), self._recall
        if recall is None or self._holders:  # holders may change although nothing else does
            yield encoding
            return
        place = (fqn, depth, self.container, *self._around)  # all that nodes and grids depend on
        cached = recall.cached(source, what, place)
        if cached is not None and self._reuse(*cached):
            encoding.node = cached[0].node
            yield encoding
            return
        lengths = len(self._ties), len(self._by_id), *self.flat.lengths(self.container)
        refused = len(self.refused)
        yield encoding
        witness = recall.witness(source, what, place) if len(self.refused) == refused else None
        tensors = None if witness is None else witness.tensors(what)
        if witness is not None and tensors is not None:
            part = self._part_since(lengths, encoding.node, tensors)
            if part is not None:
                recall.remember(source, place, witness, part)

    def meet_stateful(self, fqn: str) -> None:
        """Note an object with a state dict; each rank has its own unless a shared item holds it."""
        if self._around.scope is None and not self._around.is_pinned:
            self.flat.per_rank.append(fqn)

    # The end, and cached parts ---------------------------------------------------------------

    def finish(self) -> FlatState:
        """Return the flat state; adds to optimizers' nodes the FQNs of their parameters."""
        flat = self.flat
        flat.containers = dict(
            sorted(flat.containers.items(), key=lambda item: item[0].endswith(FROZEN))
        )
        if self._recall is not None:
            flat.origin = self._recall.mark(self._cached, self._origins)
        for optimizer, node in self._numbering:
            names = self._names_of(optimizer)
            if names is not None:
                node[:] = [Tag.OPTIMIZER, names, node[1]]
        flat.shared_digest = self._shared_digest.hexdigest()
        return flat

    def _names_of(self, optimizer: torch.optim.Optimizer) -> Packed | None:
        """An optimizer's parameter FQNs by group; None unless each has one name in the state.

        Without the names, the state could be loaded only for the same number of parameters in the
        same order.
        """
        cached = None if self._recall is None else self._recall.names(optimizer)
        if cached is not None:
            return cached
        groups: list[Any] = [group["params"] for group in optimizer.param_groups]
        names = [self._fqns_of(group) for group in groups]
        every = [name for group in names for name in group]
        if None in every or len({*every}) != len(every):
            return None
        packed = Packed(names)
        if self._recall is not None and self._names.keys() >= {
            id(each) for group in groups for each in group
        }:
            self._recall.remember_names(optimizer, packed)
        return packed

    def _fqns_of(self, parameters: Sequence[torch.Tensor]) -> list[str | None]:
        """FQNs under which the memory of parameters was collected; None for those not collected."""
        if self._cached and not self._names:
            for part, tensors in zip(self._cached, self._tensors, strict=True):
                self._names.update(zip(map(id, tensors), part.fqns, strict=True))
        names = self._names
        return [names.get(id(parameter)) or self._fqn_of(parameter) for parameter in parameters]

    def _fqn_of(self, parameter: torch.Tensor) -> str | None:
        fqn = self._by_id.get(id(parameter))
        if fqn is None and not is_dtensor(parameter):
            for other, _, node in self._at(parameter.data_ptr()) or ():
                if other is parameter or _same_region(other, parameter):
                    return str(node[1])
        return fqn

    def _reuse(self, part: CachedPart, tensors: Sequence[torch.Tensor]) -> bool:
        """Collect an item's tensors as before; False if others occupy their memory or names."""
        if not (
            part.fqns.keys().isdisjoint(self.flat.fresh)
            and part.addresses.keys().isdisjoint(self._by_address)
            and (self._is_next(part) or all(map(part.is_disjoint_from, self._cached)))
        ):
            return False
        items, containers = zip(part.fqns, tensors, strict=True), self.flat.containers
        if part.changing:
            containers.setdefault(self.container, {}).update(itertools.islice(items, part.changing))
        if part.changing < len(part.fqns):
            containers.setdefault(self.container + FROZEN, {}).update(items)
        if self._around.is_frozen:
            self.flat.frozen.update(dict.fromkeys(part.fqns))
        self.flat.grids.update(part.grids)
        self.flat.undeclared.update(part.undeclared)
        self._cached.append(part)
        self._tensors.append(tensors)
        self._origins.append(part)
        return True

    def _is_next(self, part: CachedPart) -> bool:
        """Whether all parts reused up to now, and this one, are known to be disjoint."""
        number = len(self._cached)
        self._follows = (
            self._follows and number < len(self._disjoint) and self._disjoint[number] is part
        )
        return self._follows

    def _part_since(
        self, lengths: tuple[int, ...], node: Any, tensors: Sequence[torch.Tensor]
    ) -> CachedPart | None:
        """All that was collected since ``lengths`` were taken, with its node.

        None if it has other tensors than ``tensors``, or is tied to tensors of other items.
        """
        ties, by_id, *of_flat = lengths
        added = self.flat.added_since(of_flat, self.container)
        if added is None or by_id != len(self._by_id):
            return None
        changing, frozen, grids, undeclared = added
        names = {fqn for fqn, _ in (*changing, *frozen)}
        if not names.issuperset(self._ties[ties:]):
            return None
        return CachedPart.of(node, changing, frozen, tensors, grids, undeclared)

    def _at(self, address: int) -> list[tuple[torch.Tensor, Grid | None, Any]] | None:
        """The tensors collected at an address; None without any."""
        collected = self._by_address.get(address)
        if collected is None:
            for part, tensors in zip(self._cached, self._tensors, strict=True):
                if (numbers := part.addresses.get(address)) is not None:
                    # Without a grid: only plain tensors are remembered, whatever share of them this
                    # rank writes.
                    collected, fqns = list[tuple[torch.Tensor, Grid | None, Any]](), [*part.fqns]
                    collected += [
                        (tensors[number], None, _node(fqns[number], tensors[number]))
                        for number in numbers
                    ]
                    self._by_address[address] = collected
        return collected

    def table(self, value: RowTable, fqn: str) -> Any:
        """The node of a table, whose rows are read only when they are staged."""
        if self._around.is_annotated or self._around.scope is not None:
            raise UnsupportedValueError(
                f"{fqn}: rows of a table are divided among ranks by id; take it out of Replicated, "
                "PerRank, Frozen"
            )
        columns = checked_columns(value, fqn, NAMES)
        self.flat.tables[fqn] = TableItem(value, columns, container_name(fqn))
        return [Tag.TABLE, {name: [Tag.ROWS, fqn, name] for name in (IDS, *columns)}]

    def tensor(
        self,
        value: torch.Tensor,
        fqn: str,
        *,
        grid: Grid | None = None,
        origin: torch.Tensor | None = None,
    ) -> Any:
        """The node of a plain tensor, cut as ``grid`` says and detached from ``origin``."""
        if value.layout is not torch.strided:
            return self._inner(value, fqn)
        dtype = value.dtype
        if value.is_meta and not self.takes_meta:
            raise NoValuesYet(f"{fqn}: a meta tensor has no values; materialize it first")
        if value._is_zerotensor():
            raise UnsupportedValueError(f"{fqn}: a tensor of zeros without memory; clone it first")
        if value.is_nested:
            raise UnsupportedValueError(
                f"{fqn}: a nested tensor of strided layout; use torch.jagged, or unbind it"
            )
        if dtype in QUANTIZED and grid is None:
            return self._inner(value, fqn, value if origin is None else origin)
        if dtype not in NAMES and dtype not in CARRIERS:
            raise UnsupportedValueError(f"{fqn}: {dtype} cannot be saved")
        address = value.data_ptr() or (0 if grid is None else _address_of_empty(value, grid))
        others = self._at(address) if address else None
        if others is not None:
            for other, other_grid, node in others:
                # else a tensor and this rank's part of it
                if _same_region(value, other) and grid == other_grid:
                    self._ties.append(node[1])
                    return node
        stored = value
        origin = value if origin is None else origin
        if not self.is_alone:
            self._share(value, fqn, grid, origin)
        carrier = CARRIERS.get(dtype)
        if carrier is not None:
            stored = value.detach().resolve_conj().resolve_neg()
            stored = torch.view_as_real(stored) if carrier.pair else stored.view(carrier.dtype)
            if carrier.pair and fqn in self.flat.grids:
                self.flat.grids[fqn] = sharding.paired(self.flat.grids[fqn])
        node = _node(fqn, value if grid is None else origin)
        self._add(fqn, stored, frozen=self._around.is_frozen or is_idle(origin))
        if others is not None:
            others.append((value, grid, node))
        elif address:
            self._by_address[address] = [(value, grid, node)]
        else:
            self._by_id[id(origin)] = fqn
        return node

    def _inner(self, value: torch.Tensor, fqn: str, origin: torch.Tensor | None = None) -> Any:
        """The node of a sparse or quantized tensor, whose inner tensors are collected."""
        about, parts = inner_parts(value, fqn)
        nodes = {
            name: self.tensor(part, f"{fqn}.{name}", origin=origin) for name, part in parts.items()
        }
        return [*about, nodes]

    # For the tensors of other classes ------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        """Whether no other rank shares the tensors that are collected now."""
        return self.ranks is None or self._around.is_pinned

    def identify(self, value: torch.Tensor, fqn: str) -> None:
        """Note the FQN of a tensor that no address identifies."""
        self._by_id[id(value)] = fqn

    def share_name(self, fqn: str) -> None:
        """Note that all ranks have a tensor of this name."""
        self._shared_digest.update(fqn.encode("utf-8", "surrogatepass"))

    def placement_of(self, value: torch.Tensor) -> tuple[bool, str] | None:
        """The placements of an optimizer's ``DTensor`` that do not follow from a parameter."""
        if self._unplaced is not None:
            self._placed, self._unplaced = sharding.placements_of_states(*self._unplaced), None
        return None if self._around.is_pinned else self._placed.get(id(value))

    # The memory and names of tensors -------------------------------------------------------------

    def _share(
        self, value: torch.Tensor, fqn: str, grid: Grid | None, origin: torch.Tensor
    ) -> None:
        """Note which ranks hold a tensor that is not this rank's alone.

        ``origin`` is the tensor before ``detach``.
        """
        scope = self._around.scope
        if grid is None and scope is not None:
            ranks = scope or (None if self._holders is None else self._holders.of(origin))
            if ranks:
                # What the first rank writes of Whole counts towards its load when other tensors are
                # divided.
                grid = sharding.whole(tuple(value.shape), ranks, self.ranks if scope else None)
            else:
                self.flat.undeclared[fqn] = None
        if grid is not None:
            self.flat.grids[fqn] = grid

    def _add(self, fqn: str, tensor: torch.Tensor, *, frozen: bool) -> None:
        if (
            fqn in self.flat.fresh
            or fqn == "__metadata__"
            or any(fqn in part.fqns for part in self._cached)
        ):
            raise UnsupportedValueError(
                f"{fqn}: two tensors of the state have this name, or it is reserved; rename one"
            )
        self.flat.fresh[fqn] = tensor
        container = self.container + FROZEN if frozen else self.container
        if self._around.is_frozen:
            self.flat.frozen[fqn] = None
        self._origins.append((container, fqn))
        self.flat.containers.setdefault(container, {})[fqn] = tensor


def _node(fqn: str, tensor: torch.Tensor) -> list[Any]:
    """The node of a tensor, with its dtype if another carries it, and its dimensions' order."""
    carried = dtype_name(tensor.dtype) if tensor.dtype in CARRIERS else ""
    order = "" if tensor.is_contiguous() else memory_format(tensor)
    return [Tag.TENSOR, fqn, *([carried, order] if order else [carried] if carried else [])]


def _same_region(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.device == b.device
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def is_idle(value: object) -> bool:
    """Whether a value is a parameter without ``requires_grad``, stored in ``Frozen``'s file."""
    return isinstance(value, nn.Parameter) and not value.requires_grad


def _address_of_empty(shard: torch.Tensor, grid: Grid) -> int:
    """An identifier of an empty shard, as tied tensors must be tied on all ranks; 0 if it has none.

    It has no address. But if its storage has the size of another rank's shard, no other tensor uses
    that storage.
    """
    storage = shard.untyped_storage()
    most = math.prod(grid.largest_cell) * shard.element_size()
    return -torch_private.storage_id(storage) if storage.nbytes() <= most else 0
