"""Saves of CUDA tensors against a model of them: any sequence of what training does, and each save
holds its moment.

The model of a save is a clone of its state, made on the same streams just before the call and
looked at only at the end: then the checkpoint must be equal to it, bit for bit. A save may fail
only where the model says so: torn, where weights were written behind the guard's back while their
copy could be under way, or where the test had it fail.

On the simulated GPU the schedule changes as well, and accesses that nothing orders are found
whatever the schedule.
"""

import os
import re

import campaigns
import gpu
import pytest
from campaigns import Share
from gpu_graph_training import TrainingWithGraphs
from gpu_model import raced, run_machine
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyStrategyDefinition
from hypothesis.stateful import RuleBasedStateMachine, rule

pytestmark = [*gpu.MARKS, pytest.mark.filterwarnings("ignore:the save of step .* failed")]


def test_every_save_holds_the_moment_of_its_call_whatever_training_does(
    tmp_path_factory: pytest.TempPathFactory,
):
    """``SIDESAVE_TEST_SEED`` repeats a sequence, as far as threads allow it."""
    train(campaigns.seed(), 25, 25, tmp_path_factory)


@pytest.mark.slow(minutes=2)
@pytest.mark.timeout(1200)
def test_every_save_holds_the_moment_of_its_call_whatever_long_training_does(
    share: Share, tmp_path_factory: pytest.TempPathFactory
):
    for _ in share.rounds(11):
        train(share.chance.randrange(10**6), 10, 40, tmp_path_factory)


def train(chosen: int, examples: int, steps: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    print(f"SIDESAVE_TEST_SEED={chosen}")
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        # Shrinking would begin with what other threads did by chance; SIDESAVE_TEST_SHRINK=1 has it
        # tried.
        phases=[Phase.generate] + [Phase.shrink] * bool(os.environ.get("SIDESAVE_TEST_SHRINK")),
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
        print_blob=False,
    )

    class Here(TrainingWithGraphs):
        root = tmp_path_factory.mktemp("runs")

    run_machine(seed(chosen)(Here), how, may_vary=gpu.simulator() is None)


# The oracle is looked at itself: what it must tell apart from a good save.


def test_the_addresses_of_a_race_are_read_from_what_the_simulator_says():
    text = (
        "RACE: copy (stream 3) reads device memory that x (stream 1) writes, and nothing orders "
        "them: 0x1f00+64"
    )
    assert raced(text) == (0x1F00, 64)
    assert re.match("RACE", text)


class _Varying(RuleBasedStateMachine):
    """What it draws depends on how often it has run."""

    runs = 0
    fails_at: int | None = None

    def __init__(self) -> None:
        super().__init__()
        type(self).runs += 1

    @rule(data=st.data())
    def draw(self, data: st.DataObject) -> None:
        assert self.runs != self.fails_at, "a failed check"
        data.draw(st.booleans() if self.runs % 2 else st.integers(0, 1 << 20))


_HOW = settings(
    max_examples=50,
    stateful_step_count=10,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow],
)


def test_an_example_that_varies_ends_there_on_a_real_device_alone():
    class Varying(_Varying):
        pass

    run_machine(Varying, _HOW, may_vary=True)
    assert Varying.runs > 10, "the others are run"
    with pytest.raises(FlakyStrategyDefinition):
        run_machine(Varying, _HOW, may_vary=False)


@pytest.mark.parametrize("fails_at", [1, 5])
def test_a_check_that_fails_in_an_example_that_varies_fails(fails_at: int):
    class Failing(_Varying):
        pass

    Failing.fails_at = fails_at
    with pytest.raises(AssertionError, match="a failed check"):
        run_machine(Failing, _HOW, may_vary=True)
