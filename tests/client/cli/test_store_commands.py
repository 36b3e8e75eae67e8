"""The `sidesave` command on runs in an object store."""

import os
from pathlib import Path

import pytest
from commands import as_json, output
from trainers import (
    Orders,
    Traces,
    a_state,
    check,
    commit,
    end,
    kill_with_a_save_staged,
    save_steps,
)

from sidesave import Checkpointer
from sidesave.client.cli import store_checks
from sidesave.errors import InvalidArgumentError
from sidesave.writer_daemon.storage.remote import Bucket

STORE_CHECKS = ["permissions", "conditions", "upload speed", "shutdown", "daemon", "unfinished"]


def files(url: str) -> list[Path]:
    return [path for path in Path(url.removeprefix("file://")).rglob("*") if path.is_file()]


def test_doctor_tries_a_store_and_leaves_nothing_behind(url: str):
    findings = {one["name"]: one for one in as_json("doctor", url)}
    assert [name for name in findings if name in STORE_CHECKS] == STORE_CHECKS
    assert all(findings[name]["status"] in ("ok", "warn") for name in STORE_CHECKS)
    assert "30 s from SIGTERM to SIGKILL" in findings["shutdown"]["finding"]
    assert files(url) == []


def test_doctor_refuses_what_cannot_be_written_to(url: str):
    assert "not written to" in output("doctor", "https://host/run", status=2)
    with pytest.raises(InvalidArgumentError):
        list(store_checks.examine_store("https://host/run"))


def test_doctor_says_how_to_have_unfinished_uploads_removed():
    for url, words in (
        ("s3://bucket/run", "put-bucket-lifecycle-configuration --bucket bucket "),
        ("gs://bucket/run", "AbortIncompleteMultipartUpload"),
        ("az://bucket/run", "after a week"),
    ):
        [(status, text, _)] = store_checks._unfinished(url)
        assert status == "ok"
        assert words in text


def test_doctor_fails_a_store_that_replaces_what_is_there(
    url: str, monkeypatch: pytest.MonkeyPatch
):
    def create(self: Bucket, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True

    monkeypatch.setattr(Bucket, "create", create)
    [(status, text, remedy)] = store_checks._conditions(Bucket(url, {}))
    assert status == "fail"
    assert "two jobs would overwrite each other" in text
    assert "If-None-Match" in remedy


def test_doctor_warns_of_a_link_that_is_too_slow_for_the_grace():
    [(status, text, remedy)] = store_checks._shutdown(1e6)
    assert status == "warn"
    assert "0.0 GB can be uploaded" in text
    assert "1 MB/s" in remedy
    [(status, *_)] = store_checks._shutdown(1e15)
    assert status == "ok"


def test_recover_finishes_in_a_store_what_dead_sessions_left(
    url: str, traces: Traces, orders: Orders
):
    assert output("recover", url) == "there is nothing to recover\n"
    end(kill_with_a_save_staged(traces, url, orders, starting_at="sends WRITTEN", every_step=True))
    before = {path: path.read_bytes() for path in files(url)}
    assert output("recover", url, "--dry-run") == "step-00000005: would be finished\n"
    kept = {path: data for path, data in before.items() if ".sidesave." not in os.fspath(path)}
    assert {
        path: path.read_bytes() for path in files(url) if ".sidesave." not in os.fspath(path)
    } == kept
    assert output("recover", url) == "step-00000005: finished\n"
    check(url, 5)


def test_recover_leaves_a_live_session_in_peace(url: str):
    with Checkpointer(url) as ckpt:
        commit(ckpt, 1)
        ckpt.save(2, a_state(2), blocking=True)
        assert output("recover", url) == "there is nothing to recover\n"
    rows = as_json("ls", url)["checkpoints"]
    assert [row["step"] for row in rows] == [1, 2]


@pytest.mark.parametrize("command", ["trigger", "plot"])
def test_what_needs_files_beside_the_checkpoints_is_for_disks(url: str, command: str):
    assert "local and mounted directories" in output(command, url, status=2)


def test_watch_prints_where_each_new_checkpoint_is(url: str):
    save_steps(url, 1)
    assert output("watch", url, "--timeout", 0) == f"{url}/step-00000001\n"
    assert "is a checkpoint" in output("watch", f"{url}/step-00000001", status=2)
