"""The random number generators of a process: Python's, NumPy's, torch's, and those of every CUDA device."""

from __future__ import annotations

import logging
import random
import sys
from typing import Any

import torch

logger = logging.getLogger(__name__)


class RandomState:
    """An item of a state that holds all global generators. A loaded state takes effect in :meth:`apply`.

    NumPy counts once it is imported, CUDA once it is initialised: before that nobody has drawn from them. Generator
    objects of the user are items of their own.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The state of all generators, as tensors and plain data."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "rank": self._rank,
            "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
            "torch": torch.get_rng_state(),
        }
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
        """Keep the state for :meth:`apply`: loading the rest may still draw numbers."""
        self._loaded = state

    def when_resized(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """For another number of ranks: this rank's state, or rank 0's on a new rank, which does not apply it."""
        return states[self._rank if self._rank < len(states) else 0]

    def apply(self) -> None:
        """Set all generators to the loaded state; do nothing if none was loaded.

        If the number of CUDA devices changed, the devices that both have are set, with a warning. A new rank of a
        larger world keeps its generators as seeded: with rank 0's both would draw the same numbers.
        """
        state, self._loaded = self._loaded, None
        if state is None:
            return
        if state.get("rank", self._rank) != self._rank:
            logger.warning("rank %d is new: its random number generators stay as they were seeded", self._rank)
            return
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(state["torch"].cpu())
        saved = state.get("numpy")
        if saved is not None:
            import numpy

            keys = saved["keys"].numpy().astype("uint32")
            numpy.random.set_state((saved["kind"], keys, saved["position"], saved["has_gauss"], saved["gauss"]))
        generators = state.get("cuda", [])
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if generators and len(generators) != devices:
            logger.warning(
                "the generators of %d CUDA devices were saved, and %d are here: only those of the first %d go on",
                len(generators),
                devices,
                min(len(generators), devices),
            )
        for device, generator in enumerate(generators[:devices]):
            torch.cuda.set_rng_state(generator.cpu(), device)
