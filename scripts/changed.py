"""Which tests a change can break, from who imports whom: ``scripts/test --changed``.

    python -m scripts.changed          prints the test modules, and in one line on stderr why those

What has changed is what differs from the merge base with ``origin/main``, or from ``HEAD`` where
there is none, files that git does not know yet included. A test module is chosen if it has changed,
or reaches what has: by its imports, by the names that it uses of ``sidesave``, by modules and files
that it names in strings (which is how it starts other processes), by fixtures, and on from there.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from scripts import rooms

ROOT = rooms.ROOT
EVERY_TEST = {"pyproject.toml", "scripts/test", "scripts/_venv.sh", "scripts/_environment.sh"}
"""What every test depends on, with tests/conftest.py and what that imports of tests/."""
LOOK_AT_ALL = {"tests/project/test_rooms.py", "tests/project/test_packaging.py"}
"""They read all files of the product and of its tests."""
LOOKS_FOR_FILES = "tests/project/test_contributing.py"
"""It looks whether files are there, of whatever kind."""
_PRODUCT = ("sidesave/", *(f"{house}/" for house in rooms.HOUSES))
_DOTTED = re.compile(r"\bsidesave(?:\.\w+)+")
_IMPORTED = re.compile(r"\b(?:from|import)\s+([\w.]+)(?:\s+import\s+([\w, ]+))?")


class Graph:
    """Which file depends on which; paths are relative to the root of the checkout."""

    def __init__(self) -> None:
        found = [
            *(ROOT / "sidesave").glob("*.py"),
            *(ROOT / "scripts").rglob("*.py"),
            *(ROOT / "tests").rglob("*.py"),
        ]
        for house in rooms.HOUSES:
            found += (ROOT / house).rglob("*.py")
        self.files = sorted(str(path.relative_to(ROOT)) for path in found)
        self._modules = {_module_name(file): file for file in self.files}
        self._by_name: dict[str, list[str]] = {}
        for file in self.files:
            self._by_name.setdefault(Path(file).name, []).append(file)
        public = ROOT / "sidesave" / "__init__.py"
        self._public = {
            name.rpartition(".")[2]: name
            for _, name in rooms.imports(public)
            if name.count(".") > 1
        }
        gc.disable()  # each collection would go through all trees, and find nothing
        try:
            self._trees = {file: ast.parse((ROOT / file).read_text()) for file in self.files}
        finally:
            gc.enable()
        self._nodes = {file: list(_walk(tree)) for file, tree in self._trees.items()}
        self._fixtures = self._read_fixtures()
        self.edges = {file: set(self._targets(file)) - {file} for file in self.files}
        # Whoever imports the package gets the public names that he uses, and no others.
        self.edges["sidesave/__init__.py"] = set()

    def tests(self) -> list[str]:
        return [file for file in self.files if re.fullmatch(r"tests/(\w+/)+test_\w+\.py", file)]

    def reached_from(self, file: str) -> set[str]:
        """All that it depends on, itself included."""
        reached, left = {file}, [file]
        while left:
            further = self.edges.get(left.pop(), set()) - reached
            reached |= further
            left += further
        return reached

    def helpers_of_conftest(self) -> set[str]:
        """What conftest.py imports of tests/ before any test: when one of them fails, all do."""
        reached, left = set[str](), ["tests/conftest.py"]
        while left:
            file = left.pop()
            reached.add(file)
            top = (
                node
                for node in self._trees[file].body
                if isinstance(node, (ast.Import, ast.ImportFrom))
            )
            further = {
                target
                for node in top
                for target in self._of_node(node)
                if target.startswith("tests/")
            }
            left += further - reached
        return reached

    def _targets(self, file: str) -> Iterator[str]:
        nodes = self._nodes[file]
        is_product = file.startswith(_PRODUCT)
        for node in nodes:
            yield from self._of_node(node)
        texts = set(_strings(nodes))
        for text in texts:
            if re.fullmatch(r"sidesave(\.\w+)+", text) or (text == "sidesave" and "-m" in texts):
                yield from self._resolve(text)
                yield from self._resolve(f"{text}.__main__")
            elif not is_product:
                yield from self._of_text(text)
        for folder in Path(file).parents:
            if (nearby := f"{folder}/conftest.py") != "tests/conftest.py" and nearby in self._trees:
                yield nearby
        if file.startswith("tests/") and file != "tests/conftest.py":
            names = {node.arg for node in nodes if isinstance(node, ast.arg)} | texts
            for name in names & self._fixtures.keys():
                yield from self._fixtures[name]

    def _of_node(self, node: ast.AST) -> Iterator[str]:
        """By an import, or by a name such as ``sidesave.Checkpointer``."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from self._resolve(alias.name)
                if alias.name == "sidesave" and alias.asname:
                    yield from self._everything_public()
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield from self._resolve(f"{node.module}.{alias.name}")
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "sidesave"
        ):
            yield from self._resolve(f"sidesave.{node.attr}")
        elif isinstance(node, ast.Call) and any(
            isinstance(each, ast.Name) and each.id == "sidesave" for each in node.args
        ):
            # getattr(sidesave, name), monkeypatch.setattr(sidesave, ...)
            yield from self._everything_public()

    def _of_text(self, text: str) -> Iterator[str]:
        """By a program in a string, or by the name of a file."""
        if "import" in text:
            for name in _DOTTED.findall(text):
                yield from self._resolve(name)
            for module, names in _IMPORTED.findall(text):
                for name in names.split(",") if names else [""]:
                    yield from self._resolve(f"{module}.{name.strip()}".rstrip("."))
        if "." in text and "\n" not in text and len(text) < 200:
            candidates = self._by_name.get(text.rpartition("/")[2], ())
            yield from (file for file in candidates if f"/{file}".endswith(f"/{text}"))
            yield text  # a file that is no module
            yield f"docs/{text}"
            yield f"tests/support/{text}"

    def _resolve(self, name: str) -> Iterator[str]:
        """The modules by which a dotted name is reached: its own, and the packages it is in."""
        house, _, attribute = name.partition(".")
        if house == "sidesave" and (public := self._public.get(attribute.partition(".")[0])):
            yield from self._resolve(public)
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            if file := self._modules.get(".".join(parts[:end])):
                yield file

    def _everything_public(self) -> Iterator[str]:
        for name in self._public.values():
            yield from self._resolve(name)

    def _read_fixtures(self) -> dict[str, set[str]]:
        """What each fixture of conftest.py depends on."""
        tree = self._trees["tests/conftest.py"]
        imported: dict[str, list[str]] = {}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    imported[alias.name] = list(self._resolve(f"{node.module}.{alias.name}"))
        found: dict[str, set[str]] = {}
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            if not any(
                "fixture" in ast.unparse(decorator) for decorator in function.decorator_list
            ):
                continue
            nodes = list(ast.walk(function))
            found[function.name] = {target for node in nodes for target in self._of_node(node)}
            for node in nodes:
                if isinstance(node, ast.Name):
                    found[function.name].update(imported.get(node.id, ()))
        return found


def _module_name(file: str) -> str:
    parts = list(Path(file).with_suffix("").parts)
    if parts[0] in rooms.HOUSES:
        parts.insert(0, "sidesave")
    elif parts[0] == "tests":
        # where their imports of each other start
        del parts[: 1 if "simulated_gpu" in parts else -1]
    if parts[-1] == "__init__":
        del parts[-1]
    return ".".join(parts)


_TELLING = (
    ast.Import | ast.ImportFrom | ast.Attribute | ast.Call | ast.arg | ast.Expr | ast.Constant
)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Those beneath it from which something can be told."""
    left = [node]
    while left:
        node = left.pop()
        if isinstance(node, _TELLING):
            yield node
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                left += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and value._fields:
                left.append(value)


def _strings(nodes: list[ast.AST]) -> Iterator[str]:
    """All strings but docstrings, which start nothing."""
    idle = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in idle:
            yield node.value


def choose(changed: Iterable[str], graph: Graph | None = None) -> tuple[list[str], str]:
    """The test modules that a change of these files can break, and why those; paths are relative to
    the root.
    """
    files = set(changed)
    graph = graph or Graph()
    tests = graph.tests()
    if common := sorted(files & (EVERY_TEST | graph.helpers_of_conftest())):
        return tests, f"all {len(tests)} test modules, for every test depends on {common[0]}"
    found = {test for test in tests if graph.reached_from(test) & files}
    if any(file.startswith("tests/simulated_gpu/") for file in files):  # what they run on
        found |= {test for test in tests if "gpu" in test}
    if any(file.startswith((*_PRODUCT, "tests/")) for file in files):
        found |= LOOK_AT_ALL
    if files:
        found.add(LOOKS_FOR_FILES)
    chosen = sorted(found)
    names = " ".join(Path(test).stem for test in chosen) if len(chosen) <= 8 else ""
    return chosen, f"{len(chosen)} of {len(tests)} test modules{': ' * bool(names)}{names}"


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(
        ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True
    )
    return [line for line in re.split(r"[\0\n]", done.stdout) if line]


def changed_files() -> tuple[set[str], str]:
    """What differs from the merge base with ``origin/main``, or from ``HEAD``; and the name of
    which.
    """
    try:
        [base], name = _git("merge-base", "origin/main", "HEAD"), "origin/main"
    except subprocess.CalledProcessError:
        base = name = "HEAD"
    files = {*_git("diff", "--name-only", "--no-renames", "-z", base)}
    return files | {*_git("ls-files", "--others", "--exclude-standard", "-z")}, name


def main() -> None:
    try:
        files, base = changed_files()
    except (subprocess.CalledProcessError, FileNotFoundError):
        chosen, why = Graph().tests(), "all test modules, for git does not tell what has changed"
    else:
        chosen, why = choose(files)
        why = f"{len(files)} file{'s differ' if len(files) != 1 else ' differs'} from {base}; {why}"
    print(why, file=sys.stderr)
    print(*chosen, sep="\n", end="\n" * bool(chosen))


if __name__ == "__main__":
    main()
