"""What every test may rely on."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from managers import Manage, managers_of
from trainers import Orders, Traces

settings.register_profile("sidesave", deadline=None)  # a slow machine is no failure
settings.load_profile("sidesave")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _cuda_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root"))


def _cuda_available() -> bool:
    import torch  # only where a test asks for it: it takes seconds

    return torch.cuda.is_available()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts file systems for one test, as root: ``mount("-t", "tmpfs", "none")`` returns where."""
    points: list[Path] = []

    def mount(*arguments: str | os.PathLike[str]) -> Path:
        point = tmp_path / f"mount-{len(points)}"
        point.mkdir()
        done = subprocess.run(["mount", *arguments, point], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.strip()}")
        points.append(point)
        return point

    yield mount
    busy = [point for point in reversed(points) if subprocess.run(["umount", point]).returncode]
    for point in busy:
        subprocess.run(["umount", "--lazy", point])
    assert not busy, "something still holds a file of these"


@pytest.fixture
def traces() -> Iterator[Traces]:
    """Where trainers and daemons of a test keep their sockets, and how their processes are found."""
    traces = Traces()
    yield traces
    traces.close()


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orders]:
    """Orders to the daemons that this test starts."""
    orders = Orders(tmp_path / "orders", monkeypatch.setenv)
    yield orders
    orders.close()


@pytest.fixture
def manage(run: Path) -> Iterator[Manage]:
    """Makes managers of the run directory of a test, one after the other."""
    with managers_of(run) as manage:
        yield manage
