"""Count the non-blank characters of Python code in each room, of the working tree or of another
revision as well.

python -m scripts.size          prints a table
python -m scripts.size REV      adds the sizes at a revision of Git, and the differences
"""

from __future__ import annotations

import argparse
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("client", "stager", "writer_daemon", "sidesave")
_TOTALS = (*PRODUCT, "product", "tests", "scripts")


def _git(*arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", ROOT, *arguments], check=True, stdout=subprocess.PIPE
    ).stdout


def room_of(path: str) -> str:
    """Return the room of a file: its first two folders, or the first one if it lies directly
    there.
    """
    return "/".join(Path(path).parts[:-1][:2])


def sizes(files: Iterable[tuple[str, str]]) -> Counter[str]:
    """Return the number of non-blank characters in each room, each house and the product.

    Args:
        files: Pairs of a path relative to the root and the text of that file.
    """
    counts: Counter[str] = Counter()
    for path, text in files:
        house = path.partition("/")[0]
        names = {room_of(path), house, *(["product"] if house in PRODUCT else [])}
        counts.update(dict.fromkeys(names, len("".join(text.split()))))
    return counts


def _is_counted(path: str) -> bool:
    return path.endswith(".py") and path.startswith(
        tuple(f"{house}/" for house in (*PRODUCT, "tests", "scripts"))
    )


def in_working_tree() -> Counter[str]:
    """Return the sizes of the files in the working tree that Git tracks or would track."""
    names = (
        _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0")
    )
    paths = [name for name in set(names) if _is_counted(name) and (ROOT / name).is_file()]
    return sizes((path, (ROOT / path).read_text()) for path in paths)


def at(revision: str) -> Counter[str]:
    """Return the sizes at a revision of Git."""
    names = _git("ls-tree", "-r", "-z", "--name-only", revision).decode().split("\0")
    return sizes(
        (name, _git("show", f"{revision}:{name}").decode()) for name in names if _is_counted(name)
    )


def table(now: Counter[str], before: Counter[str] | None = None) -> str:
    """Return a Markdown table: houses and the product first, then the rooms by name."""
    rooms = sorted((now.keys() | (before or {}).keys()) - set(_TOTALS))
    columns = ["room", "characters"] if before is None else ["room", "before", "now", "difference"]
    lines = [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    for name in (*_TOTALS, *rooms):
        if before is None:
            lines.append(f"| {name} | {now[name]:,} |")
        else:
            lines.append(
                f"| {name} | {before[name]:,} | {now[name]:,} | {now[name] - before[name]:+,} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Count the non-blank characters of each room.")
    parser.add_argument(
        "revision", nargs="?", metavar="REV", help="a revision of Git to compare with"
    )
    revision = parser.parse_args().revision
    print(table(in_working_tree(), None if revision is None else at(revision)))


if __name__ == "__main__":
    main()
