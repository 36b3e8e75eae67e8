"""A mirror in an object store that answers with errors, loses answers, or is away, and daemons that die beside it."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
from object_server import After, Fault, Killer, ObjectServer, Request
from object_stores import URL, WRITES, check_store
from trainers import DEADLINE_S, a_state, check, daemon, same, wait_until

from sidesave import Checkpointer
from sidesave.client.daemon_link import connection


def opened(server: ObjectServer, run: Path, **options: object) -> Checkpointer:
    """A checkpointer whose daemon copies to this server, and tries a request once more at most by itself."""
    store = {**server.options, "retry_config": {"max_retries": 1}}
    return Checkpointer(run, mirror=URL, storage_options=store, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.drawn
@pytest.mark.parametrize("fault", [503, "cut", After(503), After("cut")])
def test_what_fails_once_is_copied_all_the_same(server: ObjectServer, run: Path, fault: Fault) -> None:
    with opened(server, run) as ckpt:
        ckpt.save(1, a_state(1)).mirrored.result(DEADLINE_S)
        failed: Counter[str] = Counter()

        def each_once(request: Request, number: int) -> Fault:
            if request.method not in WRITES:
                return None
            failed[request.key] += 1
            return fault if failed[request.key] == 1 else None

        server.fault = each_once
        ckpt.save(2, a_state(2)).mirrored.result(DEADLINE_S)
        assert len(failed) >= 6
    check(run, 1, 2)
    check_store(server, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [503, 403, "cut"])
def test_saves_go_on_while_the_store_is_away(
    server: ObjectServer, run: Path, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(server, run) as ckpt:
        ckpt.save(1, a_state(1)).mirrored.result(DEADLINE_S)
        server.fault = lambda request, number: fault
        handles = [ckpt.save(step, a_state(step)) for step in (2, 3, 4)]
        assert [handle.committed.result(DEADLINE_S).step for handle in handles] == [2, 3, 4]
        wait_until(lambda: "does not work now, and is tried again" in caplog.text)
        assert not any(handle.mirrored.done() for handle in handles)
        assert same(ckpt.load(), a_state(4))
        server.fault = lambda request, number: None
        ckpt.wait(DEADLINE_S, mirrored=True)
    check(run, 1, 2, 3, 4)
    check_store(server, 1, 2, 3, 4)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, "cut"], ids=["carried out", "lost"])
def test_no_copy_is_lost_by_a_death_at_any_of_its_requests(
    server: ObjectServer, run: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_MAX_BACKOFF_S", 0.05)
    killer = Killer(server)
    with opened(server, run) as ckpt:
        step = 0
        ckpt.save(step, a_state(step)).mirrored.result(DEADLINE_S)
        for step in itertools.count(1):
            killed = daemon(ckpt)
            killer.arm(killed, after=step - 1, fault=fault)
            ckpt.save(step, a_state(step)).mirrored.result(DEADLINE_S)
            if not killer.disarm():
                break  # a copy has not so many requests
            wait_until(lambda killed=killed: ckpt.daemon_pid not in (None, killed))
    assert step > 10
    check(run, *range(step + 1))
    check_store(server, *range(step + 1))
