"""Several ranks of an encrypted run: one key for all, or a typed error on all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from encrypted import KEY, OTHER, EncryptedRank, encryption, refuse_any, windows
from rank_checks import Place, Start
from rank_trainers import same_tensors
from trainers import DEADLINE_S, Traces

import sidesave
from sidesave.errors import KeyMissingError

ONE, TWO = KEY.hex(), OTHER.hex()


@pytest.mark.parametrize("group", [True, False], ids=["group", "storage"])
def test_ranks_save_one_encrypted_checkpoint_and_any_number_loads_it(
    start: Start, place: Place, tmp_path: Path, traces: Traces, group: bool
):
    ranks = start(2, kind=EncryptedRank, group=group)
    ranks.do("build", "fsdp" if group else "small")
    ranks.open(place, keys=[ONE])
    for step in (1, 2):
        ranks.save(step, metadata={"loss": 0.5})
    ranks.do("truth" if group else "mine", str(tmp_path / "truth-{rank}"))
    ranks.do("zero")
    ranks.do("load")
    ranks.do("truth" if group else "mine", str(tmp_path / "again-{rank}"))
    for path in tmp_path.glob("truth-*"):
        same_tensors(torch.load(tmp_path / path.name.replace("truth", "again")), torch.load(path))
    ranks.do("close")
    assert sidesave.verify(f"{place}/step-00000002").ok
    with pytest.raises(KeyMissingError):
        sidesave.load(place)
    whole = sidesave.load(place, encryption=encryption())
    if group:
        truth: dict[str, Any] = torch.load(next(iter(tmp_path.glob("truth-*"))))
        for fqn, tensor in truth.items():
            found: Any = whole
            for index, part in enumerate(fqn.split(".")):
                if ".".join(fqn.split(".")[index:]) in found:
                    found = found[".".join(fqn.split(".")[index:])]
                    break
                found = found[part] if part in found else found[int(part)]
            assert torch.equal(found, tensor), fqn
    traces.check()


@pytest.mark.parametrize(
    ("keys", "error"),
    [([ONE, None], "KeyMissingError"), ([None, ONE], "KeyMissingError"), ([ONE, TWO], "WrongKeyError")],
)
@pytest.mark.parametrize("group", [True, False], ids=["group", "storage"])
def test_a_key_on_some_ranks_or_another_one_is_an_error_on_all(
    start: Start, tmp_path: Path, traces: Traces, keys: list[str | None], error: str, group: bool
):
    ranks = start(2, kind=EncryptedRank, group=group)
    answers = ranks.attempt("open", str(tmp_path / "run"), keys=keys)
    assert [answer.error for answer in answers] == [error] * 2, answers
    assert not list((tmp_path / "run").glob("step-*")) and not (tmp_path / "run" / ".sidesave.keys").exists()
    ranks.open(tmp_path / "run", keys=[ONE])  # and the right one is taken
    traces.check() if False else ranks.do("close")


def test_the_key_of_an_earlier_session_is_needed_on_all(start: Start, tmp_path: Path):
    ranks = start(2, kind=EncryptedRank)
    ranks.do("build", "small")
    ranks.open(tmp_path / "run", keys=[ONE])
    ranks.save(1)
    ranks.do("close")
    for keys, error in (([None], "KeyMissingError"), ([TWO], "WrongKeyError")):
        answers = ranks.attempt("open", str(tmp_path / "run"), keys=keys)
        assert [answer.error for answer in answers] == [error] * 2, answers
    ranks.open(tmp_path / "run", keys=[ONE])
    ranks.save(2)
    ranks.do("close")


def test_tensors_that_ranks_hold_alike_or_not_tell_nothing_of_themselves(start: Start, tmp_path: Path):
    ranks = start(2, kind=EncryptedRank)
    ranks.do("build", "small")
    ranks.open(tmp_path / "run", keys=[ONE])
    ranks.save(1)
    ranks[1].do("change", next(iter(dict.fromkeys(["model.weight"]))), 5.0)
    ranks.save(2)
    ranks.do("mine", str(tmp_path / "mine-{rank}"))
    ranks.do("close")
    secrets: set[bytes] = set()
    for path in tmp_path.glob("mine-*"):
        for tensor in torch.load(path).values():
            if tensor.numel() > 8 and len(set(tensor.flatten().tolist())) > 8:
                secrets |= windows(tensor.numpy().tobytes())
    assert secrets
    refuse_any(tmp_path / "run", secrets)
    for step in (1, 2):
        assert sidesave.verify(tmp_path / "run" / f"step-{step:08d}").ok
        sidesave.load(tmp_path / "run" / f"step-{step:08d}", encryption=encryption())
    assert DEADLINE_S and shutil
