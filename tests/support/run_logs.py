"""Writers of one log in memory, each of which can be stopped before any of its requests, and see it
fail in any way.
"""

import errno
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from sidesave.errors import WriteError
from sidesave.writer_daemon.storage.remote import Bucket
from sidesave.writer_daemon.storage.run_log import RunLog

How = Literal["done", "lost", "late", "failed", "denied"]
"""What becomes of a request: it is carried out; so, but the answer gets lost; it is carried out
some time later, when nobody waits for it any more; it is not carried out; it is refused.
"""
HOW: Final[tuple[How, ...]] = ("done", "lost", "late", "failed", "denied")


class Ended(BaseException):
    """The process was killed in the middle of a request."""


class Objects:
    """What is in the store, and what is still on its way to it."""

    def __init__(self) -> None:
        self.there: dict[str, bytes] = {}
        self.under_way: list[Callable[[], object]] = []

    def create(self, key: str, data: bytes) -> bool:
        return self.there.setdefault(key, data) is data

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.there.pop(key, None)

    def arrive(self, number: int) -> None:
        self.under_way.pop(number)()


class ObjectsBucket(Bucket):
    """A bucket of these objects; ``ask`` says of each request, by its kind, what becomes of it."""

    def __init__(self, objects: Objects, ask: Callable[[str], How] = lambda kind: "done") -> None:
        self.root = "memory://log"
        self._objects, self._ask = objects, ask

    def create(self, key: str, data: bytes) -> bool:
        data = bytes(bytearray(data))  # one of its own, to be known by
        return self._carry_out("create", lambda: self._objects.create(key, data), changes=True)

    def read(self, key: str, max_nbytes: int) -> bytes | None:
        return self._carry_out("read", lambda: self._objects.there.get(key))

    def list_all(self, key: str, after: str = "") -> list[str]:
        return self._carry_out(
            "list",
            lambda: sorted(
                each for each in self._objects.there if each.startswith(f"{key}/") and each > after
            ),
        )

    def remove(self, keys: Sequence[str]) -> None:
        if keys:
            self._carry_out("remove", lambda: self._objects.remove(keys), changes=True)

    def _carry_out(self, kind: str, request: Callable[[], Any], *, changes: bool = False) -> Any:
        how = self._ask(kind)
        if how == "denied":
            raise WriteError(errno.EACCES, "denied", self.root)
        if how == "late" and changes:
            self._objects.under_way.append(request)
        result = request() if how in ("done", "lost") else None
        if how != "done":
            raise WriteError(errno.ETIMEDOUT, "no answer", self.root)
        return result


class Process:
    """One that has a log and does one thing at a time, as far as it is let."""

    def __init__(self, objects: Objects, session: str) -> None:
        self.session = session
        self.log = RunLog(ObjectsBucket(objects, self._ask))
        self.pending: str | None = None
        """The kind of the request that it is about to make."""
        self.error: BaseException | None = None
        """What its last operation has raised."""
        self._thread: threading.Thread | None = None
        self._how: How | None = "done"
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)

    def begin(self, operation: Callable[[], object]) -> None:
        """Run to the first request, or to the end."""
        self.error = None

        def run() -> None:
            try:
                operation()
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                self.error = error
            self._stopped.release()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        self._stopped.acquire()

    def step(self, how: How) -> bool:
        """Let its request end so; whether that was its operation's last one."""
        self._how, self.pending = how, None
        self._go.release()
        self._stopped.acquire()
        return self.pending is None

    def finish(self) -> None:
        while self.pending is not None:
            self.step("done")

    def do(self, operation: Callable[[], object]) -> None:
        """All of an operation, and raise what it raises."""
        self.begin(operation)
        self.finish()
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """Its last request was never made."""
        if self.pending is not None:
            self._how, self.pending = None, None
            self._go.release()
            self._stopped.acquire()
        if self._thread is not None:
            self._thread.join()

    def _ask(self, kind: str) -> How:
        if threading.current_thread() is not self._thread:  # one of many that are made at once
            return "done"
        if self._how is None:
            raise Ended
        self.pending = kind
        self._stopped.release()
        self._go.acquire()
        if self._how is None:
            raise Ended
        return self._how


def seen(objects: Objects) -> dict[str, str]:
    """What a reader finds who comes now."""
    return dict(RunLog(ObjectsBucket(objects)).look().prefixes)


def change(process: Process, name: str, prefix: str | None = "prefix") -> None:
    process.do(lambda: process.log.change({name: prefix}))
