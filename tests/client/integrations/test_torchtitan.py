# pyright: reportMissingImports=false
"""torchtitan's trainer saves with sidesave, by the contract of its own checkpoint manager and
beside that one.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs torchtitan: scripts/test --integrations torchtitan")

import forks
import guides
import torch
from titan_trainers import MANAGERS, Parts
from torch.distributed.checkpoint import HuggingFaceStorageReader
from trainers import Orders

import sidesave
from sidesave.errors import (
    CheckpointNotFoundError,
    DirectoryInUseError,
    IntegrityError,
    InvalidArgumentError,
    StateMismatchError,
)
from sidesave.integrations.torchtitan import SidesaveCheckpointManager

Config = SidesaveCheckpointManager.Config
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
    pytest.mark.usefixtures("alone"),
]


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """torchtitan's manager needs a process group."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


class Open:
    """Managers, which are closed at the end of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.managers: list[Any] = []

    def __call__(
        self, parts: Parts, kind: str = "ours", adapter: Any = None, **options: Any
    ) -> Any:
        manager = parts.build(MANAGERS[kind].Config(enable=True, **options), self.folder, adapter)
        self.managers.append(manager)
        return manager

    def close(self) -> None:
        for manager in self.managers:
            manager.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    opened = Open(tmp_path)
    yield opened
    opened.close()


def train(parts: Parts, manager: Any, steps: int, last: int = -1) -> list[bool]:
    """Train and save as the trainer does; whether each step was saved."""
    saved = []
    for _ in range(steps):
        manager.maybe_wait_for_staging()
        parts.train()
        saved.append(manager.save(parts.progress.step, last_step=parts.progress.step == last))
    return saved


def steps_of(folder: Path) -> list[int]:
    """The numbers of ``step-N`` that lead to something."""
    return sorted(
        int(each.name[5:]) for each in folder.iterdir() if re.fullmatch(r"step-\d{1,7}", each.name)
    )


def test_it_has_the_options_of_torchtitans_own_with_their_defaults():
    own, stock = (
        {each.name: each for each in dataclasses.fields(kind.Config)} for kind in MANAGERS.values()
    )
    assert own.keys() - stock.keys() == {"checkpointer"}
    assert stock.keys() <= own.keys()
    assert [name for name in stock if own[name].default != stock[name].default] == ["async_mode"]
    assert [name for name in stock if own[name].type != stock[name].type] == []


def test_what_is_saved_comes_back_as_torchtitans_own_brings_it(opened: Open):
    states = {}
    for kind in MANAGERS:
        parts, fresh = Parts(1), Parts(2)
        manager = opened(parts, kind, folder=kind, interval=2)
        train(parts, manager, 4)
        expected = parts.state()
        manager.close()
        assert fresh.state() != expected
        assert opened(fresh, kind, folder=kind).load()
        states[kind] = fresh.state()
        assert states[kind] == expected
        train(fresh, opened(fresh, kind, folder=f"{kind}-2"), 2)
        train(parts, opened(parts, kind, folder=f"{kind}-3"), 2)
        assert fresh.state() == parts.state()
    assert states["ours"] == states["stock"]
    assert (opened.folder / "ours" / "step-4").readlink() == Path("step-00000004")


@pytest.mark.parametrize(
    "options",
    [
        {"interval": 3},
        {"interval": 3, "enable_first_step_checkpoint": True},
        {"interval": 100, "last_save_model_only": False},
        {"interval": 2, "load_only": True},
        {"interval": 2, "async_mode": "disabled"},
        {"interval": 2, "async_mode": "async_with_pinned_mem"},
    ],
    ids=str,
)
def test_the_same_steps_are_saved_under_the_same_names(options: dict[str, Any], opened: Open):
    seen = {}
    for kind in MANAGERS:
        own = {"async_mode": "disabled"} if kind == "stock" else {}
        parts = Parts(1)
        manager = opened(parts, kind, folder=kind, **{**options, **own})
        saved = train(parts, manager, 7, last=7)
        manager.close()
        folder = opened.folder / kind
        seen[kind] = saved, steps_of(folder) if folder.exists() else []
    assert seen["ours"] == seen["stock"]


def test_disabled_waits_for_the_commit_and_async_ends_with_it(opened: Open):
    parts = Parts(1)
    manager = opened(parts, interval=1, folder="a", async_mode="disabled")
    train(parts, manager, 1)
    assert sidesave.latest(opened.folder / "a") is not None
    manager = opened(parts, interval=1, folder="b")
    train(parts, manager, 1)
    manager.maybe_wait_for_saving()
    assert sidesave.latest(opened.folder / "b") is not None
    assert manager.save_future is None


def test_a_disabled_manager_does_nothing(tmp_path: Path):
    parts = Parts(1)
    manager = parts.build(Config(enable=False), tmp_path)
    assert not manager.save(500)
    assert not manager.load()
    manager.maybe_wait_for_staging()
    manager.maybe_wait_for_saving()
    manager.close()
    assert not [*tmp_path.iterdir()]


def test_the_latest_are_kept_and_only_committed_ones_are_counted(opened: Open):
    parts = Parts(1)
    folder = opened.folder / "checkpoint"
    manager = opened(parts, interval=1, keep_latest_k=2)
    train(parts, manager, 4)
    manager.close()
    assert steps_of(folder) == [3, 4]
    (folder / "step-9").mkdir()  # which torchtitan's own manager would count
    manager = opened(parts, interval=1, keep_latest_k=2)
    assert manager.load()
    train(parts, manager, 1)
    manager.close()
    assert [info.step for info in sidesave.find(folder)] == [4, 5]


def test_the_step_that_is_asked_for_is_loaded_and_of_none_the_highest(
    opened: Open, caplog: pytest.LogCaptureFixture
):
    loaded = {}
    for kind in MANAGERS:
        parts = Parts(1)
        manager = opened(parts, kind, folder=kind, interval=1)
        assert not manager.load()
        train(parts, manager, 3)
        manager.close()
        for step in (1, -1, 2):
            fresh = Parts(2)
            assert opened(fresh, kind, folder=kind, load_only=kind == "ours").load(step)
            loaded.setdefault(step, []).append(fresh.state())
        with pytest.raises(FileNotFoundError, match=r"load_step=7"):
            opened(Parts(2), kind, folder=kind, load_only=kind == "ours").load(7)
        with pytest.raises(FileNotFoundError, match=r"load_step=7"):
            opened(Parts(2), kind, folder="none", load_only=True).load(7)
        fresh = Parts(2)
        manager = opened(fresh, kind, folder=kind, interval=1)
        manager.load(1)
        train(fresh, manager, 1)  # step 2 again
        manager.close()
        fresh = Parts(3)
        assert opened(fresh, kind, folder=kind, load_only=True).load()
        loaded.setdefault("again", []).append(fresh.state())
    assert all(ours == stock for ours, stock in loaded.values())
    assert loaded[1][0]["step"] == 1
    assert loaded["again"][0] == loaded[-1][0]
    assert "has later ones, [2, 3]: load_step=-1 will take the highest" in caplog.text


def test_a_seed_checkpoint_gives_the_model_alone(opened: Open):
    seed = Parts(1)
    manager = opened(seed, create_seed_checkpoint=True)
    assert manager.save(0, last_step=True)
    manager.close()
    fresh = Parts(2)
    fresh.train(1)
    before = fresh.state()
    manager = opened(fresh)
    assert manager.load()
    after = fresh.state()
    weights = seed.model.state_dict().keys()
    assert {name: after[name] for name in weights} == {name: seed.state()[name] for name in weights}
    assert {name: after[name] for name in after.keys() - weights} == {
        name: before[name] for name in before.keys() - weights
    }


@pytest.mark.parametrize("source", MANAGERS)
@pytest.mark.parametrize("model_only", [True, False])
def test_another_runs_checkpoint_begins_a_run(source: str, model_only: bool, opened: Open):
    parts = Parts(1)
    manager = opened(parts, source, folder="source", interval=2)
    train(parts, manager, 2)
    manager.close()
    path = str(opened.folder / "source" / "step-2")
    states = []
    for kind in MANAGERS if source == "stock" else ["ours"]:
        fresh = Parts(2)
        options = {"initial_load_path": path, "initial_load_model_only": model_only, "folder": kind}
        manager = opened(fresh, kind, **options)
        assert manager.load()
        states.append(fresh.state())
        expected = parts.model.state_dict()
        assert all(
            torch.equal(value, expected[name]) for name, value in fresh.model.state_dict().items()
        )
        assert fresh.progress.step == (0 if model_only else 2)
        train(fresh, manager, 2)
        manager.save(4, last_step=True)
        manager.close()
    assert all(state == states[0] for state in states)
    # Where the folder has a checkpoint, it counts.
    with pytest.raises(StateMismatchError, match="with the model alone"):
        opened(Parts(3), folder="ours", initial_load_path=path).load()


def test_what_is_excluded_stays(opened: Open):
    parts = Parts(1)
    manager = opened(parts, interval=2)
    train(parts, manager, 2)
    manager.close()
    fresh = Parts(2)
    manager = opened(fresh, exclude_from_loading=["dataloader", "lr_scheduler"])
    assert manager.load()
    assert fresh.progress.step == 2
    assert fresh.schedule.state_dict() == {"last_epoch": 0}
    assert fresh.loader.state_dict() == Parts(2).loader.state_dict()
    manager.close()
    with pytest.raises(
        InvalidArgumentError, match="exclude_from_loading has 'data': there are train_state, model"
    ):
        opened(fresh, exclude_from_loading=["data"]).load()
    with pytest.raises(ValueError, match="model key"):
        Config(exclude_from_loading=["model"])


@pytest.mark.parametrize("kind", MANAGERS)
def test_the_last_save_has_the_model_in_the_dtype_of_the_export(kind: str, opened: Open):
    parts = Parts(1)
    manager = opened(parts, kind, export_dtype="bfloat16", interval=100)
    assert manager.save(1, last_step=True)
    manager.close()
    path = opened.folder / "checkpoint" / "step-1"
    fresh = Parts(2)
    manager = opened(fresh, folder="next", initial_load_path=str(path))
    assert manager.load()
    for name, value in fresh.model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, parts.model.state_dict()[name].bfloat16().float())
    if kind == "ours":
        saved = sidesave.load(path)
        assert saved.keys() == {"model"}
        assert {value.dtype for value in saved["model"].values()} == {torch.bfloat16}
        with pytest.raises(StateMismatchError, match="as the last step, with the model alone"):
            opened(Parts(2), load_only=True).load()


class Adapter:
    """Names as others have them."""

    fqn_to_index_mapping = None
    hf_assets_path = None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"hf.{name}": value for name, value in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("hf."): value for name, value in state.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        return HuggingFaceStorageReader(path)


def test_a_partly_frozen_model_comes_back(opened: Open):
    states = []
    for kind in MANAGERS:
        parts, fresh = Parts(1, frozen="first"), Parts(2, frozen="first")
        manager = opened(parts, kind, folder=kind, interval=2)
        train(parts, manager, 2)
        manager.close()
        assert opened(fresh, kind, folder=kind).load()
        assert fresh.state() == parts.state()
        fresh.train(2)
        states.append(fresh.state())
    assert states[0] == states[1]


@pytest.mark.parametrize("frozen", ["", "first"])
def test_weights_go_out_and_come_in_under_the_names_of_hugging_face(frozen: str, opened: Open):
    read = {}
    for kind in MANAGERS:
        parts = Parts(1, frozen=frozen)
        manager = opened(
            parts, kind, Adapter(), folder=kind, last_save_in_hf=True, export_dtype="bfloat16"
        )
        assert manager.save(3, last_step=True)
        manager.close()
        path = opened.folder / kind / "step-3"
        assert (path / "model.safetensors.index.json").is_file() or [*path.glob("*.safetensors")]
        for loader in MANAGERS:
            fresh = Parts(2)
            options = {
                "initial_load_path": str(path),
                "initial_load_in_hf": True,
                "folder": f"{kind}-{loader}",
            }
            assert opened(fresh, loader, Adapter(), **options).load()
            read[kind, loader] = fresh.state()
    assert all(state == read["stock", "stock"] for state in read.values())
    with pytest.raises(InvalidArgumentError, match="last_save_in_hf: the model has no sd_adapter"):
        opened(Parts(1), last_save_in_hf=True)
    with pytest.raises(
        InvalidArgumentError, match="initial_load_in_hf: the model has no sd_adapter"
    ):
        opened(Parts(1), folder="new", initial_load_in_hf=True).load()


def test_a_run_of_torchtitans_own_is_gone_on_with_in_its_folder(opened: Open):
    parts = Parts(1)
    train(parts, opened(parts, "stock", interval=1), 3)
    fresh = Parts(2)
    manager = opened(fresh, interval=1, keep_latest_k=2)
    assert manager.load()
    assert fresh.state() == parts.state()
    train(fresh, manager, 3)
    manager.close()
    folder = opened.folder / "checkpoint"
    assert steps_of(folder) == [1, 2, 3, 5, 6]
    last = Parts(3)
    assert opened(last, load_only=True).load()
    assert last.state() == fresh.state()


def test_a_reader_takes_no_folder_that_a_trainer_has(opened: Open):
    parts = Parts(1)
    manager = opened(parts, interval=1)
    train(parts, manager, 1)
    manager.maybe_wait_for_saving()
    fresh = Parts(2)
    reader = opened(fresh, load_only=True)
    assert reader.checkpointer is None
    assert reader.load()
    assert fresh.state() == parts.state()
    assert not reader.save(1)
    with pytest.raises(DirectoryInUseError):
        opened(Parts(3))


def test_a_damaged_highest_step_is_told_and_not_passed_over(opened: Open):
    parts = Parts(1)
    manager = opened(parts, interval=1)
    train(parts, manager, 2)
    manager.close()
    (opened.folder / "checkpoint" / "step-00000002" / "manifest.json").write_text("{}")
    with pytest.raises(IntegrityError):
        opened(Parts(2), load_only=True).load()
    assert opened(Parts(2), load_only=True).load(1)


def test_a_run_in_an_object_store(opened: Open):
    pytest.importorskip("obstore")
    url = f"file://{opened.folder}/store"
    parts = Parts(1)
    manager = opened(parts, folder=url, interval=1, keep_latest_k=2)
    train(parts, manager, 3)
    manager.close()
    assert [info.step for info in sidesave.find(url)] == [2, 3]
    fresh = Parts(2)
    assert opened(fresh, folder=url, load_only=True).load()
    assert fresh.state() == parts.state()


def test_what_has_no_meaning_is_refused_by_name(opened: Open):
    for name in ("distributed", "process_group", "node_local"):
        with pytest.raises(InvalidArgumentError, match=f"checkpointer has '{name}': "):
            Config(checkpointer={name: True})
    with pytest.raises(
        InvalidArgumentError, match=r"FailureOptions\.fallback_directory, and torchtitan"
    ):
        Config(checkpointer={"failures": sidesave.FailureOptions(fallback_directory="other")})
    with pytest.raises(InvalidArgumentError, match="'slot', which is not an option of sidesave"):
        Config(checkpointer={"slot": 1})
    with pytest.raises(ValueError, match="async_mode='threads'"):
        Config(async_mode="threads")  # pyright: ignore[reportArgumentType]
    parts = Parts(1)
    parts.progress = [1]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(InvalidArgumentError, match=r"states\['train_state'\] is a list"):
        opened(parts)
    with pytest.raises(CheckpointNotFoundError, match="there is nothing at this path"):
        opened(Parts(1), initial_load_path=str(opened.folder / "none")).load()


def test_options_of_the_checkpointer_are_passed_on_and_in_no_log(opened: Open):
    parts, staging = Parts(1), sidesave.StagingOptions(slots=1)
    config = Config(
        enable=True, checkpointer={"staging": staging, "mirror": str(opened.folder / "mirror")}
    )
    assert json.dumps(config.to_dict()["checkpointer"]) == '["mirror", "staging"]'
    manager = opened(parts, checkpointer=config.checkpointer, interval=1)
    train(parts, manager, 1)
    assert manager.checkpointer is not None
    manager.checkpointer.wait(mirrored=True)
    manager.close()
    for path in sidesave.find(opened.folder / "checkpoint"):
        shutil.rmtree(path.path)
    fresh = Parts(2)
    assert opened(fresh, checkpointer=config.checkpointer, load_only=True).load()
    assert fresh.state() == parts.state()


def test_the_command_line_sets_the_options():
    import tyro

    config = tyro.cli(
        Config, args=["--interval", "7", "--async-mode", "disabled", "--enable"], default=Config()
    )
    assert (config.interval, config.async_mode, config.enable) == (7, "disabled", True)


def test_the_guides_configuration_is_found_by_torchtitan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from torchtitan.config import ConfigManager

    (tmp_path / "my_configs.py").write_text(guides.script("torchtitan", "# With torchtitan"))
    monkeypatch.syspath_prepend(tmp_path)
    order = [
        "--module",
        "my_configs",
        "--config",
        "llama3_8b_sidesave",
        "--checkpoint.interval=100",
    ]
    config: Any = ConfigManager().parse_args(order)
    assert type(config.checkpoint) is Config
    assert (config.checkpoint.enable, config.checkpoint.folder, config.checkpoint.interval) == (
        True,
        "checkpoint",
        100,
    )


# Ranks --------------------------------------------------------------------------------------------


class Ranks:
    """Processes that are forked from one which has imported torchtitan, which takes it ten
    seconds.
    """

    def __init__(self, folder: Path) -> None:
        environment = dict(os.environ)
        self.orders = Orders(folder / "orders", environment.__setitem__)
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            "import titan_trainers; titan_trainers.serve()",
        ]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._server: Any = forks.popen(command, env=environment, **pipes)

    def __call__(self, function: str, size: int, *arguments: Any, ended: int = 0) -> None:
        """Have ``size`` ranks call a function of ``titan_trainers``; each has to end so."""
        self.begin(function, size, *arguments)
        assert self.end() == [ended] * size

    def begin(self, function: str, size: int, *arguments: Any) -> None:
        self._server.stdin.write(json.dumps([function, size, arguments]) + "\n")
        self._server.stdin.flush()

    def end(self) -> list[int]:
        """How the ranks have ended."""
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        self._server.communicate(timeout=60)
        self.orders.close()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def test_stages_and_data_come_back_on_another_mesh(ranks: Ranks, tmp_path: Path):
    ranks("save_on_stages", 2, str(tmp_path))
    ranks("load_on_another_mesh", 2, str(tmp_path))


def test_a_trainer_that_is_killed_with_its_daemon_within_a_write_goes_on_from_the_commit(
    ranks: Ranks, tmp_path: Path
):
    ranks("train_parts", 1, str(tmp_path), 2)
    ranks.orders.give("stop", starting_at="got SAVE", every_step=True, after=6)
    ranks.begin("train_parts", 1, str(tmp_path), 5)
    daemon, _ = ranks.orders.obeyed()
    for pid in (int((tmp_path / "pid").read_text()), daemon):
        os.kill(pid, signal.SIGKILL)
    assert ranks.end() == [-signal.SIGKILL]
    folder = tmp_path / "checkpoint"
    (partial,) = folder.glob(".step-00000003.*.partial")
    assert [*partial.iterdir()]
    assert steps_of(folder) == [1, 2]
    assert [info.step for info in sidesave.find(folder) if sidesave.verify(info).ok] == [1, 2]
    (tmp_path / "loaded-2").unlink()
    ranks("train_parts", 1, str(tmp_path), 5)
    (tmp_path / "straight").mkdir()
    ranks("train_parts", 1, str(tmp_path / "straight"), 5)
    for one, other in (("loaded-2", "saved-2"), ("saved-5", "straight/saved-5")):
        assert torch.load(tmp_path / one, weights_only=True) == torch.load(
            tmp_path / other, weights_only=True
        )
    assert steps_of(folder) == [1, 2, 3, 4, 5]
    assert not [*folder.glob(".step-*")]


def losses(folder: Path, ranks: int) -> list[dict[str, str]]:
    """Of each rank, the loss of each step, the last time that it was taken, and of what is there at
    the end.
    """
    files = [(folder / f"losses-{rank}").read_text().splitlines() for rank in range(ranks)]
    return [dict(line.split() for line in lines) for lines in files]  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", [{}, {"tensor_parallel_degree": 2}], ids=["fsdp", "tp"])
def test_a_job_killed_within_a_save_goes_on_as_one_that_saves_with_torchtitans_own(
    parallelism: dict[str, int], ranks: Ranks, tmp_path: Path
):
    def run(kind: str, name: str, steps: int, kill_at: int = -1, **options: Any) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        options = {"parallelism": parallelism, "async_mode": "async", **options}
        ended = 0 if kill_at < 0 else -signal.SIGKILL
        ranks("run_job", 2, str(tmp_path / name), kind, options, steps, kill_at, ended=ended)

    for kind in MANAGERS:
        run(kind, kind, 6, kill_at=4, interval=2, keep_latest_k=2)
        for link in (tmp_path / kind / "checkpoint").glob("step-?") if kind == "ours" else []:
            assert sidesave.verify(link).ok
        run(kind, kind, 6, interval=2, keep_latest_k=2)
    run("ours", "straight", 6, interval=100)
    expected = losses(tmp_path / "straight", 2)
    assert [*expected[0]] == [*map(str, range(1, 7)), "end"]
    assert losses(tmp_path / "ours", 2) == losses(tmp_path / "stock", 2) == expected
    folder = tmp_path / "ours" / "checkpoint"
    assert steps_of(folder) == [4, 6]
    assert [info.step for info in sidesave.find(folder)] == [4, 6]
    assert all(sidesave.verify(info).ok for info in sidesave.find(folder))


@pytest.mark.slow
def test_one_process_goes_on_with_what_two_ranks_have_saved_as_with_torchtitans_own(
    ranks: Ranks, tmp_path: Path
):
    for kind in MANAGERS:
        (tmp_path / kind).mkdir()
        options = {"interval": 2, "exclude_from_loading": ["dataloader"]}
        ranks("run_job", 2, str(tmp_path / kind), kind, options, 3)
        ranks("run_job", 1, str(tmp_path / kind), kind, options, 5)
    ours, stock = (losses(tmp_path / kind, 1) for kind in MANAGERS)
    assert [*ours[0]] == ["1", "2", "3", "end", "4", "5"]
    assert ours == stock
