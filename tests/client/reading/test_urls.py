"""Checkpoints in object stores: loaded, looked for and verified by URL, in few requests, and never
wrong.
"""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stores
import torch
from hypothesis import given
from hypothesis import strategies as st
from loads import flip_bit, live
from object_server import ObjectServer, Request, serving
from states import difference
from trainers import save
from worlds import cut, write_world

import sidesave
from sidesave import Checkpointer, Source, load_sources
from sidesave.client.export.diff import Contents, compare
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.errors import (
    CheckpointNotFoundError,
    IntegrityError,
    InvalidArgumentError,
    SidesaveError,
    WriteError,
)
from sidesave.writer_daemon.format.layout import Box
from sidesave.writer_daemon.storage import urls

STEP = "s3://bucket/run/step-00000002"
TENSORS = "bucket/run/step-00000002/model.rank-00000.safetensors"
IMPATIENT = {"max_retries": 2, "retry_timeout": datetime.timedelta(seconds=20)}


def state(seed: int) -> dict[str, Any]:
    """Large tensors and small ones, and plain data."""
    torch.manual_seed(seed)
    model = {
        "large": torch.randn(1500, 2000),
        "gap": torch.randn(200),
        "other": torch.randn(600, 600),
    }
    return {"model": model | {"small": torch.randn(7)}, "loss": 0.5 * seed, "names": ["a", "b"]}


def load(server: ObjectServer, url: str = STEP, **more: Any) -> dict[str, Any]:
    return sidesave.load(url, storage_options={**server.options, "retry_config": IMPATIENT}, **more)


# What comes ---------------------------------------------------------------------------------------


@pytest.mark.drawn
@pytest.mark.parametrize(
    "kind", ["file", "memory", "s3", pytest.param("seaweed", marks=pytest.mark.slow)]
)
def test_all_that_reads_takes_a_url(
    kind: str,
    buckets: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
):
    run = shutil.copytree(buckets / "bucket" / "run", tmp_path / "run")
    kinds = {"file": stores.by_file, "memory": stores.in_memory, "s3": stores.by_s3}
    at = stores.in_seaweed(request.getfixturevalue("weed")) if kind == "seaweed" else kinds[kind]
    with at(run) as (url, options):
        for path in (url, f"{url}/", f"{url}/step-00000002"):
            assert (
                difference(sidesave.load(path, storage_options=options), sidesave.load(run)) == ""
            )
            assert sidesave.verify(path, storage_options=options).ok
        found = sidesave.find(url, storage_options=options)
        assert [(info.step, info.path) for info in found] == [
            (n, f"{url}/step-{n:08d}") for n in (1, 2)
        ]
        assert sidesave.latest(url, storage_options=options) == found[-1]
        assert (
            difference(
                sidesave.load(found[0], storage_options=options),
                sidesave.load(run / "step-00000001"),
            )
            == ""
        )
        into = state(3)
        model = into["model"]
        sidesave.load(url, into=into, include="model", storage_options=options)
        assert difference(into["model"], state(2)["model"]) == ""
        assert into["model"] is model
        assert into["loss"] == 1.5
        load_sources(
            [Source(url, step=1, include="model.large", storage_options=options), Source(run)], into
        )
        assert difference(into["loss"], 1.0) == ""
        sidesave.export(url, tmp_path / "export", item="model", storage_options=options)
        sidesave.export(run, tmp_path / "export-of-disk", item="model")
        for path in (tmp_path / "export").iterdir():
            assert path.read_bytes() == (tmp_path / "export-of-disk" / path.name).read_bytes()
        with (
            urls.using(options),
            Contents(f"{url}/step-00000001") as first,
            Contents(str(run)) as second,
        ):
            assert [change.fqn for change in compare(first, second).changed] == [
                f"model.{name}" for name in model
            ]


def test_live_objects_take_their_state_from_a_url(tmp_path: Path):
    run = tmp_path / "run"
    save(run, live(3), 7)
    into, expected = live(5), live(3)
    sidesave.load(f"file://{run}", into=into)
    for name in ("model", "optimizer", "scheduler"):
        assert difference(into[name].state_dict(), expected[name].state_dict()) == ""


def test_verify_asks_once_for_each_record_and_lists_once(buckets: Path, server: ObjectServer):
    url = f"{server.endpoint}/{STEP.removeprefix('s3://')}"
    for place, options, lists in ((url, None, 0), (STEP, server.options, 1)):
        server.requests.clear()
        assert sidesave.verify(place, storage_options=options).ok
        assert server.count("LIST") == lists
        assert sum(request.key.endswith("rank-00000.json") for request in server.requests) == 1


def test_one_step_comes_over_http_and_a_run_does_not(buckets: Path):
    with serving(buckets) as server:
        url = f"{server.endpoint}/bucket/run/step-00000002"
        assert difference(sidesave.load(url), sidesave.load(buckets / "bucket" / "run")) == ""
        assert sidesave.verify(url).ok
        assert [info.step for info in sidesave.find(url)] == [2]
        with pytest.raises(CheckpointNotFoundError):
            sidesave.load(f"{server.endpoint}/bucket/run")
        assert server.count("LIST") == 0


def test_any_box_of_a_resharded_checkpoint_is_that_of_the_directory(tmp_path: Path):
    torch.manual_seed(1)
    whole = {
        "model.a": torch.randn(700, 900),
        "model.b": torch.randn(64, 2000),
        "model.c": torch.randn(9, 5),
    }
    layouts = {
        "model.a": cut((700, 900), 3),
        "model.b": cut((64, 2000), 3, 1),
        "model.c": cut((9, 5), 3),
    }
    each = {"model": {name.removeprefix("model."): tensor for name, tensor in whole.items()}}
    path = write_world(tmp_path / "run", [each] * 3, lambda name, tensor: layouts[name])

    @given(st.data())
    def boxes(data: st.DataObject) -> None:
        wanted: list[tuple[str, Box | None]] = []
        for name in data.draw(st.lists(st.sampled_from([*whole]), min_size=1, unique=True)):
            shape = tuple(whole[name].shape)
            starts = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
            sizes = tuple(
                data.draw(st.integers(1, extent - at))
                for extent, at in zip(shape, starts, strict=True)
            )
            wanted.append((name, data.draw(st.sampled_from([None, (starts, sizes)]))))
        with CheckpointReader(str(path)) as local, CheckpointReader(f"file://{path}") as remote:
            expected, found = local.read_boxes(wanted), remote.read_boxes(wanted)
            assert all(torch.equal(expected[each], found[each]) for each in wanted)

    boxes()


@given(
    names=st.sets(
        st.sampled_from(["model.large", "model.gap", "model.other", "model.small", "loss"]),
        min_size=1,
    )
)
def test_any_selection_is_that_of_the_directory(buckets: Path, names: set[str]):
    run = buckets / "bucket" / "run"
    assert (
        difference(
            sidesave.load(f"file://{run}", include=[*names]), sidesave.load(run, include=[*names])
        )
        == ""
    )
    rest = sidesave.load(f"file://{run}", exclude=[*names])
    assert difference(rest, sidesave.load(run, exclude=[*names])) == ""


# What it costs ------------------------------------------------------------------------------------


def test_a_load_takes_four_requests_two_for_each_file_of_tensors_and_one_for_every_8_mib(
    server: ObjectServer,
):
    """docs/remote.md says so."""
    load(server)
    assert server.count("LIST") == 0
    assert server.count("GET") == 3 + 2 + 2  # 13.4 MB
    server.requests.clear()
    load(server, include="model.small")
    assert server.count("GET") == 3 + 2 + 1
    wanted = [request.range for request in server.requests if request.key == TENSORS]
    assert sum(stop - start for start, stop in filter(None, wanted[1:])) <= 512 << 10


def test_a_listing_takes_two_requests_a_list_and_one_for_each_step(server: ObjectServer):
    """docs/remote.md says so."""
    sidesave.find("s3://bucket/run", storage_options=server.options)
    assert (server.count("LIST"), server.count("GET")) == (1, 2 + 2)
    server.requests.clear()
    load(server, "s3://bucket/run", include="loss")
    assert (server.count("LIST"), server.count("GET")) == (1, 2 + 2 + 3)


def test_ranges_that_are_near_each_other_are_one_request_and_others_are_not(tmp_path: Path):
    run = tmp_path / "buckets" / "bucket" / "run"
    tensors = {str(n): torch.full((256 << 10,), float(n)) for n in range(9)}  # 1 MiB each
    path = write_world(run, [{"model": tensors}], lambda name, tensor: cut((256 << 10,), 1))
    with (
        serving(run.parent.parent) as server,
        urls.using(server.options),
        CheckpointReader(f"s3://bucket/run/{path.name}") as reader,
    ):
        reader.read(["model.0"])  # which opens the files
        server.requests.clear()
        near: Box = ((0,), (200 << 10,))  # what is left out behind it is 224 KiB
        found = reader.read_boxes([("model.0", near), ("model.1", None), ("model.5", None)])
    assert server.count("GET") == 2
    assert found["model.5", None].eq(5).all()
    assert found["model.0", near].eq(0).all()


@pytest.mark.slow
def test_no_more_than_16_requests_are_made_at_once(tmp_path: Path):
    run = tmp_path / "buckets" / "bucket" / "run"
    save(run, {"model": {str(n): torch.full((1 << 20,), n) for n in range(40)}})
    with serving(run.parent.parent) as server:
        load(server, "s3://bucket/run")
    assert 1 < server.most_at_once <= 16


@pytest.mark.slow
@pytest.mark.parametrize("how", ["check", "verify", "fetch"])
def test_memory_beside_the_tensors_is_bounded(tmp_path: Path, how: str):
    run = tmp_path / "buckets" / "bucket" / "run"
    save(run, {"model": {str(n): torch.full((4 << 20,), n) for n in range(40)}})
    code = """
import pathlib, sys, sidesave
from sidesave.client.reading.checkpoint_reader import CheckpointReader
def most():
    return int(pathlib.Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10
sidesave.load("s3://bucket/run", include="model.0")
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = most()
if sys.argv[1] == "check":
    with CheckpointReader("s3://bucket/run/step-00000001") as reader:
        reader.check(reader.names())
elif sys.argv[1] == "verify":
    assert sidesave.verify("s3://bucket/run").ok
else:
    sidesave.fetch("s3://bucket/run", sys.argv[2])
print(most() - before)
"""  # noqa: E501
    with serving(run.parent.parent) as server:
        environment = os.environ | {name.upper(): value for name, value in server.options.items()}
        command = [sys.executable, "-c", code, how, tmp_path / "fetched"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 256 << 20  # of 640 MiB


# What goes wrong ----------------------------------------------------------------------------------


def only(key: str, fault: Any, *, times: int = 1000) -> Callable[[Request, int], Any]:
    """A fault of requests for keys that end so, the first few of each."""
    return lambda request, number: fault if request.key.endswith(key) and number < times else None


@pytest.mark.drawn
@pytest.mark.parametrize("fault", [500, 503, "cut"])
@pytest.mark.parametrize(
    "key", ["manifest.json", "rank-00000.json", ".msgpack", ".xxh3", ".safetensors"]
)
def test_what_fails_once_is_asked_again(server: ObjectServer, buckets: Path, key: str, fault: Any):
    server.fault = only(key, fault, times=1)
    assert difference(load(server), sidesave.load(buckets / "bucket" / "run")) == ""


@pytest.mark.drawn
@pytest.mark.parametrize("fault", [400, 403, 404, 500, 503, "cut", "short", "flip"])
@pytest.mark.parametrize(
    "key", ["manifest.json", "rank-00000.json", ".msgpack", ".xxh3", ".safetensors"]
)
def test_what_stays_wrong_is_an_error_that_names_the_object_and_nothing_is_loaded(
    server: ObjectServer, key: str, fault: Any
):
    server.fault = only(key, fault)
    into, before = state(9), state(9)
    with pytest.raises(SidesaveError) as raised:
        load(server, into=into)
    assert isinstance(raised.value, (IntegrityError, WriteError, CheckpointNotFoundError))
    assert "step-00000002" in str(raised.value)
    assert difference(into, before) == ""
    if fault == 403:
        assert isinstance(raised.value, WriteError)
        assert "check the credentials" in str(raised.value)
    if key == "manifest.json" and fault == 404:
        assert isinstance(raised.value, CheckpointNotFoundError)


def test_a_flipped_bit_in_a_tensor_is_told_with_file_block_and_name(server: ObjectServer):
    server.fault = lambda request, number: "flip" if request.key == TENSORS and number else None
    with pytest.raises(
        IntegrityError, match=rf"{STEP}/model.rank-00000.safetensors: block \d+ .* it holds model\."
    ):
        load(server)
    report = sidesave.verify(STEP, storage_options=server.options)
    assert {fault.file for fault in report.faults} == {"model.rank-00000.safetensors"}


@pytest.mark.drawn
@pytest.mark.parametrize("nbytes", [None, 0, 100, 5000])
@pytest.mark.parametrize(
    "suffix", ["manifest.json", "rank-00000.json", ".msgpack", ".xxh3", ".safetensors"]
)
def test_an_object_that_is_cut_or_missing_is_an_error_and_a_fault(
    buckets: Path, tmp_path: Path, suffix: str, nbytes: int | None
):
    step = shutil.copytree(
        buckets / "bucket" / "run" / "step-00000002", tmp_path / "run" / "step-00000002"
    )
    (path,) = (path for path in step.iterdir() if path.name.endswith(suffix))
    if nbytes is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: min(nbytes, path.stat().st_size - 1)])
    missing = (CheckpointNotFoundError,) if suffix == "manifest.json" and nbytes is None else ()
    with pytest.raises((IntegrityError, *missing), match=re.escape(path.name)):
        sidesave.load(f"file://{step}")
    if not missing:
        assert any(path.name in str(fault) for fault in sidesave.verify(f"file://{step}").faults)


def test_damage_that_is_not_asked_for_does_not_matter(buckets: Path, tmp_path: Path):
    run = shutil.copytree(buckets / "bucket" / "run", tmp_path / "run")
    middle = 4096 + (5 << 20)  # of the first tensor, which has 12 MB
    flip_bit(run / "step-00000002" / "model.rank-00000.safetensors", middle)
    found = sidesave.load(f"file://{run}", include=["model.small", "model.other"])
    assert difference(found["model"]["other"], state(2)["model"]["other"]) == ""
    with pytest.raises(IntegrityError, match=r"block 21 .* model\.large"):
        sidesave.load(f"file://{run}")


def test_a_step_that_is_deleted_while_it_is_read_is_an_error(tmp_path: Path, buckets: Path):
    copy = shutil.copytree(buckets, tmp_path / "buckets")
    with serving(copy) as server:

        def delete(request: Request, number: int) -> None:
            if request.key == TENSORS and number == 1:
                shutil.rmtree(copy / "bucket" / "run" / "step-00000002")

        server.fault = delete
        with pytest.raises(IntegrityError, match="no such object"):
            load(server)


def test_a_step_without_a_manifest_is_not_there(buckets: Path, tmp_path: Path):
    copy = shutil.copytree(buckets, tmp_path / "buckets")
    (copy / "bucket" / "run" / "step-00000002" / "manifest.json").unlink()
    with serving(copy) as server:
        assert [
            info.step for info in sidesave.find("s3://bucket/run", storage_options=server.options)
        ] == [1]
        assert difference(load(server, "s3://bucket/run"), state(1)) == ""
        with pytest.raises(CheckpointNotFoundError, match=r"no manifest\.json"):
            load(server)
        with pytest.raises(CheckpointNotFoundError, match=r"no manifest\.json"):
            sidesave.verify(STEP, storage_options=server.options)


def test_a_damaged_newest_step_is_not_passed_over(server: ObjectServer):
    server.fault = only("step-00000002/manifest.json", "flip")
    with pytest.raises(IntegrityError, match="step-00000002"):
        load(server, "s3://bucket/run")
    assert [
        info.step for info in sidesave.find("s3://bucket/run", storage_options=server.options)
    ] == [1]


def test_a_long_listing_comes_in_pages(server: ObjectServer):
    server.page = 1
    assert [
        info.step for info in sidesave.find("s3://bucket/run", storage_options=server.options)
    ] == [1, 2]
    assert server.count("LIST") == 4  # entries: the lease, the history, and two steps


# What is refused, and what is told ----------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["s3://user:word@bucket/run", "s3://bucket/run?word=word", "https://host/x#word"]
)
def test_what_a_url_should_not_hold_is_refused_and_not_repeated(url: str):
    with pytest.raises(InvalidArgumentError, match="storage_options") as raised:
        sidesave.load(url)
    assert "word" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["s3://bucket/../other", "s3://bucket//run", "s3://", "s3://bucket/./run"]
)
def test_a_url_leads_to_one_place(url: str):
    with pytest.raises(InvalidArgumentError, match=r"or empty, \. or \.\. parts"):
        sidesave.find(url)


def test_what_takes_no_url_says_what_does(tmp_path: Path):
    calls: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: Checkpointer("https://host/run"),
            "read, but not written to; run directories are s3",
        ),
        (lambda: sidesave.CheckpointManager("http://host/run", {}), "read, but not written to"),
        (lambda: sidesave.hold(STEP).__enter__(), "load, Source, find"),
        (lambda: sidesave.history("s3://bucket/run"), "find"),
        (lambda: Source("s3://bucket/weights", item="model").locate(), "load, Source, find"),
    ]
    for call, told in calls:
        with pytest.raises(InvalidArgumentError, match=told):
            call()
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(InvalidArgumentError, match="checkpoint of this run"),
    ):
        checkpointer.load(STEP)


def test_credentials_stand_in_no_error_and_in_no_repr(server: ObjectServer):
    secret = server.options["aws_secret_access_key"]
    source = Source(STEP, storage_options=server.options)
    server.fault = lambda request, number: 403
    with pytest.raises(WriteError) as raised:
        load(server)
    with pytest.raises(InvalidArgumentError) as odd:
        sidesave.load(STEP, storage_options={**server.options, "nonsense": secret})
    for told in (source, raised.value, odd.value):
        assert secret not in repr(told) + str(told)
    for error in (raised.value, odd.value):
        assert secret not in "".join(traceback.format_exception(error))


def test_options_that_the_library_stumbles_over_are_an_error(server: ObjectServer):
    for endpoint in ("", "no url", "http://"):
        with pytest.raises((WriteError, InvalidArgumentError), match="s3://bucket"):
            sidesave.load(
                STEP,
                storage_options={
                    **server.options,
                    "aws_endpoint": endpoint,
                    "retry_config": IMPATIENT,
                },
            )


@pytest.mark.slow
def test_the_commands_that_read_take_urls(buckets: Path, tmp_path: Path):
    run = f"file://{buckets}/bucket/run"

    def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "sidesave", *arguments], capture_output=True, text=True
        )

    listed = json.loads(command("ls", run, "--json").stdout)
    assert [(one["step"], one["mark"]) for one in listed["checkpoints"]] == [(1, ""), (2, "latest")]
    assert "model.large" in command("show", run, "--step", "1").stdout
    assert command("verify", run).stdout.count(": ok") == 2
    assert "4 changed" in command("diff", f"{run}/step-00000001", run).stdout
    assert command("export", run, tmp_path / "export", "--item", "model").returncode == 0
    assert command("fetch", run, tmp_path / "run", "--step", "1").returncode == 0
    assert [info.step for info in sidesave.find(tmp_path / "run")] == [1]
    again = command("fetch", run, tmp_path / "run", "--step", "1")
    assert (again.returncode, "there is this step already" in again.stderr) == (1, True)
    for refused in ("plot", "trigger"):
        told = command(refused, run)
        assert told.returncode == 2
        assert "for local and mounted directories" in told.stderr


def test_without_its_library_the_error_says_how_to_get_it():
    code = """
import sys
sys.modules["obstore"] = None
import sidesave
from sidesave.errors import SidesaveError
try:
    sidesave.find("s3://bucket/run")
except SidesaveError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'sidesave[remote]'" in done.stdout


@pytest.mark.slow
def test_its_library_is_imported_for_a_url_alone(buckets: Path):
    code = "import sys, sidesave; sidesave.load(sys.argv[1]); print('obstore' in sys.modules)"
    for path, expected in (
        (buckets / "bucket" / "run", "False"),
        (f"file://{buckets}/bucket/run", "True"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected
