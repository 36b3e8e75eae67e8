"""Nodes with disks of their own: each keeps and commits its part, and a step is there when all
nodes have theirs.

A directory makes a node: ranks that see each other's files in it are on one.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from node_trainers import NodeRank
from rank_trainers import Answer, Ranks, leftovers, same_tensors, stored
from safetensors import safe_open
from trainers import Orders, Traces

import sidesave
from sidesave.client.ranks.meeting import RENDEZVOUS
from sidesave.client.runs.finding import catalog_of
from sidesave.errors import StateMismatchError

Start = Callable[..., Ranks]


@pytest.fixture
def start(start: Start) -> Start:
    return functools.partial(start, kind=NodeRank)


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """The run directories of two nodes."""
    return [tmp_path / "node-0" / "run", tmp_path / "node-1" / "run"]


def template(nodes: Sequence[Path]) -> str:
    """What ranks make the path of their node's directory of."""
    return str(nodes[0]).replace("node-0", "node-{node}")


def open_nodes(ranks: Ranks, nodes: Sequence[Path], **options: Any) -> list[dict[str, Any]]:
    return ranks.open(template(nodes), node_local=True, **options)


def close(ranks: Ranks, traces: Traces, *runs: Path) -> None:
    """All ranks close, and leave nothing behind."""
    ranks.do("close")
    for run in runs:
        assert leftovers(run) == []
        assert list((run / RENDEZVOUS).iterdir()) == []
    traces.check()


def errors(answers: Iterable[Answer]) -> set[str | None]:
    return {answer.error for answer in answers}


def part(node: Path, step: int) -> Path:
    return node / f"step-{step:08d}"


def save(ranks: Ranks, *steps: int) -> None:
    """Save these steps, each of which knows its number, with training between them."""
    for step in steps:
        ranks.do("train")
        ranks.do("put", "step", step)
        ranks.save(step)


def pieces(path: Path) -> Iterator[tuple[str, list[int], torch.Tensor]]:
    """What the files of a part say for themselves: names, offsets in the whole, and values."""
    report = sidesave.verify(path)
    assert report.ok, report.faults
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            offsets = json.loads((opened.metadata() or {})["DCP_SHARDING_INFO"])
            for fqn in opened.keys():  # noqa: SIM118 - it is no dict
                yield fqn, offsets[fqn]["saved_offsets"], opened.get_tensor(fqn)


def holds_once(truth: dict[str, torch.Tensor], *parts: Path) -> None:
    """Fails unless these parts together hold each element of what is cut once; numbers are not
    cut.
    """
    seen = {fqn: torch.zeros(tensor.shape, dtype=torch.int32) for fqn, tensor in truth.items()}
    found = {fqn: torch.zeros_like(tensor) for fqn, tensor in truth.items()}
    for path in parts:
        for fqn, offsets, tensor in pieces(path):
            box = tuple(
                slice(at, at + extent) for at, extent in zip(offsets, tensor.shape, strict=True)
            )
            found[fqn][box] = tensor
            seen[fqn][box] += 1
    same_tensors(found, truth)
    for fqn, count in seen.items():
        assert bool((count == (1 if count.dim() else len(parts))).all()), fqn


# Saved per node, and loaded by the same ranks -----------------------------------------------------


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("name", "each_has_all"),
    [
        ("over_nodes", False),
        ("replicas_within_nodes", False),
        ("replicas_across_nodes", True),
        ("alike", True),
    ],
)
def test_each_node_keeps_its_part_and_its_ranks_get_back_every_bit(
    start: Start, nodes: list[Path], traces: Traces, tmp_path: Path, name: str, each_has_all: bool
):
    ranks = start(4)
    ranks.do("build", name)
    open_nodes(ranks, nodes)
    save(ranks, 1, 2)
    ranks.do("truth", str(tmp_path / "truth"))
    saved = ranks.do("digests")
    close(ranks, traces, *nodes)

    truth = torch.load(tmp_path / "truth")
    truth.pop("rng", None)  # each rank's own
    if each_has_all:
        for node in nodes:
            found = stored(part(node, 2)).tensors
            found.pop("rng", None)
            same_tensors(found, truth)
    else:
        holds_once(truth, *(part(node, 2) for node in nodes))

    ranks = start(4)
    ranks.do("build", name, seed=9)
    assert all(now != then for now, then in zip(ranks.do("digests"), saved, strict=True))
    assert {each["latest"] for each in open_nodes(ranks, nodes)} == {2}
    assert ranks.do("load") == [2] * 4
    assert ranks.do("digests") == saved
    assert ranks.do("load", 1) == [1] * 4
    close(ranks, traces, *nodes)


def test_each_rank_may_be_a_node(start: Start, tmp_path: Path, traces: Traces):
    runs = [tmp_path / f"rank-{rank}" for rank in range(3)]
    ranks = start(3).begin("alike", tmp_path / "rank-{rank}", node_local=True)
    save(ranks, 1)
    ranks.do("spoil")
    assert errors(ranks.attempt("save", 2)) == {"UnsupportedValueError"}
    assert errors(ranks.attempt("save", 1)) == {"CheckpointExistsError"}, (
        "which is none of the other ranks' business"
    )
    ranks.do("put", "spoilt", None)
    save(ranks, 2)
    saved = ranks.do("digests")
    close(ranks, traces, *runs)
    ranks = start(3)
    ranks.do("build", "alike", seed=9)
    ranks.open(tmp_path / "rank-{rank}", node_local=True)
    assert ranks.do("load") == [2] * 3
    assert ranks.do("digests") == saved
    close(ranks, traces, *runs)


# Steps that not all nodes have --------------------------------------------------------------------


@pytest.mark.slow
def test_step_that_a_node_has_lost_is_not_there_until_it_is_saved_again(
    start: Start, nodes: list[Path], traces: Traces
):
    ranks = start(4)
    ranks.do("build", "over_nodes")
    open_nodes(ranks, nodes, in_turn=True)
    save(ranks, 1, 2, 3)
    close(ranks, traces, *nodes)
    shutil.rmtree(part(nodes[0], 3))
    shutil.rmtree(part(nodes[1], 2))

    ranks = start(4)
    ranks.do("build", "over_nodes", seed=9)
    assert {each["latest"] for each in open_nodes(ranks, nodes, in_turn=True)} == {1}
    assert ranks.do("steps") == [[[1], 1]] * 4
    for step in (2, 3):
        assert errors(ranks.attempt("load", step)) == {"CheckpointNotFoundError"}
    assert ranks.do("load") == [1] * 4
    save(ranks, 2, 3)
    assert ranks.do("steps") == [[[1, 2, 3], 3]] * 4
    saved = ranks.do("digests")
    ranks.do("train")
    assert ranks.do("load") == [3] * 4
    assert ranks.do("digests") == saved
    close(ranks, traces, *nodes)
    for node in nodes:
        infos = catalog_of(str(node)).all()
        assert [info.step for info in infos] == [1, 2, 3]
        assert len({info.session for info in infos}) == 2
        assert all(sidesave.verify(info.path).ok for info in infos)


@pytest.mark.slow
def test_step_that_one_node_could_not_save_is_not_there_after_a_restart(
    start: Start, nodes: list[Path], traces: Traces, ordered: tuple[Orders, dict[str, str]]
):
    orders, environment = ordered
    ranks = start(4, environments={3: environment})
    ranks.do("build", "over_nodes")
    open_nodes(ranks, nodes)
    save(ranks, 1)
    ranks.do("put", "step", 2)
    orders.give("ENOSPC")
    ranks.do("save", 2)
    answers = ranks.attempt("committed", 2)
    orders.obeyed()
    assert [answer.error for answer in answers] == [None, None, "NoSpaceError", "NoSpaceError"]
    assert part(nodes[0], 2).exists() and not part(nodes[1], 2).exists()
    assert ranks.do("load") == [1] * 4, "not even before a restart"
    close(ranks, traces, *nodes)

    ranks = start(4)
    ranks.do("build", "over_nodes", seed=9)
    assert {each["latest"] for each in open_nodes(ranks, nodes)} == {1}
    assert ranks.do("load") == [1] * 4
    save(ranks, 2)  # in the place of what the first node has
    assert ranks.do("load") == [2] * 4
    close(ranks, traces, *nodes)
    sessions = [{info.step: info.session for info in catalog_of(str(node)).all()} for node in nodes]
    assert sessions[0] == sessions[1] and sorted(sessions[0]) == [1, 2]


def test_damage_on_any_node_is_found_and_an_older_step_is_taken_only_if_that_is_asked_for(
    start: Start, nodes: list[Path], traces: Traces
):
    ranks = start(4)
    ranks.do("build", "over_nodes")
    open_nodes(ranks, nodes)
    save(ranks, 1, 2, 3, 4)
    flip(next(part(nodes[1], 2).glob("model.rank-00001.safetensors")))
    flip(part(nodes[0], 3) / "manifest.json")
    flip(part(nodes[1], 4) / "manifest.json")
    before = ranks.do("digests")
    for step, damaged in ((None, (3, 4)), (4, (4,)), (3, (3,)), (2, (2,))):
        for answer in ranks.attempt("load", step):
            assert answer.error == "IntegrityError"
            assert any(f"step-{each:08d}" in answer.message for each in damaged), answer.message
    assert ranks.do("digests") == before
    assert ranks.do("load", fallback=True) == [1] * 4
    close(ranks, traces, *nodes)


def flip(path: Path) -> None:
    """Change a bit in the last byte but a few."""
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


# Mix-ups ------------------------------------------------------------------------------------------


def refused(ranks: Ranks, *words: str) -> None:
    """All ranks have been refused a checkpointer, and told these words."""
    for answer in ranks.answers():
        assert answer.error == "InvalidArgumentError", answer
        assert all(word in answer.message for word in words), answer.message


def test_wrong_word_about_nodes_and_a_node_in_use_are_refused_on_all_ranks_who_may_try_again(
    start: Start, nodes: list[Path], tmp_path: Path, traces: Traces
):
    ranks = start(4)
    ranks.do("build", "alike")
    ranks.do("set", "sidesave.client.ranks.meeting:_VISIBLE_WITHIN_S", 1.0)
    ranks.tell("open", template(nodes))
    refused(ranks, "rank 2 ", str(tmp_path), "pass node_local=True")
    for rank in ranks:
        rank.tell("open", template(nodes), node_local=rank is ranks[3])
    refused(ranks, "rank 0 was given node_local=False, and rank 3 node_local=True")
    assert [list((node / RENDEZVOUS).iterdir()) for node in nodes] == [[], []]
    with sidesave.Checkpointer(nodes[1]):
        for answer in ranks.attempt("open", template(nodes), node_local=True):
            assert answer.error == "DirectoryInUseError" and str(nodes[1]) in answer.message, answer
    open_nodes(ranks, nodes)
    save(ranks, 1)
    close(ranks, traces, *nodes)


def test_node_local_of_ranks_without_process_group_is_refused_at_once(
    start: Start, nodes: list[Path], traces: Traces
):
    ranks = start(2, group=False)
    ranks.tell("open", template(nodes), node_local=True)
    refused(ranks, "node_local", "torch.distributed.init_process_group")
    traces.check()


@pytest.mark.parametrize("group", [True, False], ids=["process group", "no process group"])
def test_single_rank_is_one_node(start: Start, nodes: list[Path], traces: Traces, group: bool):
    ranks = start(1, group=group)
    ranks.do("build", "alike")
    open_nodes(ranks, nodes)
    save(ranks, 1)
    assert ranks.do("load") == [1]
    close(ranks, traces)


@pytest.mark.root
def test_directory_that_hosts_share_is_refused_as_that_of_a_node(
    start: Start, tmp_path: Path, traces: Traces
):
    run = tmp_path / "run"
    ranks = start(4)
    ranks.do("build", "alike")
    for rank in (ranks[2], ranks[3]):
        if not rank.do("move_to_host", "another"):
            pytest.skip("a process cannot have a host name of its own here")
    ranks.tell("open", str(run), node_local=True)
    refused(ranks, "another", str(run), "leave node_local=True out")
    ranks.open(run)
    save(ranks, 1)
    close(ranks, traces, run)


# Parts read by others -----------------------------------------------------------------------------


def test_part_of_a_node_is_enough_for_nobody_but_its_own_ranks(
    start: Start, nodes: list[Path], traces: Traces
):
    ranks = start(4)
    ranks.do("build", "over_nodes")
    open_nodes(ranks, nodes)
    save(ranks, 1)
    close(ranks, traces, *nodes)

    weight = torch.full((30, 23), 7.0)
    for node in nodes:
        for into in (None, {"model": {"0.weight": weight}}):
            with pytest.raises(
                StateMismatchError, match=r"model\.0\.weight is on another node"
            ) as caught:
                sidesave.load(part(node, 1), into=into, strict=False)
            assert str(node) in str(caught.value)
        assert sidesave.load(part(node, 1), include=["step", "optimizer.param_groups"])["step"] == 1
    assert bool((weight == 7).all())
    assert sidesave.load(part(nodes[0], 1), include="model.4")["model"]["4.weight"].shape == (
        2,
        4,
    ), "all of it is there"

    for count, on_first in ((4, 3), (2, 1)):
        ranks = start(count)
        ranks.do("build", "over_nodes", seed=9)
        before = ranks.do("digests")
        for number, rank in enumerate(ranks):
            rank.tell("open", str(nodes[number >= on_first]), node_local=True)
        assert errors(ranks.answers()) == {None}
        for answer in ranks.attempt("load"):
            assert answer.error == "StateMismatchError"
            assert "load with the same ranks on the same nodes" in answer.message
        assert ranks.do("digests") == before
        close(ranks, traces, *nodes)
