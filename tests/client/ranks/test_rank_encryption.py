"""Several ranks of an encrypted run: one key for all, or a typed error on all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from encrypted import KEY, OTHER, EncryptedRank, encryption
from rank_checks import Place, Start
from rank_trainers import Ranks, same_tensors
from trainers import Traces

import sidesave
from sidesave.client.encryption import using
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.errors import KeyMissingError

pytest.importorskip("cryptography", reason="needs cryptography: pip install 'sidesave[encryption]'")

ONE, TWO = KEY.hex(), OTHER.hex()


def read(path: Path) -> dict[str, torch.Tensor]:
    """What a rank has written down, but for what moves by itself."""
    return {fqn: tensor for fqn, tensor in torch.load(path).items() if fqn != "rng"}


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
        same_tensors(read(tmp_path / path.name.replace("truth", "again")), read(path))
    ranks.do("close")
    assert sidesave.verify(f"{place}/step-00000002").ok
    with pytest.raises(KeyMissingError):
        sidesave.load(place)
    with using(encryption()), CheckpointReader(f"{place}/step-00000002") as reader:  # as one rank
        names = reader.names()
        truth = read(next(tmp_path.glob("truth-*")))
        assert names and {*names} & {*truth}
        same_tensors(
            reader.read([name for name in names if name in truth]),
            {n: truth[n] for n in names if n in truth},
        )
    traces.check()


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ([ONE, None], "KeyMissingError"),
        ([None, ONE], "KeyMissingError"),
        ([ONE, TWO], "WrongKeyError"),
    ],
)
@pytest.mark.parametrize("group", [True, False], ids=["group", "storage"])
def test_a_key_on_some_ranks_or_another_one_is_an_error_on_all(
    start: Start, tmp_path: Path, traces: Traces, keys: list[str | None], error: str, group: bool
):
    ranks = start(2, kind=EncryptedRank, group=group)
    answers = ranks.attempt("open", str(tmp_path / "run"), keys=keys)
    assert [answer.error for answer in answers] == [error] * 2, answers
    assert (
        not list((tmp_path / "run").glob("step-*"))
        and not (tmp_path / "run" / ".sidesave.keys").exists()
    )
    ranks.open(tmp_path / "run", keys=[ONE])  # and the right one is taken
    ranks.do("close")
    traces.check()


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


def test_tensors_that_ranks_hold_alike_or_not_tell_nothing_of_themselves(
    start: Start, tmp_path: Path
):
    """They are compared by digests, which are names of files for a moment: keyed ones."""
    ranks = start(2, kind=EncryptedRank)
    ranks.do("build", "plain")
    ranks.open(tmp_path / "run", keys=[ONE])
    ranks.save(1)
    fqn = next(iter(dict(torch_names(ranks, tmp_path))))
    ranks[1].do("change", fqn, 5.0)
    ranks.save(2)
    ranks.do("close")
    ranks.do("build", "plain")
    ranks.open(tmp_path / "plain", keys=[None])
    ranks.save(1)
    ranks.do("close")
    with CheckpointReader(str(tmp_path / "plain" / "step-00000001")) as reader:
        digest = reader.record(0).part.replica_digest
    with using(encryption()), CheckpointReader(str(tmp_path / "run" / "step-00000001")) as reader:
        assert digest and reader.record(0).part.replica_digest not in ("", digest)
    for step, alike in ((1, True), (2, False)):
        path = tmp_path / "run" / f"step-{step:08d}"
        assert sidesave.verify(path).ok
        with using(encryption()), CheckpointReader(str(path)) as reader:
            assert (fqn not in reader.manifest.diverged) == alike
            names = [each for each in reader.names() if each.startswith(fqn)]
            assert (
                len({each.sum().item() for each in reader.read(names).values()})
                == len(names)
                == 2 - alike
            )


def torch_names(ranks: Ranks, folder: Path) -> dict[str, torch.Tensor]:
    ranks.do("mine", str(folder / "mine-{rank}"))
    return torch.load(folder / "mine-0")
