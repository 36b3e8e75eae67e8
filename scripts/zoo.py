"""The differential zoo: saves and loads generated states of every optimizer there is, and prints
what became of each.

    python -m scripts.zoo [--seed 7] [--minutes 5] [--only torch.Adam] [--wrapper plain]

Optimizers are those of torch, and of torchao, bitsandbytes and pytorch_optimizer where these are
installed. Without ``--minutes`` it goes through all of them, in each dtype and wrapper.
tests/support/zoo.py says what is compared.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from zoo import DTYPES, VERDICTS, WRAPPERS, Point, Zoo, points, run_together

BATCH = 8
"""Points for which two ranks stay."""


def main() -> int:
    """Print a line for each point that is not exact, and a table; 1 if any is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no point after this time"
    )
    parser.add_argument("--only", default="", help="optimizers with this in their name")
    parser.add_argument("--wrapper", action="append", choices=WRAPPERS, help="default: all")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    chosen = points(arguments.seed, arguments.wrapper or WRAPPERS, arguments.only)
    random.Random(arguments.seed).shuffle(chosen)
    end = time.monotonic() + 60 * arguments.minutes
    verdicts: dict[tuple[str, str, str], str] = {}
    for point, verdict in _run(chosen, end):
        verdicts[point.optimizer, point.dtype, point.wrapper] = verdict
        if verdict != "exact":
            print(f"{point}: {verdict}", flush=True)
    columns = [(dtype, wrapper) for wrapper in arguments.wrapper or WRAPPERS for dtype in DTYPES]
    print(
        "\n| optimizer | " + " | ".join(f"{dtype} {wrapper}" for dtype, wrapper in columns) + " |"
    )
    print("|---" * (len(columns) + 1) + "|")
    for optimizer in sorted({name for name, _, _ in verdicts}):
        cells = [verdicts.get((optimizer, *column), "").partition(":")[0] for column in columns]
        print(f"| {optimizer} | " + " | ".join(cells) + " |")
    counts = {
        word: sum(verdict.startswith(word) for verdict in verdicts.values()) for word in VERDICTS
    }
    counted = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"\n{len(verdicts)} of {len(chosen)} points: {counted}; seed {arguments.seed}")
    return 1 if counts["WRONG"] else 0


def _run(chosen: list[Point], end: float) -> Iterator[tuple[Point, str]]:
    alone = [point for point in chosen if point.wrapper == "plain"]
    together = [point for point in chosen if point.wrapper != "plain"]
    half = time.monotonic() + (end - time.monotonic()) / 2 if together else end
    with tempfile.TemporaryDirectory() as folder, Zoo(folder) as zoo:
        for point in alone:
            if time.monotonic() > half:
                break
            yield point, zoo.run(point)
    while together and time.monotonic() < end:
        yield from run_together(together[:BATCH])
        together = together[BATCH:]


if __name__ == "__main__":
    sys.exit(main())
