"""Finds committed checkpoints, and resolves a path or a step to one. Needs no torch."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from sidesave.client.arguments import path_text
from sidesave.client.encryption import Encryption, open_metadata, using
from sidesave.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    WriteError,
    listed,
)
from sidesave.writer_daemon.checkpoints import catalog
from sidesave.writer_daemon.checkpoints.catalog import Catalog
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo, no_such_step
from sidesave.writer_daemon.checkpoints.replacement import RetryIfReplaced, current_path, step_of
from sidesave.writer_daemon.format.integrity import NO_SUCH_FILE
from sidesave.writer_daemon.format.manifest import MANIFEST
from sidesave.writer_daemon.format.names import (
    parse_hidden_directory,
    parse_step_directory,
    step_directory,
)
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)

WEIGHTS: Final = ".safetensors"
INDEX: Final = ".safetensors.index.json"

_FEW: Final = 5
_OURS: Final = re.compile(r"(.+\.)?rank-\d{5,}\.(json|safetensors|msgpack|xxh3)", re.DOTALL)
"""Files of a checkpoint."""
_START: Final = (
    "start from it with Source(path, item='model'), where item is what of the state it is for"
)
_NOTHING: Final = (*NO_SUCH_FILE, errno.ENAMETOOLONG)


def find(
    path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    encryption: Encryption | None = None,
) -> list[CheckpointInfo]:
    """List the committed checkpoints of a run directory in commit order; for a checkpoint, itself.

    The last is the latest, even if it is an earlier one that the run has gone back to.

    Reads one small file each, and needs no daemon and no torch. Damaged ones, and those in newer
    formats, are left out with a warning in the log.

    Args:
        path: A run directory or a checkpoint, or the URL of one (docs/remote.md).
        storage_options: For a URL, what its store needs besides the environment: credentials, an
            endpoint.
        encryption: The key of encrypted checkpoints; without it their metadata is empty.

    Returns:
        The checkpoints; an empty list if there is nothing at ``path``.

    Raises:
        InvalidArgumentError: ``path`` is a URL that cannot be read, or listed.
        WriteError: The directory exists but cannot be read, or the store does not answer or denies
            access.
    """
    with urls.using(storage_options), using(encryption):
        place = place_of(path)
        alone = _info(place)
        if alone is not None or _is_step_url(place):
            return [alone] if alone is not None else []
        try:
            return catalog_of(place).all()
        except CheckpointNotFoundError:
            return []
        except WriteError as error:
            if error.errno in _NOTHING:
                return []
            raise


def latest(
    path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    encryption: Encryption | None = None,
) -> CheckpointInfo | None:
    """Return the latest checkpoint of a run directory by commit, or None. See :func:`find`.

    If the run has gone back, this may not be the checkpoint with the highest step.
    """
    checkpoints = find(path, storage_options=storage_options, encryption=encryption)
    return checkpoints[-1] if checkpoints else None


def catalog_of(place: str) -> Catalog:
    """Return the catalog of a run, a path or URL, which opens metadata with the user's key."""
    return Catalog(place, open_metadata)


def read_info(path: str) -> CheckpointInfo:
    """Return the facts about the checkpoint in directory ``path``, from its verified manifest."""
    parent, name = urls.parent_of(path)
    return catalog_of(parent).read(name)


def has_manifest(url: str) -> bool:
    """Return whether the directory of this URL has a manifest; one request."""
    parent, name = urls.parent_of(url)
    with contextlib.closing(urls.open_storage(parent)) as storage:
        return catalog.has_manifest(storage, name)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a committed checkpoint that this version reads.

    Checks its manifest, and no other file. Raises like :func:`find`. Use ``sidesave.verify`` to
    check every byte of it.
    """
    return _info(place_of(path)) is not None


def contains_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a run directory with a committed checkpoint. Raises like :func:`find`."""
    return not is_checkpoint(path) and bool(find(path))


def locate(path: str | os.PathLike[str], step: int | None = None) -> str:
    """Locate a checkpoint: ``path`` itself, or in the run ``path`` that of ``step`` or the latest.

    A damaged one is located, too, if it is ``path`` or ``step``: reading it raises the error.

    Raises:
        InvalidArgumentError: ``path`` is a checkpoint of another step, or a URL that cannot be
            read, or listed.
        CheckpointNotFoundError: There is no such checkpoint; the message says what is there.
        IntegrityError: The latest is not known, as the manifest of a later step is damaged.
        FormatVersionError: The latest is not known, as a checkpoint is in a newer format.
        WriteError: The directory cannot be read.
    """
    place = place_of(path)
    if is_single(place):
        if not _is_there(place):
            run, name = os.path.split(place)
            checkpoints = find(run)
            raise not_found(run if checkpoints else place, checkpoints, step_of(name))
        if step is not None and (other := _told_step(place)) not in (None, step):
            raise InvalidArgumentError(
                f"{place} is the checkpoint of step {other}, and not of step {step}"
            )
        return place
    if _is_unfinished(os.path.basename(place)) or not _is_directory(place):
        raise not_found(place)
    if step is not None:
        one = os.path.join(place, step_directory(step))
        if not _is_there(one, ask=True) or _told_step(one) not in (None, step):
            raise not_found(place, catalog_of(place).all(), step)
        return one
    view = catalog_of(place).look(strict=True)
    catalog.refuse_unknown_newest(view.checkpoints, view.left_out)
    if not view.checkpoints:
        raise not_found(place)
    return view.checkpoints[-1].path


def locate_run(path: str | os.PathLike[str], *, urls_too: bool = False) -> str:
    """Return the absolute path of a run directory.

    Raises:
        InvalidArgumentError: ``path`` is one checkpoint, or a URL.
        CheckpointNotFoundError: There is no such directory.
    """
    place = place_of(path) if urls_too else resolved(path)
    if _is_unfinished(os.path.basename(place)) or not _is_directory(place):
        raise CheckpointNotFoundError(
            errno.ENOENT, f"there is no run directory: {describe_path(place)}", place
        )
    if is_single(place):
        raise InvalidArgumentError(
            f"{place} is one checkpoint; its run directory is {os.path.dirname(place)}"
        )
    return place


def is_single(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is one checkpoint, complete, damaged or deleted, and not a run directory."""
    place = place_of(path)
    name = os.path.basename(place)
    if urls.is_url(place):
        return _is_step_url(place) or has_manifest(place)
    is_one = step_of(name) is not None or os.path.lexists(os.path.join(place, MANIFEST))
    return is_one and not _is_unfinished(name)


def _is_step_url(place: str) -> bool:
    """Whether a URL can only be one checkpoint: by its name, or because it cannot be listed."""
    return urls.is_url(place) and (
        step_of(os.path.basename(place)) is not None or not urls.can_list(place)
    )


def _is_directory(place: str) -> bool:
    """Whether the directory exists; a prefix in a store always does."""
    return urls.is_url(place) or os.path.isdir(place)


def attempts(path: str | os.PathLike[str]) -> RetryIfReplaced:
    """Return attempts to read the checkpoint at ``path``; see :func:`locate`.

    If the latest of a run is deleted meanwhile, because there is a later one, that one is read.
    """
    return RetryIfReplaced(locate(path), locate=lambda: locate(path))


def not_found(
    place: str, checkpoints: Sequence[CheckpointInfo] = (), step: int | None = None
) -> CheckpointNotFoundError:
    """The error for a ``step``, or any checkpoint, missing in ``place``; it has ``checkpoints``."""
    if step is None or not checkpoints:
        return CheckpointNotFoundError(
            errno.ENOENT, f"there is no checkpoint: {describe_path(place)}", place
        )
    return CheckpointNotFoundError(
        errno.ENOENT, no_such_step(step, {info.step for info in checkpoints}), place
    )


def _is_there(path: str, *, ask: bool = False) -> bool:
    """Whether a checkpoint exists; True for a URL unless ``ask``, as reading it raises an error."""
    if urls.is_url(path):
        return not ask or has_manifest(path)
    return os.path.isdir(current_path(path))


def _told_step(path: str) -> int | None:
    """The step in a checkpoint's manifest; None if it cannot be read."""
    try:
        return RetryIfReplaced(path).read(read_info).step
    except CheckpointError:
        return None


def locate_weights(path: str | os.PathLike[str]) -> str:
    """Return the path of plain safetensors weights: a file, or a directory of them.

    Links are not followed: in Hugging Face's cache only the link has the file's name.

    Raises:
        InvalidArgumentError: ``path`` is a URL, or has checkpoints of sidesave.
        CheckpointNotFoundError: There are no weights; the message says what is there.
        WriteError: The directory cannot be read.
    """
    if are_weights(path):
        return os.path.abspath(path_text(path))
    place = resolved(path)
    if find(place):
        raise InvalidArgumentError(
            f"{place} has checkpoints of sidesave, whose names begin with their item; item= is for "
            "plain safetensors files, so leave it out"
        )
    raise CheckpointNotFoundError(
        errno.ENOENT, f"there are no weights: {describe_path(place)}", place
    )


def are_weights(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` has foreign safetensors weights: a file, an index or a directory of them."""
    if urls.is_url(os.fspath(path)):
        return False
    place = os.path.abspath(path_text(path))
    if os.path.isfile(place):
        return place.endswith((WEIGHTS, INDEX))
    try:
        names = os.listdir(place)
    except OSError:
        return False
    return _hold_weights(names) and not _is_unfinished(os.path.basename(place))


def _hold_weights(names: Iterable[str]) -> bool:
    """Whether a directory with these names holds weights, and no checkpoint of sidesave."""
    if any(
        _OURS.fullmatch(name)
        or name.startswith(".sidesave.")
        or parse_step_directory(name) is not None
        for name in names
    ):
        return False
    return any(name.endswith((WEIGHTS, INDEX)) and not name.startswith(".") for name in names)


def describe_path(path: str) -> str:
    """Describe a path that is not a checkpoint, as the end of a sentence, with a suggestion."""
    if urls.is_url(path):
        return (
            "there is no manifest.json at this URL, nor one that counts in a step-XXXXXXXX below it"
        )
    if not os.path.lexists(path):
        return "there is nothing at this path"
    if os.path.isdir(path):
        try:
            return _what_directory(path, os.listdir(path))
        except OSError as error:
            return f"the directory cannot be read: {error.strerror}"
    if path.endswith(WEIGHTS):
        return f"it is a safetensors file; {_START}, or read it with safetensors.torch.load_file"
    if path.endswith(INDEX):
        return f"it is an index of safetensors files; {_START}"
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read(4) == b"PK\x03\x04":
            return "it is a file as torch.save writes it; read it with torch.load"
    return "it is a file, and not the directory of a checkpoint"


def _what_directory(path: str, names: list[str]) -> str:
    if _is_unfinished(os.path.basename(path)):
        return "it is a save that was not finished"
    if ".metadata" in names:
        return "it is a checkpoint of torch.distributed.checkpoint; read it with its load"
    if _hold_weights(names):
        return (
            f"it is a directory of safetensors files; {_START}, or read them with "
            "safetensors.torch.load_file"
        )
    if any(map(_OURS.fullmatch, names)):
        return "it is a checkpoint of sidesave whose manifest is missing or damaged"
    if "_CHECKPOINT_METADATA" in names:
        return "it is a checkpoint of Orbax"
    if any(parse_step_directory(name) is not None for name in names):
        return "it is a run directory, and sidesave verify says why none of its checkpoints counts"
    if any(name.startswith(".sidesave.") or parse_hidden_directory(name) for name in names):
        return "it is a run directory, and nothing has been committed yet"
    runs = sorted(
        name for name in names if os.path.lexists(os.path.join(path, name, ".sidesave.lease"))
    )
    if runs:
        return f"it holds the run directories {listed(runs, _FEW)}"
    return "it is a directory of something else" if names else "it is an empty directory"


def resolved(path: str | os.PathLike[str]) -> str:
    """A path as text, with symbolic links resolved."""
    return os.path.realpath(path_text(path))


def place_of(path: str | os.PathLike[str]) -> str:
    """:func:`resolved`, or a URL, normalized."""
    text: object = os.fspath(path) if isinstance(cast("object", path), (str, os.PathLike)) else None
    return urls.normalized(text) if isinstance(text, str) and urls.is_url(text) else resolved(path)


def _info(place: str) -> CheckpointInfo | None:
    """Facts about the checkpoint in ``place``; None if there is no committed and readable one."""
    name = os.path.basename(place)
    if not name or _is_unfinished(name):
        return None
    try:
        return RetryIfReplaced(place).read(read_info)
    except WriteError as error:
        if error.errno in _NOTHING:
            return None
        raise
    except CheckpointNotFoundError:
        return None
    except CheckpointError as error:
        logger.warning("%s is a checkpoint that cannot be read: %s", place, error)
        return None


def _is_unfinished(name: str) -> bool:
    hidden = parse_hidden_directory(name)
    return hidden is not None and hidden[2] != "replaced"
