"""A model as Hugging Face's tools look for it: tensors under its own names, an index of their files, config, tokenizer.

``from_pretrained`` opens each file that ``model.safetensors.index.json`` names and takes every tensor in it. A file of
a checkpoint has tensors of one item, with the item's name in front. So each child of the model is an item.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import tempfile
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from sidesave.stager.state.annotations import Whole
from sidesave.stager.state.flat_state import FROZEN, container_name
from sidesave.stager.state.tensor_collector import is_dtensor, is_idle
from sidesave.stager.wrappers import WrapperNames
from sidesave.writer_daemon.format.manifest import rank_file

logger = logging.getLogger(__name__)

INDEX: Final = "model.safetensors.index.json"
MODEL: Final = "model"
"""The item of a model that cannot be divided into its children."""


@dataclass(frozen=True, slots=True)
class ModelItems:
    """The items of a state that are a model, and the index of their files; None where it has none."""

    items: dict[str, Any]
    index: str | None


def model_items(model: nn.Module, *, alike: bool) -> ModelItems:
    """Divide a model into items. Nothing is copied.

    It stays one item, without an index, where its state dict has more than those of its children, as hooks can have it.

    Args:
        model: The model, without what wraps it.
        alike: Whether all ranks hold the same of it. If not it stays one item too: no file may have all of a tensor.
    """
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    if not alike or any(map(is_dtensor, state.values())):
        return ModelItems({MODEL: model}, None)
    parts = {**model._parameters, **model._buffers, **model._modules}  # pyright: ignore[reportPrivateUsage] - no copies
    items: dict[str, Any] = {}
    names: dict[str, str] = {}  # keys of the state dict, and what they are saved under
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
            files[whole_key] = rank_file(container_name(name) + FROZEN * is_idle(value), 0, "safetensors")
    if names.keys() != state.keys():
        return ModelItems({MODEL: Whole(model)}, None)
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return ModelItems(items, _index(tensors, names, files))


def _index(tensors: dict[str, torch.Tensor], names: dict[str, str], files: dict[str, str]) -> str:
    """The index; of tied tensors the first one is in the files."""
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
    """What ``save_pretrained`` writes of a model beside its weights, and of ``processors``, such as a tokenizer.

    As ``save_pretrained`` does, this tells the config the model's class and dtype.
    """
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="sidesave-") as folder:
        if isinstance(model, importlib.import_module("transformers").PreTrainedModel):
            model.config.dtype = str(model.dtype).removeprefix("torch.")
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
        for processor in processors:
            processor.save_pretrained(folder)
        for entry in sorted(os.scandir(folder), key=lambda each: each.name):
            if entry.is_file():
                with open(entry.path, "rb") as file:
                    files[entry.name] = file.read()
            else:
                logger.warning("%s of the tokenizer or config is a directory, and is not saved", entry.name)
    return files
