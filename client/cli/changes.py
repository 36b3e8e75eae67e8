"""``sidesave recover`` and ``sidesave rm``: what changes a run, under its lease, as the start of a session would."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import sys
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Annotated, Final

import typer

from sidesave.client.arguments import check_step
from sidesave.client.cli.console import printable
from sidesave.client.encryption import Encryption
from sidesave.client.runs import catalog, finding
from sidesave.client.runs.pins import Pins
from sidesave.client.runs.rekey import exchange_keys
from sidesave.errors import CheckpointNotFoundError, DirectoryInUseError, InvalidArgumentError
from sidesave.writer_daemon.commit import commit
from sidesave.writer_daemon.commit.commit import Recovery
from sidesave.writer_daemon.format import rollback
from sidesave.writer_daemon.format.manifest import MANIFEST, no_such_step, parse_hidden_directory, step_directory
from sidesave.writer_daemon.lease.lease import Lease, Observer
from sidesave.writer_daemon.lease.record import LeaseRecord
from sidesave.writer_daemon.log import HistoryLog, log_recovery
from sidesave.writer_daemon.storage import InputFile, OutputFile, PosixStorage, Storage, urls

_TAKEOVER_TIMEOUT_S: Final = 60.0
_TRASH_GRACE_S: Final = 30.0
"""How long a deleted checkpoint stays readable for whoever has opened it, where no lock tells of readers."""
_POLL_S: Final = 0.1
KeyFileOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="The key of what is encrypted: 32 bytes, or 64 hex digits.")
]
KeyEnvOption = Annotated[str | None, typer.Option(metavar="NAME", help="An environment variable with that key.")]
_sleep: Final = time.sleep


@contextlib.contextmanager
def _taken_over(storage: Storage) -> Generator[Lease]:
    """The lease of a run that no live session uses; else ``DirectoryInUseError`` says which one does."""
    view = Observer(storage).look()
    if view.alive:  # a daemon that finishes what a dead trainer had staged included: it is left in peace
        who = view.holder or "another session"
        raise DirectoryInUseError(errno.EBUSY, f"{who} is using it; wait for it, or stop it", storage.root)
    me = LeaseRecord.current(secrets.token_hex(8), os.getpid())
    lease = Lease(storage, me, _TAKEOVER_TIMEOUT_S, lambda: True)
    try:
        yield lease
    finally:
        lease.release()


def _recover(storage: Storage, lease: Lease) -> Recovery:
    recovery = commit.recover(storage, lease, f"recover-{os.getpid()}")
    if isinstance(storage, PosixStorage):
        with contextlib.closing(HistoryLog(storage)) as log:
            log_recovery(log, storage, lease.session, recovery.committed, recovery.removed)
    return recovery


# recover ---------------------------------------------------------------------------------------------------------


def recover(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory that no live session uses, or its URL.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
) -> None:
    """Finish what dead sessions left complete, remove the rest.

    The next session would do so at its start. Exit status 1 means that something could not be judged, or that a live
    session has the directory.
    """
    with contextlib.closing(urls.open_for_writing(finding.locate_run(run, urls_too=True))) as storage:
        if not any(parse_hidden_directory(name) for name in storage.list_directory("")):
            typer.echo("there is nothing to recover")
            return
        with _taken_over(storage) as lease:
            recovery = _recover(DryRun(storage) if dry_run else storage, lease)
    would = "would be " if dry_run else ""
    for names, done in ((recovery.committed, "finished"), (recovery.removed, "removed")):
        for name in names:
            typer.echo(f"{name}: {would}{done}")
    for name in recovery.left:
        typer.echo(f"{name}: could not be judged, so it stays")
    if recovery.left:
        raise typer.Exit(1)


# rekey -----------------------------------------------------------------------------------------------------------


def encryption_of(key_file: str | None, key_env: str | None) -> Encryption | None:
    """What two options say of a key."""
    return None if key_file is None and key_env is None else Encryption(key=key_file, env=key_env)


def rekey(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory that no live session uses, or its URL.")],
    key_file: KeyFileOption = None,
    key_env: KeyEnvOption = None,
    new_key_file: KeyFileOption = None,
    new_key_env: KeyEnvOption = None,
) -> None:
    """Exchange the key of an encrypted run, without writing its data again.

    What dead sessions have left is finished or removed before. Interrupted, the same command goes on. Other places of
    its checkpoints, such as a mirror, are runs of their own. A copy of the old small files, and the old key, still open
    what was saved before.
    """
    old, new = encryption_of(key_file, key_env), encryption_of(new_key_file, new_key_env)
    if old is None or new is None:
        raise InvalidArgumentError("say both keys: --key-file or --key-env, and --new-key-file or --new-key-env")
    directory = finding.locate_run(run, urls_too=True)
    keys = old.read(), new.read()
    with contextlib.closing(urls.open_for_writing(directory)) as storage, _taken_over(storage) as lease:
        _recover(storage, lease)
        count = exchange_keys(storage, lease, *keys)
    typer.echo(printable(f"{directory}: the keys of {count} checkpoint{'s' * (count != 1)} were exchanged"))


# rm --------------------------------------------------------------------------------------------------------------


def rm(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory that no live session uses, or its URL.")],
    steps: Annotated[list[int], typer.Argument(metavar="STEP...", min=0, help="The steps to delete.")],
) -> None:
    """Delete checkpoints of a run, without asking.

    None is deleted where one is not there, is pinned, or is the latest. What dead sessions have left is finished or
    removed before, as sidesave recover does. One that is being read stays, which ends it. The mirror of a run is a run
    of its own, from which nothing is deleted here.
    """
    directory, wanted = finding.locate_run(run, urls_too=True), {*map(check_step, steps)}
    with contextlib.closing(urls.open_for_writing(directory)) as storage, _taken_over(storage) as lease:
        _recover(storage, lease)
        names = {*storage.list_directory("")}
        latest_first = [info.step for info in reversed(catalog.scan(directory))]
        for step in sorted(wanted):
            if step_directory(step) not in names:
                raise CheckpointNotFoundError(errno.ENOENT, no_such_step(step, latest_first), directory)
        if pinned := sorted(wanted & Pins(directory).read()):
            steps_text = ", ".join(map(str, pinned))
            raise InvalidArgumentError(f"{directory}: pinned: {steps_text}; CheckpointManager.unpin lets them go")
        # The latest first, which is refused before anything is deleted, and last what has no place among the commits.
        places = {step: place for place, step in enumerate(latest_first)}
        rollbacks, trash = rollback.read(storage), list[str]()
        for step in sorted(wanted, key=lambda step: (places.get(step, len(places)), step)):
            name = commit.delete(storage, lease, step, sys.maxsize, spare_read=True, rollbacks=rollbacks)
            trash += [name] if name else []
            typer.echo(printable(f"{directory}/{step_directory(step)}: deleted"))
        _remove(storage, lease, trash)


def _remove(storage: Storage, lease: Lease, trash: list[str]) -> None:
    """Remove the bytes of what was deleted; where no locks tell of readers they have some time, unless a job waits."""
    if any(storage.is_shared(f"{name}/{MANIFEST}") is None for name in trash):
        typer.echo(f"the bytes go in {_TRASH_GRACE_S:.0f} s, for whoever reads them now", err=True)
        lease.tell_trainer_gone()
        end = time.monotonic() + _TRASH_GRACE_S
        while time.monotonic() < end:
            if lease.end_by < math.inf:  # it removes them
                return
            _sleep(_POLL_S)
    for name in trash:
        storage.remove_tree(name)


# A dry run -------------------------------------------------------------------------------------------------------


class DryRun(Storage):
    """A run that only seems to change: directories seem to be renamed and removed, and what is read is as it was."""

    def __init__(self, storage: Storage) -> None:
        self.root = storage.root
        self._storage = storage
        self._sources = {name: name for name in storage.list_directory("")}

    def free_nbytes(self) -> int:
        """Those of the storage."""
        return self._storage.free_nbytes()

    def make_directory(self, name: str, mode: int) -> bool:
        """Seem to create it; nothing is found in it."""
        return self._sources.setdefault(name, name) == name

    def list_directory(self, name: str) -> list[str]:
        """The names that would be there."""
        return self._storage.list_directory(self._source(name)) if name else list(self._sources)

    def create(self, path: str, nbytes: int, final: str | None = None) -> OutputFile:
        """A file that discards everything."""
        return _Nothing()

    def read(self, path: str, max_nbytes: int) -> bytes | None:
        """The file as it is."""
        return self._storage.read(self._source(path), max_nbytes)

    def open(self, path: str) -> AbstractContextManager[InputFile]:
        """The file as it is."""
        return self._storage.open(self._source(path))

    def is_shared(self, path: str) -> bool | None:
        """As it is."""
        return self._storage.is_shared(self._source(path))

    def publish(self, temporary: str, final: str) -> bool:
        """Seem to."""
        return True

    def replace(self, path: str, data: bytes) -> None:
        """Seem to."""

    def rename_directory(self, source: str, target: str) -> None:
        """Seem to rename it: its content appears under the new name."""
        self._sources[target] = self._sources.pop(source)

    def open_to_readers(self, name: str) -> None:
        """Seem to."""

    def sync_directory(self, name: str) -> None:
        """Nothing has changed."""

    def remove(self, path: str) -> None:
        """Seem to."""
        self._sources.pop(path, None)

    def remove_tree(self, name: str) -> None:
        """Seem to."""
        self._sources.pop(name, None)

    def close(self) -> None:
        """The storage stays its owner's."""

    def _source(self, path: str) -> str:
        first, slash, rest = path.partition("/")
        return self._sources.get(first, first) + slash + rest


class _Nothing(OutputFile):
    def write_at(self, data: memoryview, offset: int) -> None:
        """Drop it."""

    def finish(self, nbytes: int) -> None:
        """There is nothing to finish."""

    def close(self) -> None:
        """There is nothing to close."""
