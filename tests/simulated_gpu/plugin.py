"""Pytest on the simulated GPU: ``-p simulated_gpu.plugin``. A test that broke a rule, fixtures
included, fails.

``@pytest.mark.expects_violations("RACE")`` is for a test that breaks rules of these kinds on
purpose.
"""

from collections.abc import Generator

import pytest
import torch

import simulated_gpu

SHOWN = 10


def pytest_configure(config: pytest.Config) -> None:
    if not simulated_gpu.active():
        raise pytest.UsageError(
            "-p simulated_gpu.plugin needs the simulated GPU: scripts/test --gpu"
        )
    simulated_gpu.install()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    simulated_gpu.violations()  # of what the tests before have left behind


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    check(item)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    result = yield  # much is closed here
    check(item)
    return result


def check(item: pytest.Item) -> None:
    """Fails a test for what was found since the last check."""
    torch.cuda.synchronize()
    found = [line for line in simulated_gpu.violations() if not line.startswith(expected(item))]
    if found:
        distinct = list(dict.fromkeys(line.split(": 0x")[0] for line in found))
        shown = "\n".join(distinct[:SHOWN])
        pytest.fail(
            f"{len(found)} violations of the rules of CUDA, {len(distinct)} distinct:\n{shown}",
            pytrace=False,
        )


def expected(item: pytest.Item) -> tuple[str, ...]:
    return tuple(
        f"{kind}:" for marker in item.iter_markers("expects_violations") for kind in marker.args
    )
