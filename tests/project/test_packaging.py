"""The package as it is built and imported: the map of folders, the wheel, and who may import
whom.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sidesave

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("client", "stager", "writer_daemon")
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE_DIR: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]

# What a room may import of sidesave; a name stands for everything beneath it.
MAY_IMPORT = {
    "stager": ("sidesave.errors", "sidesave.stager"),
    "writer_daemon": (
        "sidesave.errors",
        "sidesave.stager.gc_pause",
        "sidesave.stager.memory.arena",
        "sidesave.stager.memory.numa",
        "sidesave.stager.signal_safe",
        "sidesave.stager.system_calls",
        "sidesave.writer_daemon",
    ),
}


def python(code: str, cwd: Path, **env: str) -> str:
    """Runs code in a fresh interpreter, away from the checkout, and returns what it prints."""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def package_folders(top: Path) -> Iterator[Path]:
    for folder, _, files in os.walk(top):  # which does not follow the links
        if "__init__.py" in files:
            yield Path(folder)


def imports(source: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of all that a file imports, be it a module or a name within one."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("wheel")
    tree = base / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("sidesave", *ROOMS):
        shutil.copytree(
            ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        base,
        tree,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = base.glob("*.whl")
    return path


def test_every_package_folder_is_in_the_map_and_every_entry_is_a_folder():
    folders = [folder for name in ("sidesave", *ROOMS) for folder in package_folders(ROOT / name)]
    assert sorted(PACKAGE_DIR.values()) == sorted(
        str(folder.relative_to(ROOT)) for folder in folders
    )
    assert sorted(PACKAGE_DIR) == sorted(PYPROJECT["tool"]["setuptools"]["packages"])
    for package, folder in PACKAGE_DIR.items():
        assert folder in (
            package.replace(".", "/"),
            package.removeprefix("sidesave.").replace(".", "/"),
        )


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_linked_into_the_package(room: str):
    assert (ROOT / "sidesave" / room).readlink() == Path("..", room)


def test_the_wheel_holds_each_module_once_and_nothing_else(wheel: Path):
    modules = {
        f"{package.replace('.', '/')}/{source.name}"
        for package, folder in PACKAGE_DIR.items()
        for source in (ROOT / folder).glob("*.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert sorted(names) == sorted(modules | {"sidesave/py.typed"})
    target = PYPROJECT["project"]["scripts"]["sidesave"].partition(":")[0]
    assert target.replace(".", "/") + ".py" in modules, "the console script leads nowhere"
    assert "sidesave/__main__.py" in names, "python -m sidesave leads nowhere"


def test_the_package_has_the_version_that_it_is_built_with():
    assert sidesave.__version__ == PYPROJECT["project"]["version"]


def test_importing_it_elsewhere_says_that_it_is_for_linux():
    code = "import sys; sys.platform = 'darwin'; import sidesave"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "ImportError: sidesave runs on Linux only" in done.stderr


def test_the_rooms_import_from_an_installed_wheel(wheel: Path, tmp_path: Path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    names = ["sidesave", *(f"sidesave.{room}" for room in ROOMS)]
    code = f"import importlib\nfor name in {names}: print(importlib.import_module(name).__file__)"
    files = python(code, tmp_path, PYTHONPATH=str(site)).split()
    assert files == [str(site / name.replace(".", "/") / "__init__.py") for name in names]


@pytest.mark.parametrize(
    "module",
    [
        "sidesave",
        "sidesave.errors",
        "sidesave.writer_daemon.process.server",
        "sidesave.writer_daemon.__main__",
    ],
)
def test_the_light_modules_import_neither_torch_nor_numpy(module: str, tmp_path: Path):
    code = f"import sys, {module}; print(*({{'torch', 'numpy'}} & sys.modules.keys()))"
    assert python(code, tmp_path).split() == []


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_run_from_client_to_writer_daemon_to_stager(room: str):
    wrong = [
        f"{source.relative_to(ROOT)}:{line}: {name}"
        for source in sorted((ROOT / room).rglob("*.py"))
        for line, name in imports(source)
        if name.partition(".")[0] == "sidesave"
        and not any(f"{name}.".startswith(f"{allowed}.") for allowed in MAY_IMPORT[room])
    ]
    assert wrong == []


def test_public_names_are_sorted_and_each_resolves():
    assert sidesave.__all__ == sorted(sidesave.__all__)
    for name in sidesave.__all__:
        assert getattr(sidesave, name) is not None, name


def test_the_tests_that_pages_name_are_there():
    tests = {
        f"{module.stem}::{name}"
        for module in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", module.read_text(), re.MULTILINE)
    }
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {
        name for page in pages for name in re.findall(r"`(test_\w+::test_\w+)`", page.read_text())
    }
    assert len(named) > 50
    assert named <= tests
