"""What becomes of a save reaches its futures and its record, whatever other threads do
meanwhile.
"""

import sys
import threading
from pathlib import Path

import pytest
import torch

import sidesave
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.saving.history import History
from sidesave.client.saving.save import Save
from sidesave.stager.copy.copier import StagingCopy


def test_a_record_is_made_while_other_threads_note_phases():
    ends = threading.Event()
    save = Save(SaveHandle(1), StagingCopy.__new__(StagingCopy), step=1)

    def note() -> None:
        for number in range(1_000_000):
            save.reach(f"phase {number % 5000}")
            if number % 5000 == 4999:
                save.reached = {}
            if ends.is_set():
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=note)
    thread.start()
    try:
        for _ in range(3000):
            assert save.record("session", "/run").outcome == "saving"
    finally:
        ends.set()
        thread.join()
        sys.setswitchinterval(interval)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_futures_have_their_outcome_though_the_record_of_it_fails(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(history: History, save: Save) -> None:
        raise RuntimeError("no record")

    with sidesave.Checkpointer(run) as ckpt:
        ckpt.save(1, {"w": torch.ones(3)}, blocking=True)
        with monkeypatch.context() as patched:
            patched.setattr(History, "ended", refuse)
            handle = ckpt.save(2, {"w": torch.ones(3)})
            handle.committed.result(60)
    latest = sidesave.latest(run)
    assert latest is not None and latest.step == 2
