"""The user's own names for checkpoints: links in the run directory.

The directory of a checkpoint is always ``step-00000500``, so that its name has the step even if no
file is readable. Links are made from the existing checkpoints, so a missing one is made again, and
nothing relies on them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import string
from collections.abc import Callable, Sequence
from typing import Final

from sidesave.errors import InvalidArgumentError
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.format.names import is_safe_name, parse_step_directory, step_directory

logger = logging.getLogger(__name__)

Naming = str | Callable[[CheckpointInfo], str | None]
"""A template with ``{step}``, or a function; if two checkpoints share a name, the newer gets it."""
_DRAFT: Final = ".sidesave.link."


class Links:
    """The links of a run directory, which its manager updates."""

    def __init__(self, directory: str, naming: Naming) -> None:
        check_naming(naming)
        self._directory = directory
        self._naming = naming

    def update(self, checkpoints: Sequence[CheckpointInfo]) -> None:
        """Link to ``checkpoints``, given in commit order, and remove links to steps that are gone.

        Failures are logged: an invalid name, or a name taken by anything that is not a link to a
        step.
        """
        own = [info for info in checkpoints if os.path.dirname(info.path) == self._directory]
        # By step: a checkpoint that is being replaced has a hidden name for a moment.
        wanted = {name: step_directory(info.step) for info in own if (name := self._name_of(info))}
        steps = {step_directory(info.step) for info in own}
        present = self._present()
        for name, target in present.items():
            if name not in wanted and target not in steps:
                self._try(name, lambda name=name: os.unlink(os.path.join(self._directory, name)))
        for name, target in wanted.items():
            if present.get(name) != target:
                self._try(name, lambda name=name, target=target: self._link(name, target))

    def add(self, info: CheckpointInfo) -> None:
        """Link to one more checkpoint; failures are logged."""
        name = self._name_of(info)
        if name is not None:
            self._try(name, lambda: self._link(name, step_directory(info.step)))

    def _name_of(self, info: CheckpointInfo) -> str | None:
        try:
            name = (
                self._naming(info)
                if callable(self._naming)
                else self._naming.format(step=info.step)
            )
        except Exception:  # of the user's function or format
            logger.exception("step %d is not named", info.step)
            return None
        # the directory's own name needs no link
        if name is None or name == step_directory(info.step):
            return None
        if not isinstance(name, str) or not _may_be_name(name):  # pyright: ignore[reportUnnecessaryIsInstance]
            logger.error(
                "step %d is not named: %r cannot be the name of a checkpoint", info.step, name
            )
            return None
        return name

    def _present(self) -> dict[str, str]:
        """The existing links to steps, dangling ones too."""
        links: dict[str, str] = {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.startswith(_DRAFT):  # of a process that was killed
                    self._try(entry.name, lambda path=entry.path: os.unlink(path))
                elif entry.is_symlink():
                    with contextlib.suppress(OSError):
                        target = os.readlink(entry.path)
                        if _may_be_name(entry.name) and parse_step_directory(target) is not None:
                            links[entry.name] = target
        return links

    def _link(self, name: str, target: str) -> None:
        path = os.path.join(self._directory, name)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISLNK(os.lstat(path).st_mode):
                raise FileExistsError(errno.EEXIST, "another file has this name")
        replace_link(target, path)

    def _try(self, name: str, operation: Callable[[], None]) -> None:
        try:
            operation()
        except OSError as error:
            logger.error(
                "the link %s in %s cannot be changed: %s", name, self._directory, error.strerror
            )


def replace_link(target: str, path: str) -> None:
    """Make ``path`` a link atomically, replacing any file. Raises ``OSError``."""
    draft = os.path.join(os.path.dirname(path), f"{_DRAFT}{secrets.token_hex(4)}")
    os.symlink(target, draft)
    try:
        os.rename(draft, path)
    except OSError:
        os.unlink(draft)
        raise


def check_naming(naming: object) -> None:
    """Raise ``InvalidArgumentError`` if a template gives all steps one name, or an invalid name."""
    if callable(naming):
        return
    hint = (
        "give one like 'checkpoint-{step}' or 'epoch-{step:06d}', or a function of a CheckpointInfo"
    )
    if not isinstance(naming, str):
        raise InvalidArgumentError(
            f"names must be a template or a function, not {type(naming).__name__}: {hint}"
        )
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(naming) if field is not None]
        first, second = (naming.format(step=step) for step in (1, 2))
    except (ValueError, LookupError, AttributeError) as error:
        raise InvalidArgumentError(
            f"names={naming!r} is not a template with only {{step}} in it ({error}): {hint}"
        ) from None
    if "step" not in fields or first == second:
        raise InvalidArgumentError(
            f"names={naming!r} has no {{step}} in it, so all steps would have one name: {hint}"
        )
    if not _may_be_name(first) and first != step_directory(1):
        raise InvalidArgumentError(
            f"names={naming!r} gives {first!r}: a name has letters, digits and any of %_@.-, no "
            f"dot in front, and is not the directory of another step: {hint}"
        )


def _may_be_name(name: str) -> bool:
    return is_safe_name(name) and parse_step_directory(name) is None
