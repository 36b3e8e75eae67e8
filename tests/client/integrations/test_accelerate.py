# pyright: reportMissingImports=false
"""The state of an accelerator, saved and restored with sidesave: one process,
DistributedDataParallel, FSDP2.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import guides
import pytest
import torch

import sidesave
from sidesave.errors import InvalidArgumentError, UnsupportedValueError

accelerate: Any = pytest.importorskip(
    "accelerate", reason="needs accelerate: scripts/test --integrations accelerate"
)

from hf_trainers import Job, start  # noqa: E402 - after the skip

from sidesave.integrations.accelerate import SidesaveState  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of accelerate and torch


@pytest.fixture(autouse=True)
def _apart() -> Iterator[None]:
    """Accelerators of one process share their state."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def losses(run: Path, rank: int = 0) -> dict[str, str]:
    return dict(line.split() for line in Path(f"{run}.losses-{rank}").read_text().splitlines())  # pyright: ignore[reportArgumentType]


def test_training_goes_on_where_it_was_in_the_middle_of_an_epoch(tmp_path: Path):
    found: list[float] = []
    job = Job()
    job.train(0, 30, lambda step, loss: found.append(loss))
    mean = job.mean.value
    again: list[float] = []
    job = Job()
    with SidesaveState(job.accelerator, tmp_path / "run") as state:
        assert state.restore() == 0
        job.train(
            0,
            17,
            lambda step, loss: again.append(loss),
            lambda step: state.save(step) if step == 16 else None,
        )
    job = Job()
    torch.rand(9)
    with SidesaveState(job.accelerator, tmp_path / "run") as state:
        begin = state.restore()
        assert begin == 17
        job.train(begin, 30, lambda step, loss: again.append(loss))
    assert again == found
    assert torch.equal(job.mean.value, mean)


def test_all_that_save_state_has_comes_back(tmp_path: Path):
    job = Job()
    accelerator = job.accelerator
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accelerator.scaler.scale(torch.ones(()))  # makes its scale
    job.train(0, 3)
    accelerator.step, job.loader.iteration = 7, 2
    job.mean.extra = {"a": [1, "b"]}
    sampler = job.loader.get_sampler()
    sampler.initial_seed, sampler.epoch = 11, 2
    with SidesaveState(accelerator, tmp_path / "run") as state:
        state.save(2)
        expected = {name: torch.rand(3) for name in ("drawn",)}
        job.train(3, 9)
        accelerator.scaler.update(64.0)
        accelerator.step, job.loader.iteration, job.mean.extra = 1, 5, None
        sampler.initial_seed, sampler.epoch = 12, 5
        weights = job.model.layers[0].weight.clone()
        assert state.restore(2) == 3
    assert torch.equal(torch.rand(3), expected["drawn"])
    assert not torch.equal(job.model.layers[0].weight, weights)
    assert accelerator.scaler.get_scale() == 8.0
    assert (accelerator.step, job.loader.iteration, job.mean.extra) == (7, 2, {"a": [1, "b"]})
    assert (sampler.initial_seed, sampler.epoch) == (11, 2)
    assert job.scheduler.scheduler.last_epoch == 3
    names = {
        "model",
        "optimizer",
        "scheduler",
        "loader",
        "registered",
        "scaler",
        "accelerator",
        "random_state",
    }
    assert set(sidesave.load(tmp_path / "run")) == names


def test_what_is_registered_later_is_saved_from_then_on(tmp_path: Path):
    job = Job()
    with SidesaveState(job.accelerator, tmp_path / "run") as state:
        state.save(0)
        late = torch.nn.Linear(2, 2)
        job.accelerator.register_for_checkpointing(late)
        job.accelerator.prepare_model(torch.nn.Linear(3, 3))
        state.save(1)
    assert {"registered_1", "model_1"} <= set(sidesave.load(tmp_path / "run" / "step-00000001"))


def test_what_is_registered_after_the_last_step_is_saved_at_the_end(tmp_path: Path):
    job = Job()
    with SidesaveState(job.accelerator, tmp_path / "run", save=[sidesave.LastStep()]) as state:
        state.register("mine", 3)
        state.step(4)
        job.accelerator.register_for_checkpointing(torch.nn.Linear(2, 2))
    assert {"registered_1", "mine"} <= set(sidesave.load(tmp_path / "run" / "step-00000004"))


def test_a_loader_of_another_kind_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    job = Job()
    with SidesaveState(job.accelerator, tmp_path / "run") as state:
        state.save(0)
        job.accelerator._dataloaders[:] = [
            torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4)))
        ]
        state.restore()
    told = [each for each in caplog.records if "a data loader differs in kind" in each.message]
    assert [(each.levelname, each.message.rpartition(": ")[2]) for each in told] == [
        ("WARNING", "sampler")
    ]


def test_a_save_in_the_middle_of_gradient_accumulation_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    job = Job(gradient_accumulation_steps=4)
    batch = next(iter(job.loader))[0]
    with SidesaveState(job.accelerator, tmp_path / "run", save=sidesave.EverySteps(3)) as state:
        for step in range(8):
            with job.accelerator.accumulate(job.model):
                job.accelerator.backward(job.model(batch).square().mean())
                job.optimizer.step()
                job.optimizer.zero_grad()
            state.step(step)
            if step in (1, 7):
                state.save(step)
        state.restore(7)
    reported = [each.message for each in caplog.records if "gradient accumulation" in each.message]
    assert [message.partition(" is saved")[0] for message in reported] == ["step 1", "step 6"]
    assert all("save when accelerator.sync_gradients is true" in message for message in reported)


def test_the_projects_configuration_counts(tmp_path: Path):
    config = accelerate.utils.ProjectConfiguration(project_dir=str(tmp_path), total_limit=2)
    job = Job(project_config=config)
    with SidesaveState(job.accelerator, names="checkpoint_{step}") as state:
        for step in range(4):
            state.save(step, blocking=True)
    kept = {each.name for each in (tmp_path / "checkpoints").glob("checkpoint_*")}
    assert kept == {"checkpoint_2", "checkpoint_3"}


def test_values_that_cannot_be_represented_are_refused_by_name_unless_they_may_be_pickled(
    tmp_path: Path,
):
    job = Job()
    job.mean.extra = pytest  # a module
    with pytest.raises(
        UnsupportedValueError, match=r"registered\.extra: a .*module cannot be saved"
    ):
        SidesaveState(job.accelerator, tmp_path / "run")
    job.mean.extra = lambda: 1
    with pytest.raises(UnsupportedValueError, match=r"registered\.extra"):
        SidesaveState(job.accelerator, tmp_path / "run")
    job.mean.extra = slice(1, 2)
    with SidesaveState(job.accelerator, tmp_path / "run", allow_pickle=True) as state:
        state.save(1)
        job.mean.extra = None
        state.restore()
    assert job.mean.extra == slice(1, 2)


def test_what_is_not_saved_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from accelerate.utils import DistributedType

    job = Job()
    for kind, match in (
        (DistributedType.DEEPSPEED, "DEEPSPEED"),
        (DistributedType.MEGATRON_LM, "MEGATRON_LM"),
        (DistributedType.XLA, "XLA"),
        (DistributedType.FSDP, "fsdp_version=2"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(accelerate.state.AcceleratorState._shared_state, "distributed_type", kind)
            plugin = type("Plugin", (), {"fsdp_version": 1})()
            patch.setitem(accelerate.state.AcceleratorState._shared_state, "fsdp_plugin", plugin)
            with pytest.raises(InvalidArgumentError, match=match):
                SidesaveState(job.accelerator, tmp_path / "run")
    with pytest.raises(InvalidArgumentError, match="there is no directory"):
        SidesaveState(job.accelerator)
    with SidesaveState(job.accelerator, tmp_path / "run") as state:
        handle = job.accelerator.register_save_state_pre_hook(
            lambda models, weights, output_dir: None
        )
        with pytest.raises(InvalidArgumentError, match="hooks of save_state"):
            state.save(1)
        handle.remove()
        state.save(1)
    job.accelerator.project_configuration.save_on_each_node = True
    with pytest.raises(InvalidArgumentError, match="save_on_each_node"):
        SidesaveState(job.accelerator, tmp_path / "run")


@pytest.mark.parametrize(
    "kind",
    ["", pytest.param("ddp", marks=pytest.mark.slow), pytest.param("fsdp", marks=pytest.mark.slow)],
)
def test_jobs_that_are_killed_go_on_as_those_that_save_by_themselves(kind: str, tmp_path: Path):
    size = 2 if kind else 1
    orders: dict[str, Any] = {"kind": kind, "until": 9, "size": size}
    for api in ("stock", "ours"):
        run = tmp_path / api
        start("run_job", run, api, **orders, kill_at=6, died=True)
        for each in sidesave.find(run) if api == "ours" else ():
            assert sidesave.verify(each).ok
        start("run_job", run, api, **orders)
    for rank in range(size):
        assert losses(tmp_path / "ours", rank) == losses(tmp_path / "stock", rank)
        assert [*losses(tmp_path / "ours", rank)] == [str(step) for step in range(9)]
    assert sidesave.verify(tmp_path / "ours").ok


@pytest.mark.slow
def test_the_script_of_the_guide_can_be_killed_and_goes_on(tmp_path: Path):
    guides.kill_and_run_again("accelerate", tmp_path)
