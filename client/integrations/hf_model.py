"""A model saved for Hugging Face's tools: its own tensor names, index of files, config, tokenizer.

``from_pretrained`` opens each file that ``model.safetensors.index.json`` lists and loads every
tensor in it. A file of a checkpoint has the tensors of one item, prefixed with the item's name. So
each child of the model is an item.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from sidesave.stager.sharding import is_dtensor
from sidesave.stager.state.annotations import Whole
from sidesave.stager.state.flat_state import FROZEN, container_name
from sidesave.stager.state.tensor_collector import is_idle
from sidesave.stager.wrappers import WrapperNames
from sidesave.writer_daemon.format.names import rank_file

INDEX: Final = "model.safetensors.index.json"
MODEL: Final = "model"
"""The item of a model that cannot be divided into its children."""


@dataclass(frozen=True, slots=True)
class ModelItems:
    """The items of a model, and the index of their files (None if there is no index)."""

    items: dict[str, Any]
    index: str | None


def model_items(model: nn.Module, *, alike: bool) -> ModelItems:
    """Divide a model into items. Nothing is copied.

    The model stays one item, without an index, if its state dict has more than those of its
    children (hooks can add to it).

    Args:
        model: The model, without its wrappers.
        alike: Whether all ranks hold the same model. If not, it stays one item too: no file may
            have a whole tensor.
    """
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    if not alike or any(map(is_dtensor, state.values())):
        return ModelItems({MODEL: model}, None)
    parts = {**model._parameters, **model._buffers, **model._modules}  # pyright: ignore[reportPrivateUsage] - no copies
    items: dict[str, Any] = {}
    names: dict[str, str] = {}  # from keys of the state dict to the names that they are saved under
    files: dict[str, str] = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            of_part: dict[str, Any] = part.state_dict(keep_vars=True)
            wrappers = WrapperNames(part)
            known = wrappers.keys(of_part) if wrappers else {key: key for key in of_part}
        else:
            of_part, known = ({"": part}, {"": ""}) if name in state else ({}, {})
        if not of_part:
            continue
        items[name] = Whole(part)
        for key, value in of_part.items():
            whole_key = f"{name}.{key}" if key else name
            if isinstance(value, torch.Tensor) and value is not state.get(whole_key):
                return ModelItems({MODEL: Whole(model)}, None)
            names[whole_key] = f"{name}.{known[key]}" if key else name
            files[whole_key] = rank_file(
                container_name(name) + FROZEN * is_idle(value), 0, "safetensors"
            )
    if names.keys() != state.keys():
        return ModelItems({MODEL: Whole(model)}, None)
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return ModelItems(items, _index(tensors, names, files))


def _index(tensors: dict[str, torch.Tensor], names: dict[str, str], files: dict[str, str]) -> str:
    """Return the index as JSON; only the first of several tied tensors is in the files."""
    weight_map: dict[str, str] = {}
    nbytes = 0
    seen: set[Any] = set()
    for key, tensor in tensors.items():
        region = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if region in seen and tensor.data_ptr():
            continue
        seen.add(region)
        weight_map[names[key]] = files[key]
        nbytes += tensor.nbytes
    return json.dumps({"metadata": {"total_size": nbytes}, "weight_map": weight_map}, indent=2)


def pretrained_files(model: Any, processors: list[Any]) -> dict[str, bytes]:
    """Return what ``save_pretrained`` writes for ``processors`` and a model, except the weights.

    ``processors`` are tokenizers. Names of files in folders are ``folder/name``. Like every
    ``save_pretrained``, this sets ``dtype`` and ``architectures`` in the model's config.
    """

    def write(folder: str) -> None:
        if isinstance(model, importlib.import_module("transformers").PreTrainedModel):
            model.save_pretrained(folder, state_dict={})
        for processor in processors:
            processor.save_pretrained(folder)

    files = written_files(write)
    return {
        name: data
        for name, data in files.items()
        if not name.endswith(".safetensors") and name != INDEX
    }


def written_files(write: Callable[[str], object]) -> dict[str, bytes]:
    """Return the files that ``write`` writes into the empty folder it is called with."""
    with tempfile.TemporaryDirectory(prefix="sidesave-") as folder:
        write(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@contextlib.contextmanager
def without_weights(model: Any) -> Generator[None]:
    """Have ``model.save_pretrained`` write no weights, unless its caller passes a state dict."""

    def save(folder: Any, *args: Any, **options: Any) -> Any:
        if not args and options.get("state_dict") is None:
            options["state_dict"] = {}
        return cast("Any", type(model)).save_pretrained(model, folder, *args, **options)

    model.__dict__["save_pretrained"] = save
    try:
        yield
    finally:
        del model.__dict__["save_pretrained"]
