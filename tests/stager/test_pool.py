"""Staging slots: making a second one, taking it, giving it back, and the budget."""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sessions import arenas_nbytes
from states import assert_holds
from trainers import stopped, wait_until

import sidesave
from sidesave import Checkpointer, StagingOptions
from sidesave.errors import ClosedError, HostMemoryError, StagingError, WriteStalledError
from sidesave.stager.copy import pool as module
from sidesave.stager.copy.pool import SlotPool, slot_nbytes
from sidesave.stager.copy.slot import StagingSlot
from sidesave.stager.memory import host_memory
from sidesave.stager.memory.arena import Arena
from sidesave.stager.memory.host_memory import NodeMemory
from sidesave.stager.plan import make_plan, structure_of
from sidesave.stager.state.tree import flatten

MIB = 1 << 20
FLAT = flatten({"weights": torch.zeros(MIB)})
PLAN = make_plan(structure_of(FLAT.containers))


def fit(pool: SlotPool, owner: str, device: torch.device | None = None) -> StagingSlot:
    """Give memory to a slot for a save."""
    slot = pool.try_acquire(owner, empty=True)
    assert slot is not None
    pool.fit(slot, PLAN, [FLAT.objects], device)
    return slot


def end(pool: SlotPool) -> None:
    """Close a pool, and end the saves of a test."""
    pool.close()
    for slot in pool._slots:
        if isinstance(slot.owner, str):
            pool.release(slot.owner)


@pytest.fixture
def attached() -> dict[int, Arena]:
    """The arenas that a daemon would have."""
    return {}


@pytest.fixture
def pool(attached: dict[int, Arena]) -> Iterator[SlotPool]:
    """Three slots. The first has memory, and belongs to ``"first"``."""
    pool = SlotPool(3, attached.__setitem__, attached.__delitem__)
    fit(pool, "first")
    yield pool
    end(pool)
    wait_until(lambda: not attached and not pool.nbytes, "all memory is given back")


class HeldUp:
    """Allocation that begins, and goes on when it may."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._populate = host_memory.populate

    def __call__(self, arena: Arena, node: int | None = None) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        self._populate(arena, node)


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch, pool: SlotPool) -> HeldUp:
    populate = HeldUp()
    monkeypatch.setattr(host_memory, "populate", populate)
    return populate


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch, pool: SlotPool) -> None:
    monkeypatch.setattr(host_memory, "_mem_available", lambda: 0)


# Making -------------------------------------------------------------------------------------------


def test_a_save_that_meets_a_busy_slot_has_another_one_made(tmp_path: Path):
    with Checkpointer(tmp_path) as checkpointer:
        before = arenas_nbytes()
        states = [{"weights": torch.full((MIB,), float(step))} for step in range(4)]
        assert_holds(checkpointer.save(0, states[0]), states[0])
        checkpointer.wait()
        assert len(arenas_nbytes()) == len(before) + 1
        with stopped(checkpointer.daemon_pid or 0):
            handles = [checkpointer.save(step, states[step]) for step in (1, 2)]
            [first, second] = [nbytes for nbytes in arenas_nbytes() if nbytes not in before]
            assert first == second
            assert checkpointer.history()[-1].staging_nbytes == first + second
        for step in (1, 2):
            assert_holds(handles[step - 1], states[step])
        assert_holds(checkpointer.save(3, states[3]), states[3])


def test_a_save_goes_on_in_the_slot_that_is_free_first(pool: SlotPool):
    looks = itertools.count()

    def remaining_s() -> float:
        if next(looks) == 2:
            pool.release("first")
        return 0.0

    pool._s_per_byte = 1.0  # so that making another one would take days
    slot = pool.acquire("second", 100.0, remaining_s=remaining_s)
    assert slot is pool._slots[0]
    assert not pool._slots[1].nbytes


def test_an_estimate_that_was_wrong_does_not_keep_a_save_from_another_slot(pool: SlotPool):
    pool._s_per_byte = 0.2 / pool.nbytes
    assert pool.acquire("second", 100.0, remaining_s=lambda: 0.1) is pool._slots[1]


@pytest.mark.parametrize("error", [HostMemoryError("short"), RuntimeError("no thread")])
def test_where_another_slot_cannot_be_made_a_save_waits_for_the_first_one(
    pool: SlotPool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
):
    def refuse(*args: Any) -> None:
        raise error

    def progress() -> None:
        if caplog.records:
            pool.release("first")

    monkeypatch.setattr(host_memory, "populate", refuse)
    assert not pool.is_busy()
    assert pool.acquire("second", 100.0, progress) is pool._slots[0]
    assert pool.is_busy(), "a save that may be skipped is skipped from now on"
    with pytest.raises(WriteStalledError, match="all 1 staging slots"):
        pool.acquire("third", 0.3)
    [record] = caplog.records  # another slot is not tried again at every save
    assert f"another slot cannot be made: {error}" in record.message
    pool.release("second")
    assert not pool.is_busy()


def test_where_no_thread_can_be_started_saves_go_on_with_the_slots_that_there_are(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch
):
    def refuse(work: object, name: str) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "start", refuse)
    monkeypatch.setattr(module, "_IDLE_SAVES", 1)
    with pytest.raises(WriteStalledError):
        pool.acquire("second", 0.01)
    fit(pool, "second")
    for owner in ("first", "second", "third"):
        pool.release(owner)
        pool.acquire("third", 0.0)


def test_memory_that_is_being_pinned_is_waited_for(
    attached: dict[int, Arena], monkeypatch: pytest.MonkeyPatch
):
    pinning, go_on = threading.Event(), threading.Event()

    class Pinned:
        def __init__(self, device: torch.device, address: int, nbytes: int) -> None:
            pinning.set()
            go_on.wait(60)

        def close(self) -> None: ...

    monkeypatch.setattr(module, "PinnedRange", Pinned)
    monkeypatch.setattr(module, "pci_address", lambda device: "")
    pool = SlotPool(2, attached.__setitem__, attached.__delitem__)

    def prepare() -> None:
        fit(pool, "prepare", torch.device("cuda", 0))
        pool.release("prepare")

    thread = threading.Thread(target=prepare)
    thread.start()
    assert pinning.wait(60)
    threading.Timer(0.5, go_on.set).start()  # longer than making the slot has taken until now
    assert pool.acquire("save", 100.0, remaining_s=lambda: 0.0) is pool._slots[0]
    thread.join()
    assert len(attached) == 1
    pool.release("save")
    pool.close()


def test_memory_that_is_being_prepared_is_waited_for(tmp_path: Path, held_up: HeldUp):
    before = len(arenas_nbytes())
    state = {"weights": torch.ones(MIB)}
    with Checkpointer(tmp_path) as checkpointer:
        prepared = checkpointer.prepare(state)
        assert held_up.begun.wait(60)
        threading.Timer(0.2, held_up.go_on.set).start()
        assert_holds(checkpointer.save(1, state), state)
        prepared.result(60)
        assert len(arenas_nbytes()) == before + 1


@pytest.mark.parametrize("slots", [1, 2])
def test_a_save_in_a_callback_does_not_wait_for_a_slot_that_its_own_thread_would_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int
):
    state = {"weights": torch.ones(MIB)}
    errors: list[BaseException] = []
    ready, ended = threading.Event(), threading.Event()
    with Checkpointer(tmp_path, staging=StagingOptions(slots=slots)) as checkpointer:

        def save(future: object) -> None:
            assert ready.wait(60)
            try:
                checkpointer.save(3, state)
            except (HostMemoryError, StagingError) as error:
                errors.append(error)
            ended.set()

        handle = checkpointer.save(1, state)
        handle.committed.add_done_callback(save)
        handle.written.result(60)
        monkeypatch.setattr(host_memory, "_mem_available", lambda: 0)
        checkpointer.save(2, state)
        ready.set()
        assert ended.wait(60)
    assert [type(error) for error in errors] == [StagingError if slots == 1 else HostMemoryError]


def test_a_save_that_is_written_leaves_nothing_staged_and_one_left_alone_does(tmp_path: Path):
    """A later daemon would write it again; one that is left alone still needs it."""
    state = {"weights": torch.ones(MIB)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, blocking=True)
        pool = checkpointer.session.pool
        wait_until(lambda: pool._slots[0].owner is None, "the slot is free")
        arena = pool._slots[0].arena
        assert arena is not None and arena.staged_descriptor() is None
        assert pool.try_acquire("save") is pool._slots[0]
        arena.begin_generation()
        arena.mark_staged(b"a message")
        pool.release("save")
        assert arena.staged_descriptor() == b"a message"


# Within a budget ----------------------------------------------------------------------------------


SLOT_NBYTES = slot_nbytes(PLAN, [FLAT.objects])
LARGE = flatten({"weights": torch.zeros(3 * MIB)})
LARGE_PLAN = make_plan(structure_of(LARGE.containers))


@pytest.fixture
def narrow(attached: dict[int, Arena]) -> Iterator[Callable[[float], SlotPool]]:
    """Makes pools of two slots, given their budget in slots of ``PLAN``."""
    pools: list[SlotPool] = []

    def make(slots: float) -> SlotPool:
        budget = int(slots * SLOT_NBYTES)
        memory = NodeMemory(budget, share_nbytes=budget)
        pools.append(SlotPool(2, attached.__setitem__, attached.__delitem__, memory))
        return pools[-1]

    yield make
    for pool in pools:
        end(pool)
        assert not pool.nbytes
    assert not attached


@pytest.mark.parametrize("slots", [1.5, 2.0])
def test_a_second_slot_is_made_only_within_the_budget(
    narrow: Callable[[float], SlotPool], slots: float
):
    pool = narrow(slots)
    fit(pool, "first")
    assert pool.is_busy() == (slots < 2)
    if slots < 2:
        with pytest.raises(WriteStalledError, match="all 1 staging slots"):
            pool.acquire("second", 0.2)
    else:
        assert pool.acquire("second", 60.0).nbytes == SLOT_NBYTES
    assert pool.nbytes == int(slots) * SLOT_NBYTES


def test_a_slot_beyond_the_budget_is_refused_with_the_amounts(
    narrow: Callable[[float], SlotPool], attached: dict[int, Arena]
):
    pool = narrow(0.5)
    with pytest.raises(
        HostMemoryError, match=r"needs 4 MiB of host memory.* allows this rank 2 MiB"
    ):
        fit(pool, "first")
    assert not attached and not pool.nbytes


def test_memory_that_could_not_be_allocated_does_not_count(
    narrow: Callable[[float], SlotPool], monkeypatch: pytest.MonkeyPatch
):
    pool = narrow(1.5)
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "_mem_available", lambda: 0)
        with pytest.raises(HostMemoryError):
            fit(pool, "first")
    assert not pool.nbytes
    pool.release("first")
    fit(pool, "first")


def test_a_free_slot_makes_room_for_one_that_grows(narrow: Callable[[float], SlotPool]):
    pool = narrow(3.5)
    for owner in ("first", "second"):
        fit(pool, owner)
    pool.release("first")
    slot = next(slot for slot in pool._slots if slot.owner == "second")
    pool.lay_out(slot, LARGE_PLAN, [LARGE.objects], None, lambda fit: fit(), lambda: 0.0)
    assert pool.nbytes == slot.nbytes > 3 * 4 * MIB


def test_a_slot_that_grows_waits_for_the_memory_of_one_that_is_being_written(
    narrow: Callable[[float], SlotPool],
):
    pool = narrow(3.5)
    for owner in ("first", "second"):
        fit(pool, owner)
    slot = next(slot for slot in pool._slots if slot.owner == "second")

    def grow(patience_s: float) -> None:
        parts = [LARGE.objects]
        pool.lay_out(slot, LARGE_PLAN, parts, None, lambda fit: fit(), lambda: patience_s)

    with pytest.raises(WriteStalledError):
        grow(0.2)
    threading.Timer(0.2, lambda: pool.release("first")).start()
    grow(60.0)
    assert slot.nbytes > 3 * 4 * MIB


def test_a_slot_that_grows_where_it_cannot_wait_is_refused(narrow: Callable[[float], SlotPool]):
    pool = narrow(3.5)
    for owner in ("first", "second"):
        fit(pool, owner)
    slot = next(slot for slot in pool._slots if slot.owner == "second")
    with pytest.raises(HostMemoryError, match="saves that are being written use 4 MiB"):
        pool.lay_out(slot, LARGE_PLAN, [LARGE.objects], None, lambda fit: fit())


def test_a_slot_that_never_fits_is_refused_at_once(narrow: Callable[[float], SlotPool]):
    pool = narrow(2.5)
    for owner in ("first", "second"):
        fit(pool, owner)
    slot = next(slot for slot in pool._slots if slot.owner == "second")
    with pytest.raises(HostMemoryError, match="needs 12 MiB"):
        pool.lay_out(slot, LARGE_PLAN, [LARGE.objects], None, lambda fit: fit(), lambda: 1000.0)


def test_two_slots_that_do_not_fit_cannot_be_prepared(tmp_path: Path):
    state, staging = {"weights": torch.ones(MIB)}, StagingOptions(node_memory_bytes=6 * MIB)
    with Checkpointer(tmp_path, staging=staging) as checkpointer:
        with pytest.raises(HostMemoryError, match="allows this rank 6 MiB"):
            checkpointer.prepare(state, slots=2).result(60)
        checkpointer.prepare(state).result(60)
        assert_holds(checkpointer.save(1, state), state)


def test_a_state_that_grows_while_a_save_is_written_is_saved(tmp_path: Path):
    states = [{"weights": torch.full((size * MIB,), float(size))} for size in (1, 3, 2, 3)]
    budget = 14 * MIB
    with Checkpointer(tmp_path, staging=StagingOptions(node_memory_bytes=budget)) as checkpointer:
        for step, state in enumerate(states):
            checkpointer.save(step, state)
            assert checkpointer.session.pool.nbytes <= budget
    for step, state in enumerate(states):
        assert torch.equal(
            sidesave.load(sidesave.find(tmp_path)[step])["weights"], state["weights"]
        )


# Giving back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["20 saves", "an hour"])
def test_a_slot_that_was_not_needed_for_long_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
):
    state = {"weights": torch.ones(MIB)}
    with Checkpointer(tmp_path) as checkpointer:
        before = len(arenas_nbytes())
        checkpointer.prepare(state, slots=2).result(60)
        if rule == "an hour":
            monkeypatch.setattr(module, "_IDLE_S", 0.0)
        for step in range(1 if rule == "an hour" else 20):
            assert len(arenas_nbytes()) == before + 2
            checkpointer.save(step, state, blocking=True)
        wait_until(lambda: len(arenas_nbytes()) == before + 1, "a slot is given back")
        daemon = checkpointer.daemon_pid or 0
        wait_until(lambda: len(arenas_nbytes(daemon)) == 1, "the daemon lets go of it too")
        with stopped(daemon):
            handles = [checkpointer.save(step, state) for step in (100, 101)]
        for handle in handles:
            assert_holds(handle, state)


def test_a_slot_that_is_given_back_late_is_looked_at_again(
    pool: SlotPool, held_up: HeldUp, monkeypatch: pytest.MonkeyPatch
):
    """Saves have used it meanwhile, and yet another one is being made."""
    held_up.go_on.set()
    late: list[Any] = []
    monkeypatch.setattr(module, "start", lambda work, name: late.append(work))
    second = fit(pool, "second")
    pool.release("second")
    monkeypatch.setattr(module, "_IDLE_SAVES", 1)
    pool.release("first")
    pool.release(pool.acquire("first", 0.0).owner)
    monkeypatch.setattr(module, "_IDLE_SAVES", 20)
    give_back = late[-1]  # of the second one
    for owner in ("first", "second"):
        pool.acquire(owner, 0.0)
    held_up.go_on.clear()
    held_up.begun.clear()
    maker = threading.Thread(target=pool._make)
    maker.start()
    assert held_up.begun.wait(60)
    pool.release("second")
    give_back()
    assert second.nbytes and second.owner is None
    assert pool._is_making()
    held_up.go_on.set()
    maker.join()
    assert all(slot.nbytes for slot in pool._slots)


def test_a_pool_that_is_closed_while_a_slot_is_made_leaves_no_memory(
    pool: SlotPool, held_up: HeldUp, attached: dict[int, Arena]
):
    def close() -> None:
        assert held_up.begun.wait(60)
        pool.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(ClosedError):
        pool.acquire("second", 100.0)
    closing.join()
    held_up.go_on.set()
    wait_until(lambda: len(attached) == 1, "the slot is given back")
