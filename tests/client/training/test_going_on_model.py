"""Sequences of a run's calls: training, saving, going back and starting again, against a model of a
few lines.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from campaigns import Share
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from managers import managers_of

import sidesave
from sidesave.errors import CheckpointNotFoundError


@dataclass(frozen=True)
class Commit:
    """What was saved, and after what."""

    step: int
    value: int
    before: Commit | None

    def line(self) -> list[Commit]:
        """All that it descends from, itself first."""
        return [self, *(self.before.line() if self.before else [])]


class Model:
    """What a run has to do: a tree of commits, and the one that training stands on."""

    def __init__(self) -> None:
        self.head: Commit | None = None
        self.there: dict[int, Commit] = {}
        self.stepped = -1

    def commit(self, step: int, value: int) -> None:
        self.head = self.there[step] = Commit(step, value, self.head)

    def finish(self, value: int) -> None:
        """The last step is saved, unless it was, or a later one."""
        if self.stepped >= 0 and (self.head is None or self.head.step != self.stepped):
            self.commit(self.stepped, value)

    def go_on(self, commit: Commit | None) -> None:
        self.head, self.stepped = commit, -1 if commit is None else commit.step

    def back(self, steps: int) -> Commit | None:
        line = [] if self.head is None else self.head.line()
        return next(
            (
                each
                for each in line
                if each.step <= self.stepped - steps and each in self.there.values()
            ),
            None,
        )


CALLS = st.lists(
    st.tuples(
        st.sampled_from(
            ["step"] * 4 + ["rollback"] * 3 + ["save", "restore", "back", "restart", "fail"]
        ),
        st.integers(1, 3),
        st.randoms(use_true_random=False),
    ),
    min_size=5,
    max_size=20,
)


def check(calls: list[tuple[str, int, Any]]) -> None:
    model, state, value = Model(), {"x": 0}, 0
    options: dict[str, Any] = {"save": [sidesave.EverySteps(2, offset=1), sidesave.LastStep()]}

    def restored(next_step: int) -> None:
        assert next_step == model.stepped + 1
        if model.head is not None:
            assert state["x"] == model.head.value

    with tempfile.TemporaryDirectory() as folder, managers_of(Path(folder) / "run") as manage:
        manager = manage(state, **options)
        restored(manager.restore())
        for call, number, chance in calls:
            if call in ("step", "save"):
                value += 1
                state["x"] = value
                model.stepped += number
                if call == "save" or model.stepped % 2:
                    model.commit(model.stepped, value)
                manager.save(model.stepped) if call == "save" else manager.step(model.stepped)
            elif call == "restore":
                model.go_on(model.head)
                restored(manager.restore())
            elif call == "rollback" and model.there:
                model.go_on(chance.choice(sorted(model.there.values(), key=lambda each: each.step)))
                assert model.head is not None
                restored(manager.rollback(model.head.step))
            elif call == "back":
                target = model.back(number)
                if target is None:
                    with pytest.raises(CheckpointNotFoundError):
                        manager.rollback(steps_back=number)
                else:
                    model.go_on(target)
                    restored(manager.rollback(steps_back=number))
            elif call == "restart":
                model.finish(state["x"])
                manager = manage(state, **options)
                state["x"] = -1
                model.go_on(model.head)
                restored(manager.restore())
            elif call == "fail":
                with pytest.raises(CheckpointNotFoundError):
                    manager.restore(1000)
        manager.wait()
        latest = manager.latest
        assert (latest and latest.step) == (model.head and model.head.step)
        assert sorted(manager.checkpointer.steps()) == sorted(model.there)
        line = {id(each) for each in model.head.line()} if model.head else set()
        wanted = {step for step, each in model.there.items() if id(each) in line}
        assert {info.step for info in manager.checkpoints() if not info.given_up} == wanted
        assert manager.checkpointer.session.lineage.ancestors & model.there.keys() == wanted


@settings(max_examples=5)
@given(CALLS)
def test_every_sequence_of_calls_goes_on_from_where_it_stands(calls: list[tuple[str, int, Any]]):
    check(calls)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_more_sequences_go_on_from_where_they_stand(share: Share):
    for _ in share.rounds(30):
        seed(share.chance.randrange(1 << 32))(settings(max_examples=10)(given(CALLS)(check)))()
