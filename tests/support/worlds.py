"""Checkpoints of many ranks, written by one process, byte for byte as the format has it."""

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sidesave.stager import dtypes
from sidesave.stager.state import tree
from sidesave.stager.state.flat_state import OBJECTS
from sidesave.writer_daemon.commit.manifest_builder import assemble
from sidesave.writer_daemon.format import layout
from sidesave.writer_daemon.format.layout import ELSEWHERE, Layout, Part, Table, TensorInfo
from sidesave.writer_daemon.format.manifest import FileRecord, RankRecord
from sidesave.writer_daemon.format.names import rank_file, record_file, step_directory
from sidesave.writer_daemon.format.tensor_file import (
    BLOCK_NBYTES,
    digest,
    digest_blocks,
    parse_tensor_file,
)

SESSION = "0123456789abcdef"
Cells = dict[str, dict[str, tuple[torch.Tensor, tuple[int, ...]]]]
"""By container and key, what a rank writes: a tensor, and its offsets in the whole."""


@dataclass(frozen=True)
class Own:
    """In the place of a layout: each rank has its own."""


@dataclass(frozen=True)
class Apart:
    """In the place of a layout: these ranks hold it each for itself, and it should have been the
    same.
    """

    ranks: tuple[int, ...]


Spread = Layout | Own | Apart


def cut(shape: Sequence[int], world: int, dim: int = 0) -> Layout:
    """A tensor in as many slices as there are ranks, as ``torch.chunk`` has it."""
    step = -(-shape[dim] // world)
    borders = [min(index * step, shape[dim]) for index in range(world + 1)]
    borders = list(dict.fromkeys(borders))
    cuts: list[tuple[int, ...]] = [(0, extent) for extent in shape]
    cuts[dim] = tuple(borders)
    return Layout(tuple(range(len(borders) - 1)), tuple(cuts))


def tensor_file(cells: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]]) -> bytes:
    """A safetensors file, laid out as the stager does it."""
    order = sorted(
        cells, key=lambda key: (-cells[key][0].dtype.itemsize, cells[key][0].nbytes < BLOCK_NBYTES)
    )
    offsets = {key: {"saved_offsets": list(at)} for key, (_, at) in cells.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for key in order:
        tensor = cells[key][0]
        end = position + tensor.nbytes
        header[key] = {
            "dtype": dtypes.NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    return (
        struct.pack("<Q", len(text))
        + text
        + b"".join(map(tensor_bytes, (cells[key][0] for key in order)))
    )


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the same bytes, which torch's own copy of a bool tensor changes."""
    return (
        tensor.view(torch.uint8).contiguous().view(torch.bool)
        if tensor.dtype is torch.bool
        else tensor.contiguous()
    )


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """What is stored of a tensor."""
    flat = packed(tensor.detach()).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def write_world(
    run: Path,
    states: Sequence[Mapping[str, Any]],
    spread: Callable[[str, torch.Tensor], Spread],
    *,
    step: int = 1,
    alike: Callable[[int], str] = lambda rank: "",
    move: Callable[[int, str, str], str] = lambda rank, container, key: container,
    leave: Callable[[int, str], tuple[torch.Tensor, tuple[int, ...]] | None] = lambda rank, key: (
        None
    ),
) -> Path:
    """Save the state of each rank, the tensors of which are whole; returns the checkpoint.

    Args:
        run: The run directory.
        states: What each rank saves.
        spread: How a tensor is cut, by FQN and as it is stored.
        step: Its name.
        alike: Of each rank what tells its treespec from others'.
        move: Another container for a key of a rank.
        leave: What else a rank has written under a key, in the container where it would have been,
            and its offsets.
    """
    world = len(states)
    flats = [tree.flatten(state) for state in states]
    ours: list[Cells] = [{} for _ in states]
    tables: list[dict[str, TensorInfo]] = [{} for _ in states]
    own: list[dict[str, TensorInfo]] = [{} for _ in states]
    compared: list[dict[str, str]] = [{} for _ in states]
    layouts: dict[Layout, int] = {}
    described: set[str] = set()

    def put(rank: int, container: str, key: str, tensor: torch.Tensor, at: tuple[int, ...]) -> None:
        left = leave(rank, key)
        if left is not None:
            ours[rank].setdefault(container, {})[key] = left
        container = move(rank, container, key)
        ours[rank].setdefault(container, {})[key] = (tensor, at)

    for rank, flat in enumerate(flats):
        for container, tensors in flat.containers.items():
            for fqn, tensor in tensors.items():
                how = spread(fqn, tensor)
                info = TensorInfo(dtypes.NAMES[tensor.dtype], tuple(tensor.shape), container)
                if isinstance(how, Layout):
                    if fqn in described:
                        continue
                    described.add(fqn)
                    number = layouts.setdefault(how, len(layouts))
                    info = TensorInfo(info.dtype, info.shape, container, number)
                    tables[how.first_owner][fqn] = info
                    for owner, (offsets, shape) in how.boxes(info.shape):
                        if owner == ELSEWHERE:
                            continue
                        index = tuple(
                            slice(at, at + extent)
                            for at, extent in zip(offsets, shape, strict=True)
                        )
                        put(owner, container, fqn, tensor[index], offsets)
                    continue
                key = fqn if rank == 0 or isinstance(how, Apart) else f"{fqn}@rank-{rank:05d}"
                if isinstance(how, Apart):
                    assert rank in how.ranks
                    compared[rank][key] = digest(tensor_bytes(tensor)).hex()
                    info = TensorInfo(info.dtype, info.shape, move(rank, container, key))
                own[rank][key] = info
                put(rank, container, key, tensor, (0,) * tensor.dim())
    sums = layout.merge(Table(table, tuple(layouts)) for table in tables).sums()
    path = run / step_directory(step)
    path.mkdir(parents=True)
    records = []
    for rank, flat in enumerate(flats):
        part = Part(
            layout.merge([Table(tables[rank], tuple(layouts))]),
            layout.whole(own[rank], rank),
            sums.get(rank, 0),
            treespec=alike(rank),
            compared=compared[rank],
        )
        files = tuple(
            _write_tensors(path, container, rank, cells) for container, cells in ours[rank].items()
        )
        objects = _write(path, rank_file(OBJECTS, rank, "msgpack"), flat.objects)
        about = (SESSION, step, step, rank, world, None, flat.pickled, 1e9, torch.__version__)
        records.append(RankRecord(*about, files=files, objects=objects, part=part))
        _write(path, record_file(rank), records[-1].to_bytes())
    _write(path, "manifest.json", assemble(records, str(path)).to_bytes())
    return path


def _write(path: Path, name: str, data: bytes) -> FileRecord:
    (path / name).write_bytes(data)
    return FileRecord(name, len(data), digest(data).hex())


def _write_tensors(path: Path, container: str, rank: int, cells: Any) -> FileRecord:
    data = tensor_file(cells)
    name = rank_file(container, rank, "safetensors")
    (path / name).write_bytes(data)
    file = parse_tensor_file(data[: 8 + int.from_bytes(data[:8], "little")], name)
    digests = b"".join(
        digest(data[offset : offset + nbytes]) for offset, nbytes in digest_blocks(file)
    )
    listed = _write(path, rank_file(container, rank, "xxh3"), digests)
    return FileRecord(name, len(data), container=container, digests=listed)


def drop_from_cache(path: Path) -> None:
    """Have what is read next come from the medium."""
    for file in path.iterdir():
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
