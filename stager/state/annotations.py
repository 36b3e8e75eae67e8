"""What a user says of an item of the state: that it does not change, and which ranks hold it alike, or their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from sidesave.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Replicated:
    """All ranks hold this alike: tensors in it are written once, by some of them, and every rank gets it back.

    It is believed, and not compared. For the plain state dict of a model that all ranks hold whole, for instance.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Compared(Replicated):
    """All ranks may hold this alike: plain tensors in it are compared in each save, as those of modules are."""


@dataclass(frozen=True, slots=True)
class Whole(Replicated):
    """All ranks hold this alike, and the first one writes it, no tensor in pieces: for readers that know no ranks."""


@dataclass(frozen=True, slots=True)
class PerRank:
    """Each rank holds its own: all of it is written by every rank, and comes back to the same rank.

    For modules and optimizers whose plain tensors differ between ranks, positions in the data, and the like.

    Attributes:
        value: The item.
        when_resized: What a rank gets where another number of ranks loads than has saved. None: what all of them had,
            and a ``StateMismatchError`` where it was not the same; ``"first"``: what rank 0 had; a function: what
            ``when_resized(values)`` returns on this rank. It is called on every rank with one argument, the list of
            what each rank had saved, in the order of the ranks: nests as :func:`sidesave.load` returns them, of which a
            live object takes what comes back with ``load_state_dict``. It has no say in saving.
    """

    value: Any
    when_resized: Callable[[list[Any]], Any] | Literal["first"] | None = None

    def __post_init__(self) -> None:
        """``InvalidArgumentError`` for another ``when_resized``."""
        chosen: object = self.when_resized
        if chosen is not None and chosen != "first" and not callable(chosen):
            raise InvalidArgumentError(f"when_resized must be 'first', a function or None, not {chosen!r:.80}")


@dataclass(frozen=True, slots=True)
class Frozen:
    """This does not change from save to save, as the base of a model that is only adapted.

    Its tensors have a file of their own, which is linked into the next step and not written again, and they are copied
    into staging memory only where that does not hold them already. At the first save and at every 20th all bytes are
    copied, compared and written. Operations of torch's on such a tensor are noticed, and so is another tensor in its
    place; what is written through ``.data``, NumPy or DLPack is saved up to 20 saves later.

    Parameters without ``requires_grad`` have such a file without being wrapped; they are copied at each save.
    """

    value: Any


ANNOTATIONS: Final = (Replicated, PerRank, Frozen)
