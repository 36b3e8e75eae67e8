"""Ranks that agree: what one of them cannot do none does, whatever has gone wrong, and they never
get out of step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from managed_ranks import ManagedRank
from node_trainers import NodeRank
from rank_trainers import Ranks, leftovers, same_tensors, stored
from trainers import Traces

import sidesave

Start = Callable[..., Ranks]


@pytest.fixture
def start(start: Start) -> Start:
    return functools.partial(start, kind=NodeRank)


def close(ranks: Ranks, traces: Traces, *runs: Path) -> None:
    """All ranks close, and leave nothing behind."""
    ranks.do("close")
    for run in runs:
        assert leftovers(run) == []
    traces.check()


def save(ranks: Ranks, *steps: int) -> None:
    """Save these steps, each of which knows its number."""
    for step in steps:
        ranks.do("put", "step", step)
        ranks.save(step)


def outcomes(ranks: Ranks, command: str, *arguments: object, **options: object) -> list[str]:
    return ranks.do("outcome", command, *arguments, **options)


# Agreements ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [True, False], ids=["process group", "no process group"])
def test_whatever_one_rank_raises_all_do_and_the_next_agreement_is_about_the_next_thing(
    start: Start, run: Path, traces: Traces, group: bool
):
    ranks = start(3, group=group)

    def agree(**errors: str) -> list[str]:
        for number, rank in enumerate(ranks):
            rank.tell("outcome", "agree", str(run), errors.get(f"rank{number}"))
        return [answer.get() for answer in ranks.answers()]

    assert agree() == ["done: None"] * 3
    for error in ("KeyboardInterrupt", "MemoryError", "SystemExit", "PermissionError"):
        told = agree(rank1=error)
        assert told[1] == f"{error}: on purpose"
        assert {told[0], told[2]} == {f"SidesaveError: rank 1 cannot jump: {error}: on purpose"}
        assert agree() == ["done: None"] * 3
    told = agree(rank1="ClosedError", rank2="UnsupportedValueError")
    assert told[1] == "ClosedError: on purpose"
    assert {told[0], told[2]} == {"ClosedError: rank 1 cannot jump: on purpose"}
    # What is to be got over by going on is no reason to go on while another rank cannot.
    told = agree(rank0="IntegrityError", rank2="StateMismatchError")
    assert told[2] == "StateMismatchError: on purpose"
    assert {told[0], told[1]} == {"StateMismatchError: rank 2 cannot jump: on purpose"}
    told = agree(rank0="IntegrityError", rank1="KeyboardInterrupt", rank2="IntegrityError")
    assert [each.partition(":")[0] for each in told] == [
        "SidesaveError",
        "KeyboardInterrupt",
        "SidesaveError",
    ]
    told = agree(rank0="IntegrityError", rank2="IntegrityError")
    assert told[0] == told[2] == "IntegrityError: on purpose" and "rank 0" in told[1]
    assert agree() == ["done: None"] * 3
    traces.check()


def test_rank_that_cannot_open_the_directory_is_named_by_all(
    start: Start, run: Path, traces: Traces
):
    ranks = start(2)
    ranks.do("build", "small")
    ranks[1].do("set", "sidesave.writer_daemon.storage.urls:open_for_writing", None)
    told = outcomes(ranks, "open", str(run))
    assert told[0].startswith("SidesaveError: rank 1 cannot write to the run directory: TypeError")
    assert told[1].startswith("TypeError")
    traces.check()


@pytest.mark.parametrize("differ", [False, True], ids=["alike", "differing"])
def test_rank_whose_mirror_is_missing_is_named_by_all_unless_they_differ(
    start: Start, run: Path, tmp_path: Path, traces: Traces, *, differ: bool
):
    ranks = start(2, kind=ManagedRank)
    ranks.do("build", "small")
    for rank, options in zip(ranks, ({"mirror": str(tmp_path / "mirror")}, {}), strict=True):
        save = "[EverySteps(2)]" if differ and options else "[EverySteps(1)]"
        rank.tell("outcome_of", "manage", str(run), save, mirror_keep="[KeepLatest(1)]", **options)
    told = [answer.get() for answer in ranks.answers()]
    for each in told:
        assert each.startswith("InvalidArgumentError") and (
            "EverySteps(n=2" in each if differ else "mirror=" in each
        )
    traces.check()


@pytest.mark.parametrize(
    ("rank", "method"),
    [(0, "retention:Retention.reading"), (1, "rng_state:RandomState.apply")],
    ids=["kept", "random"],
)
def test_rank_that_cannot_do_what_belongs_to_a_restore_is_named_by_all(
    start: Start, run: Path, traces: Traces, rank: int, method: str
):
    ranks = start(2, kind=ManagedRank)
    ranks.do("build", "small")
    ranks.do("manage", str(run), "[EverySteps(1)]", "[KeepLatest(1)]", random_state=True)
    ranks.do("step", 1)
    ranks.do("committed", 1)
    ranks[rank].do("spoil_method", f"sidesave.client.training.{method}")
    told = ranks.do("outcome_of", "restore")
    assert told[rank] == "RuntimeError: on purpose"
    assert f"rank {rank} cannot" in told[1 - rank]
    ranks.do("leave")
    traces.check()


# Loading ------------------------------------------------------------------------------------------


def test_rank_that_cannot_load_keeps_all_from_it_though_its_error_is_none_of_ours(
    start: Start, run: Path, traces: Traces
):
    ranks = start(2).begin("fragile", run)
    save(ranks, 1, 2)
    ranks.do("build", "fragile", seed=9)
    before = ranks.do("digests")
    for error in ("KeyboardInterrupt", "RuntimeError"):
        ranks[1].do("fail_at", "state_dict", error)
        told = outcomes(ranks, "load")
        assert told[0].startswith("SidesaveError: rank 1 cannot load step 2") and error in told[0]
        assert told[1] == f"{error}: on purpose"
        ranks[1].do("fail_at", "state_dict", None)
        assert ranks.do("digests") == before
    # Rank 0 finds the newest damaged, and would take the one before it, while rank 1 cannot take
    # any.
    damaged = next((run / "step-00000002").glob("model.rank-*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-9] + b"another  ")
    ranks[1].do("fail_at", "state_dict", "RuntimeError")
    told = outcomes(ranks, "load", fallback=True)
    assert [each.partition(":")[0] for each in told] == ["SidesaveError", "RuntimeError"]
    assert ranks.do("steps") == [[[1, 2], 2]] * 2
    ranks[1].do("fail_at", "state_dict", None)
    assert ranks.do("load", fallback=True) == [1, 1]
    close(ranks, traces, run)


def test_all_ranks_go_back_and_the_next_job_goes_on_from_there(
    start: Start, run: Path, traces: Traces
):
    for ranks in (start(2), start(3)):
        ranks.do("build", "fragile")
        ranks.open(run)
        if len(ranks) == 2:
            save(ranks, 1, 2, 3)
            assert ranks.do("load", 1) == [1, 1]
        assert ranks.do("steps") == [[[1, 2, 3], 1]] * len(ranks)
        assert ranks.do("load") == [1] * len(ranks)
        close(ranks, traces, run)


def test_rank_whose_object_does_not_take_its_state_is_named_by_all(
    start: Start, run: Path, traces: Traces
):
    ranks = start(2).begin("fragile", run)
    save(ranks, 1)
    ranks[1].do("fail_at", "load_state_dict", "RuntimeError")
    told = outcomes(ranks, "load")
    problem = "fragile: this Fragile raised RuntimeError when it was given its state: on purpose"
    assert told[0].startswith("StateMismatchError: rank 1 ") and problem in told[0]
    assert told[1].startswith(f"StateMismatchError: {problem}")
    ranks[1].do("fail_at", "load_state_dict", None)
    assert ranks.do("load") == [1, 1]
    close(ranks, traces, run)


def test_ranks_that_ask_for_different_checkpoints_are_told(start: Start, run: Path, traces: Traces):
    ranks = start(2).begin("small", run)
    save(ranks, 1, 2)
    for asked, word in (
        ([{"step": 1}, {"step": 2}], "step=2"),
        ([{}, {"step": 2}], "step=2"),
        ([{"fallback": True}, {}], "fallback=False"),
        ([{}, {"step": 2.5}], "step must be an int"),
        ([{}, {"step": "2"}], "step=a path"),
    ):
        for rank, options in zip(ranks, asked, strict=True):
            rank.tell("load", **options)
        for answer in ranks.answers():
            assert answer.error == "InvalidArgumentError" and word in answer.message, answer
    assert ranks.do("load", 1) == [1, 1]
    close(ranks, traces, run)


def test_rank_that_loads_while_another_does_something_else_is_told_and_so_is_the_other(
    start: Start, run: Path, traces: Traces
):
    ranks = start(2).begin("small", run)
    save(ranks, 1)
    for _ in range(2):
        ranks[0].tell("agree", str(run))
        ranks[1].tell("load")
        for answer in ranks.answers():
            assert (
                answer.error == "InvalidArgumentError" and "ranks are out of step" in answer.message
            ), answer
        assert ranks.do("load") == [1, 1]
    close(ranks, traces, run)


# Groups -------------------------------------------------------------------------------------------


def test_groups_of_ranks_save_and_load_beside_each_other(
    start: Start, tmp_path: Path, traces: Traces
):
    runs = [tmp_path / "run-0", tmp_path / "run-1"]
    saved: list[dict[str, str]] = []
    for seed in (0, 9):
        ranks = start(4)
        ranks.do("build", "pairs", seed=seed)
        ranks.do("open_in_groups", str(tmp_path / "run-{group}"), [0, 1], [2, 3])
        if saved:
            assert ranks.do("load") == [2] * 4
            assert ranks.do("digests") == saved
        else:
            save(ranks, 1, 2)
            saved = ranks.do("digests")
        close(ranks, traces, *runs)
    found = [stored(run / "step-00000002").tensors for run in runs]
    assert not torch.equal(found[0]["model.0.weight"], found[1]["model.0.weight"])


def test_one_of_several_replicas_saves_for_all_and_a_part_that_nobody_of_it_holds_is_refused(
    start: Start, tmp_path: Path, traces: Traces
):
    runs = [tmp_path / "run-0", tmp_path / "run-1"]
    ranks = start(4)
    ranks.do("build", "replicated_pairs")
    ranks.do("truth", str(tmp_path / "truth"))
    ranks.do("open_in_groups", str(tmp_path / "run-{group}"), [0, 1], [2, 3])
    save(ranks, 1)
    for run in runs:
        same_tensors(stored(run / "step-00000001").tensors, torch.load(tmp_path / "truth"))
    ranks.do("build", "over_nodes")
    for number, answer in enumerate(ranks.attempt("save", 2)):
        assert answer.error == "UnsupportedValueError"
        assert (
            "model.0.weight" in answer.message
            and str([2, 3] if number < 2 else [0, 1]) in answer.message
        )
    ranks.attempt("wait")
    close(ranks, traces)
    for run in runs:
        assert sidesave.verify(run / "step-00000001").ok


def test_rank_outside_of_the_group_is_told(start: Start, tmp_path: Path, traces: Traces):
    ranks = start(3)
    ranks.do("build", "small")
    told = ranks.attempt("open_in_groups", str(tmp_path / "run-{group}"), [0, 1])
    assert [answer.error for answer in told] == [None, None, "InvalidArgumentError"]
    assert "not part of process_group" in told[2].message
    for rank in (ranks[0], ranks[1]):
        rank.tell("close")
    assert [rank.answer().error for rank in (ranks[0], ranks[1])] == [None, None]
    traces.check()


# States that ranks see in different ways ----------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_state_dicts_that_torch_has_taken_apart_fit_another_number_of_ranks(
    start: Start, run: Path, traces: Traces, tmp_path: Path, flat: bool
):
    ranks = start(2)
    ranks.do("build_apart", flat=flat)
    ranks.open(run)
    save(ranks, 1)
    ranks.do("set_apart")
    ranks.do("truth", str(tmp_path / "saved"))
    close(ranks, traces, run)
    ranks = start(3)
    ranks.do("build_apart", 9, flat=flat)
    ranks.open(run)
    assert ranks.do("load") == [1] * 3
    ranks.do("set_apart")
    ranks.do("truth", str(tmp_path / "loaded"))
    same_tensors(torch.load(tmp_path / "loaded"), torch.load(tmp_path / "saved"))
    close(ranks, traces, run)


def test_tied_weights_are_tied_on_a_rank_that_holds_nothing_of_them(
    start: Start, run: Path, traces: Traces, tmp_path: Path
):
    ranks = start(4)
    ranks.do("build", "tied")
    ranks.do("truth", str(tmp_path / "truth"))
    ranks.open(run)
    save(ranks, 1)
    saved = ranks.do("digests")
    found = stored(run / "step-00000001").tensors
    truth = torch.load(tmp_path / "truth")
    truth.pop("model.1.weight")
    same_tensors(found, truth)
    ranks.do("build", "tied", seed=9)
    assert ranks.do("load") == [1] * 4
    assert ranks.do("digests") == saved
    close(ranks, traces, run)


def test_local_part_of_what_is_cut_is_a_tensor_of_its_own(start: Start, run: Path, traces: Traces):
    ranks = start(2).begin("with_local_parts", run)
    save(ranks, 1)
    saved = ranks.do("digests")
    ranks.do("build", "with_local_parts", seed=9)
    assert ranks.do("load") == [1] * 2
    assert ranks.do("digests") == saved
    loaded = sidesave.load(run / "step-00000001")
    assert loaded["cut"]["first"].shape == (7,) and loaded["own"]["first"].shape == (4,)
    close(ranks, traces, run)
