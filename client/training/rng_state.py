"""The random number generators of a process: Python's, NumPy's, torch's, each CUDA device's.

A data loader draws from torch's generator when it begins an epoch: a base seed, and the seed of its
order. A run that is resumed within an epoch begins the epoch again. It must then draw the same
numbers, without changing the restored generator. So the state at the beginning of each epoch is
recorded, saved while the epoch lasts, and used again then.
"""

from __future__ import annotations

import functools
import logging
import random
import sys
import weakref
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from sidesave.stager.torch_private import LoaderIterator

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Epoch:
    """The beginning of an epoch of a data loader.

    Attributes:
        loader: The classes of the loader and of its dataset, the number of batches and of items;
            None if unknown.
        base_seed: The seed of its workers.
        generator: The state of torch's generator from which the sampler draws.
        is_over: Whether all batches were taken. A loader with its own state still begins the epoch
            again, and one with persistent workers begins the next epoch without drawing another
            base seed.
    """

    loader: tuple[str, str, int | None, int | None]
    base_seed: int
    generator: bytes
    is_over: bool = False

    def __str__(self) -> str:
        kind, dataset, batches, _ = self.loader
        return (
            f"{kind} of {'an unknown number of' if batches is None else batches} batches of a "
            f"{dataset}"
        )


class Epochs:
    """The epochs of this process's data loaders, recorded from the call of :meth:`watch`."""

    def __init__(self) -> None:
        self._begun: weakref.WeakKeyDictionary[Any, Epoch] = weakref.WeakKeyDictionary()
        self._to_resume: list[Epoch] = []
        self._is_watching = False

    def watch(self) -> None:
        """Record from now on how iterators of data loaders begin; idempotent."""
        if self._is_watching:
            return
        self._is_watching = True
        make, reset = LoaderIterator.__init__, LoaderIterator._reset

        @functools.wraps(make)
        def begin(iterator: Any, loader: Any) -> None:
            epoch = self._take(loader)
            before = torch.get_rng_state()
            try:
                make(iterator, loader)
            finally:
                if epoch is not None:
                    torch.set_rng_state(before)
            if epoch is None:
                self._note(iterator, loader)
                return
            if loader.generator is None:
                iterator._base_seed = epoch.base_seed
            if epoch.is_over and not _has_state(loader):
                self._note(iterator, loader)
                return
            self._begun[iterator] = epoch
            _draw_first_index_from(iterator, epoch)

        @functools.wraps(reset)
        def begin_again(iterator: Any, loader: Any, first_iter: bool = False) -> None:
            if not first_iter:  # the next epoch of persistent workers
                iterator.__dict__.pop("_next_index", None)
                self._note(iterator, loader)
            reset(iterator, loader, first_iter)

        LoaderIterator.__init__, LoaderIterator._reset = begin, begin_again

    def under_way(self) -> list[Epoch]:
        """Return the epochs that a resumed run must begin again.

        Warns about restored ones that never began here.
        """
        for epoch in self._to_resume:
            logger.warning(
                "random numbers may differ from those of a run that was not interrupted: the "
                "checkpoint was saved within an epoch of a %s, and no such loader was iterated "
                "between restore() and this save",
                epoch,
            )
        self._to_resume = []
        epochs: list[Epoch] = []
        for iterator, epoch in [*self._begun.items()]:
            is_over = epoch.loader[2] is not None and iterator._num_yielded >= epoch.loader[2]
            if not is_over or hasattr(iterator, "state_dict") or iterator._persistent_workers:
                epochs.append(Epoch(epoch.loader, epoch.base_seed, epoch.generator, is_over))
        return epochs

    def resume(self, epochs: list[Epoch]) -> None:
        """Begin these epochs as recorded when such loaders are iterated next.

        This does not change the generator.
        """
        self._to_resume = epochs

    def _note(self, iterator: Any, loader: Any) -> None:
        self._begun[iterator] = Epoch(_describe(loader), iterator._base_seed, _state_of_generator())

    def _take(self, loader: Any) -> Epoch | None:
        description = _describe(loader)
        for epoch in self._to_resume:
            if epoch.loader == description:
                self._to_resume.remove(epoch)
                is_needed = not epoch.is_over or _has_state(loader) or loader.persistent_workers
                return epoch if is_needed else None
        return None


def _draw_first_index_from(iterator: Any, epoch: Epoch) -> None:
    """Make the sampler, which draws when it gives its first index, draw the recorded numbers."""

    def first() -> Any:
        del iterator._next_index
        now = torch.get_rng_state()
        torch.set_rng_state(torch.tensor([*epoch.generator], dtype=torch.uint8, device="cpu"))
        try:
            return iterator._next_index()
        finally:
            torch.set_rng_state(now)

    iterator._next_index = first


def _has_state(loader: Any) -> bool:
    """Whether a torchdata loader was given a state, with which it begins an epoch again."""
    return getattr(loader, "next_iter_state", None) is not None


def _describe(loader: Any) -> tuple[str, str, int | None, int | None]:
    return (
        type(loader).__name__,
        type(loader.dataset).__name__,
        _length(loader._index_sampler),
        _length(loader.dataset),
    )


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _state_of_generator() -> bytes:
    return bytes(cast("list[int]", torch.get_rng_state().tolist()))


_EPOCHS: Final = Epochs()


class RandomState:
    """A state item that holds all global generators; a loaded state takes effect in :meth:`apply`.

    NumPy's is saved once NumPy is imported, CUDA's once CUDA is initialized: they are unused
    before. The user's own generator objects are separate items.
    """

    may_be_missing = True
    """A checkpoint may lack this item; a load then logs a warning."""

    def __init__(self, rank: int = 0, *, resumes_epochs: bool = False) -> None:
        """Hold the generators of ``rank``.

        With ``resumes_epochs``, data loaders begin saved epochs again. Do not use that with
        frameworks that set the generators after they have begun the epoch.
        """
        self._epochs = _EPOCHS if resumes_epochs else None
        if resumes_epochs:
            _EPOCHS.watch()
        self._rank = rank
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all generators, as tensors and plain data."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "rank": self._rank,
            "python": {
                "version": version,
                "words": torch.tensor(words, device="cpu"),
                "gauss": gauss,
            },
            "torch": torch.get_rng_state(),
        }
        if self._epochs is not None:
            epochs = self._epochs.under_way()
            state["epochs"] = [
                [[*each.loader], each.base_seed, each.generator, each.is_over] for each in epochs
            ]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, position, has_gauss, cached = numpy.random.get_state()
            state["numpy"] = {
                "kind": kind,
                "keys": torch.from_numpy(keys.astype("int64")),
                "position": position,
                "has_gauss": has_gauss,
                "gauss": cached,
            }
        if torch.cuda.is_initialized():
            state["cuda"] = list(torch.cuda.get_rng_state_all())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state for :meth:`apply`, because loading other items may still draw numbers."""
        self._loaded = state

    def when_resized(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Return this rank's state for another number of ranks.

        A new rank gets rank 0's, and does not apply it.
        """
        return states[self._rank if self._rank < len(states) else 0]

    def apply(self) -> None:
        """Set all generators to the loaded state; do nothing if none was loaded.

        If the number of CUDA devices changed, the devices that both have are set, with a warning. A
        new rank of a larger world keeps its generators as seeded: with rank 0's both would draw the
        same numbers.
        """
        state, self._loaded = self._loaded, None
        if state is None:
            return
        if state.get("rank", self._rank) != self._rank:
            logger.warning(
                "rank %d is new: its random number generators stay as they were seeded", self._rank
            )
            return
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(state["torch"].cpu())
        saved = state.get("numpy")
        if saved is not None:
            import numpy

            keys = saved["keys"].numpy().astype("uint32")
            numpy.random.set_state(
                (saved["kind"], keys, saved["position"], saved["has_gauss"], saved["gauss"])
            )
        if self._epochs is not None:
            self._epochs.resume(
                [Epoch(tuple(loader), *others) for loader, *others in state.get("epochs", [])]
            )
        generators = state.get("cuda", [])
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if generators and len(generators) != devices:
            logger.warning(
                (
                    "the generators of %d CUDA devices were saved, and %d are here: those of the "
                    "first %d are restored"
                ),
                len(generators),
                devices,
                min(len(generators), devices),
            )
        for device, generator in enumerate(generators[:devices]):
            torch.cuda.set_rng_state(generator.cpu(), device)
