"""A benchmark goes on without a peer that breaks, and tells so."""

from pathlib import Path

import pytest
import torch

from scripts.bench.common import Field
from scripts.bench.peers import Peer, Sidesave, TorchSave
from scripts.bench.state import TrainState


class Broken(Peer):
    """As another one after an update of torch."""

    name = "broken"
    settings = "its best"

    def save(self, step: int, state: TrainState) -> None:
        raise KeyError(type)

    def close(self) -> None:
        raise RuntimeError("nothing to close")


def test_a_peer_that_breaks_is_told_in_the_report_and_the_others_go_on(tmp_path: Path):
    state = TrainState("tiny")
    with Field([Broken, TorchSave], tmp_path, state) as field:
        peers = field.start_all()
        for step in range(2):
            for peer in peers:
                field.attempt(peer, lambda: peer.save(step, state))  # noqa: B023
    assert dict(field.settings()) == {
        "broken": "broke: KeyError: <class 'type'>",
        "torch.save": TorchSave.settings,
    }
    assert [
        torch.load(path / "state.pt").keys() == state.state_dict().keys() for path in peers[1].saved
    ] == [True] * 2


def test_sidesave_is_no_peer_that_may_break(tmp_path: Path):
    state = TrainState("tiny")

    def breaks() -> None:
        raise KeyError(type)

    with Field([Sidesave], tmp_path, state) as field, pytest.raises(KeyError):
        field.attempt(field.start_all()[0], breaks)
