"""The walk of one save, or one load, through the modules of the product, counted from real calls.

    python -m scripts.walk [save] [load] [checkpointer-load]    prints the core walk, with counts
    python -m scripts.walk save --path                          prints the path; --all prints all
    python -m scripts.walk save load --json                     prints the counts alone
    python -m scripts.walk --write                              puts them into docs/walks.md

One `Checkpointer.save`, `sidesave.load` or `Checkpointer.load` of a tiny state (a linear layer, its
optimizer with momentum, a tensor, plain data) is traced, and the modules are printed in the order
in which control enters them. All threads of the trainer are traced, from the call until the commit
is known; the daemon is another process and is not. The traced call is the third of its kind, so
caches are warm; with `--first` it is the first.

entry   A call of a function in another module of the product than the function below it on the
        stack. Frames of other packages in between (functools, torch) are looked through. Lambdas,
        nested functions and comprehensions belong to their module. Generated code (the __init__ of
        a dataclass) and `sidesave.errors` are not counted.
stop    Entries by the same call sites count once: a loop over tensors is one stop however many
        there are, and a recursion is one however deep the state is. Two calls of one function from
        two lines are two stops.
climb   A stop that leads up: the entered module is on the call stack already, or it (or its room)
        imports the calling module (or its room). Callbacks, hooks and closures are such calls.
        Marked ^.
return  A stop in a module that was entered before, so returns = stops - modules. Marked r.

A job of a `Worker` continues the stack of the thread that submitted it: a function that gives a
thread its own closure and waits has not left its module. PROGRESS messages are left out: the daemon
sends them only if a write takes long.

The core walk looks through modules that hold only vocabulary and primitives (LEAVES): thread
primitives, private names of torch, tags, dtypes, values, wire encoding. The path is the part of the
core walk whose functions are given the state, one of its tensors, or a form that it takes on its
way (FORMS).
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import threading
from collections import Counter
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import torch

import sidesave
from scripts import rooms
from sidesave.stager.signal_safe import Worker
from sidesave.writer_daemon.protocol import Progress

FORMS: Final = {
    *(
        "FlatState",
        "ShardPlan",
        "Plan",
        "StagingSlot",
        "Pieces",
        "CopyList",
        "TableShare",
        "Job",
        "Arena",
    ),  # of a save
    *(
        "FlatMap",
        "LiveMap",
        "Selection",
        "LoadPlan",
        "Loaded",
        "TensorLoad",
        "TensorRead",
    ),  # of a load
    *("ReadRequest", "Unbuilt"),
}
LEAVES: Final = {
    *("stager.signal_safe", "stager.gc_pause", "stager.torch_private", "stager.system_calls"),
    *(
        "stager.wrappers",
        "stager.state.tags",
        "stager.dtypes",
        "stager.state.flat_state",
        "stager.state.annotations",
    ),
    *(
        "stager.ownership",
        "stager.devices.kinds",
        "stager.devices.device",
        "stager.devices.cuda",
    ),
    *(
        "client.arguments",
        "client.messages",
        "writer_daemon.checkpoints.info",
        "writer_daemon.protocol",
    ),
    "writer_daemon.wire",
    *(
        "writer_daemon.storage.urls",
        "writer_daemon.storage.sealed_json",
        "writer_daemon.storage.descriptor",
    ),
    *("writer_daemon.storage.locks", "writer_daemon.format.names"),
}
_NOT_COUNTED: Final = {"errors", "__init__", "reporting"}
_ROUNDS: Final = 3
PAGE: Final = rooms.ROOT / "docs" / "walks.md"
_BEGIN, _END = "<!-- written by `python -m scripts.walk --write` -->", "<!-- end of the walks -->"
_KINDS: Final = ("save", "load", "checkpointer-load")


class Below(NamedTuple):
    """A frame of the product below a call."""

    module: str
    code: CodeType
    line: int


class Call(NamedTuple):
    """A call of a function of the product; the nearest frame is the first of ``below``."""

    thread: str
    module: str
    function: str
    below: list[Below]
    carries_state: bool


class Stop(NamedTuple):
    """An entry into a module, as it is counted."""

    thread: str
    caller: str | None
    module: str
    function: str
    depth: int
    climbs: bool


def module_of(frame: FrameType) -> str | None:
    """The module of a frame without ``sidesave.``; None if it is not counted."""
    name = frame.f_globals.get("__name__", "")
    if not name.startswith("sidesave.") or frame.f_code.co_filename == "<string>":
        return None
    name = name.removeprefix("sidesave.")
    return None if name in _NOT_COUNTED else name


class Tracer:
    """Records each call of a function of the product, in all threads."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.state: object = None
        self.is_on = False
        self.ignored_threads: set[str] = set()
        self._lock = threading.Lock()
        self._submitted: dict[int, list[Below]] = {}
        self._jobs: list[object] = []  # kept, so that their ids stay distinct

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Record a call; see :func:`sys.setprofile`."""
        thread = threading.current_thread().name if event == "call" and self.is_on else None
        if thread is None or thread in self.ignored_threads:
            return
        module, below = module_of(frame), self._below(frame.f_back)
        if module is None or below is None or _hears_progress(frame):
            return
        code = frame.f_code
        if code is Worker.submit.__code__:
            self._jobs.append(frame.f_locals["run"])
            self._submitted[id(frame.f_locals["run"])] = below
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [
            frame.f_locals[name] for name in names if name in frame.f_locals and name != "self"
        ]
        with self._lock:
            self.calls.append(
                Call(thread, module, code.co_qualname, below, any(map(self._is_state, given)))
            )

    def _below(self, frame: FrameType | None) -> list[Below] | None:
        """The frames of the product from ``frame`` on; None if they handle a PROGRESS message."""
        below: list[Below] = []
        while frame is not None:
            module = module_of(frame)
            if module is not None:
                if _hears_progress(frame):
                    return None
                if not frame.f_code.co_name.endswith("comp>"):  # frames up to Python 3.11
                    below.append(Below(module, frame.f_code, frame.f_lineno))
                if frame.f_code is Worker._round.__code__:
                    submitted = self._submitted.get(id(frame.f_locals.get("run")))
                    if submitted is not None:
                        return below + submitted
            frame = frame.f_back
        return below

    def _is_state(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        is_live = isinstance(value, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer))
        return value is self.state or is_live or type(value).__name__ in FORMS


def _hears_progress(frame: FrameType) -> bool:
    return isinstance(frame.f_locals.get("message"), Progress)


def stops(
    calls: list[Call], leaves: set[str] | frozenset[str] = frozenset(), *, path: bool = False
) -> list[Stop]:
    """The stops in the order of their first entries; with ``path``, only entries with the state."""
    leads_to_module, leads_to_room = _importers()
    seen: set[object] = set()
    walk: list[Stop] = []
    for thread, module, function, every, carries_state in calls:
        if module in leaves or (path and not carries_state):
            continue
        below = [each for each in every if each.module not in leaves]
        caller = below[0].module if below else None
        key = (
            thread,
            module,
            function,
            tuple(dict.fromkeys((each.code, each.line) for each in below)),
        )
        if module == caller or key in seen:
            continue
        seen.add(key)
        climbs = caller is not None and (
            module in (each.module for each in below)
            or module in leads_to_module[caller]
            or (
                rooms.room(module) != rooms.room(caller)
                and rooms.room(module) in leads_to_room[rooms.room(caller)]
            )
        )
        walk.append(Stop(thread, caller, module, function, len(below), climbs))
    return walk


@functools.cache
def _importers() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """The modules that import each module, also by others, and the rooms that import each room."""
    return _leading_to(rooms.edges()), _leading_to(rooms.between_rooms())


def _leading_to(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """For each node the nodes that it can be reached from."""
    above: dict[str, set[str]] = {name: set() for name in edges}
    for name in edges:
        left, seen = [name], set[str]()
        while left:
            for target in edges[left.pop()] - seen:
                seen.add(target)
                left.append(target)
                above[target].add(name)
    return above


def counts(walk: list[Stop]) -> dict[str, int]:
    """Stops, modules, climbs and returns of a walk."""
    modules = {stop.module for stop in walk}
    climbs = sum(stop.climbs for stop in walk)
    return {
        "stops": len(walk),
        "modules": len(modules),
        "climbs": climbs,
        "returns": len(walk) - len(modules),
    }


def between_rooms(walk: list[Stop]) -> list[Stop]:
    """The stops that enter another room than the caller's, with rooms in the place of modules."""
    crossing = [
        stop
        for stop in walk
        if stop.caller is None or rooms.room(stop.caller) != rooms.room(stop.module)
    ]
    return [stop._replace(module=rooms.room(stop.module)) for stop in crossing]


def listing(walk: list[Stop]) -> str:
    """One line for each stop."""
    lines: list[str] = []
    seen: set[str] = set()
    for number, stop in enumerate(walk, start=1):
        marks = ("^" if stop.climbs else " ") + ("r" if stop.module in seen else " ")
        seen.add(stop.module)
        thread = stop.thread.removeprefix("sidesave-").replace("MainThread", "main")
        name = f"{stop.module}: {stop.function.replace('<locals>.', '')}"
        lines.append(f"{number:4} {marks} {thread:>7} {'. ' * min(stop.depth, 12)}{name}")
    return "\n".join(lines)


def make_state() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    plain = {"epoch": 1, "names": ["a", "b"]}
    return {"model": model, "optimizer": optimizer, "loose": torch.ones(5), "plain": plain}


def trace(kind: str, rounds: int = _ROUNDS) -> list[Call]:
    """The calls of the last save or load of ``rounds``."""
    tracer = Tracer()
    threading.setprofile(tracer.profile)  # before the threads of the checkpointer begin
    sys.setprofile(tracer.profile)
    live = make_state()
    with (
        tempfile.TemporaryDirectory() as directory,
        sidesave.Checkpointer(directory) as checkpointer,
    ):
        if kind != "save":
            tracer.ignored_threads = {"sidesave-client"}  # it looks after the daemon meanwhile
            checkpointer.save(1, live).committed.result(60)
        for number in range(1, rounds + 1):
            tracer.state = state = live if kind == "save" else dict(live)
            tracer.is_on = number == rounds
            if kind == "save":
                checkpointer.save(number, state)
                tracer.ignored_threads = {"MainThread"}
                checkpointer.wait()  # until all that follows from the commit is done
                tracer.ignored_threads = set()
            elif kind == "load":
                sidesave.load(directory, into=state)
            else:
                checkpointer.load(into=state)
            tracer.is_on = False
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return tracer.calls


def walks(calls: list[Call]) -> dict[str, list[Stop]]:
    """The walks that are counted, by name."""
    core = stops(calls, LEAVES)
    return {
        "path": stops(calls, LEAVES, path=True),
        "core": core,
        "core, caller's thread": [stop for stop in core if stop.thread == "MainThread"],
        "core, between rooms": between_rooms(core),
        "all modules": stops(calls),
    }


def table(kinds: dict[str, dict[str, list[Stop]]]) -> str:
    """The counts in Markdown."""
    lines = ["| walk | stops | modules | climbs | returns |", "|---|---|---|---|---|"]
    for kind, each in kinds.items():
        for name, walk in each.items():
            lines.append(
                f"| {kind}, {name} | " + " | ".join(map(str, counts(walk).values())) + " |"
            )
    return "\n".join(lines)


def page(save: dict[str, list[Stop]], load: dict[str, list[Stop]]) -> str:
    """The text of docs/walks.md with these walks."""
    text = f"{table({'save': save, 'load': load})}\n\nThe path of a save, then that of a load:\n"
    for walk in (save, load):
        text += f"\n```text\n{listing(walk['path'])}\n```\n"
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    return f"{before}{_BEGIN}\n{text}{_END}{rest.partition(_END)[2]}"


def report(kind: str, chosen: str, found: dict[str, list[Stop]]) -> str:
    walk = found[chosen]
    entered = Counter(stop.module for stop in walk).most_common()
    climbs = Counter(
        f"  {stop.caller} -> {stop.module}: {stop.function}" for stop in walk if stop.climbs
    )
    return "\n".join(
        [
            f"{kind}, {chosen}\n{listing(walk)}",
            "entered how often: " + ", ".join(f"{module} {times}" for module, times in entered),
            "climbs:",
            *(f"{climb} x{times}" for climb, times in climbs.items()),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Count the walk of a save or a load through the modules."
    )
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help=f"of {', '.join(_KINDS)}; save if none is given"
    )
    parser.add_argument(
        "--first", action="store_true", help="trace the first call, with cold caches"
    )
    parser.add_argument("--path", action="store_const", const="path", default="core", dest="chosen")
    parser.add_argument("--all", action="store_const", const="all modules", dest="chosen")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument("--write", action="store_true", help="put the paths into docs/walks.md")
    args = parser.parse_args()
    kinds: list[str] = ["save", "load"] if args.write else args.kinds or ["save"]
    if not set(kinds) <= set(_KINDS):
        parser.error(f"a kind is one of {', '.join(_KINDS)}")
    traced = {kind: walks(trace(kind, 1 if args.first else _ROUNDS)) for kind in kinds}
    if args.write:
        PAGE.write_text(page(traced["save"], traced["load"]))
    elif args.json:
        print(
            json.dumps(
                {
                    kind: {name: counts(walk) for name, walk in each.items()}
                    for kind, each in traced.items()
                }
            )
        )
    else:
        for kind, each in traced.items():
            print(report(kind, args.chosen, each), end="\n\n")
        print(table(traced))


if __name__ == "__main__":
    main()
