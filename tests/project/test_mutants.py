"""The table of mutants is complete, and speaks of the code that is there."""

import mutants
import pytest


def test_every_ordering_line_has_a_mutant():
    known = {(mutant.file, mutant.line) for mutant in mutants.MUTANTS}
    missing = [
        f"{file}: {line}" for file, line in mutants.ordering_lines() if (file, line) not in known
    ]
    assert missing == [], (
        "add them to tests/support/mutants.py, each with a test that fails without it"
    )


@pytest.mark.parametrize(
    "mutant", mutants.MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.line}"
)
def test_a_mutant_changes_a_line_that_is_there(mutant: mutants.Mutant):
    lines = list(mutants.code_lines((mutants.ROOT / "stager" / mutant.file).read_text()))
    assert lines.count(mutant.line) > mutant.which
    assert mutant.tests or mutant.equivalent
