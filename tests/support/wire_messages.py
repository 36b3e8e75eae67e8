"""A save as it travels."""

import dataclasses
from typing import Any

from sidesave.writer_daemon.protocol import Extent, Parent, Save


def a_save(**changes: Any) -> Save:
    extent = Extent(name="model", offset=8192, nbytes=100)
    save = Save(
        attempt=1,
        save_id=1,
        arena=1,
        generation=1,
        step=7,
        session="0123456789abcdef",
        sequence=1,
        rank=0,
        world_size=1,
        files=(extent,),
        objects=Extent(name="objects", offset=12288, nbytes=10),
        parent=Parent(step=3, session="fedcba9876543210"),
        replace=False,
        pickled=False,
        created_s=1.5,
        torch_version="2.8",
        retry=False,
    )
    return dataclasses.replace(save, **changes)
