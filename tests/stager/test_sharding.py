"""Sharded tensors: every box is what its rank holds, and every element is written once, by ranks
that never talk.
"""

import contextlib
import functools
import itertools
import math
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import campaigns
import forks
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, _dtensor_spec
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from sidesave.errors import UnsupportedValueError
from sidesave.stager.sharding import (
    Box,
    Grid,
    describe,
    local_box,
    whole,
)
from sidesave.stager.shares import MIN_PIECE_NBYTES, Partition, assign_shares

Steps = Sequence[tuple[int, int]]
"""Which mesh dimension cuts which dimension of the tensor, one after the other."""

S0, S1, R = Shard(0), Shard(1), Replicate()


# What is true, told by torch.chunk alone


def indices(
    mesh: torch.Tensor, rank: int, steps: Steps, shape: Sequence[int]
) -> list[torch.Tensor]:
    """Per dimension, which indices of the global tensor a rank holds."""
    (coordinate,) = (mesh == rank).nonzero().tolist()
    held = [torch.arange(extent) for extent in shape]
    for mesh_dim, dim in steps:
        held[dim] = chunks(held[dim], mesh.shape[mesh_dim])[coordinate[mesh_dim]]
    return held


def chunks(values: torch.Tensor, count: int) -> list[torch.Tensor]:
    found = list(torch.chunk(values, count))
    return found + [values[:0]] * (count - len(found))


def true_grid(mesh: torch.Tensor, steps: Steps, shape: Sequence[int]) -> Grid:
    return cached_grid(
        tuple(mesh.flatten().tolist()), tuple(mesh.shape), tuple(steps), tuple(shape)
    )


@functools.cache
def cached_grid(
    ranks: tuple[int, ...], sizes: tuple[int, ...], steps: Steps, shape: tuple[int, ...]
) -> Grid:
    mesh = torch.tensor(ranks).view(sizes)
    ranks = tuple(sorted(ranks))
    if 0 in shape:
        return Grid(shape, tuple((0, extent) for extent in shape), (ranks,), ranks)
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        held = indices(mesh, rank, steps, shape)
        if all(map(len, held)):
            holders.setdefault(tuple(int(values[0]) for values in held), []).append(rank)
    cuts = tuple(
        (*sorted({begins[dim] for begins in holders}), extent) for dim, extent in enumerate(shape)
    )
    assert len(holders) == math.prod(len(borders) - 1 for borders in cuts), "the cells are a grid"
    return Grid(shape, cuts, tuple(tuple(holders[begins]) for begins in sorted(holders)), ranks)


def boxes(cuts: Sequence[Sequence[int]]) -> list[Box]:
    return [
        (tuple(begin for begin, _ in cell), tuple(end - begin for begin, end in cell))
        for cell in itertools.product(*(list(itertools.pairwise(borders)) for borders in cuts))
    ]


# Describing


@contextlib.contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of many, without the others."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    **spec: Any,
) -> DTensor:
    strides = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), strides, local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), meta, **spec), requires_grad=False)  # pyright: ignore[reportCallIssue]


def strided(dim: int, factor: int) -> Placement:
    return _StridedShard(dim, split_factor=factor)


def plain(placements: Sequence[Placement]) -> tuple[Sequence[Placement], Steps]:
    """Placements without strides cut from left to right."""
    return placements, [
        (at, placement.dim)
        for at, placement in enumerate(placements)
        if isinstance(placement, Shard)
    ]


MESHES: dict[str, tuple[list[Any], list[tuple[Sequence[Placement], Steps]]]] = {
    "alone": ([0], [plain([placement]) for placement in (R, S0, S1)]),
    "line": (list(range(5)), [plain([placement]) for placement in (R, S0, S1)]),
    "plane": (
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [
            *(plain(two) for two in itertools.product((R, S0, S1), repeat=2)),
            # FSDP2 over tensor parallelism: the latter cuts first
            ([strided(0, 2), S0], [(1, 0), (0, 0)]),
            ([strided(1, 2), S1], [(1, 1), (0, 1)]),
            ([strided(0, 1), S0], [(0, 0), (1, 0)]),
        ],
    ),
    "shuffled": (
        [[7, 2, 5], [0, 3, 6]],
        [plain([S0, S0]), plain([R, S1]), ([strided(0, 3), S0], [(1, 0), (0, 0)])],
    ),
    "cube": (
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
        [
            *(plain(three) for three in itertools.product((R, S0, S1), repeat=3)),
            ([R, strided(0, 2), S0], [(2, 0), (1, 0)]),  # HSDP over tensor parallelism
            # FSDP2 over experts over tensor parallelism
            ([strided(0, 4), S0, S0], [(1, 0), (2, 0), (0, 0)]),
            ([S0, strided(0, 2), S0], [(0, 0), (2, 0), (1, 0)]),
            ([strided(0, 2), strided(0, 2), S0], [(2, 0), (0, 0), (1, 0)]),
            ([strided(0, 2), S0, S1], [(1, 0), (0, 0), (2, 1)]),
            ([strided(1, 2), S0, S1], [(2, 1), (0, 1), (1, 0)]),
        ],
    ),
}
SHAPES = [
    (17, 5),
    (5, 17),
    (8, 8),
    (3, 1),
    (1, 3),
    (1, 1),
    (16, 9),
    (0, 4),
    (4, 0),
    (7, 2, 3),
    (2, 11, 0),
]


@pytest.mark.drawn
@pytest.mark.parametrize("name", MESHES)
def test_every_rank_describes_the_grid_that_torch_has_cut(name: str) -> None:
    layout, cases = MESHES[name]
    ranks = torch.tensor(layout)
    expected = {
        (at, shape): true_grid(ranks, steps, shape)
        for at, (_, steps) in enumerate(cases)
        for shape in SHAPES
    }
    for rank in ranks.flatten().tolist():
        with as_rank(rank, 8):
            mesh = DeviceMesh("cpu", ranks)
            for (at, shape), grid in expected.items():
                placements, steps = cases[at]
                held = indices(ranks, rank, steps, shape)
                tensor = dtensor(
                    torch.empty([len(values) for values in held]), mesh, placements, shape
                )
                assert describe(tensor, "w") == grid, (placements, shape)
                box = local_box(grid, rank)
                if 0 in shape:
                    assert box == ((0,) * len(shape), shape), (
                        "who holds nothing of nothing holds all of it"
                    )
                elif all(map(len, held)):
                    assert box
                    for offset, extent, values in zip(*box, held, strict=True):
                        assert values.tolist() == list(range(offset, offset + extent))
                else:
                    assert box is None


def test_a_number_and_negative_dimensions() -> None:
    ranks = torch.arange(8).view(4, 2)
    with as_rank(5, 8):
        mesh = DeviceMesh("cpu", ranks)
        number = describe(dtensor(torch.tensor(1.0), mesh, [R, R], ()), "step")
        assert number == whole((), tuple(range(8))) and local_box(number, 5) == ((), ())
        grid = describe(
            DTensor.from_local(torch.empty(2, 2), mesh, [Shard(-2), Shard(-1)], run_check=False),
            "w",
        )
        assert grid == true_grid(ranks, [(0, 0), (1, 1)], (8, 4))
        # Row 17 of a 4x2 mesh: 9 and 8 rows, of which FSDP gives 3, 3, 3, 0 and 2, 2, 2, 2.
        grid = describe(dtensor(torch.empty(4, 2), mesh, [strided(-1, 2), Shard(-1)], (4, 17)), "w")
        assert grid.cuts == ((0, 4), (0, 3, 6, 9, 11, 13, 15, 17))
        assert grid.holders == ((0,), (2,), (4,), (1,), (3,), (5,), (7,)) and grid.ranks == tuple(
            range(8)
        )
        assert local_box(grid, 6) is None and local_box(grid, 7) == ((0, 15), (4, 2))


def test_slices_of_a_mesh_have_ranks_of_their_own() -> None:
    found: dict[int, tuple[Grid, ...]] = {}
    for rank in range(8):
        with as_rank(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
            flat = mesh["dp", "tp"]._flatten(f"flat_{rank}")
            found[rank] = (
                describe(dtensor(torch.empty(2), mesh["tp"], [S0], (4,)), "w"),
                describe(dtensor(torch.empty(2), mesh["pp"], [S0], (4,)), "w"),
                describe(dtensor(torch.empty(2, 2), mesh["dp", "tp"], [S0, S1], (4, 4)), "w"),
                describe(dtensor(torch.empty(1), flat, [S0], (4,)), "w"),
            )
    for rank, (tp, pp, plane, flat) in found.items():
        stage = 4 * (rank // 4)
        assert tp.ranks == (rank // 2 * 2, rank // 2 * 2 + 1) and tp.holders == tuple(
            (rank,) for rank in tp.ranks
        )
        assert pp.ranks == (rank % 4, rank % 4 + 4) and pp.cuts == ((0, 2, 4),)
        assert plane == true_grid(
            torch.arange(stage, stage + 4).view(2, 2), [(0, 0), (1, 1)], (4, 4)
        )
        assert flat == true_grid(torch.arange(stage, stage + 4), [(0, 0)], (4,))


def test_an_order_told_by_the_tensor_itself_is_followed() -> None:
    order_type = getattr(_dtensor_spec, "ShardOrderEntry", None)
    if order_type is None:
        pytest.skip("this torch knows no order of shards but by strided placements")
    ranks = torch.arange(8).view(4, 2)
    with as_rank(1, 8):
        mesh = DeviceMesh("cpu", ranks)
        order = (order_type(tensor_dim=0, mesh_dims=(1, 0)),)
        told = describe(dtensor(torch.empty(2), mesh, [S0, S0], (17,), shard_order=order), "w")
        assert told == true_grid(ranks, [(1, 0), (0, 0)], (17,))
        untold = describe(dtensor(torch.empty(2), mesh, [S0, S0], (17,)), "w")
        assert untold == true_grid(ranks, [(0, 0), (1, 0)], (17,)) != told


def test_the_second_tensor_of_a_kind_costs_a_look_up_and_none_a_collective() -> None:
    with as_rank(3, 8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        with CommDebugMode() as communication:
            one, other = (
                dtensor(torch.empty(3, 5), mesh, [strided(0, 2), S0], (24, 5)) for _ in range(2)
            )
            assert describe(one, "one") is describe(nn.Parameter(other), "other")
            assert whole((24, 5), (0, 1)) is whole(torch.empty(24, 5).shape, (0, 1)), (
                "so plans are found again"
            )
        assert communication.get_total_counts() == 0


@pytest.mark.parametrize(
    ("placements", "shape", "local", "complaint"),
    [
        ([Partial(), R], (8,), (8,), "redistribute it first"),
        ([R, Partial("avg")], (8,), (8,), "redistribute it first"),
        ([type("Interleaved", (Shard,), {})(0), R], (8,), (2,), "redistribute it first"),
        ([strided(0, 4), R], (8,), (2,), "which is no box"),  # nobody cuts later into 4
        ([strided(0, 4), S0], (8,), (1,), "which is no box"),
        ([S0, strided(0, 2)], (8,), (1,), "which is no box"),
        ([S0, S1], (8,), (2,), "does not fit"),
        ([strided(-2, 2), strided(-1, 1)], (8,), (1,), "does not fit"),
        ([S0, R], (), (), "does not fit"),
        ([S0, R], (8,), (8,), r"should hold \(2,\), but the local tensor has shape \(8,\)"),
        ([S0, R], (3,), (1,), r"should hold nothing, but"),
        ([S0, R], (9,), (2,), r"should hold nothing, but"),
        ([S0, R], (0, 3), (1, 3), r"should hold nothing, but"),
        ([R, R], (), (1,), r"should hold \(\), but"),
    ],
)
def test_what_is_no_box_is_refused_by_name(
    placements: list[Placement], shape: tuple[int, ...], local: tuple[int, ...], complaint: str
) -> None:
    with as_rank(6, 8):
        tensor = dtensor(
            torch.empty(local), DeviceMesh("cpu", torch.arange(8).view(4, 2)), placements, shape
        )
        for _ in range(2):
            with pytest.raises(
                UnsupportedValueError, match=rf"^model\.layers\.0\.weight: .*{complaint}"
            ):
                describe(tensor, "model.layers.0.weight")


def test_strangers_are_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedValueError, match=r"^model\.w: a Parameter does not say how it is sharded"
    ):
        describe(nn.Parameter(torch.empty(3)), "model.w")
    with as_rank(5, 8):
        mesh = DeviceMesh("cpu", torch.arange(4))
        with pytest.raises(UnsupportedValueError, match=r"^model\.w: this rank is not in the mesh"):
            describe(dtensor(torch.empty(0), mesh, [S0], (4,)), "model.w")


@pytest.mark.parametrize("sizes", [(4, 2), (3, 2), (3, 4), (5, 3)])
def test_placements_that_were_followed_from_left_to_right_are_refused_by_some_rank(
    sizes: tuple[int, int],
) -> None:
    """Where a dimension is uneven, strided placements stand for two ways to cut it: the shapes tell
    which it was.
    """
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    extents = range(1, 40)
    placements = [strided(0, sizes[1]), S0]
    refused: dict[int, int] = dict.fromkeys(extents, 0)
    wrong: dict[int, int] = dict.fromkeys(extents, 0)
    for rank in range(ranks.numel()):
        with as_rank(rank, ranks.numel()):
            mesh = DeviceMesh("cpu", ranks)
            for extent in extents:
                held = literally(extent, sizes, divmod(rank, sizes[1]))
                try:
                    grid = describe(
                        dtensor(torch.empty(len(held)), mesh, placements, (extent,)), "w"
                    )
                except UnsupportedValueError:
                    refused[extent] += 1
                    continue
                box = local_box(grid, rank)
                wrong[extent] += held != (
                    [] if box is None else list(range(box[0][0], box[0][0] + box[1][0]))
                )
    assert any(refused.values()) and all(refused[extent] for extent in extents if wrong[extent])
    assert not any(refused[extent] for extent in extents if extent % ranks.numel() == 0)


def literally(extent: int, sizes: tuple[int, int], coordinate: tuple[int, int]) -> list[int]:
    """What a rank holds if strided placements are followed from left to right, as
    ``distribute_tensor`` does.
    """
    first = [
        chunks(part, sizes[0])[coordinate[0]] for part in chunks(torch.arange(extent), sizes[1])
    ]
    return chunks(torch.cat(first), sizes[1])[coordinate[1]].tolist()


@pytest.mark.skipif(
    "use_strided_shard_as_shard_order" not in DTensorSpec.__dataclass_fields__,
    reason="this torch has no such results",
)
def test_strides_that_come_of_a_view_are_a_box_only_where_all_is_even() -> None:
    with as_rank(3, 8):
        mesh = DeviceMesh("cpu", torch.arange(8).view(4, 2))
        literal = {"use_strided_shard_as_shard_order": False}
        even = dtensor(torch.empty(2), mesh, [strided(0, 2), S0], (16,), **literal)
        assert local_box(describe(even, "w"), 3) == ((10,), (2,))
        uneven = dtensor(torch.empty(2), mesh, [strided(0, 2), S0], (17,), **literal)
        with pytest.raises(UnsupportedValueError, match=r"^w: .* which is no box"):
            describe(uneven, "w")


def test_importing_costs_no_torch() -> None:
    code = (
        "import sys, sidesave.stager.shares; sys.exit(any(name.startswith('torch') for "
        "name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return os.environ | {"PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


# Describing, among real ranks


@pytest.mark.slow
def test_fsdp_over_tensor_parallelism_holds_what_the_grid_says(tmp_path: Path) -> None:
    """Eight gloo ranks compare the values of their local tensors with the boxes derived, uneven and
    empty ones too.
    """
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path)]
    with forks.popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as ranks:
        try:
            output, _ = ranks.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(ranks.pid, signal.SIGKILL)
            output, _ = ranks.communicate()
            pytest.fail(f"the ranks hang\n{output}")
    assert ranks.returncode == 0, output
    assert output.count("every box is right") == 8, output


def run_ranks(directory: str) -> int:
    """Fork eight ranks, which share what has been imported; the first that fails takes the others
    along.
    """
    pids: set[int] = set()
    for rank in range(8):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                hold_what_torch_cuts(rank, directory)
                status = 0
            except BaseException:  # noqa: BLE001 (whatever it is, the fork ends here)
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        pids.add(pid)
    failed = 0
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if status and not failed:
            failed = 1
            for other in pids:
                os.kill(other, signal.SIGKILL)
    return failed


def hold_what_torch_cuts(rank: int, directory: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=8
    )
    grids: list[Grid] = []

    def check(tensor: torch.Tensor, full: torch.Tensor) -> None:
        grid = describe(tensor, "w")
        box = local_box(grid, rank)
        local = tensor.detach().to_local()  # pyright: ignore[reportAttributeAccessIssue]
        if box is None:
            assert not local.numel()
        else:
            held = full[
                tuple(slice(offset, offset + extent) for offset, extent in zip(*box, strict=True))
            ]
            assert torch.equal(local, held), (tensor, box)
        grids.append(grid)

    plane = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicas", "shards", "columns"))
    line = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    modes = [
        (plane["tp"], plane["dp"]),
        (cube["columns"], cube["replicas", "shards"]),
        (None, line),
        (plane["tp"], None),
    ]
    for (tp, dp), style, rows, columns in itertools.product(
        modes, (ColwiseParallel, RowwiseParallel), (17, 5, 3, 1, 8), (5,)
    ):
        model = nn.Sequential(nn.Linear(columns, rows))
        full = {
            "0.weight": torch.arange(rows * columns).view(rows, columns).float(),
            "0.bias": torch.arange(rows).float(),
        }
        model.load_state_dict(full)
        if tp is not None:
            parallelize_module(model, tp, {"0": style()})
        if dp is not None:
            fully_shard(model, mesh=dp)
        for fqn, parameter in model.named_parameters():
            check(parameter, full[fqn])
        if (rows, columns) == (17, 5):
            optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.0, 0.9))
            for parameter in model.parameters():
                parameter.grad = parameter.detach().clone()
            optimizer.step()
            for fqn, parameter in model.named_parameters():
                check(optimizer.state[parameter]["exp_avg"], full[fqn])
    everyones: list[list[Grid]] = [[] for _ in range(8)]
    dist.all_gather_object(everyones, grids)
    for others in everyones:
        assert [grid for grid in others if rank in grid.ranks and len(grid.ranks) == 8] == [
            grid for grid in grids if len(grid.ranks) == 8
        ], "all ranks describe a tensor alike"
    print("every box is right", flush=True)
    dist.destroy_process_group()


# Assigning

Tensors = dict[str, tuple[Grid, int]]

SMALL = [(), (0,), (1,), (5,), (0, 3), (3, 0), (1, 1), (3, 7), (8, 8), (1000,), (65_535,)]
LARGE = [(300_000,), (1 << 20,), (1024, 1024), (50257, 64), (17, 100_000), (7, 65_536)]
CLUMSY = [(2, 400_000), (1, 3000, 700), (1, 1_000_000)]
SIZES = st.sampled_from(SMALL + LARGE + CLUMSY) | st.tuples(
    st.integers(1, 3000), st.integers(1, 3000)
)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])


@st.composite
def meshes(draw: st.DrawFn) -> list[tuple[torch.Tensor, Steps]]:
    """Ways to place tensors in one world: replicas, FSDP, HSDP, tensor parallelism, pipeline
    stages, expert meshes.
    """
    stages, replicas, shards = draw(
        st.sampled_from([(1, 1, 1), (1, 1, 3), (1, 2, 2), (2, 2, 2), (1, 4, 2), (2, 1, 4)])
    )
    ways: list[tuple[torch.Tensor, Steps]] = []
    for stage in torch.arange(stages * replicas * shards).view(stages, replicas, shards):
        ways += [
            (stage, steps)
            for steps in ([], [(1, 0)], [(0, 0)], [(0, 0), (1, 1)], [(1, 1)], [(1, 0), (0, 0)])
        ]
        ways += [(stage.t(), [(0, 0)])]
        # experts: each group has its own
        ways += [(group, steps) for group in stage.t() for steps in ([], [(0, 0)])]
    everyone = torch.arange(stages * replicas * shards)
    return [*ways, (everyone, []), (everyone, [(0, 0)])]


@st.composite
def states(draw: st.DrawFn) -> Tensors:
    ways = draw(meshes())
    tensors: Tensors = {}
    for index in range(draw(st.integers(1, 25))):
        mesh, steps = draw(st.sampled_from(ways))
        shape = draw(SIZES)
        steps = [(mesh_dim, dim) for mesh_dim, dim in steps if dim < len(shape)]
        tensors[f"{draw(st.sampled_from('abc'))}.{index}"] = (
            true_grid(mesh, steps, shape),
            draw(ITEMSIZES),
        )
    return tensors


def agreed(tensors: Mapping[str, tuple[Grid, int]]) -> dict[str, Partition]:
    """The layouts, when each rank has assigned what it knows of, in an order of its own, and all
    promises are kept.
    """
    layouts: dict[str, Partition] = {}
    written: dict[str, dict[int, Box | None]] = {fqn: {} for fqn in tensors}
    for rank in {rank for grid, _ in tensors.values() for rank in grid.ranks}:
        known = [
            (fqn, (grid, itemsize))
            for fqn, (grid, itemsize) in tensors.items()
            if rank in grid.ranks
        ]
        random.Random(rank).shuffle(known)
        shares = assign_shares(dict(known), rank)
        assert shares.keys() == dict(known).keys()
        for fqn, share in shares.items():
            assert layouts.setdefault(fqn, share.layout) == share.layout, "all ranks agree"
            written[fqn][rank] = share.box
    for fqn, (grid, itemsize) in tensors.items():
        layout = layouts[fqn]
        if layout.cuts is None:
            assert len(layout.owners) == 1
        cuts = layout.cuts or tuple((0, extent) for extent in grid.shape)
        for coarse, fine in zip(grid.cuts, cuts, strict=True):
            assert set(coarse) <= set(fine) and list(fine) == sorted(fine)
            assert len(set(fine)) == len(fine) or fine == (0, 0)
        cells = boxes(cuts)
        assert len(set(layout.owners)) == len(layout.owners) == len(cells), (
            "one piece of a tensor for a rank"
        )
        owned = dict(zip(layout.owners, cells, strict=True))
        assert written[fqn] == {rank: owned.get(rank) for rank in grid.ranks}
        for owner, (offsets, extents) in owned.items():
            held = local_box(grid, owner)
            assert held, "ranks write what they hold"
            assert all(
                low <= offset and offset + extent <= low + length
                for offset, extent, low, length in zip(offsets, extents, *held, strict=True)
            )
            narrow = [dim for dim in range(len(extents)) if extents[dim] < held[1][dim]]
            assert len(narrow) <= 1 and all(
                held[1][at] == 1 for dim in narrow for at in range(dim)
            ), "contiguous"
            if narrow and len(grid.holders) == 1:
                assert math.prod(extents) * itemsize >= MIN_PIECE_NBYTES
    return layouts


def loads_of(
    tensors: Mapping[str, tuple[Grid, int]], layouts: Mapping[str, Partition]
) -> dict[int, int]:
    loads = dict.fromkeys((rank for grid, _ in tensors.values() for rank in grid.ranks), 0)
    for fqn, (grid, itemsize) in tensors.items():
        cuts = layouts[fqn].cuts or tuple((0, extent) for extent in grid.shape)
        for owner, (_, extents) in zip(layouts[fqn].owners, boxes(cuts), strict=True):
            loads[owner] += math.prod(extents) * itemsize
    return loads


CUBE = torch.arange(8).view(2, 2, 2)


@given(states())
# rows of cells that lie side by side
@example({"a": (true_grid(CUBE, [(1, 0), (2, 1)], (4000, 600)), 4)})
# cut in the second dimension
@example({"a": (true_grid(CUBE, [(1, 0), (2, 2)], (2, 4000, 600)), 4)})
@settings(max_examples=campaigns.examples(100))
def test_all_ranks_agree_that_each_element_is_written_once_by_one_who_holds_it(
    tensors: Tensors,
) -> None:
    agreed(tensors)


def excess(level: float, tensors: Mapping[str, tuple[Grid, int]]) -> float:
    """What a class of tensors may add for a rank beyond its level."""
    rows = [0]
    for grid, itemsize in tensors.values():
        largest = local_box(grid, grid.holders[0][0])
        assert largest
        rows.append(
            math.prod(largest[1])
            // next((extent for extent in largest[1] if extent >= 2), 1)
            * itemsize
        )
    return 2 * max(rows) + 4 * max(MIN_PIECE_NBYTES, level / 50)


@given(st.integers(1, 9), st.lists(st.tuples(SIZES, ITEMSIZES), min_size=1, max_size=60))
@example(8, [((1024, 1024), 4)])  # one tensor
@example(3, [((50_000, 64), 4), ((2, 1_000_000), 4)])  # one that can only be halved
@example(9, [((1 << 20,), 4)] + [((), 4)] * 50)  # numbers
def test_replicated_tensors_are_spread_evenly(
    world_size: int, shapes: list[tuple[tuple[int, ...], int]]
) -> None:
    tensors = {
        str(at): (whole(shape, tuple(range(world_size))), itemsize)
        for at, (shape, itemsize) in enumerate(shapes)
    }
    layouts = agreed(tensors)
    loads = loads_of(tensors, layouts)
    mean = sum(loads.values()) / world_size
    assert max(loads.values()) <= mean + excess(mean, tensors)
    assert len(set(layouts.values())) < 2 * world_size, "few layouts, however many tensors"


@given(
    st.sampled_from([(1, 4), (1, 7), (2, 2), (2, 4), (4, 2)]),
    st.lists(st.tuples(SIZES, ITEMSIZES), min_size=1, max_size=30),
    st.lists(st.tuples(SIZES, ITEMSIZES), max_size=30),
)
# the first rank has enough of its own
@example((1, 4), [((5,), 8), ((1, 1_000_000), 8)], [((1024, 1024), 4)])
def test_what_all_hold_evens_out_what_few_hold(
    sizes: tuple[int, int],
    few: list[tuple[tuple[int, ...], int]],
    everyones: list[tuple[tuple[int, ...], int]],
) -> None:
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    sharded = {
        f"few.{at}": (true_grid(ranks, [(1, 0)] if shape else [], shape), itemsize)
        for at, (shape, itemsize) in enumerate(few)
    }
    replicated = {
        f"all.{at}": (whole(shape, tuple(range(ranks.numel()))), itemsize)
        for at, (shape, itemsize) in enumerate(everyones)
    }
    tensors = sharded | replicated
    loads = loads_of(tensors, agreed(tensors))
    # No rank can have less than its part of the cells that its replicas hold; the first cells are
    # the largest.
    least = sum(
        math.prod(local_box(grid, grid.holders[0][0])[1]) * itemsize / len(grid.holders[0])  # pyright: ignore[reportOptionalSubscript]
        for grid, itemsize in sharded.values()
    )
    level = max(least, sum(loads.values()) / ranks.numel())
    allowed = excess(level, replicated) + (excess(level, sharded) if sizes[0] > 1 else 0)
    assert max(loads.values()) <= level + allowed


def transformer(grid: Callable[[tuple[int, ...]], Grid]) -> Tensors:
    """24 layers, a billion parameters, and Adam's state, in fp32."""
    width = 1792
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (50257, width),
        "norm.weight": (width,),
    }
    for layer in range(24):
        shapes |= {f"layers.{layer}.attention.{name}.weight": (width, width) for name in "qkvo"}
        shapes |= {
            f"layers.{layer}.mlp.up.weight": (4 * width, width),
            f"layers.{layer}.mlp.up.bias": (4 * width,),
        }
        shapes |= {
            f"layers.{layer}.mlp.down.weight": (width, 4 * width),
            f"layers.{layer}.mlp.down.bias": (width,),
        }
        shapes |= {f"layers.{layer}.norm{index}.weight": (width,) for index in range(2)}
    grids = {shape: grid(shape) for shape in (*shapes.values(), ())}
    tensors: Tensors = {}
    for fqn, shape in shapes.items():
        tensors[f"model.{fqn}"] = grids[shape], 4
        tensors |= {
            f"optimizer.state.{fqn}.{name}": (grids[shape], 4) for name in ("exp_avg", "exp_avg_sq")
        }
        tensors[f"optimizer.state.{fqn}.step"] = grids[()], 4
    return tensors


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("ranks", "sharded", "most"),
    [
        (torch.arange(8).view(8, 1), False, 15),
        (torch.arange(64).view(64, 1), False, 127),
        (torch.arange(64).view(8, 8), True, 20),
        (torch.arange(64).view(1, 64), True, 7),
    ],
    ids=["replicated-8", "replicated-64", "hsdp-8x8", "fsdp-64"],
)
def test_a_large_model_is_balanced_in_few_layouts(
    ranks: torch.Tensor, sharded: bool, most: int
) -> None:
    tensors = transformer(
        lambda shape: true_grid(ranks, [(1, 0)] if sharded and shape else [], shape)
    )
    layouts = {fqn: share.layout for fqn, share in assign_shares(tensors, 0).items()}
    assert len(set(layouts.values())) <= most
    loads = loads_of(tensors, layouts)
    assert max(loads.values()) <= 1.05 * sum(loads.values()) / ranks.numel()
    if not sharded:
        files = {
            (fqn.partition(".")[0], owner)
            for fqn, layout in layouts.items()
            for owner in layout.owners
        }
        assert len(files) <= ranks.numel() + 1, (
            "most ranks have either a part of the model or one of the optimizer"
        )


if __name__ == "__main__":
    sys.exit(run_ranks(sys.argv[1]))
