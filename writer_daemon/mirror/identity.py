"""Whether a place is the mirror that a run has had: an identity, written down in the mirror and in the run directory.

An empty place means a first start only to a run that has had no mirror there. Where a file system may be what is
missing, no place is made in its stead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from typing import Final

from sidesave.errors import CheckpointError, IntegrityError, WriteError, write_error
from sidesave.writer_daemon.storage import PosixStorage, ReadStorage, Storage, sealed_json, urls
from sidesave.writer_daemon.storage.atomic import replace_file
from sidesave.writer_daemon.storage.posix import make_run_directory

REMEMBERED: Final = ".sidesave.mirror"
"""In the run directory: the last mirror, and the identity of each that the run has had."""
IDENTITY: Final = ".sidesave.mirror-id"
"""In the mirror."""
_FORMAT: Final = "sidesave-mirror"
_MAX_NBYTES: Final = 16 << 20
_FSTAB: Final = "/etc/fstab"


def remembered_mirror(directory: str) -> str:
    """The last mirror of a run directory, empty if it never had one; ``IntegrityError`` where that cannot be told."""
    return _remembered(directory)[0]


def has_had(directory: str, place: str) -> bool:
    """Whether a run directory has had a mirror at ``place``; ``IntegrityError`` where that cannot be told."""
    return place in _remembered(directory)[1]


def remember(directory: str, place: str, identity: str = "") -> None:
    """Write down in the run directory where its mirror is, and which one that is once that is known.

    Raises:
        WriteError: The run directory cannot be read, or written to.
    """
    before, identities = "", dict[str, str]()
    with contextlib.suppress(CheckpointError):  # damaged: it is written anew
        before, identities = _remembered(directory)
    after = {**identities, place: identity} if identity else identities
    if (before, identities) != (place, after):
        body = {"format": _FORMAT, "version": sealed_json.FORMAT_VERSION, "mirror": place, "identities": after}
        replace_file(f"{directory}/{REMEMBERED}", sealed_json.seal(body), "cannot write down where the mirror is")


def check_identity(directory: str, place: str) -> None:
    """Raise ``WriteError`` for another mirror than the run has had at ``place``, or one that cannot be read."""
    known = _remembered(directory)[1].get(place, "")  # before all else: what is there is written down there first
    if known and (found := _identity_at(place)) != known:
        what = "is another mirror" if found else "is not there any more, or is empty"
        text = f"the mirror that this run has had {what}: mount or restore it; to begin one anew, call `sidesave mirror"
        raise WriteError(errno.ENOENT, f"{text} {directory} {place}`", place)


def identify(target: Storage) -> str:
    """The identity of a mirror, given to it now where it has none yet; under its lease. Raises ``WriteError``.

    Who has lost the lease, and does not know, gives it no second one.
    """
    found = _identity_in(target)
    while not found:
        new = secrets.token_hex(16)
        try:
            target.publish_bytes("", IDENTITY, f"{new}\n".encode(), new)
            found = new
        except WriteError as error:
            if error.errno != errno.EEXIST:
                raise
            found = _identity_in(target)
            if not found:  # there is one, and it says nothing
                target.remove(IDENTITY)
    target.sync_directory("")
    return found


def refuse_unmounted(place: str, new: str = "a first start") -> None:
    """Raise ``WriteError`` where a directory must not be made, or is the mount point of what is not mounted.

    The error says how to make it for what is ``new``.

    Its parent must be there, and hold something or be a mount point. What /etc/fstab mounts there must be mounted. Of a
    URL that is none of a directory nothing is asked.
    """
    place = place.removeprefix("file://")
    if urls.is_url(place):
        return
    for mount_point in _mount_points():
        if os.path.commonpath([mount_point, place]) == mount_point and not os.path.ismount(mount_point):
            raise WriteError(errno.ENOENT, f"the directory is on {mount_point}, which is not mounted: mount it", place)
    if os.path.lexists(place):
        return
    parent = os.path.dirname(place)
    try:
        is_doubtful = not os.listdir(parent) and not os.path.ismount(parent)
    except OSError as error:
        text = f"the directory is not there, and {parent} cannot be listed: mount its file system; or, for {new},"
        raise write_error(error, f"{text} call `mkdir -p {place}`", place) from error
    if is_doubtful:
        text = f"the directory is not there, and {parent} is empty: mount its file system; or, for {new},"
        raise WriteError(errno.ENOENT, f"{text} call `mkdir {place}`", place)


def open_target(root: str, new: str = "a first start") -> Storage:
    """The place of a mirror, or whatever is ``new`` there, made if it is a directory that may be made; blocking.

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
    """:func:`open_target` of the mirror that the run has had, or of a first one; ``WriteError`` for another."""
    check_identity(directory, place)
    return open_target(place)


def _identity_at(place: str) -> str:
    """The identity in a place, which is read alone: nothing is to be left in what is not the mirror."""
    path = place.removeprefix("file://")
    if not urls.is_url(path) and not os.path.isdir(path):
        return ""
    with contextlib.closing(urls.open_storage(place)) as storage:
        return _identity_in(storage)


def _identity_in(storage: ReadStorage) -> str:
    data = storage.read(IDENTITY, _MAX_NBYTES)
    return "" if data is None else data.decode(errors="replace").strip()


def _remembered(directory: str) -> tuple[str, dict[str, str]]:
    path = f"{directory}/{REMEMBERED}"
    with contextlib.closing(PosixStorage(directory)) as storage:
        data = storage.read(REMEMBERED, _MAX_NBYTES)
    if data is None:
        return "", {}
    sealed_json.check_digest(data, path)
    body = sealed_json.load_json(data, path)
    sealed_json.check_version(body, _FORMAT, path)
    identities = sealed_json.get({"identities": {}, **body}, "identities", dict, path)  # older ones have none
    if not all(type(each) is str for each in identities.values()):
        raise IntegrityError(f"{path}: 'identities' must be texts by place")
    return str(sealed_json.get(body, "mirror", str, path)), identities


def _mount_points() -> list[str]:
    """Where /etc/fstab mounts something."""
    try:
        with open(_FSTAB, encoding="utf-8", errors="replace") as file:
            fields = [line.split() for line in file if not line.lstrip().startswith("#")]
    except OSError:
        return []
    points = [re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), each[1]) for each in fields if len(each) > 1]
    return [point for point in points if os.path.isabs(point)]
