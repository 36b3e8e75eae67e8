"""The log of a run in an object store: what is told of a change is true, whoever stops, is
overtaken or wakes.
"""

import errno
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from run_logs import HOW, How, Objects, ObjectsBucket, Process, change, seen

from sidesave.errors import CommitUnknownError, IntegrityError, WriteError
from sidesave.writer_daemon.storage import log_entry, run_log, sealed_json
from sidesave.writer_daemon.storage.run_log import LOG, RunLog

OLD, NEW = "0" * 16, "f" * 16
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "_PAUSE_S", 0.0)


@pytest.fixture
def objects() -> Objects:
    return Objects()


Start = Callable[[str], Process]


@pytest.fixture
def start(objects: Objects) -> Iterator[Start]:
    """Starts processes, each of which has taken over."""
    started: list[Process] = []

    def start(session: str) -> Process:
        process = Process(objects, session)
        started.append(process)
        process.do(lambda: process.log.take_over(session))
        return process

    yield start
    for process in started:
        process.end()


# One writer ---------------------------------------------------------------------------------------


def test_an_empty_log_says_nothing_and_everything_counts(objects: Objects):
    names = RunLog(ObjectsBucket(objects)).look()
    assert (names.number, names.prefixes) == (0, {})
    assert names.counts(f"step-00000001.{OLD}")


def test_names_lead_where_the_last_change_says(objects: Objects, start: Start):
    writer = start(NEW)
    change(writer, "a", "1")
    change(writer, "b", "2")
    writer.do(lambda: writer.log.change({"a": None, "c": "1"}))
    assert seen(objects) == {"b": "2", "c": "1"} == dict(writer.log.look().prefixes)


@pytest.mark.parametrize("count", [1, 14, 15, 16, 17, 31, 32, 33, 100])
def test_a_reader_asks_for_seventeen_entries_at_most_however_many_there_were(
    objects: Objects, start: Start, count: int
):
    writer = start(NEW)
    for number in range(count):
        change(writer, f"name-{number}", str(number))
    asked: list[str] = []

    def note(kind: str) -> How:
        asked.append(kind)
        return "done"

    names = RunLog(ObjectsBucket(objects, note)).look()
    assert names.prefixes == {f"name-{number}": str(number) for number in range(count)}
    assert names.number == count + 1
    assert asked.count("list") == 1
    assert asked.count("read") <= 17
    assert len(objects.there) <= 3 * 16


def test_who_looks_again_asks_for_what_is_new(objects: Objects, start: Start):
    writer = start(NEW)
    asked: list[str] = []

    def note(kind: str) -> How:
        asked.append(kind)
        return "done"

    reader = RunLog(ObjectsBucket(objects, note))
    for count in (3, 0, 1, 2, 5, 40, 20):
        for number in range(count):
            change(writer, f"{count}-{number}")
        whole = reader.look().whole  # of before
        asked.clear()
        names = reader.look()
        assert names.prefixes == seen(objects)
        assert asked == ["list", "read"]
        assert names.whole >= whole
    change(writer, "last")
    asked.clear()
    assert reader.look().prefixes == seen(objects)
    assert sorted(asked) == ["list", "read"]


def test_who_writes_looks_without_a_request(objects: Objects, start: Start):
    writer = start(NEW)
    writer.begin(writer.log.look)
    assert writer.pending is None


def test_who_has_not_taken_over_changes_nothing(objects: Objects):
    log = RunLog(ObjectsBucket(objects))
    for operation in (lambda: log.change({"a": "1"}), log.settle):
        with pytest.raises(WriteError) as caught:
            operation()
        assert caught.value.errno == errno.ESTALE
    assert objects.there == {}


def test_a_store_that_replaces_is_refused(objects: Objects):
    class Replacing(ObjectsBucket):
        def create(self, key: str, data: bytes) -> bool:
            objects.there[key] = data
            return True

    log = RunLog(Replacing(objects))
    with pytest.raises(WriteError, match="If-None-Match") as caught:
        log.take_over(NEW)
    assert caught.value.errno == errno.EOPNOTSUPP
    assert not log.holds
    assert objects.there == {}


@pytest.mark.parametrize("damage", ["a byte", "its number", "no json", "cut"])
def test_a_damaged_entry_is_an_error_for_readers_and_for_who_takes_over(
    objects: Objects, start: Start, damage: str
):
    change(start(NEW), "a")
    key = f"{LOG}/{2:012d}"
    data = bytearray(objects.there[key])
    match damage:
        case "a byte":
            data[-20] ^= 1
        case "its number":
            data[:] = objects.there[f"{LOG}/{1:012d}"]
        case "no json":
            data[:] = b"nonsense"
        case _:
            del data[-1]
    objects.there[key] = bytes(data)
    with pytest.raises(IntegrityError, match=key):
        seen(objects)
    with pytest.raises(IntegrityError, match=key):
        start(OLD)


def test_entries_that_are_missing_are_an_error(objects: Objects, start: Start):
    writer = start(NEW)
    for name in "abc":
        change(writer, name)
    del objects.there[f"{LOG}/{2:012d}"]
    with pytest.raises(IntegrityError, match="missing"):
        seen(objects)


def test_the_last_sessions_that_were_judged_are_remembered(
    objects: Objects, start: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(log_entry, "_JUDGED", 3)
    for number in range(6):
        writer = start(f"{number:016x}")
        writer.do(writer.log.settle)
        change(writer, "a", str(number))
        judged = RunLog(ObjectsBucket(objects)).look().judged
        assert [int(each, 16) for each in judged] == [*range(number)][-3:]


def test_a_session_that_comes_back_is_judged_no_more(objects: Objects, start: Start):
    start(OLD)
    writer = start(NEW)
    writer.do(writer.log.settle)
    writer = start(OLD)
    writer.begin(writer.log.settle)
    writer.finish()
    assert writer.log.look().judged == (NEW,)


def test_a_log_that_does_not_say_who_was_judged_is_read(objects: Objects, start: Start):
    change(start(OLD), "a", "1")
    key = f"{LOG}/{1:012d}"
    body = sealed_json.load_json(objects.there[key], key)
    del body["xxh3_128"], body["judged"]
    objects.there[key] = sealed_json.seal(body)
    assert seen(objects) == {"a": "1"}
    writer = start(NEW)
    writer.do(writer.log.settle)
    assert writer.log.look().judged == (OLD,)


# Requests that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["lost", "failed", "late"])
def test_an_entry_whose_answer_got_lost_is_looked_up(objects: Objects, start: Start, how: How):
    writer = start(NEW)
    writer.begin(lambda: writer.log.change({"a": "1"}))
    assert writer.pending == "create"
    writer.step(how)
    writer.finish()
    assert writer.error is None
    assert seen(objects) == {"a": "1"}


def test_what_is_denied_has_not_happened(objects: Objects, start: Start):
    writer = start(NEW)
    writer.begin(lambda: writer.log.change({"a": "1"}))
    writer.step("denied")
    writer.finish()
    assert isinstance(writer.error, WriteError)
    assert not isinstance(writer.error, CommitUnknownError)
    assert writer.error.errno == errno.EACCES
    change(writer, "b")
    assert seen(objects) == {"b": "prefix"}


@pytest.mark.parametrize("arrives", [True, False])
def test_what_is_not_known_is_found_out_by_the_next_look(
    objects: Objects, start: Start, *, arrives: bool
):
    writer = start(NEW)
    writer.begin(lambda: writer.log.change({"a": "1"}))
    writer.step("late")
    writer.step("failed")  # nor can it be read
    assert isinstance(writer.error, CommitUnknownError)
    if arrives:
        objects.arrive(0)
    writer.do(writer.log.look)
    if not arrives:
        objects.arrive(0)  # too late: its number has been taken
    assert seen(objects) == ({"a": "1"} if arrives else {})
    assert writer.log.look().prefixes == seen(objects)


def test_what_is_not_known_comes_before_the_next_change(objects: Objects, start: Start):
    writer = start(NEW)
    writer.begin(lambda: writer.log.change({"a": "1"}))
    writer.step("lost")
    writer.step("failed")
    assert isinstance(writer.error, CommitUnknownError)
    change(writer, "a", "2")
    assert seen(objects) == {"a": "2"} == dict(writer.log.look().prefixes)


def test_a_taking_over_that_is_not_known_gives_no_right(objects: Objects, start: Start):
    before = start(OLD)
    process = Process(objects, NEW)
    process.begin(lambda: process.log.take_over(NEW))
    # the first four find out about the store
    for kind in ("create", "create", "read", "remove", "list", "read"):
        assert process.pending == kind
        process.step("done")
    process.step("late")
    process.step("failed")
    assert isinstance(process.error, CommitUnknownError)
    assert not process.log.holds
    change(before, "a")
    objects.arrive(0)
    assert seen(objects) == {"a": "prefix"}


# Several writers ----------------------------------------------------------------------------------


def test_who_was_overtaken_is_told_and_changes_nothing(objects: Objects, start: Start):
    first, second = start(OLD), start(NEW)
    change(second, "a", "second")
    for _ in range(2):
        with pytest.raises(WriteError, match="passed to another session") as caught:
            change(first, "a", "first")
        assert caught.value.errno == errno.ESTALE
    assert seen(objects) == {"a": "second"}
    assert dict(first.log.look().prefixes) == {"a": "second"}


def sleep_through_a_sweep(objects: Objects, start: Start) -> Process:
    """A writer that was away until the entry after its last one had been removed."""
    first, second = start(OLD), start(NEW)
    for number in range(40):
        change(second, f"name-{number}")
    assert f"{LOG}/{2:012d}" not in objects.there
    return first


def test_who_was_away_until_there_was_a_gap_is_told_and_changes_nothing(
    objects: Objects, start: Start
):
    first = sleep_through_a_sweep(objects, start)
    before = seen(objects)
    with pytest.raises(WriteError, match="passed to another session"):
        change(first, "late")
    assert seen(objects) == before


def test_without_the_look_behind_who_was_away_is_told_that_what_nobody_sees_counts(
    objects: Objects, start: Start, monkeypatch: pytest.MonkeyPatch
):
    """So the test above can fail."""
    monkeypatch.setattr(RunLog, "_refuse_overtaken", lambda self, entry: None)
    first = sleep_through_a_sweep(objects, start)
    change(first, "late")
    assert "late" not in seen(objects)


def test_a_change_that_others_came_after_before_its_writer_looked_behind_counts(
    objects: Objects, start: Start
):
    first = start(OLD)
    first.begin(lambda: first.log.change({"a": "1"}))
    first.step("done")
    assert first.pending == "list"
    second = start(NEW)
    first.finish()
    assert first.error is None
    assert not first.log.holds
    change(second, "b", "2")
    assert seen(objects) == {"a": "1", "b": "2"}
    with pytest.raises(WriteError, match="passed to another session"):
        change(first, "c")


def test_a_change_that_fell_into_a_gap_right_before_an_entry_does_not_count(
    objects: Objects, start: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_log, "_EVERY", 1)
    first, second = start(OLD), start(NEW)
    change(second, "a")
    change(second, "b")
    assert sorted(objects.there) == [f"{LOG}/{3:012d}", f"{LOG}/{4:012d}"]
    with pytest.raises(WriteError, match="passed to another session") as caught:
        change(first, "late")  # as entry 2
    assert caught.value.errno == errno.ESTALE
    assert seen(objects) == {"a": "prefix", "b": "prefix"}


@pytest.mark.parametrize("last", range(7))
@pytest.mark.parametrize("how", HOW)
def test_who_stops_before_any_request_and_wakes_after_a_taking_over(
    objects: Objects, start: Start, last: int, how: How
):
    first = start(OLD)
    change(first, "before")
    first.begin(lambda: [first.log.change({f"first-{number}": "1"}) for number in range(3)])
    for _ in range(last):
        first.step("done")
    second = start(NEW)
    known = seen(objects)
    if first.pending is not None:
        first.step(how)
        first.finish()
    while objects.under_way:
        objects.arrive(0)
    assert {name: prefix for name, prefix in seen(objects).items() if name in known} == known
    if first.error is not None:
        assert set(seen(objects)) == set(known)
    change(second, "second")
    assert seen(objects) == {**known, "second": "prefix"}


# Any of it, in any order --------------------------------------------------------------------------


@dataclass
class _Name:
    """What a test knows of a name that one process has tried to give, and perhaps another to take
    away.
    """

    added: str = "unknown"
    removed: str = "never"
    was_there: bool = False
    is_gone: bool = False


@dataclass
class _Operation:
    kind: str
    name: str = ""
    required: frozenset[str] = frozenset()
    """Names that had been acknowledged when it began."""
    is_overtaken: bool = False
    """Whether its process had been taken over from when it began."""
    holds: bool = False
    """Whether its process did not know of that."""


@dataclass
class _State:
    process: Process
    taken: int = 0
    operation: _Operation | None = None
    names: list[str] = field(default_factory=list[str])


class Writers(RuleBasedStateMachine):
    """Three processes, each of which stops where it is told to, loses answers, dies, wakes and goes
    on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before = run_log._PAUSE_S, run_log._EVERY
        run_log._PAUSE_S, run_log._EVERY = 0.0, 4
        self.objects = Objects()
        self.states = [self._new(number) for number in range(3)]
        self.names: dict[str, _Name] = {}
        self.takings: list[tuple[int, int]] = []

    def _new(self, number: int) -> _State:
        return _State(Process(self.objects, f"{number:016x}"))

    def teardown(self) -> None:
        for state in self.states:
            state.process.end()
        run_log._PAUSE_S, run_log._EVERY = self.before

    @initialize()
    def first(self) -> None:
        self.take_over(0)
        self.run_on(0)

    def _begin(self, number: int, operation: _Operation, call: Callable[[], object]) -> None:
        state = self.states[number]
        operation.required = frozenset(
            name for name, known in self.names.items() if known.added == "acknowledged"
        )
        later = [other for entry, other in self.takings if entry > state.taken]
        operation.is_overtaken = any(other != number for other in later)
        operation.holds = state.process.log.holds
        state.operation = operation
        state.process.begin(call)
        self._look_at(number)

    def _free(self, number: int) -> bool:
        return self.states[number].process.pending is None

    def _look_at(self, number: int) -> None:
        state = self.states[number]
        if state.process.pending is not None or state.operation is None:
            return
        operation, error, state.operation = state.operation, state.process.error, None
        log = state.process.log
        if error is not None and not isinstance(error, WriteError):
            raise error
        if operation.kind == "take over" and error is None:
            state.taken = log._state.number
            self.takings.append((state.taken, number))
        if operation.kind in ("add", "remove"):
            known = self.names[operation.name]
            if error is None:
                outcome = "acknowledged"
                assert not operation.is_overtaken, (
                    "it was told that its change counts, and had been taken over from"
                )
            elif isinstance(error, CommitUnknownError):
                outcome = "unknown"
            else:
                outcome = "refused"
            if operation.kind == "add":
                known.added = outcome
            else:
                known.removed = outcome
        # without asking anybody
        looked_alone = operation.kind in ("look", "settle") and operation.holds
        # it saw all that had been acknowledged when it began
        if error is None and not looked_alone:
            for name in operation.required:
                assert name in log._state.prefixes or self.names[name].removed in (
                    "unknown",
                    "acknowledged",
                )

    @rule(number=st.integers(0, 2))
    def take_over(self, number: int) -> None:
        process = self.states[number].process
        if self._free(number):
            self._begin(
                number, _Operation("take over"), lambda: process.log.take_over(process.session)
            )

    @rule(number=st.integers(0, 2))
    def add(self, number: int) -> None:
        process = self.states[number].process
        if self._free(number):
            name = f"name-{len(self.names)}"
            self.names[name] = _Name()
            self._begin(
                number, _Operation("add", name), lambda: process.log.change({name: "prefix"})
            )

    @rule(number=st.integers(0, 2), which=st.integers(0, 1000))
    def remove(self, number: int, which: int) -> None:
        process = self.states[number].process
        there = [
            name
            for name, known in self.names.items()
            if (known.added, known.removed) == ("acknowledged", "never")
        ]
        if self._free(number) and there:
            name = there[which % len(there)]
            self.names[name].removed = "unknown"
            self._begin(
                number, _Operation("remove", name), lambda: process.log.change({name: None})
            )

    @rule(number=st.integers(0, 2))
    def settle(self, number: int) -> None:
        if self._free(number):
            self._begin(number, _Operation("settle"), self.states[number].process.log.settle)

    @rule(number=st.integers(0, 2))
    def look(self, number: int) -> None:
        if self._free(number):
            self._begin(number, _Operation("look"), self.states[number].process.log.look)

    @rule(number=st.integers(0, 2), how=st.sampled_from(HOW))
    def step(self, number: int, how: How) -> None:
        if not self._free(number):
            self.states[number].process.step(how)
            self._look_at(number)

    @rule(number=st.integers(0, 2))
    def run_on(self, number: int) -> None:
        self.states[number].process.finish()
        self._look_at(number)

    @rule(number=st.integers(0, 2))
    def add_many(self, number: int) -> None:
        """So many that what was before is removed."""
        self.run_on(number)
        for _ in range(10):
            self.add(number)
            self.run_on(number)

    @rule(number=st.integers(0, 2))
    def die(self, number: int) -> None:
        self.states[number].process.end()
        self.states[number] = self._new(number)

    @precondition(lambda self: self.objects.under_way)
    @rule(which=st.integers(0, 1000))
    def arrive(self, which: int) -> None:
        self.objects.arrive(which % len(self.objects.under_way))

    @invariant()
    def every_reader_sees_what_counts(self) -> None:
        there = seen(self.objects)
        for name, known in self.names.items():
            if name in there:
                assert not known.is_gone, "what was gone is back"
                assert known.added != "refused", "it was refused, and shows"
                assert known.removed != "acknowledged", "it was removed, and shows"
                known.was_there = True
            else:
                kept = known.added == "acknowledged" and known.removed in ("never", "refused")
                assert not kept, "it was acknowledged, and is not there"
                assert not known.was_there or known.removed in ("unknown", "acknowledged"), (
                    "it was there, and is not"
                )
                known.is_gone = known.was_there


TestWriters = Writers.TestCase
TestWriters.settings = settings(stateful_step_count=60)
