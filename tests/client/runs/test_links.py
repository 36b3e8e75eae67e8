"""Checkpoints under names of one's own: links that follow what is there, and on which nothing
relies.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import sidesave
from sidesave.client.runs.finding import catalog_of
from sidesave.client.runs.links import Links, check_naming
from sidesave.errors import InvalidArgumentError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with sidesave.Checkpointer(tmp_path / "run") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"x": step}, metadata={"loss": 10 - step})
    return tmp_path / "run"


def links(run: Path) -> dict[str, str]:
    return {path.name: str(path.readlink()) for path in run.iterdir() if path.is_symlink()}


def update(run: Path, naming: Any) -> dict[str, str]:
    Links(str(run), naming).update(catalog_of(str(run)).all())
    return links(run)


def test_a_template_names_every_checkpoint_and_each_is_read_by_that_name(run: Path):
    assert update(run, "checkpoint-{step}") == {
        f"checkpoint-{step}": f"step-0000000{step}" for step in (1, 2, 3)
    }
    named = run / "checkpoint-2"
    assert sidesave.load(named) == {"x": 2}
    assert sidesave.verify(named).ok
    assert sidesave.is_checkpoint(named) and [info.step for info in sidesave.find(named)] == [2]
    into = {"x": 0}
    sidesave.load_sources([sidesave.Source(named)], into)
    assert into == {"x": 2}
    assert [info.path for info in sidesave.find(run)] == [
        str(run / f"step-0000000{step}") for step in (1, 2, 3)
    ]


def test_the_name_that_a_directory_has_needs_no_link_and_a_shorter_one_may_begin_alike(run: Path):
    assert update(run, "step-{step:08d}") == {}
    assert update(run, "step-{step}") == {
        f"step-{step}": f"step-0000000{step}" for step in (1, 2, 3)
    }
    assert [info.step for info in sidesave.find(run)] == [1, 2, 3]


def test_a_link_goes_with_its_step_and_comes_back_when_it_is_missing(run: Path):
    update(run, "at-{step:04d}")
    shutil.rmtree(run / "step-00000001")
    (run / "at-0003").unlink()
    (run / ".sidesave.link.0000").symlink_to("step-00000003")  # of a process that was killed
    assert update(run, "at-{step:04d}") == {"at-0002": "step-00000002", "at-0003": "step-00000003"}


def test_a_step_that_is_being_replaced_is_linked_to_by_its_name(run: Path):
    replaced = run / ".step-00000002.0123456789abcdef.replaced"
    (run / "step-00000002").rename(replaced)
    assert update(run, "at-{step}")["at-2"] == "step-00000002"
    replaced.rename(run / "step-00000002")
    assert sidesave.load(run / "at-2") == {"x": 2}


def test_a_function_names_some_and_of_two_with_one_name_the_newer_has_it(run: Path):
    assert update(run, lambda info: "newest") == {"newest": "step-00000003"}
    with sidesave.Checkpointer(run) as ckpt:
        ckpt.save(4, {"x": 4}, metadata={"loss": 0.5})
    named = update(
        run, lambda info: f"loss-{info.metadata['loss']}" if info.metadata["loss"] < 7 else None
    )
    assert named == {"loss-0.5": "step-00000004", "newest": "step-00000003"}, (
        "a link stays while its step does"
    )


def test_what_is_no_link_of_ours_is_left_alone(run: Path, caplog: pytest.LogCaptureFixture):
    (run / "best-2").mkdir()
    (run / "best-3").write_text("mine")
    (run / "elsewhere").symlink_to("/tmp")
    (run / "best-1").symlink_to("/tmp")
    assert update(run, "best-{step}") == {"elsewhere": "/tmp", "best-1": "step-00000001"}
    assert (run / "best-3").read_text() == "mine" and (run / "best-2").is_dir()
    assert caplog.text.count("another file has this name") == 2


@pytest.mark.parametrize("name", ["../out", "a/b", "", ".hidden", "step-00000009", 7])
def test_a_function_that_gives_no_name_names_nothing(
    run: Path, name: Any, caplog: pytest.LogCaptureFixture
):
    assert update(run, lambda info: name) == {}
    assert caplog.text.count("cannot be the name") == 3
    assert not (run.parent / "out").is_symlink()


def test_a_function_that_raises_is_told_of_and_names_nothing(
    run: Path, caplog: pytest.LogCaptureFixture
):
    assert update(run, lambda info: str(1 // (info.step - 2))) == {
        "-1": "step-00000001",
        "1": "step-00000003",
    }
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("naming", "told"),
    [
        ("checkpoint", "has no {step} in it"),
        ("x-{step:.0s}", "not a template"),
        ("{step.real}", "has no {step} in it"),
        ("{epoch}-{step}", "not a template"),
        ("{}", "not a template"),
        ("{step", "not a template"),
        ("runs/{step}", "gives 'runs/1'"),
        (".{step}", r"gives '\.1'"),
        ("step-0000001{step}", "gives 'step-00000011'"),
        (500, "not int"),
    ],
)
def test_a_template_that_cannot_name_steps_is_refused(naming: Any, told: str):
    with pytest.raises(InvalidArgumentError, match=told):
        check_naming(naming)


def test_a_template_that_can_is_not():
    for naming in ("{step}", "step-{step}", "step-{step:08d}", "e-{step}.pt", str):
        check_naming(naming)
