"""A mirror of what several ranks save."""

import shutil
from pathlib import Path

import pytest
import torch
from mirrors import committed_in
from rank_trainers import Ranks, same_tensors
from trainers import Traces

import sidesave


@pytest.fixture(params=["directory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "mirror") if request.param == "directory" else f"file://{tmp_path}/mirror"


def test_the_first_rank_mirrors_for_all_and_all_go_on_from_there(
    run: Path, tmp_path: Path, place: str, traces: Traces
):
    with Ranks(2, tmp_path / "groups", traces) as job:
        job.begin("fsdp", run, mirror=place)
        before = job.save(1)[0]
        job.tell("mirrored", 1)
        first, other = job.answers()
        assert first.get() == f"{place}/step-00000001"
        assert other.error == "InvalidArgumentError"
        job.do("train")
        job.do("truth", str(tmp_path / "truth"))
        job.save(2)
        job[0].do("mirrored", 2)
    traces.check()
    for path in committed_in(place).values():
        assert sidesave.verify(path).ok
    shutil.rmtree(run)
    with Ranks(2, tmp_path / "groups", traces) as job:
        job.begin("fsdp", run, mirror=place)
        assert job.do("steps") == [[[1, 2], 2]] * 2
        job.do("load")
        job.do("truth", str(tmp_path / "loaded"))
        same_tensors(torch.load(tmp_path / "loaded"), torch.load(tmp_path / "truth"))
        after = job.save(3)[0]
        assert after["sequence"] > before["sequence"] + 1
        job[0].do("mirrored", 3)
    assert sorted(committed_in(place)) == [1, 2, 3]
