"""The key of a session: agreed on by its ranks, written down wrapped, and given to each save in memory alone."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

from sidesave.client import encryption
from sidesave.client.encryption import Encryption
from sidesave.client.ranks.group import World
from sidesave.errors import KeyMissingError, WrongKeyError
from sidesave.writer_daemon.sealing.cipher import KEY_NBYTES
from sidesave.writer_daemon.sealing.keys import MAX_KEYS_NBYTES, RUN_KEYS, Keys, Sealing, data_key_of
from sidesave.writer_daemon.storage import urls


class RunEncryption:
    """What one session encrypts with; nothing, where no key was given."""

    def __init__(self, directory: str, mirror: str, given: Encryption | None) -> None:
        """Nothing is read yet; an empty ``mirror`` is none."""
        self._directory, self._mirror = directory, mirror
        self._given = given
        self._remembered: list[str] = []
        self._keys: Keys | None = None
        self._session_key = b""

    def __bool__(self) -> bool:
        """Whether saves are encrypted."""
        return self._given is not None

    def remember(self, fallback: str) -> None:
        """Have the run, and the other places of its checkpoints, read with this key, until :meth:`forget`."""
        if self._given is not None:
            for place in filter(None, (self._directory, self._mirror, fallback)):
                encryption.remember(place, self._given)
                self._remembered.append(place)

    def forget(self) -> None:
        """Take back :meth:`remember`; idempotent."""
        while self._remembered:
            encryption.forget(self._remembered.pop())

    def agree(self, world: World, node: World, session: str) -> None:
        """Find out whether all ranks have the run's key, and have one key of the session; changes nothing on storage.

        The first rank of each node makes a session's key for it, and sends it wrapped: whoever has the user's has it.

        Raises:
            KeyMissingError: The run is encrypted, or another rank has a key, and this one has none; on all ranks.
            WrongKeyError: The run, or another rank, has another key; on all ranks.
        """
        key: bytes | None = None
        sent: str | None = None
        with world.raise_together("cannot use the key"):
            key = None if self._given is None else self._given.read()
            if node.rank == 0:
                encryption.check_run(self._directory, key, self._mirror)
            if key is not None:
                sent = Keys.wrap(key, session, secrets.token_bytes(KEY_NBYTES)).to_bytes().decode()
        wrapped: list[Any] = world.gather("keys", sent)
        with world.raise_together("does not have the key"):
            lacking = [rank for rank, each in zip(world.ranks, wrapped, strict=True) if each is None]
            if lacking and len(lacking) < world.size:
                raise KeyMissingError(f"ranks {lacking[:8]} were given no key, and others were: give it to all or none")
            if key is not None:
                where = f"the key of rank {node.ranks[0]}"
                self._keys = Keys.from_bytes(wrapped[world.ranks.index(node.ranks[0])].encode(), where)
                if not self._keys.is_by(key):
                    raise WrongKeyError(f"it is another one than rank {node.ranks[0]} has: give all ranks the same")
                self._session_key = self._keys.unwrap(key, where)

    def write_down(self) -> None:
        """Write into the run directory that it is encrypted, and with which key, where nothing says so; durable."""
        if self._keys is not None:
            with contextlib.closing(urls.open_for_writing(self._directory)) as storage:
                if storage.read(RUN_KEYS, MAX_KEYS_NBYTES) is None:
                    storage.replace(RUN_KEYS, self._keys.to_bytes())

    def of_save(self, session: str, sequence: int) -> Sealing | None:
        """How a save is encrypted."""
        if self._keys is None:
            return None
        return Sealing(key=data_key_of(self._session_key, session, sequence), keys=self._keys.to_bytes())
