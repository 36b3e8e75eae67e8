"""``CheckpointManager`` in one process: what is saved when, what is kept, and that training goes on
where it was.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import logging
import math
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from managers import Manage, damage, release_when_waited_for, steps
from trainers import DEADLINE_S, ROOT, Orders, save, wait_until

import sidesave
from sidesave import KeepBest, KeepEverySteps, KeepLatest, KeepSteps
from sidesave.client.options import CheckpointerOptions, ExportOptions, LoadOptions, Options
from sidesave.client.runs import save_requests
from sidesave.client.runs.finding import catalog_of
from sidesave.client.runs.pins import PINS
from sidesave.client.training import retention
from sidesave.client.training.rng_state import RandomState
from sidesave.errors import (
    CheckpointNotFoundError,
    ClosedError,
    IntegrityError,
    InvalidArgumentError,
    StateMismatchError,
    UnsupportedValueError,
)
from sidesave.writer_daemon.storage import sealed_json

# When ---------------------------------------------------------------------------------------------


def test_the_steps_that_policies_name_are_saved_once_and_resumed_after(manage: Manage, run: Path):
    state = {"x": 0}
    manager = manage(state, save=[sidesave.EverySteps(3, offset=2), sidesave.AtSteps([0, 5])])
    assert manager.restore() == 0
    handles = []
    for step in range(10):
        state["x"] = step
        handles.append(manager.step(step))
    assert [handle.step for handle in handles if handle is not None] == [0, 2, 5, 8]
    manager.close()
    assert steps(run) == [0, 2, 5, 8]
    state["x"] = -1
    manager = manage(state)
    assert (manager.restore(), state) == (9, {"x": 8})
    assert (manager.restore(2), state) == (3, {"x": 2})


def test_steps_may_be_of_any_type_that_counts(manage: Manage, run: Path):
    state = {"x": 0}
    manager = manage(state, save=2, keep=KeepSteps(range(9)))
    of: Any = np.int64
    for step in range(5):
        manager.step(of(step))
    handle = manager.save(of(6))
    assert type(handle.step) is int
    manager.pin(of(6))
    assert manager.pinned == {6}
    manager.wait()
    of = torch.tensor
    assert manager.restore(of(4)) == 5
    assert manager.step(of(5)) is None and manager.step(of(8)) is not None
    manager.close()
    assert steps(run) == [2, 4, 6, 8]
    assert sidesave.Source(run, of(2)).locate() == str(run / "step-00000002")


def test_what_cannot_be_saved_is_told_when_the_manager_is_made_or_given_it(
    manage: Manage, run: Path
):
    loader: Any = torch.utils.data.DataLoader([1])  # pyright: ignore[reportArgumentType]
    state: dict[str, Any] = {"a": object(), "model": torch.nn.Linear(1, 1), "b": {"c": loader}}
    with pytest.raises(
        UnsupportedValueError,
        match=r"(?s)^2 values .*a: a builtins\.object.*b\.c: .*StatefulDataLoader",
    ):
        manage(state)
    del state["a"], state["b"]
    manager = manage(state, save=1)
    with pytest.raises(UnsupportedValueError, match=r"^late: "):
        manager.register("late", object())
    manager.step(0)
    manager.close()
    assert steps(run) == [0]


def test_save_saves_now_and_the_step_is_not_saved_again(manage: Manage, run: Path):
    manager = manage(save=[sidesave.EverySteps(2)])
    manager.step(1)
    assert manager.save(2, blocking=True).committed.done()
    assert manager.step(2) is None
    assert manager.step(4) is not None
    manager.wait()
    assert steps(run) == [2, 4]


def test_memory_that_was_prepared_is_what_the_first_save_takes(manage: Manage):
    manager = manage({"x": torch.ones(1 << 20)}, random_state=True)
    manager.prepare().result(DEADLINE_S)
    nbytes = manager.checkpointer.session.pool.nbytes
    assert nbytes > 4 << 20
    manager.save(0, blocking=True)
    assert manager.checkpointer.session.pool.nbytes == nbytes


def test_blocking_makes_every_save_synchronous(manage: Manage):
    handle = manage(save=[sidesave.EverySteps(1)], blocking=True).step(0)
    assert handle is not None and handle.committed.done()


def test_the_last_step_is_saved_at_close_unless_it_was(manage: Manage, run: Path):
    manager = manage(save=[sidesave.LastStep(), sidesave.EverySteps(2)])
    for step in range(4):
        manager.step(step)
    manager.close()
    assert steps(run) == [2, 3]
    manager = manage(save=[sidesave.LastStep()])
    assert manager.restore() == 4
    manager.close()
    assert steps(run) == [2, 3], "nothing was trained, so nothing is saved"


def test_the_last_step_is_saved_even_if_its_metrics_are_wrong_and_the_save_before_has_failed(
    orders: Orders, manage: Manage, run: Path, caplog: pytest.LogCaptureFixture
):
    manager = manage(
        save=[sidesave.LastStep()],
        keep=[KeepBest(1, metric="loss")],
        failures=sidesave.FailureOptions(retries=0),
    )
    orders.give("EIO")
    handle = manager.save(0)
    concurrent.futures.wait([handle.committed], DEADLINE_S)
    assert handle.committed.peek() is not None
    manager.step(1, {"lost": 1})
    manager.close()
    assert steps(run) == [1]
    assert "needs the metric loss" in caplog.text


def test_the_first_step_of_each_start_is_saved_and_of_each_restore(manage: Manage, run: Path):
    manager = manage(save=[sidesave.FirstStep()])
    assert [manager.step(step) is not None for step in range(3)] == [True, False, False]
    manager = manage(save=[sidesave.FirstStep()])
    assert manager.restore() == 1
    assert [manager.step(step) is not None for step in (1, 2)] == [True, False]
    manager.wait()
    assert manager.restore(0) == 1
    assert [manager.step(step) is not None for step in (1, 2)] == [True, False]
    manager.close()
    assert steps(run) == [0, 1]


def test_a_request_is_answered_at_the_next_step_once(manage: Manage, run: Path):
    manager = manage()
    thread = threading.Thread(target=manager.request_save)
    thread.start()
    thread.join()
    assert [manager.step(step) is not None for step in range(3)] == [True, False, False]
    manager.request_save()
    manager.close()
    assert steps(run) == [0, 2], (
        "of a request that no step has come for, the last step is saved at the end"
    )


def test_a_file_asks_for_a_save_and_goes_away(manage: Manage, run: Path):
    manager = manage(save=[sidesave.OnRequest()])
    asked = Path(save_requests.request_save(run))
    wait_until(lambda: not asked.exists())
    wait_until(lambda: manager._schedule.requested)
    assert [manager.step(step) is not None for step in range(2)] == [True, False]
    with pytest.raises(CheckpointNotFoundError, match="no run directory"):
        save_requests.request_save(run / "elsewhere")


def test_a_loop_that_is_asked_to_stop_is_told_when_its_step_is_saved(manage: Manage, run: Path):
    manager = manage(save=[sidesave.OnRequest()])
    manager.request_save()
    assert manager.step(0) is not None and not manager.stopping
    asked = Path(save_requests.request_save(run, stop=True))
    wait_until(lambda: manager._schedule.requested)
    assert not asked.exists() and not manager.stopping
    assert manager.step(1) is not None and manager.stopping
    manager.close()
    assert steps(run) == [0, 1]


@pytest.mark.parametrize(
    "trouble", ["all slots are busy", "the save before has failed", "its metrics are wrong"]
)
def test_the_step_that_a_loop_stops_with_is_saved_whatever_stands_in_the_way(
    manage: Manage, run: Path, orders: Orders, trouble: str
):
    manager = manage(
        save=[],
        keep=[KeepBest(1, metric="loss")],
        staging=sidesave.StagingOptions(on_busy="skip", slots=1),
    )
    if trouble == "all slots are busy":
        orders.give("hold")
        manager.save(0, {"loss": 1})
        orders.obeyed()
        release_when_waited_for(manager.checkpointer, orders)
    elif trouble == "the save before has failed":
        orders.give("EROFS")
        concurrent.futures.wait([manager.save(0, {"loss": 1}).committed], DEADLINE_S)
    manager.request_stop()
    handle = manager.step(1, {"lost": 1} if trouble == "its metrics are wrong" else {"loss": 2})
    assert manager.stopping and handle is not None and not handle.skipped
    assert handle.committed.result(DEADLINE_S).step == 1
    assert 1 in steps(run)


def test_a_request_to_stop_is_neither_lost_nor_outlives_a_restore(manage: Manage):
    class Asking(sidesave.SavePolicy):
        def due(self, context: sidesave.PolicyContext) -> bool:
            if context.step == 1:
                manager.request_stop()  # as a signal handler may at this moment
            return context.event == "step"

    manager = manage(save=[Asking()])
    told: list[bool] = []
    for step in range(4):
        manager.step(step)
        told.append(manager.stopping)
    assert told == [False, True, True, True]
    assert manager.restore(0) == 1 and not manager.stopping
    manager.request_save()
    manager.step(5)
    assert not manager.stopping


def test_a_step_is_never_saved_with_the_metrics_of_another(manage: Manage):
    class Broken(sidesave.SavePolicy):
        def due(self, context: sidesave.PolicyContext) -> bool:
            return context.event == "step" and 1 // (1 - context.step) < 0

    manager = manage(save=[Broken(), sidesave.OnException()])

    def train() -> None:
        with manager:
            for step in range(2):
                manager.step(step, {"loss": step})

    with pytest.raises(ZeroDivisionError):
        train()
    [info] = manager.checkpoints()
    assert info.step == 1 and info.metadata["metrics"] == {"loss": 1.0}


def test_asking_for_a_save_takes_no_torch():
    code = "import sys, sidesave.client.training.save_policies; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_a_seed_is_saved_before_training_and_step_0_takes_its_place(manage: Manage, run: Path):
    state = {"x": "seed"}
    manager = manage(state, save=[sidesave.BeforeTraining(), sidesave.AtSteps([0])])
    assert manager.restore() == 0
    manager.wait()
    assert steps(run) == [0]
    state["x"] = "lost"
    manager = manage(state, save=[sidesave.BeforeTraining(), sidesave.AtSteps([0])])
    assert (manager.restore(), state["x"]) == (0, "seed")
    state["x"] = "trained"
    for step in range(3):
        manager.step(step)
    manager = manage(state)
    assert (manager.restore(), state["x"], steps(run)) == (1, "trained", [0])


class AtEvents(sidesave.SavePolicy):
    """A user's policy, due at each event but steps."""

    def __init__(self, *, local: bool) -> None:
        self.local = local
        self.events: list[str] = []

    @property
    def is_local(self) -> bool:
        return self.local

    def due(self, context: sidesave.PolicyContext) -> bool:
        self.events.append(context.event)
        return context.event != "step"


@pytest.mark.parametrize("local", [False, True])
def test_a_policy_of_the_users_is_asked_at_each_event(manage: Manage, run: Path, local: bool):
    policy = AtEvents(local=local)
    manager = manage({"x": 1}, save=[policy])
    manager.restore()
    manager.wait()
    assert steps(run) == ([] if local else [0])
    manager.step(1)
    manager.close()
    assert steps(run) == ([1] if local else [0, 1])
    assert policy.events == ["restore"] * (not local) + ["step", "close"]


def test_an_exception_saves_the_last_finished_step(manage: Manage, run: Path):
    def train() -> None:
        with manage(save=[sidesave.OnException(), sidesave.LastStep()]) as manager:
            for step in range(5):
                manager.step(step, {"loss": 1 / (3 - step)})

    with pytest.raises(ZeroDivisionError):
        train()
    [info] = catalog_of(str(run)).all()
    assert (info.step, info.metadata["exception"]) == (2, "ZeroDivisionError")


@pytest.mark.parametrize(("error", "saved"), [(KeyboardInterrupt, [1]), (SystemExit, [])])
def test_only_what_ends_training_badly_counts_as_an_exception(
    manage: Manage, run: Path, error: type[BaseException], saved: list[int]
):
    def train() -> None:
        with manage(save=[sidesave.OnException(), sidesave.LastStep()]) as manager:
            manager.step(1)
            raise error

    with pytest.raises(error):
        train()
    assert steps(run) == saved


def test_an_exception_without_the_policy_saves_nothing(manage: Manage, run: Path):
    def train() -> None:
        with manage(save=[sidesave.LastStep()]) as manager:
            manager.step(0)
            manager.step(1 // 0)

    with pytest.raises(ZeroDivisionError):
        train()
    assert steps(run) == []


# What is refused ----------------------------------------------------------------------------------


def test_a_step_that_does_not_grow_is_refused(manage: Manage):
    manager = manage(save=[sidesave.EverySteps(2)])
    manager.step(4)
    for step in (4, 3, -1, True, 5.0):
        with pytest.raises(InvalidArgumentError, match="step"):
            manager.step(step)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidArgumentError, match="call restore"):
        manager.save(3)
    manager.step(5)
    manager.wait()
    manager = manage()
    assert manager.restore() == 5
    with pytest.raises(InvalidArgumentError, match=r"step 4 does not come after step 4: .*restore"):
        manager.step(4)
    manager.step(5)


def test_an_unknown_metric_is_refused_and_nan_is_never_the_best(manage: Manage, run: Path):
    manager = manage(
        save=[sidesave.EverySteps(1)], keep=[KeepBest(1, metric="loss"), KeepLatest(1)]
    )
    with pytest.raises(InvalidArgumentError, match=r"needs the metric loss.* given lost, accuracy"):
        manager.step(0, {"lost": 1.0, "accuracy": 0.5})
    with pytest.raises(InvalidArgumentError, match="'loss' must be one number, not str"):
        manager.step(1, {"loss": "low"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        InvalidArgumentError, match="'loss' must be one number, leave out what is not known"
    ):
        manager.save(1, {"loss": None})  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        InvalidArgumentError, match=r"metrics must be a dict of numbers by name, not 0\.5"
    ):
        manager.save(1, 0.5)  # pyright: ignore[reportArgumentType]
    values = [torch.tensor(3.0), 2, float("nan"), float("-inf"), float("inf"), 5]
    for step, value in enumerate(values, start=2):
        handle = manager.step(step, {"loss": value})
        assert handle is not None
        handle.committed.result()
    manager.step(8)
    manager.close()
    found = {info.step: info.metadata["metrics"] for info in catalog_of(str(run)).all()}
    assert found == {5: {"loss": "-inf"}, 8: {}}


def test_options_that_are_passed_on_are_all_those_there_are():
    own = {"self", "directory"}
    known = inspect.signature(sidesave.Checkpointer.__init__).parameters.keys() - own
    assert CheckpointerOptions.__annotations__.keys() == known
    assert {*Options.__slots__} == known - {
        "distributed",
        "process_group",
        "node_local",
        "storage_options",
    }
    own = {"path", "target", "storage_options", "encryption"}  # a manager's run has its own
    assert (
        ExportOptions.__annotations__.keys()
        == inspect.signature(sidesave.export).parameters.keys() - own
    )
    own = {"self", "step", "into", "map_location", "fallback"}
    assert (
        LoadOptions.__annotations__.keys()
        == inspect.signature(sidesave.Checkpointer.load).parameters.keys() - own
    )


def test_names_are_registered_late_and_once(manage: Manage, run: Path):
    state = {"x": 1}
    manager = manage(state, random_state=True)
    manager.save(0)
    manager.register("late", torch.arange(3))
    for name in ("late", "x", "random_state"):
        with pytest.raises(InvalidArgumentError, match=f"'{name}' already"):
            manager.register(name, 5)
    manager.save(1, blocking=True)
    assert sidesave.load(run / "step-00000001", exclude="random_state")["late"].tolist() == [
        0,
        1,
        2,
    ]
    with pytest.raises(InvalidArgumentError, match="random_state"):
        manage({"random_state": 1}, random_state=True)
    with pytest.raises(InvalidArgumentError, match="must be a dict"):
        manage([1])  # pyright: ignore[reportArgumentType]


def test_a_closed_manager_saves_no_more(manage: Manage):
    manager = manage()
    manager.close()
    manager.close()
    with pytest.raises(ClosedError):
        manager.save(1)


# Resuming -----------------------------------------------------------------------------------------


def test_a_checkpoint_that_does_not_verify_is_passed_over_and_logged(
    manage: Manage, run: Path, caplog: pytest.LogCaptureFixture
):
    state = {"x": 0}
    manager = manage(state, save=[sidesave.EverySteps(1)])
    for step in range(3):
        state["x"] = step
        manager.step(step)
    manager.close()
    damage(run, 2)
    with caplog.at_level(logging.WARNING):
        manager = manage(state)
        assert (manager.restore(), state["x"]) == (2, 1)
    assert "step 2 does not verify" in caplog.text
    with pytest.raises(IntegrityError):
        manager.restore(fallback=False)
    assert manager.step(2) is None


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(manage: Manage, run: Path):
    manager = manage(save=[sidesave.EverySteps(1)])
    manager.step(0)
    manager.close()
    (run / "step-00000000" / "manifest.json").write_text("{}")
    with pytest.raises(IntegrityError):
        manage().restore()


def test_what_is_not_there_or_does_not_fit_is_an_error(manage: Manage):
    state: dict[str, Any] = {"x": torch.zeros(2)}
    manager = manage(state)
    manager.save(7, blocking=True)
    with pytest.raises(CheckpointNotFoundError, match="no step 3"):
        manager.restore(3)
    state["x"] = torch.zeros(3)
    with pytest.raises(StateMismatchError):
        manager.restore()
    state["x"], state["y"] = torch.ones(2), 5
    with pytest.raises(StateMismatchError, match="y"):
        manager.restore()
    assert manager.restore(strict=False) == 8
    assert (state["x"].tolist(), state["y"]) == ([0, 0], 5)


def test_going_back_counts_from_there_and_replaces_what_was_given_up(manage: Manage, run: Path):
    state = {"x": 0}
    manager = manage(state, save=[sidesave.EverySteps(1)])
    for step in range(4):
        state["x"] = step
        manager.step(step)
    manager.wait()
    assert manager.restore(1) == 2
    for step in (2, 3):
        state["x"] = 10 + step
        manager.step(step)
    manager.wait()
    assert steps(run) == [0, 1, 2, 3]
    manager = manage(state)
    assert (manager.restore(), state["x"]) == (4, 13)


def test_all_random_numbers_go_on_as_they_would_have(manage: Manage):
    numpy = pytest.importorskip("numpy")

    def draw() -> list[float]:
        drawn = [
            random.random(),
            random.gauss(0, 1),
            float(torch.rand(())),
            float(numpy.random.rand()),
        ]
        return [*drawn, float(numpy.random.randn())]

    draw()
    manager = manage({}, random_state=True)
    manager.save(1, blocking=True)
    expected = draw()
    assert draw() != expected
    assert manager.restore() == 2
    assert draw() == expected


def test_a_restore_is_told_in_the_log(manage: Manage, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "sidesave")
    manage({"x": torch.zeros(1000)}).save(3)
    assert manage({"x": torch.zeros(1000)}).restore() == 4
    [told] = [record for record in caplog.records if record.msg.startswith("loaded step")]
    assert isinstance(told.args, tuple)
    step, nbytes, _ = told.args
    assert step == 3 and isinstance(nbytes, int) and nbytes >= 4000


def test_a_rank_that_is_new_does_not_draw_the_numbers_of_rank_0(caplog: pytest.LogCaptureFixture):
    saved = RandomState(0).state_dict()
    before = random.getstate()
    for rank, expected in ((0, before), (3, None)):
        torch.rand(())
        random.random()
        kept = random.getstate()
        restored = RandomState(rank)
        restored.load_state_dict(saved)
        restored.apply()
        assert random.getstate() == (expected or kept)
    assert "rank 3 is new" in caplog.text


@pytest.mark.gpu
def test_the_random_numbers_of_every_device_go_on_as_they_would_have(manage: Manage):
    def draw() -> list[float]:
        return [
            float(torch.rand((), device=f"cuda:{device}"))
            for device in range(torch.cuda.device_count())
        ]

    draw()
    manager = manage({}, random_state=True)
    manager.save(1, blocking=True)
    expected = draw()
    draw()
    assert manager.restore() == 2
    assert draw() == expected


def test_a_new_run_begins_with_parts_of_others_and_resumes_its_own(manage: Manage, tmp_path: Path):
    def model(value: float) -> torch.nn.Sequential:
        made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        for parameter in made.parameters():
            torch.nn.init.constant_(parameter, value)
        return made

    for name, value in (("backbone", 1.0), ("head", 2.0)):
        save(tmp_path / name, {"net": model(value), "epoch": 3}, 7)
    state: dict[str, Any] = {"model": model(0.0), "optimizer": {"lr": 0.5}, "epoch": 0}
    bank = [
        sidesave.Source(tmp_path / "backbone", include="net.0.*", rename={"net": "model"}),
        sidesave.Source(tmp_path / "head", include="net.1.*", rename={"net": "model"}),
    ]
    manager = manage(state, save=[sidesave.EverySteps(1)])
    assert manager.restore(sources=bank) == 0
    assert {name: tensor.mean().item() for name, tensor in state["model"].state_dict().items()} == {
        "0.weight": 1.0,
        "0.bias": 1.0,
        "1.weight": 2.0,
        "1.bias": 2.0,
    }
    assert (state["optimizer"], state["epoch"]) == ({"lr": 0.5}, 0), (
        "of what no source has everything stays"
    )
    state["epoch"] = 1
    manager.step(0)
    state = {"model": model(5.0), "optimizer": {"lr": 0.1}, "epoch": 9}
    assert manage(state).restore(sources=bank) == 1
    assert state["epoch"] == 1 and state["model"][1].weight.mean().item() == 2.0


def test_sources_that_have_a_part_of_an_item_only_are_refused_and_nothing_is_loaded(
    manage: Manage, tmp_path: Path
):
    save(tmp_path / "other", {"model": {"a": torch.ones(2)}})
    state = {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}}
    manager = manage(state)
    source = sidesave.Source(tmp_path / "other")
    with pytest.raises(StateMismatchError, match=r"model\.b"):
        manager.restore(sources=[source])
    assert not state["model"]["a"].any()
    assert manager.restore(sources=[source], strict=False) == 0
    assert state["model"]["a"].all() and not state["model"]["b"].any()
    with pytest.raises(CheckpointNotFoundError, match="nothing"):
        manager.restore(sources=[sidesave.Source(tmp_path / "nothing")])


def test_renamed_items_of_the_run_itself_are_restored(manage: Manage):
    manage({"net": {"w": torch.ones(3)}, "x": 1}).save(4, blocking=True)
    state: dict[str, Any] = {"model": {"w": torch.zeros(3)}, "x": 0}
    assert manage(state).restore(rename={"net": "model"}) == 5
    assert state["model"]["w"].all() and state["x"] == 1


def test_a_manager_tells_what_its_saves_have_cost(manage: Manage, caplog: pytest.LogCaptureFixture):
    records: list[sidesave.reporting.SaveRecord] = []
    counts: list[int] = []

    def observe(record: sidesave.reporting.SaveRecord) -> None:
        records.append(record)
        counts.append(manager.stats().counts["committed"])  # which includes this one

    with caplog.at_level("INFO", "sidesave.client.reporting.stats"):
        manager = manage(
            {"x": torch.ones(1000)},
            observers=[observe],
            save=[sidesave.EverySteps(2), sidesave.FirstStep()],
        )
        for step in range(4):
            manager.step(step)
            manager.wait()
        manager.close()
    assert [(record.step, record.outcome) for record in records] == [
        (step, outcome) for step in (0, 2) for outcome in ("saving", "committed")
    ]
    assert counts == [0, 1, 1, 2]
    assert manager.stats().counts["committed"] == 2
    assert sum("committed" in record.message for record in caplog.records) == 2


def test_hooks_run_before_and_after_staging_and_after_the_commit(
    manage: Manage, run: Path, orders: Orders
):
    order: list[str] = []

    class Average:
        """Is brought up to date only where it is saved."""

        def state_dict(self) -> dict[str, Any]:
            order.append("before staging")
            return {"mean": torch.ones(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def observe(record: sidesave.reporting.SaveRecord) -> None:
        order.append(f"step {record.step} {record.outcome}")

    manager = manage({"average": Average()}, observers=[observe], save=1)
    order.clear()  # the manager has looked whether it can be saved
    for step in range(2):
        orders.give("hold")
        handle = manager.step(step)
        assert handle is not None
        handle.staged.add_done_callback(lambda future: order.append("staged"))
        wait_until(lambda: order[-1] == "staged")
        orders.obeyed()
        orders.release()
        manager.wait()  # until all who are told of the commit have been
    manager.close()
    assert order == [
        each
        for step in (0, 1)
        for each in ("before staging", f"step {step} saving", "staged", f"step {step} committed")
    ]


# What is kept -------------------------------------------------------------------------------------


def test_only_what_a_policy_wants_is_kept_and_the_newest(manage: Manage, run: Path):
    manager = manage(
        save=[sidesave.EverySteps(1)],
        keep=[
            KeepLatest(2),
            KeepEverySteps(5),
            KeepBest(1, metric="loss"),
            KeepSteps([3]),
        ],
    )
    for step in range(10):
        manager.step(step, {"loss": abs(step - 6)})
    manager.close()
    assert sorted(steps(run)) == [0, 3, 5, 6, 8, 9]
    for info in catalog_of(str(run)).all():
        assert sidesave.verify(info.path).ok
        assert info.metadata == {
            "metrics": {"loss": abs(info.step - 6)},
            "ephemeral": False,
            "user": {},
        }


def test_a_restart_knows_the_metrics_of_earlier_sessions_and_obeys_its_own_keep_list(
    manage: Manage, run: Path
):
    manager = manage(save=[sidesave.EverySteps(1)])
    for step in range(6):
        manager.step(step, {"loss": [4, 0.5, 3, 1, 2, 5][step]})
    manager = manage(save=[sidesave.EverySteps(1)], keep=[KeepBest(2, metric="loss")])
    assert manager.restore() == 6
    assert sorted(steps(run)) == [0, 1, 2, 3, 4, 5], (
        "nothing goes before something newer is committed"
    )
    manager.step(6, {"loss": 0.7})
    manager.step(7, {"loss": 9})
    manager.close()
    assert sorted(steps(run)) == [1, 6, 7]


def test_a_step_that_is_saved_anew_is_not_deleted_in_the_place_of_the_one_given_up(
    manage: Manage, run: Path
):
    state = {"x": ""}
    manager = manage(state, save=[sidesave.EverySteps(1)], keep=[KeepLatest(2)])
    last = -1
    for time_line in range(12):
        for step in range(last + 1, last + 4):
            state["x"] = f"{time_line} {step}"
            manager.step(step)
        manager.wait()
        last = steps(run)[-2]
        assert manager.restore(last) == last + 1
        assert state["x"] == f"{time_line} {last}"
    manager.close()
    assert sorted(steps(run)) == [last, last + 1]


def test_a_restore_begins_when_what_was_committed_before_is_looked_at(
    manage: Manage, run: Path, monkeypatch: pytest.MonkeyPatch
):
    manager = manage(save=[sidesave.EverySteps(1)], keep=[KeepLatest(1)])
    looked: list[list[int]] = []
    look, load = retention.Retention._run, sidesave.Checkpointer.load

    def look_late(self: retention.Retention) -> None:
        time.sleep(0.2)
        look(self)
        looked.append(steps(run))

    def load_then(self: sidesave.Checkpointer, *args: Any, **options: Any) -> Any:
        assert looked
        return load(self, *args, **options)

    monkeypatch.setattr(retention.Retention, "_run", look_late)
    monkeypatch.setattr(sidesave.Checkpointer, "load", load_then)
    manager.save(0).committed.result(DEADLINE_S)
    assert manager.restore() == 1
    assert looked == [[0]]


def test_pinned_checkpoints_stay_until_they_are_unpinned(manage: Manage, run: Path):
    manager = manage(save=[sidesave.EverySteps(1)], keep=[KeepLatest(1)])
    manager.pin(1)
    for step in range(4):
        manager.step(step)
    manager = manage(save=[sidesave.EverySteps(1)], keep=[KeepLatest(1)])
    assert manager.pinned == {1}
    assert manager.restore() == 4
    manager.step(4)
    manager.wait()
    wait_until(lambda: steps(run) == [1, 4])
    manager.unpin(1)
    manager.unpin(77)
    manager.step(5)
    manager.close()
    assert steps(run) == [5]


def test_a_step_pinned_while_deletions_are_decided_on_stays(
    manage: Manage, run: Path, monkeypatch: pytest.MonkeyPatch
):
    manager = manage(keep=[KeepLatest(1)])
    manager.save(0, blocking=True)
    have_read, go_on = threading.Event(), threading.Event()
    read = retention.Retention._read_pins

    def read_early(self: retention.Retention, view: Any) -> frozenset[int]:
        pinned = read(self, view)
        if len(view.here) == 2:
            have_read.set()
            assert go_on.wait(DEADLINE_S)
        return pinned

    monkeypatch.setattr(retention.Retention, "_read_pins", read_early)
    manager.save(1, blocking=True)
    assert have_read.wait(DEADLINE_S)
    manager.pin(0)
    go_on.set()
    manager.close()
    assert steps(run) == [0, 1]


def test_a_look_does_not_forget_that_steps_are_left_to_delete(
    manage: Manage, monkeypatch: pytest.MonkeyPatch
):
    first = manage()
    for step in range(4):
        first.save(step, blocking=True)
    first.close()
    left: list[bool] = []
    read = retention.Retention._read_pins

    def note(self: retention.Retention, view: Any) -> frozenset[int]:
        left.append(self._has_more)
        return read(self, view)

    monkeypatch.setattr(retention, "_BATCH", 1)
    monkeypatch.setattr(retention.Retention, "_read_pins", note)
    manager = manage(keep=[KeepLatest(1)])
    manager.save(4, blocking=True)
    manager.close()
    assert left[:4] == [False, True, True, True], (
        "a load that begins meanwhile would take the steps for kept"
    )


def test_a_step_that_is_gone_is_not_pinned(manage: Manage, run: Path):
    manager = manage()
    for step in (0, 1, 3):
        manager.save(step, blocking=True)
    manager.checkpointer.delete(1).result(DEADLINE_S)
    for gone in (1, 2):
        with pytest.raises(CheckpointNotFoundError, match=f"no step {gone}"):
            manager.pin(gone)
    assert manager.pinned == set()
    manager.pin(4)
    assert manager.pinned == {4}, "it may be saved yet"


def test_a_pin_of_before_stays_when_the_step_is_not_found(manage: Manage, run: Path):
    manager = manage()
    manager.save(0, blocking=True)
    manager.pin(0)
    (run / "step-00000000").rename(run / "away")
    manager.save(1, blocking=True)
    with pytest.raises(CheckpointNotFoundError, match="no step 0"):
        manager.pin(0)
    assert manager.pinned == {0}


@pytest.mark.parametrize(
    "damaged",
    [
        "[1, ",
        "[" * 100_000,
        "[true]",
        "[1.0]",
        sealed_json.seal({"steps": [0]}).replace(b"0]", b"8]").decode(),
    ],
    ids=["torn", "deep", "bool", "float", "bit"],
)
def test_nothing_is_deleted_while_it_is_not_known_what_is_pinned(
    manage: Manage, run: Path, caplog: pytest.LogCaptureFixture, damaged: str
):
    manager = manage(save=[sidesave.EverySteps(1)], keep=[KeepLatest(1)])
    (run / PINS.name).write_text(damaged)
    for step in range(3):
        manager.step(step)
    manager.close()
    assert steps(run) == [0, 1, 2]
    assert "the pinned steps are unknown" in caplog.text
    with pytest.raises(IntegrityError, match="remove it, and pin them again"):
        manage().pin(2)


def test_an_ephemeral_checkpoint_goes_with_the_next_one(manage: Manage, run: Path):
    persistent = [sidesave.AtSteps([0]), sidesave.EverySteps(4)]
    manager = manage(
        save=[*persistent, sidesave.Ephemeral(sidesave.EverySteps(1), cool_down_steps=2)]
    )
    seen = []
    for step in range(8):
        handle = manager.step(step)
        if handle is not None:
            handle.committed.result()
            seen.append(step)
    assert seen == [0, 2, 3, 4, 6, 7]
    manager.close()
    assert steps(run) == [0, 4, 7]
    assert catalog_of(str(run)).all()[-1].metadata["ephemeral"] is True


def test_a_deletion_that_fails_is_logged_and_tried_again(
    orders: Orders, manage: Manage, run: Path, caplog: pytest.LogCaptureFixture
):
    manager = manage(save=[sidesave.EverySteps(1)], keep=[KeepLatest(1)])
    manager.pin(0)
    for step in range(2):
        manager.step(step)
    assert manager._background.retention is not None
    with manager._background.retention.reading(None):
        pass  # it has looked at both, and does not come to the first one twice from here on
    orders.give("EIO", starting_at="os.rename")
    manager.unpin(0)
    manager._background.retention._events.put(True)
    orders.obeyed()
    wait_until(lambda: "cannot delete step 0" in caplog.text)
    assert steps(run) == [0, 1]
    manager.step(2)
    manager.close()
    assert steps(run) == [2]


def test_advice_needs_a_measure_and_gives_an_interval(manage: Manage):
    manager = manage()
    with pytest.raises(InvalidArgumentError, match="no save"):
        manager.advise(3600)
    for bad in (0, -1, math.inf, "1"):
        with pytest.raises(InvalidArgumentError, match="mtbf_s"):
            manager.advise(bad)  # pyright: ignore[reportArgumentType]
    manager.save(0, blocking=True)
    advice = manager.advise(3600)
    assert advice.stall_s > 0 and advice.commit_s > 0
    assert advice.interval_s >= advice.commit_s
    assert 0 < advice.lost < 1
