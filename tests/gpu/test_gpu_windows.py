"""The windows of bytes that tell whether a tensor was copied as it was: taken by views that are kept."""

from collections.abc import Sequence

import gpu
import pytest
import torch

from sidesave.stager.copy import fingerprint
from sidesave.stager.copy.fingerprint import WINDOW_NBYTES, WindowViews
from sidesave.stager.copy.pool import Job, Target

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
    return torch.stack([data[number][begin : begin + WINDOW_NBYTES] for number, begin in views.spots])


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
