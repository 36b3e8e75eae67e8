"""The names of a module's state without what torch's wrappers put in front of them.

A wrapper is told by its type, and never by a name: a child of the user's may be called ``module``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import nn

_WRAPPERS: Final = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module", False),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module", False),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod", False),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module", True),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
        True,
    ),
)
"""Modules with their classes that wrap, the child that is wrapped, and whether their own hooks take its name away."""
PARTS: Final = frozenset(child for _, _, child, _ in _WRAPPERS)
"""The parts of names that wrappers add, which a user's own child may have too."""


class WrapperNames:
    """The names of one module's state, as the module has them and without wrappers.

    False where nothing in the module is wrapped, so that all names are the same.
    """

    def __init__(self, module: nn.Module) -> None:
        """Look at a module and all below it; none of them is asked for its state."""
        self._module = module
        self._in_state: dict[str, str] = {}  # prefixes, without wrappers; those of the keys of the state dict
        self._in_tree: dict[str, str] = {}  # those of the modules
        for _, tree, state, name in _walk(module):
            if tree != name:
                self._in_tree[tree] = name
            if state != name:
                self._in_state[state] = name

    def __bool__(self) -> bool:
        return bool(self._in_tree)

    def keys(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """By each key of the module's ``state_dict(keep_vars=True)`` the one without wrappers.

        A name that a hook or a ``state_dict`` of the user's has freed of wrappers already stays as it is.
        """
        own: dict[int, set[str]] = {}
        for module, tree, _, _ in _walk(self._module):
            for tensors in (getattr(module, "_parameters", {}), getattr(module, "_buffers", {})):
                for name, tensor in tensors.items():
                    own.setdefault(id(tensor), set()).add(tree + name)
        names: dict[Any, Any] = {}
        for key, value in state.items():
            known = own.get(id(value), ())
            is_free = key not in known and any(_without(name, self._in_tree) == key for name in known)
            names[key] = key if is_free or not isinstance(key, str) else _without(key, self._in_state)
        return names

    def module(self, name: str) -> str:
        """The name of a module without wrappers, of which all that wrap it have the same."""
        return _without(f"{name}.", self._in_tree)[:-1]


def two_of_one_name(names: Mapping[Any, Any]) -> tuple[Any, Any] | None:
    """Two keys that have one name without wrappers; None if there are none."""
    first: dict[Any, Any] = {}
    for key, name in names.items():
        if first.setdefault(name, key) != key:
            return first[name], key
    return None


def _walk(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, str]]:
    """Every module, with the prefixes that it has among modules, in the state dict, and without wrappers."""
    kinds = [
        (kind, child, hides)
        for home, name, child, hides in _WRAPPERS
        if isinstance(kind := getattr(sys.modules.get(home), name, None), type)
    ]
    wrapped: dict[type, tuple[str | None, bool]] = {}
    left = [(module, "", "", "")]
    while left:
        each, tree, state, name = left.pop()
        yield each, tree, state, name
        kind = type(each)
        if kind not in wrapped:
            found = ((child, hides) for wrapper, child, hides in kinds if issubclass(kind, wrapper))
            wrapped[kind] = next(found, (None, False))
        inner, hides = wrapped[kind]
        for key, child in getattr(each, "_modules", {}).items():
            if child is not None:
                below = f"{tree}{key}.", f"{state}{key}.", f"{name}{key}."
                left.append((child, *below) if key != inner else (child, below[0], state if hides else below[1], name))


def _without(name: str, prefixes: Mapping[str, str]) -> str:
    """A name with the longest of the prefixes that it begins with replaced."""
    end = len(name)
    while (end := name.rfind(".", 0, end)) >= 0:
        if name[: end + 1] in prefixes:
            return prefixes[name[: end + 1]] + name[end + 1 :]
    return name
