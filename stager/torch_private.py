"""The names that torch calls private and that we use: what another version of torch may change is here."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Final

import torch

foreach_copy: Final = torch._foreach_copy_
foreach_norm: Final = torch._foreach_norm
disable_dynamo: Final = torch._disable_dynamo
set_grad_enabled: Final = torch._C._set_grad_enabled
"""In one instruction, where an interrupt can keep ``no_grad`` from ending."""


def storage_id(storage: torch.UntypedStorage) -> int:
    """What tells a storage from all others, though it be empty."""
    return storage._cdata
