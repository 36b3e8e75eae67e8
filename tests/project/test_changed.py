"""Which tests `scripts/test --changed` takes: by imports, by other processes, and all where that is
safer.
"""

import subprocess
from pathlib import Path

import pytest

from scripts import changed


@pytest.fixture(scope="module")
def graph() -> changed.Graph:
    return changed.Graph()


def chosen(graph: changed.Graph, *files: str) -> set[str]:
    tests, _ = changed.choose(files, graph)
    assert tests == sorted(tests)
    return {Path(test).stem for test in tests}


@pytest.mark.parametrize(
    ("file", "reached", "beyond"),
    [
        (
            "client/cli/listing.py",
            {"test_cli", "test_top"},
            {"test_lease", "test_manager", "test_staging"},
        ),
        ("client/runs/watch.py", {"test_watching", "test_cli"}, {"test_arena", "test_staging"}),
        ("client/training/retention.py", {"test_manager"}, {"test_staging", "test_storage"}),
        ("stager/memory/arena.py", {"test_arena", "test_image", "test_daemon"}, {"test_conftest"}),
        (
            "writer_daemon/process/jobs.py",
            {"test_jobs", "test_daemon", "test_manager"},
            {"test_arena", "test_storage"},
        ),
        ("writer_daemon/storage/__init__.py", {"test_storage"}, {"test_arena"}),
    ],
)
def test_a_module_reaches_tests_through_imports_and_the_daemon(
    graph: changed.Graph, file: str, reached: set[str], beyond: set[str]
):
    found = chosen(graph, file)
    assert found >= reached | {"test_rooms", "test_packaging"}
    assert not found & beyond


@pytest.mark.parametrize(
    ("file", "reached"),
    [
        ("tests/support/elastic_trainer.py", {"test_elastic"}),
        ("tests/support/manager_trainer.py", {"test_preemption"}),  # started by its file's name
        ("tests/support/gpu_ranks.py", {"test_gpu_training"}),
        ("tests/support/faults.c", {"test_faults"}),
        ("tests/client/ranks/conftest.py", {"test_ranks", "test_world"}),
        ("scripts/fuzz.py", {"test_hostile"}),
        ("tests/support/network_storage.py", {"test_lease", "test_takeover"}),
        ("tests/simulated_gpu/runtime/memory.cpp", {"test_gpu", "test_simulated_gpu"}),
    ],
)
def test_helpers_and_files_of_tests_reach_who_uses_them(
    graph: changed.Graph, file: str, reached: set[str]
):
    found = chosen(graph, file)
    assert found >= reached
    assert len(found) < 20


@pytest.mark.parametrize(
    "file", ["pyproject.toml", "tests/conftest.py", "tests/support/trainers.py", "scripts/test"]
)
def test_what_every_test_depends_on_means_all(graph: changed.Graph, file: str):
    tests, why = changed.choose([file, "README.md"], graph)
    assert tests == graph.tests()
    assert why == f"all {len(tests)} test modules, for every test depends on {file}"


def test_the_files_that_are_named_here_are_there():
    for file in changed.EVERY_TEST | changed.LOOK_AT_ALL | {changed.LOOKS_FOR_FILES}:
        assert (changed.ROOT / file).is_file(), file


def test_nothing_changed_means_no_test(graph: changed.Graph):
    assert changed.choose([], graph)[0] == []


def test_what_has_changed_is_committed_not_committed_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def git(*arguments: str) -> None:
        me = ("-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", tmp_path, *me, *arguments], check=True, capture_output=True)

    monkeypatch.setattr(changed, "ROOT", tmp_path)
    git("init", "-b", "main")
    (tmp_path / ".gitignore").write_text("ignored\n")
    for name in ("same", "committed", "edited", "removed"):
        (tmp_path / name).write_text("before")
    git("add", ".")
    git("commit", "-m", "first")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    (tmp_path / "committed").write_text("after")
    git("commit", "-am", "second")
    (tmp_path / "edited").write_text("after")
    (tmp_path / "removed").unlink()
    for name in ("new file", "ignored"):
        (tmp_path / name).touch()
    assert changed.changed_files() == (
        {"committed", "edited", "removed", "new file"},
        "origin/main",
    )
    git("update-ref", "-d", "refs/remotes/origin/main")
    assert changed.changed_files() == ({"edited", "removed", "new file"}, "HEAD")


def test_it_says_in_one_line_what_it_has_chosen(
    graph: changed.Graph, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(changed, "Graph", lambda: graph)  # made once
    changed.main()
    told = capsys.readouterr()
    assert "test modules" in told.err and len(told.err.splitlines()) == 1
    assert all((changed.ROOT / line).is_file() for line in told.out.splitlines())
