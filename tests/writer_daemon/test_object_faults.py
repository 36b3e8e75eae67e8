"""Any request of a save to an object store fails, in any way: a checkpoint is whole or not there,
and none is lost.
"""

import dataclasses
import datetime
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
from campaigns import Share
from object_server import After, Fault, ObjectServer, Request, serving
from object_sessions import begin, open_run
from sessions import OLD, Session, State, a_state, check, same

from sidesave.client.loading import load as loader
from sidesave.client.reading.verify import verify
from sidesave.client.runs.finding import catalog_of
from sidesave.errors import (
    CommitUnknownError,
    SidesaveError,
    WriteError,
)
from sidesave.writer_daemon.commit import commit
from sidesave.writer_daemon.format import rollback
from sidesave.writer_daemon.storage import run_log, urls

_numbers = itertools.count()
_TENSORS = "model.rank-00000.safetensors"


# Any request fails --------------------------------------------------------------------------------

IMPATIENT = {
    "max_retries": 2,
    "retry_timeout": datetime.timedelta(seconds=20),
    "backoff": {
        "init_backoff": datetime.timedelta(milliseconds=1),
        "max_backoff": datetime.timedelta(milliseconds=2),
        "base": 2,
    },
}
FAULTS: dict[str, tuple[Fault, Fault]] = {
    "500": (500, None),
    "503": (503, None),
    "cut": ("cut", None),
    "403": (403, None),
    "404": (404, None),
    "500 after success": (After(500), None),
    "403 after success": (After(403), None),
    "412 after success": (After(412), None),
    "cut after success": (After("cut"), None),
    "403 for good": (403, 403),
    "503 for good": (503, 503),
    "no network for good": ("cut", "cut"),
    "no network after success": (After("cut"), "cut"),
}
"""Of one request, and of all after it."""


def a_large_state(seed: int) -> State:
    """Its model is uploaded in parts, of which there are two."""
    state = a_state(seed)
    return state | {"model": {**state["model"], "large": state["model"]["w"].repeat(10, 1)[:2900]}}


class Failing:
    """The server fails a request from here on, and those after it."""

    def __init__(self, server: ObjectServer, last: int, fault: Fault, later: Fault) -> None:
        self.left, self.fault, self.later = last, fault, later
        self._lock = threading.Lock()
        server.fault = self

    def __call__(self, request: Request, number: int) -> Fault:
        with self._lock:
            self.left -= 1
            return self.fault if self.left == -1 else self.later if self.left < -1 else None


@pytest.fixture
def server(server: ObjectServer, end_all: None, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    monkeypatch.setattr(run_log, "_PAUSE_S", 0.0)
    return server


def tried(session: Session, save: Any) -> str:
    """What the daemon would report, and has done then."""
    try:
        session.write(save)
        session.commit(save)
    except CommitUnknownError:
        return "unknown"
    except SidesaveError:
        commit.reclaim(session.storage, save)
        return "failed"
    return "committed"


def require_whole(root: str, old: State | None, new: State) -> str:
    """Which of both the step is; it is nothing else."""
    found = {info.step: info for info in catalog_of(root).all()}
    check(root, 50, a_state(50))
    if 100 not in found:
        assert old is None
        return "none"
    assert verify(found[100]).ok
    kind = "old" if found[100].sequence == 2 else "new"
    assert same(loader.load(found[100]), new if old is None or kind == "new" else old)
    return kind


def counted(server: ObjectServer) -> dict[str, int]:
    """How many requests of each kind there were since this was asked last."""
    found = {
        method: server.count(method)
        for method in sorted({request.method for request in server.requests})
    }
    server.requests.clear()
    return found


def test_a_save_a_deletion_and_a_taking_over_take_so_many_requests(server: ObjectServer):
    """docs/remote.md says so."""
    root = "s3://bucket/run"
    with urls.using(server.options):
        session = begin(root)
        session.save(1, a_state(1), sequence=1)
        server.requests.clear()
        save = session.stage(2, a_large_state(2), sequence=2)
        commit.refuse_taken(session.storage, save)
        assert counted(server) == {}, "who writes knows its directories"
        session.write(save)
        # The directory, the small item, the digests of both, plain data and the record; the large
        # item in parts.
        put = {"PUT-NEW": 1 + 1 + 2 + 2, "START": 1, "PART": 2, "COMPLETE": 1}
        assert counted(server) == put
        session.commit(save)
        assert counted(server) == {"PUT-NEW": 2, "LIST": 2, "GET": 1}
        assert session.storage.list_directory("")  # as the daemon does before
        rollbacks = rollback.read(session.storage)
        trash = session.delete(1, 1, rollbacks=rollbacks)
        assert counted(server) == {"PUT-NEW": 1, "LIST": 1, "GET": 5}
        assert trash is not None
        session.storage.remove_tree(trash)
        assert counted(server) == {"PUT-NEW": 1, "LIST": 2, "DELETE-MANY": 1}
        session.end()
        server.requests.clear()
        following = open_run(root)
        following.take_over(OLD)
        log = {"LIST": 1, "GET": 5}
        assert counted(server) == {
            "PUT-NEW": 2 + 1,
            "GET": 1 + log["GET"],
            "LIST": log["LIST"] + 1,
            "DELETE-MANY": 1,
        }


@pytest.mark.slow
@pytest.mark.parametrize("replacing", [False, True], ids=["a new step", "an overwritten step"])
@pytest.mark.parametrize("name", FAULTS)
def test_any_request_of_a_save_fails_and_no_checkpoint_is_half_or_lost(
    server: ObjectServer, share: Share, name: str, *, replacing: bool
):
    old, new = a_state(1), a_large_state(2)
    fault, later = FAULTS[name]
    outcomes: set[tuple[str, str]] = set()
    with urls.using({**server.options, "retry_config": IMPATIENT}):
        for last in share.numbers():
            root = f"s3://bucket/run-{last}"
            server.heal()
            session = begin(root, OLD)
            session.save(50, a_state(50), sequence=1)
            if replacing:
                session.save(100, old, sequence=2)
            save = session.stage(100, new, sequence=3, replace=replacing)
            failing = Failing(server, last, fault, later)
            told = tried(session, save)
            server.heal()
            if failing.left >= 0:
                assert told == "committed"
                session.close()
                share.is_past(last)
                continue
            # a daemon in the place of this one has the save again
            if last % 2 and told != "committed":
                session.end()
                session.respawn()
                session.recover()
                session.resume(dataclasses.replace(save, retry=True))
                told = "committed"
            session.end()
            following = begin(root)
            kind = require_whole(root, old if replacing else None, new)
            assert kind == "new" or told != "committed"
            outcomes.add((told, kind))
            following.save(100, old, sequence=4, replace=True)
            following.close()
            session._pool.release(session)
            session._pool.close()
    assert len(outcomes) > 0


@pytest.mark.slow
def test_any_request_of_a_save_is_carried_out_long_after_it_was_given_up(
    server: ObjectServer, share: Share
):
    """As late as that the next session has taken over, and judged what it had found."""
    old, new = a_state(1), a_large_state(2)
    impatient = {"retry_config": IMPATIENT, "client_options": {"timeout": "400ms"}}
    with urls.using(server.options):
        for last in share.numbers():
            root = f"s3://bucket/run-{last}"
            with urls.using({**server.options, **impatient}):
                session = begin(root, OLD)
            session.save(50, a_state(50), sequence=1)
            save = session.stage(100, new, sequence=3)
            gate, count = threading.Event(), itertools.count()

            def hold(request: Request, number: int) -> Fault:
                if next(count) == last:  # noqa: B023
                    gate.wait(300)  # noqa: B023
                return None

            server.fault = hold
            told = tried(session, save)
            if next(count) <= last:
                gate.set()
                session.close()
                share.is_past(last)
                continue
            session.end()
            following = begin(root)
            kind = require_whole(root, None, new)
            assert kind == "new" or told != "committed"
            gate.set()
            server.wait_until_idle()
            assert require_whole(root, None, new) == kind
            following.save(100, old, sequence=4, replace=True)
            check(root, 100, old)
            following.end()
            begin(root, "a" * 16).close()
            check(root, 100, old)
            for each in (session, following):
                each._pool.release(each)
                each._pool.close()


@pytest.mark.parametrize("nbytes", [100, 3 << 20, 12 << 20], ids=["kept", "one request", "parts"])
def test_a_file_of_one_piece_that_the_store_refuses_is_a_write_error(tmp_path: Path, nbytes: int):
    (tmp_path / "bucket").mkdir()
    with serving(tmp_path) as server, urls.using({**server.options, "retry_config": IMPATIENT}):
        run = open_run("s3://bucket/run")
        run.take_over(OLD)
        directory = f".step-00000001.{OLD}.partial"
        run.make_directory(directory, 0o700)
        server.fault = lambda request, number: 400 if request.key.endswith("file") else None
        with pytest.raises(WriteError, match="400"):
            run.publish_bytes(directory, "file", bytes(nbytes), "1")
        server.heal()
        run.publish_bytes(directory, "file", bytes(nbytes), "1")
        assert run.read(f"{directory}/file", nbytes) == bytes(nbytes)
