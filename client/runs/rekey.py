"""Exchanges the key of an encrypted run: replaces small files one by one, and writes no data."""

from __future__ import annotations

import dataclasses

from sidesave.errors import KeyMissingError, WrongKeyError
from sidesave.writer_daemon.format.names import parse_hidden_directory, parse_step_directory
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.sealing.keys import KEYS, MAX_KEYS_NBYTES, RUN_KEYS, Keys
from sidesave.writer_daemon.storage import Storage


def exchange_keys(storage: Storage, lease: Lease, old: bytes, new: bytes) -> int:
    """Wrap a run's keys with ``new`` instead of ``old``; return the number of checkpoints.

    Needs the lease. An interrupted exchange for the same key is continued. No session can begin
    until it is complete.

    Raises:
        WrongKeyError: Something in the run is encrypted with neither key; then nothing has changed.
        KeyMissingError: Nothing in the run is encrypted.
        IntegrityError: The keys of a checkpoint are damaged; then nothing has changed.
        WriteError: Storage refused.
    """
    found = {path: keys for path in _paths(storage) if (keys := _read(storage, path)) is not None}
    odd = [path for path, keys in found.items() if not (keys.is_by(old) or keys.is_by(new))]
    if odd:
        raise WrongKeyError(
            f"{storage.root}: encrypted with another key than either of these: {', '.join(odd[:5])}"
        )
    if not found:
        raise KeyMissingError(
            f"{storage.root}: nothing is encrypted here, so there is no key to exchange"
        )
    of_run, count = found.pop(RUN_KEYS, None), 0
    if of_run is not None and of_run.is_by(old):
        following = dataclasses.replace(of_run, following=of_run.followed_by(new))
        storage.replace(RUN_KEYS, following.to_bytes())
    wrapped: dict[str, Keys] = {}

    def wrap(path: str, keys: Keys) -> bytes:
        if keys.session not in wrapped:  # one for all checkpoints of a session
            wrapped[keys.session] = Keys.wrap(
                new, keys.session, keys.unwrap(old, f"{storage.root}/{path}")
            )
        return wrapped[keys.session].to_bytes()

    for path, keys in found.items():
        if not keys.is_by(new):
            lease.check()
            storage.replace(path, wrap(path, keys))
            count += 1
    for path in found:
        directory = path.removesuffix(f"/{KEYS}")
        for name in storage.list_directory(directory):
            if name.startswith(f"{KEYS}."):  # of an exchange that was killed
                storage.remove(f"{directory}/{name}")
    if of_run is not None and not of_run.is_by(new):
        lease.check()
        storage.replace(RUN_KEYS, wrap(RUN_KEYS, of_run))
    return count


def _paths(storage: Storage) -> list[str]:
    names = storage.list_directory("")
    own = [
        name
        for name in names
        if parse_step_directory(name) is not None or parse_hidden_directory(name) is not None
    ]
    return [RUN_KEYS, *(f"{name}/{KEYS}" for name in own)]


def _read(storage: Storage, path: str) -> Keys | None:
    data = storage.read(path, MAX_KEYS_NBYTES)
    return None if data is None else Keys.from_bytes(data, f"{storage.root}/{path}")
