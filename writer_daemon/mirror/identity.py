"""The identity of a mirror, stored in it and in the run directory: shows if they belong together.

An empty directory counts as a new mirror only if the run has had no mirror there. If a file system
may be unmounted, no directory is created in its place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from typing import Any, Final

from sidesave.errors import CheckpointError, IntegrityError, WriteError, write_error
from sidesave.writer_daemon.storage import PosixStorage, ReadStorage, Storage, sealed_json, urls
from sidesave.writer_daemon.storage.posix import make_run_directory
from sidesave.writer_daemon.storage.sealed_json import FactFile


def _parse(body: dict[str, Any], path: str) -> tuple[str, dict[str, str]]:
    # older ones have none
    identities = sealed_json.get(body, "identities", dict, path, {})
    if not all(type(each) is str for each in identities.values()):
        raise IntegrityError(f"{path}: 'identities' must be texts by place")
    return str(sealed_json.get(body, "mirror", str, path)), identities


REMEMBERED: Final = FactFile(
    ".sidesave.mirror",
    "sidesave-mirror",
    _parse,
    lambda mirrors: {"mirror": mirrors[0], "identities": mirrors[1]},
)
"""File in the run directory: the last mirror, and the identity of each mirror that the run had."""
IDENTITY: Final = ".sidesave.mirror-id"
"""File in the mirror."""
_MAX_NBYTES: Final = 16 << 20
_FSTAB: Final = "/etc/fstab"


def remembered_mirror(directory: str) -> str:
    """Return the last mirror or an empty string; raises ``IntegrityError`` if unreadable."""
    return _remembered(directory)[0]


def has_had(directory: str, place: str) -> bool:
    """Whether the run has had a mirror at ``place``; raises ``IntegrityError`` if unreadable."""
    return place in _remembered(directory)[1]


def remember(directory: str, place: str, identity: str = "") -> None:
    """Record in the run directory where its mirror is, and the mirror's identity once it is known.

    Raises:
        WriteError: The run directory cannot be read or written.
    """
    before, identities = "", dict[str, str]()
    with contextlib.suppress(CheckpointError):  # replace a damaged record
        before, identities = _remembered(directory)
    after = {**identities, place: identity} if identity else identities
    if (before, identities) != (place, after):
        with contextlib.closing(PosixStorage(directory)) as storage:
            REMEMBERED.write(storage, (place, after))


def check_identity(directory: str, place: str) -> None:
    """Raise ``WriteError`` if the mirror at ``place`` is unreadable or not the run's known one."""
    # read first: a new identity is written to the mirror first
    known = _remembered(directory)[1].get(place, "")
    if known and (found := _identity_at(place)) != known:
        what = "was replaced by another mirror" if found else "no longer exists, or is empty"
        text = (
            f"the mirror of this run {what}: mount or restore it; or, to start a new one, call "
            "`sidesave mirror"
        )
        raise WriteError(errno.ENOENT, f"{text} {directory} {place}`", place)


def identify(target: Storage) -> str:
    """Return the identity of a mirror, creating it if needed; raises ``WriteError``.

    Call it under the lease. A process that has lost the lease without noticing cannot create a
    second identity.
    """
    identity = _identity_in(target)
    while not identity:
        new = secrets.token_hex(16)
        try:
            target.publish_bytes("", IDENTITY, f"{new}\n".encode(), new)
            identity = new
        except WriteError as error:
            if error.errno != errno.EEXIST:
                raise
            identity = _identity_in(target)
            if not identity:  # the file is empty
                target.remove(IDENTITY)
    target.sync_directory("")
    return identity


def refuse_unmounted(place: str, new: str = "a first start") -> None:
    """Raise ``WriteError`` if a file system seems to be missing at ``place``.

    A file system that /etc/fstab mounts there must be mounted. If the directory does not exist, its
    parent must exist, and must not be empty unless it is a mount point. Other URLs than of files
    are not checked. ``new`` names the purpose in messages.
    """
    place = place.removeprefix("file://")
    if urls.is_url(place):
        return
    for mount_point in _mount_points():
        if os.path.commonpath([mount_point, place]) == mount_point and not os.path.ismount(
            mount_point
        ):
            raise WriteError(
                errno.ENOENT,
                f"the directory is on {mount_point}, which is not mounted: mount it",
                place,
            )
    if os.path.lexists(place):
        return
    parent = os.path.dirname(place)
    try:
        is_doubtful = not os.listdir(parent) and not os.path.ismount(parent)
    except OSError as error:
        text = (
            f"the directory does not exist, and {parent} cannot be listed: mount its file system; "
            f"or, for {new},"
        )
        raise write_error(error, f"{text} call `mkdir -p {place}`", place) from error
    if is_doubtful:
        text = (
            f"the directory does not exist, and {parent} is empty: mount its file system; or, for "
            f"{new},"
        )
        raise WriteError(errno.ENOENT, f"{text} call `mkdir {place}`", place)


def open_target(root: str, new: str = "a first start") -> Storage:
    """Open a mirror for writing, creating its directory if :func:`refuse_unmounted` allows.

    Raises ``WriteError``.
    """
    refuse_unmounted(root, new)
    if not urls.is_url(root):
        try:
            make_run_directory(root)
        except OSError as error:
            raise write_error(error, "cannot create the directory", root) from error
    return urls.open_for_writing(root)


def open_known(directory: str, place: str) -> Storage:
    """Open the run's mirror, or a first one; raises ``WriteError`` if another mirror is there."""
    check_identity(directory, place)
    return open_target(place)


def _identity_at(place: str) -> str:
    """Return the identity stored in a place, without writing there."""
    path = place.removeprefix("file://")
    if not urls.is_url(path) and not os.path.isdir(path):
        return ""
    with contextlib.closing(urls.open_storage(place)) as storage:
        return _identity_in(storage)


def _identity_in(storage: ReadStorage) -> str:
    data = storage.read(IDENTITY, _MAX_NBYTES)
    return "" if data is None else data.decode(errors="replace").strip()


def _remembered(directory: str) -> tuple[str, dict[str, str]]:
    with contextlib.closing(PosixStorage(directory)) as storage:
        return REMEMBERED.read(storage) or ("", {})


def _mount_points() -> list[str]:
    """Return the mount points in /etc/fstab."""
    try:
        with open(_FSTAB, encoding="utf-8", errors="replace") as file:
            fields = [line.split() for line in file if not line.lstrip().startswith("#")]
    except OSError:
        return []
    points = [
        re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), each[1])
        for each in fields
        if len(each) > 1
    ]
    return [point for point in points if os.path.isabs(point)]
