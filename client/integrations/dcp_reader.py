"""A ``StorageReader`` for ``torch.distributed.checkpoint.load`` to read sidesave's checkpoints."""

from __future__ import annotations

import io
import os
from typing import Any, cast

import torch
from torch.distributed.checkpoint import _nested_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from sidesave.client.loading.load import own_place
from sidesave.client.loading.load_filter import LoadFilter
from sidesave.client.loading.plan import filled
from sidesave.client.loading.selection import Selection
from sidesave.client.loading.tensors import TensorLoad, finished, read_tensors
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.client.reading.stored import FlatMap, Pickled
from sidesave.client.runs import finding
from sidesave.client.targets import tensor_memory
from sidesave.errors import InvalidArgumentError
from sidesave.stager.dtypes import CARRIERS


class SidesaveReader(StorageReader):
    """A sidesave checkpoint for torch's ``load(state_dict, storage_reader=SidesaveReader(path))``.

    Names are those that torch gives to the nested dict that :func:`sidesave.load` returns. Each
    rank reads only what its tensors need, and verifies all of it. Raises as :func:`sidesave.load`
    does.
    """

    def __init__(self, path: str | os.PathLike[str], *, allow_pickle: bool = False) -> None:
        """Read the checkpoint ``path``, or a run's latest; pickled values need ``allow_pickle``."""
        self._allow_pickle = allow_pickle
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the metadata, and switch to another checkpoint if one is given."""
        if checkpoint_id is not None:
            self._path = checkpoint_id
        self._values: dict[str, Any] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of everything in the checkpoint, as this rank sees it."""
        with CheckpointReader(self._place(), **own_place()) as reader:
            selection = Selection(
                reader, LoadFilter(None, None, None, None), None, allow_pickle=self._allow_pickle
            )
            leaves, containers = selection.flat.leaves, selection.flat.containers
            selection.check_diverged(leaves.values(), live=False)
            # Values that torch's metadata cannot describe are read now.
            odd = [leaf for leaf in leaves.values() if isinstance(leaf, Pickled) or _is_odd(leaf)]
            values = read_tensors(reader, odd, None, verify=True)
            loads: dict[int, TensorLoad] = {}
            stand_ins: dict[Any, Any] = {}
            for leaf in leaves.values():
                if isinstance(leaf, TensorLoad) and leaf not in values:
                    stand_in = stand_ins[leaf] = torch.empty(
                        leaf.shape, dtype=leaf.dtype, device="meta"
                    )
                    loads[id(stand_in)] = leaf
            nest = FlatMap(
                {at: filled(leaf, values | stand_ins) for at, leaf in leaves.items()}, containers
            ).nest()
        flat, mapping = cast("Any", _nested_dict).flatten_state_dict(nest)
        self._values = {name: loads.get(id(value), value) for name, value in flat.items()}
        about = {name: _metadata(value) for name, value in self._values.items()}
        return Metadata(state_dict_metadata=about, planner_data=mapping)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: ``read_metadata`` has read all that is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the boxes of the plan; blocks until all are read."""
        boxes: dict[int, tuple[ReadItem, TensorLoad]] = {}
        for at, item in enumerate(plan.items):
            value = self._values[item.storage_index.fqn]
            if item.type is LoadItemType.BYTE_IO:
                file = io.BytesIO()
                torch.save(value, file)
                file.seek(0)
                planner.load_bytes(item, file)
            elif isinstance(value, TensorLoad):
                boxes[at] = item, value
            else:
                raise InvalidArgumentError(
                    f"{item.storage_index.fqn} is not a plain tensor; load it with sidesave.load"
                )
        wanted = {at: _box(*each) for at, each in boxes.items()}
        with CheckpointReader(self._place(), **own_place()) as reader:
            stored = reader.read_boxes(wanted.values())
        for at, (item, load) in boxes.items():
            target = planner.resolve_tensor(item).detach()
            tensor_memory.write(target, finished(stored[wanted[at]], load.ref, None, None))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is a checkpoint of sidesave."""
        return bool(finding.find(checkpoint_id))

    def _place(self) -> str:
        return finding.locate(self._path)


def _is_odd(leaf: Any) -> bool:
    return isinstance(leaf, TensorLoad) and (leaf.ref.array or bool(leaf.parts))


def _metadata(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, TensorLoad):
        return BytesStorageMetadata()
    shape = torch.Size(value.shape)
    # One chunk: the reader itself maps the tensor to its files.
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), shape, [chunk])


def _box(item: ReadItem, load: TensorLoad) -> Any:
    offsets, shape = tuple(item.storage_offsets), tuple(item.lengths)
    if load.ref.dtype is not None and CARRIERS[load.ref.dtype].pair:
        offsets, shape = (*offsets, 0), (*shape, 2)
    return load.name, (offsets, shape)
