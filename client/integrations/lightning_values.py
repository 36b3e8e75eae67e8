# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The form of Lightning's checkpoints that loads as Lightning's own file does."""

from __future__ import annotations

import collections
import collections.abc
import enum
import logging
import operator
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from sidesave.client.targets.live_map import is_stateful
from sidesave.errors import UnsupportedValueError
from sidesave.stager.state.tags import PLAIN
from sidesave.stager.state.treespec import with_metadata

logger = logging.getLogger(__name__)

SHARDED: Final = ("state_dict", "optimizer_states")
"""The items of a checkpoint that model parallelism shards over the ranks."""
_VERSIONS: Final = "sidesave.state_dict._metadata"
"""The item of a checkpoint that keeps the ``_metadata`` attribute of a module's state dict."""


class _Pickled:
    """A wrapper that makes pickle save any value, and unpickle as the value itself."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ([self._value], 0)


class FaithfulValues:
    """Brings checkpoints into a form that loads with the same types as Lightning's own file.

    Lightning pickles modules, enums and objects with a state dict. This class does so too if pickle
    is allowed. Otherwise it warns about enums, which are loaded as their values, and refuses the
    others.
    """

    def __init__(self, *, pickles: bool) -> None:
        self._pickles = pickles
        self._reported = set[str]()

    def of(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return the form of a checkpoint; ``UnsupportedValueError`` names all refused values."""
        refused: list[str] = []
        enums: list[str] = []
        faithful = {
            key: value if key in SHARDED else self._form(value, key, refused, enums)
            for key, value in checkpoint.items()
        }
        if refused:
            raise UnsupportedValueError("\n  ".join(refused))
        enums = [name for name in enums if name not in self._reported]
        if enums:
            self._reported.update(enums)
            logger.warning(
                "%s: enums are loaded as their values; to load them as enums, pass "
                "SidesaveCheckpointIO(..., allow_pickle=True)",
                ", ".join(enums),
            )
        return faithful

    def _form(self, value: Any, name: str, refused: list[str], enums: list[str]) -> Any:
        kind = type(value)
        if kind in PLAIN or kind is torch.Tensor:
            return value
        if kind is dict and not any(map(_is_changed, value)):
            return {
                key: self._form(item, f"{name}.{key}", refused, enums)
                for key, item in value.items()
            }
        if kind in (list, tuple):
            return kind(
                self._form(item, f"{name}.{index}", refused, enums)
                for index, item in enumerate(value)
            )
        if not _is_changed(value):
            return value
        if self._pickles:
            return _Pickled(value)
        if (
            isinstance(value, nn.Module)
            or is_stateful(value)
            or isinstance(value, torch.optim.Optimizer)
        ):
            refused.append(
                f"{name}: a {kind.__module__}.{kind.__qualname__} would be loaded as its state "
                "dict; leave it out, as with save_hyperparameters(ignore=[...]), or pass "
                "SidesaveCheckpointIO(..., allow_pickle=True)"
            )
        else:
            enums.append(name)
        return value


def _is_changed(value: Any) -> bool:
    """Whether a value, or a member of a container, would be loaded as another type."""
    if isinstance(value, (collections.abc.Mapping, list, tuple, set, frozenset, collections.deque)):
        inner = (
            [*value.keys(), *value.values()]
            if isinstance(value, collections.abc.Mapping)
            else value
        )
        return any(map(_is_changed, inner))
    return isinstance(value, (nn.Module, torch.optim.Optimizer, enum.Enum)) or is_stateful(value)


def with_versions(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with an item for the ``_metadata`` of its module's state dict, if any."""
    versions = getattr(checkpoint.get("state_dict"), "_metadata", None)
    return checkpoint if versions is None else {**checkpoint, _VERSIONS: [*versions.items()]}


def without_versions(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`with_versions` in place."""
    versions = checkpoint.pop(_VERSIONS, None)
    if versions is not None:
        checkpoint["state_dict"] = with_metadata(checkpoint["state_dict"], dict(versions))
    return checkpoint
