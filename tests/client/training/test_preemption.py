"""A training script that is signalled and killed at any moment: what is saved, how it ends, and
that it resumes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from manager_trainer import ManagedTrainer
from managers import Manage
from trainers import DEADLINE_S, SUPPORT, Orders, Traces, wait_until

import sidesave
from sidesave import OnSignal
from sidesave.client.runs import save_requests
from sidesave.client.runs.finding import catalog_of

Start = Callable[..., ManagedTrainer]
Ranks = Callable[..., list[ManagedTrainer]]
Resumes = Callable[..., None]
TERMINATED = 128 + signal.SIGTERM


@pytest.fixture
def start(traces: Traces, run: Path) -> Iterator[Start]:
    """Starts the training script."""
    with contextlib.ExitStack() as stack:
        yield lambda at=run, **options: stack.enter_context(ManagedTrainer(traces, at, **options))


@pytest.fixture
def begin(start: Start) -> Start:
    """Starts it, and waits until it has restored what there is."""

    def begin(**options: Any) -> ManagedTrainer:
        trainer = start(**options)
        trainer.expect("restored")
        return trainer

    return begin


@pytest.fixture
def start_ranks(start: Start, tmp_path: Path) -> Ranks:
    """Starts it as several ranks."""

    def start_ranks(size: int, **options: Any) -> list[ManagedTrainer]:
        meeting = str(tmp_path / f"group-{secrets.token_hex(8)}")
        return [start(rank=rank, size=size, meeting=meeting, **options) for rank in range(size)]

    return start_ranks


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What the script tells of each step when nobody disturbs it."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    with contextlib.closing(Traces()) as traces, ManagedTrainer(traces, run) as trainer:
        trainer.expect("restored")
        return dict(trainer.train(12))


def steps(run: Path) -> list[int]:
    """The committed steps, each of which has to verify."""
    found = catalog_of(str(run)).all()
    for info in found:
        assert sidesave.verify(info.path).ok
    return sorted(info.step for info in found)


@pytest.fixture
def resumes_after(start: Start, run: Path, undisturbed: dict[int, str]) -> Resumes:
    """Asserts that these steps are all there is, and that another trainer goes on after them, bit
    for bit.
    """

    def resumes_after(*saved: int) -> None:
        assert steps(run) == [*saved]
        trainer = start()
        first = saved[-1] + 1
        assert trainer.expect("restored") == [str(first)]
        assert trainer.train(3) == [(step, undisturbed[step]) for step in range(first, first + 3)]

    return resumes_after


def test_sigterm_during_a_step_saves_it_and_leaves(
    begin: Start, traces: Traces, resumes_after: Resumes
):
    trainer = begin(save="[OnSignal()]")
    trainer.train(3)
    trainer.signal(signal.SIGTERM)
    trainer.train_last()
    trainer.leaves(TERMINATED)
    traces.check()
    resumes_after(3)


def test_sigterm_twice_in_a_row_saves_as_well(begin: Start, traces: Traces, resumes_after: Resumes):
    trainer = begin(save="[OnSignal(signal.SIGTERM, signal.SIGINT)]")
    trainer.train(2)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        trainer.signal(number)
    trainer.train_last()
    assert trainer.end() in (128 + signal.SIGINT, TERMINATED)
    traces.check()
    resumes_after(2)


def test_sigterm_during_a_save_waits_for_both(
    orders: Orders, begin: Start, traces: Traces, resumes_after: Resumes
):
    trainer = begin(save="[OnSignal(), EverySteps(3, offset=1)]")
    orders.give("hold")
    trainer.train(2)
    orders.obeyed()
    trainer.signal(signal.SIGTERM)
    trainer.train_last()
    orders.release()
    trainer.leaves(TERMINATED)
    traces.check()
    resumes_after(1, 2)


@pytest.mark.parametrize("how", ["a second signal", "the deadline"])
def test_the_wait_for_the_commit_ends_and_the_daemon_goes_on(
    orders: Orders, begin: Start, run: Path, traces: Traces, how: str, resumes_after: Resumes
):
    trainer = begin(save="[OnSignal(deadline_s=0.5)]" if how == "the deadline" else "[OnSignal()]")
    orders.give("hold")
    trainer.train(1)
    trainer.signal(signal.SIGTERM)
    trainer.train_last()
    orders.obeyed()
    if how == "a second signal":
        trainer.signal(signal.SIGTERM)
    trainer.leaves(TERMINATED)
    assert steps(run) == []
    orders.release()
    traces.check()
    resumes_after(1)


class _Impatient:
    """Somebody sends SIGTERM once more while this is saved."""

    def state_dict(self) -> dict[str, int]:
        signal.raise_signal(signal.SIGTERM)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_a_second_signal_while_the_last_save_is_made_ends_the_wait_for_it(
    orders: Orders, manage: Manage, run: Path
):
    state: dict[str, Any] = {"x": 0}
    manager = manage(state, save=[OnSignal(deadline_s=DEADLINE_S)])
    orders.give("hold")
    state["y"] = _Impatient()
    began = time.monotonic()
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        manager.step(0)
    assert ended.value.code == TERMINATED
    assert time.monotonic() - began < DEADLINE_S
    assert steps(run) == []
    orders.release()


def test_sigterm_during_a_restore_leaves_without_a_save(
    begin: Start, start: Start, resumes_after: Resumes
):
    trainer = begin(save="[EverySteps(1)]", total=2)
    trainer.train(2)
    trainer.leaves(0)
    trainer = start(save="[OnSignal(), LastStep()]", gate="restore")
    trainer.expect("ready")
    trainer.go_on()
    trainer.expect("restoring")
    trainer.signal(signal.SIGTERM)
    trainer.go_on()
    trainer.leaves(TERMINATED)
    assert "restored 2" not in trainer.heard
    resumes_after(0, 1)


def test_sigusr1_saves_and_training_goes_on(begin: Start, resumes_after: Resumes):
    trainer = begin(save="[OnSignal(signal.SIGTERM, signal.SIGUSR1)]", total=4)
    trainer.train(1)
    trainer.signal(signal.SIGUSR1)
    trainer.train(1)
    trainer.hear("saved 1")
    trainer.train(2)
    trainer.leaves(0)
    resumes_after(1)


def test_sigterm_while_the_end_of_the_run_is_saved_leaves_that_to_the_daemon(
    orders: Orders, begin: Start, traces: Traces, resumes_after: Resumes
):
    trainer = begin(save="[OnSignal(deadline_s=0.5), LastStep()]", total=2)
    orders.give("hold")
    trainer.train(2)
    orders.obeyed()
    trainer.signal(signal.SIGTERM)
    trainer.leaves(TERMINATED)
    orders.release()
    traces.check()
    resumes_after(1)


def test_sigterm_saves_even_if_the_save_before_has_failed(
    orders: Orders, begin: Start, resumes_after: Resumes
):
    trainer = begin(
        save="[OnSignal(), EverySteps(3, offset=1)]", options={"failures": {"retries": 0}}
    )
    orders.give("EIO")
    trainer.train(2)
    trainer.hear("lost 1")
    trainer.signal(signal.SIGTERM)
    trainer.train_last()
    trainer.leaves(TERMINATED)
    resumes_after(2)


def test_sigterm_saves_even_if_all_slots_are_busy_and_saves_may_be_skipped(
    orders: Orders, begin: Start, resumes_after: Resumes
):
    trainer = begin(
        save="[OnSignal(), FirstStep()]", options={"staging": {"on_busy": "skip", "slots": 1}}
    )
    orders.give("hold")
    trainer.train(1)
    orders.obeyed()
    trainer.signal(signal.SIGTERM)
    trainer.train_last()
    orders.release()
    trainer.leaves(TERMINATED)
    resumes_after(0, 1)


def test_a_forked_child_of_a_trainer_still_ends_by_sigterm(run: Path):
    with sidesave.CheckpointManager(run, {"x": 1}, save=[sidesave.OnSignal()]):
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tell, b"1")
            with contextlib.suppress(BaseException):
                time.sleep(DEADLINE_S)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    os.close(ready)
    os.close(tell)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM


def test_handlers_are_put_back(run: Path):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    with sidesave.CheckpointManager(run, {"x": 1}, save=[sidesave.OnSignal(*before)]):
        assert all(signal.getsignal(number) is not was for number, was in before.items())
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_killed_trainer_resumes_with_another_keep_list(
    begin: Start, start: Start, run: Path, undisturbed: dict[int, str], resumes_after: Resumes
):
    trainer = begin(save="[EverySteps(1)]")
    trainer.train(5)
    trainer.hear("saved 4")
    trainer.kill()
    trainer = start(
        save="[EverySteps(2)]", keep='[KeepLatest(1), KeepBest(1, metric="loss")]', total=8
    )
    assert trainer.expect("restored") == ["5"]
    assert trainer.train(3) == [(step, undisturbed[step]) for step in range(5, 8)]
    trainer.leaves(0)
    losses = {info.step: info.metadata["metrics"]["loss"] for info in catalog_of(str(run)).all()}
    assert 6 in losses and len(losses) <= 2
    resumes_after(*steps(run))


# Several ranks ------------------------------------------------------------------------------------


def agreed(ranks: list[ManagedTrainer]) -> int:
    """The step that all ranks save next."""
    saved = [trainer.expect("saved") for trainer in ranks]
    assert saved == saved[:1] * len(ranks)
    return int(saved[0][0])


@pytest.mark.slow
def test_ranks_save_the_same_step_whichever_of_them_is_asked(
    start_ranks: Ranks, start: Start, run: Path
):
    save = "[OnSignal(signal.SIGUSR1, signal.SIGTERM), OnRequest()]"
    ranks = start_ranks(3, save=save, paced=False, total=10**6, rest_s=0.005, quiet=True)
    for trainer in ranks:
        trainer.expect("restored")
    ranks[1].signal(signal.SIGUSR1)
    first = agreed(ranks)
    save_requests.request_save(run)
    second = agreed(ranks)
    assert second > first
    ranks[2].signal(signal.SIGTERM)
    for trainer in ranks:
        trainer.leaves(TERMINATED)
    assert [step for step in steps(run) if step in (first, second)] == [first, second]
    assert len(steps(run)) == 3


@pytest.mark.parametrize("asked", ["by a file", "rank 1"])
def test_ranks_stop_at_the_same_step_whichever_of_them_is_asked(
    start_ranks: Ranks, run: Path, asked: str
):
    ranks = start_ranks(2, save="[OnRequest()]", paced=False, total=10**6, rest_s=0.005, quiet=True)
    for trainer in ranks:
        trainer.expect("restored")
    if asked == "rank 1":
        ranks[1].signal(signal.SIGHUP)
    else:
        save_requests.request_save(run, stop=True)
    [[first], [second]] = [trainer.expect("stops") for trainer in ranks]
    for trainer in ranks:
        trainer.leaves(0)
    assert first == second and steps(run) == [int(first)]


@pytest.mark.slow
def test_ranks_agree_when_the_time_has_come(start_ranks: Ranks, run: Path):
    save = "[EverySeconds(1.5), Ephemeral(EverySeconds(0.5)), OnSignal()]"
    ranks = start_ranks(
        2, save=save, keep="[KeepLatest(1)]", paced=False, total=10**6, rest_s=0.01, quiet=True
    )
    for _ in range(3):
        agreed(ranks)
    for trainer in ranks:
        trainer.signal(signal.SIGTERM)
    for trainer in ranks:
        trainer.leaves(TERMINATED)
    assert len(steps(run)) == 1, "rank 0 has the others deleted"


def test_ranks_that_are_apart_neither_skip_the_step_nor_wait_for_ever(
    start_ranks: Ranks, run: Path
):
    fast, slow = start_ranks(2, save="[OnSignal(signal.SIGUSR1)]", total=400, paced=True)
    for trainer in (fast, slow):
        trainer.expect("restored")
    for _ in range(300):
        fast.go_on()
    while int(fast.expect("step")[0]) < 200:
        pass
    slow.train(1)
    slow.signal(signal.SIGUSR1)
    for _ in range(399):
        slow.go_on()
    for _ in range(100):
        fast.go_on()
    for trainer in (fast, slow):
        trainer.leaves(0)
    [step] = steps(run)  # of both ranks, or it would not have been committed
    assert step > 200


def test_a_rank_that_dies_keeps_nobody(start_ranks: Ranks, run: Path):
    save = "[FirstStep(), OnSignal(deadline_s=5)]"
    ranks = start_ranks(3, save=save, paced=True, total=10**6)
    for trainer in ranks:
        trainer.expect("restored")
        trainer.train(2)
    for trainer in ranks:
        trainer.hear("saved 0")
    ranks[1].kill()
    for trainer in (ranks[0], ranks[2]):
        trainer.train(1)
        trainer.signal(signal.SIGTERM)
        trainer.go_on()
        for line in trainer.lines():  # it leaves once it knows that nobody agrees with it any more
            if line.startswith("passed"):
                trainer.go_on()
        trainer.leaves(TERMINATED)
    assert steps(run) == [0]


@pytest.mark.parametrize(
    ("saves", "told", "options"),
    [
        (["[OnRequest()]"] * 2, "init_process_group", {"group": False}),
        (["[OnException()]"] * 2, "OnException is for a single process", {}),
        (["[Ephemeral(EverySteps(2), cool_down_s=5)]"] * 2, "cool_down_steps", {}),
        (["[EverySteps(2)]", "[EverySteps(3)]"], "all ranks need the same", {}),
    ],
)
def test_policies_that_ranks_cannot_do_alike_are_refused_on_all_of_them(
    start: Start, run: Path, tmp_path: Path, saves: list[str], told: str, options: dict[str, Any]
):
    meeting = str(tmp_path / "group")
    ranks = [
        start(rank=rank, size=2, meeting=meeting, save=saves[rank], **options) for rank in range(2)
    ]
    for trainer in ranks:
        for _ in trainer.lines():
            pass
        assert trainer.end() == 1
        complaints = trainer.complaints()
        assert "InvalidArgumentError" in complaints and told in complaints
    assert steps(run) == []


def test_ranks_export_their_last_step_once_and_fail_together(
    start_ranks: Ranks, run: Path, tmp_path: Path
):
    for status in (0, 1):
        ranks = start_ranks(
            2, paced=False, total=1 + status, quiet=True, export=str(tmp_path / "weights")
        )
        if status == 0:
            assert [trainer.expect("exported") for trainer in ranks] == [["True"], ["False"]]
        for trainer in ranks:
            trainer.leaves(status)
            if status:
                assert "not empty" in trainer.complaints()
        assert steps(run) == [0, 1][: 1 + status]
        names = {path.name for path in (tmp_path / "weights").iterdir()}
        assert names == {"model.safetensors"}


@pytest.mark.parametrize("export", [False, True])
def test_a_rank_with_other_metrics_is_told_of_and_keeps_nobody_waiting(
    start: Start, run: Path, tmp_path: Path, export: bool
):
    about: dict[str, Any] = {
        "size": 2,
        "meeting": str(tmp_path / "group"),
        "keep": "[KeepBest(1, metric='loss')]",
    }
    about |= {"paced": False, "total": 1, "quiet": True}
    about |= {"export": str(tmp_path / "weights")} if export else {"save": "[EverySteps(1)]"}
    ranks = [
        start(rank=rank, metric=metric, **about) for rank, metric in enumerate(["loss", "lost"])
    ]
    for rank, trainer in enumerate(ranks):
        trainer.leaves(0 if export else 1)
        # An error on both ranks; or a warning on the one that cannot give the metric.
        assert ("KeepBest needs the metric loss" in trainer.complaints()) is (
            not export or rank == 1
        )
    assert steps(run) == [0] * export


def test_nodes_with_disks_of_their_own_delete_the_same_steps(start: Start, tmp_path: Path):
    runs = [tmp_path / "node-0", tmp_path / "node-1"]
    about: dict[str, Any] = {
        "size": 2,
        "save": "[EverySteps(1)]",
        "total": 3,
        "options": {"node_local": True},
    }
    meeting = str(tmp_path / "refused")
    refused = [
        start(at=run, rank=rank, meeting=meeting, keep="[KeepEveryMinutes(1)]", **about)
        for rank, run in enumerate(runs)
    ]
    for trainer in refused:
        trainer.leaves(1)
        assert "take KeepEverySteps" in trainer.complaints()
    meeting = str(tmp_path / "group")
    ranks = [
        start(at=run, rank=rank, meeting=meeting, keep="[KeepLatest(1), KeepSteps([0])]", **about)
        for rank, run in enumerate(runs)
    ]
    for trainer in ranks:
        trainer.expect("restored")
        trainer.train(3)
    for trainer in ranks:
        trainer.leaves(0)
    assert [steps(run) for run in runs] == [[0, 2]] * 2


@pytest.mark.slow
def test_torchrun_that_is_terminated_leaves_one_checkpoint_of_all_workers(
    start: Start, run: Path, traces: Traces, tmp_path: Path
):
    about = {
        "run": str(run),
        "save": "[OnSignal(deadline_s=20)]",
        "paced": False,
        "quiet": True,
        "size": 0,
    }
    about |= {"total": 10**6, "rest_s": 0.01}
    script = SUPPORT / "manager_trainer.py"
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
        json.dumps(about),
    ]
    environment = {
        **os.environ,
        "TMPDIR": traces.folder,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    said = (tmp_path / "said").open("wb+")
    with (
        said,
        subprocess.Popen(
            [sys.executable, *launch], stdout=said, stderr=said, env=environment
        ) as torchrun,
    ):
        try:
            wait_until(lambda: (tmp_path / "said").read_text().count("restored") == 2)
            torchrun.send_signal(signal.SIGTERM)
            torchrun.wait(DEADLINE_S)
        finally:
            torchrun.kill()
    traces.await_ends()
    [step] = steps(run)
    [info] = catalog_of(str(run)).all()
    assert {path.name for path in Path(info.path).glob("rank-*.json")} == {
        "rank-00000.json",
        "rank-00001.json",
    }
    resumed = start(total=step + 2)
    assert resumed.expect("restored") == [str(step + 1)]
