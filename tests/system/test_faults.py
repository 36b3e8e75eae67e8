"""Faults from the system: every call that a daemon makes on its run directory fails, in every way.

``faults.c`` is preloaded into real daemons, and makes chosen calls fail between them and the
kernel.
"""

import collections
import contextlib
import dataclasses
import errno
import itertools
import mmap
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import campaigns
import pytest
from campaigns import Share
from trainers import DEADLINE_S, ROOT, a_state, check, same, save_steps

import sidesave
from sidesave.client.runs.finding import catalog_of
from sidesave.errors import (
    CheckpointExistsError,
    CommitUnknownError,
    DaemonStartError,
    NoSpaceError,
    SidesaveError,
    WriteError,
)

SMALL = 0.05
CODES = (
    *(
        errno.EIO,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EMFILE,
        errno.ENFILE,
        errno.EACCES,
        errno.ESTALE,
    ),
    *(errno.ENOMEM, errno.ETIMEDOUT),
)


# Faults on order ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """A call on the run directory: its name, a pattern of its path, and how many of the same kind
    precede it.
    """

    function: str
    path: str
    nth: int = 0

    def at(self, step: int) -> Self:
        """The same call of another save, where ``path`` says ``{step}``."""
        return dataclasses.replace(self, path=self.path.replace("{step}", f"step-{step:08d}"))


class Faults:
    """Orders to the daemons that are started with this environment; see ``faults.c``."""

    def __init__(
        self, folder: Path, root: Path, library: Path, environment: Callable[[str, str], None]
    ) -> None:
        folder.mkdir()
        self._record = folder / "record"
        self._record.touch()
        with (folder / "page").open("w+b") as file:
            file.truncate(4096)
            self._page = mmap.mmap(file.fileno(), 4096)
        environment("FAULTS_PAGE", str(folder / "page"))
        environment("FAULTS_RECORD", str(self._record))
        environment("FAULTS_ROOT", str(root))
        environment("LD_PRELOAD", str(library))

    def _write(self, mode: int, *order: int, function: str = "", path: str = "") -> None:
        self._page[:4] = bytes(4)
        struct.pack_into(
            "6i32s1024s", self._page, 4, *(order or (0,) * 6), function.encode(), path.encode()
        )
        struct.pack_into("i", self._page, 0, mode)

    @contextlib.contextmanager
    def recording(self, calls: list[Call], step: int | None = None) -> Iterator[None]:
        """Collect the calls that are made meanwhile; ``step`` is the save's whose paths are told as
        ``{step}``.
        """
        os.truncate(self._record, 0)
        self._write(1)
        yield
        self._write(0)
        seen: collections.Counter[tuple[str, str]] = collections.Counter()
        for line in self._record.read_text().splitlines():
            function, path = line.split(" ", 1)
            if step is not None:
                path = path.replace(f"step-{step:08d}", "{step}")
            path = re.sub(r"[0-9a-f]{16}", "*", path)  # a session
            path = re.sub(r"(/\..*)\.\d+-\d+(\.\d+)?", r"\1.*", path)  # an attempt
            seen[function, path] += 1
            if function != "readdir" or seen[function, path] <= 2:
                calls.append(Call(function, path, seen[function, path] - 1))

    def order(
        self,
        call: Call | None,
        code: int,
        *,
        lasting: bool = False,
        after: bool = False,
        short: int | None = None,
    ) -> None:
        """Have ``call`` fail.

        Args:
            call: Which one; None is the next of any kind.
            code: The errno.
            lasting: Whether every later call on the run directory fails as well, until
                :meth:`withdraw`.
            after: Whether it does its work before it fails, like a request over a network whose
                answer is lost.
            short: Instead of failing it moves only so many bytes.
        """
        call = call or Call("", "")
        effect = 2 if short is not None else int(after)
        order = (code, effect, int(lasting), call.nth, short or 0, 0)
        self._write(2, *order, function=call.function, path=call.path)

    def withdraw(self) -> int:
        """Let everything succeed again; how many calls have failed."""
        self._page[:4] = bytes(4)
        (hits,) = struct.unpack_from("i", self._page, 24)
        return hits


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        library,
        ROOT / "tests/support/faults.c",
        "-ldl",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the C compiler cannot make a library here: {done.stderr.strip()[-300:]}")
    return library


@pytest.fixture
def faults(tmp_path: Path, run: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(tmp_path / "faults", run, library, monkeypatch.setenv)


# Saves --------------------------------------------------------------------------------------------

WRITING = ("mkdir", "create", "fallocate", "pwrite", "ftruncate", "fsync", "link", "rename")
NEEDED = re.compile(r"cannot (create|write) .*[\d,]+ bytes|[\d,]+ bytes are needed")
OVER_A_NETWORK = {
    "mkdir": errno.EEXIST,
    "create": errno.EEXIST,
    "link": errno.EEXIST,
    "rename": errno.ENOENT,
    "unlink": errno.ENOENT,
    "rmdir": errno.ENOENT,
}
"""What a request is answered that had been carried out before, the answer being lost."""


class Campaign:
    """Many saves by one daemon, each met by one fault, each followed by a save that meets none."""

    def __init__(
        self, run: Path, faults: Faults, *, overwrite: bool = False, retries: int = 0
    ) -> None:
        self.run, self._faults, self._overwrite, self._retries = run, faults, overwrite, retries
        self.outcomes: collections.Counter[type] = collections.Counter()
        self.missed: list[Call] = []
        self.tried = 0
        self.calls: list[Call] = []
        self._step = itertools.count(1)
        self._old: list[int] = []

    def __enter__(self) -> Self:
        self.ckpt = sidesave.Checkpointer(
            self.run, failures=sidesave.FailureOptions(retries=self._retries)
        )
        self._save(0).committed.result(DEADLINE_S)
        step = self._next()
        with self._faults.recording(self.calls, step):
            self._save(step).committed.result(DEADLINE_S)
        assert {call.function for call in self.calls} >= {
            *(
                "mkdir",
                "statvfs",
                "create",
                "pwrite",
                "ftruncate",
                "fsync",
                "close",
                "link",
                "unlink",
                "open",
                "read",
            ),
            *("readdir", "chmod", "stat", "rename"),
        }, "the calls of a save are seen"
        self._discard(step)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.suppress(SidesaveError):
            self.ckpt.close()
        if kind is not None:
            return
        assert len(self.missed) < self.tried / 20, (
            "the faults were met, but for some after the outcome"
        )
        with sidesave.Checkpointer(self.run):
            assert self._hidden() == [], "the next start removes what could not be removed"
        for step, path in self._found().items():
            assert whole(path, step) or whole(path, _old(step)), f"step {step}"
        assert set(self._found()) >= {0, *self._old}, "nothing that had been committed is lost"

    def _next(self) -> int:
        step = next(self._step)
        if self._overwrite:
            self.ckpt.save(step, a_state(_old(step), SMALL)).committed.result(DEADLINE_S)
        return step

    def _save(self, step: int) -> sidesave.SaveHandle:
        return self.ckpt.save(step, a_state(step, SMALL), overwrite=self._overwrite)

    def _found(self) -> dict[int, str]:
        return {info.step: info.path for info in catalog_of(str(self.run)).all()}

    def _discard(self, step: int) -> None:
        shutil.rmtree(self.run / f"step-{step:08d}")

    def _hidden(self) -> list[str]:
        return [path.name for path in self.run.glob(".step-*")]

    def meet(self, call: Call, code: int, *, lasting: bool = False, after: bool = False) -> None:
        """One save that meets a fault, and what must be true whatever comes of it."""
        self.tried += 1
        step, before = self._next(), self._hidden()
        self._faults.order(call.at(step), code, lasting=lasting, after=after)
        error = self._save(step).committed.exception(DEADLINE_S)
        if not self._faults.withdraw():
            self.missed.append(call)
        what = (
            f"{call} met {errno.errorcode[code]}{' for long' if lasting else ''}"
            f"{' afterwards' if after else ''}"
        )
        self.outcomes[type(error)] += 1
        self._judge(step, error, code, call.function, lasting, what)
        if not lasting:
            left = set(self._hidden()) - set(before)
            if error is None or isinstance(
                error, CommitUnknownError
            ):  # the old one could not be removed
                left = {name for name in left if not name.endswith((".replaced", ".trash"))}
            assert not left, f"{what}: {left} is left"
            if step in self._found():
                self._discard(step)
        elif self._overwrite:
            self._old.append(step)
        following = self._next()
        assert self._save(following).committed.exception(DEADLINE_S) is None, (
            f"{what}: the next save is none the worse"
        )
        assert sidesave.verify(self.run / f"step-{following:08d}").ok, what
        self._discard(following)

    def _judge(
        self,
        step: int,
        error: BaseException | None,
        code: int,
        function: str,
        lasting: bool,
        what: str,
    ) -> None:
        path = self._found().get(step)
        if error is None:
            assert path and whole(path, step), what
            return
        assert isinstance(error, WriteError), f"{what}: {error!r}"
        self.ckpt.wait()
        assert error.errno == code, f"{what}: {error!r}"
        assert str(error.filename).startswith(str(self.run)), f"{what}: {error!r}"
        assert os.strerror(code) in str(error), f"{what}: {error}"
        assert re.search(r"cannot|needed|lease|has its name", str(error)), f"{what}: {error}"
        if code in (errno.ENOSPC, errno.EDQUOT) and function in WRITING:
            assert isinstance(error, (NoSpaceError, CommitUnknownError)), f"{what}: {error!r}"
            if not lasting:  # else nobody says what is free
                assert re.search(r"[\d,]+ (bytes|files).* are free", str(error)), f"{what}: {error}"
                assert function not in ("create", "fallocate", "pwrite") or NEEDED.search(
                    str(error)
                ), f"{what}: {error}"
        if isinstance(error, CommitUnknownError):
            assert path and whole(path, step), what
        elif self._overwrite:
            assert path and whole(path, _old(step)), f"{what}: the old one stays"
        else:
            assert path is None, f"{what}: reported as failed and there all the same"


def _old(step: int) -> int:
    """The seed of what is saved first where a step is overwritten."""
    return step + 10**6


def whole(path: str | Path, seed: int) -> bool:
    """Whether a checkpoint is undamaged and holds the state of that seed."""
    return sidesave.verify(path).ok and same(sidesave.load(path), a_state(seed, SMALL))


def test_any_call_of_a_save_may_fail_once(run: Path, faults: Faults):
    with Campaign(run, faults) as campaign:
        for call, code in zip(
            campaigns.sample(campaign.calls), itertools.cycle(CODES), strict=False
        ):
            campaign.meet(call, code)
    assert campaign.outcomes[WriteError] > campaign.tried / 5
    assert campaign.outcomes[NoSpaceError] > campaign.tried / 20
    check(run, 0, mib=SMALL)


@pytest.mark.slow
def test_storage_may_break_down_at_any_call_of_a_save_and_come_back(
    run: Path, faults: Faults, share: Share
):
    with Campaign(run, faults) as campaign:
        for call, code in zip(
            share.points(campaign.calls), itertools.cycle(CODES[1:]), strict=False
        ):
            campaign.meet(call, code, lasting=True)


@pytest.mark.slow
def test_any_call_of_a_save_may_do_its_work_and_fail_all_the_same(
    run: Path, faults: Faults, share: Share
):
    with Campaign(run, faults) as campaign:
        for call in share.points(campaign.calls):
            campaign.meet(call, OVER_A_NETWORK.get(call.function, errno.EIO), after=True)
    check(run, 0, mib=SMALL)


@pytest.mark.drawn
@pytest.mark.parametrize("nbytes", [0, 1, 512, 4096, 4608])
def test_short_write_in_a_save_goes_on_where_it_stopped(run: Path, faults: Faults, nbytes: int):
    with sidesave.Checkpointer(run, failures=sidesave.FailureOptions(retries=0)) as ckpt:
        for step, file in enumerate(
            ("model.rank-00000.safetensors", "objects.rank-00000.msgpack", "manifest.json"), 1
        ):
            faults.order(Call("pwrite", f".{{step}}.*/.{file}*").at(step), 0, short=nbytes)
            ckpt.save(step, a_state(step, 3)).committed.result(DEADLINE_S)
            assert faults.withdraw() == 1
    check(run, 1, 2, 3, mib=3)


@pytest.mark.slow
def test_any_call_of_a_save_may_fail_in_any_way(run: Path, faults: Faults, share: Share):
    with Campaign(run, faults) as campaign:
        for call, code in share.points(itertools.product(campaign.calls, (*CODES, errno.EINTR))):
            campaign.meet(call, code)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["once", "until it heals", "its work done"])
def test_any_call_of_an_overwriting_save_may_fail_and_the_old_step_stays(
    run: Path, faults: Faults, share: Share, way: str
):
    with Campaign(run, faults, overwrite=True) as campaign:
        for call, code in zip(share.points(campaign.calls), itertools.cycle(CODES), strict=False):
            if way == "its work done":
                campaign.meet(call, OVER_A_NETWORK.get(call.function, code), after=True)
            else:
                campaign.meet(call, code, lasting=way == "until it heals")


@pytest.mark.slow
def test_any_call_of_a_save_may_fail_for_a_moment_and_the_save_is_committed(
    run: Path, faults: Faults, share: Share
):
    with Campaign(run, faults, retries=1) as campaign:
        for call in share.points(campaign.calls):
            campaign.meet(call, errno.EIO)
    assert set(campaign.outcomes) <= {type(None), CommitUnknownError}


@pytest.mark.slow
def test_any_call_of_a_deletion_may_fail_and_the_checkpoint_is_there_or_gone(
    run: Path, faults: Faults, share: Share
):
    calls: list[Call] = []
    step = itertools.count(1)

    def old_step() -> int:
        old = next(step)
        for number in (old, next(step)):
            ckpt.save(number, a_state(number, SMALL)).committed.result(DEADLINE_S)
        return old

    with sidesave.Checkpointer(run, failures=sidesave.FailureOptions(retries=0)) as ckpt:
        old = old_step()
        with faults.recording(calls, old):
            ckpt.delete(old).result(DEADLINE_S)
        assert {call.function for call in calls} >= {"open", "rename", "fsync"}
        for call, code in zip(share.points(calls), itertools.cycle(CODES), strict=False):
            old = old_step()
            what = f"{call} met {errno.errorcode[code]}"
            faults.order(call.at(old), code)
            error = ckpt.delete(old).exception(DEADLINE_S)
            faults.withdraw()
            path = run / f"step-{old:08d}"
            if error is not None:
                assert isinstance(error, WriteError), f"{what}: {error!r}"
                assert error.errno == code, f"{what}: {error!r}"
                assert str(error.filename).startswith(str(run)), f"{what}: {error!r}"
                if path.exists():
                    assert whole(path, old), what
                    ckpt.delete(old).result(DEADLINE_S)
            assert not path.exists(), what
            assert whole(run / f"step-{old + 1:08d}", old + 1), what
    with sidesave.Checkpointer(run) as ckpt:
        assert list(run.glob(".step-*")) == []
        assert all(old % 2 == 0 for old in ckpt.steps()), "nothing that was deleted comes back"


# Starts -------------------------------------------------------------------------------------------


def leave(
    run: Path, faults: Faults, step: int, function: str, *, overwrite: bool = False
) -> list[Path]:
    """What a session leaves whose storage breaks down for good at a call on this step's
    directory.
    """
    ckpt = sidesave.Checkpointer(run, failures=sidesave.FailureOptions(retries=0))
    for earlier in range(
        10 * step, 10 * step + 5 * step
    ):  # so that its place in the order of commits is a later one
        ckpt.save(earlier, a_state(earlier, SMALL)).committed.result(DEADLINE_S)
        shutil.rmtree(run / f"step-{earlier:08d}")
    if overwrite:
        ckpt.save(step, a_state(_old(step), SMALL)).committed.result(DEADLINE_S)
    path = "{step}" if function == "rename" else ".{step}.*/*"
    faults.order(Call(function, path).at(step), errno.EIO, lasting=True)
    assert ckpt.save(step, a_state(step, SMALL), overwrite=overwrite).committed.exception(
        DEADLINE_S
    )
    with contextlib.suppress(SidesaveError):
        ckpt.close()
    assert faults.withdraw()
    return list(run.glob(".step-*"))


@pytest.fixture
def template(run: Path, faults: Faults, tmp_path: Path) -> Path:
    """A run directory with a checkpoint, step 0, and leftovers of every kind.

    Steps 1 and 2 were written and lacked their commit, step 2 in the middle of replacing an older
    one; steps 3 and 4 were not even written.
    """
    template = tmp_path / "template"
    template.mkdir()
    for step, function in ((1, "rename"), (2, "rename"), (3, "link")):
        for path in leave(run, faults, step, function, overwrite=step == 2):
            path.rename(template / path.name)
        shutil.rmtree(run)
    save_steps(run, 0, mib=SMALL)
    (run / "step-00000000").rename(template / "step-00000000")
    shutil.rmtree(run)
    [unfinished] = template.glob(".step-00000003.*")
    shutil.copytree(unfinished, template / ".step-00000004.0123456789abcdef.aborted")
    states = sorted(path.name.rpartition(".")[2] for path in template.iterdir())
    assert states == ["aborted", "partial", "partial", "partial", "replaced", "step-00000000"]
    return template


@pytest.mark.drawn
@pytest.mark.parametrize("nth", range(3))
def test_short_read_at_a_start_is_no_damage(run: Path, faults: Faults, nth: int):
    leave(run, faults, 2, "rename")
    faults.order(Call("pread", "*/optimizer.*.safetensors", nth), 0, short=512)
    with sidesave.Checkpointer(run):
        assert faults.withdraw() == 1
    check(run, 2, mib=SMALL)


class Starts:
    """Starts in a copy of a run directory, each met by one fault, each followed by a start that
    meets none.
    """

    def __init__(self, run: Path, faults: Faults, template: Path) -> None:
        self._run, self._faults, self._template = run, faults, template
        self.missed: list[Call] = []
        self.calls: list[Call] = []
        with self._copied():
            with self._faults.recording(self.calls):
                ckpt = sidesave.Checkpointer(run)
            ckpt.close()
        assert len(self.calls) > 150

    @contextlib.contextmanager
    def _copied(self) -> Iterator[None]:
        shutil.copytree(self._template, self._run)
        yield
        shutil.rmtree(self._run)

    def meet(self, call: Call, code: int, *, lasting: bool = False) -> None:
        """A start that meets a fault, and what must be true whatever comes of it."""
        what = f"{call} met {errno.errorcode[code]}{' for long' if lasting else ''}"
        with self._copied():
            self._faults.order(call, code, lasting=lasting)
            saved: list[int] = []
            error = None
            try:
                with sidesave.Checkpointer(self._run) as ckpt:
                    if not self._faults.withdraw():
                        self.missed.append(call)
                    ckpt.save(9, a_state(9, SMALL))
                    saved.append(9)
            except SidesaveError as caught:
                error = caught
                self._faults.withdraw()
            if error is not None:
                assert not saved, f"{what}: {error!r}"
                assert isinstance(error, (WriteError, DaemonStartError)), f"{what}: {error!r}"
                assert os.strerror(code) in str(error), f"{what}: {error!r}"
                assert str(self._run) in str(error), f"{what}: {error!r}"
            with sidesave.Checkpointer(self._run) as ckpt:
                latest = ckpt.latest_step()
            found = {info.step: info.path for info in catalog_of(str(self._run)).all()}
            assert sorted(found) == [0, 1, 2, *saved], f"{what}: what was written is there"
            assert all(whole(path, step) for step, path in found.items()), what
            assert latest == max(saved, default=2), what
            assert [path.name for path in self._run.glob(".step-*")] == [], (
                f"{what}: and nothing else is"
            )


@pytest.mark.slow
def test_any_call_of_a_start_may_fail_and_nothing_written_is_lost(
    run: Path, faults: Faults, template: Path, share: Share
):
    starts = Starts(run, faults, template)
    for call, code in zip(share.points(starts.calls[::24]), itertools.cycle(CODES), strict=False):
        starts.meet(call, code)
    assert len(starts.missed) < len(starts.calls) / 20, (
        "the faults were met, but for some after the start"
    )


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "until it heals"])
def test_any_call_of_a_start_may_fail_in_any_way(
    run: Path, faults: Faults, template: Path, share: Share, lasting: bool
):
    starts = Starts(run, faults, template)
    for call, code in zip(
        share.points(starts.calls[lasting::4]), itertools.cycle(CODES), strict=False
    ):
        starts.meet(call, code, lasting=lasting)
    assert len(starts.missed) < len(starts.calls) / 20, (
        "the faults were met, but for some after the start"
    )


# What other checkpointers were seen to do wrong ---------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("nth", range(5))
def test_disk_that_is_full_for_one_of_many_writes_at_once_fails_the_save(
    run: Path, faults: Faults, nth: int
):
    """Others report success with data missing."""
    with sidesave.Checkpointer(run, failures=sidesave.FailureOptions(retries=0)) as ckpt:
        file = ".{step}.*/.optimizer.*"
        faults.order(Call("pwrite", file, nth).at(1), errno.ENOSPC)
        error = ckpt.save(1, a_state(1, 100)).committed.exception(DEADLINE_S)
        assert faults.withdraw() == 1
        assert isinstance(error, NoSpaceError)
        assert ckpt.steps() == []
        ckpt.wait()
        ckpt.save(1, a_state(1, 100)).committed.result(DEADLINE_S)
    check(run, 1, mib=100)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "function", ["pwrite", "fsync", "ftruncate", "fallocate", "link", "rename", "mkdir"]
)
def test_one_error_of_the_medium_does_not_break_the_saves_that_follow(
    run: Path, faults: Faults, function: str
):
    """Others are left with a dead writer."""
    with sidesave.Checkpointer(run, failures=sidesave.FailureOptions(retries=0)) as ckpt:
        pid = ckpt.daemon_pid
        faults.order(Call(function, "*.step-*" if function != "rename" else "step-*"), errno.EIO)
        assert isinstance(ckpt.save(1, a_state(1)).committed.exception(DEADLINE_S), WriteError)
        assert faults.withdraw() == 1
        ckpt.wait()
        for step in (1, 2, 3):
            ckpt.save(step, a_state(step)).committed.result(DEADLINE_S)
        assert ckpt.daemon_pid == pid
    check(run, 1, 2, 3)


@pytest.mark.parametrize("taken_by", ["an empty directory", "a full directory", "a file", "a link"])
def test_step_whose_name_is_taken_by_something_else_is_refused_and_nothing_nests(
    run: Path, taken_by: str
):
    """Others move the new checkpoint into the directory that is there."""
    with sidesave.Checkpointer(run) as ckpt:
        step, other = run / "step-00000005", run.with_name("other")
        other.mkdir()
        if taken_by == "a file":
            step.write_text("precious")
        elif taken_by == "a link":
            step.symlink_to(other)
        else:
            step.mkdir()
        if taken_by == "a full directory":
            (step / "precious").write_text("precious")
        before = sorted(run.rglob("*"))
        error = ckpt.save(5, a_state(5)).committed.exception(DEADLINE_S)
        assert isinstance(error, CheckpointExistsError)
        assert error.filename == str(step)
        assert [path for path in sorted(run.rglob("*")) if ".sidesave" not in str(path)] == [
            path for path in before if ".sidesave" not in str(path)
        ]
        assert list(other.iterdir()) == []
        ckpt.wait()
        ckpt.save(6, a_state(6)).committed.result(DEADLINE_S)
