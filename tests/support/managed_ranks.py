"""Ranks that save by a ``CheckpointManager``: they obey what :mod:`rank_trainers` knows, and pass
steps.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import rank_trainers
from rank_trainers import Actor, Rank
from trainers import grouped, wait_until

if TYPE_CHECKING:
    import sidesave


class ManagedRank(Rank):
    """A rank that is a :class:`ManagedActor`."""

    script = __file__


# In a rank ----------------------------------------------------------------------------------------


class ManagedActor(Actor):
    """What such a rank can be told to do."""

    _manager: sidesave.CheckpointManager | None = None

    @property
    def manager(self) -> sidesave.CheckpointManager:
        assert self._manager is not None
        return self._manager

    def manage(
        self, run: str, save: str, keep: str = "[]", mirror_keep: str = "[]", **options: Any
    ) -> int:
        """Make a manager with these policies, which are expressions, and restore; the step to train
        next.
        """
        import sidesave

        names = {name: getattr(sidesave, name) for name in sidesave.__all__}
        self._manager = sidesave.CheckpointManager(
            run,
            self.state,
            save=eval(save, names),
            keep=eval(keep, names),
            mirror_keep=eval(mirror_keep, names),
            **grouped(options),
        )
        self._ckpt = self._manager.checkpointer
        return self._manager.restore()

    def outcome_of(self, command: str, *arguments: Any, **options: Any) -> str:
        """What a command of this class raises, as text, or "done"."""
        try:
            getattr(self, command)(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - told
            return f"{type(error).__name__}: {error}"
        return "done"

    def spoil_method(self, name: str) -> None:
        """Have a method fail, told as ``module:Class.method``."""
        import importlib

        module, _, path = name.partition(":")
        kind, _, method = path.partition(".")
        owner = getattr(importlib.import_module(module), kind)
        assert callable(getattr(owner, method))

        def fail(*arguments: object, **options: object) -> None:
            raise RuntimeError("on purpose")

        setattr(owner, method, fail)

    def restore(self) -> int:
        return self.manager.restore()

    def step(self, step: int) -> str | None:
        """Finish a step; "saved" or "skipped", or None where nothing was due."""
        handle = self.manager.step(step)
        if handle is None:
            return None
        if not handle.skipped:
            self.handles[step] = handle
        return "skipped" if handle.skipped else "saved"

    def await_word(self, busy: bool, upto: int) -> None:
        """Wait until ranks have agreed, for a step or an earlier one, whether one of them has no
        slot left.
        """
        agreement = self.manager._schedule._agreement
        assert agreement is not None

        def has_word() -> bool:
            since, said = [(0, agreement.busy), *agreement._busy][-1]
            return said == busy and since <= upto

        wait_until(has_word)

    def pin(self, step: int) -> None:
        self.manager.pin(step)

    def unpin(self, step: int) -> None:
        self.manager.unpin(step)

    def pinned(self) -> list[int]:
        return sorted(self.manager.pinned)

    def put_clock_forward(self, seconds: float) -> None:
        """Have the wall clock of this rank say so much more."""
        told = time.time
        time.time = lambda: told() + seconds

    def leave(self) -> list[list[Any]]:
        """Close; what became of each save."""
        self.manager.close()
        return self.history()


if __name__ == "__main__":
    rank_trainers.obey(ManagedActor, *sys.argv[1:])
