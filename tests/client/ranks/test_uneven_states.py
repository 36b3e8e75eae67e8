"""Ranks under data parallelism that do not hold the same: each gets back its own, or the save fails
by name.
"""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from states import difference
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from trainers import DEADLINE_S, save

import sidesave
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.errors import StateMismatchError, UnsupportedValueError
from sidesave.stager.state import tree


def _model(seed: int = 0, layers: int = 3) -> DistributedDataParallel:
    torch.manual_seed(seed)
    return DistributedDataParallel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))))


def _save_and_load(folder: Path, state: dict[str, Any], into: dict[str, Any]) -> None:
    with sidesave.Checkpointer(f"{folder}/run") as checkpointer:
        checkpointer.save(1, state).committed.result(DEADLINE_S)
        checkpointer.load(into=into)


def _load_here(folder: Path, **into: Any) -> None:
    """Load on another number of ranks: this process alone."""
    sidesave.load(folder / "run" / "step-00000001", into=into)


# Optimizers that are not torch's own --------------------------------------------------------------


class Uneven(torch.optim.Optimizer):
    """Keeps momentum on the rank that owns a parameter, as distributed Muon does, or another value
    on each rank.
    """

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            state = self.state[parameter]
            match self.kind:
                case "owner" if number % size == rank:
                    state["momentum"] = torch.full_like(parameter, 10.0 + number)
                case "values":
                    state["left_over"] = torch.full_like(parameter, 100.0 * rank + number)
                case "shapes":
                    state["codes"] = torch.arange(3 + rank)
                case "dtypes":
                    state["codes"] = torch.ones(3, dtype=(torch.float32, torch.bfloat16)[rank])
                case "names":
                    state[f"part{rank}"] = torch.ones(2)
                case _:
                    continue


def _uneven(rank: int, folder: Path, kind: str) -> None:
    model, again = _model(), _model(1)
    optimizer, other = Uneven(model.parameters(), kind), Uneven(again.parameters(), kind)
    optimizer.step()
    _save_and_load(
        folder, {"model": model, "optimizer": optimizer}, {"model": again, "optimizer": other}
    )
    assert difference(optimizer.state_dict(), other.state_dict()) == ""
    assert difference(dict(model.state_dict()), dict(again.state_dict())) == ""


@pytest.mark.drawn
@pytest.mark.parametrize("kind", ["owner", "values", "shapes", "dtypes", "names"])
def test_each_rank_gets_back_the_state_that_it_had(tmp_path: Path, kind: str):
    forks.spawn_group(_uneven, tmp_path, kind)


def test_state_of_one_rank_is_found_on_another_number_of_ranks_under_the_name_of_its_parameter(
    tmp_path: Path,
):
    forks.spawn_group(_uneven, tmp_path, "owner")
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    reordered = [*reversed(list(model.parameters()))]
    optimizer = Uneven(reordered, "owner")
    _load_here(tmp_path, model=model, optimizer=optimizer)
    for number, parameter in enumerate(model.parameters()):
        assert torch.equal(
            optimizer.state[parameter]["momentum"], torch.full_like(parameter, 10.0 + number)
        )


def test_state_that_differs_is_refused_by_name_on_another_number_of_ranks(tmp_path: Path):
    forks.spawn_group(_uneven, tmp_path, "values")
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with pytest.raises(
        StateMismatchError, match=r"optimizer\.state\.0\.left_over differs between ranks 0, 1"
    ):
        _load_here(tmp_path, model=model, optimizer=Uneven(model.parameters(), "values"))


# Torch's own, whose state is taken as equal -------------------------------------------------------


def _one_sided(rank: int, folder: Path) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    if rank == 1:
        optimizer.state[next(model.parameters())]["ema"] = torch.ones(4, 4)
    with sidesave.Checkpointer(f"{folder}/run") as checkpointer:
        saved = checkpointer.save(1, {"model": model, "optimizer": optimizer})
        with pytest.raises(
            StateMismatchError, match=r"optimizer\.state\.0\.ema is on rank 1 and not on rank 0"
        ):
            saved.committed.result(DEADLINE_S)
        assert checkpointer.steps() == []
        of_each = {"model": model, "optimizer": sidesave.PerRank(optimizer)}
        checkpointer.save(2, of_each).committed.result(DEADLINE_S)


def test_a_tensor_that_would_be_given_to_a_rank_without_it_fails_the_save_by_name(tmp_path: Path):
    forks.spawn_group(_one_sided, tmp_path)


# Steps that leave ranks apart ---------------------------------------------------------------------


def _train(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, *, local: bool = False
) -> None:
    """Take a step with other data on each rank."""
    with model.no_sync() if local else contextlib.nullcontext():
        model(torch.full((2, 4), 1.0 + torch.distributed.get_rank())).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _user_hook(state, bucket):  # type: ignore[no-untyped-def]
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _after_a_hook(
    hook: Any,
) -> Callable[[DistributedDataParallel, torch.optim.Optimizer, Path], None]:
    def train(
        model: DistributedDataParallel, optimizer: torch.optim.Optimizer, folder: Path
    ) -> None:
        subgroup, _ = torch.distributed.new_subgroups(1)
        state = PostLocalSGDState(
            None, subgroup, start_localSGD_iter=0, post_local_gradient_allreduce=False
        )
        model.register_comm_hook(state, hook)
        _train(model, optimizer)

    return train


def _local_steps(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, folder: Path
) -> None:
    with sidesave.Checkpointer(f"{folder}/earlier") as checkpointer:
        checkpointer.save(1, {"model": model}).committed.result(DEADLINE_S)
        _train(model, optimizer, local=True)
    with torch.no_grad():
        model(torch.ones(2, 4))


def _uneven_inputs(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, folder: Path
) -> None:
    with Join([model]):
        for _ in range(1 + torch.distributed.get_rank()):
            _train(model, optimizer)


WAYS: dict[str, Callable[[DistributedDataParallel, torch.optim.Optimizer, Path], None]] = {
    "post-local SGD": _after_a_hook(post_localSGD_hook),
    "wrapped": _after_a_hook(default_hooks.fp16_compress_wrapper(post_localSGD_hook)),
    "a hook of the user's": _after_a_hook(_user_hook),
    "no_sync": _local_steps,
    "join": _uneven_inputs,
}


def _apart(rank: int, folder: Path, way: str) -> None:
    model, again = _model(), _model(1)
    optimizer, other = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, again))
    WAYS[way](model, optimizer, folder)
    moments = torch.stack([state["exp_avg"].sum() for state in optimizer.state.values()])
    every = [torch.zeros_like(moments), torch.zeros_like(moments)]
    torch.distributed.all_gather(every, moments)
    assert not torch.equal(*every), "ranks are apart"
    _save_and_load(
        folder, {"model": model, "optimizer": optimizer}, {"model": again, "optimizer": other}
    )
    assert difference(optimizer.state_dict(), other.state_dict()) == ""
    assert difference(dict(model.state_dict()), dict(again.state_dict())) == ""


@pytest.mark.drawn
@pytest.mark.parametrize("way", WAYS)
def test_what_local_steps_have_set_apart_comes_back_to_each_rank(tmp_path: Path, way: str):
    forks.spawn_group(_apart, tmp_path, way)


def _shared(rank: int, folder: Path) -> None:
    """None of this is a reason to compare: accumulation, evaluation, and hooks of torch's that
    reduce.
    """
    with sidesave.Checkpointer(f"{folder}/run") as checkpointer:
        model = _model()
        model.register_comm_hook(
            None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
        )
        optimizer = torch.optim.Adam(model.parameters())
        for step in (1, 2):
            with model.no_sync():
                model(torch.ones(2, 4)).sum().backward()
            _train(model, optimizer)
            with torch.no_grad():
                model(torch.ones(2, 4))
            checkpointer.save(step, {"model": model, "optimizer": optimizer}).committed.result(
                DEADLINE_S
            )
        flat = tree.flatten({"model": model, "optimizer": optimizer}, ranks=(0, 1))
        assert len(flat.grids) == 6 + 3 * 6
        assert not flat.undeclared


def test_what_torch_keeps_equal_is_not_compared(tmp_path: Path):
    forks.spawn_group(_shared, tmp_path)


# ZeroRedundancyOptimizer --------------------------------------------------------------------------


def _zero(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, **options)


def _divided(rank: int, folder: Path) -> None:
    model, again = _model(), _model(1)
    optimizer, other = _zero(model), _zero(again)
    for _ in range(3):
        _train(model, optimizer)
    _train(again, other)  # whose state has to go
    _save_and_load(
        folder, {"model": model, "optimizer": optimizer}, {"model": again, "optimizer": other}
    )
    states: Any = optimizer.optim.state_dict()["state"], other.optim.state_dict()["state"]
    assert 0 < len(states[0]) < 6
    assert difference(*states) == ""
    with CheckpointReader(f"{folder}/run/step-00000001", rank) as reader:
        shared = {
            f"optimizer.state.{number}.{key}"
            for number, state in states[0].items()
            for key in state
        }
        assert not shared & reader.record(rank).part.own.tensors.keys(), "nothing is compared"
        assert reader.manifest.diverged == {}
    for _ in range(2):
        _train(model, optimizer)
        _train(again, other)
    assert difference(dict(model.state_dict()), dict(again.state_dict())) == ""
    torch.save(sidesave.load(f"{folder}/run")["optimizer"]["state"], f"{folder}/state-{rank}")


def _divided_again(rank: int, folder: Path, size: int) -> None:
    """On other ranks, and in another order, which divides it otherwise."""
    model = _model(1)
    optimizer = ZeroRedundancyOptimizer([*reversed(list(model.parameters()))], torch.optim.Adam)
    sidesave.load(f"{folder}/run", into={"model": model, "optimizer": optimizer})
    whole = torch.load(f"{folder}/state-0")
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    own = optimizer.optim.param_groups[0]["params"]
    assert set(map(id, optimizer.optim.state)) == set(map(id, own))
    for parameter in own:
        assert difference(optimizer.optim.state[parameter], whole[numbers[id(parameter)]]) == ""


def test_divided_state_goes_on_bit_for_bit_and_is_divided_anew_on_any_ranks(tmp_path: Path):
    forks.spawn_group(_divided, tmp_path)
    state = torch.load(tmp_path / "state-0")
    assert state.keys() == torch.load(tmp_path / "state-1").keys() == {*range(6)}, (
        "all of it is there"
    )
    for size in (1, 2, 3):
        forks.spawn_group(_divided_again, tmp_path, size, count=size)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.Adam(model.parameters())
    _load_here(tmp_path, model=model, optimizer=optimizer)
    loaded = optimizer.state_dict()["state"]
    assert difference([*map(loaded.get, range(6))], [*map(state.get, range(6))]) == "", (
        "into any optimizer"
    )


def _undo(rank: int, folder: Path) -> None:
    class Broken(torch.optim.Adam):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise ArithmeticError("not this one")

    model, again = _model(), _model(1)
    optimizer, other = _zero(model), _zero(again)
    _train(model, optimizer)
    _train(again, other)
    before = {key: dict(state) for key, state in other.optim.state.items()}
    save(f"{folder}/run", {"a": optimizer, "b": optimizer, "model": model})

    into = {"a": other, "b": Broken(again.parameters()), "model": again}
    with pytest.raises(StateMismatchError, match="b: this Broken raised ArithmeticError"):
        sidesave.load(f"{folder}/run", into=into)
    assert difference([*before.values()], [*other.optim.state.values()]) == ""


def test_divided_state_is_put_back_if_a_later_object_cannot_be_loaded(tmp_path: Path):
    forks.spawn_group(_undo, tmp_path)


def _too_early(rank: int, folder: Path) -> None:
    model = _model()
    optimizer = _zero(model, overlap_with_ddp=True)
    with (
        sidesave.Checkpointer(f"{folder}/run") as checkpointer,
        pytest.raises(UnsupportedValueError, match="optimizer: a ZeroRedundancyOptimizer"),
    ):
        checkpointer.save(1, {"model": model, "optimizer": optimizer})


def test_divided_state_that_is_not_there_yet_is_an_error_of_ours(tmp_path: Path):
    forks.spawn_group(_too_early, tmp_path)


def _alone(rank: int, folder: Path) -> None:
    model = _model()
    optimizer = _zero(model)
    _train(model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        match = r"optimizer: its state is divided among ranks \[0, 1\].*consolidate_state_dict"
        with sidesave.Checkpointer(f"{folder}/run", distributed=False) as checkpointer:
            with pytest.raises(UnsupportedValueError, match=match):
                checkpointer.save(1, {"optimizer": optimizer})
            checkpointer.save(2, {"optimizer": optimizer.state_dict()}).committed.result(DEADLINE_S)
        assert len(sidesave.load(f"{folder}/run")["optimizer"]["state"]) == 6
    torch.distributed.barrier()


def test_divided_state_is_not_saved_by_one_of_its_ranks_alone(tmp_path: Path):
    forks.spawn_group(_alone, tmp_path)


# Warnings -----------------------------------------------------------------------------------------


def _messages(rank: int, folder: Path) -> None:
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sidesave").addHandler(handler)
    model = DistributedDataParallel(nn.Linear(600, 600))
    optimizer = Own(model.parameters())
    model(torch.ones(2, 600)).sum().backward()
    optimizer.step()
    with sidesave.Checkpointer(f"{folder}/run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"model": model, "optimizer": optimizer}).committed.result(
                DEADLINE_S
            )
        warned = [
            text
            for text in messages
            if "plain tensors in optimizer" in text and "sidesave.Replicated" in text
        ]
        assert len(warned) == (rank == 0)
        alike = {"model": model, "optimizer": sidesave.Replicated(optimizer)}
        checkpointer.save(3, alike).committed.result(DEADLINE_S)
    steps = [
        sorted((Path(folder) / f"run/step-0000000{step}").glob("optimizer.*.safetensors"))
        for step in (2, 3)
    ]
    sizes = [sum(path.stat().st_size for path in paths) for paths in steps]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01), "equal state is stored once"


def test_another_optimizer_is_compared_and_stored_once_and_one_warning_names_the_way_around(
    tmp_path: Path,
):
    forks.spawn_group(_messages, tmp_path)
