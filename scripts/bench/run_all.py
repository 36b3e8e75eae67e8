"""Run every benchmark that this machine can run, one report and one chart each.

python -m scripts.bench.run_all --out bench-results --dir /mnt/fast
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch

SCRIPTS = {
    "raw_limits": ["--size", "large"],
    "save": ["--size", "large"],
    "training_loop": [],
    "load": ["--size", "large"],
    "memory": [],
    "ranks": [],
}
QUICK = ["--size", "tiny", "--rounds", "2"]


def main() -> None:
    """Run them one after the other: two at once would measure each other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench-results"), help="folder of the reports"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="where to write (default: the current folder)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny states and two rounds: only to see them run"
    )
    args = parser.parse_args()
    scripts = SCRIPTS | ({"gpu": ["--size", "huge"]} if torch.cuda.is_available() else {})
    failed = []
    for name, options in scripts.items():
        files = [
            "--markdown",
            str(args.out / f"{name}.md"),
            "--chart",
            str(args.out / f"{name}.png"),
        ]
        command = [
            sys.executable,
            "-m",
            f"scripts.bench.{name}",
            *(QUICK if args.quick else options),
        ]
        if subprocess.run([*command, "--dir", str(args.dir), *files], check=False).returncode != 0:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
