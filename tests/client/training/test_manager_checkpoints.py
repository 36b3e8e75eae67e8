"""What a ``CheckpointManager`` puts beside checkpoints, and makes of them: names, files, exports,
the best of them.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from managers import Manage, release_when_waited_for, steps
from torch import nn
from trainers import Orders, wait_until

import sidesave
from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError


def test_checkpoints_have_names_of_ones_own_as_long_as_they_are_there(manage: Manage, run: Path):
    with pytest.raises(InvalidArgumentError, match="so all steps would have one name"):
        manage(names="checkpoint")
    assert not run.exists()

    def links() -> dict[str, str]:
        return {path.name: str(path.readlink()) for path in run.iterdir() if path.is_symlink()}

    manager = manage(
        save=[sidesave.EverySteps(1)], keep=[sidesave.KeepLatest(2)], names="checkpoint-{step}"
    )
    for step in range(4):
        manager.step(step)
        manager.wait()
    manager.close()
    assert links() == {f"checkpoint-{step}": f"step-0000000{step}" for step in (2, 3)}
    (run / "checkpoint-3").unlink()
    manager = manage(names="checkpoint-{step}")
    wait_until(lambda: (run / "checkpoint-3").exists())
    manager.restore(sources=[sidesave.Source(run / "checkpoint-2")])
    manager.save(4)
    manager.close()
    assert links() == {f"checkpoint-{step}": f"step-0000000{step}" for step in (2, 3, 4)}
    assert steps(run) == [2, 3, 4], "without policies nothing is deleted"


def test_no_link_is_left_to_any_of_many_steps_that_go_at_once(manage: Manage, run: Path):
    manager = manage(names="checkpoint-{step}")
    for step in range(12):
        manager.save(step)
    manager.close()
    manager = manage(keep=[sidesave.KeepLatest(1)], names="checkpoint-{step}")
    manager.save(12)
    manager.close()
    assert {path.name for path in run.iterdir() if path.is_symlink()} == {"checkpoint-12"}


def test_files_are_written_beside_each_checkpoint_from_then_on(manage: Manage, run: Path):
    manager = manage(save=[sidesave.EverySteps(1)])
    for step in range(4):
        if step in (1, 3):
            manager.write_file("config.json", f'{{"hidden_size": {step}}}')
        manager.step(step)
    with pytest.raises(InvalidArgumentError, match="cannot have the name"):
        manager.write_file("manifest.json", b"")
    manager.wait()
    found = {path.parent.name[-1]: path.read_text() for path in run.glob("step-*/config.json")}
    assert found == {
        "1": '{"hidden_size": 1}',
        "2": '{"hidden_size": 1}',
        "3": '{"hidden_size": 3}',
    }
    assert all(sidesave.verify(info).ok for info in manager.checkpoints())


def test_the_weights_of_the_last_step_are_exported_alone_in_another_dtype(
    manage: Manage, run: Path
):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = manage({"model": model, "optimizer": optimizer}, save=2, random_state=True)
    for step in range(4):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        manager.step(step)
    report = manager.export(run.parent / "weights", item="model", dtype=torch.bfloat16)
    assert report is not None and report.files == ("model.safetensors",)
    assert steps(run) == [2, 3], "the last step had not been saved"
    exported = safetensors.torch.load_file(run.parent / "weights" / "model.safetensors")
    assert exported.keys() == {"weight", "bias"}
    assert all(
        torch.equal(exported[name], tensor.bfloat16())
        for name, tensor in model.state_dict().items()
    )
    manager.export(run.parent / "again", item="model")
    assert steps(run) == [2, 3], "it had been"


def test_what_is_exported_after_going_back_is_what_training_stands_on(manage: Manage, run: Path):
    state = {"x": torch.zeros(1)}
    manager = manage({"state": state}, save=[sidesave.EverySteps(1)])
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint"):
        manager.export(run.parent / "none")
    for step in range(3):
        state["x"].fill_(step)
        manager.step(step)
    manager.wait()
    manager.restore(1)
    manager.export(run.parent / "weights")
    [file] = (run.parent / "weights").glob("*.safetensors")
    assert [tensor.item() for tensor in safetensors.torch.load_file(file).values()] == [1.0]


def test_weights_of_another_step_are_never_exported(manage: Manage, run: Path, orders: Orders):
    state = {"x": torch.zeros(1)}

    def exported(name: str) -> float:
        manager.export(run.parent / name)
        [file] = (run.parent / name).glob("*.safetensors")
        [tensor] = safetensors.torch.load_file(file).values()
        return tensor.item()

    manager = manage(
        {"state": state},
        save=[sidesave.BeforeTraining()],
        failures=sidesave.FailureOptions(tolerated=5),
        staging=sidesave.StagingOptions(on_busy="skip", slots=1),
    )
    assert manager.restore() == 0
    for step in range(1, 3):
        state["x"].fill_(step)
        manager.step(step)
        assert exported(f"step-{step}") == step
    assert manager.restore(0) == 0
    assert exported("seed") == 0, "newer ones were given up"
    state["x"].fill_(3)
    manager.step(3)
    orders.give("hold")
    manager.checkpointer.save(9, {"other": torch.zeros(1)})
    orders.obeyed()
    release_when_waited_for(manager.checkpointer, orders)
    assert exported("busy") == 3
    manager.step(4)
    orders.give("EROFS", starting_at="os.mkdir", keep=True)
    with (
        pytest.warns(RuntimeWarning, match="step 4 failed"),
        pytest.raises(sidesave.errors.WriteError),
    ):
        manager.export(run.parent / "failed")
    assert orders.withdraw() or True
    assert not (run.parent / "failed").exists()


def test_the_best_is_told_by_its_metric(manage: Manage):
    manager = manage(save=[sidesave.EverySteps(1)])
    assert (manager.checkpoints(), manager.best("loss")) == ([], None)
    for step, loss in enumerate([3.0, 1.0, math.nan, 2.0]):
        manager.step(step, {"loss": loss})
    manager.wait()
    assert [info.step for info in manager.checkpoints()] == [0, 1, 2, 3]
    assert manager.latest is not None and manager.latest.path.endswith("step-00000003")
    best, worst = manager.best("loss"), manager.best("loss", "max")
    assert best is not None and worst is not None and (best.step, worst.step) == (1, 0)
    assert manager.best("accuracy") is None
    with pytest.raises(InvalidArgumentError, match="'min' or 'max'"):
        manager.best("loss", "low")  # pyright: ignore[reportArgumentType]
    assert manager.restore(best.step) == 2
    manager = manage(save=[sidesave.Ephemeral(sidesave.EverySteps(1))])
    manager.step(4, {"loss": 0.1})
    manager.wait()
    best = manager.best("loss")
    assert best is not None and best.step == 1, "an ephemeral one goes with the next"
