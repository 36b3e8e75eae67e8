"""README.md stays short, and its Python blocks run as they are, fresh and again in the same
folder.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
GUIDE = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(), re.DOTALL)


def run(script: str, folder: Path) -> str:
    """Run a script in a process of its own and return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_readme_fits_on_three_screens():
    lines = TEXT.splitlines()
    assert len(lines) <= 130
    assert [line for line in lines if len(line) > 120] == []


def test_relative_links_lead_to_files_and_headings():
    for page in [
        ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
    ] + [*(ROOT / "docs").rglob("*.md")]:
        for path, heading in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", page.read_text()):
            target = (page.parent / path) if path else page
            assert target.exists(), f"{page.name} links to {path}"
            if heading and target.suffix == ".md":
                assert heading in headings(target), f"{page.name} links to {path}#{heading}"


def headings(page: Path) -> set[str]:
    """Return the anchors that a Markdown viewer gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("blocks", [BLOCKS, GUIDE], ids=["README.md", "docs/guide.md"])
def test_python_blocks_run_fresh_and_again_in_the_same_folder(blocks: list[str], tmp_path: Path):
    assert blocks
    for _ in range(2):
        for block in blocks:
            run(block, tmp_path)


@pytest.mark.slow
def test_the_first_block_continues_with_the_step_after_its_last_checkpoint(tmp_path: Path):
    training = BLOCKS[0].replace(
        "            step += 1", "            print(step)\n            step += 1"
    )
    one_epoch = training.replace("len(data), 3)", "len(data), 1)")
    assert len({BLOCKS[0], training, one_epoch}) == 3
    assert [int(line) for line in run(one_epoch, tmp_path).split()] == list(range(100))
    assert [int(line) for line in run(training, tmp_path).split()] == list(range(100, 300))
