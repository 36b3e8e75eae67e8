"""A rank that cannot save, or whose storage fails: all ranks commit, or all learn why not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from campaigns import Share
from rank_checks import Place, Start, errors, finish, is_clean, read, visible
from trainers import Orders, Traces, wait_until

# A rank that fails --------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1])
def test_rank_that_cannot_save_fails_the_save_of_all_and_the_next_is_whole(
    start: Start, place: Place, traces: Traces, culprit: int
):
    ranks = start(3).begin("small", place)
    ranks[culprit].do("spoil")
    for step in (10, 20):
        for number, answer in enumerate(ranks.attempt("save", step)):
            assert answer.error == ("UnsupportedValueError" if number == culprit else None)
        for number, rank in enumerate(ranks):
            if number != culprit:
                rank.tell("committed", step)
        for number, rank in enumerate(ranks):
            if number != culprit:
                told = rank.answer()
                assert told.error == "UnsupportedValueError" and "spoilt" in told.message
        assert step not in visible(place)
        is_clean(place)
        ranks[culprit].do("put", "spoilt", None)
        ranks.save(step + 1)
        ranks[culprit].do("spoil")
    for step in (-1, 1 << 70):
        ranks[culprit].do("put", "spoilt", None)
        for number, rank in enumerate(ranks):
            rank.tell("save", step if number == culprit else 30)
        assert errors(ranks.answers()).count("InvalidArgumentError") == 1
        for number, rank in enumerate(ranks):
            if number != culprit:
                rank.tell("committed", 30)
                assert rank.answer().error == "InvalidArgumentError"
        is_clean(place)
        ranks.save(31 + (step > 0))
    finish(ranks, place, traces)


def test_refusal_that_names_a_key_which_is_no_text_fails_that_save_alone(
    start: Start, run: Path, traces: Traces
):
    ranks = start(2).begin("small", run)
    ranks[1].do("spoil", "odd\udcff")  # as os.fsdecode() makes it of a file name
    assert errors(ranks.attempt("save", 1)) == [None, "UnsupportedValueError"]
    ranks[0].tell("committed", 1)
    told = ranks[0].answer()
    assert told.error == "UnsupportedValueError" and r"odd\udcff" in told.message
    ranks[1].do("put", "odd\udcff", None)
    ranks.save(2)
    finish(ranks, run, traces)


def test_failure_is_raised_once_on_each_rank_and_by_no_save_of_another_step(
    start: Start, run: Path, traces: Traces
):
    ranks = start(3).begin("small", run)
    ranks.save(1)
    ranks[1].do("spoil")
    assert errors(ranks.attempt("save", 2)) == [None, "UnsupportedValueError", None]
    ranks[1].do("put", "spoilt", None)
    wait_until(lambda: list(run.glob(".step-00000002.*.aborted")))
    for rank in (ranks[0], ranks[2]):
        rank.do("outcome", 2)
    ranks[0].tell("committed", 2)
    assert ranks[0].answer().error == "UnsupportedValueError"
    ranks.save(3)  # whatever was read where
    told = ranks.attempt("wait")
    assert errors(told) == [None, None, "UnsupportedValueError"]
    assert "spoilt" in told[2].message
    ranks.do("wait")
    ranks.save(4)
    assert visible(run) == [1, 3, 4]
    finish(ranks, run, traces)


def test_ranks_that_save_different_steps_are_told_both(start: Start, place: Place, traces: Traces):
    ranks = start(3).begin("small", place)
    for first in (10, 20):
        steps = (first, first + 1, first)
        for rank, step in zip(ranks, steps, strict=True):
            rank.do("save", step)
        for rank, step in zip(ranks, steps, strict=True):
            rank.tell("committed", step)
        for told in ranks.answers():
            assert told.error == "StateMismatchError"
            assert f"step {first}" in told.message and f"step {first + 1}" in told.message
        is_clean(place)
        ranks.save(first + 5)
    finish(ranks, place, traces)


@pytest.mark.slow
def test_rank_that_misses_a_save_and_comes_after_it_was_given_up_costs_no_further_waiting(
    start: Start, run: Path, traces: Traces
):
    ranks = start(2).begin("small", run, daemon={"commit_timeout_s": 5.0})
    ranks.save(10)
    ranks[0].do("save", 20)
    ranks[0].tell("committed", 20)
    assert ranks[0].answer().error == "WriteStalledError"
    for step in (30, 40):
        ranks[1].do("save", step)
        ranks[1].tell("committed", step)
        told = ranks[1].answer()
        assert told.error == "StateMismatchError"
        assert f"step {step}" in told.message and f"step {step - 10}" in told.message
        if step == 30:
            ranks[0].do("save", 30)
            ranks[0].tell("committed", 30)
            assert ranks[0].answer().error == "WriteStalledError"
    ranks[0].do("save", 40)
    ranks[0].tell("committed", 40)
    assert "rank 1 has missed a call of save() before step 30" in ranks[0].answer().message
    ranks.save(50)
    assert visible(run) == [10, 50]
    finish(ranks, run, traces)


@pytest.mark.parametrize("late", [0, 1])
def test_rank_that_misses_a_save_is_told_at_once_and_catches_up(
    start: Start, place: Place, traces: Traces, late: int
):
    ranks = start(3).begin("small", place)
    ranks.save(10)
    others = [rank for number, rank in enumerate(ranks) if number != late]

    def fails(rank: Any, step: int) -> str:
        rank.tell("committed", step)
        told = rank.answer()
        assert told.error == "StateMismatchError"
        return told.message

    for rank in others:
        rank.do("save", 20)
    for step in (30, 40):
        ranks.do("save", step)
        messages = [fails(ranks[late], step), *(fails(rank, step - 10) for rank in others)]
        assert all(
            f"step {step}" in message and f"step {step - 10}" in message for message in messages
        )
    for rank in others:  # where it catches up
        assert f"rank {late} has missed a call of save() before step 30" in fails(rank, 40)
    for step in (50, 60):
        ranks.save(step)
    assert visible(place) == [10, 50, 60]
    finish(ranks, place, traces)


def test_rank_that_saves_once_less_fails_the_last_save_of_the_others_when_it_leaves(
    start: Start, place: Place, traces: Traces
):
    ranks = start(3).begin("small", place)
    ranks.save(1)
    for rank in (ranks[0], ranks[2]):
        rank.do("save", 2)
    ranks[1].do("close")
    for rank in (ranks[0], ranks[2]):
        rank.tell("committed", 2)
        told = rank.answer()
        assert told.error == "DaemonDiedError" and "rank 1" in told.message
    assert visible(place) == [1]
    finish(ranks, place, traces)


def test_rank_that_looks_late_learns_of_a_step_that_was_replaced_or_deleted_meanwhile(
    start: Start, place: Place, traces: Traces
):
    ranks = start(3).begin("small", place)
    for _ in range(6):
        ranks.do("save", 1, overwrite=True)
    ranks.do("wait")
    for step in range(2, 6):
        ranks.do("save", step)
        ranks[0].do("committed", step)
        ranks[0].do("delete", step - 1)
    ranks.do("wait")
    assert ranks.do("steps") == [[[5], 5]] * 3
    finish(ranks, place, traces)


# Storage that fails -------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1])
def test_failing_disk_of_one_rank_fails_the_save_of_all_or_of_none(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]], culprit: int
):
    fail_operations(start, run, traces, ordered, culprit, range(0, 30, 2), "ENOSPC")


@pytest.mark.slow
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_failing_disk_of_one_rank_at_any_operation(
    start: Start,
    run: Path,
    traces: Traces,
    ordered: tuple[Orders, dict[str, str]],
    culprit: int,
    error: str,
    share: Share,
):
    fail_operations(start, run, traces, ordered, culprit, share.points(range(60)), error)


def fail_operations(
    start: Start,
    run: Path,
    traces: Traces,
    ordered: tuple[Orders, dict[str, str]],
    culprit: int,
    points: Iterable[int],
    error: str,
) -> None:
    orders, environment = ordered
    ranks = start(3, environments={culprit: environment}).begin(
        "small", run, failures={"retries": 0}
    )
    ranks.save(0)
    step, failed = 0, 0
    for after, is_known in ((after, is_known) for after in points for is_known in (True, False)):
        ranks.do("restructure", None if is_known else step)
        orders.give(error, after=after)
        is_over = False
        while not is_over:
            step += 1
            ranks.do("save", step)
            told = set(errors(ranks.attempt("committed", step)))
            if step in visible(run):
                assert told <= {None, "CommitUnknownError"}
                read(run, step)
            else:
                failed += 1
                assert None not in told and told <= {
                    "NoSpaceError",
                    "CommitUnknownError",
                    "WriteError",
                }
            is_clean(run)
            # else it is the next save that comes to that operation
            is_over = orders.was_obeyed() or orders.withdraw()
        if orders.was_obeyed():
            orders.obeyed()
    assert failed > 5 or step < 20
    ranks.save(step + 1)
    read(run, step + 1)
    finish(ranks, run, traces)


def test_passing_error_of_one_rank_is_tried_again(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]]
):
    orders, environment = ordered
    ranks = start(2, environments={1: environment}).begin("small", run)
    for step in (1, 2):
        orders.give("EIO", after=5)
        ranks.save(step)
        orders.obeyed()
        read(run, step)
    finish(ranks, run, traces)


def test_rank_that_is_slow_once_its_record_is_there_does_not_mind_that_rank_0_has_committed(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]]
):
    orders, environment = ordered
    ranks = start(2, environments={1: environment}).begin("small", run)
    ranks.save(0)
    # the temporary name; the directory, to sync it
    for step, held_at in enumerate(("os.remove", "open"), 1):
        orders.give("hold", starting_at="os.remove", on="/.rank-00001.json.", after=step - 1)
        ranks.do("save", step)
        ranks.tell("committed", step)
        _, where = orders.obeyed()
        assert where.split()[0] == held_at
        ranks[0].answer().get()
        orders.release()
        ranks[1].answer().get()
        read(run, step)
    finish(ranks, run, traces)


def test_rank_deletes_a_step_and_saves_it_again_before_rank_0_has_deleted_it(
    start: Start, run: Path, traces: Traces
):
    ranks = start(2)
    ranks.do("build", "plain", 0.1, True)  # of which each rank writes its part without asking
    ranks.open(run)
    ranks.save(1)
    ranks.save(2)
    ranks[1].do("delete", 1)
    ranks[1].do("save", 1)
    ranks[1].do("staged", 1)
    wait_until(lambda: list(run.glob(".step-00000001.*.partial/rank-00001.json")))
    ranks[0].do("delete", 1)
    ranks[0].do("save", 1)
    ranks.do("committed", 1)
    assert visible(run) == [2, 1]
    finish(ranks, run, traces)
