"""What to save in the place of a value that cannot be saved."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Final

_LOADER: Final = "it does not tell where it is: use torchdata's StatefulDataLoader in its place, or leave it out"
_CURES: Final = (
    ("torch.utils.data", "DataLoader", _LOADER),
    ("torch", "Generator", "save x.get_state() of it, and give that back with x.set_state()"),
    ("random", "Random", "save x.getstate() of it, and give that back with x.setstate()"),
    ("numpy.random", "Generator", "save x.bit_generator.state, and assign that again"),
    ("numpy.random", "RandomState", "save x.get_state() of it, and give that back with x.set_state()"),
    ("argparse", "Namespace", "save vars(x) of it"),
    ("types", "SimpleNamespace", "save vars(x) of it"),
)
"""What to do about types that many states hold: module and name, for they need not be imported here."""


def cure(value: object) -> str:
    """What to save in the place of a value that cannot be saved."""
    for module, name, advice in _CURES:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(value, kind):
            return advice
    if isinstance(value, type) or callable(value):
        return "it is code: leave it out, and make it anew"
    if dataclasses.is_dataclass(value):
        return "save dataclasses.asdict(x) of it"
    if hasattr(value, "_asdict") and hasattr(value, "_fields"):
        return "save x._asdict() of it"
    if isinstance(value, Mapping):
        return "save dict(x) of it"
    if isinstance(value, Iterator):
        return "it does not tell where it is: leave it out"
    data = "plain data of it, such as vars(x)" if getattr(value, "__dict__", None) else "plain data of it"
    return f"give it state_dict() and load_state_dict(), save {data}, or pass allow_pickle=True"
