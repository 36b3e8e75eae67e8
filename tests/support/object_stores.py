"""A run in the tests' object store, and what it must hold."""

import os
from collections import Counter
from typing import Any

from object_server import Fault, ObjectServer, Request
from trainers import check_step

import sidesave
from sidesave import Checkpointer

URL = "s3://bucket/runs/exp"
WRITES = ("PUT", "PUT-NEW", "START", "PART", "COMPLETE")


def check_store(server: ObjectServer, *steps: int) -> None:
    """These steps are all there is, whole and bit for bit; the server answers from here on."""
    server.heal()
    found = sidesave.find(URL, storage_options=server.options)
    assert sorted(info.step for info in found) == [*steps]
    for info in found:
        check_step(info, info.step, storage_options=server.options)


def opened(server: ObjectServer, url: str | os.PathLike[str] = URL, **options: Any) -> Checkpointer:
    """A checkpointer whose daemon asks this server, and tries a request once more at most by
    itself.
    """
    store = {**server.options, "retry_config": {"max_retries": 1}}
    return Checkpointer(url, storage_options=store, **options)


def fail_each_write_once(server: ObjectServer, fault: Fault) -> Counter[str]:
    """Have the next write of each key fail; the result counts the writes by key."""
    writes: Counter[str] = Counter()

    def each_once(request: Request, number: int) -> Fault:
        if request.method not in WRITES:
            return None
        writes[request.key] += 1
        return fault if writes[request.key] == 1 else None

    server.fault = each_once
    return writes
