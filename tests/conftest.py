"""What every test may rely on."""

import gc
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import campaigns
import forks
import pytest
from hypothesis import HealthCheck, settings
from managers import Manage, managers_of
from trainers import Orders, Traces

if TYPE_CHECKING:
    from elsewhere import OrdersElsewhere
    from object_server import ObjectServer

    from sidesave import Checkpointer


def reset_inherited() -> None:
    """Undo what the caller has set for its children, which ours would inherit in turn.

    ``nohup``, a job in the background of a script and some CI ignore or block signals. What is
    killed on purpose would leave a core in the checkout.
    """
    # which Python ignores, and no child of it
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


_STARTED = ("gpu", "project", "system/test_security")
"""Tests whose processes start as those of users do; elsewhere they are forked, which takes a tenth
of the time.
"""
_STARTED_DAEMONS = tuple(
    f"system/test_{name}" for name in ("daemon_cores", "elastic", "hosts", "limits", "system_calls")
)
"""Tests of which only trainers are forked: their daemons inherit what is tested."""
_ENDED = "system/test_exits"
"""Tests whose forked processes end as those of users do; elsewhere, and in a quick run, nothing is
taken apart.
"""
_ON_DISK = tuple(f"{name}.py" for name in ("test_storage", "test_limits", "test_power_loss"))
"""Tests of what a disk does; of a quick run all others lie in memory, which takes a seventh less
time.
"""
_MEMORY, _ROOM_NBYTES = "/dev/shm", 4 << 30
_LEFT = pytest.StashKey[set[threading.Thread]]()
_SHARES = pytest.StashKey[dict[str, float]]()
_CAMPAIGN = "campaign"

reset_inherited()
gc.disable()  # until all is imported, which leaves nothing to collect


@pytest.hookimpl(tryfirst=True)  # before pytest and hypothesis look at their options
def pytest_configure(config: pytest.Config) -> None:
    campaigns.quick = config.option.markexpr == "not slow"
    is_worker = hasattr(config, "workerinput")
    if campaigns.quick and not is_worker and not config.option.basetemp and _is_roomy(_MEMORY):
        folder = tempfile.mkdtemp(prefix="sidesave-tests-", dir=_MEMORY)
        config.option.basetemp = f"{folder}/base"
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(campaigns.seed())
    settings.register_profile(  # a slow machine is no failure
        "sidesave",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=campaigns.examples(100),
    )
    settings.load_profile("sidesave")
    if config.getoption("numprocesses", None) and not is_worker:
        forks.share()
        gc.enable()  # this process collects no tests


def _is_roomy(folder: str) -> bool:
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK) and found.f_bavail * found.f_frsize >= _ROOM_NBYTES


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if campaigns.quick:
        line = (
            "a third of each family marked `drawn`; the same one with "
            f"SIDESAVE_TEST_SEED={campaigns.seed()}"
        )
        terminalreporter.write_line(line)
    for report in terminalreporter.getreports(""):
        for name, text in report.user_properties:
            if name == _CAMPAIGN and report.when == "teardown":
                terminalreporter.write_line(f"{report.nodeid.rpartition('/')[2]}: {text}")


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection in a test goes through all these modules again
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if campaigns.quick:
        _draw(config, items)
    items.sort(key=_minutes, reverse=True)  # one that is begun last is waited for alone
    minutes = {
        item.nodeid: _minutes(item) or 0.5
        for item in items
        if "share" in getattr(item, "fixturenames", ())
    }
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    config.stash[_SHARES] = campaigns.seconds_of(minutes, workers)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _cuda_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root"))


def _minutes(item: pytest.Item) -> float:
    marker = item.get_closest_marker("slow")
    return marker.kwargs.get("minutes", 0) if marker else 0


def _draw(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave of each family that is marked ``drawn`` a third, the same one in all workers; a few are
    all run.
    """
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("drawn"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {
        item
        for name, family in families.items()
        for item in set(family) - set(campaigns.third(name, family))
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _cuda_available() -> bool:
    import torch  # only where a test asks for it: it takes seconds

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """No thread of ours outlives its module, and does in the middle of another test what nobody
    there expects.
    """
    yield
    # it may be that of a fixture of the module
    if nextitem is not None and nextitem.path == item.path:
        return

    def left() -> set[threading.Thread]:
        ours = {thread for thread in threading.enumerate() if thread.name.startswith("sidesave")}
        return ours - item.config.stash.setdefault(_LEFT, set())

    deadline = time.monotonic() + 300
    while left() and time.monotonic() < deadline:
        time.sleep(0.01)
    if found := left():
        item.config.stash[_LEFT] |= found  # one module is to blame
        pytest.fail(
            f"a test of {item.path.name} leaves threads: {sorted(thread.name for thread in found)}"
        )


@pytest.fixture(scope="module", autouse=True)
def _forks(request: pytest.FixtureRequest) -> Iterator[None]:
    forks.prepare()
    room = request.path.relative_to(Path(__file__).parent).as_posix()
    if room.startswith(_STARTED):
        yield
    else:
        quick_ends = campaigns.quick or not room.startswith(_ENDED)
        with forks.wanted(daemons=not room.startswith(_STARTED_DAEMONS), quick_ends=quick_ends):
            yield


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """As pytest's, and on a disk where that matters."""
    if request.path.name in _ON_DISK and campaigns.quick and tmp_path.is_relative_to(_MEMORY):
        with tempfile.TemporaryDirectory(prefix="sidesave-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    else:
        yield tmp_path


@pytest.fixture
def share(request: pytest.FixtureRequest) -> Iterator[campaigns.Share]:
    """The time of this campaign; `slow(minutes=...)` says how much it asks for, by default half a
    minute.
    """
    name = request.node.nodeid
    share = campaigns.Share(name, request.config.stash[_SHARES][name])
    yield share
    request.node.user_properties.append((_CAMPAIGN, str(share)))


@pytest.fixture
def started_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons of this test start as those of users do: what they inherit, or how long that takes,
    matters here.
    """
    monkeypatch.delenv(forks.ADDRESS)


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
    end = time.monotonic() + 30  # a daemon may still remove files after its session has ended
    busy = [*reversed(points)]
    while busy := [point for point in busy if subprocess.run(["umount", "-q", point]).returncode]:
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    for point in busy:
        subprocess.run(["umount", "--lazy", point])
    assert not busy, "something still holds a file of these"


@pytest.fixture
def end_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No writer, lease or staging memory outlives its test, whoever made it and in whatever state
    it was left.
    """
    from sidesave.stager.copy.pool import SlotPool
    from sidesave.writer_daemon.lease.lease import Lease
    from sidesave.writer_daemon.writing.writer import Writer

    made: list[Callable[[], None]] = []

    def note(kind: type, end: Callable[[Any], None]) -> None:
        init = kind.__init__

        def noting(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            made.append(lambda: end(self))

        monkeypatch.setattr(kind, "__init__", noting)

    def give_back(pool: SlotPool) -> None:
        for slot in pool._slots:
            pool.release(slot.owner)
        pool.close()

    note(Lease, Lease.release)
    note(Writer, Writer.close)
    note(SlotPool, give_back)
    yield
    for end in reversed(made):
        end()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a run in a store of files, which is not there yet."""
    return f"file://{tmp_path}/store/run"


@pytest.fixture(params=["directory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for a mirror: a directory or a URL."""
    return str(tmp_path / "mirror") if request.param == "directory" else f"file://{tmp_path}/mirror"


@pytest.fixture
def server(tmp_path: Path) -> Iterator["ObjectServer"]:
    """An object store with an empty bucket named ``bucket``, in the folder ``store``."""
    from object_server import serving

    (tmp_path / "store" / "bucket").mkdir(parents=True)
    with serving(tmp_path / "store") as server:
        yield server


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A SeaweedFS with an empty bucket named ``bucket``: the storage options of its clients."""
    from seaweed import seaweed

    with seaweed(tmp_path_factory.mktemp("weed")) as options:
        yield options


@pytest.fixture
def traces() -> Iterator[Traces]:
    """Where trainers and daemons of a test keep their sockets, and how their processes are
    found.
    """
    traces = Traces()
    yield traces
    traces.close()


@pytest.fixture
def traced(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons that this process starts leave no traces either."""
    monkeypatch.setenv("TMPDIR", traces.folder)


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orders]:
    """Orders to the daemons that this test starts."""
    orders = Orders(tmp_path / "orders", monkeypatch.setenv)
    yield orders
    orders.close()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator["OrdersElsewhere"]:
    """Orders to the daemons of one trainer, which takes all other processes to be on another
    machine.
    """
    from elsewhere import OrdersElsewhere

    orders = OrdersElsewhere(tmp_path / "elsewhere")
    yield orders
    orders.close()


@pytest.fixture
def manage(run: Path) -> Iterator[Manage]:
    """Makes managers of the run directory of a test, one after the other."""
    with managers_of(run) as manage:
        yield manage


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator["Checkpointer"]:
    """One with its defaults; tests that want another one make their own."""
    from sidesave import Checkpointer

    with Checkpointer(tmp_path) as made:
        yield made
