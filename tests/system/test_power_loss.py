"""Power loss at any moment: whatever the disk has kept, the next start finds every checkpoint that
was promised.

Real saves, commits, deletions and recoveries are recorded, and replayed on a model of a disk (see
``power_loss``). Each state that a power loss may leave is laid out in a fresh directory; there a
reader looks for what had been reported as committed, and a new daemon recovers. Where the states
are too many, a part of them is drawn at random: the seed is printed, and ``SIDESAVE_TEST_SEED``
sets it.
"""

import contextlib
import dataclasses
import errno
import logging
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import campaigns
import pytest
import torch
from campaigns import Share
from power_loss import Death, Disk, Note, Recorder, Sync, Trace, Tree, lay_out, read_in, show
from sessions import Session, State, same

from sidesave import Frozen
from sidesave.client.loading import load as loader
from sidesave.client.reading.verify import verify
from sidesave.client.runs.finding import catalog_of
from sidesave.writer_daemon.commit.recovery import Recovery, recover
from sidesave.writer_daemon.format.names import (
    LEASE_DIRECTORY,
    parse_hidden_directory,
    parse_step_directory,
)
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.lease.record import LeaseRecord
from sidesave.writer_daemon.process import jobs, worker
from sidesave.writer_daemon.process.directories import Directories, LeasedDirectory
from sidesave.writer_daemon.protocol import Delete, Save
from sidesave.writer_daemon.storage import PosixStorage
from sidesave.writer_daemon.writing import tensor_image, writer

SEED = campaigns.seed()
DEAD = "0" * 16
ATTEMPT = "1-7"
"""Of every daemon: in a container, process ids come again after a restart."""
UMASK = os.umask(0o022)
os.umask(UMASK)


def a_state(seed: int) -> State:
    """As small as can be, for there are many; from 10 on with several files of several pages, from
    20 with a base.
    """
    if seed >= 20:
        return {
            "model": {"base": Frozen(torch.arange(7.0)), "w": torch.full((5,), seed + 0.5)},
            "seed": seed,
        }
    if seed < 10:
        return {"model": {"w": torch.full((5,), seed + 0.5)}, "seed": seed}
    return {
        "model": {"w": torch.arange(2500) + seed},
        "optimizer": {"m": torch.arange(1500.0) * seed},
        "seed": seed,
    }


# What is promised ---------------------------------------------------------------------------------

Choice = Mapping[int, frozenset[int | None]]
"""Per step, the seeds of the states that may be found under it; None where there may be no such
step.
"""


@dataclasses.dataclass(frozen=True)
class Promise:
    """What a power loss at this moment may leave."""

    at_once: Choice
    """To readers, before any daemon has started: they were told ``COMMITTED``."""
    after_recovery: Choice
    """To whoever starts a daemon first: ``WRITTEN`` is enough."""


NOTHING = Promise({}, {})


class Run:
    """A daemon at work in a recorded directory, and what it has promised so far."""

    def __init__(self, root: Path, recorder: Recorder) -> None:
        self.root = root
        self.recorder = recorder
        self.session = Session(root, DEAD)
        self._take_over()
        self._at_once: dict[int, frozenset[int | None]] = {}
        self._after: dict[int, frozenset[int | None]] = {}

    def _take_over(self) -> None:
        self.session.writer.close()
        self.session.attempt = ATTEMPT
        self.session.writer = self.session._writer()
        self._events: list[jobs.Event] = []
        place = LeasedDirectory(
            self.session.storage, self.session.lease, self.session.writer, ATTEMPT
        )
        self._directories = Directories(place, "", lambda: place)
        self._worker = worker.StorageWorker(
            1, self._directories, 1, lambda save: None, self._events.append
        )

    def _note(self, what: str) -> None:
        self.recorder.note(what, Promise(dict(self._at_once), dict(self._after)))

    def _may_become(self, step: int, seed: int | None) -> None:
        for promise in (self._at_once, self._after):
            promise[step] = promise.get(step, frozenset({None})) | {seed}

    def _stage(self, step: int, seed: int, *, replace: bool = False) -> Save:
        save = self.session.stage(step, a_state(seed), sequence=seed, replace=replace)
        self._may_become(step, seed)
        self._note(f"step {step} begins")
        return dataclasses.replace(save, created_s=1.0)  # so that every recording is the same

    def save(self, step: int, seed: int, *, replace: bool = False) -> None:
        assert self._serve(self._stage(step, seed, replace=replace)) == ""

    def _serve(self, save: Save, *, with_memory: bool = True) -> str:
        """What the daemon does with a save, and tells; the name of the error if it failed."""
        step, seed = save.step, save.sequence
        self._worker.write(save, self.session._slot.arena if with_memory else None)
        ended = self._events[-1]
        assert isinstance(ended, jobs.WriteEnded)
        if ended.error is not None:
            return ended.error.error
        self._after[step] = frozenset({seed})
        self._note(f"step {step} is WRITTEN")
        self._worker.commit(save)
        ended = self._events[-1]
        assert isinstance(ended, jobs.CommitEnded)
        if ended.error is not None:
            return ended.error.error
        self._is_committed(step, seed)
        return ""

    def _is_committed(self, step: int, seed: int) -> None:
        self._after[step] = self._at_once[step] = frozenset({seed})
        self._note(f"step {step} is COMMITTED")

    def delete(self, step: int) -> None:
        self._may_become(step, None)
        self._note(f"the deletion of step {step} begins")
        self._worker.delete(
            Delete(attempt=1, save_id=9, steps=(step,), sequence=1 << 40, retry=False)
        )
        assert self._events[-1] == jobs.DeleteEnded(9)
        self._at_once[step] = self._after[step] = frozenset({None})
        self._note(f"step {step} is DELETED")
        self._directories.empty_trash(everything=True)

    def refused_save(self, step: int, seed: int) -> None:
        """A save of a step that is there, and that it may not replace."""
        before = dict(self._at_once), dict(self._after)
        save = self._stage(step, seed)
        self._at_once, self._after = before
        self._note("but it may not replace what is there")
        self._worker.write(save, self.session._slot.arena)
        if not isinstance(self._events[-1], jobs.WriteEnded) or self._events[-1].error is None:
            self._worker.commit(save)
        ended = self._events[-1]
        assert isinstance(ended, jobs.WriteEnded | jobs.CommitEnded)
        assert ended.error is not None
        assert ended.error.error == "CheckpointExistsError"
        self._note("it was refused")

    def failing_save(
        self,
        step: int,
        seed: int,
        operation: int,
        code: int,
        *,
        afterwards: bool = False,
        replace: bool = False,
    ) -> bool:
        """A save whose ``operation``-th change fails, with or without effect; whether it was as
        long as that.
        """
        old = self._at_once.get(step, frozenset({None}))
        save = self._stage(step, seed, replace=replace)

        def failed() -> None:
            self._at_once[step] = self._after[step] = old | {seed}
            self._note("it fails")

        self.recorder.fail_at(operation, code, afterwards=afterwards, then=failed)
        error = self._serve(save)
        if error == "CommitUnknownError":  # whoever asks again has an answer to rely on
            self.session.commit(save)
            self._is_committed(step, seed)
        elif error:
            assert code not in worker.TRANSIENT, f"{error} without a second try"
            self._note(f"it came to {error}")
        return self.recorder.live_on()

    def killed_save(
        self, step: int, seed: int, operation: int, *, replace: bool = False, resumed: bool
    ) -> bool:
        """A save whose daemon dies before its ``operation``-th change, then the next daemon;
        whether the first died.

        Unless it is ``resumed``, the trainer has died as well: its memory is gone, and nobody asks
        for the save again.
        """
        save = self._stage(step, seed, replace=replace)
        self.recorder.die_at(operation)
        with contextlib.suppress(Death):
            self._serve(save)
        written = self._after[step] == frozenset({seed})
        self.session.end()
        died = self.recorder.live_on()
        self.session.respawn()
        self._take_over()
        self._note("the next daemon starts")
        self.session.recover()
        for found_step, found_seed in visible(self.root).items():
            self._is_committed(found_step, found_seed)
        if resumed:
            if not written:
                self._may_become(step, seed)
            self._note("the save comes again")
            assert self._serve(dataclasses.replace(save, retry=True), with_memory=not written) == ""
        return died


def first_save(run: Run) -> None:
    run.save(100, 1)


def second_save(run: Run) -> None:
    run.save(100, 1)
    run.save(200, 2)


def overwritten_step(run: Run) -> None:
    run.save(100, 1)
    run.save(100, 2, replace=True)


def deleted_step(run: Run) -> None:
    run.save(100, 1)
    run.save(200, 2)
    run.delete(100)
    run.save(100, 3)


def refused_overwriting(run: Run) -> None:
    run.save(100, 1)
    run.refused_save(100, 2)


def step_saved_again_after_a_full_disk(run: Run) -> None:
    run.save(100, 1)
    assert run.failing_save(200, 2, 30, errno.ENOSPC)
    run.save(200, 3)


def linked_base(run: Run) -> None:
    run.save(100, 20)
    run.save(200, 21)
    run.delete(100)


SCENARIOS = [
    first_save,
    second_save,
    overwritten_step,
    deleted_step,
    refused_overwriting,
    step_saved_again_after_a_full_disk,
    linked_base,
]


def large_states(run: Run) -> None:
    run.save(100, 10)
    run.save(100, 11, replace=True)


def record(
    folder: Path, scenario: Callable[[Run], object], *, hard_links: bool = True, threads: int = 1
) -> Trace:
    """The trace of a scenario in a new directory; the model must have followed it to the last byte.

    One thread that writes makes the same trace every time, so that a seed names the same states.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "IN_FLIGHT", threads)
        patch.setattr(tensor_image, "CHUNK_NBYTES", 4096)
        patch.setattr(worker, "FIRST_BACKOFF_S", 0.0)
        root = Path(name)
        recorder = Recorder(root, apart=LEASE_DIRECTORY, hard_links=hard_links)
        with recorder.recording():
            run = Run(root, recorder)
            try:
                scenario(run)
            finally:
                run.session.close()
        disk = Disk(recorder.trace)
        for event in recorder.trace.events:
            disk.apply(event)
        shutil.rmtree(root / LEASE_DIRECTORY)
        assert disk.is_now() == read_in(root), "something was not recorded"
        return recorder.trace


# What is found ------------------------------------------------------------------------------------


class Fault(Exception):
    """A directory that nobody was ever to see."""


_known: dict[Tree, int] = {}
"""Directories of checkpoints that were verified and loaded before."""


def visible(root: Path) -> dict[int, int]:
    """What readers find, each verified and bit-exact: the seed of each step's state, by step."""
    found = {info.step: info for info in catalog_of(str(root)).all()}
    named = {
        step for path in root.iterdir() if (step := parse_step_directory(path.name)) is not None
    }
    if not named <= found.keys():
        raise Fault(f"visible, but no checkpoint: {named - found.keys()}")
    seeds = {step: _seed_of(Path(info.path)) for step, info in found.items()}
    if [info.sequence for info in found.values()] != sorted(seeds.values()):
        raise Fault(f"the newest is not the last one: {seeds}")
    return seeds


def _seed_of(path: Path) -> int:
    tree = read_in(path)
    if tree not in _known:
        report = verify(path)
        if not report.ok:
            raise Fault(f"{path.name}: {'; '.join(map(str, report.faults))}")
        state = loader.load(path)
        if not same(state, a_state(state["seed"])):
            raise Fault(f"{path.name} holds another state")
        if any(
            mode != (0o777 if isinstance(content, tuple) else 0o666) & ~UMASK
            for mode, content in _all(tree)
        ):
            raise Fault(f"{path.name} is not open to those that the umask allows: {show(tree)}")
        _known[tree] = state["seed"]
    return _known[tree]


def _all(tree: Tree) -> Iterator[Tree]:
    yield tree
    if isinstance(tree[1], tuple):
        for _, child in tree[1]:
            yield from _all(child)


@dataclasses.dataclass
class Outcome:
    """What became of one state of the disk."""

    at_once: dict[int, int]
    after_recovery: dict[int, int]
    fault: str
    recovery: Trace


class Violation(AssertionError):
    """A state of the disk that breaks a promise."""


class Judge:
    """Lays out states of a disk, starts a daemon there, and remembers what came of each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._holder = LeaseRecord.current("f" * 16, os.getpid())
        self._released = self._give_up_a_lease()
        self.outcomes: dict[Tree, Outcome] = {}
        self.sampled = False
        self.points = 0

    def replay(
        self,
        trace: Trace,
        most: int,
        *,
        without: str = "",
        ordered: bool = False,
        start: str = "",
        promise: Promise = NOTHING,
    ) -> None:
        """Judge what every power loss may leave, after each event from the note ``start`` on.

        Args:
            trace: What was recorded.
            most: States tried after one event.
            without: A sync of this site is one that the code has forgotten.
            ordered: Whether the file system orders changes of directories.
            start: The name of a note.
            promise: What had been promised before.
        """
        rng = random.Random(f"{SEED} {without}")
        disk = Disk(trace, ordered=ordered)
        begun = not start
        for number, event in enumerate(trace.events):
            if isinstance(event, Sync):
                if event.site != without:
                    disk.apply(event)
                continue  # it leaves no state that was not possible before
            disk.apply(event)
            if isinstance(event, Note):
                promise = event.content
                begun = begun or event.what == start
            if not begun:
                continue
            trees, all_of_them = disk.states(most, rng)
            self.sampled |= not all_of_them
            self.points += 1
            for tree in trees:
                self._judge(tree, promise, lambda n=number: _story(trace, n, without))

    def _judge(self, tree: Tree, promise: Promise, story: Callable[[], str]) -> None:
        outcome = self.outcomes.get(tree)
        if outcome is None:
            outcome = self.outcomes[tree] = self._try(tree)
        fault = outcome.fault
        fault = fault or _difference("before recovery", promise.at_once, outcome.at_once)
        fault = fault or _difference(
            "after recovery", promise.after_recovery, outcome.after_recovery
        )
        if fault:
            raise Violation(f"{fault}\n{story()}\nThe disk held\n{show(tree)}")

    def _try(self, tree: Tree) -> Outcome:
        root = self._folder / "run"
        lay_out(tree, root)
        epochs = [
            int(number)
            for path in root.iterdir()
            for number in re.findall(r"salvage-(\d+)", path.name)
        ]
        # it was apart: say that the last one was given up
        if not (root / LEASE_DIRECTORY).exists():
            (root / LEASE_DIRECTORY).mkdir()
            (root / LEASE_DIRECTORY / str(max(epochs, default=0) + 1)).write_bytes(self._released)
        outcome = Outcome({}, {}, "", Trace())
        try:
            outcome.at_once = visible(root)
            recorder = Recorder(root, apart=LEASE_DIRECTORY)
            outcome.recovery = recorder.trace
            with recorder.recording():
                result = self._recover(root)
            if result.left:
                raise Fault(f"left: {result.left}")
            hidden = [path.name for path in root.iterdir() if parse_hidden_directory(path.name)]
            if hidden:
                raise Fault(f"not cleaned: {hidden}")
            outcome.after_recovery = visible(root)
            found = {step: frozenset({seed}) for step, seed in outcome.after_recovery.items()}
            recorder.note("READY", Promise(found, found))
        except (Fault, OSError) as error:
            outcome.fault = f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(root)
        return outcome

    def _give_up_a_lease(self) -> bytes:
        with (
            tempfile.TemporaryDirectory(dir=self._folder) as name,
            contextlib.closing(PosixStorage(name)) as storage,
        ):
            lease = Lease(storage, self._holder, 0.0, lambda: True)
            lease.release()
            return (Path(name) / LEASE_DIRECTORY / str(lease.epoch)).read_bytes()

    def _recover(self, root: Path) -> Recovery:
        with contextlib.ExitStack() as held:
            storage, of_lease = PosixStorage(str(root)), PosixStorage(str(root))
            held.callback(storage.close)
            held.callback(of_lease.close)
            lease = Lease(of_lease, self._holder, 0.0, lambda: True)
            held.callback(lease.release)
            return recover(storage, lease, ATTEMPT)

    def recoveries(self, most: int) -> list[tuple[Trace, Promise]]:
        """Recoveries that did different things, at most so many, and what had to hold during
        them.
        """
        different: dict[tuple[str, ...], tuple[Trace, Promise]] = {}
        for outcome in self.outcomes.values():
            if not outcome.fault:
                doing = tuple(
                    e.site if isinstance(e, Sync) else e.what.split()[0]
                    for e in outcome.recovery.events
                )
                kept = {
                    step: frozenset[int | None]({seed}) for step, seed in outcome.at_once.items()
                }
                after = {
                    step: frozenset[int | None]({seed})
                    for step, seed in outcome.after_recovery.items()
                }
                at_once = {step: after[step] | kept.get(step, {None}) for step in after}
                different.setdefault(doing, (outcome.recovery, Promise(at_once, after)))
        chosen = list(different.values())
        return random.Random(SEED).sample(chosen, min(most, len(chosen)))


def _difference(when: str, promised: Choice, found: Mapping[int, int]) -> str:
    for step in sorted(promised.keys() | found.keys()):
        choice = promised.get(step, frozenset({None}))
        if found.get(step) not in choice:
            return f"{when}, step {step} holds {found.get(step)}, promised was one of {set(choice)}"
    return ""


def _story(trace: Trace, last: int, without: str) -> str:
    lines = [
        f"  {number:3} {event.what}" + (f", for {event.site}" if isinstance(event, Sync) else "")
        for number, event in enumerate(trace.events[: last + 1])
        if not (isinstance(event, Sync) and event.site == without)
    ]
    forgotten = f", without the sync of {without}" if without else ""
    return f"Seed {SEED}. Power was lost after the last of these{forgotten}:\n" + "\n".join(
        lines[-60:]
    )


# The proof ----------------------------------------------------------------------------------------

MOST, FEWER, FEW = 1 << 12, 1 << 8, 1 << 5
"""States tried after one event; where there are no more, all of them are."""
KILLED, FAILED = "the next daemon starts", "it fails"
NEEDLESS = "nothing is lost without these syncs: "


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where directories are laid out by the thousand; in memory, for nothing here depends on the
    medium.
    """
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="sidesave-power-", dir=shared) as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Of each of thousands of damaged leftovers a warning is written."""
    caplog.set_level(logging.CRITICAL, "sidesave")


@pytest.fixture(scope="module")
def judge(folder: Path) -> Judge:
    return Judge(folder)


def killed_at(
    operation: int, *, replace: bool, resumed: bool, died: list[bool]
) -> Callable[[Run], None]:
    def scenario(run: Run) -> None:
        if replace:
            run.save(100, 1)
        died.append(run.killed_save(100, 2, operation, replace=replace, resumed=resumed))

    return scenario


def failed_at(
    operation: int, code: int, *, afterwards: bool, replace: bool, died: list[bool]
) -> Callable[[Run], None]:
    def scenario(run: Run) -> None:
        if replace:
            run.save(100, 1)
        died.append(
            run.failing_save(100, 2, operation, code, afterwards=afterwards, replace=replace)
        )

    return scenario


Sweep = Callable[[int, list[bool]], Callable[[Run], None]]
KILLS: list[Sweep] = [
    lambda n, died, replace=replace, resumed=resumed: killed_at(
        n, replace=replace, resumed=resumed, died=died
    )
    for replace in (False, True)
    for resumed in (False, True)
]
FAILURES: list[Sweep] = [
    lambda n, died, code=code, late=late, replace=replace: failed_at(
        n, code, afterwards=late, replace=replace, died=died
    )
    for code, late in ((errno.ENOSPC, False), (errno.EIO, False), (errno.EIO, True))
    for replace in (False, True)
]


def recordings(folder: Path, sweep: Sweep) -> Iterator[Trace]:
    """A recording for each operation of a save: it is the one that fails, or before which the
    daemon dies.
    """
    died: list[bool] = [True]
    operation = 0
    while died[-1]:
        yield record(folder, sweep(operation, died))
        operation += 1


@pytest.mark.parametrize(
    "scenario",
    [SCENARIOS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in SCENARIOS[1:])],
)
def test_power_loss_at_any_moment_leaves_what_was_promised(
    folder: Path, judge: Judge, scenario: Callable[[Run], None]
):
    trace = record(folder, scenario)
    judge.replay(trace, campaigns.examples(FEWER))
    judge.replay(trace, campaigns.examples(FEWER), ordered=True)


@pytest.mark.slow
def test_power_loss_where_there_are_no_hard_links(folder: Path, judge: Judge):
    judge.replay(record(folder, overwritten_step, hard_links=False), FEWER)


@pytest.mark.slow
@pytest.mark.parametrize("sweep", KILLS[-2:], ids=["trainer dead as well", "trainer alive"])
def test_power_loss_after_the_daemon_was_killed(folder: Path, judge: Judge, sweep: Sweep):
    traces = list(recordings(folder, sweep))
    for trace in random.Random(SEED).sample(traces, 5):
        judge.replay(trace, FEW, start=KILLED)
    assert len(traces) > 40


@pytest.mark.slow
def test_power_loss_while_a_recovery_runs(folder: Path):
    judge = Judge(folder)
    judge.replay(record(folder, overwritten_step), FEW)
    recoveries = judge.recoveries(6)
    for trace, promise in recoveries:
        judge.replay(trace, FEW, promise=promise)
    assert len(recoveries) == 6


@pytest.mark.slow
def test_power_loss_while_the_lease_is_taken_or_given_up(folder: Path, judge: Judge):
    with tempfile.TemporaryDirectory(dir=folder) as name:
        recorder = Recorder(Path(name))
        with recorder.recording():
            run = Run(Path(name), recorder)
            run.save(100, 1)
            run.session.end()
            run.session.respawn()
            run.session.close()
    judge.replay(recorder.trace, FEW // 2)


def test_forgotten_sync_of_a_save_is_noticed(folder: Path, judge: Judge):
    trace = record(folder, second_save)
    sites = sorted(trace.sites())
    assert len(sites) > 5
    unnoticed = [
        site for site in campaigns.sample(sites) if not notices(judge, site, [(trace, NOTHING, "")])
    ]
    assert not unnoticed, NEEDLESS + ", ".join(unnoticed)


def notices(
    judge: Judge, site: str, traces: Iterable[tuple[Trace, Promise, str]], ordered: bool = False
) -> bool:
    """Whether a power loss breaks a promise once the code has forgotten the sync of ``site``."""
    try:
        for trace, promise, start in traces:
            if site in trace.sites():
                judge.replay(
                    trace, FEW, without=site, ordered=ordered, start=start, promise=promise
                )
    except Violation:
        return True
    return False


@pytest.mark.slow(minutes=5)
@pytest.mark.timeout(3600)
def test_power_loss_campaign(folder: Path, share: Share, capsys: pytest.CaptureFixture[str]):
    """Many more moments; then there is no sync that could be left out without being noticed."""
    judge = Judge(folder)
    traces = [
        (record(folder, scenario, hard_links=links), NOTHING, "")
        for scenario in SCENARIOS
        for links in (True, False)
    ]
    for trace, _, _ in traces:
        judge.replay(trace, campaigns.length(MOST))
    extent = f"up to {campaigns.length(MOST):,} a moment" if judge.sampled else "all there are"
    sampled = [(record(folder, large_states, threads=writer.IN_FLIGHT), NOTHING, "")]
    sampled += [(trace, NOTHING, KILLED) for sweep in KILLS for trace in recordings(folder, sweep)]
    sampled += [
        (trace, NOTHING, FAILED) for sweep in FAILURES for trace in recordings(folder, sweep)
    ]
    sampled += [(trace, promise, "") for trace, promise in judge.recoveries(campaigns.length(30))]
    for trace, promise, start in sampled:
        judge.replay(trace, FEW, start=start, promise=promise)
    points, states = judge.points, len(judge.outcomes)
    traces += sampled
    sites = sorted(set().union(*(trace.sites() for trace, _, _ in traces)))
    noticed = {site: notices(judge, site, traces) for site in share.points(sites)}
    unnoticed = [site for site, is_noticed in noticed.items() if not is_noticed]
    with capsys.disabled():
        print(
            f"\npower loss: {points:,} moments of {len(traces)} recordings, {states:,} different "
            f"states of the disk ({extent} for {len(SCENARIOS)} scenarios, {FEW} a moment for the "
            f"rest, seed {SEED}); {len(noticed)} of {len(sites)} syncs left out one by one, "
            f"{sum(noticed.values())} noticed"
        )
    assert not unnoticed, NEEDLESS + ", ".join(unnoticed)
