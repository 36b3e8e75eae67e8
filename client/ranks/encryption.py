"""The key of a session: agreed on by its ranks, stored wrapped, passed to saves in memory."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

from sidesave.client import encryption
from sidesave.client.encryption import Encryption
from sidesave.client.ranks.group import World
from sidesave.errors import IntegrityError, KeyMissingError, WriteError, WrongKeyError
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.sealing.cipher import KEY_NBYTES
from sidesave.writer_daemon.sealing.keys import (
    MAX_KEYS_NBYTES,
    RUN_KEYS,
    Keys,
    Sealing,
    data_key_of,
)
from sidesave.writer_daemon.storage import urls


class RunEncryption:
    """The key with which one session encrypts; inactive if no key was given."""

    def __init__(self, directory: str, mirror: str, given: Encryption | None) -> None:
        """Read nothing yet; ``mirror`` is "" without one."""
        self.mirror_error: WriteError | IntegrityError | None = None
        """Why the mirror could not be read."""
        self._directory, self._mirror = directory, mirror
        self._given = given
        self._remembered: list[str] = []
        self._keys: Keys | None = None
        self._session_key = b""

    def __bool__(self) -> bool:
        """Whether saves are encrypted."""
        return self._given is not None

    def remember(self, fallback: str) -> None:
        """Register this key for readers of the run, until :meth:`forget`.

        Also registers it for other places of the run's checkpoints.
        """
        if self._given is not None:
            for place in filter(None, (self._directory, self._mirror, fallback)):
                encryption.remember(place, self._given)
                self._remembered.append(place)

    def forget(self) -> None:
        """Undo :meth:`remember`; idempotent."""
        while self._remembered:
            encryption.forget(self._remembered.pop())

    def agree(self, world: World, node: World, session: str) -> None:
        """Check that all ranks have the run's key, and agree on a key of the session.

        Changes nothing on storage. The first rank of each node creates the session's key, and sends
        it wrapped with the user's key.

        Raises:
            KeyMissingError: The run is encrypted, or another rank has a key, and this rank has
                none; on all ranks.
            WrongKeyError: The run, or another rank, has another key; on all ranks.
        """
        key: bytes | None = None
        sent: str | None = None
        with world.raise_together("cannot use the key"):
            key = None if self._given is None else self._given.read()
            if node.rank == 0:
                self._check_mirror(encryption.check_run(self._directory, key), key)
            if key is not None:
                sent = Keys.wrap(key, session, secrets.token_bytes(KEY_NBYTES)).to_bytes().decode()
        wrapped: list[Any] = world.gather("keys", sent)
        with world.raise_together("does not have the key"):
            lacking = [
                rank for rank, each in zip(world.ranks, wrapped, strict=True) if each is None
            ]
            if lacking and len(lacking) < world.size:
                raise KeyMissingError(
                    f"ranks {lacking[:8]} were given no key, and others were: give it to all or "
                    "none"
                )
            if key is not None:
                where = f"the key of rank {node.ranks[0]}"
                self._keys = Keys.from_bytes(
                    wrapped[world.ranks.index(node.ranks[0])].encode(), where
                )
                if not self._keys.is_by(key):
                    raise WrongKeyError(
                        f"key differs from rank {node.ranks[0]}'s: give all ranks the same"
                    )
                self._session_key = self._keys.unwrap(key, where)

    def _check_mirror(self, keys: Keys | None, key: bytes | None) -> None:
        try:
            if self._mirror:
                encryption.check_mirror(self._mirror, keys, key)
        except (WriteError, IntegrityError) as error:  # reported when the mirror is needed
            self.mirror_error = error

    def check(self, checkpoints: Sequence[CheckpointInfo]) -> None:
        """Compare the key with that of checkpoints whose latest, the last, is encrypted.

        Raises like :meth:`agree`.
        """
        if checkpoints and checkpoints[-1].encrypted:
            paths = [info.path for info in reversed(checkpoints) if info.encrypted]
            encryption.check_latest(paths, None if self._given is None else self._given.read())

    def write_down(self) -> None:
        """Record in the run directory that it is encrypted, and with which key; durable.

        Does nothing if that is recorded already.
        """
        if self._keys is not None:
            with contextlib.closing(urls.open_for_writing(self._directory)) as storage:
                if storage.read(RUN_KEYS, MAX_KEYS_NBYTES) is None:
                    storage.replace(RUN_KEYS, self._keys.to_bytes())

    def of_save(self, session: str, sequence: int) -> Sealing:
        """Return the encryption of one save; a key was given and agreed on."""
        assert self._keys is not None
        return Sealing(
            key=data_key_of(self._session_key, session, sequence), keys=self._keys.to_bytes()
        )
