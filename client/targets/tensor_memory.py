"""The memory of live tensors: if it is writable, if tensors share it, how to restore its values."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn, cast

import torch
from torch.nn.parameter import is_lazy

from sidesave.errors import HostMemoryError
from sidesave.stager import torch_private
from sidesave.stager.dtypes import CARRIERS, QUANTIZED
from sidesave.stager.memory.host_memory import available_nbytes
from sidesave.stager.sharding import is_dtensor
from sidesave.stager.state.tags import SPARSE_PARTS
from sidesave.stager.state.tensor_nodes import quantized_parts

_ALIGNMENT: Final = 64


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a ``DTensor``; return any other tensor unchanged."""
    return cast("Any", tensor).to_local() if is_dtensor(tensor) else tensor


def inner_tensors(tensor: Any) -> list[Any]:
    """Return the inner tensors of a jagged tensor or wrapper subclass; empty for other values."""
    if not isinstance(tensor, torch.Tensor):
        return []
    if tensor.layout is torch.jagged:
        return list(torch_private.jagged_parts(tensor)[1].values())
    if torch_private.is_wrapper(tensor):
        return list(torch_private.wrapper_parts(tensor)[0].values())
    return []


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, viewed as integers if torch's copy changes its bytes or lacks its dtype."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    carrier = CARRIERS.get(tensor.dtype)
    return tensor if carrier is None or carrier.pair else tensor.view(carrier.dtype)


def is_composite(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of inner tensors, and not sparse."""
    return torch_private.is_wrapper(tensor) or tensor.dtype in QUANTIZED


def is_written_by_torch(tensor: torch.Tensor) -> bool:
    """Whether torch's own ``copy_`` copies all bits of a tensor to this one."""
    return is_lazy(tensor) or not (is_composite(tensor) or as_integers(tensor) is not tensor)


def write(tensor: Any, value: Any) -> None:
    """Copy a tensor into a live one, bit for bit."""
    if inner := inner_tensors(tensor):
        for part, saved in zip(inner, inner_tensors(value), strict=True):
            write(part, saved)
    elif tensor.dtype in QUANTIZED and "per_channel" in str(tensor.qscheme()):
        for name, part in quantized_parts(tensor, "")[1].items():
            part.copy_(quantized_parts(value, "")[1][name])
    else:
        as_integers(tensor).copy_(as_integers(value))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor aligned as by torch's allocator; CPU kernels round differently elsewhere."""
    is_unaligned = type(tensor) is torch.Tensor and tensor.is_cpu and _address(tensor) % _ALIGNMENT
    if not is_unaligned:
        return tensor
    return as_integers(tensor).clone(memory_format=torch.preserve_format).view(tensor.dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype, layout and bits."""
    one, other = local(one), local(other)
    if type(one) is type(other) and (parts := inner_tensors(one)):
        return all(map(same_bits, parts, inner_tensors(other)))
    if one.layout is not other.layout or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout is not torch.strided:
        parts = SPARSE_PARTS[one.layout]
        return all(same_bits(getattr(one, part)(), getattr(other, part)()) for part in parts)
    if one.is_quantized:
        return torch.equal(one, other)
    plain = (
        each.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
        for each in (one, other)
    )
    return torch.equal(*plain)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the innermost tensors of this rank's shard of a tensor."""
    if torch_private.is_ordinary(tensor):
        yield tensor
        return
    inner = inner_tensors(local(tensor))
    for part in inner:
        yield from _parts(part)
    if not inner:
        yield local(tensor)


def unwritable(tensor: torch.Tensor) -> str:
    """Return why a tensor or this rank's shard cannot be filled in place; empty if it can."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return (
            "an inference tensor, which is writable only in inference mode; clone it outside that "
            "mode"
        )
    if tensor._is_zerotensor():
        return "a zero tensor without memory; clone it"
    if tensor.layout is not torch.strided or not tensor.numel():
        return ""
    if any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return "expanded: several of its elements share memory; clone it"
    return ""


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the first element; 0 for a tensor without memory or not strided."""
    if tensor.layout is not torch.strided or is_lazy(tensor):
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # some subclasses have no memory of their own
        return 0


def read_only(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of tensors in read-only memory; writing to them would crash the process."""
    parts = (
        (name, part)
        for name, tensor in tensors
        for part in _parts(tensor)
        if part.device.type == "cpu"
    )
    addresses = [(name, _address(part)) for name, part in parts]
    ranges: list[tuple[int, int]] = []
    with open("/proc/self/maps") as maps:
        for line in maps if addresses else ():
            span, permissions = line.split(" ", 2)[:2]
            if permissions[1] != "w":
                begin, end = span.split("-")
                ranges.append((int(begin, 16), int(end, 16)))
    starts = [begin for begin, _ in ranges]

    def is_in_one(address: int) -> bool:
        at = bisect.bisect_right(starts, address) - 1
        return at >= 0 and address < ranges[at][1]

    return [*dict.fromkeys(name for name, address in addresses if address and is_in_one(address))]


def held(tensors: Iterable[torch.Tensor]) -> Callable[[], object]:
    """Copy tensors to host memory; return a function that restores values in their current memory.

    If there is not enough memory for the copies, the returned function raises ``HostMemoryError``.
    """
    memories = [
        (part if is_dtensor(tensor) else tensor, _memory(part))
        for tensor in tensors
        for part in (_parts(tensor) if not (is_lazy(tensor) or tensor.is_meta) else ())
    ]
    nbytes, room = sum(_nbytes(memory) for _, memory in memories), available_nbytes()
    if nbytes > room:
        problem = (
            f"{nbytes >> 20} MiB of tensors were not backed up: only {room >> 20} MiB of host "
            "memory were left"
        )
        return lambda: _no_room(problem)
    copies = [(*each, as_integers(each[1]).to("cpu", copy=True)) for each in memories]

    @torch.no_grad()
    def put_back() -> None:
        for tensor, memory, values in copies:
            as_integers(memory).copy_(values)
            if type(tensor.detach()) is torch.Tensor and _address(tensor) != _address(memory):
                tensor.data = memory  # `.data` was replaced

    return put_back


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of a tensor's current memory, unaffected by later ``.data`` assignments.

    A sparse tensor is returned unchanged.
    """
    part = local(tensor)
    return part.detach() if part.layout is torch.strided else part


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.itemsize * (tensor.numel() if tensor.layout is torch.strided else tensor._nnz())


def _no_room(problem: str) -> NoReturn:
    raise HostMemoryError(problem)


# Tensors that share memory ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Region:
    """Memory of a live tensor or this rank's shard (``begin`` to ``end``), and its new value."""

    fqn: str
    tensor: torch.Tensor
    value: torch.Tensor
    begin: int
    end: int

    @classmethod
    def of(cls, fqn: str, target: torch.Tensor, value: torch.Tensor) -> Iterator[_Region]:
        """Yield regions of ``target`` or its inner tensors; ``id(target)`` if it has no address."""
        tensor = local(target)
        if parts := inner_tensors(tensor):
            for pair in zip(parts, inner_tensors(value), strict=True):
                yield from cls.of(fqn, *pair)
            return
        address = 0 if tensor.is_quantized else _address(tensor)
        begin, nbytes = (address, _extent(tensor) * tensor.itemsize) if address else (id(target), 1)
        if tensor.dtype == value.dtype:
            tensor, value = as_integers(tensor), as_integers(value)
        yield cls(fqn, tensor, value, begin, begin + nbytes)

    @property
    def place(self) -> tuple[Any, ...]:
        """A key that is equal for tensors with the same elements in the same order."""
        tensor = self.tensor
        if tensor.layout is not torch.strided or is_lazy(tensor):
            return (self.begin,)
        return (
            self.begin,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @property
    def cast(self) -> torch.Tensor:
        """The value in the dtype of the target."""
        return self.value.to("cpu", self.tensor.dtype)

    def within(self, memory: torch.Tensor, base: int) -> torch.Tensor:
        """Return the same view of other memory, whose first byte stands for address ``base``."""
        like, at = self.tensor, (self.begin - base) // self.tensor.itemsize
        view = memory.view(like.dtype).as_strided(like.shape, like.stride(), at)
        view = view.conj() if like.is_conj() else view
        return torch_private.neg_view(view) if like.is_neg() else view


def conflicts(values: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> list[str]:
    """Describe each conflict between tensors that share memory but have different values.

    Takes tuples of FQN, target tensor and value. Writes to no target.
    """
    places: list[tuple[int, int, Any]] = []
    for each in values:
        tensor = each[1]
        is_simple = (
            torch_private.is_ordinary(tensor) and tensor.is_contiguous() and not tensor.is_quantized
        )
        if is_simple and (address := _address(tensor)):
            # no region, as most share memory with no other
            places.append((address, address + tensor.nbytes, each))
        else:
            places += ((region.begin, region.end, region) for region in _Region.of(*each))
    places.sort(key=operator.itemgetter(0))
    groups: list[list[Any]] = []
    end = 0
    for begin, stop, each in places:
        if begin >= end:
            groups.append([])
        groups[-1].append(each)
        end = max(end, stop)
    lines: list[str] = []
    for group in groups:
        if len(group) > 1 or isinstance(group[0], _Region):
            parts = ([each] if isinstance(each, _Region) else _Region.of(*each) for each in group)
            lines += _conflicts([region for part in parts for region in part])
    return lines


def _conflicts(group: list[_Region]) -> Iterator[str]:
    first, *others = group
    if all(other.place == first.place for other in others):
        for other in others:
            if other.value is not first.value and not same_bits(first.cast, other.cast):
                yield (
                    f"{first.fqn} and {other.fqn} are one tensor in the target, but have different "
                    "values"
                )
        if not _may_overlap_itself(first.tensor):
            return
    base = first.begin // 16 * 16  # aligned for any dtype
    nbytes = -(-max(region.end - base for region in group) // 16) * 16
    memory = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    for region in group:
        region.within(memory, base).copy_(region.value)
    for region in group:
        if not same_bits(region.within(memory, base), region.cast):
            overlapping = (
                each for each in group if each.begin < region.end and region.begin < each.end
            )
            other = next((each.fqn for each in overlapping if each is not region), "itself")
            yield (
                f"{region.fqn} shares memory with {other} in the target, but their values differ "
                "there"
            )


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of elements that a tensor spans in memory."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _may_overlap_itself(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or is_lazy(tensor) or tensor.is_contiguous():
        return False
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += (size - 1) * stride
    return False
