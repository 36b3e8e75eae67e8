"""Saves to an object store that answers with errors, loses answers, or counts what it is asked."""

import errno
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import campaigns
import pytest
import torch
from campaigns import Share
from object_server import After, Fault, Killer, ObjectServer, Refusal, Request
from object_stores import URL, WRITES, check_store, fail_each_write_once, opened
from trainers import (
    DEADLINE_S,
    Traces,
    Trainer,
    a_state,
    check_step,
    commit,
    daemon,
    same,
    size_of,
)

import sidesave
from sidesave import Checkpointer, FailureOptions
from sidesave.errors import NoSpaceError, SidesaveError, WriteError


def writes_fail(fault: Fault) -> Callable[[Request, int], Fault]:
    return lambda request, number: fault if request.method in WRITES else None


# What is asked ------------------------------------------------------------------------------------


def test_a_save_takes_few_requests(server: ObjectServer) -> None:
    with opened(server) as ckpt:
        commit(ckpt, 1)
        began = len(server.requests)
        ckpt.save(2, {"model": a_state(2)["model"]}).committed.result(DEADLINE_S)
        asked = Counter(request.method for request in server.requests[began:])
    # The mark of the prefix, the tensors, their digests, plain data, the rank's record, the
    # manifest, the log's entry; the record is read back, and the prefix and the log are listed.
    assert asked == {"PUT-NEW": 7, "GET": 1, "LIST": 2}
    check_options_stay_where_they_are(server, ckpt)


def check_options_stay_where_they_are(server: ObjectServer, ckpt: Checkpointer) -> None:
    secret = server.options["aws_secret_access_key"].encode()
    assert not any(
        secret in path.read_bytes()
        for path in (server.root / "bucket").rglob("*")
        if path.is_file()
    )
    assert secret.decode() not in repr(ckpt)


def test_a_large_file_is_put_in_parts(server: ObjectServer) -> None:
    with opened(server) as ckpt:
        handle = ckpt.save(1, a_state(1, 30))
        handle.committed.result(DEADLINE_S)
        assert handle.nbytes_written == handle.nbytes
        assert server.count("PART") >= 4
        assert same(ckpt.load(), a_state(1, 30))
    assert not server.uploads


# What fails ---------------------------------------------------------------------------------------


def test_a_store_that_ignores_conditions_is_refused_at_the_start(server: ObjectServer) -> None:
    server.ignores_conditions = True
    with pytest.raises(WriteError, match="replaces existing objects") as refused:
        opened(server)
    assert refused.value.errno == errno.EOPNOTSUPP


def test_a_store_that_lists_from_the_beginning_wherever_it_is_to_start_is_as_good(
    server: ObjectServer,
) -> None:
    server.ignores_offsets = True
    with opened(server) as ckpt:
        commit(ckpt, 1)
        commit(ckpt, 2)
    check_store(server, 1, 2)


@pytest.mark.drawn
@pytest.mark.parametrize("fault", [503, 500, "cut", After(503), After("cut")])
def test_errors_that_end_are_borne(server: ObjectServer, fault: Fault) -> None:
    with opened(server) as ckpt:
        commit(ckpt, 1)
        failed = fail_each_write_once(server, fault)
        commit(ckpt, 2)
        assert len(failed) >= 6
    server.heal()
    check_store(server, 1, 2)


def test_a_refusal_fails_the_save_and_the_next_one_is_taken(server: ObjectServer) -> None:
    with opened(server) as ckpt:
        commit(ckpt, 1)
        server.fault = writes_fail(403)
        with pytest.raises(WriteError, match="denies access") as refused:
            commit(ckpt, 2)
        assert refused.value.errno == errno.EACCES
        server.heal()
        commit(ckpt, 3)
        assert [(record.step, record.outcome) for record in ckpt.history()] == [
            (1, "committed"),
            (2, "failed"),
            (3, "committed"),
        ]
    check_store(server, 1, 3)


@pytest.mark.parametrize(
    "fault",
    [
        507,
        Refusal(403, "QuotaExceeded"),
        Refusal(507, "XMinioStorageFull"),
        Refusal(400, "QuotaExceeded"),
    ],
)
def test_a_store_that_is_full_is_told_as_a_disk_that_is_full(
    server: ObjectServer, fault: Fault
) -> None:
    with opened(server) as ckpt:
        commit(ckpt, 1)
        server.fault = writes_fail(fault)
        with pytest.raises(NoSpaceError, match=r"the store is full|the quota is used up") as full:
            commit(ckpt, 2)
        assert full.value.errno in (errno.ENOSPC, errno.EDQUOT)
        server.heal()
        commit(ckpt, 3)
    check_store(server, 1, 3)


def test_what_is_written_is_encrypted_by_the_server_as_the_options_say(
    server: ObjectServer,
) -> None:
    """The example of docs/remote.md: each PUT, and the start of each upload in parts, has the
    header.
    """
    server_side = {"aws_server_side_encryption": "aws:kms", "aws_sse_kms_key_id": "a-key"}
    with Checkpointer(URL, storage_options={**server.options, **server_side}) as ckpt:
        ckpt.save(1, {"model": {"weight": torch.randn(3 << 20)}}, blocking=True)
        commit(ckpt, 2)
    sent = {request.method for request in server.requests if request.encryption == "aws:kms"}
    assert sent == {"PUT", "PUT-NEW", "START"}
    bare = [request for request in server.requests if request.encryption is None]
    assert not {request.method for request in bare} & {*sent}


def test_what_is_refused_goes_to_the_fallback_directory_meanwhile(
    server: ObjectServer, tmp_path: Path
) -> None:
    with opened(server, failures=FailureOptions(fallback_directory=tmp_path / "further")) as ckpt:
        commit(ckpt, 1)
        server.fault = writes_fail(403)
        assert commit(ckpt, 2).path == f"{tmp_path}/further/step-00000002"
        server.heal()
        assert commit(ckpt, 3).path == f"{URL}/step-00000003"
        assert ckpt.steps() == [1, 2, 3]
        assert same(ckpt.load(2), a_state(2))
    check_store(server, 1, 3)


def test_a_store_that_does_not_answer_for_long_fails_the_save_and_no_other(
    server: ObjectServer,
) -> None:
    with opened(server, failures=FailureOptions(retries=0)) as ckpt:
        commit(ckpt, 1)
        server.fault = writes_fail(503)
        with pytest.raises(SidesaveError, match="503"):
            commit(ckpt, 2)
        server.heal()
        commit(ckpt, 3)
    check_store(server, 1, 3)


@pytest.mark.slow(minutes=1)
def test_a_minute_without_network_delays_a_save_and_fails_none(server: ObjectServer) -> None:
    """With the retries that a session has by default; the lease is not lost by it either."""
    with Checkpointer(URL, storage_options=server.options) as ckpt:
        commit(ckpt, 1)
        server.fault = lambda request, number: "gone"
        handle = ckpt.save(2, a_state(2))
        with pytest.raises(TimeoutError):
            handle.committed.result(60)
        server.heal()
        handle.committed.result(DEADLINE_S)
        commit(ckpt, 3)
        assert [record.outcome for record in ckpt.history()] == 3 * ["committed"]
    check_store(server, 1, 2, 3)


def test_an_entry_whose_answers_are_all_lost_counts_once(server: ObjectServer) -> None:
    with opened(server) as ckpt:
        commit(ckpt, 1)
        in_log = ".sidesave.log/"
        server.fault = lambda request, number: (
            After("cut") if in_log in request.key and request.method == "PUT-NEW" else None
        )
        commit(ckpt, 2)
        ckpt.save(2, a_state(3), overwrite=True, blocking=True)
        server.heal()
        assert same(ckpt.load(2), a_state(3))
        commit(ckpt, 2 + 1)
    assert [info.step for info in sidesave.find(URL, storage_options=server.options)] == [1, 2, 3]


def test_no_process_and_no_file_tells_the_credentials(server: ObjectServer) -> None:
    with opened(server) as ckpt:
        commit(ckpt, 1)
        process = Path(f"/proc/{daemon(ckpt)}")
        told = [(process / name).read_bytes() for name in ("cmdline", "environ")]
        told += [
            path.read_bytes() for path in (server.root / "bucket").rglob("*") if path.is_file()
        ]
        said = json.dumps([repr(ckpt), repr(ckpt.history())]).encode()
    for name in ("aws_secret_access_key", "aws_access_key_id"):
        secret = server.options[name].encode()
        assert not any(secret in each for each in [*told, said])


# Deaths of both -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, "cut"], ids=["carried out", "lost"])
def test_what_both_leave_at_any_request_is_finished_or_removed(
    server: ObjectServer,
    fault: Fault,
    traces: Traces,
    share: Share,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killer = Killer(server)
    server.announce(monkeypatch.setenv)
    recovered = 0
    for after in share.numbers():
        run = f"{URL}/{after}"
        with Trainer(traces, "keep_saving", run, 5, 1, 0) as trainer:
            [pid] = trainer.expect("ready")
            killer.arm(trainer.pid, int(pid), after=after, fault=fault)
            trainer.go_on()
            told = "committed 5" in trainer.lines()
            trainer.end()
        traces.await_ends()
        came_to_it = killer.disarm()
        with Checkpointer(run) as ckpt:
            recovered += ckpt.latest_step() == 5 and not told
            assert ckpt.latest_step() == 5 or not told
            ckpt.save(6, a_state(6, size_of(6)), blocking=True)
            found = {info.step: info for info in sidesave.find(run)}
            assert found.keys() - {5} == {6}
            for step, info in found.items():
                check_step(info, step, size_of(step))
        prefixes = {
            path.parent.name
            for path in (server.root / run.removeprefix("s3://")).rglob("*")
            if path.is_file()
        }
        assert len([name for name in prefixes if name.startswith("step-")]) == len(found)
        if not came_to_it:
            share.is_past(after)
    assert recovered or not campaigns.WHOLE
    traces.check()
