"""Daemons that claim to be on another machine: nobody here can look for them by their pids, and
counters decide.

Imported by a daemon's ``sitecustomize``, so it is light to import.
"""

from __future__ import annotations

import sys
from pathlib import Path

from network_storage import ELSEWHERE, PERIOD_S
from trainers import Orders


class OrdersElsewhere(Orders):
    """Orders to the daemons of trainers that are started with this :attr:`environment`, and are
    elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        self.environment: dict[str, str] = {}
        super().__init__(folder, self.environment.__setitem__)
        with (folder / "sitecustomize.py").open("a") as script:
            script.write("import elsewhere\nelsewhere.pretend()\n")


def pretend() -> None:
    """In a process that has just begun: a daemon has another boot id from here on, and a short
    period.
    """
    if "sidesave.writer_daemon" not in sys.orig_argv:
        return
    from sidesave.writer_daemon.lease import record
    from sidesave.writer_daemon.lease.lease import Lease

    record.boot_id = lambda: ELSEWHERE
    Lease.__init__.__defaults__ = (PERIOD_S,)  # that of period_s, which has been taken in by now
