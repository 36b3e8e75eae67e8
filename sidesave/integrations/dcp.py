"""Calls like those of ``torch.distributed.checkpoint``: a script changes its import.

See docs/integrations/dcp.md.
"""

from sidesave.client.integrations.dcp import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
    close,
    load,
    open_run,
    save,
)
from sidesave.client.integrations.dcp_reader import SidesaveReader

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "SidesaveReader",
    "async_save",
    "close",
    "load",
    "open_run",
    "save",
]
