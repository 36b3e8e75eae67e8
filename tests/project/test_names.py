"""Names in strings, which no type checker follows, are those of something."""

import ast
import importlib
import re

from scripts import rooms

_NAME = re.compile(r"(?<![\w./-])sidesave\.(?:client|stager|writer_daemon|errors)(?:[.:]\w+)+")


def is_there(name: str) -> bool:
    parts = name.replace(":", ".").split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_names_in_strings_exist():
    """What tests set in another process, say, is named in a string."""
    save = "client.checkpointer:Checkpointer.save"
    assert is_there(f"sidesave.{save}")
    assert not is_there(f"sidesave.{save}_it")
    gone: list[str] = []
    for folder in (*rooms.HOUSES, "tests", "scripts"):
        for path in sorted((rooms.ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    place = path.relative_to(rooms.ROOT)
                    names = _NAME.findall(node.value)
                    gone += [f"{place}: {name}" for name in names if not is_there(name)]
    assert not gone
