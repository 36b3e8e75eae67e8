"""The index of a model's files, read as ``from_pretrained`` does; the package itself is in
test_transformers.py.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from sidesave import Checkpointer
from sidesave.client.integrations.hf_model import INDEX, model_items


def test_the_files_of_the_index_have_all_tensors_under_their_names(tmp_path: Path) -> None:
    words, linear = nn.Embedding(10, 4), nn.Linear(4, 4)
    words.requires_grad_(requires_grad=False)  # all of an item is frozen, and a part of the other
    linear.weight.requires_grad = False
    model = nn.ModuleDict({"words": words, "tower": nn.Sequential(linear, nn.BatchNorm1d(4))})
    model.register_parameter("scale", nn.Parameter(torch.ones(3), requires_grad=False))
    items = model_items(model, alike=True)
    assert items.index is not None
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, items.items, files={INDEX: items.index.encode()})
        folder = Path(handle.committed.result().path)
    weight_map = json.loads((folder / INDEX).read_bytes())["weight_map"]
    found = {
        name: tensor
        for file in {*weight_map.values()}
        for name, tensor in load_file(folder / file).items()
    }
    assert found.keys() == model.state_dict().keys() == weight_map.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor)
