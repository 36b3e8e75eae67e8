"""A model bank: several checkpoints loaded into one state, all of them or none."""

import logging
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.distributed as dist
from loads import Loader, Trunk, flip_bit, sharded, values, with_manifest
from states import difference
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from trainers import save
from worlds import cut, write_world

import sidesave
from sidesave import Source, load_sources
from sidesave.client.loading import sources
from sidesave.client.loading.load import LoadRequest
from sidesave.errors import (
    CheckpointNotFoundError,
    FormatVersionError,
    IntegrityError,
    InvalidArgumentError,
    StateMismatchError,
)
from sidesave.writer_daemon.format.layout import Layout


def trained(seed: int) -> dict[str, Any]:
    """A model, its optimizer and what belongs to a run, after some steps."""
    model = Trunk(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    for _ in range(seed):
        optimizer.zero_grad()
        model.head(model.backbone(torch.randn(4, 4))).square().mean().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "loader": Loader(seed), "epoch": seed}


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs ``a`` to ``c``: a whole one, one whose model is wrapped, and one that has a head by
    another name.
    """
    folder = tmp_path_factory.mktemp("bank")
    other = trained(2)
    states = {
        "a": trained(1),
        "b": {**other, "model": nn.ModuleDict({"inner": other["model"]})},
        "c": {"table": trained(3)["model"].head, "note": "of c"},
    }
    for name, state in states.items():
        with sidesave.Checkpointer(folder / name) as checkpointer:
            checkpointer.save(5, {**state, **({"epoch": 0} if "epoch" in state else {})})
            checkpointer.save(7, state)
    return folder


def parts(model: Any) -> tuple[Any, Any]:
    return values(model.backbone), values(model.head)


def assert_untouched(
    into: dict[str, Any], kind: type[Exception], *words: str, **options: Any
) -> str:
    """That loading ``options["of"]`` fails as told, and has changed nothing."""
    before, objects = values(into), dict(into)
    with pytest.raises(kind) as caught:
        load_sources(options.pop("of"), into, **options)
    for word in words:
        assert word in str(caught.value)
    assert difference(before, values(into)) == ""
    assert all(into[name] is value for name, value in objects.items())
    return str(caught.value)


def test_a_state_is_put_together_from_three_runs(bank: Path):
    into = trained(4)
    found = load_sources(
        [
            Source(bank / "a"),
            Source(bank / "b", include="model.inner.backbone", rename={"model.inner": "model"}),
            Source(bank / "c" / "step-00000007", include="table", rename={"table": "model.head"}),
        ],
        into,
    )
    assert found is into
    assert difference(values(trained(1)["optimizer"]), values(into["optimizer"])) == ""
    assert difference(parts(trained(2)["model"])[0], parts(into["model"])[0]) == ""
    assert difference(parts(trained(3)["model"])[1], parts(into["model"])[1]) == ""
    assert (into["epoch"], into["loader"].position) == (1, 1)


@pytest.mark.parametrize(
    "wrong", [{"path": "runs/a"}, "runs/a", Path("runs/a"), nn.Linear(99, 99), None, 5], ids=str
)
def test_what_is_no_source_is_refused_by_name(tmp_path: Path, wrong: Any):
    with sidesave.CheckpointManager(tmp_path / "run", {"x": 1}) as manager:
        for given in (wrong, [wrong]):
            told = (
                r"^sources must be sidesave.Source\(path, ...\), or several in a list, not "
                r".{1,120}$"
            )
            with pytest.raises(InvalidArgumentError, match=told):
                manager.restore(sources=given)
            with pytest.raises(InvalidArgumentError, match=told):
                load_sources(given, {"x": 1})


def test_one_source_needs_no_list(bank: Path, tmp_path: Path):
    state = {"note": "", "table": nn.Linear(4, 2)}
    with sidesave.CheckpointManager(tmp_path / "run", state) as manager:
        assert manager.restore(sources=Source(bank / "c", include="note")) == 0
    assert state["note"] == "of c"


def test_of_what_two_have_the_later_counts_and_the_earlier_is_not_read(bank: Path, tmp_path: Path):
    import shutil

    first = shutil.copytree(bank / "a" / "step-00000007", tmp_path / "first")
    flip_bit(first / "model.rank-00000.safetensors", -1)
    whole = Source(bank / "b", rename={"model.inner": "model"})
    into = trained(4)
    load_sources([Source(first), whole], into)
    assert difference(values(trained(2)), values(into)) == ""
    assert_untouched(into, IntegrityError, "model.rank-00000", of=[whole, Source(first)])
    load_sources(
        [
            Source(bank / "b", 5, rename={"model.inner": "model"}),
            Source(bank / "a", include="epoch"),
        ],
        into,
    )
    assert into["epoch"] == 1


def test_an_optimizer_and_an_object_take_all_of_their_state_from_the_last(bank: Path):
    into = {name: item for name, item in trained(4).items() if name != "model"}
    load_sources(
        [Source(bank / "b", exclude="epoch"), Source(bank / "a", include=["optimizer", "epoch"])],
        into,
    )
    assert difference(values(trained(1)["optimizer"]), values(into["optimizer"])) == ""
    assert (into["epoch"], into["loader"].position) == (1, 2)


def test_each_source_casts_for_itself(bank: Path):
    into = {"model": Trunk(0).bfloat16(), "other": Trunk(0)}
    load_sources(
        [
            Source(bank / "a", include="model", dtype=torch.bfloat16),
            Source(bank / "a", include="model", rename={"model": "other"}),
        ],
        into,
    )
    expected = trained(1)["model"]
    assert difference(values(expected), values(into["other"])) == ""
    assert difference(values(expected.bfloat16()), values(into["model"])) == ""


# All or nothing -----------------------------------------------------------------------------------


def test_what_no_source_has_is_told_with_what_is_near_and_nothing_is_touched(bank: Path):
    into = {**trained(4), "modle": nn.Linear(2, 2), "extra": torch.zeros(2)}
    message = assert_untouched(
        into, StateMismatchError, "modle: missing", "extra: missing", of=[Source(bank / "a")]
    )
    assert "(near: model" in message
    half = Source(bank / "a", include="model.backbone")
    assert_untouched(
        {"model": Trunk(0)}, StateMismatchError, "model.head.weight: missing", of=[half, half]
    )


def test_not_strict_leaves_what_no_source_has_and_tells_it(
    bank: Path, caplog: pytest.LogCaptureFixture
):
    into = {**trained(4), "extra": torch.ones(2)}
    with caplog.at_level(logging.WARNING):
        loaded = sources.read_sources(
            [Source(bank / "a", exclude="model.head")], into, strict=False
        )
    assert set(loaded.missing) == {"model.head.weight", "model.head.bias", "extra"}
    assert "model.head.weight" in caplog.text
    loaded.apply()
    assert difference(parts(trained(4)["model"])[1], parts(into["model"])[1]) == ""
    assert difference(parts(trained(1)["model"])[0], parts(into["model"])[0]) == ""
    assert difference(torch.ones(2), into["extra"]) == ""


def test_what_a_source_has_too_much_is_an_error_unless_it_was_chosen(bank: Path):
    into: dict[str, Any] = {"model": nn.ModuleDict({"backbone": Trunk(4).backbone})}
    assert_untouched(
        into,
        StateMismatchError,
        "model.head.weight: unexpected",
        str(bank / "a"),
        of=[Source(bank / "a")],
    )
    for chosen in (Source(bank / "a", include="model"), Source(bank / "a", strict=False)):
        load_sources([chosen], into)
        assert difference(parts(trained(1)["model"])[0], values(into["model"]["backbone"])) == ""


def test_a_source_of_which_nothing_is_taken_is_an_error(bank: Path):
    into: dict[str, Any] = {"model": Trunk(4)}
    whole = Source(bank / "a")
    assert_untouched(into, StateMismatchError, "'table'", of=[whole, Source(bank / "c")])
    hint = 'rename={"model.inner": "model"}'
    assert_untouched(
        into, StateMismatchError, hint, of=[whole, Source(bank / "b", include="model")]
    )
    load_sources([whole, Source(bank / "c", strict=False)], into)


def test_a_mismatch_in_any_of_them_touches_nothing(bank: Path):
    into = trained(4)
    into["model"].head = nn.Linear(4, 3)
    assert_untouched(
        into,
        StateMismatchError,
        "model.head.weight: shape [2, 4] in the checkpoint, [3, 4] in the target",
        of=[Source(bank / "a", include=["loader", "epoch"]), Source(bank / "a")],
    )
    optimizer = into.pop("optimizer")
    # what does not fit was left out
    load_sources([Source(bank / "a", exclude="model.head")], into, strict=False)
    assert optimizer is not None and into["epoch"] == 1


def test_damage_in_any_of_them_touches_nothing(bank: Path, tmp_path: Path):
    import shutil

    broken = shutil.copytree(bank / "c" / "step-00000007", tmp_path / "broken")
    flip_bit(broken / "table.rank-00000.safetensors", -1)
    last = Source(broken, include="table", rename={"table": "model.head"})
    assert_untouched(
        trained(4), IntegrityError, "table.rank-00000.safetensors", of=[Source(bank / "a"), last]
    )
    assert_untouched(
        trained(4), IntegrityError, "table", of=[last, Source(bank / "a", exclude="model.head")]
    )


def test_an_object_that_raises_leaves_the_others_as_they_were(bank: Path):
    into = {**trained(4), "loader": Loader(9, stubborn=True)}
    before = values(into)
    with pytest.raises(
        StateMismatchError, match=r"loader: this Loader raised RuntimeError .* does not want to"
    ):
        load_sources([Source(bank / "a"), Source(bank / "b", include="optimizer")], into)
    assert difference(before, values(into)) == ""


# Bad input ----------------------------------------------------------------------------------------


def test_bad_sources_are_refused(bank: Path, tmp_path: Path):
    into = trained(4)
    assert_untouched(into, InvalidArgumentError, "no sources", of=[])
    assert_untouched(
        into,
        InvalidArgumentError,
        "sources must be sidesave.Source(path, ...)",
        of=[str(bank / "a")],
    )
    assert_untouched(
        into,
        CheckpointNotFoundError,
        "nothing at this path",
        of=[Source(bank / "a"), Source(tmp_path / "x")],
    )
    assert_untouched(into, CheckpointNotFoundError, "run directories a, b, c", of=[Source(bank)])
    assert_untouched(into, CheckpointNotFoundError, "there are [5, 7]", of=[Source(bank / "a", 6)])
    for options in (
        {"rename": 3},
        {"dtype": torch.int8},
        {"step": -1},
        {"step": "latest"},
        {"rename": {"": "x"}},
    ):
        with pytest.raises(InvalidArgumentError):
            Source(bank / "a", **options)  # pyright: ignore[reportArgumentType]
    for target in (None, [1], nn.Linear(1, 1)):
        with pytest.raises(InvalidArgumentError, match="into"):
            load_sources([Source(bank / "a")], target)  # pyright: ignore[reportArgumentType]


def test_a_newer_format_and_pickled_values_are_told(bank: Path, tmp_path: Path):
    import shutil

    newer = shutil.copytree(bank / "a" / "step-00000007", tmp_path / "newer")
    with_manifest(newer, lambda body: body.update(version=2))
    assert_untouched(trained(4), FormatVersionError, "version 2", of=[Source(newer)])
    save(tmp_path / "run", {"odd": {"range": range(3)}}, allow_pickle=True)
    into: dict[str, Any] = {"odd": {"range": None}}
    assert_untouched(
        into, sidesave.errors.UnsupportedValueError, "odd.range", of=[Source(tmp_path / "run")]
    )
    load_sources([Source(tmp_path / "run")], into, allow_pickle=True)
    assert into["odd"]["range"] == range(3)


# Ranks --------------------------------------------------------------------------------------------


def test_as_a_rank_its_own_items_come_from_each_source(tmp_path: Path):
    def spread(fqn: str, tensor: torch.Tensor) -> Layout:
        return cut(tensor.shape, 2)

    for name in ("a", "b"):
        states = [
            {"w": torch.arange(4.0), f"seed of {name}": 10 * rank + ord(name)} for rank in range(2)
        ]
        write_world(tmp_path / name, states, spread)
    for rank in range(3):
        into: dict[str, Any] = {"w": torch.zeros(4), "seed of a": 0, "seed of b": 0}
        sources.read_sources(
            [Source(tmp_path / "a"), Source(tmp_path / "b")], into, rank=rank
        ).apply()
        own = 10 * rank if rank < 2 else 0
        assert (into["seed of a"], into["seed of b"]) == (own + ord("a"), own + ord("b"))


def test_a_stage_of_a_pipeline_takes_its_own_under_other_names(tmp_path: Path):
    layers = {f"layers.{n}.weight": torch.full((2, 2), float(n)) for n in range(4)}
    states = [
        {
            "model": {name: tensor for name, tensor in layers.items() if int(name[7]) // 2 == rank},
            "head": {"n": rank},
        }
        for rank in range(2)
    ]
    path = write_world(
        tmp_path,
        states,
        lambda fqn, tensor: Layout((int(fqn.split(".")[2]) // 2,)),
        alike=lambda rank: str(rank),
    )
    for rename in ({"model.layers": "model.blocks"}, lambda fqn: fqn.replace("layers", "blocks")):
        into = {
            "model": {"blocks.1.weight": torch.zeros(2, 2), "blocks.2.weight": torch.zeros(2, 2)}
        }
        loaded = LoadRequest(into=into, rename=rename).read(path)
        loaded.apply()
        assert [tensor[0, 0].item() for tensor in into["model"].values()] == [1, 2]
        assert loaded.missing == loaded.unexpected == ()
        into = {"model": {"blocks.9.weight": torch.zeros(2, 2)}}
        with pytest.raises(StateMismatchError, match=r"model\.blocks\.9\.weight: missing"):
            LoadRequest(into=into, rename=rename).read(path)


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def load_sharded(rank: int, world: int, bank: Path, folder: Path) -> None:
    mesh = dist.init_device_mesh("cpu", (world,))
    expected = {seed: whole(trained(seed)["model"]) for seed in (1, 2, 3)}

    target = nn.ModuleDict({"inner": sharded(8, mesh)})
    sidesave.load(f"{bank}/a/step-00000007", into={"net": target}, rename={"model": "net.inner"})
    assert difference(expected[1], whole(target["inner"])) == ""
    assert all(isinstance(parameter, DTensor) for parameter in target.parameters())

    half = sharded(8, mesh, torch.bfloat16)
    sidesave.load(
        f"{bank}/b/step-00000007",
        into={"model": half},
        rename={"model.inner": "model"},
        dtype=torch.bfloat16,
    )
    cast = {name: t.bfloat16() if t.is_floating_point() else t for name, t in expected[2].items()}
    assert difference(cast, whole(half)) == ""

    big = distribute_tensor(torch.zeros(1024, 512), mesh, [Shard(0)], src_data_rank=None)
    loaded = LoadRequest(into={"x": {"y.w": big}}, rename={"big": "x.y"}, rank=rank).read(
        f"{folder}/step-00000001"
    )
    assert loaded.nbytes_read < 0.6 * big.nbytes, "this rank's half, and what it takes to find it"
    loaded.apply()
    assert torch.equal(big.full_tensor(), torch.arange(1024.0 * 512).reshape(1024, 512))

    state: dict[str, Any] = {"model": sharded(8, mesh)}
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
    load_sources(
        [
            Source(f"{bank}/a", include=["model", "optimizer"]),
            Source(
                f"{bank}/b", include="model", exclude="*.head.*", rename={"model.inner": "model"}
            ),
            Source(
                f"{bank}/c", include="table", rename=lambda fqn: fqn.replace("table", "model.head")
            ),
        ],
        state,
    )
    for part, seed in (("backbone", 2), ("head", 3)):
        found = {name: tensor for name, tensor in whole(state["model"]).items() if part in name}
        assert (
            difference(
                {name: tensor for name, tensor in expected[seed].items() if part in name}, found
            )
            == ""
        )
    moments = trained(1)["optimizer"].state_dict()["state"]
    for number, moment in state["optimizer"].state_dict()["state"].items():
        assert isinstance(moment["exp_avg"], DTensor)
        assert difference(moments[number]["exp_avg"], moment["exp_avg"].full_tensor()) == ""
        assert moment["step"] == 1
    with pytest.raises(StateMismatchError, match=r"rename=\{\"model.inner\": \"model\"\}"):
        sidesave.load(f"{bank}/b/step-00000007", into={"model": sharded(8, mesh)})


def test_sharded_targets_take_their_parts_under_other_names_and_from_several_runs(
    bank: Path, tmp_path: Path
):
    save(tmp_path, {"big": {"w": torch.arange(1024.0 * 512).reshape(1024, 512)}})
    forks.spawn_group(load_sharded, 2, str(bank), str(tmp_path))


def test_a_later_source_replaces_a_part_of_plain_data_that_an_earlier_one_gave_whole(
    tmp_path: Path,
):
    for name, first in (("a", 1), ("b", 10)):
        save(
            tmp_path / name,
            {"x": {"p": [first, first + 1, [first + 2]], "q": {"r": [first], "s": first}}},
        )
    into: dict[str, Any] = {"x": {"p": [0], "q": {"r": [], "s": 0}}}
    load_sources([Source(tmp_path / "a"), Source(tmp_path / "b", include="x.p")], into)
    assert into == {"x": {"p": [10, 11, [12]], "q": {"r": [1], "s": 1}}}
    load_sources([Source(tmp_path / "a"), Source(tmp_path / "b", include="x.q.s")], into)
    assert into == {"x": {"p": [1, 2, [3]], "q": {"r": [1], "s": 10}}}
