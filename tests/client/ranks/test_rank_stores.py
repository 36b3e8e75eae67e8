"""Ranks whose run is in an object store: what they ask of it, what kills leave there, and what late
ones may do.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from campaigns import Share
from elsewhere import OrdersElsewhere
from managed_ranks import ManagedRank
from object_server import Fault, Killer, ObjectServer, Request, serving
from rank_checks import Start, finish, left, read, visible
from rank_trainers import same_tensors
from seaweed import seaweed
from trainers import DEADLINE_S, Orders, Traces, await_end, pidfd_of, stopped, wait_until

import sidesave

S3 = "s3://bucket/run"


# Saving and loading -------------------------------------------------------------------------------


def go_through(start: Start, run: str, traces: Traces, folder: Path, **options: object) -> None:
    """What is saved comes back to other ranks and to one process, and what there is changes as on a
    disk.
    """
    ranks = start(3).begin("fsdp", run, **options)
    ranks.do("truth", str(folder / "truth"))
    ranks.save(1, metadata={"loss": 0.5}, files={"config.json": "{}"})
    ranks.do("train")
    ranks.save(2)
    ranks.save(2, overwrite=True)
    ranks.save(3)
    ranks.do("delete", 2)
    assert ranks.do("steps") == [[[1, 3], 3]] * 3
    finish(ranks, run, traces)
    [first, last] = sidesave.find(run)
    assert (first.step, first.metadata, last.step) == (1, {"loss": 0.5}, 3)
    same_tensors(read(run, 1).tensors, torch.load(folder / "truth"))
    ranks = start(2).begin("fsdp", run, **options)
    ranks.do("load", 1)  # which goes back
    ranks.do("truth", str(folder / "resharded"))
    same_tensors(torch.load(folder / "resharded"), torch.load(folder / "truth"))
    assert ranks.do("steps") == [[[1, 3], 1]] * 2
    ranks.save(4)
    assert ranks.do("steps") == [[[1, 3, 4], 4]] * 2
    finish(ranks, run, traces)
    alone = sidesave.load(run, include="model", verify=True)["model"]
    same_tensors(
        {f"model.{name}": tensor for name, tensor in alone.items()},
        models(torch.load(folder / "truth")),
    )
    assert sidesave.latest(run) is not None


def models(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


def test_what_ranks_save_to_a_store_comes_back_to_any_number_of_them(
    start: Start, server: ObjectServer, traces: Traces, tmp_path: Path
):
    go_through(start, S3, traces, tmp_path)
    assert not server.uploads


@pytest.mark.slow
def test_the_same_on_a_server_that_others_have_made(
    start: Start, traces: Traces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "weed").mkdir()
    with seaweed(tmp_path / "weed") as options:
        for name, value in options.items():
            monkeypatch.setenv(name.upper(), value)
        go_through(start, S3, traces, tmp_path)


@pytest.mark.parametrize("group", [True, False], ids=["process group", "no process group"])
def test_credentials_that_are_given_are_enough_and_ranks_of_no_group_meet_in_the_store(
    start: Start, tmp_path: Path, traces: Traces, group: bool
):
    (tmp_path / "buckets" / "bucket").mkdir(parents=True)
    with serving(tmp_path / "buckets") as server:
        before = start(2, group=False)
        before[1].tell("open", S3, storage_options=server.options)  # rank 0 never comes
        wait_until(lambda: any("/join.1." in request.key for request in server.requests))
        before.kill()
        ranks = start(2, group=group).begin("small", S3, storage_options=server.options)
        ranks.save(1)
        ranks.do("close")
        secret = server.options["aws_secret_access_key"].encode()
        there = [path for path in (tmp_path / "buckets").rglob("*") if path.is_file()]
        assert not any(secret in path.read_bytes() for path in there)
        met = [path.name for path in there if path.parent.name == ".sidesave.rendezvous"]
        assert [name for name in met if not name.startswith("join.")] == [".directory"]
        assert group or met == [".directory"]
        [info] = sidesave.find(S3, storage_options=server.options)
        assert sidesave.verify(info, storage_options=server.options).ok
    traces.check()


@pytest.mark.parametrize("group", [True, False], ids=["process group", "no process group"])
def test_stores_that_are_not_one_are_refused_by_all_ranks(
    start: Start, url: str, traces: Traces, group: bool
):
    ranks = start(2, group=group)
    for name in ("_VISIBLE_WITHIN_S", "AGREE_TIMEOUT_S"):
        ranks.do("set", f"sidesave.client.ranks.meeting:{name}", 1.0)
    for told in ranks.attempt("open", url + "-{rank}"):
        assert told.error == ("InvalidArgumentError" if group else "DaemonStartError")
        assert "rank 1" in told.message or not group
        assert "shared" in told.message or "share one directory" in told.message
    traces.check()


def test_nobody_talks_to_save_to_a_store(start: Start, url: str, traces: Traces):
    ranks = start(3).begin("fsdp", url)
    ranks.do("forbid_talking")
    ranks.save(1)
    ranks.do("build", "small")
    ranks.save(2)
    ranks.do("delete", 1)
    finish(ranks, url, traces)


# What is asked ------------------------------------------------------------------------------------


def asked(requests: Iterable[Request]) -> Counter[str]:
    return Counter(request.method for request in requests)


def test_a_save_of_ranks_takes_few_requests(start: Start, server: ObjectServer, traces: Traces):
    """Each rank's part of them, one after the other."""
    ranks = start(2)
    ranks.do("build", "plain", 0.1, True)  # of which each rank writes its part without asking
    ranks.open(S3)
    ranks.save(1)
    began = len(server.requests)
    ranks[1].do("save", 2)
    ranks[1].do("written", 2)
    with stopped(ranks.daemons[1]):
        server.wait_until_idle()
        [at] = [
            number
            for number, request in enumerate(server.requests)
            if request.key.endswith("-2/rank-00001.json")
        ]
        # The names of the run and its log, and the log again for the prefix, its mark; the lease;
        # plain data, the record.
        assert asked(server.requests[began : at + 1]) == {"LIST": 4, "GET": 3, "PUT-NEW": 3}
        before = len(server.requests)
        ranks[0].do("save", 2)
        ranks[0].do("committed", 2)
        # The mark, tensors, digests, plain data, the record, the manifest, the entry; a record of
        # each rank. What ranks have written is listed once to see the records and once for the
        # manifest, the names four times, and the log. A minute may end meanwhile, and the lease is
        # looked at, or the entry of the log that the other rank has read.
        found = asked(server.requests[before:])
        assert (found["PUT-NEW"], len(found)) == (7, 3)
        assert found["GET"] in (2, 3)
        assert found["LIST"] in (7, 8)
        woken = len(server.requests)
    ranks[1].do("committed", 2)
    learnt = asked(server.requests[woken:])
    # Names, the log, its entry and the manifest; the look that it stood still in ends first.
    assert not learnt.keys() - {"LIST", "GET"}
    assert learnt["LIST"] <= 4
    assert 1 < learnt["GET"] <= 4
    finish(ranks, S3, traces)


# Deaths -------------------------------------------------------------------------------------------


def kill_at_requests(
    start: Start,
    server: ObjectServer,
    traces: Traces,
    culprit: int,
    fault: Fault,
    points: Iterable[int],
) -> None:
    killer = Killer(server)
    ranks = start(3).begin("small", S3)
    ranks.do("set", "sidesave.client.daemon_link.restarts:_MAX_PAUSE_S", 0.05)
    step = came = 0
    for step, after in enumerate(points, 1):
        wait_until(lambda: ranks[culprit].do("daemon") is not None)
        killer.arm(ranks[culprit].do("daemon"), after=after, fault=fault)
        ranks.save(step)
        came += killer.disarm()
        assert visible(S3) == [*range(1, step + 1)]
    assert came > 2 or step < 4
    for found in visible(S3):
        read(S3, found)
    finish(ranks, S3, traces)


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("fault", [None, "cut"], ids=["carried out", "lost"])
def test_a_daemon_that_dies_at_some_requests_is_replaced_and_the_save_commits(
    start: Start, server: ObjectServer, traces: Traces, culprit: int, fault: Fault
):
    kill_at_requests(start, server, traces, culprit, fault, range(random.randrange(12), 48, 12))


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("fault", [None, "cut"], ids=["carried out", "lost"])
def test_a_daemon_that_dies_at_any_request_is_replaced_and_the_save_commits(
    start: Start, server: ObjectServer, traces: Traces, culprit: int, fault: Fault, share: Share
):
    kill_at_requests(start, server, traces, culprit, fault, share.points(range(60)))


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_hangs_is_named_and_is_told_when_it_goes_on(
    start: Start, url: str, traces: Traces, ordered: tuple[Orders, dict[str, str]], culprit: int
):
    orders, environment = ordered
    ranks = start(3, environments={culprit: environment}).begin(
        "small", url, daemon={"commit_timeout_s": 4.0}
    )
    ranks.save(1)
    orders.give("stop", starting_at="got SAVE", every_step=True)
    ranks.do("save", 2)
    pid, _ = orders.obeyed()
    ranks[culprit].signal(signal.SIGSTOP)  # who would take its daemon for dead
    others = [rank for number, rank in enumerate(ranks) if number != culprit]
    for rank in others:
        rank.tell("committed", 2)
    for told in [rank.answer() for rank in others]:
        if culprit:
            assert told.error == "WriteStalledError"
            assert "ranks [1] " in told.message
        else:  # who alone could give up for all
            assert told.error in ("CommitUnknownError", "WriteStalledError")
            assert "rank 0 has not said" in told.message or "it may still be" in told.message
    assert visible(url) == [1]
    os.kill(pid, signal.SIGCONT)
    ranks[culprit].signal(signal.SIGCONT)
    ranks[culprit].tell("committed", 2)
    assert ranks[culprit].answer().error in ("WriteStalledError", "CommitUnknownError")
    assert visible(url) == [1]
    ranks.do("forgive")
    ranks.save(3)
    assert visible(url) == [1, 3]
    finish(ranks, url, traces)


def test_what_a_rank_sends_after_the_run_has_passed_on_is_nothing_and_is_removed(
    start: Start, server: ObjectServer, traces: Traces
):
    arrived, gate = threading.Event(), threading.Event()

    def delay(request: Request, number: int) -> None:
        if request.method == "PUT-NEW" and request.key.endswith("-2/rank-00001.json"):
            arrived.set()
            assert gate.wait(DEADLINE_S)

    ranks = start(2).begin("small", S3)
    ranks.save(1)
    server.fault = delay
    ranks.do("save", 2)
    assert arrived.wait(DEADLINE_S)
    ranks.kill()
    with pidfd_of(ranks.daemons[1]) as late:
        ranks = start(2)
        ranks.do("build", "small", mark=2)
        ranks.open(S3, daemon={"takeover_timeout_s": 1.0})
        assert visible(S3) == [1]
        gate.set()
        await_end(late)
        ranks.save(2)
    read(S3, 2)
    finish(ranks, S3, traces)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["got SAVE", "sends WRITTEN"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_daemon_of_an_earlier_session_adds_nothing_to_the_saves_of_the_next(
    start: Start, url: str, traces: Traces, elsewhere: OrdersElsewhere, culprit: int, moment: str
):
    ranks = start(2, environments={culprit: elsewhere.environment})
    ranks.do("build", "small", mark=1)
    ranks.open(url)
    ranks.save(1)
    elsewhere.give("stop", starting_at=moment, every_step=True)
    ranks.do("save", 2)
    late, _ = elsewhere.obeyed()
    ranks[1 - culprit].do("staged" if moment == "got SAVE" else "written", 2)
    ranks.kill()
    with pidfd_of(late) as pidfd:
        ranks = start(2)
        ranks.do("build", "small", mark=2)
        ranks.open(url, daemon={"takeover_timeout_s": 1.0})
        # Where its record was there the step is whole, and rank 0's daemon or the next session has
        # committed it.
        assert visible(url) == ([1] if moment == "got SAVE" else [1, 2])
        ranks[1 - culprit].do("save", 2, overwrite=True)
        ranks[1 - culprit].do("staged", 2)
        os.kill(late, signal.SIGCONT)
        await_end(pidfd)
        ranks[culprit].do("save", 2, overwrite=True)
        ranks.do("committed", 2)
    found = read(url, 2)
    for rank in (0, 1):
        [own] = [tensor for fqn, tensor in found.of_rank(rank).items() if fqn.startswith("rng")]
        assert own.tolist() == [20 + rank] * 3
    for rank in ranks:
        rank.tell("close")
    for rank in ranks:
        rank.answer().get()
    # Where the late one ended in the midst of removing what it had sent, the next start does it.
    ranks = start(2)
    ranks.do("build", "small", mark=3)
    ranks.open(url)
    finish(ranks, url, traces)


# A manager ----------------------------------------------------------------------------------------


def test_managers_of_ranks_keep_what_they_are_told_to_and_go_on(
    start: Start, url: str, traces: Traces
):
    ranks = start(2, kind=ManagedRank)
    ranks.do("build", "fsdp")
    assert ranks.do("manage", url, "[EverySteps(1)]", "[KeepLatest(2)]") == [0, 0]
    for step in range(4):
        ranks.do("train")
        assert ranks.do("step", step) == ["saved"] * 2
        ranks.do("committed", step)
    ranks.do("leave")
    assert visible(url) == [2, 3]
    ranks = start(3, kind=ManagedRank)
    ranks.do("build", "fsdp")
    assert ranks.do("manage", url, "[EverySteps(1)]", "[KeepLatest(2)]") == [4] * 3
    ranks.do("leave")
    assert left(url) == []
    traces.check()


def test_what_one_rank_has_no_slot_for_is_skipped_by_all(
    start: Start, server: ObjectServer, traces: Traces
):
    gate = threading.Event()

    def delay(request: Request, number: int) -> None:
        if request.method == "PUT-NEW" and request.key.endswith("/objects.rank-00001.msgpack"):
            assert gate.wait(DEADLINE_S)

    ranks = start(2, kind=ManagedRank)
    ranks.do("build", "plain", 0.1, True)  # of which each rank writes its part without asking
    ranks.do("manage", S3, "[EverySteps(3)]", staging={"on_busy": "skip", "slots": 1})
    server.fault = delay
    assert ranks.do("step", 3) == ["saved"] * 2
    ranks[0].do("written", 3)
    ranks.do("await_word", True, 6)
    told = [ranks.do("step", step) for step in range(4, 10)]
    assert told == [*[[None] * 2] * 2, ["skipped"] * 2] * 2
    gate.set()
    ranks.do("committed", 3)
    ranks.do("await_word", False, 12)
    told = [ranks.do("step", step) for step in range(10, 13)]
    assert told == [*[[None] * 2] * 2, ["saved"] * 2]
    ranks.do("committed", 12)
    expected = [
        [3, "committed", None],
        [6, "skipped", None],
        [9, "skipped", None],
        [12, "committed", None],
    ]
    assert ranks.do("leave") == [expected] * 2
    assert visible(S3) == [3, 12]
    traces.check()
