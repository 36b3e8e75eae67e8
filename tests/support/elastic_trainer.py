"""A training script for torchrun whose processes may be killed at any moment, and what has to hold
all the same.

As a script it trains a small model, which FSDP2 divides among all ranks or, without a process
group, every rank holds whole. It goes on from the newest checkpoint, saves every few steps without
waiting for them, and tells what happens, one line each, in a log file of its rank and through a
pipe to the test. Losses and digests there are of the very bits, so that a step can be compared
however often it was trained.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import select
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import forks
import torch
import xxhash
from torch import distributed, nn
from trainers import DEADLINE_S, ROOT, SUPPORT, Traces, entries

import sidesave
from sidesave.client.ranks import meeting
from sidesave.errors import CheckpointNotFoundError, SidesaveError

WIDTH = 30
"""Neither 4 ranks nor 3 divide the layers evenly, and of 4 one has nothing of the last."""
STOP = "stop"
"""A file of this name in its folder ends a job after the step at which rank 0 finds it."""
PATIENCE_S = 120.0
"""Four workers that start at once on a busy machine are silent for long."""


# The script ---------------------------------------------------------------------------------------


class Journal:
    """What a worker tells; whatever it has told outlives it."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self._about = {"rank": rank, "size": size, "pid": os.getpid(), "restart": restart}
        self._folder = folder
        self._pipe = os.open(folder / "events", os.O_WRONLY)
        self._log = os.open(
            folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666
        )

    def tell(self, what: str, step: int, **facts: object) -> None:
        now = round(time.monotonic(), 3)
        line = (
            json.dumps({"what": what, "step": step, **self._about, "at": now, **facts}).encode()
            + b"\n"
        )
        assert len(line) <= select.PIPE_BUF, "it would be torn by the lines of other workers"
        os.write(self._log, line)
        os.write(self._pipe, line)

    def wait_for(self, what: str, size: int) -> None:
        """Block until all ranks have told this last, or nobody has patience any more."""
        logs = [self._folder / f"rank-{rank}.log" for rank in range(size)]
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            lines = [log.read_text().splitlines() for log in logs if log.exists()]
            if (
                sum(bool(of_rank) and json.loads(of_rank[-1])["what"] == what for of_rank in lines)
                == size
            ):
                break
            time.sleep(0.05)


class Data:
    """Draws the batches of one rank; each depends on all that this object keeps."""

    def __init__(self, seed: int) -> None:
        self._drawn = 0
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self) -> torch.Tensor:
        self._drawn += 1
        return torch.randn(8, WIDTH, generator=self._generator) + self._drawn % 7

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drawn = state["drawn"]
        self._generator.set_state(state["generator"])


class Training:
    """All that a rank trains, and what it saves of it."""

    def __init__(self, rank: int, size: int, *, divided: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Sequential(*(_layer() for _ in range(4))), nn.Linear(WIDTH, 3)
        )
        self.model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if divided:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (size,))
            for module in (self.model[0], self.model):
                fully_shard(module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        seed = rank if divided else 0
        self.data = Data(seed)
        torch.manual_seed(seed)
        self.rank = rank

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(self.data.batch()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.model.get_buffer("steps").add_(1)
        return loss.detach()

    def state(self, step: int) -> dict[str, Any]:
        own = {"torch": torch.get_rng_state(), "of": self.rank}
        return {
            "step": step,
            "model": self.model,
            "optimizer": self.optimizer,
            "data": sidesave.PerRank(self.data),
            "random": sidesave.PerRank(own),
        }

    def resume(self, ckpt: sidesave.Checkpointer) -> int:
        """Go on from the newest checkpoint, if there is one; its step, or 0."""
        own: dict[str, Any] = {"torch": torch.get_rng_state(), "of": -1}

        def choose(values: list[Any]) -> Any:
            """Of another number of ranks: what this rank had, and what rank 0 had if it is new."""
            rank = int(os.environ["RANK"])
            return values[rank if rank < len(values) else 0]

        into: dict[str, Any] = {
            "step": 0,
            "model": self.model,
            "optimizer": self.optimizer,
            "data": sidesave.PerRank(self.data, choose),
            "random": sidesave.PerRank(own, choose),
        }
        try:
            ckpt.load(into=into)
        except CheckpointNotFoundError:
            return 0
        torch.set_rng_state(own["torch"])
        self.rank = own["of"]
        return into["step"]

    def facts(self) -> dict[str, str]:
        """Digests of what this rank holds: of the model and optimizer, and of its own."""
        shared = tensors_of(self.model.state_dict(), self.optimizer.state_dict())
        data = self.data.state_dict()
        own = digest_of({"generator": data["generator"], "torch": torch.get_rng_state()})
        return {
            "shared": digest_of({name: _local(tensor) for name, tensor in shared.items()}),
            "own": f"{own} {data['drawn']} {self.rank}",
        }


def train(
    folder: Path, run: str, until: int, save_every: int, *, with_group: bool, node_local: bool
) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    journal = Journal(folder, rank, size)
    journal.tell("started", 0)
    torch.set_num_threads(1)
    if with_group:
        distributed.init_process_group("gloo")
    training = Training(rank, size, divided=with_group)

    def tell_outcome(future: Future[sidesave.CheckpointInfo], step: int) -> None:
        error = future.exception()
        if error is None:
            journal.tell("committed", step, path=future.result().path)
        else:
            journal.tell("lost", step, why=str(error))

    with contextlib.ExitStack() as stack:
        ckpt, first = None, 0
        if save_every:
            try:
                ckpt = stack.enter_context(
                    sidesave.Checkpointer(
                        run,
                        daemon=sidesave.DaemonOptions(takeover_timeout_s=5),
                        node_local=node_local,
                    )
                )
            except SidesaveError as error:
                journal.tell("refused", 0, error=type(error).__name__, why=str(error))
                journal.wait_for("refused", size)  # torchrun ends the others as soon as one has
                raise
        if ckpt is not None:
            journal.tell("opened", 0, recovered=ckpt.recovered, removed=ckpt.removed)
            first = training.resume(ckpt)
            journal.tell("resumed", first, newest=max(ckpt.steps(), default=0), **training.facts())
        for step in range(first + 1, until + 1):
            loss = training.step()
            over = step == until
            if with_group:
                told = torch.stack(
                    [loss, torch.tensor(float(rank == 0 and (folder / STOP).exists()))]
                )
                distributed.all_reduce(told)
                loss, over = told[0], over or bool(told[1])
            journal.tell("trained", step, loss=float(loss).hex(), **training.facts())
            if ckpt is not None and (over or step % save_every == 0):
                handle = ckpt.save(step, training.state(step))
                journal.tell("saved", step)
                handle.committed.add_done_callback(
                    lambda future, step=step: tell_outcome(future, step)
                )
            if over:
                break
    if with_group:
        distributed.destroy_process_group()


def _layer() -> nn.Module:
    parts = (nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))
    return nn.Sequential(nn.LayerNorm(WIDTH), *parts)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# What has to hold ---------------------------------------------------------------------------------


Event = dict[str, Any]


class Story:
    """All that the workers of one run tell, job after job, and whether it is as it has to be."""

    def __init__(self, folder: Path, run: Path) -> None:
        self.events: list[Event] = []
        self._folder, self._run = folder, run
        self._job = 0
        self._deaths: set[tuple[int, int]] = set()
        os.mkfifo(folder / "events")
        self._pipe = os.open(folder / "events", os.O_RDWR | os.O_NONBLOCK)

    def hear(self, *jobs: Job) -> Iterator[Event]:
        """What the workers of these torchruns, which make one job, tell until all have ended."""
        self._job += 1
        waiting = {job.pidfd for job in jobs}
        heard, settled = b"", 0.0
        while True:
            *lines, heard = heard.split(b"\n")
            for line in lines:
                event = json.loads(line) | {"job": self._job}
                assert event["what"] != "lost" or (self._job, event["restart"]) in self._deaths, (
                    event
                )
                settled = event["at"] if event["what"] in ("opened", "committed") else settled
                assert event["what"] != "saved" or event["at"] < settled + DEADLINE_S, (
                    "nothing is committed any more"
                )
                self.events.append(event)
                yield event
            ready, _, _ = select.select([self._pipe, *waiting], [], [], PATIENCE_S)
            assert ready, f"nothing has happened for {PATIENCE_S:g} s\n{jobs[0].complaints()}"
            if self._pipe in ready:
                heard += os.read(self._pipe, 65536)
            else:
                waiting -= set(ready)
                if not waiting:
                    return

    def tell_death(self, restart: int) -> None:
        """A worker of the present job is being killed: from now on saves of that start may fail."""
        self._deaths.add((self._job, restart))

    def stop(self) -> None:
        """Have the job end after the step that it is at."""
        (self._folder / STOP).touch()

    def go_on(self) -> None:
        """Let the next one train until it is told."""
        (self._folder / STOP).unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._pipe)

    def check(self, traces: Traces, *, divided: bool = True) -> None:
        """No acknowledged step is lost, no bit has changed, and nothing is left over."""
        self._check_order()
        self._check_bits(divided=divided)
        self._check_remains(traces, divided=divided)

    def _check_order(self) -> None:
        """All ranks resume from one checkpoint, the newest, and from none before what was
        acknowledged.
        """
        acknowledged = 0
        resumed: dict[tuple[int, int], int] = {}
        for event in self.events:
            start = event["job"], event["restart"]
            if event["what"] == "committed":
                acknowledged = max(acknowledged, event["step"])
            elif event["what"] == "resumed":
                assert (
                    event["step"] == event["newest"] == resumed.setdefault(start, event["step"])
                ), event
                assert event["step"] >= acknowledged, event

    def _check_bits(self, *, divided: bool) -> None:
        """A step comes out the same however often it is trained; so it is in its checkpoint, and so
        it is resumed, by whatever number of ranks.
        """
        trained: dict[int, dict[int, Event]] = {}
        resumed: defaultdict[int, list[Event]] = defaultdict(list)
        for _, events in itertools.groupby(self.events, lambda event: event["size"]):
            of_this_size: defaultdict[int, dict[int, Event]] = defaultdict(dict)
            for event in events:
                if event["what"] == "trained":
                    first = of_this_size[event["step"]].setdefault(event["rank"], event)
                    assert all(event[fact] == first[fact] for fact in ("loss", "shared", "own")), (
                        first,
                        event,
                    )
                elif event["what"] == "resumed" and event["step"]:
                    resumed[event["step"]].append(event)
            trained |= of_this_size  # what more ranks had trained, and not saved, is history
        for path in sorted(self._run.glob("step-*")):
            report = sidesave.verify(path)
            assert report.ok, report.faults
            state = sidesave.load(path)
            saved = trained[state["step"]]
            tensors = tensors_of(state["model"], state["optimizer"])
            for event in [*saved.values(), *resumed[state["step"]]]:
                held = shards_of(tensors, event["rank"], event["size"]) if divided else tensors
                assert event["shared"] == digest_of(held), event
            for event in resumed.pop(state["step"]):
                assert (
                    event["own"] == saved[event["rank"] if event["rank"] in saved else 0]["own"]
                ), event
        assert not resumed, "it was resumed from what is not there"

    def _check_remains(self, traces: Traces, *, divided: bool) -> None:
        """All acknowledged steps are there and nothing else; no process, file or socket is left
        over.
        """
        traces.check()
        trained, committed = (
            {f"step-{event['step']:08d}" for event in self.events if event["what"] == what}
            for what in ("trained", "committed")
        )
        assert committed <= set(entries(self._run)) - {".sidesave.rendezvous"} <= trained
        met = [path.name for path in (self._run / ".sidesave.rendezvous").iterdir()]
        last = {} if divided else {name.partition(".")[0] for name in met}  # of its last two rounds
        assert len(met) <= 2 * len(last) * self.events[-1]["size"], met
        lease = " ".join(sorted(path.name for path in (self._run / ".sidesave.lease").iterdir()))
        assert re.fullmatch(r"(\d+) \1\.spare( closed\.(\w{16})\.\d+)*", lease), lease


def tensors_of(model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of two state dicts by their names."""
    found = {f"model.{name}": tensor for name, tensor in model.items()}
    for number, values in optimizer["state"].items():
        found |= {f"optimizer.{number}.{name}": tensor for name, tensor in values.items()}
    return found


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    sums = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        sums.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sums.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


def shards_of(tensors: Mapping[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """What FSDP2 gives to a rank: rows as ``torch.chunk`` deals them out; numbers are
    everybody's.
    """

    def shard(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            return tensor
        return dict(enumerate(tensor.chunk(size))).get(rank, tensor[:0])

    return {name: shard(tensor) for name, tensor in tensors.items()}


# Jobs ---------------------------------------------------------------------------------------------


class Job:
    """A torchrun and its workers, from its start to the end of the ``with`` block, which none of
    them survives.
    """

    def __init__(
        self,
        folder: Path,
        traces: Traces,
        size: int,
        run: str | os.PathLike[str],
        *options: object,
        restarts: int = 0,
        launch: Sequence[str] = ("--standalone",),
        inside: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        forked: bool = False,
    ) -> None:
        """Start ``size`` workers with these ``options`` of the script, by the command ``inside`` if
        there is one.

        ``forked`` ones have done their imports (tests/support/forks.py).
        """
        self._logs = folder / "torchrun"
        self._logs.mkdir(exist_ok=True)
        torchrun = (
            [str(SUPPORT / "forked_torchrun.py")] if forked else ["-m", "torch.distributed.run"]
        )
        command = [*inside, sys.executable, *torchrun, *launch, f"--nproc-per-node={size}"]
        command += [f"--max-restarts={restarts}", f"--log-dir={self._logs}", "--redirects=3"]
        command += [__file__, str(folder), os.fspath(run), *map(str, options)]
        address = forks.address() if forked else {}
        with (self._logs / "output").open("ab") as output:
            self._process = (forks.popen if forked else subprocess.Popen)(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    **_ENVIRONMENT,
                    "TMPDIR": traces.folder,
                    **address,
                    **(environment or {}),
                },
            )
        self.pidfd = os.pidfd_open(self._process.pid)

    def preempt(self) -> None:
        """SIGTERM, as from a scheduler: torchrun ends its workers, who may have something to
        finish, and itself.
        """
        self._process.terminate()

    def end(self) -> int:
        """Block until it has ended; its exit status."""
        return self._process.wait(DEADLINE_S)

    def complaints(self) -> str:
        """What workers and torchrun have written to stderr, the latest."""
        files = sorted(self._logs.rglob("stderr.log"), key=lambda path: path.stat().st_mtime)
        texts = [f"{path}:\n{path.read_text()[-3000:]}" for path in files if path.stat().st_size]
        return "\n".join([*texts[-8:], (self._logs / "output").read_text()[-3000:]])

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.preempt()  # which ends the workers first
        try:
            self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self.pidfd)


_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    # Workers that were restarted would find in the agent's store where those before them had
    # listened.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("run")
    parser.add_argument("--until", type=int, default=1_000_000)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--without-group", action="store_true")
    parser.add_argument("--meet-within", type=float, default=meeting.AGREE_TIMEOUT_S)
    parser.add_argument("--node-local", action="store_true")
    told = parser.parse_args()
    meeting.AGREE_TIMEOUT_S = told.meet_within  # type: ignore[misc] - it would do as well, later
    train(
        told.folder,
        told.run,
        told.until,
        told.save_every,
        with_group=not told.without_group,
        node_local=told.node_local,
    )
