"""Encrypted runs: whoever has the key reads them as ever, and whoever has not reads nothing; and is
told so at once.
"""

from __future__ import annotations

import copy
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import output, sidesave_cli
from encrypted import KEY, OTHER, check, encryption, refuse_any, windows
from loads import flip_bit, live
from row_tables import GrowingTable
from states import difference
from torch import nn
from trainers import DEADLINE_S, Traces, a_state, commit, same, save, save_steps

import sidesave
from sidesave import Encryption, Frozen
from sidesave.errors import (
    IntegrityError,
    InvalidArgumentError,
    KeyMissingError,
    TamperedError,
    WriteError,
    WrongKeyError,
)
from sidesave.writer_daemon.format.manifest import FileRecord, Manifest, RankRecord
from sidesave.writer_daemon.format.tensor_file import BLOCK_NBYTES, digest
from sidesave.writer_daemon.storage.sealed_json import load_json, seal

pytest.importorskip("cryptography", reason="needs cryptography: pip install 'sidesave[encryption]'")

FIRST = "0.rank-00000.safetensors.enc"


def saved(run: Path | str, *steps: int, key: bytes = KEY, **options: Any) -> None:
    with sidesave.Checkpointer(run, encryption=encryption(key), **options) as ckpt:
        for step in steps:
            commit(ckpt, step)


def loaded(path: Path | str, key: bytes = KEY, **options: Any) -> dict[str, Any]:
    return sidesave.load(path, encryption=encryption(key), **options)


# What is kept -------------------------------------------------------------------------------------


EXTRA_FILES = {"config.json": '{"width": 8}', "templates/a": "one"}


def test_a_state_of_every_kind_comes_back_with_its_files_and_metadata(run: Path):
    state = live(3)
    with sidesave.Checkpointer(run, encryption=encryption()) as ckpt:
        ckpt.save(1, state, metadata={"loss": 0.5}, files=EXTRA_FILES).committed.result(DEADLINE_S)
        assert not difference(ckpt.load()["model"], state["model"].state_dict())
    into = live(1)
    loaded(run, into=into)
    assert not difference(into["model"].state_dict(), state["model"].state_dict())
    assert into["loader"].position == state["loader"].position
    [info] = sidesave.find(run, encryption=encryption())
    assert info.metadata == {"loss": 0.5}
    [info] = sidesave.find(run)
    assert info.metadata == {}
    assert sidesave.verify(run).ok
    assert output("show", run, "--key-env", "NO_KEY", status=1).count("NO_KEY") == 1
    sidesave.export(run, run / "exported", item="model", encryption=encryption())
    assert {name: (run / "exported" / name).read_text() for name in EXTRA_FILES} == EXTRA_FILES


def test_nothing_of_a_state_reaches_storage_or_the_socket_directory(
    run: Path, traces: Traces, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TMPDIR", traces.folder)
    secret = os.urandom(100_000)
    state = {"model": {"weights.of.a.name": torch.frombuffer(bytearray(secret), dtype=torch.uint8)}}
    names = {b"weights.of.a.nam", b"eights.of.a.name", b"a-name-of-a-file", b"a value of plain"}
    with sidesave.Checkpointer(run, encryption=encryption()) as ckpt:
        ckpt.save(
            1,
            {**state, "plain": "a value of plain data"},
            metadata={"a value of plain data": secret.hex()[:64]},
            files={"a-name-of-a-file": secret[:5000]},
        ).committed.result(DEADLINE_S)
        secrets = windows(secret) | windows(secret.hex()[:64].encode()) | names | windows(KEY)
        assert refuse_any(run, secrets) > len(secret)
        refuse_any(Path(traces.folder), secrets)
    (run / "plain").write_bytes(b"12345" + secret[40:60])
    with pytest.raises(AssertionError, match="tells of"):  # it would be found
        refuse_any(run, secrets)


def test_a_part_is_read_without_the_rest(run: Path):
    with sidesave.Checkpointer(run, encryption=encryption()) as ckpt:
        big = torch.rand(32 << 20 >> 2)
        ckpt.save(1, {"model": {"big": big, "small": torch.arange(9.0)}}).committed.result(
            DEADLINE_S
        )
    from sidesave.client import encryption as keys
    from sidesave.client.reading.checkpoint_reader import CheckpointReader

    with keys.using(encryption()), CheckpointReader(f"{run}/step-00000001") as reader:
        reader.open_all()
        before = reader.nbytes_read
        box = ((1_000_000,), (70_000,))
        assert torch.equal(
            reader.read_boxes([("model.big", box)])["model.big", box], big[1_000_000:1_070_000]
        )
        assert reader.nbytes_read - before <= 4 * 70_000 + 2 * BLOCK_NBYTES
    assert torch.equal(loaded(run, include="model.small")["model"]["small"], torch.arange(9.0))


def test_what_is_frozen_is_linked_and_read_when_the_step_that_wrote_it_is_gone(run: Path):
    base, adapter = torch.rand(200_000), torch.rand(100)
    with sidesave.Checkpointer(run, encryption=encryption()) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(
                step, {"front": adapter + step, "model": Frozen({"w": base})}
            ).committed.result(DEADLINE_S)
        inodes = {
            path.stat().st_ino
            for path in run.glob("step-*/*.safetensors.enc")
            if path.stat().st_size > base.nbytes
        }
        assert len(inodes) == 1
        ckpt.delete(1).result(DEADLINE_S)
    for step in (2, 3):
        assert sidesave.verify(run / f"step-{step:08d}").ok
        state = loaded(run / f"step-{step:08d}")
        assert torch.equal(state["model"]["w"], base) and torch.equal(
            state["front"], adapter + step
        )


def test_a_linked_file_may_have_another_number_in_each_step(run: Path):
    base = torch.rand(200_000)
    with sidesave.Checkpointer(run, encryption=encryption()) as ckpt:
        for step in (1, 2, 3):
            state: dict[str, Any] = {
                f"a{step}-{each}": {"w": torch.full((9,), float(step))} for each in range(step)
            }
            ckpt.save(step, {**state, "model": Frozen({"w": base})}).committed.result(DEADLINE_S)
    for step in (1, 2, 3):
        path = run / f"step-{step:08d}"
        assert sidesave.verify(path).ok and torch.equal(loaded(path)["model"]["w"], base)
    assert (
        len(
            {
                path.stat().st_ino
                for path in run.glob("step-*/*.enc")
                if path.stat().st_size > base.nbytes
            }
        )
        == 1
    )


def test_tables_are_saved_in_full(run: Path):
    table = GrowingTable()
    table.train(range(3000))
    with sidesave.Checkpointer(run, encryption=encryption()) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"users": table}).committed.result(DEADLINE_S)
            table.train(range(5))
        truth = table.values()
        ckpt.save(3, {"users": table}).committed.result(DEADLINE_S)
        shutil.rmtree(run / "step-00000001")
        shutil.rmtree(run / "step-00000002")
        again = GrowingTable()
        ckpt.load(into={"users": again})
    assert again.values() == truth


# Keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error"),
    [(None, KeyMissingError), (encryption(OTHER), WrongKeyError)],
    ids=["none", "other"],
)
def test_a_lost_key_is_told_at_the_start_and_by_a_load_and_nothing_has_changed(
    run: Path, given: Encryption | None, error: type[Exception]
):
    saved(run, 1, 2)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(error, match="encrypted"):
        sidesave.Checkpointer(run, encryption=given)
    with pytest.raises(error, match="encrypted"):
        sidesave.load(run, encryption=given)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    check(run, 1, 2)


def test_a_run_that_cannot_tell_is_not_taken_for_a_plain_one(run: Path):
    saved(run, 1)
    (run / ".sidesave.keys").rename(run / "keys")
    (run / ".sidesave.keys").mkdir()
    with pytest.raises(WriteError):
        sidesave.Checkpointer(run)
    (run / ".sidesave.keys").rmdir()
    (run / "keys").rename(run / ".sidesave.keys")
    flip_bit(run / ".sidesave.keys", 100)
    for given in (None, encryption()):
        with pytest.raises(IntegrityError):
            sidesave.Checkpointer(run, encryption=given)


def test_a_plain_run_becomes_encrypted_and_never_plain_again(run: Path):
    save_steps(run, 1)
    saved(run, 2)
    assert (run / "step-00000001" / "model.rank-00000.safetensors").exists()
    check(run, 1, 2)
    with pytest.raises(KeyMissingError):
        sidesave.Checkpointer(run)
    shutil.rmtree(run / "step-00000002")  # that it was encrypted is not forgotten
    with pytest.raises(KeyMissingError):
        sidesave.Checkpointer(run)


def test_steps_that_were_copied_by_hand_are_enough_to_tell_a_lost_key(run: Path, tmp_path: Path):
    saved(run, 1)
    shutil.copytree(run / "step-00000001", tmp_path / "copy" / "step-00000001")
    for given, error in ((None, KeyMissingError), (encryption(OTHER), WrongKeyError)):
        with pytest.raises(error):
            sidesave.Checkpointer(tmp_path / "copy", encryption=given)
    saved(tmp_path / "copy", 2)
    check(tmp_path / "copy", 1, 2)
    assert (tmp_path / "copy" / ".sidesave.keys").exists()


def contents(folder: Path) -> dict[Path, bytes]:
    """The files that saves have left in a run."""
    return {path: path.read_bytes() for path in folder.rglob("step-*/*") if path.is_file()}


@pytest.mark.parametrize("prefix", ["", "file://"], ids=["disk", "store"])
@pytest.mark.parametrize("goes_back", [False, True])
def test_the_latest_step_says_what_a_run_is_encrypted_with_where_its_own_keys_are_missing(
    tmp_path: Path, prefix: str, goes_back: bool
):
    if prefix:
        pytest.importorskip("obstore")
    run, url = tmp_path / "run", f"{prefix}{tmp_path / 'run'}"
    save_steps(url, 1, 9)
    with sidesave.Checkpointer(url, encryption=encryption()) as ckpt:
        if goes_back:  # the highest step is a plain one, and given up
            ckpt.load(1)
        commit(ckpt, 2 if goes_back else 10)
    (run / ".sidesave.keys").unlink()
    before = contents(run)
    for given, error in ((None, KeyMissingError), (encryption(OTHER), WrongKeyError)):
        with pytest.raises(error, match="is encrypted"):
            sidesave.Checkpointer(url, encryption=given)
    assert contents(run) == before
    assert not (run / ".sidesave.keys").exists()
    saved(url, 11)
    assert (run / ".sidesave.keys").exists()


@pytest.mark.parametrize("prefix", ["", "file://"], ids=["disk", "store"])
def test_the_mirror_of_an_encrypted_run_is_not_taken_for_that_of_another(
    run: Path, tmp_path: Path, prefix: str
):
    if prefix:
        pytest.importorskip("obstore")
    mirror, url = tmp_path / "mirror", f"{prefix}{tmp_path / 'mirror'}"
    save_steps(run, 1, encryption=encryption(), mirror=url)
    (mirror / ".sidesave.keys").unlink()
    before = contents(mirror)
    save_steps(tmp_path / "plain", 1)
    saved(tmp_path / "other", 1, key=OTHER)
    for name, given, error in (
        ("plain", None, KeyMissingError),
        ("other", encryption(OTHER), WrongKeyError),
    ):
        with pytest.raises(error, match="is encrypted"):
            sidesave.Checkpointer(tmp_path / name, encryption=given, mirror=url)
    assert contents(mirror) == before


@pytest.mark.parametrize("text", [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n"])
def test_a_key_comes_from_a_file_a_variable_or_a_function(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
):
    (tmp_path / "key").write_bytes(text)
    monkeypatch.setenv("RUN_KEY", KEY.hex())
    asked: list[int] = []
    saved(run, 1)
    for given in (
        Encryption(key=tmp_path / "key"),
        Encryption(key=str(tmp_path / "key")),
        Encryption(env="RUN_KEY"),
        Encryption(key=lambda: asked.append(1) or text),
    ):
        for _ in range(2):
            sidesave.load(run, encryption=given)
    assert asked == [1]


@pytest.mark.parametrize(
    "key", [b"", KEY[:16], KEY + b"0", KEY.hex()[:-1].encode(), b"g" * 64, 5, lambda: "text"]
)
def test_what_is_no_key_is_refused_and_not_shown(run: Path, key: Any):
    with pytest.raises(InvalidArgumentError, match="32 random bytes") as caught:
        sidesave.Checkpointer(run, encryption=Encryption(key=key))
    assert not run.exists() or not list(run.iterdir())
    if isinstance(key, bytes) and key:
        assert key.decode(errors="replace") not in str(caught.value) and repr(key) not in str(
            caught.value
        )


def test_a_key_that_is_not_there_is_told(run: Path, tmp_path: Path):
    for given in (Encryption(key=tmp_path / "none"), Encryption(env="NO_SUCH_VARIABLE")):
        with pytest.raises(KeyMissingError, match=r"none|NO_SUCH"):
            sidesave.Checkpointer(run, encryption=given)
    with pytest.raises(InvalidArgumentError, match=r"sidesave\.Encryption"):
        sidesave.Checkpointer(run, encryption=KEY)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidArgumentError, match="one of them"):
        Encryption()
    with pytest.raises(InvalidArgumentError, match="one of them"):
        Encryption(key=KEY, env="A")


def test_a_key_is_in_no_repr_and_is_not_pickled():
    given = encryption()
    for text in (repr(given), str(given), repr(Encryption(key=lambda: KEY)), repr([given])):
        assert repr(KEY)[2:-1] not in text and KEY.hex() not in text
    with pytest.raises(TypeError, match="must not reach a disk"):
        pickle.dumps(given)
    assert copy.deepcopy({"encryption": given})["encryption"] is given


def test_keys_are_exchanged_without_data_being_written_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OLD", KEY.hex())
    monkeypatch.setenv("NEW", OTHER.hex())
    saved(run, 1, 2)
    saved(run, 3)
    small = {"keys.json", ".sidesave.keys"}
    before = {
        path: path.stat().st_ino
        for path in run.rglob("*")
        if path.is_file() and path.name not in small
    }
    keys = ("--key-env", "OLD", "--new-key-env", "NEW")
    assert "3 checkpoints were" in output("rekey", run, *keys)
    after = {
        path: path.stat().st_ino
        for path in run.rglob("*")
        if path.is_file() and path.name not in small
    }
    assert {
        path: inode for path, inode in after.items() if path in before and "lease" not in str(path)
    } == {
        path: inode for path, inode in before.items() if path in after and "lease" not in str(path)
    }
    check(run, 1, 2, 3, key=OTHER)
    with pytest.raises(WrongKeyError):
        loaded(run)
    with pytest.raises(WrongKeyError):
        sidesave.Checkpointer(run, encryption=encryption())
    saved(run, 4, key=OTHER)
    check(run, 1, 2, 3, 4, key=OTHER)
    assert "0 checkpoints were" in output("rekey", run, *keys)
    assert "another key than either" in output(
        "rekey", run, "--key-env", "OLD", "--new-key-env", "OLD", status=1
    )
    check(run, 1, 2, 3, 4, key=OTHER)


@pytest.mark.parametrize("at", range(8))
def test_an_exchange_that_is_interrupted_is_told_and_gone_on_with(
    run: Path, monkeypatch: pytest.MonkeyPatch, at: int
):
    from sidesave.writer_daemon.storage import PosixStorage

    monkeypatch.setenv("OLD", KEY.hex())
    monkeypatch.setenv("NEW", OTHER.hex())
    saved(run, 1, 2, 3)
    put, done = PosixStorage.replace, 0

    class Killed(BaseException):
        pass

    def killed(self: PosixStorage, path: str, data: bytes) -> None:
        nonlocal done
        if path.endswith(("keys.json", ".sidesave.keys")):
            done += 1
            if done == at + 1:
                (run / f"{path}.0123abcd").write_bytes(data[:50])
                raise Killed
        put(self, path, data)

    keys = ("rekey", run, "--key-env", "OLD", "--new-key-env", "NEW")
    with monkeypatch.context() as patch:
        patch.setattr(PosixStorage, "replace", killed)
        if at < 5:
            with pytest.raises(Killed):
                sidesave_cli(*keys)
        else:
            output(*keys)
    begun = 0 < at < 5
    for key, holds in ((KEY, at == 0), (OTHER, at >= 5)):
        if holds:
            sidesave.Checkpointer(run, encryption=encryption(key)).close()
        else:
            with pytest.raises(WrongKeyError, match="interrupted" if begun else "another key"):
                sidesave.Checkpointer(run, encryption=encryption(key))
    output(*keys)
    check(run, 1, 2, 3, key=OTHER)
    sidesave.Checkpointer(run, encryption=encryption(OTHER)).close()
    assert not list(run.glob("step-*/keys.json.*"))


# Damage and tampering -----------------------------------------------------------------------------


def forged(run: Path, change: Callable[[Path, RankRecord], RankRecord]) -> Path:
    """A checkpoint that was changed, with all digests made right again."""
    saved(run, 1, 2)
    path = run / "step-00000002"
    record = change(path, RankRecord.from_bytes((path / "rank-00000.json").read_bytes(), ""))
    data = record.to_bytes()
    (path / "rank-00000.json").write_bytes(data)
    manifest = Manifest.from_bytes((path / "manifest.json").read_bytes(), "")
    entry = FileRecord("rank-00000.json", len(data), digest(data).hex())
    body = load_json(manifest.to_bytes(), "")
    body.pop("xxh3_128")
    (path / "manifest.json").write_bytes(seal({**body, "records": [entry.to_json()]}))
    assert sidesave.verify(path).ok, "whoever has no key sees nothing"
    return path


def with_digests(path: Path, record: RankRecord, number: int) -> RankRecord:
    file = record.files[number]
    data = (path / file.name).read_bytes()
    assert file.digests is not None and file.tags is not None
    blocks = [digest(data[at : at + BLOCK_NBYTES]) for at in range(0, len(data), BLOCK_NBYTES)]
    (path / file.digests.name).write_bytes(b"".join(blocks))
    digests, tags = (
        FileRecord(each.name, each.nbytes, digest((path / each.name).read_bytes()).hex())
        for each in (file.digests, file.tags)
    )
    files = [*record.files]
    files[number] = replace(file, digests=digests, tags=tags)
    return replace(record, files=tuple(files))


def flip(path: Path, record: RankRecord) -> RankRecord:
    flip_bit(path / FIRST, 5000)
    return with_digests(path, record, 0)


def swap(path: Path, record: RankRecord) -> RankRecord:
    name = "1.rank-00000.safetensors.enc"
    data, tags = (
        bytearray((path / name).read_bytes()),
        bytearray((path / "1.rank-00000.tags").read_bytes()),
    )
    one, other = slice(0, BLOCK_NBYTES), slice(BLOCK_NBYTES, 2 * BLOCK_NBYTES)
    data[one], data[other] = data[other], data[one]
    tags[:16], tags[16:32] = tags[16:32], tags[:16]
    (path / name).write_bytes(data)
    (path / "1.rank-00000.tags").write_bytes(tags)
    return with_digests(path, record, 1)


def repeat(path: Path, record: RankRecord) -> RankRecord:
    """Blocks of the step before, of the same file, sealed under that save's key."""
    old = path.parent / "step-00000001"
    for name in (FIRST, "0.rank-00000.tags"):
        shutil.copyfile(old / name, path / name)
    return with_digests(path, record, 0)


def tag(path: Path, record: RankRecord) -> RankRecord:
    flip_bit(path / "0.rank-00000.tags", 3)
    return with_digests(path, record, 0)


def origin(path: Path, record: RankRecord) -> RankRecord:
    """What is in clear is bound to what is sealed."""
    changed = replace(record.files[0], origin=(1, 0))
    return replace(record, files=(changed, *record.files[1:]))


def objects(path: Path, record: RankRecord) -> RankRecord:
    flip_bit(path / record.objects.name, 40)
    data = (path / record.objects.name).read_bytes()
    return replace(record, objects=FileRecord(record.objects.name, len(data), digest(data).hex()))


@pytest.mark.parametrize("change", [flip, swap, repeat, tag, origin, objects])
def test_a_block_that_was_changed_swapped_moved_or_repeated_is_refused_though_its_digest_is_right(
    run: Path, change: Callable[[Path, RankRecord], RankRecord]
):
    path = forged(run, change)
    with pytest.raises(TamperedError, match="it was changed, moved"):
        loaded(path)
    with pytest.raises(TamperedError):
        loaded(path, verify=False)
    assert isinstance(TamperedError(""), IntegrityError)
    with sidesave.Checkpointer(run, encryption=encryption()) as ckpt:
        assert ckpt.load(fallback=True)["seed"] == 1


def test_damage_is_found_without_a_key(run: Path):
    saved(run, 1)
    path = run / "step-00000001"
    for file in sorted(path.glob("*")):
        before = file.read_bytes()
        flip_bit(file, len(before) // 2)
        report = sidesave.verify(path)
        assert any(file.name in str(fault) for fault in report.faults), (file.name, report.faults)
        with pytest.raises((IntegrityError, WrongKeyError)):
            loaded(path)
        file.write_bytes(before)
    (path / "keys.json").rename(run / "keys")
    assert "without it this checkpoint cannot be read" in str(sidesave.verify(path).faults[0])
    with pytest.raises(IntegrityError, match="without it this checkpoint cannot be read"):
        loaded(path)


# Every way in and out -----------------------------------------------------------------------------


def test_a_manager_passes_its_key_on_to_loads_exports_and_listings(run: Path, tmp_path: Path):
    model = nn.Linear(30, 30)
    options: dict[str, Any] = {"encryption": encryption(), "save": sidesave.EverySteps(1)}
    with sidesave.CheckpointManager(
        run, {"model": model}, keep=sidesave.KeepBest(1, "loss"), **options
    ) as manager:
        for step, loss in ((1, 0.1), (2, 0.5), (3, 0.9), (4, 0.8)):
            manager.step(step, metrics={"loss": loss})
        manager.wait()
        report = manager.export(tmp_path / "out")
    assert report is not None and (tmp_path / "out" / "model.safetensors").exists()
    with sidesave.CheckpointManager(
        run, {"model": model}, keep=sidesave.KeepBest(1, "loss"), **options
    ) as manager:
        assert manager.restore() is not None
        best = manager.best("loss")
        assert best is not None and best.step == 1  # by metrics that are sealed


def test_several_sources_have_their_own_keys(tmp_path: Path):
    saved(tmp_path / "a", 1)
    saved(tmp_path / "b", 2, key=OTHER)
    into = {name: value for name, value in a_state(5).items() if name != "seed"}
    sidesave.load_sources(
        [
            sidesave.Source(tmp_path / "a", include="model", encryption=encryption()),
            sidesave.Source(tmp_path / "b", include="optimizer", encryption=encryption(OTHER)),
        ],
        into,
    )
    assert torch.equal(into["model"]["w"], a_state(1)["model"]["w"])
    assert torch.equal(into["optimizer"]["m"], a_state(2)["optimizer"]["m"])


def test_an_export_is_plain_and_commands_take_the_key(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RUN_KEY", KEY.hex())
    (tmp_path / "key").write_text(KEY.hex())
    saved(run, 1, 2)
    output("export", run, tmp_path / "out", "--item", "model", "--key-env", "RUN_KEY")
    from safetensors.torch import load_file

    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["w"], a_state(2)["model"]["w"]
    )
    sidesave.export(run, tmp_path / "again", item="model", encryption=encryption())
    assert "model.w" in output("show", run, "--key-file", tmp_path / "key")
    assert "3 changed" in output(
        "diff", run / "step-00000001", run / "step-00000002", "--key-env", "RUN_KEY"
    )
    assert "no key was given" in output("show", run, status=1)
    assert "ok" in output("verify", run)


@pytest.mark.parametrize("kind", ["directory", "store"])
def test_copies_and_fetches_need_no_key_and_are_runs_like_this_one(
    run: Path, tmp_path: Path, kind: str
):
    place = f"file://{tmp_path}/store/run" if kind == "store" else str(run)
    saved(place, 1, 2)
    check(place, 1, 2)
    output("copy", place, tmp_path / "copy")
    check(tmp_path / "copy", 1, 2)
    saved(tmp_path / "copy", 3)
    check(tmp_path / "copy", 1, 2, 3)
    sidesave.fetch(place if kind == "store" else f"file://{run}", tmp_path / "fetched")
    check(tmp_path / "fetched", 2)
    with pytest.raises(KeyMissingError):
        sidesave.Checkpointer(tmp_path / "fetched")


def test_an_exchange_of_keys_reaches_the_mirror(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OLD", KEY.hex())
    monkeypatch.setenv("NEW", OTHER.hex())
    mirror = tmp_path / "mirror"
    save_steps(run, 1, 2, encryption=encryption(), mirror=mirror)
    check(mirror, 1, 2)
    output("rekey", run, "--key-env", "OLD", "--new-key-env", "NEW")
    check(mirror, 1, 2)
    save_steps(run, 3, encryption=encryption(OTHER), mirror=mirror)
    check(mirror, 1, 2, 3, key=OTHER)
    shutil.rmtree(run)  # the disk is gone
    for given, error in ((None, KeyMissingError), (encryption(), WrongKeyError)):
        with pytest.raises(error):
            sidesave.Checkpointer(run, encryption=given, mirror=mirror)
    with sidesave.Checkpointer(run, encryption=encryption(OTHER), mirror=mirror) as ckpt:
        assert ckpt.load()["seed"] == 3  # from there
        commit(ckpt, 4)
    assert same(loaded(run / "step-00000004", OTHER), a_state(4))


def test_an_exchange_of_keys_while_a_checkpoint_is_copied_comes_along(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from sidesave.writer_daemon.commit import commit as commits

    monkeypatch.setenv("OLD", KEY.hex())
    monkeypatch.setenv("NEW", OTHER.hex())
    saved(run, 1, 2)
    give_name, exchanged = commits.give_name, list[str]()

    def later(*arguments: Any, **options: Any) -> None:
        if not exchanged:
            exchanged.append(output("rekey", run, "--key-env", "OLD", "--new-key-env", "NEW"))
        give_name(*arguments, **options)

    monkeypatch.setattr(commits, "give_name", later)
    output("copy", run, tmp_path / "copy")
    assert exchanged
    check(tmp_path / "copy", 1, 2, key=OTHER)
    sidesave.Checkpointer(tmp_path / "copy", encryption=encryption(OTHER)).close()


@pytest.mark.root
def test_the_fallback_directory_gets_encrypted_saves_as_well(
    mount: Callable[..., Path], tmp_path: Path
):
    small = mount("-t", "tmpfs", "-o", "size=8m", "none") / "run"
    with sidesave.Checkpointer(
        small,
        encryption=encryption(),
        failures=sidesave.FailureOptions(fallback_directory=tmp_path / "other"),
    ) as ckpt:
        info = commit(ckpt, 1, 12)
        assert (
            Path(info.path).parent == tmp_path / "other"
            and (Path(info.path) / "keys.json").exists()
        )
        assert same(ckpt.load(1), a_state(1, 12))
    assert same(loaded(tmp_path / "other"), a_state(1, 12))


def test_large_files_pass_through_buffers_of_8_mib(run: Path):
    big = {f"m{number}": {"w": torch.rand(5_000_000 + number)} for number in range(3)}
    save(run, big, encryption=encryption())
    found = loaded(run)
    assert all(torch.equal(found[name]["w"], each["w"]) for name, each in big.items())
