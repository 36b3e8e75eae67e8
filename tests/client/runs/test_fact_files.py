"""The small files of a run directory: a damaged one is never read as another value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidesave.client.runs.pins import PINS, Pins
from sidesave.errors import FormatVersionError, IntegrityError
from sidesave.writer_daemon.format.fallbacks import USED
from sidesave.writer_daemon.format.rollback import ROLLBACK_FILE, Rollbacks
from sidesave.writer_daemon.mirror.identity import REMEMBERED
from sidesave.writer_daemon.storage import PosixStorage
from sidesave.writer_daemon.storage.sealed_json import FactFile, seal

FACTS: list[tuple[FactFile[Any], Any]] = [
    (PINS, frozenset({100, 7})),
    (ROLLBACK_FILE, Rollbacks(((1, 5),))),
    (USED, ["/other"]),
    (REMEMBERED, ("/mirror", {"/mirror": "f" * 32})),
]
each_fact = pytest.mark.parametrize(("fact", "value"), FACTS, ids=[fact.name for fact, _ in FACTS])


@each_fact
def test_a_value_is_read_as_it_was_written(tmp_path: Path, fact: FactFile[Any], value: Any):
    storage = PosixStorage(str(tmp_path))
    assert fact.read(storage) is None
    fact.write(storage, value)
    assert fact.read(storage) == value


@each_fact
def test_no_flipped_bit_and_no_lost_end_gives_another_value(
    tmp_path: Path, fact: FactFile[Any], value: Any
):
    storage, path = PosixStorage(str(tmp_path)), tmp_path / fact.name
    fact.write(storage, value)
    data = path.read_bytes()
    flipped = [
        (int.from_bytes(data) ^ 1 << bit).to_bytes(len(data)) for bit in range(8 * len(data))
    ]
    for damaged in (*flipped, *(data[:nbytes] for nbytes in range(len(data)))):
        path.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=fact.name):
            fact.read(storage)


@each_fact
def test_a_file_of_a_newer_version_is_no_damage(tmp_path: Path, fact: FactFile[Any], value: Any):
    storage, path = PosixStorage(str(tmp_path)), tmp_path / fact.name
    fact.write(storage, value)
    rest = path.read_bytes().partition(b",")[2].replace(b'"version":1', b'"version":2')
    path.write_bytes(seal(json.loads(b"{" + rest)))
    with pytest.raises(FormatVersionError, match="upgrade"):
        fact.read(storage)


def test_damage_is_not_copied_over_a_valid_file(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for name in ("source", "target"):
        (tmp_path / name).mkdir()
    source, target = (PosixStorage(str(tmp_path / name)) for name in ("source", "target"))
    ROLLBACK_FILE.copy(source, target)
    assert ROLLBACK_FILE.read(target) is None
    ROLLBACK_FILE.write(source, Rollbacks(((1, 5),)))
    ROLLBACK_FILE.copy(source, target)
    assert ROLLBACK_FILE.read(target) == Rollbacks(((1, 5),))
    path = tmp_path / "source" / ROLLBACK_FILE.name
    path.write_bytes(path.read_bytes().replace(b"5", b"6"))
    ROLLBACK_FILE.copy(source, target)
    assert ROLLBACK_FILE.read(target) == Rollbacks(((1, 5),))
    assert "source/.sidesave.rollback: does not match its own digest" in caplog.text


def test_a_file_of_a_newer_version_is_copied(tmp_path: Path):
    for name in ("source", "target"):
        (tmp_path / name).mkdir()
    source, target = (PosixStorage(str(tmp_path / name)) for name in ("source", "target"))
    newer = seal({"format": "sidesave-rollback", "version": 2})
    (tmp_path / "source" / ROLLBACK_FILE.name).write_bytes(newer)
    ROLLBACK_FILE.copy(source, target)
    assert (tmp_path / "target" / ROLLBACK_FILE.name).read_bytes() == newer


def test_pins_of_an_earlier_version_hold_and_get_a_digest_with_the_next_one(tmp_path: Path):
    path, pins = tmp_path / PINS.name, Pins(str(tmp_path))
    path.write_bytes(b"[7, 100]")
    assert pins.read() == {7, 100}
    pins.change(8, pinned=True)
    assert path.read_bytes().startswith(b'{"xxh3_128":')
    assert pins.read() == {7, 8, 100}
