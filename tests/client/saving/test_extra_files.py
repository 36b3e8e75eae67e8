"""Files that are saved beside the tensors are as durable as they are, and where stock readers look
for them.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import trainers
from commands import as_json, output
from hypothesis import given
from hypothesis import strategies as st
from rank_trainers import Ranks, leftovers
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from trainers import (
    DEADLINE_S,
    ROOT,
    Orders,
    Traces,
    Trainer,
    a_state,
    check,
    entries,
    same,
    say,
    wait_to_go_on,
)

sys.path.insert(0, str(ROOT))
import sidesave
from scripts import fuzz
from sidesave.client.export.safetensors import export
from sidesave.errors import IntegrityError, InvalidArgumentError, ProtocolError
from sidesave.writer_daemon.format import manifest, names
from sidesave.writer_daemon.format.extra_files import pack_files, unpack_files
from sidesave.writer_daemon.format.names import is_extra_file_name

FILES: dict[str, str | bytes] = {
    "config.json": '{"model_type": "llama", "name": "Zürich \N{SNOWMAN}"}',
    "tokenizer.model": bytes(range(256)) * 40,
    "special_tokens_map.json": "{}",
    "empty": b"",
    "model.safetensors.index.json": "{}",
    "additional_chat_templates/tool_use.jinja": "{{ messages }}",
    "additional_chat_templates/rag": b"",
    f"{'long':x<200}": "a name as long as may be",
}
STEP = "step-00000001"


def content(name: str) -> bytes:
    """What is on disk of one of ``FILES``."""
    told = FILES[name]
    return told if isinstance(told, bytes) else told.encode()


def read_files(path: Path) -> dict[str, bytes]:
    """The files beside what belongs to a checkpoint, by their names; those of folders with these in
    front.
    """
    names = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in names.items() if is_extra_file_name(name)}


def holds_files(path: str | os.PathLike[str]) -> None:
    """Exactly ``FILES`` stand beside what belongs to a checkpoint, as they were given, and all of
    it verifies.
    """
    assert read_files(Path(path)) == {name: content(name) for name in FILES}
    report = sidesave.verify(path)
    assert report.ok, report.faults


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with ``FILES``."""
    with sidesave.Checkpointer(tmp_path / "run") as ckpt:
        return Path(ckpt.save(1, a_state(1), files=FILES, blocking=True).committed.result().path)


# What is there ------------------------------------------------------------------------------------


def test_files_are_there_as_they_were_given_and_count_as_bytes_of_the_checkpoint(tmp_path: Path):
    without = {}
    with sidesave.Checkpointer(tmp_path) as ckpt:
        for step, files in ((1, FILES), (2, None), (3, {}), (4, FILES)):
            info = ckpt.save(step, a_state(step), files=files).committed.result(DEADLINE_S)
            without[step] = info.nbytes - sum(len(content(name)) for name in files or {})
            assert sidesave.verify(info.path).nbytes == info.nbytes
    check(tmp_path, 1, 2, 3, 4)
    assert len(set(without.values())) == 1
    for step in (1, 4):
        holds_files(tmp_path / f"step-{step:08d}")
    for step in (2, 3):
        assert not any(
            is_extra_file_name(file.name) for file in (tmp_path / f"step-{step:08d}").iterdir()
        )
    assert b"extra_files" not in (tmp_path / "step-00000003" / "rank-00000.json").read_bytes()


def test_stock_readers_find_them_and_take_none_for_tensors(saved: Path):
    assert json.loads((saved / "config.json").read_text())["model_type"] == "llama"
    assert torch.equal(
        load_file(saved / "model.rank-00000.safetensors")["model.b"], a_state(1)["model"]["b"]
    )
    loaded = {
        f"model.{name}": torch.zeros_like(tensor) for name, tensor in a_state(1)["model"].items()
    }
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(saved)), no_dist=True)
    assert all(
        torch.equal(tensor, a_state(1)["model"][name.removeprefix("model.")])
        for name, tensor in loaded.items()
    )


def test_only_what_was_given_at_the_call_counts(tmp_path: Path):
    files: dict[str, str | bytes] = {"config.json": "before"}
    with sidesave.Checkpointer(tmp_path) as ckpt:
        handle = ckpt.save(1, a_state(1), files=files)
        files |= {"config.json": "after", "more": "after"}
        path = Path(handle.committed.result(DEADLINE_S).path)
    assert (path / "config.json").read_text() == "before"
    assert not (path / "more").exists()


def test_an_overwritten_step_has_the_new_files_and_a_deleted_one_none(tmp_path: Path):
    with sidesave.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, a_state(2), files={"old": "1", "config.json": "old"}, blocking=True)
        ckpt.save(1, a_state(1), files=FILES, overwrite=True, blocking=True)
        holds_files(tmp_path / STEP)
        ckpt.save(2, a_state(2), files={"config.json": "{}"}, blocking=True)
        ckpt.delete(1).result(DEADLINE_S)
        assert ckpt.steps() == [2]
    assert entries(tmp_path) == ["step-00000002"]


def test_files_in_folders_come_along_into_a_mirror_and_a_store_and_back(tmp_path: Path):
    mirror, store = f"file://{tmp_path}/mirror", f"file://{tmp_path}/store"
    with sidesave.Checkpointer(tmp_path / "run", mirror=mirror) as ckpt:
        ckpt.save(1, a_state(1), files=FILES)
        ckpt.wait(mirrored=True)
    with sidesave.Checkpointer(store) as ckpt:
        ckpt.save(1, a_state(1), files=FILES, blocking=True)
    for number, place in enumerate((mirror, store)):
        assert sidesave.verify(place).ok
        holds_files(sidesave.fetch(place, tmp_path / f"fetched-{number}").path)
    output("copy", store, tmp_path / "copy")
    holds_files(tmp_path / "copy" / STEP)


def test_as_many_and_as_much_as_is_allowed_is_written(tmp_path: Path):
    many = {
        f"{number}-{'x' * 190}": bytes([number % 256])
        for number in range(names.MAX_EXTRA_FILES - 1)
    }
    big = os.urandom(1 << 20) * (names.MAX_EXTRA_NBYTES >> 20)
    files = {**many, "big": big[len(many) :]}
    with sidesave.Checkpointer(tmp_path) as ckpt:
        path = Path(
            ckpt.save(1, {"w": torch.ones(2)}, files=files, blocking=True).committed.result().path
        )
    assert all((path / name).read_bytes() == data for name, data in files.items())
    assert sidesave.verify(path).ok


def test_memory_that_was_prepared_with_files_is_what_the_first_save_takes(tmp_path: Path):
    files = {"tokenizer.json": bytes(20 << 20)}
    with sidesave.Checkpointer(tmp_path) as ckpt:
        ckpt.prepare(a_state(1), files=files).result(DEADLINE_S)
        arenas = {slot.arena_id for slot in ckpt.session.pool._slots}
        for step in (1, 2):
            ckpt.save(step, a_state(step), files=files, blocking=True)
        assert {slot.arena_id for slot in ckpt.session.pool._slots} == arenas


def test_the_fallback_directory_gets_them_as_well(tmp_path: Path, orders: Orders):
    with sidesave.Checkpointer(
        tmp_path / "run", failures=sidesave.FailureOptions(fallback_directory=tmp_path / "other")
    ) as ckpt:
        orders.give("EROFS", starting_at="os.link", after=3)
        path = ckpt.save(1, a_state(1), files=FILES).committed.result(DEADLINE_S).path
    assert orders.was_obeyed()
    assert Path(path).parent == tmp_path / "other"
    holds_files(path)


@pytest.mark.root
def test_a_save_that_does_not_fit_for_its_files_is_refused_before_a_byte_is_written(
    mount: Callable[..., Path], tmp_path: Path
):
    small = mount("-t", "tmpfs", "-o", "size=8m", "none")
    with sidesave.Checkpointer(small, failures=sidesave.FailureOptions(tolerated=5)) as ckpt:
        with pytest.warns(RuntimeWarning, match="are free"):
            error = ckpt.save(1, a_state(1), files={"vocab": bytes(12 << 20)}).committed.exception(
                DEADLINE_S
            )
        assert isinstance(error, sidesave.errors.NoSpaceError)
        assert re.match(r"step 1 needs 1\d,\d{3},\d{3} bytes", error.strerror or "")
        ckpt.save(1, a_state(1), files=FILES, blocking=True)
    assert entries(small) == [STEP]


# Damage -------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path) -> None:
    path.rename(path.parents[2] / "moved")
    path.symlink_to(path.parents[2] / "moved")


OF_ALL = (lengthen, Path.unlink, replace_by_directory, replace_by_link)
NESTED = "additional_chat_templates/tool_use.jinja"
HARMS = {
    "config.json": (cut, flip, *OF_ALL),
    "tokenizer.model": (cut, flip, *OF_ALL),
    "empty": OF_ALL,
    NESTED: (cut, flip, *OF_ALL),
}


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("name", "harm"), [(name, harm) for name, harms in HARMS.items() for harm in harms]
)
def test_damage_is_a_fault_that_names_the_file(
    saved: Path, name: str, harm: Callable[[Path], object]
):
    harm(saved / name)
    assert [fault.file for fault in sidesave.verify(saved).faults] == [name]
    assert same(sidesave.load(saved), a_state(1)), "the state is whole"
    assert name in output("verify", saved, status=1)


def test_a_link_in_the_place_of_a_folder_is_a_fault(saved: Path):
    replace_by_link((saved / NESTED).parent)
    assert [fault.file for fault in sidesave.verify(saved).faults] == ["additional_chat_templates"]


def test_a_file_that_nobody_has_given_is_reported_and_one_whose_record_is_damaged_is_not(
    saved: Path,
):
    (saved / "stranger.json").write_text("{}")
    assert [fault.file for fault in sidesave.verify(saved).faults] == ["stranger.json"]
    (saved / "stranger.json").unlink()
    (saved / NESTED).with_name("stranger").write_text("{}")
    assert [fault.file for fault in sidesave.verify(saved).faults] == [
        "additional_chat_templates/stranger"
    ]
    (saved / NESTED).with_name("stranger").unlink()
    flip(saved / "rank-00000.json")
    assert [fault.file for fault in sidesave.verify(saved).faults] == ["rank-00000.json"]


# Processes that die -------------------------------------------------------------------------------


class SavingTrainer(Trainer):
    """A trainer that runs this module: it saves step 1 with ``FILES`` when told to, and says when
    it is staged.
    """

    script = __file__


def save_and_wait(run: str, follow: str) -> None:
    from sidesave.client.saving import saver

    if follow == "1":
        saver._FOLLOW_NBYTES = 0  # type: ignore[misc] - 512 MiB would do as well
    trainers.follow_orders("trainer")
    ckpt = sidesave.Checkpointer(run)
    say("ready", ckpt.daemon_pid)
    wait_to_go_on()
    ckpt.save(1, a_state(1), files=FILES).staged.result()
    say("staged")
    wait_to_go_on()


@pytest.mark.parametrize(
    ("follow", "moment"), [(0, "staged"), (0, "sends SAVE"), (0, "sent SAVE"), (1, "staged")]
)
def test_trainer_killed_right_after_staging_its_files_are_committed(
    tmp_path: Path, orders: Orders, traces: Traces, follow: int, moment: str
):
    """The daemon has been told of the save by then, or finds it in the memory; or it follows the
    copy.
    """
    run = tmp_path / "run"
    with SavingTrainer(traces, run, follow) as trainer:
        trainer.expect("ready")
        orders.give("kill", to="trainer", starting_at=moment, every_step=True)
        trainer.go_on()
        orders.obeyed()
        assert trainer.end() == -signal.SIGKILL
    traces.check()
    check(run, 1)
    holds_files(run / STEP)


def test_trainer_and_daemon_killed_when_all_is_written_the_next_session_commits_the_files(
    tmp_path: Path, orders: Orders, traces: Traces
):
    run = tmp_path / "run"
    with SavingTrainer(traces, run, 0) as trainer:
        trainer.expect("ready")
        orders.give("stop", starting_at="sends WRITTEN", every_step=True)
        trainer.go_on()
        pid, _ = orders.obeyed()
        trainer.kill()
        os.kill(pid, signal.SIGKILL)
    traces.check()
    (partial,) = run.glob(".step-*.partial")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    subprocess.run(["cp", "-r", str(partial), str(damaged)], check=True)
    flip(damaged / partial.name / "config.json")
    with sidesave.Checkpointer(run) as ckpt:
        assert ckpt.recovered == (STEP,)
    holds_files(run / STEP)
    with sidesave.Checkpointer(damaged) as ckpt:
        assert (ckpt.recovered, ckpt.removed) == ((), (partial.name,)), (
            "what lacks a file of its own is not whole"
        )


@pytest.mark.slow
def test_daemon_killed_at_every_step_of_writing_its_successor_writes_the_files(
    tmp_path: Path, orders: Orders
):
    """Each time another file has its final name already, or its temporary one."""
    written: set[str] = set()
    step = 0
    with sidesave.Checkpointer(tmp_path / "run") as ckpt:
        for step in itertools.count(1):
            orders.give("kill", starting_at="os.mkdir", after=3 * step)
            info = ckpt.save(step, a_state(step), files=FILES).committed.result(DEADLINE_S)
            holds_files(info.path)
            if not orders.was_obeyed():
                orders.withdraw()
                break
            written.add(orders.obeyed()[1].partition(" ")[0])
        assert step > 6, "the files alone take more"
    assert "os.link" in written
    assert entries(tmp_path / "run") == [f"step-{number:08d}" for number in range(1, step + 1)]


# Several ranks ------------------------------------------------------------------------------------


def test_of_several_ranks_those_of_rank_0_are_written(traces: Traces, tmp_path: Path):
    run = tmp_path / "run"
    texts: dict[str, Any] = {name: text for name, text in FILES.items() if isinstance(text, str)}
    with Ranks(2, tmp_path / "groups", traces) as ranks:
        ranks.do("build", "plain", 1)
        ranks.open(run)
        for step in (1, 2):  # the second one's ranks know that they hold the same
            for rank in ranks:
                rank.tell(
                    "save",
                    step,
                    files=texts if rank is ranks[0] else {"config.json": "another", "more": "x"},
                )
            for rank in ranks:
                rank.answer().get()
            ranks.do("committed", step)
        ranks[0].tell("save", 3, files={"manifest.json": "x"})
        ranks[1].tell("save", 3)
        told = [rank.answer() for rank in ranks]
        assert told[0].error == "InvalidArgumentError"
        refused = ranks[1].do("outcome", 3)
        assert refused != "committed"
        ranks[1].do("forgive")
        ranks.do("save", 4, files={"config.json": "4"})
        ranks.do("committed", 4)
        ranks.do("close")
    for step in (1, 2):
        path = run / f"step-{step:08d}"
        assert sidesave.verify(path).ok
        assert read_files(path) == {name: text.encode() for name, text in texts.items()}
        assert b"extra_files" not in (path / "rank-00001.json").read_bytes()
        flip(path / "rank-00001.json")
        (path / "stranger.json").write_text("{}")
        assert [fault.file for fault in sidesave.verify(path).faults] == [
            "rank-00001.json",
            "stranger.json",
        ]
    assert (run / "step-00000004" / "config.json").read_text() == "4"
    assert leftovers(run) == []


# What is refused ----------------------------------------------------------------------------------

FORBIDDEN = [
    *(
        "",
        ".",
        "..",
        "../config.json",
        "/etc/passwd",
        ".hidden",
        "a b",
        "ä.json",
        "x\n",
        "x\0",
        "x" * 201,
    ),
    *(
        "a/b/c",
        "a//b",
        "/a",
        "a/",
        "a/..",
        "a/.b",
        ".a/b",
        "./a",
        "a/manifest.json",
        "rank-0/a",
        f"a/{'x' * 199}",
    ),
    *(
        "manifest.json",
        "MANIFEST.JSON",
        "abort.json",
        "rank-00000.json",
        "rank-x",
        "replica-digest.rank-00000.0",
        "replica-digest.x",
    ),
    *(
        "objects.rank-00000.msgpack",
        "a.rank-b",
        "model.safetensors",
        "x.SafeTensors",
        "x.xxh3",
        "x.msgpack",
    ),
    *(5, None, b"config.json", ("a",)),
]


@pytest.mark.drawn
@pytest.mark.parametrize("name", FORBIDDEN, ids=ascii)
def test_names_that_could_be_ours_or_lead_elsewhere_are_refused_at_the_call(
    tmp_path: Path, name: Any
):
    with sidesave.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(
            InvalidArgumentError, match=r"cannot have the name .*; names are 1 to 200 ASCII letters"
        ):
            ckpt.save(1, a_state(1), files={"fine": "", name: "x"})
        assert ckpt.steps() == []
        ckpt.save(1, a_state(1), files={"fine": ""}, blocking=True)
    assert entries(tmp_path) == [STEP]


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"a": 5}, "content of file a must be str or bytes, not int"),
        ({"a": None}, "content of file a must be str or bytes, not NoneType"),
        ({"a": {"model_type": "llama"}}, "content of file a must be str or bytes, not dict"),
        ({"a": "\ud800"}, "cannot be UTF-8"),
        ({"a": "", "a/b": ""}, "a cannot be a file and the folder of another file"),
        (["a"], "files must be a dict"),
        ("a", "files must be a dict"),
        (
            {"a": bytes(40 << 20), "b": bytes((24 << 20) + 1)},
            "exceed the limit of 1,000 files and 64 MiB in all at b;",
        ),
        (
            {f"f{number}": b"" for number in range(1001)},
            "exceed the limit of 1,000 files and 64 MiB in all at f1000;",
        ),
    ],
    ids=[
        "number",
        "none",
        "nest",
        "half a pair",
        "file and folder",
        "list",
        "text",
        "too large",
        "too many",
    ],
)
def test_files_that_cannot_be_written_are_refused_at_the_call(
    tmp_path: Path, files: Any, what: str
):
    with sidesave.Checkpointer(tmp_path) as ckpt:
        for call in (ckpt.save, lambda step, state, files: ckpt.prepare(state, files=files)):
            with pytest.raises(InvalidArgumentError, match=what):
                call(1, a_state(1), files=files)
        assert ckpt.steps() == []


@given(
    st.text(st.sampled_from("abcRANK-.0123_%@ /json"), max_size=30)
    | st.sampled_from(["rank", "a.rank-00001.b"])
)
def test_a_name_that_is_allowed_is_none_that_a_checkpoint_could_have(name: str):
    if is_extra_file_name(name):
        assert not name.startswith((".", "rank-", "replica-digest."))
        assert ".rank-" not in name
        assert len(Path(name).parts) <= 2
        assert (Path("run") / name).as_posix() == f"run/{name}"
        assert all(part.strip(".") for part in Path(name).parts)


def a_record(*beside: Any, rank: int = 0) -> bytes:
    """A record with right digests that lists these files."""
    digest = "0" * 32
    objects = {"name": f"objects.rank-{rank:05d}.msgpack", "nbytes": 1, "xxh3_128": digest}
    lineage = {"parent": None, "pickle": False, "created_s": 1.5, "torch_version": "2.8"}
    about = {"session": "0123456789abcdef", "step": 1, "sequence": 1, "rank": rank, "world_size": 2}
    empty: dict[str, Any] = {"layouts": [], "containers": [], "tensors": {}}
    part = {
        **empty,
        "own": empty,
        "cells": "0" * 32,
        "treespec": "",
        "replica_digest": "",
        "compared": {},
    }
    top = {"format": "sidesave-rank", "version": 1, "status": "written"}
    body = {
        **top,
        **about,
        **lineage,
        "files": [],
        "objects": objects,
        "extra_files": list(beside),
        **part,
    }
    return fuzz.seal(json.dumps(body, separators=(",", ":")).encode())


def a_file(name: Any = "config.json", **changes: Any) -> dict[str, Any]:
    return {"name": name, "nbytes": 2, "xxh3_128": "0" * 32, **changes}


HOSTILE_LISTS = {
    **{ascii(name): [a_file(name)] for name in FORBIDDEN if not isinstance(name, (bytes, tuple))},
    "two of one name": [a_file(), a_file()],
    "a file and a folder of one name": [a_file("a"), a_file("a/b")],
    "no digest": [{"name": "config.json", "nbytes": 2}],
    "a digest list": [a_file(xxh3_128=None, digests=a_file("x.rank-00000.xxh3"))],
    "a container": [a_file(container="model")],
    "a negative length": [a_file(nbytes=-1)],
    "terabytes": [a_file(nbytes=1 << 40)],
    "too much together": [a_file(nbytes=40 << 20), a_file("b", nbytes=40 << 20)],
    "no object": ["config.json"],
    "a nest": [[a_file()]],
}


@pytest.mark.parametrize("what", HOSTILE_LISTS)
def test_a_record_with_a_hostile_list_is_refused(what: str):
    with pytest.raises(IntegrityError):
        manifest.RankRecord.from_bytes(a_record(*HOSTILE_LISTS[what]), "r")


def test_a_record_comes_back_as_it_was_and_of_another_rank_lists_none():
    data = a_record(a_file("b"), a_file("a"))
    record = manifest.RankRecord.from_bytes(data, "r")
    assert [file.name for file in record.extra_files] == ["b", "a"]
    assert manifest.RankRecord.from_bytes(record.to_bytes(), "r") == record
    assert record.nbytes == 5
    assert manifest.RankRecord.from_bytes(a_record(rank=1), "r").extra_files == ()
    with pytest.raises(IntegrityError, match="only rank 0 may"):
        manifest.RankRecord.from_bytes(a_record(a_file(), rank=1), "r")


@given(
    st.dictionaries(
        st.from_regex(r"[a-z0-9]{1,20}(\.json)?", fullmatch=True),
        st.binary(max_size=40),
        max_size=6,
    )
)
def test_files_are_staged_as_they_are(files: dict[str, bytes]):
    assert unpack_files(pack_files(files)) == files


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"",
            b"\x90",
            b"\xc0",
            b"\x80\x80",
            b"\x81\xa1a\x90",
            b"\x81\xa1a\x80",
            b"\x81\xa1a\xa1b",
            b"\x81\x01\xc4\0",
        ),
        *(b"\xc7\0\5", b"\x81\xa1a\xc7\0\5", b"\x81\xc7\0\5\xc4\0"),
        *(
            b"\x82\xa1a\xc4\0\xa1a\xc4\0",
            b"\x81\xc4\1a\xc4\0",
            b"\x81\xa1a\xc6\xff\xff\xff\xff",
            b"\x81\xa1a" * 100_000,
        ),
        *(
            pack_files({name: b""})
            for name in ("../a", "a/b/c", "manifest.json", "a.safetensors", "")
        ),
        pack_files({"a": b"", "a/b": b""}),
        pack_files({f"f{number}": b"" for number in range(1001)}),
        pack_files({"a": bytes((64 << 20) + 1)}),
    ],
    ids=lambda data: ascii(data[:12]),
)
def test_staged_files_that_are_none_are_refused(data: bytes):
    with pytest.raises(ProtocolError):
        unpack_files(data)


# Tools --------------------------------------------------------------------------------------------


def test_show_lists_them(saved: Path):
    assert as_json("show", saved)["files"] == {name: len(content(name)) for name in FILES}
    assert re.search(r"tokenizer\.model +10,240\n", output("show", saved))


@pytest.mark.parametrize("limit", ["5GB", "1KB"])
def test_an_export_brings_them_along_but_for_an_index_of_its_own(
    saved: Path, tmp_path: Path, limit: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, "sidesave"):
        text = output(
            "export", saved, tmp_path / "out", "--item", "model", "--max-shard-size", limit
        )
    assert (
        "with config.json, tokenizer.model, special_tokens_map.json, empty, "
        "additional_chat_templates/tool_use.jinja, "
    ) in text
    assert "its model.safetensors.index.json is left out" in caplog.text
    out = tmp_path / "out"
    found = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    for name in FILES.keys() - {"model.safetensors.index.json"}:
        assert found.pop(name).read_bytes() == content(name)
    if limit == "5GB":
        assert found.keys() == {"model.safetensors"}
    else:
        index = json.loads(found.pop("model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == found.keys()
        assert index["weight_map"].keys() == {"w", "b"}


def test_an_export_of_a_damaged_file_is_refused_and_leaves_nothing(saved: Path, tmp_path: Path):
    flip(saved / "tokenizer.model")
    with pytest.raises(IntegrityError, match=r"tokenizer\.model"):
        export(saved, tmp_path / "out", item="model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


if __name__ == "__main__":
    save_and_wait(*sys.argv[1:])
