"""Tables whose rows are on a device: sorted there, saved at the call beside tensors that are copied
later.
"""

from pathlib import Path
from typing import Any

import gpu
import torch
from row_tables import GrowingTable
from torch import nn

import sidesave

pytestmark = gpu.MARKS


def test_rows_on_a_device_are_those_of_the_call_and_come_back_there(run: Path):
    table = GrowingTable(device="cuda")
    table.train(range(-500, 2500))
    model = nn.Linear(50, 50).cuda()
    with sidesave.Checkpointer(run) as ckpt:
        truths: list[dict[int, Any]] = []
        for step in range(3):
            handle = ckpt.save(step, {"users": table, "model": model})
            truths.append(table.values())
            table.train(range(10 * step, 10 * step + 30))
            table.remove([-step - 1])
            handle.committed.result()
        into: dict[str, Any] = {
            "users": GrowingTable(device="cuda"),
            "model": nn.Linear(50, 50).cuda(),
        }
        for step, truth in enumerate(truths):
            ckpt.load(step, into=into)
            assert into["users"].values() == truth
            assert into["users"].weight.is_cuda
            assert torch.equal(into["model"].weight, model.weight)
    assert (run / "step-00000002" / "users@changed.rank-00000.safetensors").exists()
