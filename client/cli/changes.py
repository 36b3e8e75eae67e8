"""``sidesave recover``, ``rekey`` and ``rm``: they change a run under its lease, as sessions do."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import sys
import time
from collections.abc import Generator
from typing import Annotated, Final

import typer

from sidesave.client.arguments import check_step
from sidesave.client.cli.console import printable
from sidesave.client.encryption import Encryption
from sidesave.client.runs import finding
from sidesave.client.runs.pins import Pins
from sidesave.client.runs.rekey import exchange_keys
from sidesave.errors import CheckpointNotFoundError, DirectoryInUseError, InvalidArgumentError
from sidesave.writer_daemon.checkpoints.catalog import Catalog
from sidesave.writer_daemon.checkpoints.deletion import GRACE_S, Trash, delete_steps
from sidesave.writer_daemon.checkpoints.info import no_such_step
from sidesave.writer_daemon.commit import recovery
from sidesave.writer_daemon.commit.recovery import Recovery
from sidesave.writer_daemon.format import rollback
from sidesave.writer_daemon.format.manifest import MANIFEST
from sidesave.writer_daemon.format.names import parse_hidden_directory, step_directory
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.lease.observer import Observer
from sidesave.writer_daemon.lease.record import LeaseRecord
from sidesave.writer_daemon.log import HistoryLog, log_recovery
from sidesave.writer_daemon.storage import PosixStorage, Storage, urls

_TAKEOVER_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1
KeyFileOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="The key of encrypted checkpoints: 32 bytes, or 64 hex digits."
    ),
]
KeyEnvOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="An environment variable with that key.")
]
_sleep: Final = time.sleep


@contextlib.contextmanager
def _taken_over(storage: Storage) -> Generator[Lease]:
    """Hold a run's lease; ``DirectoryInUseError``, with the holder, if a live session uses it."""
    view = Observer(storage).look()
    if view.alive:  # including a daemon that still commits the saves of a dead trainer
        who = view.holder or "another session"
        raise DirectoryInUseError(
            errno.EBUSY, f"{who} is using it; wait for it, or stop it", storage.root
        )
    me = LeaseRecord.current(secrets.token_hex(8), os.getpid())
    lease = Lease(storage, me, _TAKEOVER_TIMEOUT_S, lambda: True)
    try:
        yield lease
    finally:
        lease.release()


def _recover(storage: Storage, lease: Lease) -> Recovery:
    result = recovery.recover(storage, lease, f"recover-{os.getpid()}")
    if isinstance(storage, PosixStorage):
        with contextlib.closing(HistoryLog(storage)) as log:
            log_recovery(log, storage, lease.session, result.committed, result.removed)
    return result


# recover ------------------------------------------------------------------------------------------


def recover(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run directory that no live session uses, or its URL."
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be done.")
    ] = False,
) -> None:
    """Commit the complete saves that dead sessions left, and remove the incomplete ones.

    The next session would do so at its start. Exit status 1 means that a leftover could not be
    judged, or that a live session has the directory.
    """
    with contextlib.closing(
        urls.open_for_writing(finding.locate_run(run, urls_too=True))
    ) as storage:
        if not any(parse_hidden_directory(name) for name in storage.list_directory("")):
            typer.echo("there is nothing to recover")
            return
        with _taken_over(storage) as lease:
            if dry_run:
                result = recovery.plan_recovery(
                    storage, lease.session, storage.list_directory("")
                ).expected()
            else:
                result = _recover(storage, lease)
    would = "would be " if dry_run else ""
    for names, done in ((result.committed, "finished"), (result.removed, "removed")):
        for name in names:
            typer.echo(f"{name}: {would}{done}")
    for name in result.left:
        typer.echo(f"{name}: could not be judged, so it stays")
    if result.left:
        raise typer.Exit(1)


# rekey --------------------------------------------------------------------------------------------


def encryption_of(key_file: str | None, key_env: str | None) -> Encryption | None:
    """Return the key that two options name, or None."""
    return None if key_file is None and key_env is None else Encryption(key=key_file, env=key_env)


def rekey(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run directory that no live session uses, or its URL."
        ),
    ],
    key_file: KeyFileOption = None,
    key_env: KeyEnvOption = None,
    new_key_file: KeyFileOption = None,
    new_key_env: KeyEnvOption = None,
) -> None:
    """Exchange the key of an encrypted run, without writing its data again.

    Leftovers of dead sessions are committed or removed first. If it is interrupted, the same
    command continues. Copies of the run, such as a mirror, are runs of their own and keep the old
    key. With a copy of the old small files, the old key still opens the checkpoints that were saved
    with it.
    """
    old, new = encryption_of(key_file, key_env), encryption_of(new_key_file, new_key_env)
    if old is None or new is None:
        raise InvalidArgumentError(
            "give both keys: --key-file or --key-env, and --new-key-file or --new-key-env"
        )
    directory = finding.locate_run(run, urls_too=True)
    keys = old.read(), new.read()
    with (
        contextlib.closing(urls.open_for_writing(directory)) as storage,
        _taken_over(storage) as lease,
    ):
        _recover(storage, lease)
        count = exchange_keys(storage, lease, *keys)
    typer.echo(
        printable(f"{directory}: the keys of {count} checkpoint{'s' * (count != 1)} were exchanged")
    )


# rm -----------------------------------------------------------------------------------------------


def rm(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run directory that no live session uses, or its URL."
        ),
    ],
    steps: Annotated[
        list[int], typer.Argument(metavar="STEP...", min=0, help="The steps to delete.")
    ],
) -> None:
    """Delete checkpoints of a run, without asking.

    If a step does not exist, is pinned, or is the latest, nothing is deleted. Leftovers of dead
    sessions are committed or removed first, like sidesave recover does. A checkpoint that is being
    read is not deleted, and ends the command. The mirror of a run is a run of its own, from which
    this command deletes nothing.
    """
    directory, wanted = finding.locate_run(run, urls_too=True), {*map(check_step, steps)}
    with (
        contextlib.closing(urls.open_for_writing(directory)) as storage,
        _taken_over(storage) as lease,
    ):
        _recover(storage, lease)
        names = {*storage.list_directory("")}
        latest_first = [info.step for info in reversed(finding.catalog_of(directory).all())]
        for step in sorted(wanted):
            if step_directory(step) not in names:
                raise CheckpointNotFoundError(
                    errno.ENOENT, no_such_step(step, latest_first), directory
                )
        if pinned := sorted(wanted & Pins(directory).read()):
            steps_text = ", ".join(map(str, pinned))
            raise InvalidArgumentError(
                f"{directory}: pinned: {steps_text}; release them with CheckpointManager.unpin"
            )
        # The latest comes first, so that it is refused before any deletion; unreadable ones come
        # last.
        places = {step: place for place, step in enumerate(latest_first)}
        ordered = sorted(wanted, key=lambda step: (places.get(step, len(places)), step))
        rollbacks = rollback.read(storage)
        catalog, trash = Catalog(directory, storage=storage), list[str]()
        for step in ordered:
            result = delete_steps(
                storage,
                lease,
                [step],
                sys.maxsize,
                catalog=catalog,
                rollbacks=rollbacks,
                spare_read=True,
            )
            if step in result.failures:
                raise result.failures[step]
            trash += result.trash
            typer.echo(printable(f"{directory}/{step_directory(step)}: deleted"))
        _remove(storage, lease, trash)


def _remove(storage: Storage, lease: Lease, names: list[str]) -> None:
    """Remove the bytes of deleted steps.

    Without locks, they are removed after a grace for readers, unless a job waits for the lease.
    """
    trash = Trash(storage)
    trash.add(names)
    if any(storage.is_shared(f"{name}/{MANIFEST}") is None for name in names):
        typer.echo(
            f"the bytes are removed in {GRACE_S:.0f} s, so that readers can finish", err=True
        )
        lease.tell_trainer_gone()
        while not trash.is_due():
            if lease.end_by < math.inf:  # another session waits for the lease, and will remove them
                return
            _sleep(_POLL_S)
    trash.empty(everything=True)
    if trash.error is not None:
        raise trash.error
