"""The names that a module's state has without what wraps it: data parallelism, ``torch.compile``, FSDP1.

A wrapper is known by its type, never by a name: a user's own child may be called ``module``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from torch import nn

from sidesave.errors import UnsupportedValueError
from sidesave.stager import torch_private

_KINDS: Final = (
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.nn.parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)
"""Module, class, and the child that has what is wrapped. None is imported here: what is not loaded wraps nothing."""
PARTS: Final = frozenset(child for _, _, child in _KINDS)
"""The parts that wrappers add to names."""


def without_parts(name: str) -> str:
    """A name without any part that a wrapper may have added: for comparing names of which no module is known."""
    return ".".join(part for part in name.split(".") if part not in PARTS)


def plain_names(module: nn.Module, names: Iterable[Any]) -> dict[Any, Any]:
    """Those of ``names`` in the state of ``module`` that wrappers have added to, with what they are without that."""
    kinds = _loaded()
    pending, seen, wraps = [module], {id(module)}, False
    while pending and not wraps:
        each = pending.pop()
        wraps = _wrapped(each, kinds) is not None
        for child in torch_private.children(each):
            if id(child) not in seen:
                seen.add(id(child))
                pending.append(child)
    if not wraps:
        return {}
    own = functools.lru_cache(maxsize=None)(_own_names)
    plain = ((name, _plain(module, name, kinds, own)) for name in names if isinstance(name, str))
    return {name: new for name, new in plain if new != name}


def plain_keys(module: nn.Module, keys: Iterable[Any], fqn: str) -> dict[Any, Any]:
    """As :func:`plain_names`, of all keys of a state; ``UnsupportedValueError`` where two become one."""
    keys = [*keys]
    plain = plain_names(module, keys)
    origins: dict[Any, Any] = {}
    for key in keys if plain else ():
        name = plain.get(key, key)
        if origins.setdefault(name, key) != key:
            raise UnsupportedValueError(
                f"{fqn}: {origins[name]} and {key} are both {name} without what wraps the module; rename one, or have "
                "its state_dict() in the place of the module"
            )
    return plain


def plain_metadata(module: nn.Module, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The versions of submodules by their plain names: of a wrapper and what it wraps, those of the latter."""
    plain = plain_names(module, metadata)
    return {plain.get(name, name): each for name, each in sorted(metadata.items(), key=lambda item: len(item[0]))}


def _loaded() -> list[tuple[type, str]]:
    modules = ((sys.modules.get(module), name, child) for module, name, child in _KINDS)
    return [(getattr(module, name), child) for module, name, child in modules if hasattr(module, name)]


def _wrapped(module: nn.Module, kinds: list[tuple[type, str]]) -> str | None:
    """The name of the child that ``module`` wraps; None if it is no wrapper."""
    return next(
        (child for kind, child in kinds if isinstance(module, kind) and _child(module, child) is not None), None
    )


def _child(module: nn.Module, name: str) -> nn.Module | None:
    return cast("dict[str, nn.Module | None]", module.__dict__.get("_modules", {})).get(name)


def _own_names(module: nn.Module) -> frozenset[str]:
    own = module.__dict__
    return frozenset(("_extra_state", *own["_parameters"], *own["_buffers"], *own["_modules"]))


def _plain(module: nn.Module, name: str, kinds: list[tuple[type, str]], own: Any) -> str:
    """``name`` without the parts of wrappers. A hook may have taken off some of them already."""
    kept: list[str] = []
    rest = name
    current: nn.Module | None = module
    while current is not None and rest:
        first, dot, below = rest.partition(".")
        child = _wrapped(current, kinds)
        if child is None:
            current = _child(current, first)
            if current is not None:
                kept.append(first)
                rest = below
            continue
        inner = _child(current, child)
        assert inner is not None
        names = own(inner)
        # Where a hook has taken the prefix off, a child of the user's may have its name.
        if first == child and (not dot or below.partition(".")[0] in names or child not in names):
            rest = below
        current = inner
    return ".".join([*kept, rest] if rest else kept)
