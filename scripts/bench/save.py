"""How long a save blocks and how long until it is durable, sidesave beside its peers, the raw disk
and a memory copy.

    python -m scripts.bench.save --size large --rounds 8 --chart save.png

A session starts every peer and takes its first save at once; sessions alternate between starting
from nothing and after ``prepare``, where a peer has it. The steady rounds follow, in one process,
one peer after the other in rotating order. Before each save the last checkpoint is deleted, every
tensor is changed and the page cache is written back.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.bench.common import Field, SaveTimes, arguments, measure_save, rotated, workspace
from scripts.bench.peers import Peer, Sidesave, choose
from scripts.bench.raw_limits import MIB, copy_best, direct_write_best, host_targets, random_buffer
from scripts.bench.report import Report, Series, machine, median, ratios, spread
from scripts.bench.state import TrainState

RAW = "raw direct write"
COPY = "one memory copy"
Times = dict[str, list[SaveTimes]]


class Baselines:
    """The two limits of the machine that a save is judged against, measured in the same rounds."""

    def __init__(self, folder: Path, state: TrainState) -> None:
        self._folder = folder
        self._nbytes = state.nbytes
        self._source = random_buffer(256 * MIB)
        self._sources = [tensor.detach() for tensor in state.tensors()]
        self._targets = host_targets(self._sources)
        self.seconds: dict[str, list[float]] = {RAW: [], COPY: []}

    def write(self) -> None:
        """Write as many bytes as the state has, straight to the disk."""
        self.seconds[RAW].append(direct_write_best(self._folder, self._nbytes, self._source))

    def copy(self) -> None:
        """Copy the state into memory that is already there."""
        self.seconds[COPY].append(copy_best(self._targets, self._sources))


def steady_rounds(
    peers: Sequence[Peer], state: TrainState, baselines: Baselines, rounds: int, times: Times
) -> None:
    """Take one save of every peer and both baselines a round."""

    def turn_of(peer: Peer, step: int) -> Callable[[], None]:
        return lambda: times[peer.name].append(measure_save(peer, step, state))

    for step in range(1, rounds + 1):
        turns = [baselines.write, baselines.copy, *(turn_of(peer, step) for peer in peers)]
        for turn in rotated(turns, step):
            turn()


def first_save(
    peer: Peer, state: TrainState, prepared: Times, from_nothing: Times, *, prepare: bool
) -> float | None:
    """Take the first save of a peer that was just started; return the seconds of ``prepare`` where
    it was called.
    """
    start = time.perf_counter()
    ready = prepare and peer.prepare(state)
    seconds = time.perf_counter() - start
    (prepared if ready else from_nothing)[peer.name].append(measure_save(peer, 0, state))
    return seconds if ready else None


def calls(times: Sequence[SaveTimes]) -> list[float]:
    """Return the seconds that ``save`` blocked."""
    return [t.call_s for t in times]


def durables(times: Sequence[SaveTimes]) -> list[float]:
    """Return the seconds until each save was durable."""
    return [t.durable_s for t in times]


def against(times: Series, base: Series) -> str:
    """Format the median and range of a ratio taken round by round."""
    pairs = ratios(times, base)
    return f"{statistics.median(pairs):.2f} ({min(pairs):.2f}-{max(pairs):.2f})" if pairs else "-"


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__, rounds=6)
    parser.add_argument(
        "--sessions", type=int, default=2, help="times that all peers are started (default 2)"
    )
    parser.add_argument("--device", default="cpu", help="where the state lives (default cpu)")
    args = parser.parse_args()
    state = TrainState(args.size, args.device)
    report = Report("Save")
    times, prepared, from_nothing = defaultdict(list), defaultdict(list), defaultdict(list)
    preparing: dict[str, list[float]] = defaultdict(list)

    with workspace(args.dir) as folder, Field(choose(args.only), folder, state) as field:
        report.note(
            f"{state.nbytes / 1e9:.2f} GB in {len(state.tensors())} tensors on {state.device}, "
            f"{args.sessions} sessions of {args.rounds} steady rounds. {machine(folder)}."
        )
        baselines = Baselines(folder, state)
        for session in range(args.sessions):
            peers = []
            for kind in rotated(field.chosen, session):
                if (peer := field.start(kind)) is None:
                    continue
                peers.append(peer)
                seconds = first_save(peer, state, prepared, from_nothing, prepare=session % 2 == 1)
                if seconds is not None:
                    preparing[peer.name].append(seconds)
            steady_rounds(peers, state, baselines, args.rounds, times)
            field.close()

    names = [kind.name for kind in field.chosen if times[kind.name]]
    ours = times.get(Sidesave.name, [])
    raw, copy = baselines.seconds[RAW], baselines.seconds[COPY]
    report.note(
        "Seconds until every file is fsynced. First: median. Steady: min / median / max; ratios "
        "pair by pair."
    )
    report.table(
        ("durable", "first", "first, prepared", "steady", "/ sidesave", "/ raw write"),
        [
            (
                name,
                median(durables(from_nothing[name])),
                median(durables(prepared[name])),
                spread(durables(times[name])),
                against(durables(times[name]), durables(ours)),
                against(durables(times[name]), raw),
            )
            for name in names
        ]
        + [(RAW, "-", "-", spread(raw), against(raw, durables(ours)), "1")],
    )
    report.note("Milliseconds that `save` blocks, and until the state may be changed.")
    report.table(
        (
            "call",
            "prepare",
            "first",
            "first, prepared",
            "steady",
            "may change",
            "/ sidesave",
            "/ memory copy",
        ),
        [
            (
                name,
                median(preparing[name], 1e3, 0),
                median(calls(from_nothing[name]), 1e3, 1),
                median(calls(prepared[name]), 1e3, 1),
                spread(calls(times[name]), 1e3, 1),
                median([t.staged_s for t in times[name]], 1e3, 1),
                against(calls(times[name]), calls(ours)),
                against([t.staged_s for t in times[name]], copy),
            )
            for name in names
        ]
        + [(COPY, "-", "-", "-", spread(copy, 1e3, 1), median(copy, 1e3, 1), "-", "1")],
    )
    report.note("How each was set up:")
    report.items(field.settings())
    report.panel("Durable, steady", "seconds", {n: durables(times[n]) for n in names} | {RAW: raw})
    staged = {n: [1e3 * t.staged_s for t in times[n]] for n in names}
    report.panel(
        "save() blocks, steady", "ms", {n: [1e3 * s for s in calls(times[n])] for n in names}
    )
    report.panel("Until the state may be changed", "ms", staged | {COPY: [1e3 * s for s in copy]})
    report.publish(args.markdown, args.chart)


if __name__ == "__main__":
    main()
