"""Object stores of other makers, as far as they run here: what they do otherwise is found out at a
session's start.
"""

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
from other_servers import azurite, rclone
from trainers import DEADLINE_S, a_state, commit, daemon, same

import sidesave
from sidesave import Checkpointer
from sidesave.errors import WriteError


def test_rclone_replaces_what_is_there_and_is_refused_at_the_start(tmp_path: Path) -> None:
    with rclone(tmp_path / "store") as options:
        with pytest.raises(WriteError, match="replaces existing objects") as refused:
            Checkpointer("s3://bucket/run", storage_options=options)
        assert refused.value.errno == errno.EOPNOTSUPP
        assert sidesave.find("s3://bucket/run", storage_options=options) == []


@pytest.mark.slow
def test_azurite_is_saved_to_resumed_from_and_loses_nothing_by_a_death_of_the_daemon(
    tmp_path: Path,
) -> None:
    url = "az://bucket/run"
    large = {"model": {"weight": torch.randn(3 << 20)}}  # in parts
    with azurite(tmp_path / "store") as options:
        with Checkpointer(url, storage_options=options) as ckpt:
            commit(ckpt, 1)
            handle = ckpt.save(2, large)
            os.kill(daemon(ckpt), signal.SIGKILL)
            handle.committed.result(DEADLINE_S)
            commit(ckpt, 3)
            ckpt.delete(1)
        with Checkpointer(url, storage_options=options) as ckpt:
            assert ckpt.steps() == [2, 3]
            assert same(ckpt.load(), a_state(3))
            commit(ckpt, 4)
        for info in sidesave.find(url, storage_options=options):
            assert sidesave.verify(info, storage_options=options).ok
        loaded = sidesave.load(f"{url}/step-00000002", storage_options=options)
        assert torch.equal(loaded["model"]["weight"], large["model"]["weight"])
