"""Annotations of state items: unchanging, the same on a set of ranks, or separate on each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from sidesave.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Replicated:
    """All ranks hold the same value; this is trusted, not verified.

    Its tensors are written once, divided among ranks, and loaded by every rank. Use it, for
    instance, for the plain state dict of a model that all ranks hold whole.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Compared(Replicated):
    """All ranks may hold the same value: saves compare its plain tensors, as those of modules."""


@dataclass(frozen=True, slots=True)
class Whole(Replicated):
    """All ranks hold the same value; rank 0 writes it unsplit, for readers unaware of ranks."""


@dataclass(frozen=True, slots=True)
class PerRank:
    """Each rank holds its own value: the rank writes all of it, and the same rank loads it.

    For modules and optimizers whose plain tensors differ between ranks, positions in the data, and
    similar state.

    Attributes:
        value: The item.
        when_resized: What a rank gets if the number of ranks has changed since the save. None: the
            value that all saved, or ``StateMismatchError`` if they differed; ``"first"``: rank 0's
            value; a function: the result of ``when_resized(values)`` on this rank. It is called on
            every rank with one argument, the list of the values saved by each rank, in rank order,
            as :func:`sidesave.load` returns them. A live object receives the result through its
            ``load_state_dict``. Saving ignores this option.
    """

    value: Any
    when_resized: Callable[[list[Any]], Any] | Literal["first"] | None = None

    def __post_init__(self) -> None:
        """Raise ``InvalidArgumentError`` if ``when_resized`` has any other value."""
        chosen: object = self.when_resized
        if chosen is not None and chosen != "first" and not callable(chosen):
            raise InvalidArgumentError(
                f"when_resized must be 'first', a function or None, not {chosen!r:.80}"
            )


@dataclass(frozen=True, slots=True)
class Frozen:
    """The value does not change between saves, such as the base model under an adapter.

    Its tensors are stored in a file of their own, which the next step links instead of writing it
    again. Large tensors are copied into staging memory only if it does not hold them already.
    Buffers are always copied. Torch operations on such a tensor are detected, and so are optimizer
    steps and replaced tensors. Other writes, such as those through ``.data``, NumPy or a
    collective, are detected by comparing a sample of the bytes at each save, and all bytes at every
    20th save; a warning then names the tensor (docs/frozen.md).

    Parameters without ``requires_grad`` are stored in such a file without the wrapper; each save
    copies them.
    """

    value: Any


ANNOTATIONS: Final = (Replicated, PerRank, Frozen)


class Around(NamedTuple):
    """Facts about a value that follow from the items around it.

    Attributes:
        scope: The ranks that may write a plain tensor; () if unknown, None for this rank alone.
        is_pinned: Inside ``PerRank``, where nothing is shared.
        is_frozen: Inside ``Frozen``.
        is_annotated: Inside any annotation.
    """

    scope: tuple[int, ...] | None = None
    is_pinned: bool = False
    is_frozen: bool = False
    is_annotated: bool = False

    def inside(
        self, annotation: Replicated | PerRank | Frozen, ranks: tuple[int, ...] | None
    ) -> Around:
        """Return the facts inside an annotation.

        ``ranks`` are those that save together, or None if this process saves alone.
        """
        around = self._replace(is_annotated=True)
        if isinstance(annotation, PerRank):
            return around._replace(scope=None, is_pinned=True)
        if isinstance(annotation, Frozen):
            return around._replace(is_frozen=True)
        return around.shared(ranks, annotation)

    def shared(self, ranks: tuple[int, ...] | None, declared: Replicated | None = None) -> Around:
        """Return the facts inside an item whose names all ranks share.

        With ``declared``, they share its plain tensors, too.
        """
        # an outer annotation may declare the tensors already
        if ranks is None or self.is_pinned or self.scope:
            return self
        if isinstance(declared, Whole):
            return self._replace(scope=ranks[:1])
        is_alike = declared is not None and not isinstance(declared, Compared)
        return self._replace(scope=ranks if is_alike else ())
