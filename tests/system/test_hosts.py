"""Jobs that span hosts, which are namespaces here: names, processes, networks and mounts of their
own, one kernel.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from elastic_trainer import Job, Story
from trainers import DEADLINE_S, ROOT, Traces, pidfd_of

import sidesave

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(600)]

PORT = 29500


class Host:
    """A machine of its own, as far as namespaces go. All its processes end with it, as in a
    crash.
    """

    def __init__(self, name: str, number: int, directory: Path, at: str) -> None:
        """Give it a name and an address; it sees this directory ``at`` a path below ``/mnt``."""
        self.name, self.address, self.at = name, f"192.0.2.{number}", at
        lines = ["trap '' CHLD", f"hostname {name}", "ip link set lo up"]
        lines += ["mount --make-rprivate /", "mount -t tmpfs none /mnt", f"mkdir {at}"]
        lines += [f"mount --bind {shlex.quote(str(directory))} {at}", "echo ready", "exec cat"]
        namespaces = [
            "--net",
            "--uts",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        self._keeper = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-e", "-c", "\n".join(lines)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._keeper.stdout is not None
        said = self._keeper.stdout.readline().strip()
        if said != "ready":
            self.crash()
            pytest.skip(f"cannot make a host: {said}")
        (self._first,) = psutil.Process(self._keeper.pid).children()
        self.inside = ["nsenter", f"--target={self._first.pid}", "--all", "--"]

    def connect(self, other: Host) -> None:
        """Lay a cable between two hosts."""
        link = (
            f"ip link add to-{other.name} type veth peer name to-{self.name} netns "
            f"{other._first.pid}"
        )
        done = subprocess.run(
            [*self.inside[:2], "--net", *link.split()], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"cannot connect hosts: {done.stderr.strip()}")
        for one, peer in ((self, other), (other, self)):
            for command in (f"addr add {one.address} peer {peer.address} dev", "link set up dev"):
                subprocess.run([*one.inside, "ip", *command.split(), f"to-{peer.name}"], check=True)

    def python(self, traces: Traces, code: str) -> str:
        """What a program on this host writes to stderr."""
        environment = {**os.environ, "TMPDIR": traces.folder, "PYTHONPATH": str(ROOT)}
        command = [*self.inside, sys.executable, "-c", code]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment
        ).stderr

    def crash(self) -> None:
        """SIGKILL to all its processes at once, and wait for their end."""
        # and with it the first process of the namespace, on which all others depend
        self._keeper.kill()
        self._keeper.communicate()


class Hosts:
    """Makes hosts, and jobs that run on two of them with two ranks each."""

    def __init__(self, folder: Path, traces: Traces) -> None:
        self.story = Story(folder, folder / "shared" / "run")
        self.folder, self._traces = folder, traces
        self._hosts: list[Host] = []

    def make(self, name: str, directory: str, at: str) -> Host:
        """A host that is connected to all others, and sees this directory of the test there."""
        (self.folder / directory).mkdir(exist_ok=True)
        host = Host(name, len(self._hosts) + 1, self.folder / directory, at)
        for other in self._hosts:
            other.connect(host)
        self._hosts.append(host)
        return host

    def crash(self, host: Host) -> None:
        """End a host, and all that is left of the job; a second time does nothing."""
        if host in self._hosts:
            self._hosts.remove(host)
            self.story.tell_death(0)
            host.crash()
            self.kill_workers()

    @contextlib.contextmanager
    def job(self, first: Host, second: Host, *options: object) -> Iterator[list[Job]]:
        """A job with ranks 0 and 1 on the first host; its run directory is in what each host
        sees.
        """
        self.story.go_on()
        with contextlib.ExitStack() as stack:
            jobs: list[Job] = []
            for node, (host, peer) in enumerate(((first, second), (second, first))):
                launch = [
                    "--nnodes=2",
                    f"--node-rank={node}",
                    f"--master-addr={first.address}",
                    f"--master-port={PORT}",
                ]
                job = Job(
                    self.folder,
                    self._traces,
                    2,
                    f"{host.at}/run",
                    *options,
                    launch=launch,
                    inside=host.inside,
                    environment={"GLOO_SOCKET_IFNAME": f"to-{peer.name}"},
                )
                jobs.append(stack.enter_context(job))
            yield jobs

    def kill_workers(self) -> None:
        """SIGKILL to every worker of every host; neither to daemons nor to torchrun."""
        self.story.tell_death(0)
        for pid, command in self._traces.processes().items():
            if "elastic_trainer" in command and "torch.distributed.run" not in command:
                with contextlib.suppress(ProcessLookupError), pidfd_of(pid) as pidfd:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def close(self) -> None:
        for host in self._hosts:
            host.crash()
        self.story.close()


@pytest.fixture
def hosts(tmp_path: Path, traces: Traces) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path, traces)
    yield hosts
    hosts.close()


def test_hosts_share_a_run_take_it_over_from_each_other_and_survive_a_crash(
    hosts: Hosts, traces: Traces
):
    a, b = (hosts.make(name, "shared", f"/mnt/{name}") for name in "ab")
    story = hosts.story

    with hosts.job(a, b) as jobs:
        for event in story.hear(*jobs):
            if event["what"] == "committed":
                assert event["path"].startswith(
                    "/mnt/a/run/" if event["rank"] < 2 else "/mnt/b/run/"
                )
            if (event["what"], event["rank"]) == ("committed", 0) and event["step"] == 6:
                refusal = b.python(traces, "import sidesave; sidesave.Checkpointer('/mnt/b/run')")
                assert "DirectoryInUseError" in refusal
                assert "on a) is using it (it holds the lock)" in refusal
            if event["what"] == "saved" and event["step"] >= 12:
                hosts.kill_workers()  # with that save under way: each daemon finishes what it has

    with hosts.job(b, a) as jobs:
        for event in story.hear(*jobs):
            if (event["what"], event["rank"]) == ("committed", 2):
                hosts.crash(b)

    c = hosts.make("c", "shared", "/mnt/c")
    with hosts.job(a, c) as jobs:
        for event in story.hear(*jobs):
            if (event["what"], event["rank"]) == ("committed", 0):
                story.stop()
        assert [job.end() for job in jobs] == [0, 0], jobs[0].complaints()

    assert len({event["job"] for event in story.events if event["what"] == "resumed"}) == 3
    story.check(traces)


@pytest.mark.parametrize(
    "options", [[], ["--without-group", "--meet-within", 20]], ids=["group", "no group"]
)
def test_hosts_that_do_not_share_the_directory_are_refused_on_every_rank(
    hosts: Hosts, traces: Traces, options: list[object]
):
    a, b = (hosts.make(name, f"disk of {name}", "/mnt/disk") for name in "ab")
    with hosts.job(a, b, *options) as jobs:
        told = list(hosts.story.hear(*jobs))
        assert all(job.end() for job in jobs)
    refused = {event["rank"]: event for event in told if event["what"] == "refused"}
    assert sorted(refused) == [0, 1, 2, 3]
    for event in refused.values():
        assert event["error"] == ("DaemonStartError" if options else "InvalidArgumentError"), event
        assert "/mnt/disk/run" in event["why"], event
        assert "share" in event["why"], event
    traces.check()


def test_hosts_with_disks_of_their_own_keep_their_parts_and_resume(hosts: Hosts, traces: Traces):
    a, b = (hosts.make(name, f"disk of {name}", "/mnt/disk") for name in "ab")
    story = hosts.story
    for _ in range(2):
        commits = 0
        with hosts.job(a, b, "--node-local") as jobs:
            for event in story.hear(*jobs):
                commits += (event["what"], event["rank"]) == ("committed", 3)
                if commits == 2:
                    story.stop()
            assert [job.end() for job in jobs] == [0, 0], jobs[0].complaints()
    trained = {
        (event["rank"], event["step"]): event
        for event in story.events
        if event["what"] == "trained"
    }
    resumed = [event for event in story.events if event["what"] == "resumed" and event["job"] == 2]
    assert len(resumed) == 4
    for event in resumed:
        assert event["step"] == event["newest"] > 0
        assert all(
            event[fact] == trained[event["rank"], event["step"]][fact] for fact in ("shared", "own")
        )
    committed = {
        f"step-{event['step']:08d}" for event in story.events if event["what"] == "committed"
    }
    for name in "ab":
        run = hosts.folder / f"disk of {name}" / "run"
        assert committed == {path.name for path in run.glob("step-*")}
        for step in committed:
            report = sidesave.verify(run / step)
            assert report.ok, report.faults
    traces.check()
