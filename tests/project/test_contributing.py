"""What CONTRIBUTING.md names is there: its paths, its classes, the options of its commands."""

import importlib
import re
from pathlib import Path

import pytest

from scripts import rooms

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PATHS = {
    *re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", TEXT),
    *re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:md|py))`", TEXT),
    *re.findall(r"^ {4}(scripts/\w+)", TEXT, re.MULTILINE),
}


@pytest.mark.parametrize("path", sorted(PATHS))
def test_a_path_that_it_names_is_there(path: str):
    assert (ROOT / path).exists()


def test_it_names_what_a_newcomer_looks_for():
    assert {
        "docs/architecture.md",
        "docs/decisions",
        "scripts/test",
        "tests/writer_daemon/test_storage.py",
        "client/",
    } <= PATHS


@pytest.mark.parametrize(
    ("names", "path"), re.findall(r"Derive from ((?:`\w+`[, and]*)+) in `([\w/.]+)`", TEXT)
)
def test_the_classes_to_derive_from_are_abstract_and_where_it_says(names: str, path: str):
    module = importlib.import_module("sidesave." + path.removesuffix(".py").replace("/", "."))
    for name in re.findall(r"\w+", names.replace(" and ", " ")):
        kind = getattr(module, name)
        assert kind.__module__ == module.__name__
        assert kind.__abstractmethods__


def test_the_table_of_devices_and_the_limits_are_what_it_says():
    from sidesave.stager.devices import kinds

    assert kinds._RUNTIMES
    assert f"at most {rooms.MAX_LINES} lines, a room at most {rooms.MAX_MODULES} modules" in TEXT


def test_the_options_of_its_commands_are_known():
    script = (ROOT / "scripts" / "test").read_text()
    for option in re.findall(r"scripts/test.*?(--\w+)", TEXT):
        assert f"{option}) " in script
