"""What every daemon of a connection is told at its start."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sidesave.writer_daemon.protocol import Boot


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """The options of a daemon; see ``protocol.Boot``."""

    directory: str
    fallback_directory: str
    session: str
    rank: int
    world_size: int
    retries: int
    stall_timeout_s: float
    takeover_timeout_s: float
    commit_timeout_s: float
    nice: int
    io_class: str
    cpus: tuple[int, ...]

    def boot(self, attempt: int, endpoint: str, token: bytes, *, resumes: bool) -> Boot:
        """The first message to one daemon, from this process."""
        return Boot(
            attempt=attempt,
            endpoint=endpoint,
            token=token,
            directory=self.directory,
            fallback_directory=self.fallback_directory,
            retries=self.retries,
            session=self.session,
            rank=self.rank,
            world_size=self.world_size,
            commit_timeout_s=self.commit_timeout_s,
            trainer_pid=os.getpid(),
            resumes=resumes,
            stall_timeout_s=self.stall_timeout_s,
            takeover_timeout_s=self.takeover_timeout_s,
            nice=self.nice,
            io_class=self.io_class,
            cpus=self.cpus,
        )
