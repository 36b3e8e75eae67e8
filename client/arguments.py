"""What a ``Checkpointer`` is given, checked before anything is done: each mistake is an ``InvalidArgumentError``."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from sidesave.errors import InvalidArgumentError, write_error
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.storage.posix import make_run_directory

MAX_STEP: Final = 10**18
_MAX_METADATA_NBYTES: Final = 64 << 10


def check_step(step: int) -> None:
    """A step is an int, 0 or more."""
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise InvalidArgumentError(f"step must be an int from 0 to {MAX_STEP:.0e}, not {step!r}")


def encode_metadata(metadata: object) -> bytes:
    """Facts about a checkpoint as JSON; empty where there are none."""
    if metadata is None:
        return b""
    if not isinstance(metadata, Mapping):
        raise InvalidArgumentError(f"metadata must be a dict, not {type(metadata).__name__}")
    try:
        data = json.dumps(dict(cast("Mapping[Any, Any]", metadata)), ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"metadata must be plain JSON data: {error}; call .item() on tensors") from error
    if len(data) > _MAX_METADATA_NBYTES:
        limit = f"over the limit of {_MAX_METADATA_NBYTES:,}"
        raise InvalidArgumentError(f"metadata of {len(data):,} bytes are {limit}; put them into the state")
    return data


def encode_files(files: object) -> bytes:
    """Files to stand beside the tensors, as they are staged; empty where there are none."""
    if files is None:
        return b""
    if not isinstance(files, Mapping):
        raise InvalidArgumentError(f"files must be a dict of names to str or bytes, not {type(files).__name__}")
    found: dict[str, bytes] = {}
    nbytes = 0
    for name, content in cast("Mapping[Any, Any]", files).items():
        if not isinstance(name, str) or not protocol.may_stand_beside(name):
            raise InvalidArgumentError(f"files cannot have the name {name!r:.80}; names are {protocol.NAMES_BESIDE}")
        found[str(name)] = _encode_file(name, content)
        nbytes += len(found[name])
        if nbytes > protocol.MAX_BESIDE_NBYTES or len(found) > protocol.MAX_BESIDE:
            most = f"at most {protocol.MAX_BESIDE:,} with {protocol.MAX_BESIDE_NBYTES >> 20} MiB in all"
            raise InvalidArgumentError(f"files are too much from {name} on: {most}; put what is larger into the state")
    return protocol.pack_files(found) if found else b""


def _encode_file(name: str, content: object) -> bytes:
    if isinstance(content, bytes):
        return content
    if not isinstance(content, str):
        raise InvalidArgumentError(f"the content of file {name} must be str or bytes, not {type(content).__name__}")
    try:
        return content.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"the content of file {name} cannot be UTF-8: {error}") from error


def check_options(
    slots: int,
    on_error: str,
    on_busy: str,
    nice: int,
    io_class: str,
    max_host_memory_bytes: int | None,
    cpus: Sequence[int],
) -> None:
    """Options with few legal values, and what concerns the machine."""
    if type(slots) is not int or slots < 1:
        raise InvalidArgumentError(f"slots must be 1 or more, not {slots!r}")
    if on_error not in ("raise", "warn"):
        raise InvalidArgumentError(f"on_error must be 'raise' or 'warn', not {on_error!r}")
    if on_busy not in ("wait", "skip"):
        raise InvalidArgumentError(f"on_busy must be 'wait' or 'skip', not {on_busy!r}")
    if not 0 <= nice <= 19:
        raise InvalidArgumentError(f"nice must be 0 to 19, not {nice}")
    if io_class not in ("", "idle", "best-effort"):
        raise InvalidArgumentError(f"io_class must be '', 'idle' or 'best-effort', not {io_class!r}")
    if max_host_memory_bytes is not None and max_host_memory_bytes < 1:
        raise InvalidArgumentError(f"max_host_memory_bytes must be positive, not {max_host_memory_bytes}")
    if not all(type(cpu) is int and cpu >= 0 for cpu in cpus):
        raise InvalidArgumentError(f"cpus must be numbers of cores, not {cpus!r}")


def check_counts(**counts: int) -> None:
    """How often something may happen: 0 or more."""
    for name, count in counts.items():
        if type(count) is not int or count < 0:
            raise InvalidArgumentError(f"{name} must be an int, 0 or more, not {count!r}")


def check_seconds(**timeouts: float) -> None:
    """Timeouts: positive and finite."""
    for name, seconds in timeouts.items():
        if type(seconds) not in (int, float) or not 0 < seconds < float("inf"):
            raise InvalidArgumentError(f"{name} must be a positive number of seconds, not {seconds!r}")


def check_alone(*, fallback_directory: str, on_busy: str) -> None:
    """What only a process that saves alone can have."""
    if fallback_directory:
        raise InvalidArgumentError("fallback_directory is for a process that saves alone; ranks share one directory")
    if on_busy == "skip":
        raise InvalidArgumentError('on_busy="skip" is for a process that saves alone; a save takes all ranks')


def check_path(path: str) -> None:
    """A directory to write to is a local one, and its path can be told to a daemon."""
    if "://" in path:
        raise InvalidArgumentError(f"{path}: only local and mounted directories can be written")
    if path != path.encode(errors="replace").decode():
        raise InvalidArgumentError(f"the directory's path must be valid UTF-8: {path!r}")


def make_directory(path: str) -> None:
    """Make the run directory, unless it is there; ``WriteError`` says why it cannot be, or cannot be written to."""
    try:
        make_run_directory(path)
    except OSError as error:
        raise write_error(error, "cannot create the run directory", path) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise write_error(PermissionError(errno.EACCES, ""), "cannot write to the run directory", path)
