"""The driver of `scripts/demo`: runs the trainer without saving, then with saving and killings, and
compares.

It holds three promises against what really happened: a save outlives its daemon, a run outlives its
trainer, and the losses of the run that was killed are bit for bit those of the run that was left
alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import sys
import time
from pathlib import Path

import sidesave
from demo_lib import SIZES, DemoError, Event
from demo_lib.child import Process, Trainer
from demo_lib.corpus import collect
from demo_lib.report import draw, losses, read_log, table
from demo_lib.store import object_store
from demo_lib.trainer import LOG_NAME

STARTED_S = time.monotonic()
KILLED_SAVES_AT_MOST = 3
DAEMON_END_S = 120.0


def say(message: str) -> None:
    print(f"{time.monotonic() - STARTED_S:7.2f}s  {message}", flush=True)


class Demo:
    """One demonstration in the folder `out`."""

    def __init__(self, out: Path, size_name: str, device: str, seed: int, checkpoints: str) -> None:
        self.out, self.size_name, self.size, self.device = out, size_name, SIZES[size_name], device
        self.checkpoints = checkpoints
        # A save of the middle of the run loses its daemon part way through the write. The trainer
        # falls before the next save, so that it must resume from the very checkpoint that another
        # daemon finished.
        chance = random.Random(seed)
        self.daemon_from_save = self.size.save_every * chance.randint(
            3, self.size.steps // self.size.save_every - 5
        )
        self.write_fraction = chance.uniform(0.0, 0.6)
        self.trainer_steps_later = chance.randint(
            self.size.save_every // 3, self.size.save_every - 1
        )
        self.kills: list[tuple[str, int]] = []
        self.threads = max(1, min(4, len(os.sched_getaffinity(0)) - 1))
        self.daemons: dict[int, Process] = {}
        self.staged_s: dict[int, float] = {}
        self.write_times_s: list[float] = []
        self.killed_save: int | None = None
        self.killed_daemon_pid: int | None = None
        self.newest_committed = 0

    def trainer(self, run: Path, *options: str) -> Trainer:
        name = f"stderr-{len(list(run.glob('stderr-*'))) + 1}.txt"
        arguments = [
            "--run",
            str(run),
            "--corpus",
            str(self.out / "corpus.txt"),
            "--size",
            self.size_name,
        ]
        arguments += ["--device", self.device, "--threads", str(self.threads), *options]
        return Trainer(arguments, stderr=run / name)

    def fresh(self, name: str) -> Path:
        run = self.out / name
        if run.exists():
            shutil.rmtree(run)
        run.mkdir(parents=True)
        return run

    def say_step(self, event: Event) -> None:
        if event["step"] % self.size.save_every == 0 or event["step"] == 1:
            say(f"step {event['step']}  loss {float.fromhex(event['loss']):.3f}")

    def run_plain(self) -> Path:
        run = self.fresh("run-without-saving")
        say("first run: no saving, nobody is killed")
        with self.trainer(run) as trainer:
            for event in trainer.events():
                self.check_order(event)
                if event["event"] == "step":
                    self.say_step(event)
            trainer.finish()
        return run

    def run_saving(self) -> Path:
        run = self.fresh("run-with-saving")
        say(f"second run: a save every {self.size.save_every} steps, and two killings")
        while True:
            with self.trainer(run, "--checkpoints", self.checkpoints) as trainer:
                for event in trainer.events():
                    self.follow(event)
                    if self.time_for_trainer(event):
                        say(f"SIGKILL to trainer {trainer.pid} at step {event['step']}")
                        trainer.kill()
                        self.kills.append(("trainer", event["step"]))
                        break
                else:
                    trainer.finish()
                    return run

    def check_order(self, event: Event) -> None:
        """A simulated device tells of accesses that nothing orders, whatever came of them this
        time.
        """
        if found := event.get("violations"):
            raise DemoError("\n    ".join(["the simulated GPU has found:", *found]))

    def time_for_trainer(self, event: Event) -> bool:
        if (
            event["event"] != "step"
            or self.killed_save is None
            or self.newest_committed < self.killed_save
        ):
            return False
        done = any(who == "trainer" for who, _ in self.kills)
        return not done and event["step"] >= self.killed_save + self.trainer_steps_later

    def follow(self, event: Event) -> None:
        daemon_pid, step = event.get("daemon_pid"), event.get("step", 0)
        if daemon_pid is not None and daemon_pid not in self.daemons:
            with contextlib.suppress(ProcessLookupError):
                self.daemons[daemon_pid] = Process(daemon_pid)
        if event.get("error"):
            raise DemoError(f"the save of step {step} failed ({event['event']}): {event['error']}")
        match event["event"]:
            case "start":
                resumed_from = event["resumed_from"]
                began = f"resumed from step {resumed_from}" if resumed_from else "started"
                say(f"trainer {began}, daemon {daemon_pid}")
                if resumed_from < self.newest_committed:
                    raise DemoError(
                        f"step {self.newest_committed} was committed before the trainer was killed"
                    )
            case "step":
                self.say_step(event)
            case "staged":
                self.staged_s[step] = event["after_s"]
                tries_left = self.killed_save is None and len(self.kills) < KILLED_SAVES_AT_MOST
                if tries_left and step >= self.daemon_from_save:
                    self.kill_daemon(self.daemons[event["daemon_pid"]], step)
            case "written":
                self.write_times_s.append(event["after_s"] - self.staged_s[step])
            case "done":
                self.check_order(event)
            case "committed":
                self.newest_committed = step
                if step == self.killed_save:
                    say(
                        f"new daemon {daemon_pid} finished step {step}, {event['after_s']:.2f} s "
                        "after its save()"
                    )
                    if daemon_pid == self.killed_daemon_pid:
                        raise DemoError(
                            f"step {step} was reported committed by daemon {daemon_pid}, which is "
                            "dead"
                        )
            case _:
                pass

    def kill_daemon(self, daemon: Process, step: int) -> None:
        """Kill it part way through a write; where it was quicker, say so and leave the next save to
        try again.
        """
        time.sleep(self.write_fraction * min(self.write_times_s, default=0.0))
        daemon.kill()
        if not daemon.ended(DAEMON_END_S):
            raise DemoError(f"daemon {daemon.pid} lives on after SIGKILL")
        self.kills.append(("daemon", step))
        if any(info.step == step for info in sidesave.find(self.checkpoints)):
            say(
                f"SIGKILL to daemon {daemon.pid}, but step {step} was committed already; the next "
                "save is tried"
            )
        else:
            self.killed_save, self.killed_daemon_pid = step, daemon.pid
            say(
                f"SIGKILL to daemon {daemon.pid} while step {step} is being written: nothing "
                "committed yet"
            )

    def check_losses(self, plain: list[Event], saving: list[Event]) -> None:
        expected, found = losses(plain), losses(saving)
        if sorted(expected) != list(range(1, self.size.steps + 1)):
            raise DemoError(
                f"the run without saving logged {len(expected)} of {self.size.steps} steps"
            )
        for step, loss in expected.items():
            if found.get(step) != loss:
                raise DemoError(
                    f"step {step}: the loss is {found.get(step)}, in the run left alone {loss}"
                )
        trained = sum(event["event"] == "step" for event in saving)
        say(
            f"losses of all {len(expected)} steps are bit for bit equal; {trained - len(expected)} "
            "were trained twice"
        )

    def check_store(self) -> None:
        every = self.size.save_every
        expected = list(range(every, self.size.steps + 1, every))
        found = sidesave.find(self.checkpoints)
        if [info.step for info in found] != expected:
            raise DemoError(
                f"{self.checkpoints} holds steps {[info.step for info in found]}; expected "
                f"{expected}"
            )
        for info in found:
            if not (report := sidesave.verify(info)).ok:
                raise DemoError(f"{info.path} does not verify: {report}")
        say(
            f"all {len(found)} checkpoints in the store verify, {found[-1].nbytes / 1e6:.1f} MB "
            "each"
        )

    def check_checkpoints(self) -> None:
        checkpoints = Path(self.checkpoints)
        every = self.size.save_every
        expected = [f"step-{step:08d}" for step in range(every, self.size.steps + 1, every)]
        own = (".sidesave.lease", ".sidesave.history")
        found = sorted(path.name for path in checkpoints.iterdir() if path.name not in own)
        if found != expected:
            raise DemoError(
                f"{checkpoints} holds {', '.join(found)}; expected {', '.join(expected)}"
            )
        for name in found:
            if not (report := sidesave.verify(checkpoints / name)).ok:
                raise DemoError(f"{checkpoints / name} does not verify: {report}")
        nbytes = sum(path.stat().st_size for path in (checkpoints / found[-1]).iterdir())
        say(
            f"all {len(found)} checkpoints verify, {nbytes / 1e6:.1f} MB each, nothing is left "
            "over in the folder"
        )
        for name in found[:-1]:
            shutil.rmtree(checkpoints / name)
        say(f"kept the newest, {checkpoints / found[-1]}")

    def check_processes(self) -> None:
        if left := [
            str(daemon.pid) for daemon in self.daemons.values() if not daemon.ended(DAEMON_END_S)
        ]:
            raise DemoError(
                f"daemons {', '.join(left)} are still there {DAEMON_END_S:.0f} s after their "
                "trainers"
            )
        say(f"no process is left behind ({len(self.daemons)} daemons came and went)")

    def run(self) -> None:
        text = collect()
        (self.out / "corpus.txt").write_text(text)
        say(
            f"text: {len(text) / 1e6:.1f} million characters of Python's own documentation; "
            f"{self.threads} threads"
        )
        plain_log = self.run_plain() / LOG_NAME
        run = self.run_saving()
        plain, saving = read_log(plain_log), read_log(run / LOG_NAME)
        self.check_processes()
        self.check_losses(plain, saving)
        if "://" in self.checkpoints:
            self.check_store()
        else:
            self.check_checkpoints()
        if self.killed_save is None:
            raise DemoError(
                "no save was in flight when the daemon was killed; another --seed may meet one"
            )
        if not any(who == "trainer" for who, _ in self.kills):
            raise DemoError(
                "the trainer was through before it could be killed; another --seed may be in time"
            )
        picture = self.out / "step-times.png"
        draw(picture, plain, saving, self.kills)
        print(f"\n{table(plain, saving, self.killed_save)}\n\npicture: {picture}")

    def close(self) -> None:
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description="Train, save, kill, resume, compare."
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smaller model, under 40 s on two cores"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="simulated where it is not there"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[2] / "demo-output", metavar="DIR"
    )
    parser.add_argument(
        "--remote",
        action="store_true",
        help="save to an object store: SeaweedFS, if it is installed",
    )
    parser.add_argument(
        "--seed", type=int, help="choose the moments of the killings as an earlier demo did"
    )
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10_000) if options.seed is None else options.seed
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        checkpoints = str(out / "run-with-saving" / "checkpoints")
        if options.remote:
            checkpoints, what = stack.enter_context(object_store(out / "store"))
            say(f"checkpoints go to {checkpoints}, which is {what}")
        return demonstrate(
            Demo(out, "quick" if options.quick else "full", options.device, seed, checkpoints), seed
        )


def demonstrate(demo: Demo, seed: int) -> int:
    say(f"kill moments are drawn from --seed {seed}")
    if demo.device == "cuda" and (schedule := os.environ.get("SIMULATED_GPU")):
        # What a device does when is drawn as well, unless it was told.
        os.environ["SIMULATED_GPU"] = schedule = (
            f"random:{seed}" if schedule == "random" else schedule
        )
        say(
            "no GPU was found, or none was wanted: it is simulated on the CPU, with the schedule "
            f"{schedule}"
        )
    try:
        demo.run()
    except DemoError as error:
        say(f"FAILED (--seed {seed}): {error}")
        return 1
    finally:
        demo.close()
    say("every promise held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
