"""The ordering lines of the code that copies from devices, each with the tests that notice when it
is not there.

    python tests/support/mutants.py [WORDS]    in the simulated GPU's environment; with WORDS all
                                               lines that have one of them, else as many as there
                                               is time for (see campaigns)

Each mutant is a copy of the code with one line replaced. Its tests are run on it under one schedule
after the other; one of them must fail. ``test_mutants`` checks that the table has every line with
an ordering word.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import campaigns

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 100
SCHEDULES = ("late", "early", "random:1")
ORDERING = re.compile(
    r"wait_event|wait_stream|record_stream|\.record\(|\.synchronize\(|\.wait\(|wait_for\("
    r"|_released\.set|await_end\(|exclusion\(|_opened\("
    r"|no_capture\(|finish_pending\(|close_guards\(|close_guard\(|% ALIGNMENT|to_border"
    r"|add_pending\(|remove_pending\("
    r"|\.owner\b|give_back\(|forget\(|\.abandon\(|part\.sources|when_guarded\(|runtime\.on\("
    r"|let_others_copy\(|torch_private\.spin\("
)
"""What an ordering line has in it."""


@dataclass(frozen=True)
class Mutant:
    """A line of a file of ``stager/``, what stands there instead, and who notices: test names, or
    why nobody can.
    """

    file: str
    line: str
    tests: tuple[str, ...] = ()
    instead: str = "pass"
    equivalent: str = ""
    which: int = 0
    """Of several such lines in the file."""

    def apply(self, root: Path) -> None:
        """Change the file below ``root``."""
        path = root / "stager" / self.file
        lines = path.read_text().split("\n")
        found = [number for number, line in enumerate(lines) if line.strip() == self.line]
        number = found[self.which]
        indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
        lines[number] = indent + self.instead
        path.write_text("\n".join(lines))


def ordering_lines() -> Iterator[tuple[str, str]]:
    """Every line with an ordering word, with its file; not those that define, import or
    describe.
    """
    for file in (_COPY, _PACK, _CUDA, _COPIER, _PRINT, _OWNED, _PIN):
        for line in code_lines((ROOT / "stager" / file).read_text()):
            if ORDERING.search(line) and not re.match(
                r"(def|class|from|import|return)\b|@|self\.\w+: ", line
            ):
                yield file, line


def code_lines(text: str) -> Iterator[str]:
    """The lines of a module that are neither docstrings nor comments, stripped."""
    quoted = False
    for line in map(str.strip, text.split("\n")):
        marks = line.count('"""')
        if not quoted and not marks and line and not line.startswith("#"):
            yield line
        quoted ^= marks % 2 == 1


def run(mutant: Mutant) -> tuple[str | None, float]:
    """Run a mutant's tests; returns which schedule and test noticed, None if none did, and the
    seconds it took.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "mutated"
        for name in ("client", "stager", "writer_daemon", "sidesave", "tests"):
            shutil.copytree(
                ROOT / name,
                root / name,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        shutil.copy(ROOT / "pyproject.toml", root)
        mutant.apply(root)
        for schedule in SCHEDULES:
            noticed = _noticed(mutant, root, schedule)
            if noticed:
                return f"{schedule}: {noticed}", time.monotonic() - began
    return None, time.monotonic() - began


def _noticed(mutant: Mutant, root: Path, schedule: str) -> str | None:
    environment = os.environ | {"SIMULATED_GPU": schedule, "PYTHONPATH": f"{root}:{root / 'tests'}"}
    files = sorted(str(path) for path in (root / "tests" / "gpu").glob("test_gpu*.py"))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "simulated_gpu.plugin",
        "-p",
        "no:cacheprovider",
        "-x",
        "-q",
    ]
    command += [
        "-m",
        "gpu and not slow",
        "-k",
        " or ".join(mutant.tests),
        "--timeout",
        "20",
        *files,
    ]
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode == 0:
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, re.MULTILINE)
    if (
        not failed
        and done.returncode not in (1, -6, -11)
        and "Timeout" not in done.stdout + done.stderr
    ):
        raise RuntimeError(
            f"{mutant.line}: pytest ended with "
            f"{done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return failed[0] if failed else "hangs or crashes"


def main(words: list[str]) -> int:
    """Run mutants, two at a time, and print who noticed; 1 if somebody should have and nobody
    did.
    """
    named = [
        mutant
        for mutant in MUTANTS
        if any(word in f"{mutant.file}: {mutant.line}" for word in words)
    ]
    share = campaigns.Share("mutants", campaigns.seconds_of({"mutants": 10}, workers=1)["mutants"])
    live = [mutant for mutant in (named if words else MUTANTS) if not mutant.equivalent]
    points = iter(live) if words else share.points(live)
    tried = survived = 0
    began = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while batch := list(itertools.islice(points, os.cpu_count())):
            for mutant, (noticed, seconds) in zip(batch, pool.map(run, batch), strict=True):
                tried += 1
                survived += noticed is None
                print(f"{mutant.file}: {mutant.line}  ->  {mutant.instead}", flush=True)
                print(f"    {noticed or 'SURVIVED'} ({seconds:.0f} s)", flush=True)
    seconds = time.monotonic() - began
    print(
        f"{tried - survived} mutants noticed, {survived} survived, {len(live) - tried} not tried, "
        f"{seconds:.0f} s"
    )
    return 1 if survived else 0


_COPY, _CUDA, _COPIER = "copy/device_copy.py", "devices/cuda.py", "copy/copier.py"
_OWNED, _PIN, _PRINT = "ownership.py", "memory/pinning.py", "copy/fingerprint.py"
_LIST, _PACK = "copy/copy_list.py", "copy/packing.py"
_SCRATCH = "test_gpu_scratch"

MUTANTS = [
    # Out of the scratch
    Mutant(
        _COPY,
        "with torch.no_grad(), lane.runtime.on(lane.device, lane.stream):",
        ("training_goes_on_beside", _SCRATCH),
        "if True:",
    ),
    Mutant(_COPY, "lane.stream.wait_event(packed)", ("sees_what_was_enqueued",)),
    Mutant(_COPY, "read.record(lane.stream)", ("half_is_packed_again",)),
    Mutant(_COPY, "half.read = read", ("half_is_packed_again",)),
    Mutant(_COPY, "lane.give_back(half)", ("half_is_packed_again",)),
    # Copies beside training
    Mutant(
        _COPY,
        "with lane.runtime.on(lane.device, lane.stream):",
        ("training_goes_on_beside",),
        "if True:",
    ),
    Mutant(_COPY, "lane.stream.wait_event(self.start)", ("sees_what_was_enqueued",)),
    Mutant(
        _COPY,
        "if not job.source.untyped_storage().nbytes():",
        ("freed_by_another_thread",),
        "if False:",
    ),
    Mutant(_COPY, "done.record(lane.stream)", ("training_goes_on_beside",)),
    Mutant(_COPY, "self.done.synchronize()", ("half_is_packed_again",)),
    Mutant(
        _COPY,
        "with lane.runtime.on(lane.device, lane.stream):  # the compute stream's queue may be long",
        ("staged_while_the_compute",),
        "if True:",
    ),
    Mutant(
        _COPY,
        "part.lane.runtime.current_stream(part.lane.device).wait_event(read)",
        ("training_goes_on_beside",),
    ),
    Mutant(
        _COPY,
        "read = part.done if part.guarded else part.start",
        ("training_goes_on_beside",),
        "read = part.start",
    ),
    Mutant(
        _COPY,
        "to_border = pinning.PIECE_NBYTES - (base + position) % pinning.PIECE_NBYTES",
        ("many_borders",),
        "to_border = 1 << 60",
    ),
    Mutant(
        _COPY,
        "nbytes = min(CHUNK_NBYTES, source.numel() - done, to_border)",
        ("many_borders",),
        "nbytes = min(CHUNK_NBYTES, source.numel() - done)",
    ),
    Mutant(_COPY, "self.lane.runtime.let_others_copy(self.lane.device)", ("kernel_is_between",)),
    Mutant(
        _COPY,
        "if self.in_a_row_nbytes + nbytes > CHUNK_NBYTES:",
        ("kernel_is_between",),
        "if True:",
    ),
    Mutant(_COPY, "self.in_a_row_nbytes = 0", ("kernel_is_between",)),
    Mutant(_COPY, "self.in_a_row_nbytes += nbytes", ("kernel_is_between",)),
    Mutant(_CUDA, "torch_private.spin(0)", ("kernel_is_between",)),
    Mutant(
        _CUDA,
        "with torch.cuda.device(device):",
        ("no_context_on_the_current",),
        "if True:",
        which=1,
    ),
    # Saves that fail
    Mutant(_COPY, "part.lane.forget(part)", ("give_its_half_back",)),
    Mutant(_COPY, "part.lane.stream.synchronize()", ("gives_its_slot_back",)),
    Mutant(_COPY, "if half.owner is part:", ("torn_save_does_not",), "if True:"),
    Mutant(_COPY, "part.compute.synchronize()", ("fails_after_a_pack",)),
    Mutant(_COPY, "self.give_back(half)", ("without_device_memory",)),
    Mutant(_COPY, "self.give_back(half)", ("give_its_half_back",), which=1),
    # At the call
    Mutant(
        _COPY,
        "aliases = map(torch.Tensor.detach, guarded)",
        ("data_is_replaced",),
        "aliases = map(lambda tensor: tensor, guarded)",
    ),
    Mutant(
        _COPY,
        (
            "part.sources += map(torch.Tensor.untyped_storage, [tensors[index] for index, _ in "
            "captured])"
        ),
        ("stream_that_is_dropped",),
    ),
    Mutant(
        _COPY,
        "job.source.record_stream(lane.stream)  # only this protects against `resize_(0)`",
        ("memory_is_freed_while",),
    ),
    Mutant(_COPY, "part.sources += sources", ("is_dropped_after_the_call",)),
    Mutant(_COPY, "part.start.record(part.compute)", ("sees_what_was_enqueued",)),
    Mutant(_COPY, "part.compute.wait_event(half.read)", ("half_is_packed_again",)),
    Mutant(_COPY, "packed.record(part.compute)", ("sees_what_was_enqueued",)),
    Mutant(
        _PACK,
        "if layouts != group.layouts:",
        ("lies_otherwise",),
        "if len(layouts) != len(group.layouts):",
    ),
    Mutant(
        _COPY,
        "half.memory, half.views = memory, Views()",
        ("lies_as_before",),
        "half.memory = memory",
    ),
    Mutant(
        _COPY,
        "half = self._changed.wait_for(lambda: self._free(part), _HALF_TIMEOUT_S)",
        (_SCRATCH,),
        "half = self._free(part)",
    ),
    Mutant(
        _COPY,
        "half = next((half for half in self._halves if half.owner is None), None)",
        ("torn_save_does_not",),
        "half = self._halves[0]",
    ),
    Mutant(_COPY, "half.owner = part", (_SCRATCH,)),
    Mutant(_COPY, "half.owner = None", (_SCRATCH,)),
    Mutant(
        _COPY,
        "self.stream.wait_stream(part.compute)  # `abandon` waits for the side stream only",
        ("without_scratch_gives_its_slot_back",),
    ),
    Mutant(
        _COPY,
        "part.sources.append(half.memory)  # copies of earlier saves may still read it",
        ("replaced_by_a_larger",),
    ),
    Mutant(
        _PACK,
        "begin = position if follows else position + (offset - position) % ALIGNMENT",
        ("odd_length", "any_kind"),
        "begin = position",
    ),
    Mutant(_LIST, "elif cached.copy_list.holds(owned):", ("no_optimizer_owns_any_more",), "else:"),
    # Fingerprints
    Mutant(
        _PRINT,
        "self._after = _stack(_norms(self._jobs))",
        ("another_norm",),
        "self._after = self._expected",
    ),
    Mutant(
        _PRINT,
        (
            "if _memcmp(target.address + begin, on_host.data_ptr() + row * WINDOW_NBYTES, "
            "WINDOW_NBYTES):"
        ),
        ("averages", "does_not_count_fails"),
        "if False:",
    ),
    Mutant(
        _PRINT,
        "if int(_word_sum(job.target.view).item()) != expected:",
        ("same_norm",),
        "if False:",
    ),
    Mutant(_PRINT, "if of != self._of:", ("windows_of_memory",), "if self._of is None:"),
    # Who waits for whom
    Mutant(_COPIER, "self._released.set()", ("training_goes_on_beside",)),
    Mutant(
        _COPIER,
        "if not self._released.wait(GUARD_TIMEOUT_S):",
        ("a_step_waits_on_the_host",),
        "if False:",
    ),
    Mutant(_COPIER, "ownership.add_pending(copy)", ("training_goes_on_beside",)),
    Mutant(
        _COPIER,
        "self.device.abandon()  # no copy may still write into a slot that is released",
        ("torn_save_gives_its_slot_back",),
    ),
    Mutant(_COPIER, "copy.device.abandon()", ("gives_its_slot_back", "fails_after_a_pack")),
    Mutant(
        _COPIER,
        "if not self._over.wait(GUARD_TIMEOUT_S):",
        ("while_a_save_is_pending",),
        "if False:",
    ),
    Mutant(
        _COPIER,
        "self._starter.submit(lambda: self._finisher.submit(run))",
        ("interrupted_when_its_copies",),
        "run()",
    ),
    Mutant(
        _COPIER,
        'with kinds.no_capture("save()"):',
        equivalent=(
            "the call that failed keeps captures out until this is over, unless it is interrupted "
            "once more"
        ),
    ),
    Mutant(
        _COPIER,
        "ownership.remove_pending(copy)",
        equivalent="a copy that is over makes nobody wait",
    ),
    Mutant(
        _COPIER, "ownership.remove_pending(copy)", equivalent="as above: it is over soon", which=1
    ),
    Mutant(_OWNED, "close_guards()", ("training_goes_on_beside",)),
    Mutant(_OWNED, "copy.close_guard()", ("training_goes_on_beside",)),
    Mutant(_OWNED, "close_guards()", ("guard_holds",), which=1),
    Mutant(_OWNED, "call()", ("replayed_optimizer_step",)),
    # Graphs
    Mutant(_CUDA, "ownership.close_guards()", ("replayed_optimizer_step",)),
    Mutant(_CUDA, "if this not in self._harmless:", ("without_an_optimizer_step",), "if True:"),
    Mutant(
        _CUDA,
        "self._enter(this)",
        (
            "while_a_save_is_pending",
            "save_inside_a_capture",
        ),
    ),
    Mutant(_CUDA, "ownership.when_guarded(self._mark)", ("replayed_optimizer_step",)),
    Mutant(_CUDA, "ownership.finish_pending()", ("while_a_save_is_pending",)),
    Mutant(
        _CUDA,
        "while not self._opened(graph, anyhow=time.monotonic() > deadline):",
        ("during_the_call",),
        "while not self._opened(graph, anyhow=True):",
    ),
    Mutant(
        _CUDA,
        "if not self._changed.wait_for(lambda: not self._open, CAPTURE_TIMEOUT_S):",
        ("call_in_another_thread",),
        "if False:",
    ),
    Mutant(
        _CUDA,
        "if threading.get_ident() in self._open.values():",
        ("save_inside_a_capture",),
        "if False:",
    ),
    Mutant(
        _CUDA, "self._captures.await_end(what)", ("save_inside_a_capture", "call_in_another_thread")
    ),
    Mutant(_CUDA, "self._harmless.discard(graph)", ("captured_anew",)),
    # Devices and pinned memory
    Mutant(
        _PIN,
        'with kinds.no_capture("prepare()"), runtime.on(device):',
        ("no_context_on_another",),
        'with kinds.no_capture("prepare()"):',
    ),
    Mutant(
        _PIN,
        'with kinds.no_capture("prepare()"), runtime.on(device):',
        ("pinned_and_given_back",),
        "with runtime.on(device):",
    ),
    Mutant(
        _PIN,
        'with kinds.no_capture("close()"), self._runtime.on(self._device):',
        ("given_back_in_any_thread",),
        'with kinds.no_capture("close()"):',
    ),
    Mutant(
        _PIN,
        'with kinds.no_capture("close()"), self._runtime.on(self._device):',
        ("pinned_and_given_back",),
        "with self._runtime.on(self._device):",
    ),
    Mutant(
        _PIN,
        "with self._runtime.on(self._device):",
        equivalent="what is unregistered inside a capture ends the capture",
    ),
    Mutant("copy/slot.py", "pinned.close()", ("closing_unregisters", "gives_its_slot_back")),
    Mutant(_CUDA, "_clear_last_error()", ("cannot_be_pinned_is_used",)),
]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
