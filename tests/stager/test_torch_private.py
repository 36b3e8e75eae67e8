"""Our own versions of torch's private code do the same as torch's."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from states import difference
from torch import nn

from sidesave.stager import torch_private


class Versioned(nn.Module):
    """A module that looks at its metadata, has extra state, and takes the keys of an older
    version.
    """

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[Any] = []
        self.inner = nn.Linear(1, 1)

    def get_extra_state(self) -> Any:
        return {"seen": len(self.seen)}

    def set_extra_state(self, state: Any) -> None:
        self.seen.append(state)

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        self.seen.append((prefix, dict(local_metadata), list(state_dict)))
        if f"{prefix}old.weight" in state_dict:
            state_dict[f"{prefix}inner.weight"] = state_dict.pop(f"{prefix}old.weight")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def model() -> nn.Module:
    """Modules below modules, one of them twice, one absent, and names that look alike or have a
    dot.
    """
    inner = nn.ModuleDict(
        {"a": Versioned(), "a1": Versioned(), "b": nn.Sequential(Versioned(), nn.BatchNorm1d(2))}
    )
    shared = nn.Linear(2, 2)
    whole = nn.ModuleDict({"inner": inner, "one": shared, "other": shared})
    whole._modules["with.a.dot"] = nn.Linear(2, 1)
    whole._modules["with"] = nn.ModuleDict({"a": nn.Linear(1, 1)})
    whole.register_module("nothing", None)
    torch.manual_seed(0)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    return whole


def same(state: Any) -> Any:
    return state


def without_metadata(state: Any) -> Any:
    return OrderedDict(state)


def with_more(state: Any) -> Any:
    state["inner.a.more"], state["more"], state["inner.a.inner.x.y"] = (
        torch.ones(1),
        torch.ones(1),
        torch.ones(1),
    )
    return state


def with_less(state: Any) -> Any:
    del state["inner.b.0.weight"], state["one.bias"], state["inner.a1._extra_state"]
    return state


def of_another_shape(state: Any) -> Any:
    state["inner.a.weight"] = torch.ones(3)
    return state


def of_an_older_version(state: Any) -> Any:
    state["inner.a.old.weight"] = state.pop("inner.a.inner.weight")
    return state


CHANGES = [same, without_metadata, with_more, with_less, of_another_shape, of_an_older_version]


def result(target: nn.Module, load: Callable[..., Any], state: Any, strict: bool) -> Any:
    """The arguments of all hooks, the result or error, and the state after the load."""
    seen: list[Any] = []
    for name, each in target.named_modules():
        each.register_load_state_dict_post_hook(
            lambda module, keys, name=name: seen.append(
                (name, list(keys.missing_keys), list(keys.unexpected_keys))
            )
        )
        each._register_load_state_dict_pre_hook(
            lambda state, prefix, about, *rest, name=name: seen.append(
                (name, prefix, dict(about), list(state))
            )
        )
    try:
        answer = load(target, state, strict=strict)
        seen.append((answer.missing_keys, answer.unexpected_keys))
    except Exception as error:  # noqa: BLE001 - whatever torch raises
        seen.append((type(error), str(error)))
    seen += [each.seen for each in target.modules() if isinstance(each, Versioned)]
    return seen, dict(target.state_dict())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_is_loaded_as_torch_does_it(change: Callable[[Any], Any], strict: bool) -> None:
    saved = change(model().state_dict())
    target = model()
    nn.init.zeros_(target.get_parameter("inner.a.weight"))
    torchs = result(copy.deepcopy(target), nn.Module.load_state_dict, copy.deepcopy(saved), strict)
    ours = result(target, torch_private.load_module, saved, strict)
    assert torchs[0] == ours[0]
    assert not difference(torchs[1], ours[1])


def test_a_module_with_its_own_load_state_dict_is_loaded_by_that() -> None:
    class Own(nn.Linear):
        def load_state_dict(
            self, state_dict: Any, strict: bool = True, assign: bool = False
        ) -> Any:
            return "own"

    patched: Any = nn.Linear(1, 1)
    patched.load_state_dict = lambda state, strict: "patched"
    assert torch_private.load_module(Own(1, 1), {}, strict=True) == "own"
    assert torch_private.load_module(patched, {}, strict=True) == "patched"


class Counted(str):
    """A key that counts how often it is looked at."""

    __slots__ = ()
    looks = 0

    def startswith(self, *args: Any) -> bool:
        Counted.looks += 1
        return super().startswith(*args)

    def find(self, *args: Any) -> int:
        Counted.looks += 1
        return super().find(*args)


def test_the_keys_of_a_module_are_not_compared_with_each_of_its_children() -> None:
    looks: list[int] = []
    for count in (50, 400):
        target = nn.ModuleList(nn.Linear(1, 1) for _ in range(count))
        Counted.looks = 0
        state: dict[str, Any] = {Counted(key): value for key, value in target.state_dict().items()}
        torch_private.load_module(target, state, strict=True)
        looks.append(Counted.looks)
    assert looks[1] == 8 * looks[0] > 0
