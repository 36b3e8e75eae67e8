"""The checks of ``sidesave doctor`` and their findings.

A check is a generator of verdicts (status, finding, remedy). It fails if it raises ``OSError`` or
an error of sidesave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from sidesave.errors import SidesaveError

Status = Literal["ok", "warn", "fail"]
Verdict = tuple[Status, str, str]
Check = Callable[[], Iterator[Verdict]]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a check; ``remedy`` says what to do if the status is not ``"ok"``."""

    name: str
    status: Status
    finding: str
    remedy: str = ""


def run(name: str, check: Check, remedy: str) -> Iterator[Finding]:
    """Run a check and yield its findings; if it raises an error, ``remedy`` is used."""
    try:
        for verdict in check():
            yield Finding(name, *verdict)
    except (SidesaveError, OSError, ImportError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        yield Finding(name, "fail", text or type(error).__name__, remedy)


def gb(nbytes: float) -> str:
    """Format a size for a finding."""
    return f"{nbytes / 1e9:,.1f} GB"
