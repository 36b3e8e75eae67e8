"""``torch.distributed.run`` whose workers are forked: most of the time of a restart goes into their
imports.

They are what torchrun starts in all that it sees of them: leaders of sessions of their own with
files, an environment and a command line, which it signals and waits for.
"""

import subprocess
from collections.abc import Sequence
from typing import Any

import forks
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler


def _popen(args: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    return forks.popen(list(args), **options)


if __name__ == "__main__":
    subprocess_handler.Popen = _popen  # type: ignore[assignment]
    with forks.wanted(daemons=False):
        run.main()
