"""Load anywhere: checkpoints of any number of ranks, read by any other, whole or in boxes, no more
than needed.
"""

import itertools
import json
import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import campaigns
import forks
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from states import difference, noise
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from trainers import save
from worlds import Apart, Own, Spread, cut, drop_from_cache, packed, write_world

import sidesave
from sidesave import PerRank, Replicated
from sidesave.client.loading.load import LoadRequest
from sidesave.client.reading import regions
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.client.targets.tensor_memory import as_integers
from sidesave.errors import IntegrityError, StateMismatchError
from sidesave.writer_daemon.format.layout import ELSEWHERE, Box, Layout
from sidesave.writer_daemon.format.tensor_file import BLOCK_NBYTES

MiB = 1 << 20


def whole(fqn: str, tensor: torch.Tensor) -> Spread:
    """All tensors are shared, and rank 0 has written them."""
    return Layout((0,))


def sliced(world: int, dim: int = 0) -> Callable[[str, torch.Tensor], Spread]:
    """What has a dimension ``dim`` is cut there, a slice for each rank; loaders belong to their
    rank.
    """

    def spread(fqn: str, tensor: torch.Tensor) -> Spread:
        if fqn.startswith("loader"):
            return Own()
        return cut(tensor.shape, world, dim) if tensor.dim() > dim else Layout((0,))

    return spread


def slice_of(shape: Sequence[int], rank: int, world: int, dim: int = 0) -> Box:
    """What rank ``rank`` of ``world`` holds of a tensor that is cut evenly."""
    layout = cut(shape, world, dim)
    return next(box for owner, box in layout.boxes(tuple(shape)) if owner == rank)


def only(path: Path, *ranks: int) -> None:
    """Take away all files of other ranks."""
    kept = {f"rank-{rank:05d}." for rank in ranks}
    for file in path.iterdir():
        if file.name != "manifest.json" and not any(part in file.name for part in kept):
            file.unlink()


# Arithmetic ---------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def a_box(draw: st.DrawFn, shape: tuple[int, ...], least: int = 1) -> Box:
    extents = tuple(draw(st.integers(least, extent)) for extent in shape)
    offsets = tuple(
        draw(st.integers(0, extent - n)) for extent, n in zip(shape, extents, strict=True)
    )
    return offsets, extents


@st.composite
def a_layout(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> Layout:
    if draw(st.booleans()):
        return Layout((draw(st.integers(0, world - 1)),))
    cuts = []
    for extent in shape:
        inner = draw(st.sets(st.integers(1, extent - 1), max_size=3)) if extent > 1 else set()
        cuts.append((0, *sorted(inner), extent))
    cells = math.prod(len(borders) - 1 for borders in cuts)
    # At most one cell of a tensor for each rank, as they write it.
    assume(cells <= world)
    return Layout(tuple(draw(st.permutations(range(world)))[:cells]), tuple(cuts))


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


@given(SHAPES, st.sampled_from([1, 2, 8]), st.integers(1, 40), st.data())
def test_the_bytes_of_a_box_are_found_and_near_ones_joined(
    shape: tuple[int, ...], itemsize: int, gap: int, data: st.DataObject
):
    box = data.draw(a_box(shape))
    spans = regions.spans(shape, itemsize, box, gap)
    wanted = {
        int(n) * itemsize + byte
        for n in numbered(shape)[regions.slices(box)].flatten()
        for byte in range(itemsize)
    }
    covered = set(itertools.chain.from_iterable(range(*span) for span in spans))
    assert wanted <= covered
    assert all(start in wanted and stop - 1 in wanted for start, stop in spans)
    assert all(after[0] - before[1] >= gap for before, after in itertools.pairwise(spans))
    for start, stop in spans:
        inside = sorted(wanted & set(range(start, stop)))
        assert all(b - a <= gap for a, b in itertools.pairwise(inside)), (
            "what is far apart has been joined"
        )
    assert regions.is_contiguous(shape, box) == (len(covered) == len(wanted) and len(spans) == 1)


@given(SHAPES, st.data())
def test_a_stretch_of_elements_is_a_few_boxes_in_order(shape: tuple[int, ...], data: st.DataObject):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    found = [
        numbered(shape)[regions.slices(box)].flatten()
        for box in regions.between(shape, start, stop)
    ]
    assert torch.equal(
        torch.cat([torch.empty(0, dtype=torch.int64), *found]), torch.arange(start, stop)
    )
    assert len(found) <= 2 * max(len(shape), 1)


@given(SHAPES, st.integers(1, 700))
def test_slabs_cover_a_tensor_in_order_and_lie_side_by_side(shape: tuple[int, ...], limit: int):
    found = list(regions.slabs(shape, limit))
    assert all(math.prod(box[1]) <= limit and regions.is_contiguous(shape, box) for box in found)
    elements = torch.cat([numbered(shape)[regions.slices(box)].flatten() for box in found])
    assert torch.equal(elements, torch.arange(math.prod(shape)))


@given(SHAPES, st.integers(1, 8), st.data())
def test_the_cells_that_a_box_meets_are_those_of_the_grid(
    shape: tuple[int, ...], world: int, data: st.DataObject
):
    layout, box = data.draw(a_layout(shape, world)), data.draw(a_box(shape))
    expected = [
        (owner, cell) for owner, cell in layout.boxes(shape) if regions.intersect(cell, box)
    ]
    assert list(regions.cells(layout, shape, box)) == expected


# Any grid, any box --------------------------------------------------------------------------------

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e5m2,
]


@st.composite
def a_state(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, Layout], int]:
    """Tensors of which some are larger than a block in each cell, their layouts, and how many ranks
    there are.
    """
    world = draw(st.integers(1, 6))
    tensors, layouts = {}, {}
    for number in range(draw(st.integers(1, 4))):
        large = draw(st.booleans())
        extents = st.integers(50, 90) if large else st.integers(0, 5)
        shape = tuple(draw(st.lists(extents, min_size=3 if large else 0, max_size=3)))
        dtype = draw(st.sampled_from([torch.float64, torch.complex64] if large else DTYPES))
        tensors[f"t{number}"] = noise(dtype, *shape)
        layouts[f"x.t{number}"] = draw(a_layout(shape, world)) if all(shape) else Layout((0,))
    return tensors, layouts, world


@settings(max_examples=campaigns.examples(60))
@given(a_state(), st.data())
def test_any_box_of_any_grid_is_what_was_saved(
    state: tuple[dict[str, torch.Tensor], dict[str, Layout], int], data: st.DataObject
):
    tensors, layouts, world = state
    with tempfile.TemporaryDirectory() as folder:
        path = write_world(Path(folder), [{"x": tensors}] * world, lambda fqn, tensor: layouts[fqn])
        assert sidesave.verify(path).ok
        assert difference({"x": tensors}, sidesave.load(path)) == ""
        wanted: list[tuple[str, Box | None]] = []
        for fqn in layouts:
            shape = tuple(tensors[fqn[2:]].shape)
            wanted += [
                (fqn, data.draw(a_box(shape, least=0))) for _ in range(data.draw(st.integers(0, 2)))
            ]
        with CheckpointReader(str(path)) as reader:
            found = reader.read_boxes(wanted)
        assert list(found) == list(dict.fromkeys(wanted))
        for (fqn, box), tensor in found.items():
            assert box is not None
            assert difference(packed(tensors[fqn[2:]][regions.slices(box)]), tensor) == ""


def test_a_box_that_is_not_in_the_tensor_is_refused(tmp_path: Path):
    path = write_world(tmp_path, [{"x": torch.zeros(3, 4)}], whole)
    with CheckpointReader(str(path)) as reader:
        for box in [((0, 0), (4, 4)), ((0,), (3,)), ((-1, 0), (1, 1)), ((0, 0), (1, -1))]:
            with pytest.raises(sidesave.errors.InvalidArgumentError, match="there is no box"):
                reader.read_boxes([("x", box)])


def test_tensors_that_are_not_aligned_to_their_elements_are_read(tmp_path: Path):
    """Somebody else's writer may pack tensors so that a block ends within an element."""
    odd = torch.arange(5, dtype=torch.uint8)
    state = {
        "x": {
            "a": odd,
            "b": torch.randn(200, 100, dtype=torch.float64),
            "c": torch.randn(200, 100).double(),
        }
    }
    path = write_world(tmp_path, [state], whole)
    name = "x.rank-00000.safetensors"
    from scripts import fuzz

    header = {"x.a": ["U8", [5]], "x.b": ["F64", [200, 100]], "x.c": ["F64", [200, 100]]}
    position, body, entries = 0, b"", {}
    for fqn, (dtype, shape) in header.items():
        content = state["x"][fqn[2:]].reshape(-1).view(torch.uint8).numpy().tobytes()
        end = position + len(content)
        entries[fqn] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position, body = end, body + content
    fuzz.Forgery(path).forge(name, fuzz.pack_tensor_file(json.dumps(entries).encode(), body))
    assert difference(state, sidesave.load(path)) == ""
    with CheckpointReader(str(path)) as reader:
        box = ((3, 7), (190, 31))
        ((_, tensor),) = reader.read_boxes([("x.c", box)]).items()
    assert torch.equal(tensor, state["x"]["c"][regions.slices(box)])


# No more than needed ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """A model and an optimizer state as wide as real ones, and as deep as fits in a test."""
    torch.manual_seed(1)
    model = {f"{n}.{part}": torch.randn(1024, 512) for n in range(4) for part in ("q", "k")}
    model |= {f"{n}.norm": torch.randn(1024) for n in range(4)}
    states = {
        number: {"step": torch.tensor(3.0), "exp_avg": torch.randn(1024, 512)}
        for number in range(8)
    }
    return {"model": model, "optimizer": {"state": states}}


@pytest.mark.drawn
@pytest.mark.parametrize(("saved", "loaded"), [(8, 4), (4, 8), (8, 8), (8, 3), (1, 8), (8, 1)])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_reads_hardly_more_than_its_part(
    tmp_path: Path, trained: dict[str, Any], saved: int, loaded: int, dim: int
):
    """In rows within 5 %, and two blocks for a part that does not begin and end with one; in
    columns nothing twice.
    """
    path = write_world(tmp_path, [trained] * saved, sliced(saved, 0))
    for rank in {0, loaded // 2, loaded - 1}:
        with CheckpointReader(str(path), rank) as reader:
            wanted = [
                (fqn, slice_of(info.shape, rank, loaded, dim) if len(info.shape) > dim else None)
                for fqn, info in reader.manifest.table.tensors.items()
            ]
            before = reader.nbytes_read
            found = reader.read_boxes(wanted)
            spent = reader.nbytes_read
        need = sum(tensor.nbytes for tensor in found.values())
        assert before < 0.05 * spent
        odd = 1024 % loaded != 0
        everything = sum(
            math.prod(info.shape) * 4 for info in reader.manifest.table.tensors.values()
        )
        assert spent <= 1.05 * (everything if dim else need + 2 * odd * BLOCK_NBYTES * len(found))
        for (fqn, box), tensor in found.items():
            if fqn.startswith("model.") and box is not None:
                assert torch.equal(
                    tensor, trained["model"][fqn.removeprefix("model.")][regions.slices(box)]
                )


def test_of_long_rows_only_the_columns_are_read(tmp_path: Path):
    rows = torch.randn(6, 4 * MiB // 4)
    path = write_world(tmp_path, [{"x": rows}] * 2, sliced(2, 0))
    box = ((0, MiB // 4 + 100), (6, 3 * MiB // 16))
    with CheckpointReader(str(path)) as reader:
        before = reader.nbytes_read
        ((_, found),) = reader.read_boxes([("x", box)]).items()
        spent = reader.nbytes_read - before
    assert torch.equal(found, rows[regions.slices(box)])
    assert spent <= found.nbytes + 6 * 2 * BLOCK_NBYTES + 64_000, (
        "of each row the blocks at both ends, and the headers"
    )


def test_a_rank_that_holds_nothing_of_it_is_not_touched(tmp_path: Path, trained: dict[str, Any]):
    path = write_world(tmp_path, [trained] * 8, sliced(8))
    only(path, 0, 2, 3)
    box = slice_of((1024, 512), 1, 4)
    with CheckpointReader(str(path)) as reader:
        found = reader.read_boxes((f"model.{n}.q", box) for n in range(4))
        for (fqn, _), tensor in found.items():
            assert torch.equal(
                tensor, trained["model"][fqn.removeprefix("model.")][regions.slices(box)]
            )
        with pytest.raises(IntegrityError, match="rank-00001"):
            reader.read(["model.0.q"])


def test_a_tensor_in_one_piece_is_a_view_of_what_was_read(tmp_path: Path, trained: dict[str, Any]):
    path = write_world(tmp_path, [trained] * 2, sliced(2))
    with CheckpointReader(str(path)) as reader:
        box = slice_of((1024, 512), 0, 2)
        first, second = reader.read_boxes([("model.0.q", box), ("model.0.k", box)]).values()
        assert second.data_ptr() - first.data_ptr() == first.nbytes, "side by side, as in the file"
    assert torch.equal(first, trained["model"]["0.q"][:512])


def test_bytes_come_from_the_medium_and_from_the_page_cache(
    tmp_path: Path, trained: dict[str, Any]
):
    path = write_world(tmp_path, [trained] * 3, sliced(3))
    drop_from_cache(path)
    assert difference(trained, sidesave.load(path)) == ""
    for file in path.iterdir():
        file.read_bytes()
    assert difference(trained, sidesave.load(path)) == ""


# Damage -------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_a_wanted_block_is_noticed_and_in_another_it_does_not_matter(
    tmp_path: Path,
):
    rows = torch.randn(2048, 512)  # two cells of 2 MiB, eight blocks each, 128 rows a block
    path = write_world(tmp_path, [{"x": rows}] * 2, sliced(2))
    file = path / "tensors.rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    at = start + 3 * BLOCK_NBYTES + 17  # of rows 1408 to 1535
    data[at] ^= 4
    file.write_bytes(data)
    for first, count in [(0, 1024), (1024, 384), (1536, 512), (1100, 300), (1536, 1)]:
        with CheckpointReader(str(path)) as reader:
            ((_, found),) = reader.read_boxes([("x", ((first, 0), (count, 512)))]).items()
        assert torch.equal(found, rows[first : first + count])
    for box in [
        ((0, 0), (2048, 512)),
        ((1407, 0), (2, 512)),
        ((1535, 511), (1, 1)),
        ((900, 0), (700, 3)),
    ]:
        with (
            CheckpointReader(str(path)) as reader,
            pytest.raises(
                IntegrityError,
                match=rf"{file.name}: block 4 .* does not match its digest; it holds x$",
            ),
        ):
            reader.read_boxes([("x", box)])
    with CheckpointReader(str(path)) as reader:
        ((_, found),) = reader.read_boxes([("x", ((1407, 0), (2, 512)))], verify=False).items()
    assert (found != rows[1407:1409]).sum() == 1


@settings(max_examples=campaigns.examples(40))
@given(a_state(), st.data())
def test_no_flipped_bit_changes_what_is_loaded(
    state: tuple[dict[str, torch.Tensor], dict[str, Layout], int], data: st.DataObject
):
    tensors, layouts, world = state
    with tempfile.TemporaryDirectory() as folder:
        path = write_world(Path(folder), [{"x": tensors}] * world, lambda fqn, tensor: layouts[fqn])
        file = data.draw(st.sampled_from(sorted(path.iterdir())))
        content = bytearray(file.read_bytes())
        if not content:
            return
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content)
        wanted = [
            (fqn, data.draw(a_box(tuple(tensors[fqn[2:]].shape), least=0))) for fqn in layouts
        ]
        try:
            with CheckpointReader(str(path)) as reader:
                found = reader.read_boxes(wanted)
        except IntegrityError:
            return
        for (fqn, box), tensor in found.items():
            assert box is not None
            # torch would turn the bytes of bool tensors into 0 and 1
            whole = as_integers(tensors[fqn[2:]])
            assert (
                difference(whole[regions.slices(box)].contiguous().view(tensor.dtype), tensor) == ""
            )


def test_a_cell_of_another_shape_than_the_manifest_says_is_refused(tmp_path: Path):
    state = {"x": {"w": torch.zeros(4, 6)}}
    path = write_world(tmp_path / "a", [state] * 2, sliced(2, 0))
    other = write_world(tmp_path / "b", [state] * 2, sliced(2, 1))
    (path / "manifest.json").write_bytes((other / "manifest.json").read_bytes())
    body = json.loads((path / "manifest.json").read_bytes())
    from scripts import fuzz

    for rank, entry in enumerate(body["records"]):
        record = (path / f"rank-{rank:05d}.json").read_bytes()
        fuzz.Forgery._describe(entry, record)
    del body["xxh3_128"]
    (path / "manifest.json").write_bytes(
        fuzz.seal(json.dumps(body, separators=(",", ":")).encode())
    )
    with pytest.raises(IntegrityError, match=r"rank 0 do not hold the part of x\.w"):
        sidesave.load(path)


# Whose state --------------------------------------------------------------------------------------


def loading(rank: int) -> dict[str, Any]:
    """What a data loader of rank ``rank`` has to say, each with keys that no other has."""
    return {"position": torch.arange(3) + rank, f"worker {rank}": rank, "seen": {rank: True}}


def test_what_belongs_to_a_rank_comes_back_to_it_and_rank_0s_to_new_ones(tmp_path: Path):
    states: list[dict[str, Any]]
    states = [
        {"model": {"w": torch.arange(8.0)}, "loader": loading(rank), "epoch": 7 + rank}
        for rank in range(3)
    ]
    path = write_world(tmp_path, states, sliced(3))
    for rank in range(5):
        expected = states[rank if rank < 3 else 0]
        assert difference(expected, LoadRequest(rank=rank).read(path).apply()) == "", rank
        into: dict[str, Any] = {
            "loader": {"position": torch.zeros(3, dtype=torch.int64)},
            "epoch": 0,
        }
        LoadRequest(into=into, rank=rank, strict=False).read(path).apply()
        assert difference(expected["loader"]["position"], into["loader"]["position"]) == ""
        assert into["epoch"] == expected["epoch"]
    assert difference(states[0], sidesave.load(path)) == "", "alone one is rank 0"


def test_marks_around_targets_say_nothing_about_what_they_take(tmp_path: Path):
    state: dict[str, Any] = {
        "model": nn.Linear(3, 2),
        "loader": {"n": 3},
        "epoch": 5,
        "bare": torch.arange(3.0),
    }
    path = save(tmp_path, state)
    counters = {"n": 0}
    into: dict[str, Any] = {
        "model": Replicated(nn.Linear(3, 2)),
        "loader": PerRank(counters),
        "epoch": PerRank(0),
        "bare": Replicated(torch.zeros(3)),
    }
    assert sidesave.load(path, into=into) is into
    assert torch.equal(into["model"].value.weight, state["model"].weight)
    assert counters == {"n": 3}
    assert into["epoch"] == PerRank(5), "it can be saved again as it is"
    assert torch.equal(into["bare"].value, state["bare"])


def stages(*splits: int) -> list[dict[str, Any]]:
    """A model of eight layers, of which each rank holds those up to its split, as stages of a
    pipeline do.
    """
    layers = {f"layers.{n}.weight": torch.full((4, 4), float(n)) for n in range(8)}
    states: list[dict[str, Any]] = []
    for start, stop in itertools.pairwise((0, *splits)):
        held = {f"layers.{n}.weight": layers[f"layers.{n}.weight"] for n in range(start, stop)}
        states.append(
            {"model": {**held, "shared": torch.ones(3)}, "loader": {f"of stage {stop}": stop}}
        )
    return states


def stage_layout(fqn: str, tensor: torch.Tensor) -> Spread:
    return (
        Own()
        if fqn.startswith("loader")
        else Layout((int(fqn.split(".")[2]) // 4,) if "layers" in fqn else (1,))
    )


def test_stages_of_a_pipeline_are_put_together_and_divided_in_another_way(tmp_path: Path):
    states = stages(4, 8)
    path = write_world(tmp_path, states, stage_layout, alike=str)
    (everything,) = stages(8)
    assert difference(everything["model"], dict(sorted(sidesave.load(path)["model"].items()))) == ""
    assert sidesave.load(path)["loader"] == {"of stage 4": 4}, "what belongs to a rank is not mixed"
    assert LoadRequest(rank=1).read(path).apply()["loader"] == {"of stage 8": 8}
    for splits in [(4, 8), (2, 6, 8), (8,)]:
        for rank, target in enumerate(stages(*splits)):
            expected = {key: tensor.clone() for key, tensor in target["model"].items()}
            for tensor in target["model"].values():
                tensor.zero_()
            loaded = LoadRequest(into={"model": target["model"]}, rank=rank).read(path)
            loaded.apply()
            assert difference(expected, target["model"]) == ""


def test_of_other_stages_nothing_is_read(tmp_path: Path):
    layers = {f"layers.{n}.weight": torch.randn(512, 512) for n in range(2)}
    states = [{"model": {name: tensor}} for name, tensor in layers.items()]
    path = write_world(
        tmp_path, states, lambda fqn, tensor: Layout((int(fqn.split(".")[2]),)), alike=str
    )
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(512, 512, bias=False)])})
    loaded = LoadRequest(into={"model": model}).read(path)
    assert loaded.nbytes_read < 1.05 * MiB
    assert not torch.equal(model.state_dict()["layers.0.weight"], layers["layers.0.weight"]), (
        "nothing is touched yet"
    )
    assert loaded.apply()["model"] is model
    assert torch.equal(model.state_dict()["layers.0.weight"], layers["layers.0.weight"])


def test_a_key_that_all_ranks_have_saved_must_have_a_place(tmp_path: Path):
    path = write_world(tmp_path, stages(4, 8), stage_layout, alike=str)
    (target,) = stages(2)
    del target["model"]["shared"]
    with pytest.raises(StateMismatchError, match=r"model\.shared: unexpected"):
        sidesave.load(path, into={"model": target["model"]})
    target["model"]["layers.9.weight"] = torch.zeros(4, 4)
    with pytest.raises(
        StateMismatchError, match=r"model\.layers\.9\.weight: missing in the checkpoint"
    ):
        sidesave.load(path, into={"model": target["model"]})


# Apart --------------------------------------------------------------------------------------------


def experts(tmp_path: Path, world: int = 3) -> tuple[Path, list[dict[str, Any]]]:
    """Ranks 0 and 2 have different experts of one name; before that was known each wrote a share of
    it.
    """
    states = [
        {"model": {"expert": torch.full((400, 300), float(rank)), "router": torch.ones(3)}}
        for rank in range(world)
    ]

    def spread(fqn: str, tensor: torch.Tensor) -> Spread:
        return Apart(tuple(range(world))) if fqn == "model.expert" else Layout((1,))

    path = write_world(
        tmp_path,
        states,
        spread,
        move=lambda rank, container, key: (
            container + "@more" if key == "model.expert" else container
        ),
        leave=lambda rank, key: (
            (torch.full((2, 300), -1.0), (2 * rank, 0)) if key == "model.expert" else None
        ),
    )
    return path, states


def test_what_differs_between_ranks_comes_back_to_each(tmp_path: Path):
    path, states = experts(tmp_path)
    assert sidesave.verify(path).ok
    for rank in range(3):
        into: dict[str, Any] = {
            "model": {"expert": torch.zeros(400, 300), "router": torch.zeros(3)}
        }
        LoadRequest(into=into, rank=rank).read(path).apply()
        assert difference(states[rank], into) == ""
        assert difference(states[rank], LoadRequest(rank=rank).read(path).apply()) == ""


def test_a_rank_that_had_no_part_in_it_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path, states = experts(tmp_path)
    target: dict[str, Any] = {"model": {"expert": torch.zeros(400, 300), "router": torch.zeros(3)}}
    with pytest.raises(
        StateMismatchError, match=r"model\.expert differs between ranks 0, 1, 2\n.*exclude="
    ):
        LoadRequest(into=target, rank=3).read(path)
    assert not any(tensor.any() for tensor in target["model"].values())
    LoadRequest(into=target, rank=3, exclude="model.expert").read(path).apply()
    assert target["model"]["router"].all()
    assert not target["model"]["expert"].any()
    with caplog.at_level(logging.WARNING):
        assert difference(states[0], LoadRequest(rank=3).read(path).apply()) == ""
    assert "model.expert differs between ranks 0, 1, 2" in caplog.text


def test_of_what_is_alike_though_each_rank_wrote_it_new_ranks_take_one(tmp_path: Path):
    states = [{"model": {"w": torch.ones(5)}, "n": rank} for rank in range(2)]
    path = write_world(tmp_path, states, lambda fqn, tensor: Apart((0, 1)))
    assert difference(states[0], LoadRequest(rank=4).read(path).apply()) == ""
    only(path, 0, 1)
    (path / "model.rank-00000.safetensors").unlink()
    assert difference(states[1], LoadRequest(rank=1).read(path).apply()) == "", "it reads its own"


def test_what_another_node_keeps_is_said_to_be_there(tmp_path: Path):
    rows = torch.arange(12.0).reshape(4, 3)
    layout = Layout((0, ELSEWHERE, 1), ((0, 1, 2, 4), (0, 3)))
    path = write_world(tmp_path, [{"x": rows}] * 2, lambda fqn, tensor: layout)
    with CheckpointReader(str(path)) as reader:
        first, last = reader.read_boxes([("x", ((0, 0), (1, 3))), ("x", ((2, 0), (2, 3)))]).values()
        assert torch.equal(first, rows[:1])
        assert torch.equal(last, rows[2:])
        with pytest.raises(StateMismatchError, match="another node"):
            reader.read(["x"])


# Stock readers ------------------------------------------------------------------------------------


def test_stock_readers_put_it_together_too(tmp_path: Path, trained: dict[str, Any]):
    path = write_world(
        tmp_path, [{**trained, "loader": {"n": torch.tensor(r)}} for r in range(3)], sliced(3, 1)
    )
    target = {
        f"model.{name}": torch.zeros_like(tensor) for name, tensor in trained["model"].items()
    }
    target["loader.n@rank-00002"] = torch.tensor(0)
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert target.pop("loader.n@rank-00002") == 2
    assert (
        difference(trained["model"], {name.removeprefix("model."): t for name, t in target.items()})
        == ""
    )
    one = safetensors.torch.load_file(path / "model.rank-00001.safetensors")
    assert torch.equal(one["model.0.q"], trained["model"]["0.q"][:, 171:342])


# DTensors -----------------------------------------------------------------------------------------


class Wrapper:
    """An object of the user's that hands on the state of a module, as trainers have it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state)


class Net(nn.Module):
    """Parameters of which nothing divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up = nn.Parameter(torch.randn(1030, 301))
        self.down = nn.Parameter(torch.randn(301, 77))
        self.norm = nn.Parameter(torch.randn(3))
        self.odd = nn.Parameter(torch.randn(5, 2, dtype=torch.complex128))

    def shard(self, mesh: Any) -> "Net":
        placements = {
            "up": [Shard(0), Shard(1)],
            "down": [Replicate(), Shard(0)],
            "norm": [Shard(0), Shard(0)],
        }
        for name, parameter in list(self.named_parameters()):
            shard = placements.get(name, [Shard(0), Replicate()])
            setattr(
                self,
                name,
                nn.Parameter(
                    distribute_tensor(parameter.detach(), mesh, shard, src_data_rank=None)
                ),
            )
        return self


def one_step(net: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with momenta that differ from element to element."""
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


def full(state: Any) -> Any:
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    return [full(value) for value in state] if isinstance(state, list) else state


def load_in_turn(rank: int, world: int, folder: Path) -> None:
    """Rank by rank, so that one which waited for another would wait for ever."""
    reference = Net()
    optimizer = one_step(reference)
    mesh = dist.init_device_mesh("cpu", (2, world // 2))
    for fresh in (True, False):
        targets: dict[str, Any] = {
            "model": Net().shard(mesh),
            "wrapped": Wrapper(Net().shard(mesh)),
        }
        for parameter in [*targets["model"].parameters(), *targets["wrapped"].module.parameters()]:
            parameter.detach().zero_()
        target = targets["model"]
        targets["optimizer"] = torch.optim.AdamW(target.parameters()) if fresh else one_step(target)
        targets["bare"] = distribute_tensor(
            torch.zeros(9, 3), mesh, [Shard(1), Replicate()], src_data_rank=None
        )
        places = [parameter.to_local().data_ptr() for parameter in target.parameters()]
        for turn in range(world):
            if turn == rank:
                loaded = LoadRequest(into=targets, rank=rank).read(f"{folder}/step-00000001")
                assert not any(parameter.to_local().any() for parameter in target.parameters())
                loaded.apply()
            dist.barrier()
        assert difference(dict(reference.state_dict()), full(dict(target.state_dict()))) == ""
        assert difference(dict(reference.state_dict()), full(targets["wrapped"].state_dict())) == ""
        assert [parameter.to_local().data_ptr() for parameter in target.parameters()] == places
        assert difference(torch.arange(27.0).reshape(9, 3), full(targets["bare"])) == ""
        states = targets["optimizer"].state_dict()["state"]
        assert difference(optimizer.state_dict()["state"], full(states)) == ""
        for parameter, state in targets["optimizer"].state.items():
            assert isinstance(parameter, DTensor)
            assert state["exp_avg"].placements == parameter.placements
            assert type(state["step"]) is torch.Tensor
    own = distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0), Replicate()], src_data_rank=None)
    with pytest.raises(
        StateMismatchError,
        match=r"own\.w: shape \[4, 3\] in the checkpoint, \[8, 3\] in the target",
    ):
        LoadRequest(into={"own": {"w": own}}, rank=rank).read(f"{folder}/step-00000002")
    LoadRequest(into={"own": PerRank({"w": own})}, rank=rank).read(
        f"{folder}/step-00000002"
    ).apply()
    assert torch.equal(own.to_local(), torch.full((4, 3), float(rank)))
    with pytest.raises(
        StateMismatchError, match=r"bare: shape \[9, 3\] in the checkpoint, \[8, 3\] in the target"
    ):
        LoadRequest(
            into={
                "bare": distribute_tensor(
                    torch.zeros(8, 3), mesh, [Shard(0), Replicate()], src_data_rank=None
                )
            },
            rank=rank,
        ).read(f"{folder}/step-00000001")


@pytest.mark.slow
@pytest.mark.parametrize("world", [4])
def test_sharded_targets_take_their_part_and_no_rank_waits_for_another(tmp_path: Path, world: int):
    model = Net()
    state: dict[str, Any] = {
        "model": model,
        "wrapped": dict(model.state_dict()),
        "optimizer": one_step(model),
    }
    state["bare"] = torch.arange(27.0).reshape(9, 3)
    path = write_world(tmp_path, [state] * 3, sliced(3))
    assert sidesave.verify(path).ok
    each = [{"own": {"w": torch.full((4, 3), float(rank))}} for rank in range(world)]
    write_world(tmp_path, each, lambda fqn, tensor: Own(), step=2)
    forks.spawn_group(load_in_turn, world, tmp_path, count=world)
