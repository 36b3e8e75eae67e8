"""``sidesave copy``: a whole run brought from anywhere to anywhere."""

import errno
from pathlib import Path

import pytest
from commands import output
from loads import flip_bit
from mirrors import check_there
from object_server import ObjectServer
from trainers import a_state, commit, save_steps

import sidesave
from sidesave.client.runs.pins import Pins
from sidesave.errors import UnsupportedValueError, WriteError
from sidesave.writer_daemon.checkpoints import copying

_WAYS = [("directory", "s3"), ("s3", "directory"), ("s3", "file"), ("directory", "directory")]


@pytest.fixture
def server(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    server.announce(monkeypatch.setenv)
    return server


def place(kind: str, tmp_path: Path, name: str) -> str:
    return {
        "directory": f"{tmp_path}/{name}",
        "file": f"file://{tmp_path}/{name}",
        "s3": f"s3://bucket/{name}",
    }[kind]


@pytest.mark.drawn
@pytest.mark.parametrize(("source", "target"), _WAYS)
def test_a_run_is_copied_from_anywhere_to_anywhere_and_goes_on_there(
    source: str, target: str, tmp_path: Path, server: ObjectServer
):
    run, copy = place(source, tmp_path, "run"), place(target, tmp_path, "copy")
    with sidesave.Checkpointer(run) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, a_state(step), blocking=True)
        ckpt.load(2)
        ckpt.save(4, a_state(4), blocking=True)
    assert copy in output("copy", run, copy)
    check_there(copy, {1, 2, 3, 4})
    of_both = [
        [(info.step, info.session, info.given_up) for info in sidesave.find(each)]
        for each in (run, copy)
    ]
    assert of_both[0] == of_both[1], "also where it has gone back"
    assert "0 B" in output("copy", run, copy)
    with sidesave.Checkpointer(copy) as ckpt:
        assert ckpt.latest_step() == 4
        ckpt.load()
        commit(ckpt, 5)


def test_a_rollback_is_copied_if_no_checkpoint_is_missing(tmp_path: Path):
    run, copy = str(tmp_path / "run"), str(tmp_path / "copy")
    save_steps(run, 1, 2, 3)
    output("copy", run, copy)
    with sidesave.Checkpointer(run) as ckpt:
        ckpt.load(step=2)
    output("copy", run, copy)
    assert sidesave.find(copy)[-1].step == 2


def test_interrupted_it_goes_on_with_the_files_that_had_not_arrived(
    tmp_path: Path, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
):
    run, copy = str(tmp_path / "run"), "s3://bucket/copy"
    save_steps(run, 1, mib=8)
    original = copying._Copy._put_small

    def fail(self: copying._Copy, name: str, data: bytes) -> None:
        if name == copying.MANIFEST:
            raise WriteError(errno.EIO, "the machine is gone", name)
        original(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(copying._Copy, "_put_small", fail)
        assert "the machine is gone" in output("copy", run, copy, status=1)
    assert sidesave.find(copy) == []
    server.requests.clear()
    output("copy", run, copy)
    sent = [
        request.key
        for request in server.requests
        if request.method in ("PUT", "PUT-NEW", "PART", "START")
    ]
    assert not [key for key in sent if key.endswith((".safetensors", ".xxh3", ".msgpack"))]
    check_there(copy, {1}, mib=8)


def test_what_is_damaged_is_left_out_and_told_of(tmp_path: Path):
    run, copy = f"file://{tmp_path}/run", f"{tmp_path}/copy"
    save_steps(run, 1, 2)
    flip_bit(next((tmp_path / "run").glob("step-00000001*/model*.safetensors")))
    assert "step-00000001 is left out" in output("copy", run, copy, status=1)
    check_there(copy, {2})
    assert [info.step for info in sidesave.find(copy)] == [2]


def test_a_place_that_a_live_session_saves_to_is_refused_and_a_live_source_is_not(tmp_path: Path):
    run, copy = f"file://{tmp_path}/run", f"{tmp_path}/copy"
    with sidesave.Checkpointer(run) as ckpt, sidesave.Checkpointer(copy):
        commit(ckpt, 1)
        assert "is using it" in output("copy", run, copy, status=1)
        output("copy", run, f"{tmp_path}/other")
        commit(ckpt, 2)
    assert [info.step for info in sidesave.find(f"{tmp_path}/other")] == [1]


def test_places_in_each_other_are_refused(tmp_path: Path, server: ObjectServer):
    (tmp_path / "run").mkdir()
    for first, second in (
        (tmp_path / "run", tmp_path / "run" / "copy"),
        (tmp_path / "run", f"file://{tmp_path}/run"),
        ("s3://bucket/run", "s3://bucket/run/copy"),
        ("s3://bucket/run", "s3://bucket/run"),
    ):
        assert "are inside one another" in output("copy", first, second, status=2)
    assert "not written to" in output("copy", tmp_path / "run", "http://host/run", status=2)


@pytest.mark.parametrize("by", ["s3", "file", "directory"])
def test_pins_and_the_history_of_saves_come_along_whatever_the_way(
    by: str, tmp_path: Path, server: ObjectServer
):
    run, between, back = (
        str(tmp_path / "run"),
        place(by, tmp_path, "between"),
        str(tmp_path / "back"),
    )
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        with pytest.raises(UnsupportedValueError):
            ckpt.save(2, {"model": object()}, blocking=True)
    Pins(run).change(1, pinned=True)
    output("copy", run, between)
    output("copy", between, back)
    assert sidesave.history(back) == sidesave.history(run)
    assert [record.outcome for record in sidesave.history(back)] == ["committed", "failed"]
    assert Pins(back).read() == {1}


def test_a_copy_keeps_what_its_own_sessions_have_pinned_and_told(tmp_path: Path):
    run, copy = str(tmp_path / "run"), str(tmp_path / "copy")
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        output("copy", run, copy)
        save_steps(copy, 7)
        Pins(copy).change(7, pinned=True)
        commit(ckpt, 2)
    Pins(run).change(2, pinned=True)
    for _ in range(2):
        output("copy", run, copy)
        assert [record.step for record in sidesave.history(copy)] == [1, 7, 2]
        assert {record.outcome for record in sidesave.history(copy)} == {"committed"}
        assert Pins(copy).read() == {2, 7}
    with sidesave.Checkpointer(copy) as other:
        commit(other, 8)
        assert [record.step for record in other.history()] == [1, 7, 2, 8]


def test_damaged_pins_are_told_of_and_keep_nothing_else_back(tmp_path: Path):
    run, copy = tmp_path / "run", f"{tmp_path}/copy"
    save_steps(run, 1)
    (run / ".sidesave.pins").write_text("[1,")
    assert "the pins are left out" in output("copy", run, copy, status=1)
    check_there(copy, {1})


def test_where_the_parent_of_a_copy_is_missing_it_is_told_what_to_make(tmp_path: Path):
    save_steps(tmp_path / "run", 1)
    told = output("copy", tmp_path / "run", tmp_path / "missing" / "copy", status=1)
    assert f"or, for a copy, call `mkdir -p {tmp_path}/missing/copy`" in " ".join(told.split())
