"""Takes in or refuses files that subclasses and callbacks of a Trainer add to its checkpoints."""

from __future__ import annotations

import importlib
import os
from typing import Any, Final, cast

from sidesave.errors import InvalidArgumentError

_callbacks: Any = importlib.import_module("transformers.trainer_callback")

_CALLED: Final = ("_save", "save_model")
"""Methods that write a model's files; overrides are called, and ``files=`` saves their files."""
_SAVERS: Final = (
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
)
"""Methods that must not be overridden: they are not called, or their directory does not exist."""
_LOADERS: Final = (
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_load_best_model",
)
"""Methods that only classes before the mixin may override; it does not call the next ones."""


def are_called(trainer: Any, mixin: type) -> bool:
    """Whether a subclass overrides a method that writes a model's files."""
    return any(_overriding(trainer, name, mixin) for name in _CALLED)


def refuse(trainer: Any, mixin: type) -> None:
    """Raise ``InvalidArgumentError`` for overrides that would not be called or lose their files."""
    for name in _SAVERS:
        if kind := _overriding(trainer, name, mixin):
            raise InvalidArgumentError(
                f"the files of {kind.__qualname__}.{name} would not be in the checkpoint: override "
                f"_save or save_model, whose files {mixin.__name__} puts there, or train with the "
                "plain Trainer"
            )
    for name in _LOADERS:
        if kind := _overriding(trainer, name, mixin, after_mixin=True):
            raise InvalidArgumentError(
                f"{kind.__qualname__}.{name} would not be called for checkpoints of sidesave: "
                f"override it in a class that has {mixin.__name__} as its first base, or train "
                "with the plain Trainer"
            )


def _overriding(trainer: Any, name: str, mixin: type, *, after_mixin: bool = False) -> type | None:
    """Return the first class outside transformers that overrides a trainer's method, or None."""
    ancestors = type(trainer).__mro__
    if after_mixin:
        ancestors = ancestors[ancestors.index(mixin) + 1 :]
    for each in ancestors:
        if (
            each is not mixin
            and name in vars(each)
            and not each.__module__.startswith("transformers.")
        ):
            return each
    return None


def watch_callbacks(trainer: Any, directory: str) -> Any:
    """Add and return a callback that detects a ``checkpoint-N`` written in others' ``on_save``."""
    present = {entry.name for entry in os.scandir(directory)}

    class OverrideWatch(_callbacks.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            name = f"checkpoint-{state.global_step}"
            path = os.path.join(directory, name)
            if name in present or not os.path.isdir(path) or os.path.islink(path):
                return
            suspects = [
                type(each).__qualname__
                for each in trainer.callback_handler.callbacks
                if not type(each).__module__.startswith(("transformers.", __name__))
                and "on_save" in vars(cast("Any", type(each)))
            ]
            raise InvalidArgumentError(
                f"{path} was made by a callback ({', '.join(suspects)}), so its files are not in "
                "the checkpoint: remove the directory, and write them in an override of the "
                "trainer's _save"
            )

    watch = OverrideWatch()
    trainer.callback_handler.add_callback(watch)
    return watch
