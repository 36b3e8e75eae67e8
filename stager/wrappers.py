"""Removes the prefixes that torch's wrappers add to the names of a module's state.

A wrapper is recognized by its type, never by its name: a user's submodule may be called ``module``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import nn

from sidesave.errors import UnsupportedValueError

_WRAPPERS: Final = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module", False),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module", False),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod", False),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
        True,
    ),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
        True,
    ),
)
"""Wrapper classes' module and name, the wrapped child's name, and whether their hooks remove it."""
PARTS: Final = frozenset(child for _, _, child, _ in _WRAPPERS)
"""The name parts that wrappers add; a user's own submodule may have such a name."""


class WrapperNames:
    """Maps names of a module's state to names without wrappers; false if nothing is wrapped."""

    def __init__(self, module: nn.Module) -> None:
        """Read the names of a module and its submodules, without calling ``state_dict()``."""
        self._module = module
        # prefixes of state dict keys -> prefixes without wrappers
        self._in_state: dict[str, str] = {}
        self._in_tree: dict[str, str] = {}  # prefixes of submodules -> prefixes without wrappers
        for _, tree, state, name in _walk(module):
            if tree != name:
                self._in_tree[tree] = name
            if state != name:
                self._in_state[state] = name

    def __bool__(self) -> bool:
        return bool(self._in_tree)

    def keys(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """Map each key of the module's ``state_dict(keep_vars=True)`` to the key without wrappers.

        Keys from which the user's hook or ``state_dict`` has already removed the wrappers stay the
        same.
        """
        own: dict[int, set[str]] = {}
        for module, tree, _, _ in _walk(self._module):
            for tensors in (getattr(module, "_parameters", {}), getattr(module, "_buffers", {})):
                for name, tensor in tensors.items():
                    own.setdefault(id(tensor), set()).add(tree + name)
        names: dict[Any, Any] = {}
        for key, value in state.items():
            full_names = own.get(id(value), ())
            is_unwrapped = key not in full_names and any(
                _without(name, self._in_tree) == key for name in full_names
            )
            names[key] = (
                key if is_unwrapped or not isinstance(key, str) else _without(key, self._in_state)
            )
        return names

    def module(self, name: str) -> str:
        """Return a submodule's name without wrappers; a module and its wrappers have the same."""
        return _without(f"{name}.", self._in_tree)[:-1]


def unwrapped_state(module: nn.Module, fqn: str) -> tuple[dict[Any, Any], dict[str, Any] | None]:
    """Return a module's state and its metadata, if any, with names without wrappers.

    Raises ``UnsupportedValueError`` if two names are the same without wrappers.
    """
    state: dict[Any, Any] = module.state_dict(keep_vars=True)
    metadata = getattr(state, "_metadata", None)
    if wrappers := WrapperNames(module):
        names = wrappers.keys(state)
        if two := two_of_one_name(names):
            raise UnsupportedValueError(
                f"{fqn}.{names[two[0]]}: without wrappers {two[0]} and {two[1]} are one name; "
                "rename one"
            )
        state = {names[key]: value for key, value in state.items()}
        metadata = metadata and {wrappers.module(key): each for key, each in metadata.items()}
    return state, metadata


def two_of_one_name(names: Mapping[Any, Any]) -> tuple[Any, Any] | None:
    """Return two keys with the same name without wrappers; None if all names differ."""
    first: dict[Any, Any] = {}
    for key, name in names.items():
        if first.setdefault(name, key) != key:
            return first[name], key
    return None


def _walk(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, str]]:
    """Yield each module with its prefixes in the tree, in the state dict, and without wrappers."""
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
            matches = (
                (child, hides) for wrapper, child, hides in kinds if issubclass(kind, wrapper)
            )
            wrapped[kind] = next(matches, (None, False))
        inner, hides = wrapped[kind]
        for key, child in getattr(each, "_modules", {}).items():
            if child is not None:
                below = f"{tree}{key}.", f"{state}{key}.", f"{name}{key}."
                left.append(
                    (child, *below)
                    if key != inner
                    else (child, below[0], state if hides else below[1], name)
                )


def _without(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with its longest prefix that is in ``prefixes`` replaced."""
    end = len(name)
    while (end := name.rfind(".", 0, end)) >= 0:
        if name[: end + 1] in prefixes:
            return prefixes[name[: end + 1]] + name[end + 1 :]
    return name
