"""The record that a rank leaves if it does not write its part of a save."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sidesave import errors
from sidesave.errors import SidesaveError
from sidesave.writer_daemon.storage.sealed_json import FORMAT_VERSION, get, seal, unseal


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rank's reason not to write, instead of a record; status ``failed`` or ``aborted``."""

    session: str
    step: int
    sequence: int
    rank: int
    world_size: int
    status: str
    error: str
    message: str
    errno: int | None
    path: str | None

    def to_bytes(self) -> bytes:
        """Return the file's content, which begins with its digest."""
        return seal({"format": "sidesave-rank", "version": FORMAT_VERSION, **asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Refusal | None:
        """Parse a refusal; None for a :class:`RankRecord`. Raises as its ``from_bytes``."""
        body = unseal(data, "sidesave-rank", path)
        if body.get("status") not in ("failed", "aborted"):
            return None
        number, where = body.get("errno"), body.get("path")
        return cls(
            **{
                name: get(body, name, int, path)
                for name in ("step", "sequence", "rank", "world_size")
            },
            **{
                name: get(body, name, str, path)
                for name in ("session", "status", "error", "message")
            },
            errno=number if type(number) is int else None,
            path=where if isinstance(where, str) else None,
        )

    def as_error(self) -> SidesaveError:
        """Return the error of this rank's save, to be raised on another rank."""
        text = self.message if self.status == "aborted" else f"rank {self.rank}: {self.message}"
        return errors.from_wire(self.error, text, self.errno, self.path)
