"""The differential zoo: saves and loads generated states, and compares them in three ways.

Every leaf with a copy from the moment of the call, the next three steps with a twin that was never
interrupted, and which names share memory. ``run`` gives the verdict on a point: exact, refused (a
typed error at the save, or at a load that changed nothing), hidden (what the optimizer keeps
outside of its ``state_dict`` is lost, to torch as well), unusable (it does not train here), or
WRONG.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import hashlib
import random
import tempfile
import unittest.mock
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from zoo_models import MODELS
from zoo_optimizers import Make, optimizers

import sidesave
from sidesave.errors import IntegrityError, SidesaveError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "mixed": None}
WRAPPERS = ("plain", "ddp", "fsdp")
TARGETS = ("fresh", "used", "nest")
"""There is also ``shared``: a model with the same names, some of them with one memory."""
VERDICTS = ("WRONG", "refused", "unusable", "hidden", "exact")
"""From the worst to the best; a verdict begins with one of these words."""
_LAYERS = (
    nn.Linear,
    nn.Conv2d,
    nn.LSTM,
    nn.Embedding,
    nn.LayerNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
)
_HESSIANS = ("AdaHessian", "SophiaH")
Leaves = dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Point:
    """A state that is saved, and the objects that it is loaded into."""

    optimizer: str
    model: str = "Plain"
    dtype: str = "fp32"
    wrapper: str = "plain"
    target: str = "fresh"
    overlap: bool = False


def points(seed: int, wrappers: Iterable[str] = WRAPPERS, only: str = "") -> list[Point]:
    """Every optimizer in every dtype and wrapper; the seed draws the rest."""
    made: list[Point] = []
    for optimizer in optimizers():
        for dtype in DTYPES:
            for wrapper in wrappers:
                chance = random.Random(f"{seed} {optimizer} {dtype} {wrapper}")
                model = chance.choice([*MODELS])
                if "Sparse" in optimizer:
                    model = "SparseGradients"
                elif optimizer.startswith(("torchao", "bitsandbytes")) and chance.random() < 0.7:
                    model = "Large"  # smaller states are not quantised
                target = chance.choice(TARGETS if wrapper == "plain" else TARGETS[:2])
                if model == "SharesNoMemory":
                    target = "shared"
                elif model == "PartlyFrozen":
                    target = "fresh"
                made.append(Point(optimizer, model, dtype, wrapper, target, chance.random() < 0.5))
    return [point for point in made if only in point.optimizer]


class Training:
    """A model and an optimizer, and the steps that they take."""

    def __init__(self, point: Point, make: Make, seed: int) -> None:
        torch.manual_seed(seed)
        dtype = DTYPES[point.dtype]
        # a cast would give each name a memory of its own
        torch.set_default_dtype(dtype or torch.float32)
        model = MODELS[point.model]()
        torch.set_default_dtype(torch.float32)
        layers = [module for module in model.modules() if isinstance(module, _LAYERS)]
        for number, layer in enumerate(layers):
            if dtype is None and number % 2:
                layer.bfloat16()
            layer.register_forward_pre_hook(_cast_inputs)
        self.module = model
        if point.wrapper == "fsdp":
            fully_shard(model)
        self.model = DistributedDataParallel(model) if point.wrapper == "ddp" else model
        self.optimizer = make(self.model)
        self.is_frozen = self.model is model and hasattr(model, "base")
        self._needs_graph = any(name in point.optimizer for name in _HESSIANS)

    def step(self, number: int) -> torch.Tensor:
        """Train on the batch of this number; its loss."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(1000 * number + rank)
        batch = torch.randn(4, 8)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(batch).float().pow(2).mean()
            loss.backward(create_graph=self._needs_graph)
            loss = loss.detach()
            # LBFGS decides by it whether to go on: each rank must decide the same
            if dist.is_initialized():
                dist.all_reduce(loss)
            return loss

        loss = closure()
        state = torch.get_rng_state()
        self.optimizer.step(closure)  # type: ignore[call-overload]
        torch.set_rng_state(state)
        return loss

    def state(self, step: int = 0) -> dict[str, Any]:
        """Return the state as it is given to ``save`` and to ``load(into=)``."""
        state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": step}
        if self.is_frozen:
            del state["model"]
            state |= {"base": sidesave.Frozen(self.module.base), "head": self.module.head}
        return state

    def values(self) -> dict[str, Any]:
        """All that a checkpoint must bring back, as it stands in the objects themselves."""
        names = {
            id(parameter): name
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
        }
        model = {**self.module.state_dict(keep_vars=True)}
        # it takes the buffers of rank 0 next
        if isinstance(self.model, DistributedDataParallel) and dist.get_rank():
            model = {
                name: value for name, value in model.items() if isinstance(value, nn.Parameter)
            }
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        state = {
            names.get(id(key), str(key)): value
            for key, value in self.optimizer.state.items()
            if not _empty(value)
        }
        return {"model": model, "state": state, "groups": groups}

    def state_dicts(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load_state_dicts(self, state: Any) -> None:
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])


def _empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _cast_inputs(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next(layer.parameters()).dtype
    return tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs)


def _eager(call: Any = None, **_: object) -> Any:
    """Stand in for ``torch.compile``: with it the first step of some optimizers takes minutes."""
    return call or (lambda call: call)


# Comparison ---------------------------------------------------------------------------------------


def leaves(value: Any, at: str = "") -> Leaves:
    """Return each leaf by its path: its class, and a tensor's dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return {path: _facts(tensor) for path, tensor in _tensors(value, at)}
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {
            at: (
                type(value).__name__,
                repr(value) if isinstance(value, (int, float, str, bytes)) else "",
            )
        }
    found: Leaves = {f"{at} is": (_container(value), len(value))}
    for key, each in items:
        found |= leaves(each, f"{at}.{key}")
    return found


def _container(value: Any) -> str:
    return "dict" if isinstance(value, Mapping) else type(value).__name__


def _tensors(tensor: torch.Tensor, at: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor, or those that it is made of."""
    if isinstance(tensor, DTensor):
        yield f"{at} as {tensor.placements}", tensor.to_local().detach()
    elif hasattr(tensor, "__tensor_flatten__"):
        # not detached: torchao's copy some of what they are made of
        for name in cast("Any", tensor).__tensor_flatten__()[0]:
            yield from _tensors(getattr(tensor, name), f"{at} of {type(tensor).__name__}.{name}")
    elif tensor.layout is torch.sparse_coo:
        yield from (
            (f"{at} indices", tensor._indices()),
            (f"{at} values", tensor.detach()._values()),
        )
    else:
        yield at, tensor.detach()


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    kind = "Tensor" if isinstance(tensor, nn.Parameter) else type(tensor).__name__
    plain = tensor.as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256(
        bytes(plain.tolist()) if plain.numel() < 64 else plain.numpy().tobytes()
    ).hexdigest()[:12]
    sample = tensor.flatten()[:2].tolist()
    return kind, str(tensor.dtype), tuple(tensor.shape), digest, repr(sample)


def shared_memory(value: Any, at: str = "") -> set[frozenset[str]]:
    """The names that share memory with others."""
    regions: list[tuple[int, int, str]] = []

    def note(value: Any, at: str) -> None:
        if isinstance(value, torch.Tensor):
            for path, tensor in _tensors(value, at):
                with contextlib.suppress(RuntimeError, NotImplementedError):
                    if tensor.numel():
                        last = sum(
                            (size - 1) * step
                            for size, step in zip(tensor.shape, tensor.stride(), strict=True)
                        )
                        end = tensor.data_ptr() + (last + 1) * tensor.itemsize
                        regions.append((tensor.data_ptr(), end, path))
        elif isinstance(value, Mapping):
            for key, each in value.items():
                note(each, f"{at}.{key}")
        elif isinstance(value, (list, tuple)):
            for number, each in enumerate(value):
                note(each, f"{at}.{number}")

    note(value, at)
    shared: list[set[str]] = []
    reach = 0
    for begin, end, path in sorted(regions):
        if begin >= reach:
            shared.append(set())
        shared[-1].add(path)
        reach = max(reach, end)
    return {frozenset(names) for names in shared if len(names) > 1}


def difference(want: Leaves, got: Leaves) -> str:
    """The first two leaves that differ; "" if none does."""
    names = [name for name in {**want, **got} if want.get(name) != got.get(name)]
    facts = [f"{name} was {want.get(name)}, is {got.get(name)}" for name in names[:2]]
    return "; ".join(facts) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


# Verdicts -----------------------------------------------------------------------------------------


class Zoo:
    """Runs points one after the other, with checkpointers that stay; on each rank of a job the same
    points.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._made = optimizers()
        self._checkpointers: dict[bool, sidesave.Checkpointer] = {}
        self._count = 0

    def __enter__(self) -> Zoo:
        return self

    def __exit__(self, *_: object) -> None:
        while self._checkpointers:
            self._checkpointers.popitem()[1].close()

    def run(self, point: Point) -> str:
        """The verdict on a point, the worst of all ranks; an optimizer that cannot train its model
        gets another.
        """
        verdict = self._run(point)
        for model in ("Plain", "Tied"):  # the latter has matrices only
            if verdict.startswith("unusable"):
                verdict = self._run(replace(point, model=model))
        return verdict

    def _run(self, point: Point) -> str:
        with warnings.catch_warnings(), unittest.mock.patch.object(torch, "compile", _eager):
            warnings.simplefilter("ignore")
            for phase in self._phases(point):
                try:
                    verdict = phase()
                except Exception as error:  # noqa: BLE001 - it is a verdict
                    verdict = f"WRONG: {type(error).__name__}: {error}"
                finally:
                    torch.set_default_dtype(torch.float32)
                verdict = min(_of_all_ranks(verdict), key=_rank_of)
                if verdict:
                    return " ".join(verdict.split())[:600]
        return "exact"

    def _checkpointer(self, overlap: bool) -> sidesave.Checkpointer:
        if overlap not in self._checkpointers:
            folder = self._folder / f"overlap-{overlap}"
            self._checkpointers[overlap] = sidesave.Checkpointer(
                folder, staging=sidesave.StagingOptions(overlap=overlap)
            )
        return self._checkpointers[overlap]

    def _phases(self, point: Point) -> Iterator[Callable[[], str]]:
        """The phases of a point, in order; each gives a verdict that ends it, or ""."""
        make, twin, loaded = self._made[point.optimizer], _Held(), _Held()
        want: Leaves = {}
        moment: dict[str, Any] = {}

        def train() -> str:
            try:
                twin.value = Training(point, make, 1)
                for number in range(3):
                    twin.value.step(number)
                twin.value.values()  # what has no state is no optimizer
                if point.target != "nest":
                    into = (
                        replace(point, model="SharesMemory") if point.target == "shared" else point
                    )
                    loaded.value = Training(into, make, 1 if point.target == "fresh" else 2)
                    for number in range(90, 92 if point.target == "used" else 90):
                        loaded.value.step(number)
            except Exception as error:  # noqa: BLE001 - not the fault of a checkpoint
                return f"unusable: {type(error).__name__}: {error}"
            return ""

        def save() -> str:
            checkpointer, saves = self._checkpointer(point.overlap), []
            try:
                still = (3, 3, 3) if twin.value.is_frozen else ()  # by then it is held
                # each after a change: what is remembered of a save goes into the next
                for number in (*still, 4, 5, 6):
                    self._count += 1
                    if number == 6:
                        want.update(leaves(twin.value.values()))
                        moment.update(
                            shared=shared_memory(twin.value.values()), stock=_stock(twin.value)
                        )
                        moment.update(nest=_nest(twin.value))
                    saves.append(checkpointer.save(self._count, twin.value.state(self._count)))
                    if 3 < number < 6:
                        twin.value.step(number)
            except SidesaveError as error:
                return f"refused: {type(error).__name__}: {error}"
            moment["later"] = [_step(twin.value, number) for number in (7, 8, 9)]
            try:
                moment["path"] = [save.committed.result(300) for save in saves][-1].path
            except SidesaveError as error:
                return f"refused: {type(error).__name__}: {error}"
            return ""

        def load_nest() -> str:
            nest = sidesave.load(moment["path"])
            got = leaves({"model": nest["model"], "optimizer": nest["optimizer"]})
            wrong = difference(moment["nest"], got)
            return f"WRONG: nest: {wrong}" if wrong else ""

        def load() -> str:
            before = leaves(loaded.value.values())
            try:
                sidesave.load(moment["path"], into=loaded.value.state())
            except IntegrityError:
                raise  # of what was committed just now
            except SidesaveError as error:
                changed = difference(before, leaves(loaded.value.values()))
                text = f"{type(error).__name__}: {error}"
                if changed:
                    return f"WRONG: half loaded: {text}"
                return f"{'refused' if point.target == 'shared' else 'WRONG'}: at load: {text}"
            wrong = difference(want, leaves(loaded.value.values()))
            return f"WRONG: leaf: {wrong}" if wrong else ""

        def compare_memory() -> str:
            got, stock = shared_memory(loaded.value.values()), _reload(point, make, moment["stock"])
            lost = {
                names
                for names in moment["shared"] ^ got
                if stock is None or names not in moment["shared"] ^ stock[0]
            }
            moment["by torch"] = stock and stock[1]
            return f"WRONG: shares memory: {sorted(map(sorted, lost))}" if lost else ""

        def go_on() -> str:
            got = [_step(loaded.value, number) for number in (7, 8, 9)]
            wrong = next(filter(None, map(difference, moment["later"], got)), "")
            if not wrong:
                return ""
            by_torch = moment["by torch"]
            is_hidden = by_torch is None or any(map(difference, moment["later"], by_torch))
            return f"{'hidden' if is_hidden else 'WRONG'}: a later step: {wrong}"

        yield train
        yield save
        if point.target == "nest":
            yield load_nest
        else:
            yield load
            yield compare_memory
            yield go_on


@dataclass
class _Held:
    value: Any = None


def _step(training: Training, number: int) -> Leaves:
    """Take a step; the loss and all leaves after it."""
    try:
        loss = training.step(number)
    except Exception as error:  # noqa: BLE001 - compared as an outcome
        return {"error": (type(error).__name__, str(error))}
    return leaves({"loss": loss, **training.values()})


def _stock(training: Training) -> Any:
    with contextlib.suppress(Exception):  # some optimizers cannot be saved by torch either
        return training.state_dicts()


def _nest(training: Training) -> Leaves:
    model, optimizer = training.model.state_dict(), training.optimizer.state_dict()
    # enums come back as their values, with a warning
    for group in optimizer.get("param_groups", ()):
        group.update(
            {key: value.value for key, value in group.items() if isinstance(value, enum.Enum)}
        )
    return leaves({"model": model, "optimizer": optimizer})


def _reload(
    point: Point, make: Make, state: Any
) -> tuple[set[frozenset[str]], list[Leaves]] | None:
    """What torch's own ``load_state_dict`` makes of the same moment: shared memory, and three
    steps.
    """
    try:
        other = Training(point, make, 1)
        other.load_state_dicts(state)
    except Exception:  # noqa: BLE001 - then torch is no judge
        return None
    return shared_memory(other.values()), [_step(other, number) for number in (7, 8, 9)]


def _of_all_ranks(verdict: str) -> list[str]:
    if not dist.is_initialized():
        return [verdict]
    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, verdict)
    return verdicts


def _rank_of(verdict: str) -> int:
    return VERDICTS.index(verdict.partition(":")[0]) if verdict else len(VERDICTS)


def run_on_rank(rank: int, folder: str, chosen: list[Point]) -> None:
    """One of two ranks goes through points; rank 0 writes the verdict on each to a file, as it is
    known.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/meeting")
    with Zoo(f"{folder}/runs") as zoo, Path(folder, "verdicts").open("a") as verdicts:
        for point in chosen:
            verdict = zoo.run(point)
            if rank == 0:
                print(verdict, file=verdicts, flush=True)
    dist.destroy_process_group()


def run_together(chosen: list[Point]) -> Iterator[tuple[Point, str]]:
    """The verdicts on points of two ranks; one that ends the processes is WRONG, and the rest is
    not run.
    """
    import forks

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "verdicts").touch()
        problem = ""
        try:
            forks.spawn(run_on_rank, folder, chosen)
        except AssertionError as error:
            problem = f"WRONG: ended: {' '.join(str(error)[-500:].split())}"
        verdicts = Path(folder, "verdicts").read_text().splitlines()
        yield from zip(chosen, [*verdicts, problem] if problem else verdicts, strict=False)
