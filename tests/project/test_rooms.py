"""A line knows its room: who may import whom, how large a room and a module may be, and the picture
of them.

Tests lie as the rooms do, and share what stands in tests/support.
"""

import ast
import functools
from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from scripts import rooms

# Each room may import from those before it.
FLOORS: Sequence[str] = """
    stager.system_calls stager.gc_pause stager.torch_private stager.signal_safe stager.wrappers
    stager.tables stager.dtypes stager.sharding stager.shares stager.data_parallel stager.ownership
    stager.state stager.devices stager.memory stager.plan stager.copy
    writer_daemon.storage writer_daemon.sealing writer_daemon.format writer_daemon.options
    writer_daemon.protocol writer_daemon.wire writer_daemon.lease writer_daemon.checkpoints
    writer_daemon.save_record writer_daemon.log writer_daemon.commit writer_daemon.writing
    writer_daemon.mirror writer_daemon.process writer_daemon.__main__
    client.arguments client.messages client.cost client.encryption client.runs client.reading
    client.targets client.loading client.options client.increments client.daemon_link client.ranks
    client.saving client.planning client.reporting client.export
    client.checkpointer client.training client.integrations client.cli
""".split()  # noqa: SIM905 - floor by floor

# Of its own house it may import from these alone, where they are named here.
ONLY = {
    "client.runs": {"client.arguments", "client.messages", "client.encryption"},
    "client.reading": {"client.arguments", "client.messages", "client.encryption", "client.runs"},
    "client.targets": {"client.messages", "client.reading"},
    "client.loading": {
        "client.arguments",
        "client.messages",
        "client.encryption",
        "client.runs",
        "client.reading",
        "client.targets",
    },
    "client.daemon_link": {"client.arguments", "client.messages"},
    "client.ranks": {"client.arguments", "client.messages", "client.encryption"},
    "client.reporting": {
        "client.arguments",
        "client.messages",
        "client.runs",
        "client.reading",
        "client.saving",
    },
    "client.export": {
        "client.arguments",
        "client.messages",
        "client.encryption",
        "client.runs",
        "client.reading",
    },
}
# Public class names that two modules define, and the meanings that the name has.
SHARED_NAMES = {"Save"}  # a call of save(), and the message of its staged state to the daemon
KNOW_MESSAGES = {
    f"client.{name}"
    for name in "saving daemon_link checkpointer options ranks arguments".split()  # noqa: SIM905
}
between_rooms = functools.cache(rooms.between_rooms)


def test_imports_lead_down():
    for name, targets in between_rooms().items():
        for target in targets:
            assert FLOORS.index(target) < FLOORS.index(name), (
                f"{name} imports from {target}, which is above it"
            )


def test_no_modules_import_each_other_in_a_circle():
    list(TopologicalSorter(rooms.edges()).static_order())  # raises CycleError, with the modules


@pytest.mark.parametrize("name", ONLY)
def test_a_room_of_the_client_imports_from_few_others(name: str):
    assert {target for target in between_rooms()[name] if target.startswith("client")} <= ONLY[name]


def test_only_who_sends_messages_knows_them():
    for name, targets in between_rooms().items():
        if name.startswith("client") and targets & {"writer_daemon.protocol", "writer_daemon.wire"}:
            assert name in KNOW_MESSAGES


def test_no_room_is_crowded():
    counts: dict[Path, int] = {}
    for path in rooms.modules().values():
        counts[path.parent] = counts.get(path.parent, 0) + 1
    assert {folder: count for folder, count in counts.items() if count > rooms.MAX_MODULES} == {}


def test_no_module_is_long():
    lines = {name: len(path.read_text().splitlines()) for name, path in rooms.modules().items()}
    assert {name: count for name, count in lines.items() if count > rooms.MAX_LINES} == {}


def test_a_search_for_a_public_class_finds_one_class():
    modules_of: dict[str, list[str]] = {}
    for module, path in rooms.modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules_of.setdefault(node.name, []).append(module)
    repeated = {name: modules for name, modules in modules_of.items() if len(modules) > 1}
    assert {name: modules for name, modules in repeated.items() if name not in SHARED_NAMES} == {}
    assert repeated.keys() == SHARED_NAMES, "a name that is no longer shared is still listed"


def test_tests_lie_in_the_rooms_they_are_of():
    found = {
        path.name
        for path in (rooms.ROOT / "tests" / "client").iterdir()
        if path.name != "__pycache__"
    }
    assert found <= {path.name for path in (rooms.ROOT / "client").iterdir() if path.is_dir()}
    assert {*rooms.HOUSES} <= {path.name for path in (rooms.ROOT / "tests").iterdir()}


def test_no_test_module_imports_another():
    modules = [*(rooms.ROOT / "tests").rglob("test_*.py")]
    names = {path.stem for path in modules}
    assert len(names) == len(modules), "two have one name, by which pytest knows them"
    for path in modules:
        imported = {name.partition(".")[0] for _, name in rooms.imports(path)}
        assert not imported & names, (
            f"{path}: what it shares with others belongs into tests/support"
        )


def test_the_picture_is_that_of_the_imports():
    assert rooms.PAGE.read_text() == rooms.page(), "run: python -m scripts.rooms --write"
