"""Says in a few lines where a checkpoint and its target differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from sidesave.client.messages import SHOWN, Names, few


@dataclass(frozen=True, slots=True)
class PrefixMismatch:
    """A target for which the checkpoint has state, but hardly any under the target's names.

    Attributes:
        fqn: The target.
        wanted: Names in the target, without ``fqn`` in front.
        fitting: How many of them the checkpoint has.
        others: Names that only the checkpoint has.
    """

    fqn: str
    wanted: Collection[str]
    fitting: int
    others: Collection[str]

    def text(self, *, renamed: bool) -> str:
        """What does not fit, and what to do if that is known."""
        count = len(self.wanted)
        fits = f"only {self.fitting} of the {count} names fit" if self.fitting else f"none of the {count} names fits"
        prefix = _prefix(self.wanted, self.others)
        if prefix and not renamed:
            return f'{self.fqn}: {fits}; pass rename={{"{self.fqn}.{prefix}": "{self.fqn}"}}, and they do'
        prefix = _prefix(self.others, self.wanted)
        if prefix and not renamed:
            return f'{self.fqn}: {fits}; pass rename={{"{self.fqn}": "{self.fqn}.{prefix}"}}, and they do'
        return f"{self.fqn}: {fits}, and the checkpoint has {len(self.others)} others; is it of another model?"


def _prefix(short: Collection[str], long: Collection[str]) -> str:
    """The prefix with which most of the ``short`` names are among the ``long`` ones."""
    first = next(iter(short), "")
    known = set(long)
    for name in long:
        if name.endswith("." + first):
            prefix = name[: -len(first)]
            if sum(prefix + other in known for other in short) > 0.9 * len(short):
                return prefix[:-1]
    return ""


@dataclass(slots=True)
class Mismatches:
    """Everything that differs.

    Attributes:
        missing: Required names that only the target has.
        unexpected: Names that only the checkpoint has.
        different: Messages about shapes, dtypes and kinds that differ.
        prefixes: Targets of which hardly any name fits.
        kept: Plain data that only the target has, in dicts of live objects.
        absent: Names that only the target has and that were not asked for.
        placed: All names of the target, none of which is a misspelling of another.
    """

    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    different: list[str] = field(default_factory=list[str])
    prefixes: list[PrefixMismatch] = field(default_factory=list[PrefixMismatch])
    kept: list[str] = field(default_factory=list[str])
    absent: list[str] = field(default_factory=list[str])
    placed: set[str] = field(default_factory=set[str])

    def text(self, saved: Callable[[], Iterable[str]], *, renamed: bool, strict: bool) -> str:
        """Everything, at most ten lines of each kind, each name with similar ones.

        Args:
            saved: Gives the names in the checkpoint.
            renamed: Whether they have been renamed.
            strict: Whether missing and unexpected names matter.
        """
        lines: list[str] = []
        if strict:
            lines += [one.text(renamed=renamed) for one in self.prefixes[:SHOWN]]
        lines += few(self.different, lambda line: line, "do not fit")
        if self.missing and strict:
            unused = Names(self.unexpected)
            others = Names(name for name in saved() if name not in self.placed)
            lines += few(
                self.missing,
                lambda name: f"{name}: missing in the checkpoint{unused.hint(name) or others.hint(name)}",
                "are missing",
            )
        if self.unexpected and strict:
            free = Names(self.missing)
            lines += few(
                self.unexpected,
                lambda name: f"{name}: unexpected, the target has no such key{free.hint(name)}",
                "are unexpected",
            )
        return "\n  ".join(lines)

    def summary(self) -> str:
        """Some of the missing and unexpected names, in one line."""
        parts = [
            f"{len(names)} {kind} ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
            for names, kind in ((self.missing, "missing"), (self.unexpected, "unexpected"))
            if names
        ]
        return " and ".join(parts)
