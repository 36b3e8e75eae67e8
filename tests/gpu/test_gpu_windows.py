"""Windows of bytes show whether a tensor was copied as it was, and whether a slot holds a frozen
one as it is.
"""

from collections.abc import Sequence
from pathlib import Path

import gpu
import pytest
import torch
from trainers import DEADLINE_S

import sidesave
from sidesave import Checkpointer, FailureOptions, Frozen, StagingOptions
from sidesave.errors import StagingError
from sidesave.stager.copy import device_copy, fingerprint, held
from sidesave.stager.copy.copier import Copier
from sidesave.stager.copy.fingerprint import WINDOW_NBYTES, WindowViews
from sidesave.stager.plan import Job, Target

pytestmark = gpu.MARKS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def tensors(value: float) -> list[torch.Tensor]:
    """Of each dtype two, of less than a span and of several."""
    sizes = [(dtype, count) for dtype in DTYPES for count in (100, 5000)]
    return [torch.arange(count, device="cuda").to(dtype) * value for dtype, count in sizes]


def take(views: WindowViews, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """The windows' bytes, on the host."""
    jobs = [Job(source, Target("", source, 0, 0, source.nbytes)) for source in sources]
    return views.take(jobs, torch.cuda.current_stream()).cpu()


def expected(views: WindowViews, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    data = [source.cpu().view(torch.uint8) for source in sources]
    return torch.stack(
        [data[number][begin : begin + WINDOW_NBYTES] for number, begin in views.spots]
    )


def test_windows_of_memory_are_what_is_there_at_each_look(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fingerprint, "SPAN_NBYTES", 4096)
    fingerprint._windows.cache_clear()
    views, sources, others = WindowViews(), tensors(1.5), tensors(2.5)
    for look in (sources, sources, others, sources):
        found = take(views, look)
        assert len(found) > len(sources)
        assert torch.equal(found, expected(views, look))
        for source in sources:
            source.add_(1)
    fingerprint._windows.cache_clear()


def test_views_of_windows_keep_no_memory_alive():
    views, nbytes = WindowViews(), 8 << 20
    source = torch.ones(nbytes // 4, device="cuda")
    take(views, [source])
    before = torch.cuda.memory_allocated()
    del source
    assert torch.cuda.memory_allocated() <= before - nbytes


def test_windows_on_another_stream_have_room_of_their_own():
    views, sources = WindowViews(), tensors(1.5)
    jobs = [Job(source, Target("", source, 0, 0, source.nbytes)) for source in sources]
    here = views.take(jobs, torch.cuda.current_stream())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        there = views.take(jobs, stream)
    stream.synchronize()
    assert here.data_ptr() != there.data_ptr()
    assert torch.equal(here, there)


# Frozen tensors that a slot holds -----------------------------------------------------------------


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that leave the device."""
    copied: list[int] = []
    copy_out = device_copy._DevicePart.copy_out

    def count(self: device_copy._DevicePart, source: torch.Tensor, offset: int) -> None:
        copied.append(source.nbytes)
        copy_out(self, source, offset)

    monkeypatch.setattr(device_copy._DevicePart, "copy_out", count)
    return copied


def test_what_a_slot_holds_of_a_device_is_not_copied_again(tmp_path: Path, copied: list[int]):
    base, head = torch.rand(1 << 18, device="cuda"), torch.zeros(8, device="cuda")
    counts: list[int] = []
    with Checkpointer(tmp_path, staging=StagingOptions(slots=1)) as ckpt:
        for step in range(6):
            if step == 3:
                base.add_(1)
            head.fill_(step)
            ckpt.save(step, {"base": Frozen(base), "head": head}).committed.result(DEADLINE_S)
            saved = ckpt.load(step)
            assert torch.equal(saved["base"], base.cpu())
            assert torch.equal(saved["head"], head.cpu())
            counts.append(sum(copied))
            copied.clear()
    assert [count >= base.nbytes for count in counts] == [True, False, False, True, False, False]


@pytest.mark.parametrize("alone", [False, True])
def test_a_write_that_torch_does_not_count_fails_the_save_and_the_next_one_has_it(
    tmp_path: Path, *, alone: bool
):
    base, head = torch.rand(1 << 18, device="cuda"), torch.zeros(8, device="cuda")
    state = {"base": Frozen({"w": base})} | ({} if alone else {"head": head})
    with Checkpointer(
        tmp_path, staging=StagingOptions(slots=1), failures=FailureOptions(tolerated=5)
    ) as ckpt:
        for step in range(3):
            ckpt.save(step, state).committed.result(DEADLINE_S)
        base.data.copy_(torch.rand(1 << 18))
        handle = ckpt.save(3, state)
        with pytest.raises(
            StagingError, match=r"without a new tensor version: base\.w .*save dropped"
        ):
            handle.committed.result(DEADLINE_S)
        assert sidesave.verify(tmp_path / "step-00000002").ok
        for step in (4, 5):
            base.data.add_(1)
            ckpt.save(step, state).committed.result(DEADLINE_S)
            assert torch.equal(ckpt.load(step)["base"]["w"], base.cpu())


def test_a_write_between_the_windows_is_in_the_next_save_of_all_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    base = torch.rand(1 << 18, device="cuda")
    with Checkpointer(tmp_path, staging=StagingOptions(slots=1)) as ckpt:
        for step in range(held.EVERY + 1):
            ckpt.save(step, {"base": Frozen({"w": base})}).committed.result(DEADLINE_S)
            base.data[5] = -1
        assert ckpt.load(held.EVERY - 1)["base"]["w"][5] >= 0
        assert ckpt.load(held.EVERY)["base"]["w"][5] == -1
    [record] = [record for record in caplog.records if record.name == Copier.__module__]
    assert "base.w (copied at each save" in record.getMessage()
