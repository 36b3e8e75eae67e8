"""Saves of CUDA tensors against a model of them: any sequence of what training does, and each save holds its moment.

The model of a save is a clone of its state, made on the same streams just before the call and looked at only at the
end: then the checkpoint must be equal to it, bit for bit. A save may fail only where the model says so: torn, where
weights were written behind the guard's back while their copy could be under way, or where the test had it fail.

On the simulated GPU the schedule changes as well, and accesses that nothing orders are found whatever the schedule.
"""

import os
import random
import re

import campaigns
import gpu
import pytest
from gpu_graph_training import TrainingWithGraphs
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

pytestmark = [*gpu.MARKS, pytest.mark.filterwarnings("ignore:the save of step .* failed")]


@pytest.mark.parametrize(
    ("examples", "steps"),
    [
        pytest.param(25, 25, id="short"),
        pytest.param(campaigns.length(110), 40, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_every_save_holds_the_moment_of_its_call_whatever_training_does(
    examples: int, steps: int, tmp_path_factory: pytest.TempPathFactory
):
    """``SIDESAVE_TEST_SEED`` repeats a sequence, as far as threads allow it."""
    chosen = int(os.environ.get("SIDESAVE_TEST_SEED") or random.randrange(10**6))
    print(f"SIDESAVE_TEST_SEED={chosen}")
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        # Shrinking would begin with what other threads did by chance; SIDESAVE_TEST_SHRINK=1 has it tried.
        phases=[Phase.generate] + [Phase.shrink] * bool(os.environ.get("SIDESAVE_TEST_SHRINK")),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        print_blob=False,
    )

    class Here(TrainingWithGraphs):
        root = tmp_path_factory.mktemp("runs")

    run_state_machine_as_test(seed(chosen)(Here), settings=how)


# The oracle is looked at itself: what it must tell apart from a good save.


def test_the_addresses_of_a_race_are_read_from_what_the_simulator_says():
    from gpu_model import raced

    text = "RACE: copy (stream 3) reads device memory that x (stream 1) writes, and nothing orders them: 0x1f00+64"
    assert raced(text) == (0x1F00, 64)
    assert re.match("RACE", text)
