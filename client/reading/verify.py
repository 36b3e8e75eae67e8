"""Verifies every byte of a checkpoint against its digests. Loads nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sidesave.client.runs import finding
from sidesave.errors import IntegrityError, WriteError
from sidesave.writer_daemon.format import integrity
from sidesave.writer_daemon.format.integrity import Fault
from sidesave.writer_daemon.format.layout import ROWS
from sidesave.writer_daemon.format.manifest import MANIFEST
from sidesave.writer_daemon.format.names import rank_file
from sidesave.writer_daemon.storage import urls


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of :func:`verify`.

    Attributes:
        path: The checkpoint.
        nbytes: Bytes compared with digests.
        faults: All problems, one line each when printed.
    """

    path: str
    nbytes: int
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        """Whether every byte is unchanged since the save."""
        return not self.faults


def verify(
    path: str | os.PathLike[str],
    *,
    on_bytes: Callable[[int], None] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Compare every byte of a checkpoint with its digests; blocking, loads nothing.

    Bytes are read from the medium.

    Args:
        path: A ``step-XXXXXXXX`` directory, a ``CheckpointInfo``, or a run directory (its newest is
            used); or the URL of one of them, which is read whole (over http without a search for
            files that do not belong there).
        on_bytes: Called with the number of bytes compared since its last call.
        storage_options: For a URL, what its store needs besides the environment: credentials, an
            endpoint.

    Raises:
        CheckpointNotFoundError: There is no checkpoint; one that lacks its manifest is reported.
        IntegrityError: The newest checkpoint of a run is unknown, as one that may be the newest is
            damaged.
        FormatVersionError: It is unknown, as one is in a newer format.
        InvalidArgumentError: ``path`` is a URL that cannot be read, or listed.
        WriteError: The directory cannot be opened at all.
    """
    report: VerifyReport | None = None
    with urls.using(storage_options):
        for attempt in finding.attempts(path):
            with attempt as (place,):
                report = _check(place, on_bytes)
                attempt.in_doubt = not report.ok
    assert report is not None
    return report


def _check(place: str, on_bytes: Callable[[int], None] | None) -> VerifyReport:
    if not (finding.has_manifest(place) if urls.is_url(place) else os.path.isdir(place)):
        raise finding.not_found(place)
    checked = 0

    def count(nbytes: int) -> None:
        nonlocal checked
        checked += nbytes
        if on_bytes is not None:
            on_bytes(nbytes)

    run, name = urls.parent_of(place)
    storage = urls.open_storage(run)
    try:
        with contextlib.suppress(WriteError):  # problems with it are reported below
            storage.hold(name, MANIFEST)
        files = set[str]()
        faults = tuple(integrity.check_checkpoint(storage, name, count, files.update))
        if not faults and any(ROWS in file for file in files):
            faults = tuple(_check_tables(place))
    finally:
        storage.close()
    return VerifyReport(place, checked, faults)


def _check_tables(place: str) -> Iterator[Fault]:
    """Find problems in rows of tables whose bytes are unchanged."""
    # Here, since it imports torch, which takes seconds.
    from sidesave.client.reading.checkpoint_reader import CheckpointReader
    from sidesave.client.reading.table_rows import SavedTable, tables_in

    with CheckpointReader(place) as reader:
        for fqn, container in tables_in(reader).items():
            try:
                SavedTable(reader, fqn).check()
            except IntegrityError as error:
                yield Fault(rank_file(container, 0, "safetensors"), str(error), fqns=(fqn,))
