"""Exports a checkpoint's weights as safetensors files that Hugging Face's tools load.

The checkpoint may be of any number of ranks. Weights are verified and streamed, and memory stays
below 300 MB whatever the size of the model. Extra files, such as config.json, are copied.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from sidesave.client.encryption import Encryption, using
from sidesave.client.export.diff import children
from sidesave.client.export.streaming import Weight, batches, pieces, read_ahead
from sidesave.client.export.target import ExportTarget, new_target
from sidesave.client.messages import few
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.client.reading.filters import selector
from sidesave.client.reading.stored import built
from sidesave.client.runs import finding
from sidesave.errors import (
    InvalidArgumentError,
    StateMismatchError,
    UnsupportedValueError,
)
from sidesave.stager.dtypes import NAMES, dtype_from_name, dtype_name
from sidesave.stager.plan import MAX_HEADER_NBYTES
from sidesave.stager.state.tensor_nodes import TensorRef
from sidesave.writer_daemon.checkpoints.info import RANDOM_STATE
from sidesave.writer_daemon.format.manifest import FileRecord
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)

MAX_SHARD_NBYTES: Final = 5_000_000_000
"""The default maximum size of a file in Hugging Face's tools."""
_INDEX: Final = "model.safetensors.index.json"
_UNITS: Final = {"": 1, "B": 1} | {
    f"{prefix}{kind}": base ** (power + 1)
    for kind, base in (("B", 1000), ("IB", 1024))
    for power, prefix in enumerate("KMGT")
}


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an export.

    Attributes:
        path: The directory.
        files: Its safetensors files.
        tensors: The number of tensors in them, of ``nbytes`` bytes in all.
        tied: Names that are left out because another tensor has their bytes, with that tensor's
            name.
        left_out: Names of what is no tensor.
        extra_files: Extra files, which were copied.
    """

    path: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    tied: dict[str, str]
    left_out: tuple[str, ...]
    extra_files: tuple[str, ...] = ()


def export(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    item: str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    keep_prefix: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    storage_options: Mapping[str, Any] | None = None,
    encryption: Encryption | None = None,
) -> Report:
    """Export the weights of checkpoint ``path`` to ``target``; blocking, needs no daemon.

    Args:
        path: A ``step-XXXXXXXX`` directory, a ``CheckpointInfo``, or a run directory (its newest is
            used); or the URL of one of them, from which only the weights are read.
        target: Destination of the files, a directory or the URL of a prefix; it must not exist, or
            be empty. A directory appears once all of it is on disk. In a store files appear one
            after the other, each whole, the index last.
        item: The item of the state to export; by default the only one that has tensors under names,
            as a module has.
        include: Patterns (``"model.layers.*"``) of the FQNs to export, the item's name included;
            None is all.
        exclude: Patterns of FQNs to leave out.
        keep_prefix: Keep the item's name in front of the names of its tensors.
        dtype: Cast floating-point tensors to this.
        max_shard_nbytes: Begin another file before one exceeds this many bytes.
        storage_options: For a URL, what its store needs besides the environment: credentials, an
            endpoint. If both are URLs, it is used for both.
        encryption: The key of an encrypted checkpoint; the exported files are not encrypted.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        InvalidArgumentError: ``target`` exists and is not empty; or there is no such item, or more
            than one.
        UnsupportedValueError: Tensors of a kind that safetensors does not know; all of them are
            named.
        StateMismatchError: Tensors differ between ranks, so that there is no one value.
        IntegrityError: A file is missing, or does not match its digest; nothing is left of the
            export.
        NoSpaceError: There is not enough room for it.
        WriteError: Reading or writing failed.
    """
    with (
        urls.using(storage_options),
        using(encryption),
        Weights(
            path, item=item, include=include, exclude=exclude, keep_prefix=keep_prefix, dtype=dtype
        ) as weights,
    ):
        return weights.write(target, max_shard_nbytes=max_shard_nbytes)


def parse_size(text: str) -> int:
    """Return the bytes of ``5GB`` (powers of 1000), ``5GiB`` (of 1024) or ``5000000000``.

    Hugging Face's tools use the same units.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text.strip())
    nbytes = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else 0
    if nbytes < 1:
        raise InvalidArgumentError(f"{text!r} is no size; write it like 5GB, 500MB or 2GiB")
    return nbytes


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype named, such as ``bfloat16``.

    A dtype that weights cannot be cast to is refused later.
    """
    dtype = dtype_from_name(name.removeprefix("torch."))
    if dtype is None:
        raise InvalidArgumentError(
            f"there is no dtype {name!r}; it is a name like bfloat16 or float32"
        )
    return dtype


class Weights:
    """The weights of a checkpoint, chosen and checked but not read. A context manager.

    Attributes:
        item: Their item of the state.
        nbytes: Their bytes in the export.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        item: str | None = None,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        keep_prefix: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Choose weights; arguments and errors are those of :func:`export`."""
        if dtype is not None and not (dtype.is_floating_point and dtype in NAMES):
            raise InvalidArgumentError(
                f"dtype casts floating-point tensors, so it cannot be {dtype}"
            )
        self._reader = finding.attempts(path).read(CheckpointReader)
        try:
            self.item = _choose(self._reader, item)
            self._weights: list[Weight] = []
            self._tied: dict[str, str] = {}
            self._left_out: list[str] = []
            self._collect(selector(include, exclude), "" if keep_prefix else f"{self.item}.", dtype)
        except BaseException:  # an interrupt leaves no descriptor either
            self.close()
            raise
        self.nbytes = sum(weight.nbytes for weight in self._weights)

    def close(self) -> None:
        """Release the checkpoint; idempotent."""
        self._reader.close()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(
        self, selected: Callable[[str], bool], prefix: str, cast_to: torch.dtype | None
    ) -> None:
        item = self.item
        nest = built(
            self._reader.treespec,
            lambda ref: ref,
            lambda data: None,
            lambda fqn: (fqn == item or fqn.startswith(f"{item}.")) and selected(fqn),
        )
        names: dict[tuple[str, torch.dtype | None], str] = {}
        problems: list[str] = []
        for fqn, leaf in _leaves(nest, ""):
            name = fqn.removeprefix(prefix)
            if not isinstance(leaf, TensorRef):
                self._left_out.append(name)
                continue
            key = (self._reader.name_of(leaf), leaf.dtype)
            if key in names:
                self._tied[name] = names[key]
                continue
            names[key] = name
            weight, problem = self._weight(name, leaf, cast_to)
            if problem:
                problems.append(f"{fqn}: {problem}")
            self._weights.append(weight)
        if problems:
            lines = ["safetensors files cannot hold all of it:", *few(problems, str, "tensors")]
            raise UnsupportedValueError("\n  ".join(lines))
        if not self._weights:
            raise InvalidArgumentError(f"nothing to export: no tensor of {item} is selected")
        manifest = self._reader.manifest
        own = [name for name, _ in names if name not in manifest.table.tensors]
        if own and manifest.world_size > 1:
            items = "; ".join(few(own, str, "belong to their ranks"))
            logger.warning(
                "each of %d ranks has its own, and rank 0's is exported: %s",
                manifest.world_size,
                items,
            )
        diverged = manifest.diverged
        odd = [name for name, _ in names if name in diverged]
        if odd:
            ranks = ", ".join(map(str, diverged[odd[0]][:8]))
            raise StateMismatchError(
                f"{odd[0]} differs between ranks ({ranks}), and so do {len(odd) - 1} more: there "
                "is no one value to export; leave them out with exclude="
            )

    def _weight(self, name: str, ref: TensorRef, cast_to: torch.dtype | None) -> tuple[Weight, str]:
        """A tensor of the export, and the problem with it."""
        stored = self._reader.name_of(ref)
        entry = self._reader.entry(stored)
        dtype = ref.dtype or entry.dtype
        goal = cast_to if cast_to is not None and dtype.is_floating_point else dtype
        weight = Weight(name, stored, dtype, goal, entry.shape)
        if name == "__metadata__" or name != name.encode(errors="replace").decode():
            return weight, "its name is reserved, or not valid Unicode; leave it out with exclude="
        if ref.whole is not None and not ref.whole.is_renamed:
            return (
                weight,
                f"it is a {ref.whole.kind.replace(':', '.')} tensor; leave it out with exclude=",
            )
        if goal not in NAMES:
            way = "" if dtype.is_complex else "cast it with dtype=, or "
            return weight, f"there is no dtype {dtype_name(goal)}; {way}leave it out with exclude="
        if goal != dtype and not _can_be_cast(dtype, goal):
            return weight, f"this torch cannot turn {dtype_name(dtype)} into {dtype_name(goal)}"
        return weight, ""

    def write(
        self,
        target: str | os.PathLike[str],
        *,
        max_shard_nbytes: int = MAX_SHARD_NBYTES,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> Report:
        """Write them to the new place ``target``; blocking, errors are those of :func:`export`.

        Args:
            target: Where the files go.
            max_shard_nbytes: Begin another file before one exceeds this many bytes.
            on_bytes: Called with the number of bytes written since its last call.
        """
        if max_shard_nbytes < 1:
            raise InvalidArgumentError(f"max_shard_nbytes must be positive, not {max_shard_nbytes}")
        shards = _divide(self._weights, max_shard_nbytes)
        extra_files = self._extra_files()
        needed = self.nbytes + sum(entry.nbytes for entry in extra_files)
        with new_target(target, needed) as place:
            for entry in extra_files:
                place.put(entry.name, entry.nbytes, [self._reader.read_extra_file(entry)])
            for name, weights in shards.items():
                self._put_file(place, name, weights, on_bytes)
            if len(shards) > 1:
                index = _index(shards, self.nbytes)
                place.put(_INDEX, len(index), [index])
        names = tuple(entry.name for entry in extra_files)
        left_out = tuple(self._left_out)
        return Report(
            place.path, tuple(shards), len(self._weights), self.nbytes, self._tied, left_out, names
        )

    def _extra_files(self) -> list[FileRecord]:
        """The files to copy; not an index, which lists other tensor files than the export's."""
        entries = self._reader.extra_files()
        if any(entry.name == _INDEX for entry in entries):
            logger.warning(
                "%s: its %s is left out, as an export has its own", self._reader.path, _INDEX
            )
        return [entry for entry in entries if entry.name != _INDEX]

    def _put_file(
        self, place: ExportTarget, name: str, weights: list[Weight], on_bytes: Callable[[int], None]
    ) -> None:
        ordered = sorted(weights, key=lambda weight: -weight.cast_to.itemsize)  # so each is aligned
        wanted = ((weight, each) for weight in ordered for each in weight.slabs())
        header = _header(ordered)

        def content() -> Iterator[bytes | memoryview]:
            yield header
            for batch in read_ahead(self._reader, batches(wanted)):
                for weight, tensor in batch:
                    for piece in pieces(tensor, weight):
                        yield piece
                        on_bytes(len(piece))
                batch.clear()

        place.put(name, len(header) + sum(weight.nbytes for weight in weights), content())


# Choosing -----------------------------------------------------------------------------------------


def _choose(reader: CheckpointReader, item: str | None) -> str:
    names = reader.treespec.keys()
    if item is not None:
        if item not in names:
            raise InvalidArgumentError(
                f"the checkpoint has no item {item!r}; it has {', '.join(names)}"
            )
        return item
    nest = reader.treespec.build(lambda ref: ref, unpickle=lambda data: None)
    shared = reader.manifest.table.tensors
    fitting = [
        name
        for name, value in nest.items()
        if isinstance(value, dict)
        and name != RANDOM_STATE
        and any(
            isinstance(leaf, TensorRef) and leaf.fqn in shared
            for leaf in cast("dict[Any, Any]", value).values()
        )
    ]
    if len(fitting) != 1:
        which = f"{', '.join(fitting)} have" if fitting else f"none of {', '.join(names)} has"
        raise InvalidArgumentError(
            f"which item? {which} tensors under names, as a module has: say item="
        )
    return fitting[0]


def _leaves(value: Any, fqn: str) -> Iterator[tuple[str, Any]]:
    below = children(value)
    if below is None:
        yield fqn, value
        return
    for key, item in below:
        yield from _leaves(item, f"{fqn}.{key}" if fqn else str(key))


def _can_be_cast(dtype: torch.dtype, goal: torch.dtype) -> bool:
    try:
        torch.zeros(2, dtype=torch.uint8, device="cpu").view(
            dtype if dtype.itemsize == 1 else torch.uint8
        ).to(goal)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _divide(weights: Iterable[Weight], limit: int) -> dict[str, list[Weight]]:
    """The files, in the order and sizes that Hugging Face's tools would write."""
    shards: list[list[Weight]] = []
    current: list[Weight] = []
    room = limit
    for weight in weights:
        if weight.nbytes > limit:
            shards.append([weight])
            continue
        if weight.nbytes > room:
            shards.append(current)
            current, room = [], limit
        current.append(weight)
        room -= weight.nbytes
    shards += [current] if current else []
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {
        f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard
        for n, shard in enumerate(shards, start=1)
    }


# Writing ------------------------------------------------------------------------------------------


def _header(weights: Iterable[Weight]) -> bytes:
    body: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + weight.nbytes
        about = {
            "dtype": NAMES[weight.cast_to],
            "shape": list(weight.shape),
            "data_offsets": [start, end],
        }
        body[weight.name] = about
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_NBYTES:
        raise UnsupportedValueError(
            f"{len(body) - 1:,} tensors need a header of {len(text):,} bytes, and safetensors "
            f"allows {MAX_HEADER_NBYTES:,}; choose smaller files with max_shard_nbytes="
        )
    return struct.pack("<Q", len(text)) + text


def _index(shards: dict[str, list[Weight]], nbytes: int) -> bytes:
    names = {weight.name: file for file, weights in shards.items() for weight in weights}
    body = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(names.items()))}
    return (json.dumps(body, indent=2, ensure_ascii=False) + "\n").encode()
