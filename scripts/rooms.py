"""The rooms of the product, drawn from its imports: a Mermaid graph for docs/architecture.md.

    python -m scripts.rooms            prints it
    python -m scripts.rooms --write    puts it into the page

A room is a folder of ``client/``, ``stager/`` or ``writer_daemon/``, or a module that stands beside
such folders.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
HOUSES = ("client", "writer_daemon", "stager")
MAX_MODULES = 12
"""In a room."""
MAX_LINES = 450
"""Of a module."""
_BEGIN, _END = "<!-- drawn by `python -m scripts.rooms --write` -->", "<!-- end of the drawing -->"


def modules() -> dict[str, Path]:
    """Every module of the product by its name, without ``sidesave.`` in front; packages themselves
    hold no code.
    """
    found: dict[str, Path] = {}
    for house in HOUSES:
        for path in sorted((ROOT / house).rglob("*.py")):
            if path.name != "__init__.py":
                found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    return found


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of all that a file imports, be it a module or a name within one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def edges() -> dict[str, set[str]]:
    """Which modules of the product each one imports."""
    known = modules()
    found: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for _, target in imports(path):
            parts = target.removeprefix("sidesave.").split(".")
            for end in range(len(parts), 0, -1):
                if (module := ".".join(parts[:end])) in known:
                    found[name].add(module)
                    break
    return found


def room(module: str) -> str:
    """The room of a module: its folder, or itself where it stands beside them."""
    return ".".join(module.split(".")[:2])


def between_rooms() -> dict[str, set[str]]:
    """Which rooms each room imports from."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, targets in edges().items():
        found[room(module)] |= {room(target) for target in targets} - {room(module)}
    return dict(found)


def drawing() -> str:
    """The graph: an arrow from each room to those it imports from, without those that another room
    leads to as well.
    """
    graph = between_rooms()

    def beneath(name: str) -> set[str]:
        return graph[name].union(*map(beneath, graph[name]))

    lines = ["```mermaid", "graph TD"]
    for house in HOUSES:
        lines.append(f"  subgraph {house}")
        lines += [
            f"    {name}[{name.partition('.')[2]}]"
            for name in sorted(graph)
            if name.startswith(house)
        ]
        lines.append("  end")
    for name in sorted(graph):
        further = set[str]().union(*map(beneath, graph[name]))
        lines += [f"  {name} --> {target}" for target in sorted(graph[name] - further)]
    return "\n".join([*lines, "```"])


def page() -> str:
    """The text of docs/architecture.md with the drawing of now."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    return f"{before}{_BEGIN}\n{drawing()}\n{_END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the rooms.")
    parser.add_argument(
        "--write", action="store_true", help="put the drawing into docs/architecture.md"
    )
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(drawing())


if __name__ == "__main__":
    main()
