"""Whether a run begins anew where its disk is empty and its mirror is, or seems to be: never by
mistake.
"""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import output
from mirrors import check_mirror, committed_in
from object_server import serving
from trainers import DEADLINE_S, a_state, await_end, daemon, pidfd_of, wait_until

import sidesave
from sidesave.errors import SidesaveError, WriteError
from sidesave.writer_daemon.mirror import identity


def save(run: Path, step: int, **options: Any) -> None:
    """Save, and wait for the daemon's end: to the very last it writes to the mirror's lease."""
    with contextlib.ExitStack() as stack:
        with sidesave.Checkpointer(run, **options) as ckpt:
            ckpt.save(step, a_state(step)).mirrored.result(DEADLINE_S)
            ending = stack.enter_context(pidfd_of(daemon(ckpt)))
        await_end(ending)


def refused(run: Path, place: str | Path, match: str) -> None:
    """No session begins, nothing was made, and the error is the place's and says what to do."""
    path = Path(str(place).removeprefix("file://"))
    before = path.exists(), sorted(path.rglob("*"))
    with pytest.raises(WriteError, match=match) as caught:
        sidesave.Checkpointer(run, mirror=place)
    assert caught.value.filename in (str(place), str(path))
    assert "to start from scratch all the same" in caught.value.__notes__[0]
    assert (path.exists(), sorted(path.rglob("*"))) == before


@pytest.fixture(params=["directory", "file"])
def at(request: pytest.FixtureRequest) -> Callable[[Path], str]:
    """A directory, or a store in it."""
    return str if request.param == "directory" else lambda path: f"file://{path}"


def test_a_first_start_makes_its_mirror(run: Path, tmp_path: Path, at: Callable[[Path], str]):
    save(run, 0, mirror=at(tmp_path / "mirror"))
    check_mirror(at(tmp_path / "mirror"), 0)


def test_a_directory_that_was_made_for_it_is_a_first_mirror(
    run: Path, tmp_path: Path, at: Callable[[Path], str]
):
    (tmp_path / "mirrors" / "run").mkdir(parents=True)
    save(run, 0, mirror=at(tmp_path / "mirrors" / "run"))
    check_mirror(at(tmp_path / "mirrors" / "run"), 0)


def test_a_file_system_that_was_not_mounted_is_no_first_start(
    run: Path, mount: Callable[..., Path], at: Callable[[Path], str]
):
    point = mount("-t", "tmpfs", "none")
    save(run, 0, mirror=at(point / "run"))  # an empty file system that is mounted
    shutil.rmtree(run)
    shutil.move(point / "run", run.parent / "kept")
    below = run.parent / "mount-point"
    below.mkdir()  # what is left where nothing is mounted
    refused(run, at(below / "run"), "mount its file system; or, for a first start, call `mkdir ")
    refused(
        run,
        at(below / "runs" / "run"),
        "mount its file system; or, for a first start, call `mkdir -p ",
    )
    shutil.move(run.parent / "kept", below / "run")
    with sidesave.Checkpointer(run, mirror=at(below / "run")) as ckpt:
        assert ckpt.latest_step() == 0


@pytest.mark.parametrize("name", ["", "/run", "/runs/run"])
def test_what_fstab_mounts_must_be_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    point = tmp_path / "a mount"
    point.mkdir()
    table = tmp_path / "fstab"
    lines = (
        f"# /dev/vdb {tmp_path} ext4",
        "/dev/vda / ext4",
        "none none swap",
        f"/dev/vdc {tmp_path}/a\\040mount nfs",
    )
    table.write_text("\n".join(lines))
    monkeypatch.setattr(identity, "_FSTAB", str(table))
    for at in ("", "file://"):
        with pytest.raises(WriteError, match=f"{point}, which is not mounted"):
            identity.refuse_unmounted(f"{at}{point}{name}")
    identity.refuse_unmounted(f"{tmp_path}/mirror")


def test_a_run_whose_mirror_is_gone_is_told(
    run: Path, tmp_path: Path, at: Callable[[Path], str], caplog: pytest.LogCaptureFixture
):
    mirror = tmp_path / "mirror"
    save(run, 0, mirror=at(mirror))
    shutil.move(mirror, tmp_path / "kept")
    mirror.mkdir()  # an empty mount point
    with sidesave.Checkpointer(run, mirror=at(mirror)) as ckpt:
        assert "no longer exists, or is empty" in caplog.text
        handle = ckpt.save(1, a_state(1), blocking=True)
        wait_until(lambda: "is tried again" in caplog.text)
        assert not any(mirror.iterdir())  # nothing is written to what is not the mirror
        mirror.rmdir()
        shutil.move(tmp_path / "kept", mirror)
        handle.mirrored.result(DEADLINE_S)
    check_mirror(at(mirror), 0, 1)


def test_an_empty_run_that_remembers_its_mirror_does_not_begin_anew(
    run: Path, tmp_path: Path, at: Callable[[Path], str]
):
    mirror = tmp_path / "mirror"
    save(run, 0, mirror=at(mirror))
    shutil.rmtree(run / "step-00000000")
    shutil.move(mirror, tmp_path / "kept")
    refused(run, at(mirror), "no longer exists, or is empty")
    (tmp_path / "mirror").mkdir()
    refused(run, at(mirror), "no longer exists, or is empty")
    mirror.rmdir()
    save(tmp_path / "other", 5, mirror=at(mirror))
    refused(run, at(mirror), "was replaced by another mirror")
    shutil.rmtree(mirror)
    shutil.move(tmp_path / "kept", mirror)
    with sidesave.Checkpointer(run, mirror=at(mirror)) as ckpt:
        assert ckpt.latest_step() == 0


def test_a_lost_mirror_is_begun_anew_by_the_command(
    run: Path, tmp_path: Path, at: Callable[[Path], str]
):
    mirror = tmp_path / "mirror"
    save(run, 0, mirror=at(mirror))
    shutil.rmtree(mirror)
    assert "no longer exists" in output("mirror", run, status=1)
    output("mirror", run, at(mirror))
    check_mirror(at(mirror), 0)
    save(run, 1, mirror=at(mirror))
    check_mirror(at(mirror), 0, 1)


def test_an_empty_bucket_is_a_first_start_and_one_that_does_not_answer_is_an_error(
    run: Path, tmp_path: Path
):
    (tmp_path / "root" / "bucket").mkdir(parents=True)
    with serving(tmp_path / "root") as server:
        options: dict[str, Any] = {"mirror": "s3://bucket/run", "storage_options": server.options}
        save(run, 0, **options)
        shutil.rmtree(run / "step-00000000")
        shutil.move(tmp_path / "root" / "bucket", tmp_path / "kept")
        (tmp_path / "root" / "bucket").mkdir()
        with pytest.raises(WriteError, match="no longer exists, or is empty"):
            sidesave.Checkpointer(run, **options)
        shutil.rmtree(run)
        server.fault = lambda request, number: 403
        with pytest.raises(SidesaveError):
            sidesave.Checkpointer(run, **options)


def test_the_mirror_of_an_earlier_version_is_adopted(run: Path, tmp_path: Path):
    mirror = tmp_path / "mirror"
    save(run, 0, mirror=mirror)
    (mirror / identity.IDENTITY).unlink()
    (run / identity.REMEMBERED.name).unlink()
    save(run, 1, mirror=mirror)
    assert sorted(committed_in(str(mirror))) == [0, 1]
    assert (mirror / identity.IDENTITY).exists()
