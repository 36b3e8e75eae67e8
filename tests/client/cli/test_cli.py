"""The `sidesave` command on real checkpoints: what it says, its exit status, and what it must not
do.
"""

import json
import math
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from commands import as_json, output, sidesave_cli
from loads import flip_bit
from machines import machine
from torch import nn
from trainers import Orders, Traces, await_end, kill_with_a_save_staged, pidfd_of, wait_until

import sidesave
from sidesave.client.cli import doctor
from sidesave.client.runs.finding import catalog_of, read_info
from sidesave.stager.memory import numa
from sidesave.writer_daemon.storage import sealed_json

MODULE = [sys.executable, "-m", "sidesave"]
USABLE = Path("/proc/self/status").read_text().partition("Cpus_allowed_list:")[2].split()[0]
CHECKS = {
    "versions", "memfd", "pidfd", "populate", "host memory", "open files", "GPU", "NUMA", "sockets",
    "survival", "directory", "file locks", "direct I/O", "preallocation", "space", "disk speed",
    "daemon",
}  # fmt: skip


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def save(run: Path, *states: dict[str, Any], **options: Any) -> list[Path]:
    with sidesave.Checkpointer(run, **options) as checkpointer:
        handles = [checkpointer.save(step, state) for step, state in enumerate(states)]
        return [Path(handle.committed.result().path) for handle in handles]


def to_newer_format(path: Path) -> None:
    """Makes a checkpoint look as if a later version had written it."""
    body = sealed_json.load_json((path / "manifest.json").read_bytes(), "manifest.json")
    del body["xxh3_128"]
    (path / "manifest.json").write_bytes(
        sealed_json.seal({**body, "version": sealed_json.FORMAT_VERSION + 1})
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 10 and 20; back to 10 in another session, which saves 30."""
    path = tmp_path_factory.mktemp("runs") / "run"
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "bare": torch.zeros(5, dtype=torch.int16),
    }
    with sidesave.Checkpointer(path) as checkpointer:
        for step in (10, 20):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            checkpointer.save(step, {**state, "step": step, "seen": list(range(1000))})
    with sidesave.Checkpointer(path) as checkpointer:
        checkpointer.load(10)
        checkpointer.save(30, {**state, "step": 30})
    return path


# ls -----------------------------------------------------------------------------------------------


def test_ls_lists_commits_in_order_and_marks_latest_and_superseded(run: Path):
    listed = as_json("ls", run)
    assert [(row["step"], row["mark"]) for row in listed["checkpoints"]] == [
        (10, ""),
        (20, "superseded"),
        (30, "latest"),
    ]
    first, _, last = listed["checkpoints"]
    assert last["parent"] == [10, first["session"]]
    assert last["session"] != first["session"]
    lines = output("ls", run).splitlines()
    assert [line.split()[0] for line in lines] == ["step", "10", "20", "30"]
    assert lines[2].endswith("superseded")
    assert f"10 of {first['session']}" in lines[3]


def test_ls_lists_a_checkpoint_whose_manifest_is_damaged(tmp_path: Path):
    _, last = save(tmp_path, {"x": torch.zeros(3)}, {"x": torch.ones(3)})
    flip_bit(last / "manifest.json", -1)
    assert (
        "1"
        in next(
            line for line in output("ls", tmp_path).splitlines() if "unreadable" in line
        ).split()
    )
    listed = as_json("ls", tmp_path)
    assert listed["damaged"] == [str(last)]
    assert [row["mark"] for row in listed["checkpoints"]] == ["latest"]


def test_ls_tells_a_newer_format_from_damage_and_lists_the_rest(tmp_path: Path):
    paths = save(tmp_path, *[{"x": torch.full((3,), float(step))} for step in range(3)])
    to_newer_format(paths[1])
    flip_bit(paths[2] / "manifest.json", -1)
    listed = as_json("ls", tmp_path)
    assert [row["step"] for row in listed["checkpoints"]] == [0]
    assert (listed["newer"], listed["damaged"]) == ([str(paths[1])], [str(paths[2])])
    lines = output("ls", tmp_path).splitlines()
    assert any(line.split()[:1] == ["1"] and "newer format" in line for line in lines)
    assert any(line.split()[:1] == ["2"] and "unreadable" in line for line in lines)


def test_a_newer_format_keeps_a_run_from_going_on_and_older_checkpoints_loadable(tmp_path: Path):
    paths = save(tmp_path, {"x": torch.zeros(3)}, {"x": torch.ones(3)})
    to_newer_format(paths[1])
    with pytest.raises(sidesave.errors.FormatVersionError):
        sidesave.Checkpointer(tmp_path)
    with pytest.raises(sidesave.errors.FormatVersionError):
        sidesave.load(paths[1])
    assert sidesave.load(paths[0])["x"].sum() == 0
    assert [info.step for info in catalog_of(str(tmp_path)).all()] == [0]
    with pytest.raises(sidesave.errors.FormatVersionError):
        catalog_of(str(tmp_path)).all(strict=True)


def test_ls_lists_what_came_to_nothing_since_the_latest_checkpoint(tmp_path: Path):
    state = {"x": torch.zeros(3)}
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 3):
            (tmp_path / f"step-{step:08d}").mkdir()
            checkpointer.save(step, state)
            with pytest.raises(sidesave.errors.CheckpointExistsError):
                checkpointer.wait()
            (tmp_path / f"step-{step:08d}").rmdir()
            if step == 1:
                checkpointer.save(2, state).committed.result()
    listed = as_json("ls", tmp_path)
    assert [(row["step"], row["outcome"], row["error"]) for row in listed["saves"]] == [
        (3, "failed", "CheckpointExistsError")
    ]
    assert [row["step"] for row in as_json("ls", tmp_path, "--all")["saves"]] == [1, 3]
    [line] = [line for line in output("ls", tmp_path).splitlines() if "failed" in line]
    assert line.split()[0] == "3"
    assert "CheckpointExistsError: the step exists" in line
    assert output("ls", tmp_path, "--all").count("CheckpointExistsError") == 2


@pytest.mark.root
def test_ls_tells_where_a_save_is_that_went_elsewhere(mount: Callable[..., Path], tmp_path: Path):
    small, state = mount("-t", "tmpfs", "-o", "size=4m", "none"), {"x": torch.zeros(2 << 20)}
    with sidesave.Checkpointer(
        small, failures=sidesave.FailureOptions(fallback_directory=tmp_path / "other")
    ) as checkpointer:
        path = checkpointer.save(1, state).committed.result().path
    assert f"committed  in {path}" in output("ls", small)
    assert [row["path"] for row in as_json("ls", small)["saves"]] == [path]


def test_ls_lists_leftovers_and_whether_a_live_session_owns_them(tmp_path: Path, orders: Orders):
    stranger = f".step-00000001.{'0' * 16}.partial"
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        orders.give("hold", after=2)
        session = checkpointer.save(2, {"x": torch.zeros(3)})
        orders.obeyed()
        (tmp_path / stranger).mkdir()
        listed = as_json("ls", tmp_path)
        text = output("ls", tmp_path)
        orders.release()
        session.committed.result()
    assert [(row["step"], row["state"], row["live"]) for row in listed["leftovers"]] == [
        (1, "partial", False),
        (2, "partial", True),
    ]
    assert [(row["step"], row["outcome"]) for row in listed["saves"]] == [(2, "saving")]
    assert "left by a dead session" in next(line for line in text.splitlines() if stranger in line)
    assert "belongs to a live session" in next(
        line for line in text.splitlines() if ".step-00000002." in line
    )


def test_ls_and_show_tell_the_metrics_of_a_checkpoint(tmp_path: Path):
    many = {"loss": 0.25, "accuracy": math.nan, "perplexity": 1, "rate": 3e-4, "last": -math.inf}
    with sidesave.CheckpointManager(tmp_path, {"x": torch.zeros(3)}, save=1) as manager:
        manager.step(1, {"loss": 12.5})
        manager.step(2, many)
        manager.step(3)
    listed = [row["metrics"] for row in as_json("ls", tmp_path)["checkpoints"]]
    assert listed == [{"loss": 12.5}, {**many, "accuracy": "nan", "last": "-inf"}, {}]
    head, *lines = output("ls", tmp_path).splitlines()
    assert head.split()[-1] == "metrics"
    assert "  loss=12.5" in lines[0]
    assert "  loss=0.25, accuracy=nan, perplexity=1, rate=0.0003 and 1 more" in lines[1]
    assert lines[2].endswith("latest") and "=" not in lines[2]
    assert as_json("show", tmp_path, "--step", 2)["metrics"] == listed[1]
    assert "metrics: loss=0.25, accuracy=nan, perplexity=1, rate=0.0003, last=-inf\n" in output(
        "show", tmp_path, "--step", 2
    )
    assert "metrics" not in output("show", tmp_path)


def test_metadata_that_hold_no_metrics_are_no_error(tmp_path: Path):
    odd = [
        {"metrics": [1]},
        {"metrics": {"a": "text", "b": None, "c": {}, "\x1b[1m": 2}},
        {"metrics": {"a": 10**400}},
    ]
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        for step, metadata in enumerate(odd):
            checkpointer.save(step, {"x": torch.zeros(3)}, metadata=metadata)
    assert [row["metrics"] for row in as_json("ls", tmp_path)["checkpoints"]] == [
        {},
        {"\x1b[1m": 2},
        {},
    ]
    assert "\x1b" not in output("ls", tmp_path) + output("show", tmp_path, "--step", 1)


def test_ls_of_a_directory_without_checkpoints_says_so(tmp_path: Path):
    assert "no checkpoints" in output("ls", tmp_path)
    assert as_json("ls", tmp_path)["checkpoints"] == []


# Bad calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["ls"], ["show"], ["verify"], ["recover"], ["diff", "."]])
def test_a_path_that_is_no_directory_is_one_line_and_status_2(command: list[str], tmp_path: Path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        result = sidesave_cli(*command[:1], path, *command[1:])
        assert result.exit_code == 2
        [line] = result.output.splitlines()
        assert line.startswith("sidesave: there is no ")
        assert line.endswith(f": {path}")


@pytest.mark.parametrize("command", ["show", "verify"])
def test_what_is_not_there_is_one_line_and_status_2(command: str, run: Path, tmp_path: Path):
    assert output(command, tmp_path, status=2) == (
        f"sidesave: there is no checkpoint: it is an empty directory: {tmp_path}\n"
    )
    assert "there is no step 11; there are [10, 20, 30]" in output(
        command, run, "--step", 11, status=2
    )
    assert "of step 10, and not of step 20" in output(
        command, run / "step-00000010", "--step", 20, status=2
    )


def test_an_unfinished_checkpoint_is_not_read(tmp_path: Path):
    partial = tmp_path / f".step-00000001.{'0' * 16}.partial"
    partial.mkdir()
    for command in ("show", "ls", "verify"):
        assert "it is a save that was not finished" in output(command, partial, status=2)


def test_ls_of_a_checkpoint_names_its_run(run: Path):
    assert f"its run directory is {run}" in output("ls", run / "step-00000010", status=2)


def test_an_unknown_option_is_status_2():
    assert "No such option" in output("ls", ".", "--nonsense", status=2)


# show ---------------------------------------------------------------------------------------------


def test_show_lists_tensors_totals_and_plain_data(run: Path):
    shown = as_json("show", run, "--step", 20)
    assert shown["tensors"]["model.0.weight"] == {
        "dtype": "float32",
        "shape": [3, 4],
        "nbytes": 48,
        "item": "model",
    }
    assert shown["tensors"]["bare"] == {
        "dtype": "int16",
        "shape": [5],
        "nbytes": 10,
        "item": "bare",
    }
    assert shown["items"]["optimizer"] == {"tensors": 4, "nbytes": 4 * (12 + 3 + 6 + 2)}
    assert sum(item["nbytes"] for item in shown["items"].values()) == 2 * 4 * (12 + 3 + 6 + 2) + 10
    assert shown["plain"]["optimizer"]["param_groups"][0]["lr"] == 0.5
    assert shown["plain"]["model"]["0.weight"] == "<tensor model.0.weight>"
    text = output("show", run, "--step", 20)
    assert "float32  [3, 4]" in text
    assert "optimizer: (and 4 tensors)" in text
    assert "seen: [0, 1, 2, 3, 4, 5, ...] (1,000 in all)" in text


def test_show_lists_tensors_in_the_order_of_the_state(tmp_path: Path):
    """Files have the large dtypes first, and the small tensors."""
    state = {
        "z": torch.zeros(300),
        "a": {"late": torch.ones(7, dtype=torch.int16), "early": torch.zeros(2)},
        "m": {},
    }
    save(tmp_path, {**state, "tied": state["z"], "last": torch.zeros(1, dtype=torch.float64)})
    assert list(as_json("show", tmp_path)["tensors"]) == ["z", "a.late", "a.early", "last"]


def test_show_of_a_run_shows_the_latest(run: Path):
    assert as_json("show", run)["step"] == 30
    assert as_json("show", run / "step-00000010")["step"] == 10


def test_show_filters_tensors_and_plain_data(run: Path):
    shown = as_json("show", run, "--filter", "model.*.weight")
    assert list(shown["tensors"]) == ["model.0.weight", "model.1.weight"]
    assert list(shown["plain"]) == ["model"]
    assert list(as_json("show", run, "--filter", "model.1")["tensors"]) == [
        "model.1.weight",
        "model.1.bias",
    ]


def test_show_gives_the_dtypes_of_the_user_and_not_the_stored_ones(tmp_path: Path):
    state = {
        "c": torch.zeros(2, 3, dtype=torch.complex128),
        "f": torch.zeros(4).to(torch.float8_e4m3fnuz),
    }
    save(tmp_path, state)
    tensors = as_json("show", tmp_path)["tensors"]
    assert tensors["c"] == {"dtype": "complex128", "shape": [2, 3], "nbytes": 96, "item": "c"}
    assert tensors["f"] == {"dtype": "float8_e4m3fnuz", "shape": [4], "nbytes": 4, "item": "f"}


def test_pickled_values_are_shown_and_compared_but_never_unpickled(tmp_path: Path):
    mark = tmp_path / "unpickled"
    nest = {"list": [1, Trap(mark)], 7: (Trap(mark), torch.ones(2))}
    paths = save(
        tmp_path / "run",
        {"a": Trap(mark), "nest": nest},
        {"a": Trap(tmp_path), "nest": nest},
        allow_pickle=True,
    )
    assert output("show", paths[0]).count("<pickled, ") == 3
    shown = as_json("show", paths[0])
    assert shown["pickled"] is True
    assert shown["plain"]["nest"]["list"][0] == 1
    assert list(as_json("diff", *paths)["plain"]) == ["a"]
    assert not mark.exists()


def test_names_cannot_send_control_characters_to_the_terminal(tmp_path: Path):
    save(tmp_path, {"\x1b[31m": torch.zeros(1), "text": "\x1b]0;title\x07", "\udc80": [1]})
    text = output("show", tmp_path) + output("verify", tmp_path)
    assert "\x1b" not in text
    assert "\\x1b[31m" in text


# verify -------------------------------------------------------------------------------------------


def test_verify_says_ok(run: Path):
    lines = output("verify", run).splitlines()
    assert [line.partition(": ok, ")[0] for line in lines] == [
        f"{run}/step-000000{step}" for step in (10, 20, 30)
    ]
    assert output("verify", run, "--step", 20).count("\n") == 1
    assert output("verify", run / "step-00000010").count(": ok, ") == 1


def test_verify_finds_a_flipped_byte_and_names_file_and_fqn(tmp_path: Path):
    first, last = save(tmp_path, *[{"model": {"a": torch.zeros(1 << 18), "b": torch.ones(9)}}] * 2)
    flip_bit(first / "model.rank-00000.safetensors", -1)
    flip_bit(first / "objects.rank-00000.msgpack", -1)
    lines = output("verify", tmp_path, status=1).splitlines()
    assert lines[0].startswith(f"{first}: 2 faults, ")
    [tensor] = [line for line in lines if line.endswith("(model.b)")]
    assert tensor.startswith("  model.rank-00000.safetensors at byte ")
    assert any("objects.rank-00000.msgpack" in line for line in lines)
    assert lines[-1].startswith(f"{last}: ok, ")


def test_verify_reports_a_checkpoint_whose_manifest_is_gone(tmp_path: Path):
    first, _ = save(tmp_path, {"x": torch.zeros(3)}, {"x": torch.ones(3)})
    (first / "manifest.json").unlink()
    for arguments in ([first], [tmp_path], [tmp_path, "--step", 0]):
        assert "the manifest is missing" in output("verify", *arguments, status=1)


def test_verify_all_takes_every_checkpoint_of_a_run_and_nothing_else(tmp_path: Path):
    paths = save(tmp_path, *[{"x": torch.full((1 << 12,), float(step))} for step in range(4)])
    assert output("verify", "--all", tmp_path).count(": ok, ") == 4
    flip_bit(paths[1] / "tensors.rank-00000.safetensors", -1)
    to_newer_format(paths[2])
    (paths[3] / "manifest.json").unlink()
    lines = [
        line
        for line in output("verify", "--all", tmp_path, status=1).splitlines()
        if line.startswith("/")
    ]
    assert [line.split(": ")[1].split(",")[0] for line in lines] == ["ok", *["1 fault"] * 3]
    assert "one checkpoint" in output("verify", "--all", paths[0], status=2)
    assert "exclude" in output("verify", "--all", tmp_path, "--step", 1, status=2)
    (tmp_path / "empty").mkdir()
    assert "there is no checkpoint" in output("verify", "--all", tmp_path / "empty", status=2)


def test_verify_shows_progress_on_a_terminal_only(run: Path):
    ours, theirs = pty.openpty()
    try:
        subprocess.run(
            [*MODULE, "verify", run], stdout=theirs, stderr=theirs, timeout=300, check=True
        )
        assert b"\x1b[" in os.read(ours, 65536)
    finally:
        os.close(ours)
        os.close(theirs)
    assert "\x1b" not in output("verify", run)


def test_a_damaged_checkpoint_is_one_line_and_status_1(tmp_path: Path):
    [path] = save(tmp_path, {"x": torch.zeros(3)})
    flip_bit(path / "tensors.rank-00000.safetensors", 20)
    for command in (["show", path], ["diff", path, path]):
        result = sidesave_cli(*command)
        assert result.exit_code == 1
        assert len(result.output.splitlines()) == 1
        assert "tensors.rank-00000.safetensors" in result.output


# recover ------------------------------------------------------------------------------------------


def snapshot(run: Path) -> dict[str, bytes | None]:
    """What a run directory holds beside the files that sidesave keeps about sessions."""
    return {
        str(path.relative_to(run)): path.read_bytes() if path.is_file() else None
        for path in run.rglob("*")
        if not str(path.relative_to(run)).startswith(".sidesave.")
    }


def leave_behind(run: Path) -> list[str]:
    """A whole leftover of step 1, one of step 2 whose bytes are damaged, and one of step 3 that has
    just begun.
    """
    state = {"x": torch.zeros(1 << 12)}
    *_, first, second = save(run, state, state, state)
    names = [f".{path.name}.{read_info(str(path)).session}.partial" for path in (first, second)]
    names.append(f".step-00000003.{'0' * 16}.partial")
    first.rename(run / names[0])
    second.rename(run / names[1])
    flip_bit(run / names[1] / "tensors.rank-00000.safetensors", -1)
    (run / names[2]).mkdir()
    return names


def test_recover_finishes_what_is_whole_removes_the_rest_and_says_so(tmp_path: Path):
    whole, damaged, begun = leave_behind(tmp_path)
    before = snapshot(tmp_path)
    expected = ["step-00000001: {}finished", f"{damaged}: {{}}removed", f"{begun}: {{}}removed"]
    rehearsed = output("recover", "--dry-run", tmp_path).splitlines()
    assert [line for line in rehearsed if line.startswith((".", "step"))] == [
        line.format("would be ") for line in expected
    ]
    assert snapshot(tmp_path) == before
    done = output("recover", tmp_path).splitlines()
    assert [line for line in done if line.startswith((".", "step"))] == [
        line.format("") for line in expected
    ]
    assert sorted(
        path.name for path in tmp_path.iterdir() if not path.name.startswith(".sidesave.")
    ) == [
        "step-00000000",
        "step-00000001",
    ]
    assert not (tmp_path / whole).exists()
    assert output("verify", "--all", tmp_path).count(": ok, ") == 2
    assert output("recover", tmp_path) == "there is nothing to recover\n"
    outcomes = {record.step: record.outcome for record in sidesave.history(tmp_path)}
    assert outcomes == {0: "committed", 1: "committed", 2: "committed", 3: "removed"}


def test_recover_restores_what_a_save_was_to_replace(tmp_path: Path):
    [path] = save(tmp_path, {"x": torch.zeros(3)})
    replaced = tmp_path / f".{path.name}.{'0' * 16}.replaced"
    path.rename(replaced)
    assert output("recover", "--dry-run", tmp_path) == "step-00000000: would be finished\n"
    assert replaced.exists()
    assert output("recover", tmp_path) == "step-00000000: finished\n"
    assert sidesave.load(path)["x"].sum() == 0


def test_recover_is_refused_while_a_session_lives_which_it_names(tmp_path: Path, orders: Orders):
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        orders.give("hold", after=2)
        handle = checkpointer.save(1, {"x": torch.zeros(3)})
        orders.obeyed()
        for arguments in (["recover", tmp_path], ["recover", "--dry-run", tmp_path]):
            text = output(*arguments, status=1)
            assert str(checkpointer.daemon_pid) in text
            assert str(os.getpid()) in text
        orders.release()
        assert handle.committed.result().step == 1


def test_recover_leaves_a_daemon_in_peace_that_finishes_what_its_dead_trainer_had_staged(
    tmp_path: Path, orders: Orders, traces: Traces
):
    pid = kill_with_a_save_staged(traces, tmp_path / "run", orders, "hold", after=2)
    with pidfd_of(pid) as pidfd:
        assert str(pid) in output("recover", tmp_path / "run", status=1)
        orders.release()
        await_end(pidfd)
    assert output("recover", tmp_path / "run") == "there is nothing to recover\n"
    assert [row["step"] for row in as_json("ls", tmp_path / "run")["checkpoints"]] == [5]


@pytest.mark.root
def test_recover_says_what_it_could_not_judge_and_leaves_it(tmp_path: Path):
    save(tmp_path, {"x": torch.zeros(3)})
    busy, other = (tmp_path / f".step-0000000{step}.{'0' * 16}.partial" for step in (7, 8))
    (busy / "mounted").mkdir(parents=True)
    other.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", busy / "mounted"]).returncode:
        pytest.skip("cannot mount")
    try:
        text = output("recover", tmp_path, status=1)
    finally:
        [mounted] = tmp_path.glob(".step-00000007.*/mounted")
        subprocess.run(["umount", mounted], check=True)
    assert ".step-00000007." in text.partition(": could not be judged")[0].splitlines()[-1]
    assert f"{other.name}: removed" in text
    assert mounted.exists()
    assert f"{busy.name}: removed" in output("recover", tmp_path)


def test_recover_of_one_checkpoint_names_its_run(run: Path):
    assert f"its run directory is {run}" in output("recover", run / "step-00000010", status=2)


# diff ---------------------------------------------------------------------------------------------


def changes(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> Any:
    return as_json("diff", *save(tmp_path / "run", before, after))


def test_diff_of_equal_checkpoints_finds_nothing(tmp_path: Path):
    state = {
        "t": torch.tensor([1.0, math.nan]),
        "plain": [math.nan, {1, 2}, b"x"],
        "none": None,
        "empty": torch.zeros(0),
    }
    found = changes(state, state, tmp_path)
    assert found["same"] is True
    assert found["equal"] == ["t", "empty"]
    assert found["plain"] == {}
    assert "0 changed" in output("diff", tmp_path / "run" / "step-00000000", tmp_path / "run")


def test_diff_measures_how_values_changed(tmp_path: Path):
    before = torch.full((2 << 20,), 3.0)
    before = torch.cat(
        [before, torch.tensor([4.0, 4.0, math.nan, 1.0, math.inf])]
    )  # beyond one piece
    after = before.clone()
    after[0], after[-5], after[-2] = 3.5, 2.0, math.nan
    [change] = changes({"t": before}, {"t": after}, tmp_path)["changed"]
    assert (change["fqn"], change["changed"], change["elements"]) == ("t", 3, (2 << 20) + 5)
    assert change["max_abs"] == 2.0
    assert change["relative_l2"] == pytest.approx(
        math.sqrt((0.25 + 4) / (9 * (2 << 20) + 16 + 16 + 1))
    )
    assert change["nans"] == [1, 2]
    table = output("diff", *sorted((tmp_path / "run").glob("step-*")))
    assert "3 (0.0%)" in table


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("before", "after", "max_abs"),
    [
        (torch.tensor([True, False]), torch.tensor([True, True]), 1),
        (torch.tensor([250], dtype=torch.uint8), torch.tensor([5], dtype=torch.uint8), 245),
        (torch.tensor([1 << 40]), torch.tensor([0]), 2.0**40),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([3.0]).bfloat16(), 2),
        (torch.tensor([1.0]).to(torch.float8_e5m2), torch.tensor([2.0]).to(torch.float8_e5m2), 1),
        (
            torch.tensor([1.0]).to(torch.float8_e4m3fnuz),
            torch.tensor([2.0]).to(torch.float8_e4m3fnuz),
            1,
        ),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), 5),
        (
            torch.tensor([3 + 4j] * 2).to(torch.complex128),
            torch.tensor([0j] * 2).to(torch.complex128),
            5,
        ),
        (torch.tensor(0.0), torch.tensor(-0.0), 0),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_diff_understands_every_dtype(
    before: torch.Tensor, after: torch.Tensor, max_abs: float, tmp_path: Path
):
    [change] = changes(
        {"t": before, "pad": torch.ones(1)}, {"t": after, "pad": torch.ones(1)}, tmp_path
    )["changed"]
    assert change["max_abs"] == max_abs
    assert 0 < change["changed"] <= change["elements"] == before.numel()


@pytest.mark.skipif(
    not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no dtype without arithmetic"
)
def test_diff_compares_a_dtype_without_arithmetic_by_its_bytes(tmp_path: Path):
    before = torch.arange(8, dtype=torch.uint8)
    after = before.clone()
    after[3] = 100
    kind = torch.float4_e2m1fn_x2
    [change] = changes({"t": before.view(kind)}, {"t": after.view(kind)}, tmp_path)["changed"]
    assert (change["changed"], change["elements"], change["max_abs"]) == (1, 8, None)


def test_diff_names_what_only_one_has_and_what_cannot_be_compared(tmp_path: Path):
    shared = torch.ones(2)
    before = {
        "a": shared,
        "tied": shared,
        "n": {"gone": torch.ones(1), "lr": 0.1, "k": 1},
        "s": torch.ones(2),
        "x": 5,
    }
    after = {
        "a": torch.ones(2),
        "tied": torch.ones(2),
        "n": {"new": torch.ones(1), "lr": 0.2, "k": 1.0},
        "s": shared.half(),
    }
    paths = save(tmp_path / "run", before, after)
    found = as_json("diff", *paths)
    assert (found["only_a"], found["only_b"]) == (["n.gone"], ["n.new", "tied"][::-1])
    assert found["mismatched"] == {"s": ["float32 [2]", "float16 [2]"]}
    assert found["plain"] == {
        "n.lr": {"a": 0.1, "b": 0.2},
        "n.k": {"a": 1, "b": 1.0},
        "x": {"a": 5},
        "tied": {"a": "<tensor a>", "b": "<tensor tied>"},
    }
    text = output("diff", *paths)
    assert "n.lr: 0.1 -> 0.2" in text
    assert "x: 5 -> <absent>" in text


def test_diff_shows_the_largest_changes_first_and_no_more_than_asked_for(tmp_path: Path):
    before = {f"t{index}": torch.ones(2) for index in range(5)}
    after = {f"t{index}": torch.ones(2) + index for index in range(5)}
    paths = save(tmp_path / "run", before, after)
    assert [change["fqn"] for change in as_json("diff", *paths, "--top", 2)["changed"]] == [
        "t4",
        "t3",
    ]
    text = output("diff", *paths, "--top", 2)
    assert "4 changed" in text
    assert "and 2 more" in text
    assert "t1" not in text
    assert "t1" in output("diff", *paths, "--top", 0)


# doctor -------------------------------------------------------------------------------------------


def test_doctor_runs_every_check_and_leaves_nothing_behind(tmp_path: Path):
    findings = as_json("doctor", tmp_path)
    assert {finding["name"] for finding in findings} >= CHECKS
    assert all(finding["finding"] for finding in findings)
    assert all(finding["remedy"] for finding in findings if finding["status"] != "ok")
    assert list(tmp_path.iterdir()) == []


def test_doctor_tells_what_saves_of_a_state_cost(tmp_path: Path):
    [cost] = [
        finding
        for finding in as_json("doctor", tmp_path, "--state-bytes", "16MB", "--world-size", 4)
        if finding["name"] == "cost"
    ]
    assert cost["status"] == "ok"
    assert (
        "take 4.00 MB of host memory on each rank, 16.0 MB on this node with its 4 ranks"
        in cost["finding"]
    )
    assert "is durable after" in cost["finding"]
    assert list(tmp_path.iterdir()) == []
    [refused] = [
        finding
        for finding in as_json("doctor", tmp_path, "--state-bytes", "1000TB", status=1)
        if finding["name"] == "cost"
    ]
    assert refused["status"] == "fail" and "needs 1.00 PB of host memory" in refused["finding"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "8"], "add --state-bytes SIZE"),
        (["--state-bytes", "8GB", "--world-size", "4", "--ranks-per-node", "5"], "to world_size"),
        (["--state-bytes", "8 apples"], "is no size"),
    ],
)
def test_doctor_refuses_a_cost_that_cannot_be_estimated(
    tmp_path: Path, arguments: list[str], message: str
):
    assert message in output("doctor", tmp_path, *arguments, status=2)


def test_doctor_checks_the_parent_of_a_directory_that_is_yet_to_be_made(tmp_path: Path):
    text = output("doctor", tmp_path / "new" / "run")
    assert f"{tmp_path} is on" in text
    assert list(tmp_path.iterdir()) == []


def test_doctor_fails_where_nothing_can_be_written():
    findings = as_json("doctor", "/proc/self", status=1)
    assert [finding["name"] for finding in findings if finding["status"] == "fail"] == ["directory"]


@pytest.mark.parametrize(
    ("nodes", "gpus", "expected"),
    [
        ({}, [0], ["ok the system reports no nodes: any memory is used"]),
        ({0: "0-9999"}, [0, None], ["ok one node: there is nothing to choose"]),
        ({0: "0", 1: "1"}, [], [
            "ok 2 nodes, no GPU: staging memory and the daemon are near the cores of the process",
        ]),
        ({0: "0-9999", 1: "10000-10007"}, [0, 0, 1, None, 0], [
            f"ok GPU 0-1,4 on node 0: staging memory goes there, the daemon to cores {USABLE}",
            f"warn GPU 2 on node 1, but this process may only use cores of others ({USABLE})",
            "warn GPU 3 on a node that the system does not report: staging memory and the daemon "
            "go anywhere",
        ]),
    ],
)  # fmt: skip
def test_doctor_tells_the_node_of_each_gpu_and_what_is_done_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: dict[int, str],
    gpus: list[int | None],
    expected: list[str],
):
    monkeypatch.setattr(numa, "SYS", machine(tmp_path / "sys", nodes))
    verdicts = list(doctor.placements(gpus))
    assert [f"{status} {finding}" for status, finding, _ in verdicts] == expected
    remedies = [remedy for _, _, remedy in verdicts]
    assert all(
        bool(remedy) == line.startswith("warn")
        for remedy, line in zip(remedies, expected, strict=True)
    )
    if len(expected) > 1:
        assert (
            "numactl --cpunodebind=1 --membind=1" in remedies[1]
            and "torchrun --numa-binding=node" in remedies[1]
        )


def test_doctor_refuses_a_file(tmp_path: Path):
    (tmp_path / "file").touch()
    assert output("doctor", tmp_path / "file", status=2).endswith("file is not a directory\n")


def test_doctor_that_is_terminated_leaves_nothing_behind(tmp_path: Path):
    with forks.popen([*MODULE, "doctor", str(tmp_path)], stdout=subprocess.PIPE) as process:
        wait_until(lambda: list(tmp_path.iterdir()), "it has begun")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_doctor_that_is_interrupted_as_soon_as_there_is_something_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from sidesave.client.cli.doctor import examine

    mkdir = os.mkdir

    def interrupted(path: str | Path, mode: int = 0o777) -> None:
        mkdir(path, mode)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(examine(tmp_path))
    assert list(tmp_path.iterdir()) == []


# The process --------------------------------------------------------------------------------------


def test_the_command_runs_as_a_process(run: Path):
    done = subprocess.run(
        [*MODULE, "ls", run, "--json"], capture_output=True, text=True, timeout=300, check=True
    )
    assert [row["step"] for row in json.loads(done.stdout)["checkpoints"]] == [10, 20, 30]
    done = subprocess.run(
        [*MODULE, "show", run / "nothing"], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"sidesave: there is no checkpoint: there is nothing at this path: {run}/nothing\n"
    )


def test_the_version_is_told_as_that_of_the_package():
    assert output("--version") == f"sidesave {sidesave.__version__}\n"
    done = subprocess.run(
        [*MODULE, "--version"], capture_output=True, text=True, timeout=300, check=True
    )
    assert (done.stdout, done.stderr) == (f"sidesave {sidesave.__version__}\n", "")


def test_the_commands_are_listed_under_the_name_they_were_called_by():
    done = subprocess.run(
        [*MODULE, "--help"], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.startswith("Usage: python -m sidesave [OPTIONS] COMMAND")
    assert "Look into the checkpoints of runs" in done.stdout
    assert all(
        f"  {command}  " in done.stdout for command in ("ls", "show", "verify", "top", "doctor")
    )


@pytest.mark.drawn
@pytest.mark.parametrize("command", [["ls"], ["verify"], ["recover"], ["--help"], ["--version"]])
def test_the_quick_commands_do_without_torch(command: list[str], run: Path):
    code = (
        "import sys, sidesave.client.cli.main as cli\ntry: cli.main()\nfinally: assert 'torch' not "
        "in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command, run], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_says_which_to_install(missing: str):
    code = (
        f"import sys; sys.modules['{missing}'] = None; from sidesave.client.cli.main import main; "
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "pip install 'sidesave[cli]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
