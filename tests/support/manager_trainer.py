"""A training script on ``CheckpointManager`` that tests run in processes of its own, and signal,
kill and start again.

It trains a small model with dropout, so that every step depends on all random numbers before it,
and tells a digest of everything after each step: runs that are resumed have to tell the same ones.
It tells, one line each, ``ready``, ``restored NEXT``, ``step N DIGEST``, ``passed N`` when the
manager has let it go on, ``saved N`` when a save is committed, ``trained``, and ``closed``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from trainers import Traces, Trainer, grouped, say, wait_to_go_on


class ManagedTrainer(Trainer):
    """One process that runs this script; see :func:`train` for the options."""

    script = __file__

    def __init__(self, traces: Traces, run: Path | str, **options: Any) -> None:
        rank, size = options.get("rank", 0), options.get("size", 1)
        environment = {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
        }
        super().__init__(traces, json.dumps({"run": str(run), **options}), umask=-1, **environment)

    def train(self, count: int = 1) -> list[tuple[int, str]]:
        """Let a paced trainer train so many steps; their numbers and digests."""
        done: list[tuple[int, str]] = []
        for _ in range(count):
            done.append(self.train_last())
            self.expect("passed")
        return done

    def train_last(self) -> tuple[int, str]:
        """Let it train a step, after which it may leave."""
        self.go_on()
        step, digest = self.expect("step")
        return int(step), digest

    def hear(self, line: str) -> None:
        """Block until it has said that line."""
        lines = self.lines()
        while line not in self.heard:
            assert next(lines, None) is not None, self.complaints()

    def leaves(self, status: int) -> None:
        """Block until it has ended; with that exit status."""
        for _ in self.lines():
            pass
        ended = self.end()
        assert ended == status, (self, ended, self.complaints())


def train(
    run: str,
    *,
    save: str = "[]",
    keep: str = "[]",
    total: int = 1000,
    paced: bool = True,
    rank: int = 0,
    size: int = 1,
    meeting: str = "",
    group: bool = True,
    gate: str = "",
    rest_s: float = 0.0,
    quiet: bool = False,
    export: str = "",
    metric: str = "loss",
    options: dict[str, Any] | None = None,
) -> None:
    """Train from the newest checkpoint up to ``total`` steps.

    Args:
        run: The run directory.
        save: Policies, as an expression.
        keep: The same.
        total: The number of steps.
        paced: Wait for :meth:`Trainer.go_on` before each step.
        rank: Of a group of ``size`` ranks.
        size: How many there are; 0 under a launcher that tells.
        meeting: The file through which they find each other.
        group: Whether they do, and do not only know how many they are.
        gate: "restore" to wait while the state is restored.
        rest_s: How long each step takes at least.
        quiet: Say nothing of single steps, so that nobody has to listen.
        export: Where the weights go after training.
        metric: What the loss is called.
        options: For the manager.
    """
    import signal
    import time

    import torch

    import sidesave

    if size > 1 and group:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size
        )
    if size == 0:
        torch.distributed.init_process_group("gloo")
    names = {name: getattr(sidesave, name) for name in sidesave.__all__}
    further: Any = grouped(options or {})
    training = Training()
    state: dict[str, Any] = {
        "model": training.model,
        "optimizer": training.optimizer,
        "gate": Gate(gate),
    }
    with sidesave.CheckpointManager(
        run,
        state,
        save=eval(save, {**names, "signal": signal}),
        keep=eval(keep, names),
        random_state=True,
        **further,
    ) as manager:
        signal.signal(signal.SIGHUP, lambda number, frame: manager.request_stop())
        say("ready", manager.checkpointer.daemon_pid)
        if gate:
            wait_to_go_on()
        first = manager.restore()
        say("restored", first)
        for step in range(first, total):
            if paced:
                wait_to_go_on()
            loss = training.step()
            if rest_s:
                time.sleep(rest_s)
            if not quiet:
                say("step", step, training.digest())
            handle = manager.step(step, {metric: loss})
            if handle is not None:
                say("saves", step)
                handle.committed.add_done_callback(lambda done, step=step: tell(done, step))
            if not quiet:
                say("passed", step)
            if manager.stopping:
                say("stops", step)
                break
        if export:
            say("exported", manager.export(export, item="model") is not None)
        say("trained")
    say("closed")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def tell(done: Any, step: int) -> None:
    say("saved" if done.peek() is None else "lost", step)  # which does not count as read


class Gate:
    """An item that holds a restore until the test lets it go on."""

    def __init__(self, where: str) -> None:
        self._where = where

    def state_dict(self) -> dict[str, Any]:
        return {"gate": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._where == "restore":
            say("restoring")
            wait_to_go_on()


class Training:
    def __init__(self) -> None:
        import random

        import torch
        from torch import nn

        random.seed(7)
        torch.manual_seed(7)
        torch.set_num_threads(1)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.Linear(64, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self) -> float:
        import random

        import torch

        self.optimizer.zero_grad()
        loss = (self.model(torch.randn(8, 16)) - random.random()).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def digest(self) -> str:
        """Of every bit that is trained, and of the random numbers to come."""
        import random

        import torch
        import xxhash

        digest = xxhash.xxh3_64(
            torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode()
        )
        for tensor in self.model.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        for state in self.optimizer.state_dict()["state"].values():
            for tensor in state.values():
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


if __name__ == "__main__":
    train(**json.loads(sys.argv[1]))
