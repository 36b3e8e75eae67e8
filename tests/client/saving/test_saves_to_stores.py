"""A checkpointer whose run directory is a URL: what it does on a disk it does in an object
store.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from object_server import ObjectServer
from trainers import DEADLINE_S, a_state, check, commit, daemon, end, same, save_steps, wait_until

import sidesave
from sidesave import Checkpointer, FailureOptions
from sidesave.errors import (
    CheckpointExistsError,
    DirectoryInUseError,
    IntegrityError,
    InvalidArgumentError,
    WriteError,
)
from sidesave.writer_daemon.storage import urls

SECRET = "secret-that-nobody-may-see"


def files(url: str) -> list[Path]:
    return [path for path in Path(url.removeprefix("file://")).rglob("*") if path.is_file()]


def test_options_of_a_store_are_refused_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="storage_options are for a URL"):
        Checkpointer(tmp_path / "run", storage_options={"aws_region": "eu-west-1"})
    with pytest.raises(InvalidArgumentError, match="storage_options are for a URL"):
        Checkpointer(
            tmp_path / "run",
            mirror=tmp_path / "mirror",
            storage_options={"aws_region": "eu-west-1"},
        )
    assert not (tmp_path / "run").exists()


def test_options_that_a_directory_does_not_have_are_refused_by_name_alone(tmp_path: Path) -> None:
    url, options = f"file://{tmp_path}/store", {"aws_regoin": "a-secret"}
    calls: list[Callable[[], object]] = [
        lambda: Checkpointer(url, storage_options=options),
        lambda: Checkpointer(tmp_path / "run", mirror=url, storage_options=options),
        lambda: sidesave.find(url, storage_options=options),
        lambda: sidesave.load(url, storage_options=options),
    ]
    for call in calls:
        with pytest.raises(
            InvalidArgumentError, match=r"no storage_options.*aws_regoin"
        ) as refused:
            call()
        assert "a-secret" not in str(refused.value)
    assert not (tmp_path / "store").exists()


def test_a_scheme_that_is_not_known_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="saved to s3, gs, az, file URLs"):
        Checkpointer("s4://bucket/run")
    with pytest.raises(InvalidArgumentError, match="saved to s3, gs, az, file URLs"):
        Checkpointer(tmp_path / "run", mirror="s4://bucket/run")
    with pytest.raises(InvalidArgumentError, match="read from s3, gs, az, file, http, https URLs"):
        sidesave.find("s4://bucket/run")


# What is on a disk is in a store ------------------------------------------------------------------


def test_a_save_is_committed_and_comes_back_bit_for_bit(url: str) -> None:
    with Checkpointer(url) as ckpt:
        handle = ckpt.save(5, a_state(5))
        info = handle.committed.result(DEADLINE_S)
        assert handle.written.done()
        assert info.path == f"{url}/step-00000005"
        assert (ckpt.steps(), ckpt.latest_step(), ckpt.directory) == ([5], 5, url)
        assert same(ckpt.load(), a_state(5))
    check(url, 5)


def test_metadata_and_files_and_plain_data_are_kept(url: str) -> None:
    weights, plain = torch.arange(5), {"lr": 0.1, "names": ["a", "b"]}
    state = {"weights": weights, "plain": plain}
    with Checkpointer(url) as ckpt:
        ckpt.save(1, state, metadata={"loss": 0.5}, files={"config.json": "{}"}, blocking=True)
        loaded = ckpt.load(1)
    assert torch.equal(loaded["weights"], weights)
    assert loaded["plain"] == plain
    [info] = sidesave.find(url)
    assert info.metadata == {"loss": 0.5}
    assert sidesave.verify(url).ok
    assert any(path.name == "config.json" and path.read_text() == "{}" for path in files(url))


def test_a_step_is_replaced_only_where_that_is_said(url: str) -> None:
    with Checkpointer(url) as ckpt:
        commit(ckpt, 1)
        with pytest.raises(CheckpointExistsError):
            ckpt.save(1, a_state(2))
        for seed in (3, 4):
            ckpt.save(1, a_state(seed), overwrite=True, blocking=True)
            assert same(ckpt.load(), a_state(seed))
    assert same(sidesave.load(url), a_state(4))


@pytest.mark.parametrize("kind", ["disk", "store", "mirror"])
def test_a_replaced_step_stays_for_its_readers_like_a_deleted_one(
    url: str, run: Path, tmp_path: Path, kind: str
) -> None:
    place = run if kind == "disk" else Path(url.removeprefix("file://"))
    options: dict[str, Any] = {"mirror": url} if kind == "mirror" else {}
    place.mkdir(parents=True)
    with Checkpointer(url if kind == "store" else run, **options) as ckpt:
        for seed in (1, 2, 3):
            ckpt.save(1, a_state(seed), overwrite=seed > 1, blocking=True)
            ckpt.wait(DEADLINE_S, mirrored=kind == "mirror")
        assert len(list(place.glob("*/manifest.json"))) == 3, "for half a minute"
    # its bytes go when the session ends
    wait_until(lambda: len(list(place.glob("*/manifest.json"))) == 1)


def test_a_deleted_step_is_gone_with_its_bytes(url: str) -> None:
    with Checkpointer(url) as ckpt:
        commit(ckpt, 1)
        commit(ckpt, 2)
        with pytest.raises(InvalidArgumentError, match="newest"):
            ckpt.delete(2).result(DEADLINE_S)
        ckpt.delete(1).result(DEADLINE_S)
        assert ckpt.steps() == [2]
        commit(ckpt, 1)
        assert ckpt.steps() == [1, 2]
        ckpt.delete(2).result(DEADLINE_S)
    check(url, 1)
    assert not any("step-00000002" in os.fspath(path) for path in files(url)), (
        "its bytes go when the session ends"
    )


def test_a_later_session_goes_on_and_goes_back(url: str) -> None:
    save_steps(url, 1, 2, 3)
    with Checkpointer(url) as ckpt:
        assert same(ckpt.load(f"{url}/step-00000002"), a_state(2))
        assert ckpt.latest_step() == 2
    with Checkpointer(url) as ckpt:
        assert same(ckpt.load(), a_state(2))
        ckpt.save(3, a_state(33), blocking=True)
        assert same(ckpt.load(url), a_state(33))
        with pytest.raises(InvalidArgumentError, match="no checkpoint of this run"):
            ckpt.load(_another_run(url))
    assert [info.step for info in sidesave.find(url)] == [1, 2, 3]


def _another_run(url: str) -> str:
    with Checkpointer(f"{url}-other") as ckpt:
        return commit(ckpt, 1).path


def test_a_run_that_was_copied_there_goes_on(url: str, run: Path) -> None:
    save_steps(run, 1, 2)
    place = Path(url.removeprefix("file://"))
    place.parent.mkdir()
    run.rename(place)
    with Checkpointer(url) as ckpt:
        assert same(ckpt.load(), a_state(2))
        ckpt.delete(1).result(DEADLINE_S)
        commit(ckpt, 3)
        assert ckpt.steps() == [2, 3]
    check(url, 2, 3)


def test_a_daemon_that_is_killed_is_replaced_at_once(url: str) -> None:
    with Checkpointer(url) as ckpt:
        commit(ckpt, 1)
        end(daemon(ckpt))
        commit(ckpt, 2)
    check(url, 1, 2)


# Who may use it -----------------------------------------------------------------------------------


def test_a_second_session_is_told_who_has_the_run(url: str) -> None:
    with Checkpointer(url) as ckpt:
        commit(ckpt, 1)
        with pytest.raises(DirectoryInUseError, match=f"daemon {daemon(ckpt)}"):
            Checkpointer(url)
        commit(ckpt, 2)
    check(url, 1, 2)


@pytest.mark.parametrize(
    "url", ["http://host/run", "https://host/run", "memory://bucket/run", "s3://bucket/a?b"]
)
def test_what_cannot_be_written_to_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"not written to|without user, query"):
        Checkpointer(url)


def test_one_of_several_ranks_may_save_alone_and_nodes_have_no_store_of_their_own(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InvalidArgumentError, match="node_local"):
        Checkpointer(url, distributed=False, node_local=True)
    with Checkpointer(url, distributed=False) as ckpt:
        commit(ckpt, 1)


# Options ------------------------------------------------------------------------------------------


def test_options_are_for_the_session_and_nobody_else_sees_them(
    server: ObjectServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url, options = "s3://bucket/run", {**server.options, "aws_secret_access_key": SECRET}
    with Checkpointer(url, storage_options=options) as ckpt:
        assert ckpt.session.connection._boot.storage_options, "or there would be nothing to find"
        commit(ckpt, 1)
        process = Path(f"/proc/{daemon(ckpt)}")
        told = [(process / name).read_bytes() for name in ("cmdline", "environ")]
        told += [path.read_bytes() for path in files(f"file://{server.root}")]
        shown = [
            repr(ckpt),
            repr(ckpt.session.connection._boot),
            repr(ckpt.history()),
            repr(vars(ckpt)),
        ]
        shown.append(repr(ckpt.session.options))
        with ThreadPoolExecutor(1) as pool:  # which has options of its own, that is none
            assert pool.submit(urls._options_for, f"{url}/step-00000001").result() == options
        assert same(ckpt.load(), a_state(1))
    assert not any(SECRET.encode() in each for each in told)
    assert not any(SECRET in each for each in [*shown, caplog.text])
    assert urls._options_for(url) == {}, "it ends with the session"


def test_options_of_a_session_that_is_refused_do_not_count(server: ObjectServer) -> None:
    url, options = "s3://bucket/run", {**server.options, "region": "one"}
    with Checkpointer(url, storage_options=options) as ckpt:
        with pytest.raises(DirectoryInUseError):
            Checkpointer(url, storage_options={**options, "region": "other"})
        assert urls._options_for(url) == options
        commit(ckpt, 1)


def test_options_that_cannot_be_handed_on_are_refused(url: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"storage_options\['credential_provider'\] is a type"
    ):
        Checkpointer(url, storage_options={"credential_provider": dict})
    assert not files(url)


# Where a store is no disk -------------------------------------------------------------------------


def test_history_is_that_of_the_session(url: str) -> None:
    with Checkpointer(url) as ckpt:
        commit(ckpt, 1)
        assert [(record.step, record.outcome) for record in ckpt.history()] == [(1, "committed")]
    with pytest.raises(InvalidArgumentError, match="no history"):
        sidesave.history(url)


def test_the_deadline_for_a_stall_is_longer_in_a_store(url: str, run: Path) -> None:
    for place, seconds in ((url, 900.0), (run, 300.0)):
        with Checkpointer(place) as ckpt:
            assert ckpt.session.connection._boot.stall_timeout_s == seconds


def test_what_the_store_refuses_for_good_goes_to_the_fallback_directory(
    url: str, tmp_path: Path
) -> None:
    further = tmp_path / "fallback"
    with Checkpointer(url, failures=FailureOptions(fallback_directory=further)) as ckpt:
        commit(ckpt, 1)
        in_the_way = Path(f"{url.removeprefix('file://')}/step-00000002.{ckpt.session.id}")
        in_the_way.write_text("a file, where files are to be put")
        assert commit(ckpt, 2).path == f"{further}/step-00000002"
        assert ckpt.steps() == [1, 2]
        in_the_way.unlink()
        commit(ckpt, 3)
    with Checkpointer(url) as ckpt:  # which knows of it, though it is not told
        assert same(ckpt.load(2), a_state(2))
        assert ckpt.latest_step() == 2


def test_a_save_that_the_store_refuses_fails_and_training_goes_on(url: str) -> None:
    with Checkpointer(url) as ckpt:
        in_the_way = Path(f"{url.removeprefix('file://')}/step-00000001.{ckpt.session.id}")
        in_the_way.parent.mkdir(exist_ok=True)
        in_the_way.write_text("")
        with pytest.raises(WriteError):
            commit(ckpt, 1)
        in_the_way.unlink()
        commit(ckpt, 1)
        commit(ckpt, 2)
    check(url, 1, 2)


def test_a_run_whose_log_is_gone_is_neither_begun_anew_nor_cleaned(
    url: str, tmp_path: Path
) -> None:
    with Checkpointer(url) as ckpt:
        for step in (1, 2):
            ckpt.save(step, a_state(step), blocking=True)
        ckpt.save(2, a_state(3), overwrite=True, blocking=True)
    log = Path(url.removeprefix("file://")) / ".sidesave.log"
    away = log.rename(tmp_path / "away")
    before = {path: path.read_bytes() for path in files(url) if ".sidesave" not in str(path)}
    for attempt in (
        lambda: Checkpointer(url),
        lambda: sidesave.latest(url),
        lambda: sidesave.load(url),
    ):
        with pytest.raises(
            IntegrityError,
            match=r"\.sidesave\.log: the log of this run is missing.*restore the log",
        ):
            attempt()
    assert not log.exists()
    assert before == {path: path.read_bytes() for path in before}
    away.rename(log)
    with Checkpointer(url) as ckpt:
        assert same(ckpt.load(), a_state(3))
        ckpt.save(4, a_state(4), blocking=True)
        assert ckpt.steps() == [1, 2, 4]
