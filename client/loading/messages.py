"""Where a checkpoint and its target differ, told in a few lines however much it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from sidesave.client.messages import SHOWN, Names, few


@dataclass(frozen=True, slots=True)
class PrefixMismatch:
    """A target that the checkpoint holds something for, but hardly anything under its names.

    Attributes:
        fqn: The target.
        wanted: Names that it has, without its own in front.
        found: How many of them the checkpoint has.
        others: Names in the checkpoint that it has not.
    """

    fqn: str
    wanted: Collection[str]
    found: int
    others: Collection[str]

    def text(self, *, renamed: bool) -> str:
        """What is the matter, and what to do where that can be told."""
        count = len(self.wanted)
        fits = f"only {self.found} of the {count} names fit" if self.found else f"none of the {count} names fits"
        prefix = _prefix(self.wanted, self.others)
        if prefix and not renamed:
            return f'{self.fqn}: {fits}; pass rename={{"{self.fqn}.{prefix}": "{self.fqn}"}}, and they do'
        prefix = _prefix(self.others, self.wanted)
        if prefix and not renamed:
            return f'{self.fqn}: {fits}; pass rename={{"{self.fqn}": "{self.fqn}.{prefix}"}}, and they do'
        return f"{self.fqn}: {fits}, and the checkpoint has {len(self.others)} others; is it of another model?"


def _prefix(short: Collection[str], long: Collection[str]) -> str:
    """What stands in front of most of the ``short`` names where they are among the ``long`` ones."""
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
        missing: Names of the target that the checkpoint has not, and that have to be there.
        unexpected: Names of the checkpoint that the target has not.
        different: Of names that both have, and of what has no name, what is the matter: shapes, dtypes, kinds.
        prefixes: Targets of which hardly a name fits.
        kept: Plain data of the target that the checkpoint has not, in dicts of live objects.
        absent: Names of the target that the checkpoint has not, and need not have: they were not asked for.
        placed: All names of the target: none of these is a misspelling of another one.
    """

    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    different: list[str] = field(default_factory=list[str])
    prefixes: list[PrefixMismatch] = field(default_factory=list[PrefixMismatch])
    kept: list[str] = field(default_factory=list[str])
    absent: list[str] = field(default_factory=list[str])
    placed: set[str] = field(default_factory=set[str])

    def text(self, saved: Callable[[], Iterable[str]], *, renamed: bool, strict: bool) -> str:
        """All of it, at most ten lines of each kind, each name with those that are like it.

        Args:
            saved: Gives the names that the checkpoint has.
            renamed: Whether they have been renamed.
            strict: Whether what is missing or unexpected matters.
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
        """The names that are missing and unexpected, some of each, in a line."""
        told = [
            f"{len(names)} {kind} ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
            for names, kind in ((self.missing, "missing"), (self.unexpected, "unexpected"))
            if names
        ]
        return " and ".join(told)
