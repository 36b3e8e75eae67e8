"""A mirror in an object store that answers with errors, loses answers, or is away, and daemons that
die beside it.
"""

from pathlib import Path

import pytest
from object_server import After, Fault, ObjectServer
from object_stores import URL, check_store, fail_each_write_once, opened
from trainers import DEADLINE_S, a_state, check, same, wait_until


@pytest.mark.drawn
@pytest.mark.parametrize("fault", [503, "cut", After(503), After("cut")])
def test_what_fails_once_is_copied_all_the_same(
    server: ObjectServer, run: Path, fault: Fault
) -> None:
    with opened(server, run, mirror=URL) as ckpt:
        ckpt.save(1, a_state(1)).mirrored.result(DEADLINE_S)
        failed = fail_each_write_once(server, fault)
        ckpt.save(2, a_state(2)).mirrored.result(DEADLINE_S)
        assert len(failed) >= 6
    check(run, 1, 2)
    check_store(server, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [503, 403, "cut"])
def test_saves_go_on_while_the_store_is_away(
    server: ObjectServer, run: Path, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(server, run, mirror=URL) as ckpt:
        ckpt.save(1, a_state(1)).mirrored.result(DEADLINE_S)
        server.fault = lambda request, number: fault
        handles = [ckpt.save(step, a_state(step)) for step in (2, 3, 4)]
        assert [handle.committed.result(DEADLINE_S).step for handle in handles] == [2, 3, 4]
        wait_until(lambda: "does not work now, and is tried again" in caplog.text)
        assert not any(handle.mirrored.done() for handle in handles)
        assert same(ckpt.load(), a_state(4))
        server.heal()
        ckpt.wait(DEADLINE_S, mirrored=True)
    check(run, 1, 2, 3, 4)
    check_store(server, 1, 2, 3, 4)
