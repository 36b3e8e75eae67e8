"""The checks of ``sidesave doctor`` in an object store."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from sidesave.client.cli.finding import Finding, Verdict, gb, run
from sidesave.errors import InvalidArgumentError, WriteError
from sidesave.stager.memory import host_memory
from sidesave.writer_daemon.storage import urls

if TYPE_CHECKING:
    from sidesave.writer_daemon.storage.remote import Bucket

_SPEED_NBYTES: Final = 64 << 20
_PIECE_NBYTES: Final = 5 << 20
_GRACE_S: Final = 30.0
"""Seconds from SIGTERM to SIGKILL by default, in Kubernetes and in Slurm.

The settings are terminationGracePeriodSeconds and KillWait.
"""
_ANSWER_TIMEOUT_S: Final = 300.0
_ACCESS: Final = (
    "have the credentials put, get, list and delete objects below this URL; see also the region "
    "and the endpoint"
)
_ANOTHER: Final = "use a store that takes If-None-Match: * (S3, GCS, Azure, SeaweedFS and MinIO do)"


def examine_store(url: str) -> Iterator[Finding]:
    """Check the object store of ``url``, under a temporary prefix that is removed at the end."""
    from sidesave.writer_daemon.storage.remote import Bucket

    if not urls.can_write(url):
        raise InvalidArgumentError(f"{url}: sidesave cannot save there")
    bucket = Bucket(f"{url}/.sidesave-doctor-{secrets.token_hex(8)}", {})
    speed: list[float] = []
    try:
        permitted = [*run("permissions", partial(_permissions, bucket), _ACCESS)]
        yield from permitted
        if all(one.status == "ok" for one in permitted):
            yield from run("conditions", partial(_conditions, bucket), _ANOTHER)
            yield from run("upload speed", partial(_upload_speed, bucket, speed), _ACCESS)
            if speed:
                yield from run("shutdown", partial(_shutdown, speed[0]), "")
            yield from run(
                "daemon",
                partial(_daemon, bucket.root),
                "see the checks above; Checkpointer raises the same",
            )
        yield from run("unfinished", partial(_unfinished, url), "")
    finally:
        with contextlib.suppress(WriteError):
            bucket.remove(bucket.list_all(""))


def _permissions(bucket: Bucket) -> Iterator[Verdict]:
    """Try each operation that a run needs on one object."""
    started = time.monotonic()
    bucket.put("object", b"content")
    seconds = time.monotonic() - started
    if bucket.read("object", 100) != b"content":
        raise WriteError(errno.EIO, "the content read differs from the content put", bucket.root)
    if bucket.list_all("") != ["object"]:
        raise WriteError(errno.EIO, "an object that was put is not listed at once", bucket.root)
    bucket.remove(["object"])
    if bucket.read("object", 100) is not None:
        raise WriteError(errno.EIO, "a deleted object still exists", bucket.root)
    yield (
        "ok",
        (
            "objects can be put, read, listed and deleted; a small one was put in "
            f"{seconds * 1000:.0f} ms"
        ),
        "",
    )


def _conditions(bucket: Bucket) -> Iterator[Verdict]:
    bucket.create("object", b"first")
    if bucket.create("object", b"second") or bucket.read("object", 100) != b"first":
        yield (
            "fail",
            (
                "a second object of one key replaces the first: two jobs would overwrite each "
                "other here"
            ),
            _ANOTHER,
        )
    else:
        yield "ok", "a second object of one key is refused, which keeps a second job out", ""


def _upload_speed(bucket: Bucket, speed: list[float]) -> Iterator[Verdict]:
    """Measure one process's upload of an object in parts, like the daemon's but without digests."""
    from sidesave.writer_daemon.storage.upload import AT_ONCE

    piece = memoryview(os.urandom(_PIECE_NBYTES))
    sizes = [
        min(_PIECE_NBYTES, _SPEED_NBYTES - offset)
        for offset in range(0, _SPEED_NBYTES, _PIECE_NBYTES)
    ]
    started = time.monotonic()
    bucket.put_parts("speed", _SPEED_NBYTES, (piece[:size] for size in sizes), AT_ONCE)
    rate = _SPEED_NBYTES / (time.monotonic() - started)
    speed.append(rate)
    detail = (
        f"64 MiB at {rate / 1e6:,.0f} MB/s: a save of 10 GB takes {10e9 / rate / 60:,.1f} minutes"
    )
    if rate < 50e6:
        yield (
            "warn",
            detail,
            "training goes on meanwhile; save less often, or to a disk that mirrors to the store",
        )
    else:
        yield "ok", detail, ""


def _shutdown(rate: float) -> Iterator[Verdict]:
    """Estimate whether staged saves can be uploaded between SIGTERM and SIGKILL."""
    state = host_memory.available_nbytes()
    fits = rate * _GRACE_S
    detail = (
        f"in {_GRACE_S:.0f} s from SIGTERM to SIGKILL, at this rate, {gb(fits)} can be uploaded; "
        f"a staging slot has room for a state of {gb(state)}"
    )
    if fits < state:
        needed = "a larger state needs terminationGracePeriodSeconds (or KillWait) of its bytes / "
        yield (
            "warn",
            detail,
            (
                f"{needed}{rate / 1e6:,.0f} MB/s; a save that is not uploaded in time is lost, "
                "earlier saves stay"
            ),
        )
    else:
        yield "ok", detail, ""


def _daemon(url: str) -> Iterator[Verdict]:
    import torch

    from sidesave.client.checkpointer import Checkpointer

    state = {"tensor": torch.zeros(1 << 20, device="cpu")}
    started = time.monotonic()
    with Checkpointer(f"{url}/run", distributed=False) as checkpointer:
        up = time.monotonic()
        checkpointer.save(0, state).committed.result(_ANSWER_TIMEOUT_S)
        saved = time.monotonic()
    yield "ok", f"up in {up - started:.2f} s; 4 MB saved and committed in {saved - up:.3f} s", ""


def _unfinished(url: str) -> Iterator[Verdict]:
    """Explain how to remove the parts of interrupted uploads.

    No listing shows them, and they cost money.
    """
    match url.partition(":")[0]:
        case "s3":
            rule = '{"Rules":[{"ID":"sidesave","Status":"Enabled","Filter":{"Prefix":""},'
            rule += '"AbortIncompleteMultipartUpload":{"DaysAfterInitiation":2}}]}'
            bucket = url.partition("://")[2].partition("/")[0]
            command = "aws s3api put-bucket-lifecycle-configuration --bucket"
            how = (
                f"{command} {bucket} --lifecycle-configuration '{rule}' (this replaces the rules "
                "that there are)"
            )
        case "gs":
            how = (
                "a lifecycle rule of the bucket with the action AbortIncompleteMultipartUpload and "
                "the condition age 2"
            )
        case "az":
            how = "nothing: Azure drops blocks that were not committed after a week"
        case _:
            how = "remove files whose names end in # and a number"
    yield (
        "ok",
        f"cannot check that the store removes parts of interrupted uploads; make sure of it: {how}",
        "",
    )
