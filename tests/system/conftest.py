"""What tests of the whole system share."""

from pathlib import Path

import campaigns
import pytest


@pytest.fixture
def seed() -> int:
    """The seed of random choices; it is printed if a test fails, and ``SIDESAVE_TEST_SEED`` repeats
    it.
    """
    print(f"SIDESAVE_TEST_SEED={campaigns.seed()}")
    return campaigns.seed()


@pytest.fixture
def run(run: Path, traced: None) -> Path:
    return run
