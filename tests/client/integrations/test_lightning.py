# pyright: reportMissingImports=false, reportUntypedBaseClass=false
"""Lightning's trainers save through sidesave: Trainer, ModelCheckpoint and resuming as with its own
checkpoints.
"""

import collections
import dataclasses
import enum
import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "lightning.pytorch", reason="needs lightning: scripts/test --integrations lightning"
)

import forks
import guides
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning_trainers import Net, a_trainer, data
from torch import nn

import sidesave
from sidesave.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    UnsupportedValueError,
    WriteError,
)
from sidesave.integrations.lightning import SidesaveCheckpointIO

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
JOB = Path(forks.__file__).with_name("lightning_trainers.py")


def same(one: Any, other: Any) -> bool:
    """Whether two nests are equal in types and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        hidden = getattr(one, "_metadata", None), getattr(other, "_metadata", None)
        return (
            list(one) == list(other)
            and all(same(one[key], other[key]) for key in one)
            and hidden[0] == hidden[1]
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class Twin(SidesaveCheckpointIO):
    """Saves by torch as well, beside the path."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: object = None
    ) -> None:
        torch.save(checkpoint, f"{path}.torch")
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.mark.parametrize("frozen", ["", "layers.0"])
def test_what_lightning_saves_comes_back_bit_for_bit(frozen: str, run: Path):
    io = Twin(run)
    trainer = a_trainer(run, io, 6)
    net = Net()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    trainer.fit(net, data())
    assert io.checkpointer is None  # its daemon has ended
    paths = sorted(run.glob("*.ckpt"))
    assert [path.name for path in paths] == sorted(
        ["last.ckpt", *(Path(each).name for each in trainer.checkpoint_callback.best_k_models)]
    )
    for path in paths:
        expected = torch.load(f"{path}.torch", weights_only=False)
        assert same(io.load_checkpoint(path), expected)
        assert same(io.load_checkpoint(path, weights_only=True), expected)
    assert len(sidesave.find(run)) == 3
    assert {info.metadata["global_step"] for info in sidesave.find(run)} <= {2, 4, 6}
    assert all(sidesave.verify(info).ok for info in sidesave.find(run))


class Held(Callback):
    """Has the daemon stopped from the second save on, until training ends."""

    def __init__(self, io: SidesaveCheckpointIO) -> None:
        self.io, self.seen = io, list[list[str]]()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self.io.checkpointer is not None
        pid = self.io.checkpointer.daemon_pid
        assert pid is not None
        self.pid = pid
        if trainer.global_step == 1:
            self.io.checkpointer.wait()
            os.kill(self.pid, signal.SIGSTOP)
        elif trainer.global_step > 1:
            folder = Path(trainer.checkpoint_callback.dirpath)
            self.seen.append(sorted(path.name for path in folder.glob("*.ckpt") if path.exists()))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        os.kill(self.pid, signal.SIGCONT)


def test_the_old_checkpoint_stays_and_a_taken_name_gets_a_version_while_nothing_is_committed(
    run: Path,
):
    io = SidesaveCheckpointIO(run, staging=sidesave.StagingOptions(slots=4))
    held = Held(io)
    two = [
        ModelCheckpoint(dirpath=run, filename="at-{step}", every_n_train_steps=1, save_top_k=1)
        for _ in range(2)
    ]
    two[1].monitor, two[1].mode = "loss", "max"
    trainer = Trainer(
        accelerator="cpu", max_steps=3, plugins=[io], callbacks=[io.callback(), held, *two],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), data())
    assert "at-step=1.ckpt" in held.seen[0]
    assert "at-step=2.ckpt" in held.seen[0]
    assert Path(two[0].best_model_path).exists()
    assert {path.name for path in run.glob("*.ckpt")} == {
        Path(each.best_model_path).name for each in two
    }
    assert len({each.best_model_path for each in two}) == 2


def test_the_callback_opens_the_run_before_the_first_save(run: Path):
    io = SidesaveCheckpointIO(run)
    seen: list[bool] = []

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append(io.checkpointer is not None)

    trainer = a_trainer(run, io, 1)
    trainer.callbacks.append(Look())
    trainer.fit(Net(), data())
    assert seen == [True]
    trainer.validate_loop  # noqa: B018 - an evaluation opens nothing
    other = Trainer(accelerator="cpu", callbacks=[io.callback()], logger=False)
    with pytest.raises(InvalidArgumentError, match=r"plugins=\[\.\.\.\]"):
        other.fit(Net(), data())


@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy])
def test_a_strategy_that_saves_past_the_plugin_is_refused_by_name(kind: Any, run: Path):
    strategy = kind.__new__(kind)  # without the device, or the package, that making one asks for
    strategy._checkpoint_io = io = SidesaveCheckpointIO(run)
    trainer: Any = SimpleNamespace(strategy=strategy, is_global_zero=True)
    for stage in ("fit", "validate"):
        with pytest.raises(
            InvalidArgumentError, match=f"{kind.__name__} does not save through .*ModelParallel"
        ):
            io.callback().setup(trainer, Net(), stage)
    assert not run.exists()


def test_a_checkpoint_of_lightnings_own_is_resumed_from_and_then_replaced(run: Path):
    a_trainer(run, None, 4).fit(Net(), data())
    assert (run / "last.ckpt").is_file()
    io = SidesaveCheckpointIO(run)
    trainer = a_trainer(run, io, 8)
    trainer.fit(Net(), data(), ckpt_path="last", weights_only=False)
    assert trainer.global_step == 8
    assert (run / "last.ckpt").is_symlink()
    assert io.load_checkpoint(run / "last.ckpt")["global_step"] == 8
    with pytest.raises(CheckpointNotFoundError):
        io.load_checkpoint(run / "none.ckpt")


def test_an_interrupt_ends_with_all_saves_committed(run: Path):
    class Interrupt(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                raise KeyboardInterrupt

    io = SidesaveCheckpointIO(run)
    trainer = a_trainer(run, io, 8)
    trainer.callbacks.append(Interrupt())
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            trainer.fit(Net(), data())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert io.load_checkpoint(run / "last.ckpt")["global_step"] == 4


def test_what_a_save_failed_with_is_raised_by_the_next_call(run: Path, tmp_path: Path):
    class Away(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                run.rename(tmp_path / "away")

    io = SidesaveCheckpointIO(run, failures=sidesave.FailureOptions(retries=0))
    trainer = a_trainer(tmp_path / "paths", io, 8)
    trainer.callbacks.append(Away())
    with pytest.raises(WriteError):
        trainer.fit(Net(), data())
    (tmp_path / "away").rename(run)


def test_what_cannot_be_saved_is_named_unless_pickle_is_allowed(run: Path, tmp_path: Path):
    checkpoint: dict[str, Any] = {"state_dict": {}, "hyper_parameters": {"net": nn.Tanh}}
    io = SidesaveCheckpointIO(run)
    with pytest.raises(UnsupportedValueError, match=r"hyper_parameters\.net"):
        io.save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    io.teardown()
    io = SidesaveCheckpointIO(run, allow_pickle=True)
    io.save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    assert io.load_checkpoint(tmp_path / "a.ckpt")["hyper_parameters"]["net"] is nn.Tanh
    with pytest.raises(UnsupportedValueError):
        io.load_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    io.teardown()


class Mode(enum.Enum):
    FAST = "fast"


@dataclasses.dataclass
class Options:
    rate: float = 0.1


class Configured(Net):
    """A module with hyperparameters of any type."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.save_hyperparameters(given)
        self.trained = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trained += 1


def test_hyperparameters_that_are_pickled_come_back_as_from_lightnings_own_file(run: Path):
    given = {
        "net": nn.Linear(2, 2),
        "mode": Mode.FAST,
        "options": Options(0.5),
        "deep": {
            "modes": [Mode.FAST, {Mode.FAST: 1}],
            "set": {Mode.FAST},
            "queue": collections.deque([Mode.FAST]),
        },
        "scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], 0.1), 1),
    }
    io = Twin(run, allow_pickle=True)
    a_trainer(run, io, 2).fit(Configured(**given), data())
    expected = torch.load(f"{run}/last.ckpt.torch", weights_only=False)["hyper_parameters"]
    got = io.load_checkpoint(run / "last.ckpt")["hyper_parameters"]
    assert {name: type(value) for name, value in got.items()} == {
        name: type(value) for name, value in expected.items()
    }
    assert torch.equal(got["net"].weight, expected["net"].weight)
    assert (got["mode"], got["options"], got["deep"]) == (
        given["mode"],
        given["options"],
        given["deep"],
    )
    assert got["scheduler"].state_dict() == expected["scheduler"].state_dict()
    with pytest.raises(UnsupportedValueError):
        io.load_checkpoint(run / "last.ckpt", weights_only=True)


@pytest.mark.parametrize(
    "value",
    [nn.Linear(2, 2), Options(), [{"a": nn.Linear(2, 2)}], torch.optim.SGD([torch.zeros(1)], 0.1)],
    ids=type,
)
def test_hyperparameters_that_would_come_back_as_something_else_are_refused_before_the_first_step(
    value: Any, run: Path
):
    net = Configured(wrong=value)
    with pytest.raises(UnsupportedValueError, match=r"hyper_parameters\.wrong"):
        a_trainer(run, SidesaveCheckpointIO(run), 4).fit(net, data())
    assert net.trained == 0
    io = SidesaveCheckpointIO(run)  # without the callback that would have refused it
    with pytest.raises(UnsupportedValueError, match=r"hyper_parameters\.wrong"):
        io.save_checkpoint({"state_dict": {}, "hyper_parameters": {"wrong": value}}, run / "a.ckpt")
    io.teardown()


def test_enums_among_hyperparameters_are_reported_by_name_once(
    run: Path, caplog: pytest.LogCaptureFixture
):
    net = Configured(mode=Mode.FAST, deep=[Mode.FAST])
    a_trainer(run, SidesaveCheckpointIO(run), 4).fit(net, data())
    told = [
        each.getMessage()
        for each in caplog.records
        if "enums are loaded as their values" in each.message
    ]
    assert len(told) == 1
    assert told[0].startswith("hyper_parameters.mode, hyper_parameters.deep.0: ")


def test_a_scheduler_that_cannot_be_saved_is_refused_before_the_first_step_if_it_is_to_be_saved(
    run: Path,
):
    class Scheduled(Configured):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            scheduler.options = Options()
            return [optimizer], [scheduler]

    net = Scheduled()
    with pytest.raises(UnsupportedValueError, match=r"lr_schedulers\.0\.options"):
        a_trainer(run, SidesaveCheckpointIO(run), 4).fit(net, data())
    assert net.trained == 0
    io, net = SidesaveCheckpointIO(run), Scheduled()
    trainer = a_trainer(run, io, 2)
    trainer.checkpoint_callback.save_weights_only = True
    trainer.fit(net, data())
    assert net.trained == 2


def test_what_has_no_meaning_is_refused_by_name(run: Path, tmp_path: Path):
    typo: dict[str, Any] = {"slotz": 2}
    with pytest.raises(TypeError, match="slotz"):  # at once, and not in the first save
        SidesaveCheckpointIO(run, **typo)
    for name, value in {"distributed": True, "process_group": None, "node_local": True}.items():
        with pytest.raises(InvalidArgumentError, match=f"{name}="):
            SidesaveCheckpointIO(run, **{name: value})  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidArgumentError, match="mirror="):
        SidesaveCheckpointIO("s3://bucket/run")
    io = SidesaveCheckpointIO(run)
    with pytest.raises(InvalidArgumentError, match="storage_options="):
        io.save_checkpoint({}, tmp_path / "a.ckpt", {"key": 1})
    with pytest.raises(InvalidArgumentError, match="mirror="):
        io.save_checkpoint({}, "s3://bucket/a.ckpt")
    io.save_checkpoint({"x": 1}, tmp_path / "a.ckpt")
    with pytest.raises(InvalidArgumentError, match="map_location"):
        io.load_checkpoint(tmp_path / "a.ckpt", map_location=lambda storage, place: storage)
    io.teardown()


class Large(Net):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4000, 4750)  # 76 MB

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers.parameters(), lr=0.1)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_net_of_76_mb_with_more_saves_than_slots_ends(slots: int, run: Path):
    io = SidesaveCheckpointIO(run, staging=sidesave.StagingOptions(slots=slots))
    a_trainer(run, io, 6).fit(Large(), data())
    assert len(sidesave.find(run)) == 3
    assert io.load_checkpoint(run / "last.ckpt")["global_step"] == 6


# Kills --------------------------------------------------------------------------------------------


def start(folder: Path, api: str, kind: str, steps: int, kill_at: int = -1) -> list[int]:
    """Run a job to its end; the exit statuses."""
    call = json.dumps(
        {"folder": str(folder), "api": api, "kind": kind, "steps": steps, "kill_at": kill_at}
    )
    command = [sys.executable, str(JOB), call]
    if kind == "alone":
        return [forks.popen(command).wait(280)]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "GROUP_RANK": "0",
    }
    common |= {"TORCHELASTIC_RUN_ID": "test", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        forks.popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    return [each.wait(280) for each in ranks]


def losses(folder: Path, rank: int) -> dict[str, str]:
    """The loss of each step, the last time that it was taken."""
    return dict(line.split() for line in Path(f"{folder}.losses-{rank}").read_text().splitlines())


def end_daemons(folder: Path, number: int) -> None:
    for file in folder.parent.glob(f"{folder.name}.losses-daemon-*"):
        os.kill(int(file.read_text()), number)
        file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "is_lost"),
    [("alone", True), ("alone", False), ("ddp", False), ("fsdp", True), ("fsdp", False)],
)
def test_a_job_killed_within_a_save_goes_on_as_with_lightnings_own(
    kind: str, is_lost: bool, tmp_path: Path
):
    ranks = 1 if kind == "alone" else 2
    for api in ("ours", "stock"):
        folder = tmp_path / api
        assert start(folder, api, kind, 9, kill_at=6) == [-signal.SIGKILL] * ranks
        if api == "ours":
            there = {path.name: path for path in folder.glob("*.ckpt") if path.exists()}
            assert len(there) == 3  # of steps 2 and 4; of the save of step 6 nothing
            assert all(sidesave.verify(path).ok for path in there.values())
            assert sidesave.load(there["last.ckpt"])["global_step"] == 4
            end_daemons(folder, signal.SIGKILL if is_lost else signal.SIGCONT)
        assert start(folder, api, kind, 9) == [0] * ranks
    for rank in range(ranks):
        ours, stock = losses(tmp_path / "ours", rank), losses(tmp_path / "stock", rank)
        assert ours == stock
        assert [*ours] == [str(step) for step in range(9)]
        lines = Path(f"{tmp_path}/ours.losses-{rank}").read_text().split("\n")
        assert [line.partition(" ")[0] for line in lines].index("4" if is_lost else "6", 5)
    names = [{path.name for path in (tmp_path / api).glob("*.ckpt")} for api in ("ours", "stock")]
    assert names[0] == names[1]
    if kind in ("alone", "ddp"):
        io = SidesaveCheckpointIO(tmp_path / "ours")
        ours = io.load_checkpoint(tmp_path / "ours" / "last.ckpt")
        stock = TorchCheckpointIO().load_checkpoint(
            tmp_path / "stock" / "last.ckpt", weights_only=False
        )
        assert all(
            same(ours[key], stock[key])
            for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops")
        )
    assert len(sidesave.find(tmp_path / "ours")) == 3


@pytest.mark.slow
def test_the_script_of_the_guide_can_be_killed_and_goes_on(tmp_path: Path):
    guides.kill_and_run_again("lightning", tmp_path)
