"""The plan of a save: images that stock safetensors opens, laid out as O_DIRECT and the digest grid
want them.
"""

import json
from pathlib import Path
from typing import Any

import campaigns
import hypothesis.strategies as st
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from states import bits, noise

from sidesave.errors import UnsupportedValueError
from sidesave.stager.copy.copier import Copier
from sidesave.stager.copy.slot import StagingSlot
from sidesave.stager.dtypes import NAMES
from sidesave.stager.memory.arena import PAGE, Arena, page_up
from sidesave.stager.plan import Plan, make_plan, structure_of
from sidesave.stager.state import tree
from sidesave.writer_daemon.format.tensor_file import (
    BLOCK_NBYTES,
    TensorFile,
    digest_blocks,
    parse_tensor_file,
)

# Element counts around the threshold of 256 KiB, for every element size, and small shapes of every
# kind.
BLOCK_EDGES = st.builds(
    lambda times, off, itemsize: (max(times * BLOCK_NBYTES // itemsize + off, 0),),
    st.integers(1, 3),
    st.integers(-2, 2),
    st.sampled_from([1, 2, 4, 8]),
)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple) | BLOCK_EDGES
FQNS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
CONTAINERS = st.dictionaries(
    st.sampled_from(["model", "optimizer", "tensors", "ema"]),
    st.dictionaries(FQNS, st.tuples(st.sampled_from(list(NAMES)), SHAPES), min_size=1, max_size=8),
    max_size=3,
)


def plan_of(containers: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]) -> Plan:
    tensors = {
        name: {
            fqn: torch.empty(shape, dtype=dtype, device="meta")
            for fqn, (dtype, shape) in body.items()
        }
        for name, body in containers.items()
    }
    return make_plan(structure_of(tensors))


@given(CONTAINERS)
@settings(max_examples=campaigns.examples(200))
def test_a_plan_is_aligned_and_without_holes(
    containers: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]],
):
    plan = plan_of(containers)
    assert [file.container for file in plan.files] == list(containers)
    end = 0
    for file, body in zip(plan.files, containers.values(), strict=True):
        assert file.offset == end, "images follow each other, page by page"
        assert len(file.header) % PAGE == 0, "data starts on a page"
        end = file.offset + page_up(file.nbytes)
        position = len(file.header)
        for placement, (dtype, shape) in sorted(
            zip(file.placements, body.values(), strict=True),
            key=lambda pair: (pair[0].offset, pair[0].nbytes),
        ):
            assert placement.nbytes == torch.Size(shape).numel() * dtype.itemsize
            assert placement.offset == position, "a hole, or an overlap"
            assert placement.offset % dtype.itemsize == 0
            position += placement.nbytes
        assert position == file.nbytes
    assert plan.nbytes == end


@given(CONTAINERS, st.integers(1, 3000))
@settings(max_examples=campaigns.examples(200))
def test_a_container_is_cut_into_files_that_have_its_tensors_in_order(
    containers: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]], file_nbytes: int
):
    whole = plan_of(containers)
    plan = make_plan(whole.structure, file_nbytes=file_nbytes)
    assert plan.structure == whole.structure
    assert len({file.name for file in plan.files}) == len(plan.files)
    end = 0
    for name, body in containers.items():
        files = [file for file in plan.files if file.container == name]
        assert [file.name for file in files] == (
            [name]
            if len(files) == 1
            else [f"{name}.{i:05d}-of-{len(files):05d}" for i in range(1, len(files) + 1)]
        )
        sizes = {
            fqn: torch.Size(shape).numel() * dtype.itemsize for fqn, (dtype, shape) in body.items()
        }
        assert [place.nbytes for file in files for place in file.placements] == [*sizes.values()]
        held: list[str] = []
        for file in files:
            parsed = parse_tensor_file(file.header, "header")
            own = [entry.name for entry in parsed.entries]
            nbytes = sum(sizes[fqn] for fqn in own)
            assert nbytes <= file_nbytes or sum(sizes[fqn] > 0 for fqn in own) == 1
            assert (file.offset, file.nbytes) == (end, parsed.nbytes)
            end += page_up(file.nbytes)
            held += sorted(own, key=list(body).index)
        assert held == list(body)
        assert len(files) == 1 or sum(sizes.values()) > file_nbytes
    assert plan.nbytes == end


@given(CONTAINERS)
@settings(max_examples=campaigns.examples(200))
def test_a_header_says_what_the_plan_says(
    containers: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]],
):
    for file, body in zip(plan_of(containers).files, containers.values(), strict=True):
        parsed = parse_tensor_file(file.header, "header")
        assert (parsed.data_offset, parsed.nbytes) == (len(file.header), file.nbytes)
        entries = {entry.name: entry for entry in parsed.entries}
        assert entries.keys() == body.keys()
        for (fqn, (dtype, shape)), placement in zip(body.items(), file.placements, strict=True):
            entry = entries[fqn]
            assert (entry.dtype, entry.shape) == (NAMES[dtype], shape)
            assert (entry.offset, entry.nbytes) == (placement.offset, placement.nbytes)
        assert parsed.metadata.keys() == {"format", "DCP_VERSION", "DCP_SHARDING_INFO"}
        assert (parsed.metadata["format"], parsed.metadata["DCP_VERSION"]) == ("pt", "1.0")
        sharding = json.loads(parsed.metadata["DCP_SHARDING_INFO"])
        assert sharding == {
            fqn: {"saved_offsets": [0] * len(shape)} for fqn, (_, shape) in body.items()
        }


@given(CONTAINERS)
@settings(max_examples=campaigns.examples(200))
def test_the_digest_grid_covers_a_file_once_and_restarts_at_large_tensors(
    containers: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]],
):
    for file in plan_of(containers).files:
        parsed = parse_tensor_file(file.header, "header")
        blocks = digest_blocks(parsed)
        ends = [offset + nbytes for offset, nbytes in blocks]
        starts = [offset for offset, _ in blocks]
        assert starts == [0, *ends[:-1]]
        assert ends[-1] == file.nbytes
        assert all(0 < nbytes <= BLOCK_NBYTES for _, nbytes in blocks)
        header_only = digest_blocks(TensorFile(parsed.data_offset, parsed.data_offset, (), {}))
        assert blocks[: len(header_only)] == header_only, "the header is a run of its own"
        large = [entry for entry in parsed.entries if entry.nbytes >= BLOCK_NBYTES]
        for entry in large:
            within = [
                block for block in blocks if entry.offset <= block[0] < entry.offset + entry.nbytes
            ]
            assert within[0][0] == entry.offset, "the grid restarts"
            assert sum(nbytes for _, nbytes in within) == entry.nbytes, (
                "and no block reaches beyond"
            )
            assert len(within) == -(-entry.nbytes // BLOCK_NBYTES), (
                "nor is one cut short before the last"
            )
        runs = 1 + 2 * len(large) + 1
        assert len(blocks) <= -(-file.nbytes // BLOCK_NBYTES) + runs


def images(state: dict[str, Any]) -> tuple[Plan, dict[str, bytes]]:
    """Stages a state as a save does, and cuts the arena into files."""
    flat = tree.flatten(state)
    plan = make_plan(structure_of(flat.containers))
    slot = StagingSlot(arena=Arena.create(PAGE, plan.nbytes))
    assert slot.arena is not None
    copier = Copier(overlap=False, validate=False)
    try:
        slot.lay_out(plan)
        assert copier.copy(copier.new_copy(), flat, plan, slot, lambda error: None, blocking=True)
        base = slot.arena.data_offset
        return plan, {
            file.container: bytes(slot.arena.view(base + file.offset, file.nbytes))
            for file in plan.files
        }
    finally:
        copier.close()
        slot.unmap()


STATES = st.dictionaries(
    st.sampled_from(["model", "optimizer", "ema"]),
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=8),
        st.builds(lambda dtype, shape: noise(dtype, *shape), st.sampled_from(list(NAMES)), SHAPES),
        min_size=1,
        max_size=6,
    ),
    min_size=1,
    max_size=2,
)


@given(STATES)
@settings(max_examples=campaigns.examples(60))
def test_stock_safetensors_reads_every_image_with_the_same_bits(
    state: dict[str, dict[str, torch.Tensor]],
):
    _, files = images(state)
    assert files.keys() == state.keys()
    for name, data in files.items():
        loaded = safetensors.torch.load(data)
        assert loaded.keys() == {f"{name}.{fqn}" for fqn in state[name]}
        for fqn, tensor in state[name].items():
            found = loaded[f"{name}.{fqn}"]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert bits(found) == bits(tensor)


def test_safe_open_reads_slices_and_metadata_of_an_image(tmp_path: Path):
    weight = noise(torch.bfloat16, 300, 500)
    _, files = images({"model": {"weight": weight, "scalar": torch.tensor(3.0)}})
    (tmp_path / "model.safetensors").write_bytes(files["model"])
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        assert sorted(file.keys()) == ["model.scalar", "model.weight"]
        assert bits(file.get_slice("model.weight")[17:19, 400:]) == bits(weight[17:19, 400:])
        assert file.get_tensor("model.scalar").shape == ()


def test_an_arena_used_again_holds_nothing_of_the_plan_before():
    """Smaller plans leave old bytes behind them, which no image may cover."""
    before = {"model": {"weight": noise(torch.float32, 5000), "bias": noise(torch.float32, 7)}}
    after = {"other": {"b": noise(torch.float64, 3)}, "model": {"weight": noise(torch.float16, 90)}}
    fresh = images(after)[1]
    slot = StagingSlot(arena=Arena.create(PAGE, 1 << 20))
    assert slot.arena is not None
    copier = Copier(overlap=False, validate=False)
    try:
        for state in (before, after):
            flat = tree.flatten(state)
            plan = make_plan(structure_of(flat.containers))
            slot.lay_out(plan)
            copier.copy(copier.new_copy(), flat, plan, slot, lambda error: None, blocking=True)
            used = {
                file.container: bytes(
                    slot.arena.view(slot.arena.data_offset + file.offset, file.nbytes)
                )
                for file in plan.files
            }
        assert used == fresh
    finally:
        copier.close()
        slot.unmap()


def test_equal_structures_share_a_plan_and_every_difference_makes_another():
    def structure(**tensors: torch.Tensor) -> Any:
        return structure_of({"model": tensors})

    base = structure(a=torch.ones(2, 3), b=torch.ones(4))
    assert structure(a=torch.zeros(3, 2).t(), b=torch.zeros(4)) == base
    others = [
        structure(a=torch.ones(3, 2), b=torch.ones(4)),
        structure(a=torch.ones(2, 3, dtype=torch.int32), b=torch.ones(4)),
        structure(a=torch.ones(2, 3), c=torch.ones(4)),
        structure(b=torch.ones(4), a=torch.ones(2, 3)),
        structure(a=torch.ones(2, 3)),
        structure_of({"other": {"a": torch.ones(2, 3), "b": torch.ones(4)}}),
    ]
    assert all(other != base for other in others)


def test_a_header_beyond_what_stock_readers_accept_is_refused():
    # A name counts twice, in the header and in the sharding metadata, and is a megabyte long here.
    names = {f"{number}{'x' * (1 << 20)}": (torch.uint8, (1,)) for number in range(50)}
    with pytest.raises(
        UnsupportedValueError, match=r"model: 50 tensors need a header of [\d,]+ bytes.*100,000,000"
    ):
        plan_of({"model": names})


def test_an_empty_state_has_no_file():
    plan = plan_of({})
    assert (plan.files, plan.nbytes) == ((), 0)
