"""What a power loss may leave of a directory: storage operations are recorded as they happen and
replayed with losses.

:class:`Recorder` takes the place of the ``os`` module in the modules that touch storage. Every call
goes through to the system; changes and syncs are written down, in one order. :class:`Disk` replays
such a trace and tells, after each event, what the next start may find:

- Nothing is on disk before an fsync, whether it went through the page cache or past it.
- An fsync of a file makes its bytes, length and mode durable, and no name of it. An fsync of a
  directory makes its entries and mode durable, and nothing in them.
- Of what was not synced, any part may be there and any part may be missing, in whatever order it
  was done: a page without its predecessor, a length without its bytes (zeros, or what the block
  held before), a torn page, a link without the creation before it. Only a change of one directory
  by one call, a rename as well, is atomic. That is what POSIX leaves open.
- The bytes of a file whose fsync has failed are not saved by repeating it.
- ``ordered=True`` is what the journals of ext4 and XFS do: changes of directories survive in the
  order in which they were made, and any fsync makes all that came before it durable. Bytes of files
  are as uncertain as above.

A process may also die while the system goes on: :meth:`Recorder.die_at`. What it has not synced is
then still at stake.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import random
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sidesave.writer_daemon.storage import descriptor, posix, posix_file

_PAGE = 4096
_SECTOR = 512
_STALE = b"\xa5" * _PAGE
"""What a block held before it became part of a file."""
_MOST_OPTIONS = 1 << 12
"""States of one inode that are kept apart; beyond that, a random part of them is."""
_QUESTIONS = frozenset(
    {
        "close",
        "fsdecode",
        "fsencode",
        "fspath",
        "fstat",
        "fstatvfs",
        "listdir",
        "lstat",
        "path",
        "preadv",
        "read",
        "stat",
    }
    | {"stat_result", "strerror"}
)
"""What storage code may call of ``os`` beside changes, which are recorded; anything else is an
error in a recording.
"""

Entries = tuple[tuple[str, int], ...]
Tree = tuple[int, Any]
"""A file or directory without inode numbers: its mode, and its bytes or a tuple of (name, tree)."""


class Inode(NamedTuple):
    """A file or a directory at one moment."""

    mode: int
    content: bytes | Entries


# Events -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """An inode changes; ``outcomes`` are what may come of it beside nothing at all, in full
    first.
    """

    what: str
    inode: int
    outcomes: tuple[Callable[[Inode], Inode], ...]


@dataclass(frozen=True, slots=True)
class Sync:
    """An inode is made durable; ``site`` is the line of the code that asked for it.

    If it ``failed``, the bytes of a file look clean to the system from then on, and no later sync
    writes them.
    """

    what: str
    inode: int
    site: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Note:
    """What the recorded program has told its user by now, whatever that means to the reader of the
    trace.
    """

    what: str
    content: Any


Event = Change | Sync | Note


@dataclass(slots=True)
class Trace:
    """All that happened to a directory, inode 0, and every inode as it was when it was first
    seen.
    """

    first: dict[int, Inode] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def sites(self) -> set[str]:
        return {event.site for event in self.events if isinstance(event, Sync)}


def _entries(changes: Mapping[str, int | None]) -> Callable[[Inode], Inode]:
    def change(directory: Inode) -> Inode:
        assert isinstance(directory.content, tuple)
        after: dict[str, int | None] = {**dict(directory.content), **changes}
        return directory._replace(
            content=tuple(sorted((name, i) for name, i in after.items() if i is not None))
        )

    return change


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Inode], Inode]:
    def changed(file: Inode) -> Inode:
        assert isinstance(file.content, bytes)
        return file._replace(content=change(file.content))

    return changed


def _overwrite(data: bytes, offset: int) -> Callable[[Inode], Inode]:
    return _bytes(lambda old: old[:offset].ljust(offset, b"\0") + data + old[offset + len(data) :])


# Recording ----------------------------------------------------------------------------------------


class Death(BaseException):
    """The daemon dies here: it changes nothing any more."""


@dataclass(frozen=True, slots=True)
class _Failure:
    operation: int
    error: BaseException
    afterwards: bool
    then: Callable[[], None]


class Recorder:
    """Writes down what storage code does to ``root`` while the block of :meth:`recording` runs."""

    def __init__(self, root: Path, *, apart: str = "", hard_links: bool = True) -> None:
        """Begin with what ``root`` holds, all of it durable.

        Args:
            root: A directory.
            apart: The name of something in ``root`` that has no part in this: nothing happens to
                it, or to its record.
            hard_links: Whether the system has them.
        """
        self.trace = Trace()
        self._root = os.fspath(root)
        self._apart_name = apart
        self._apart: set[int] = set()
        self._hard_links = hard_links
        self._now: dict[int, Inode] = {}
        self._fds: dict[int, int] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._failure: _Failure | None = None
        self._failed = False
        self._done = 0
        self._read_in(root)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        with pytest.MonkeyPatch.context() as patch:
            for module in (posix, posix_file, descriptor):
                patch.setattr(module, "os", _Os(self))
            patch.setattr(posix, "_libc", _Libc(self, posix._libc))
            yield self

    def note(self, what: str, content: Any) -> None:
        self.trace.events.append(Note(what, content))

    def die_at(self, operation: int) -> None:
        """Let the daemon die before it does its ``operation``-th change or sync from here on,
        counted from 0.
        """
        self._failure, self._failed = (
            _Failure(self._done + operation, Death(), False, lambda: None),
            False,
        )

    def fail_at(
        self, operation: int, code: int, *, afterwards: bool, then: Callable[[], None]
    ) -> None:
        """Let the ``operation``-th change or sync from here on fail with an errno, once, and call
        ``then``.

        ``afterwards`` it has been done all the same, as over a network that loses the answer.
        """
        error = OSError(code, os.strerror(code))
        self._failure, self._failed = (
            _Failure(self._done + operation, error, afterwards, then),
            False,
        )

    def live_on(self) -> bool:
        """Forget what was to fail, as a new daemon does; whether it has."""
        self._failure = None
        return self._failed

    def _read_in(self, path: Path, *, apart: bool = False) -> int:
        number = next(self._numbers)
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_dir():
            children = [
                (child, apart or self._is_apart(number, child.name)) for child in path.iterdir()
            ]
            entries = sorted(
                (child.name, self._read_in(child, apart=out), out) for child, out in children
            )
            self._now[number] = Inode(mode, tuple((name, child) for name, child, _ in entries))
            self.trace.first[number] = Inode(
                mode, tuple((name, child) for name, child, out in entries if not out)
            )
        else:
            self.trace.first[number] = self._now[number] = Inode(mode, path.read_bytes())
        if apart:
            self._apart.add(number)
        return number

    def _directory_of(self, path: str, dir_fd: int | None) -> tuple[int, str]:
        """The directory that a path ends in, and its last name there."""
        path = os.fspath(path)
        if dir_fd is None:
            assert path == self._root or path.startswith(f"{self._root}/"), (
                f"{path} is not recorded"
            )
            here, path = 0, path[len(self._root) :].lstrip("/")
        else:
            here = self._fds[dir_fd]
        *parents, name = path.split("/")
        for parent in parents:
            here = self._look_up(here, parent)
        return here, name

    def _look_up(self, directory: int, name: str) -> int:
        if name in ("", "."):
            return directory
        content = self._now[directory].content
        assert isinstance(content, tuple)
        number = dict(content).get(name)
        if number is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return number

    def _born(self, inode: Inode, *, apart: bool) -> int:
        number = next(self._numbers)
        self.trace.first[number] = self._now[number] = inode
        if apart:
            self._apart.add(number)
        return number

    def _is_apart(self, inode: int, name: str = "") -> bool:
        return inode in self._apart or (inode == 0 and name != "" and name == self._apart_name)

    @contextlib.contextmanager
    def _operation(self, inode: int, name: str = "") -> Iterator[None]:
        """One call at a time, so that the order is known; what it changes is known once it has
        succeeded.
        """
        with self._lock:
            failure = self._failure
            if self._is_apart(inode, name) or failure is None or failure.operation != self._done:
                self._done += not self._is_apart(inode, name)
                yield
                return
            self._failed = True
            if isinstance(failure.error, Death):  # for every thread, and for ever
                raise failure.error
            self._done += 1
            if failure.afterwards:
                yield
            failure.then()
            raise failure.error

    def _change(
        self, what: str, inode: int, *outcomes: Callable[[Inode], Inode], name: str = ""
    ) -> None:
        self._now[inode] = outcomes[0](self._now[inode])
        if not self._is_apart(inode, name):
            self.trace.events.append(Change(what, inode, outcomes))

    def _renamed(self, source: str, source_fd: int, target: str, target_fd: int) -> None:
        directory, old = self._directory_of(source, source_fd)
        other, new = self._directory_of(target, target_fd)
        assert directory == other, "a rename from one directory to another is not modelled"
        number = self._look_up(directory, old)
        self._change(f"rename {source} to {target}", directory, _entries({old: None, new: number}))


def _site() -> str:
    """The line outside of the storage backend that asked for what is being done."""
    frame, called, storage = sys._getframe(1), "", (posix.__name__, posix_file.__name__)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("sidesave.") and name not in storage:
            return f"{name.rpartition('.')[2]}.{frame.f_code.co_name}:{frame.f_lineno} {called}"
        if name in storage and not frame.f_code.co_name.startswith("_"):
            called = frame.f_code.co_name
        frame = frame.f_back
    raise AssertionError("nobody asked for this")


class _Os:
    """The ``os`` module, recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        assert name in _QUESTIONS or name.isupper(), f"os.{name} is not known to the recorder"
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        recorder = self._recorder
        assert not flags & os.O_TRUNC, "nothing is ever truncated by opening it"
        if not flags & os.O_CREAT:
            with recorder._lock:
                fd = os.open(path, flags, mode, dir_fd=dir_fd)
                recorder._fds[fd] = recorder._look_up(*recorder._directory_of(path, dir_fd))
                return fd
        assert flags & os.O_EXCL, "no existing file is ever opened for writing"
        directory, name = recorder._directory_of(path, dir_fd)
        with recorder._operation(directory, name):
            fd = os.open(path, flags, mode, dir_fd=dir_fd)
            inode = Inode(stat.S_IMODE(os.fstat(fd).st_mode), b"")
            number = recorder._born(inode, apart=recorder._is_apart(directory, name))
            recorder._change(f"create {path}", directory, _entries({name: number}), name=name)
            recorder._fds[fd] = number
            return fd

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        recorder, number = self._recorder, self._recorder._fds[fd]
        with recorder._operation(number):
            count = os.pwrite(fd, data, offset)
            written = bytes(memoryview(data)[:count])
            for at in range(0, count, _PAGE):
                page, place = written[at : at + _PAGE], offset + at
                outcomes = [
                    _overwrite(data, place) for data in (page, page[:_SECTOR], _STALE[: len(page)])
                ]
                recorder._change(f"write page {place // _PAGE} of {number}", number, *outcomes)
            return count

    def ftruncate(self, fd: int, nbytes: int) -> None:
        recorder, number = self._recorder, self._recorder._fds[fd]
        with recorder._operation(number):
            os.ftruncate(fd, nbytes)
            cut = _bytes(lambda old: old[:nbytes].ljust(nbytes, b"\0"))
            recorder._change(f"truncate {number} to {nbytes}", number, cut)

    def fsync(self, fd: int) -> None:
        recorder, number = self._recorder, self._recorder._fds[fd]
        failed = True
        try:
            with recorder._operation(number):
                os.fsync(fd)
                failed = False
        finally:
            if not recorder._is_apart(number) and not isinstance(sys.exception(), Death):
                recorder.trace.events.append(Sync(f"fsync of {number}", number, _site(), failed))

    def link(
        self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool
    ) -> None:
        recorder = self._recorder
        directory, name = recorder._directory_of(target, dst_dir_fd)
        with recorder._operation(directory, name):
            if not recorder._hard_links:
                raise PermissionError(errno.EPERM, "no hard links here")
            os.link(
                source,
                target,
                src_dir_fd=src_dir_fd,
                dst_dir_fd=dst_dir_fd,
                follow_symlinks=follow_symlinks,
            )
            number = recorder._look_up(*recorder._directory_of(source, src_dir_fd))
            recorder._change(f"link {source} to {target}", directory, _entries({name: number}))

    def unlink(self, path: str, *, dir_fd: int) -> None:
        directory, name = self._recorder._directory_of(path, dir_fd)
        with self._recorder._operation(directory, name):
            os.unlink(path, dir_fd=dir_fd)
            self._recorder._change(f"unlink {path}", directory, _entries({name: None}))

    def rmdir(self, path: str, *, dir_fd: int) -> None:
        directory, name = self._recorder._directory_of(path, dir_fd)
        with self._recorder._operation(directory, name):
            os.rmdir(path, dir_fd=dir_fd)
            self._recorder._change(f"rmdir {path}", directory, _entries({name: None}))

    def mkdir(self, path: str, mode: int, *, dir_fd: int) -> None:
        recorder = self._recorder
        directory, name = recorder._directory_of(path, dir_fd)
        with recorder._operation(directory, name):
            os.mkdir(path, mode, dir_fd=dir_fd)
            inode = Inode(stat.S_IMODE(os.stat(path, dir_fd=dir_fd).st_mode), ())
            number = recorder._born(inode, apart=recorder._is_apart(directory, name))
            recorder._change(f"mkdir {path}", directory, _entries({name: number}), name=name)

    def chmod(self, path: str, mode: int, *, dir_fd: int) -> None:
        recorder = self._recorder
        number = recorder._look_up(*recorder._directory_of(path, dir_fd))
        with recorder._operation(number):
            os.chmod(path, mode, dir_fd=dir_fd)
            recorder._change(f"chmod {path}", number, lambda inode: inode._replace(mode=mode))

    def rename(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        recorder = self._recorder
        with recorder._operation(*recorder._directory_of(target, dst_dir_fd)):
            os.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            recorder._renamed(source, src_dir_fd, target, dst_dir_fd)


class _Libc:
    """The two functions of the C library that storage code calls itself, recorded."""

    def __init__(self, recorder: Recorder, libc: ctypes.CDLL) -> None:
        self._recorder = recorder
        self._libc = libc

    def fallocate(self, fd: int, mode: int, offset: int, nbytes: int) -> int:
        assert (mode, offset) == (0, 0)
        recorder, number = self._recorder, self._recorder._fds[fd]

        def allocate() -> int:
            failed = self._libc.fallocate(fd, mode, offset, nbytes)
            if not failed:
                longer = _bytes(lambda old: old.ljust(nbytes, b"\0"))
                recorder._change(f"allocate {nbytes} of {number}", number, longer)
            return failed

        return self._call(allocate, number)

    def renameat2(self, old_fd: int, source: bytes, new_fd: int, target: bytes, flags: int) -> int:
        recorder, names = self._recorder, (os.fsdecode(source), old_fd, os.fsdecode(target), new_fd)

        def rename() -> int:
            failed = self._libc.renameat2(old_fd, source, new_fd, target, flags)
            if not failed:
                recorder._renamed(*names)
            return failed

        return self._call(rename, *recorder._directory_of(*names[2:]))

    def _call(self, function: Callable[[], int], inode: int, name: str = "") -> int:
        try:
            with self._recorder._operation(inode, name):
                return function()
        except OSError as error:
            ctypes.set_errno(error.errno or errno.EIO)
            return -1


# Replaying ----------------------------------------------------------------------------------------


class Disk:
    """What may be on disk after each event of a trace."""

    def __init__(self, trace: Trace, *, ordered: bool = False) -> None:
        """Before the first event: what was there when the recording began."""
        self._ordered = ordered
        self._now = dict(trace.first)
        # Per inode all it may be found as, the oldest first; a dict for its order, that a seed
        # makes repeatable.
        self._options = {number: {inode: None} for number, inode in trace.first.items()}
        self._history = [self._directories()]
        self._thinned = False
        self._lost: set[int] = set()
        self._random = random.Random(0)

    def _directories(self) -> dict[int, Inode]:
        return {
            number: inode for number, inode in self._now.items() if isinstance(inode.content, tuple)
        }

    def apply(self, event: Event) -> None:
        match event:
            case Change(_, number, outcomes):
                options = self._options[number]
                for before in list(options):
                    for outcome in outcomes:
                        options[outcome(before)] = None
                self._now[number] = outcomes[0](self._now[number])
                if len(options) > _MOST_OPTIONS:
                    self._thinned = True
                    first, last = next(iter(options)), self._now[number]
                    some = self._random.sample(list(options), _MOST_OPTIONS // 2)
                    self._options[number] = dict.fromkeys([first, *some, last])
                if isinstance(self._now[number].content, tuple):
                    self._history.append(self._directories())
            case Sync(_, number, _, failed):
                if failed and isinstance(self._now[number].content, bytes):
                    self._lost.add(number)
                elif not failed and number not in self._lost:
                    self._options[number] = {self._now[number]: None}
                    self._history = [self._directories()]
            case Note():
                pass

    def is_now(self) -> Tree:
        """The tree if nothing is lost: what the running system sees."""
        return _tree(0, self._now)

    def states(self, most: int, rng: random.Random) -> tuple[list[Tree], bool]:
        """Trees that a power loss may leave now, and whether these are all: no more than about
        ``most``.
        """
        worlds = [self._options]
        if self._ordered:
            worlds = [
                self._options | {n: {inode: None} for n, inode in past.items()}
                for past in self._history
            ]
        choices = list(itertools.islice(itertools.chain(*map(_choices, worlds)), most + 1))
        if len(choices) <= most:
            return list(dict.fromkeys(_tree(0, choice) for choice in choices)), not self._thinned
        trees: dict[Tree, None] = {}
        for world in worlds:
            oldest = {number: next(iter(options)) for number, options in world.items()}
            newest = {
                n: self._now[n] if self._now[n] in options else oldest[n]
                for n, options in world.items()
            }
            trees |= dict.fromkeys([_tree(0, newest), _tree(0, oldest)])
            for number, options in world.items():
                if len(options) > 1:  # each inode alone is lost, and each alone survives
                    trees[_tree(0, newest | {number: oldest[number]})] = None
                    trees[_tree(0, oldest | {number: newest[number]})] = None
            for _ in range(-(-most // len(worlds))):
                faith = rng.random()
                lists = {
                    number: list(options) for number, options in world.items() if len(options) > 1
                }
                some = {
                    n: rng.choice(options) for n, options in lists.items() if rng.random() > faith
                }
                trees[_tree(0, newest | some)] = None
        return list(trees), False


def _choices(options: Mapping[int, Mapping[Inode, None]]) -> Iterator[dict[int, Inode]]:
    """Every way to choose one state of each inode that can be reached from the top."""

    def choose(waiting: tuple[int, ...], chosen: dict[int, Inode]) -> Iterator[dict[int, Inode]]:
        if not waiting:
            yield chosen
            return
        number, *rest = waiting
        if number in chosen:
            yield from choose(tuple(rest), chosen)
            return
        for inode in options[number]:
            below = (
                [child for _, child in inode.content] if isinstance(inode.content, tuple) else []
            )
            yield from choose((*rest, *below), chosen | {number: inode})

    return choose((0,), {})


def _tree(number: int, inodes: Mapping[int, Inode]) -> Tree:
    mode, content = inodes[number]
    if isinstance(content, bytes):
        return mode, content
    return mode, tuple((name, _tree(child, inodes)) for name, child in content)


def lay_out(tree: Tree, path: Path) -> None:
    """Make a file or directory of this content at ``path``."""
    mode, content = tree
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.mkdir()
        for name, child in content:
            lay_out(child, path / name)
    path.chmod(mode)


def read_in(path: Path) -> Tree:
    """The opposite of :func:`lay_out`."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if path.is_dir():
        return mode, tuple((child.name, read_in(child)) for child in sorted(path.iterdir()))
    return mode, path.read_bytes()


def show(tree: Tree, name: str = "", indent: str = "") -> str:
    """A listing for people."""
    mode, content = tree
    if isinstance(content, bytes):
        zeros = "" if content.strip(b"\0") else ", zeros" if content else ""
        return f"{indent}{name} {mode:o}, {len(content)} bytes{zeros}"
    return "\n".join(
        [f"{indent}{name}/ {mode:o}", *(show(child, n, indent + "    ") for n, child in content)]
    )
