"""The cipher and its keys: the vectors of the standards; and nothing of another save under this
one's key.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import Session, a_state

from sidesave import Encryption
from sidesave.errors import (
    IntegrityError,
    InvalidArgumentError,
    ProtocolError,
    SidesaveError,
    TamperedError,
    WrongKeyError,
)
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.format.manifest import FileRecord, RankRecord
from sidesave.writer_daemon.format.names import MAX_EXTRA_NBYTES
from sidesave.writer_daemon.sealing.cipher import SMALL_NBYTES, TAG_NBYTES, FileCipher, derive
from sidesave.writer_daemon.sealing.keys import Keys, SaveKey, Sealing, data_key_of
from sidesave.writer_daemon.writing.sealed import BOUNCE_NBYTES, Sealed
from sidesave.writer_daemon.writing.writer import IN_FLIGHT

pytest.importorskip("cryptography", reason="needs cryptography: pip install 'sidesave[encryption]'")

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
SESSION = "0123456789abcdef"


@pytest.mark.parametrize(
    ("ikm", "salt", "info", "nbytes", "okm"),
    [
        (  # RFC 5869, A.1
            "0b" * 22,
            "000102030405060708090a0b0c",
            "f0f1f2f3f4f5f6f7f8f9",
            42,
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (  # A.3
            "0b" * 22,
            "",
            "",
            42,
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)
def test_keys_are_derived_as_rfc_5869_has_it(ikm: str, salt: str, info: str, nbytes: int, okm: str):
    assert derive(bytes.fromhex(ikm), bytes.fromhex(info), nbytes, bytes.fromhex(salt)).hex() == okm


@pytest.mark.parametrize(
    ("key", "number", "plain", "sealed", "tag"),
    [
        # The GCM specification (McGrew, Viega), test cases 13 and 14: AES-256, a nonce of zeros,
        # which is block 0
        ("00" * 32, 0, "", "", "530f8afbc74536b9a963b4f1c4cb738b"),
        (
            "00" * 32,
            0,
            "00" * 16,
            "cea7403d4d606b6e074ec5d3baf39d18",
            "d0d1c8a799996bf0265b98b5d48ab919",
        ),
        # case 15, whose nonce is this number
        (
            "feffe9928665731c6d6a8f9467308308" * 2,
            0xCAFEBABEFACEDBADDECAF888,
            "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525"
            "b16aedf5aa0de657ba637b391aafd255",
            "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b1056828838"
            "c5f61e6393ba7a0abcc9f662898015ad",
            "b094dac5d93471bdec1a502270e3cc6c",
        ),
    ],
)
def test_blocks_are_sealed_as_the_gcm_specification_has_it(
    key: str, number: int, plain: str, sealed: str, tag: str
):
    cipher, data = FileCipher(bytes.fromhex(key)), bytes.fromhex(plain)
    into = memoryview(bytearray(len(data) + TAG_NBYTES))
    cipher.seal_block(number, memoryview(data), into)
    assert into.hex() == sealed + tag
    back = memoryview(bytearray(len(data)))
    cipher.open_block(number, into, back, "here")
    assert back == data
    with pytest.raises(TamperedError, match="here: block"):
        cipher.open_block(number + 1, into, back, "here")


@given(st.binary(max_size=200), st.binary(max_size=20), st.data())
def test_what_is_small_comes_back_and_no_byte_of_it_can_be_changed(
    content: bytes, bound: bytes, data: st.DataObject
):
    cipher = FileCipher(KEY)
    sealed = cipher.seal(content, bound)
    assert len(sealed) == len(content) + SMALL_NBYTES and cipher.open(sealed, "", bound) == content
    assert cipher.seal(content, bound) == sealed, "a save that is tried again writes the same"
    at = data.draw(st.integers(0, len(sealed) - 1))
    changed = bytearray(sealed)
    changed[at] ^= data.draw(st.integers(1, 255))
    for odd in (bytes(changed), sealed[:at], sealed + b"0"):
        with pytest.raises(TamperedError):
            cipher.open(odd, "", bound)
    with pytest.raises(TamperedError):
        cipher.open(sealed, "", bound + b"0")


def test_two_contents_under_one_key_have_two_nonces():
    cipher = FileCipher(KEY)
    assert (
        len(
            {cipher.seal(bytes([each]))[:12] for each in range(200)} | {cipher.seal(b"", b"x")[:12]}
        )
        == 201
    )


def test_each_file_of_each_save_has_another_key():
    def sealed(session: str, sequence: int, rank: int, name: str) -> bytes:
        key = SaveKey(data_key_of(KEY, session, sequence), session, sequence)
        return key.file(rank, name).seal(b"the same")

    places = [
        (session, sequence, rank, name)
        for session in (SESSION, "f" * 16)
        for sequence in (1, 2, 11)
        for rank in (0, 1, 11)
        for name in ("0", "1", "objects", "record")
    ]
    assert len({sealed(*place) for place in places}) == len(places)


def test_the_file_of_keys_says_who_can_open_it_and_nothing_else():
    keys = Keys.wrap(KEY, SESSION, OTHER)
    data = keys.to_bytes()
    assert Keys.from_bytes(data, "") == keys and keys.unwrap(KEY, "") == OTHER
    for secret in (KEY, OTHER):
        assert secret not in data and secret.hex().encode() not in data
    with pytest.raises(WrongKeyError):
        keys.unwrap(OTHER, "")
    with pytest.raises(TamperedError):
        replace(keys, session="f" * 16).unwrap(KEY, "")
    assert Keys.wrap(KEY, SESSION, OTHER).check != keys.check


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_file_of_keys_is_a_typed_error(at: int, byte: int):
    data = bytearray(Keys.wrap(KEY, SESSION, OTHER).to_bytes())
    at %= len(data)
    if data[at] == byte:
        return
    data[at] = byte
    for odd in (bytes(data), bytes(data[:at])):
        with pytest.raises(IntegrityError):
            Keys.from_bytes(odd, "keys.json")


def test_without_its_library_encryption_is_refused_and_all_else_works(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'sidesave\[encryption\]'"):
        Encryption(key=KEY)
    code = (
        "import sys, sidesave.writer_daemon.process.server, sidesave; sidesave.Checkpointer, "
        "sidesave.Encryption"
    )
    code += "; print('cryptography' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
        == b"False\n"
    )


def test_a_message_does_not_show_its_key():
    sealing = Sealing(key=KEY, keys=b"{}")
    assert "Sealing()" in repr(sealing)


# The writer ---------------------------------------------------------------------------------------


@pytest.fixture
def session(tmp_path: Path, end_all: None) -> Iterator[Session]:
    (tmp_path / "run").mkdir()
    made = Session(tmp_path / "run")
    yield made
    made.close()


def sealed_save(session: Session, step: int, seed: int, sequence: int = 1) -> protocol.Save:
    save = session.stage(step, a_state(seed), sequence=sequence)
    keys = Keys.wrap(KEY, session.name, OTHER).to_bytes()
    return replace(save, sealing=Sealing(key=data_key_of(OTHER, session.name, sequence), keys=keys))


def test_a_save_that_is_tried_again_writes_the_same_bytes_under_the_same_nonces(session: Session):
    save = sealed_save(session, 1, seed=5)
    session.write(save)
    partial = next(Path(session.root).glob(".step-*"))
    first = {path.name: path.read_bytes() for path in partial.iterdir()}
    for path in partial.glob("rank-*"):
        path.unlink()
    session.respawn()
    session.write(replace(save, retry=True))
    assert {path.name: path.read_bytes() for path in partial.iterdir()} == first
    session.commit(save)


def test_a_save_that_is_tried_again_replaces_what_is_there_under_another_key(session: Session):
    """A daemon that died had linked it, which the next one, of a rank among several, cannot do."""
    save = sealed_save(session, 1, seed=5)
    session.write(save)
    partial = next(Path(session.root).glob(".step-*"))
    first = {path.name: path.read_bytes() for path in partial.iterdir()}
    for path in partial.iterdir():
        if path.name.startswith("rank-"):
            path.unlink()
        else:
            path.write_bytes(os.urandom(path.stat().st_size))
    session.respawn()
    session.write(replace(save, retry=True))
    assert {path.name: path.read_bytes() for path in partial.iterdir()} == first


def test_memory_that_was_handed_to_another_save_is_not_stored_under_this_one(
    session: Session, monkeypatch: pytest.MonkeyPatch
):
    """Not even in a file that is never published: two contents under one nonce would tell of each
    other.
    """
    save = sealed_save(session, 1, seed=5)
    stored: list[bytes] = []
    seal, arena = Sealed.seal, session.arena
    assert arena is not None

    def overtaken(self: Sealed, data: memoryview, offset: int, into: memoryview) -> None:
        arena.begin_generation()
        seal(self, data, offset, into)
        stored.append(bytes(into[:64]))

    monkeypatch.setattr(Sealed, "seal", overtaken)
    with pytest.raises(ProtocolError, match="handed to a later save"):
        session.write(save)
    assert stored
    for path in Path(session.root).rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert not any(each in data for each in stored), path


def test_as_many_files_beside_the_tensors_as_are_allowed_are_allowed_encrypted(session: Session):
    record = session.write(sealed_save(session, 1, seed=5))
    for more, fits in ((SMALL_NBYTES, True), (SMALL_NBYTES + 1, False)):
        file = FileRecord("0.rank-00000.file.enc", MAX_EXTRA_NBYTES + more, "0" * 32)
        data = replace(record, extra_files=(file,)).to_bytes()
        if fits:
            assert RankRecord.from_bytes(data, "").extra_files == (file,)
        else:
            with pytest.raises(IntegrityError, match="exceed the limit"):
                RankRecord.from_bytes(data, "")


def test_the_buffers_take_8_mib_in_all():
    assert IN_FLIGHT * BOUNCE_NBYTES == 8 << 20


def test_a_save_with_another_key_is_not_taken_for_this_one(session: Session):
    save = sealed_save(session, 1, seed=5)
    record = session.write(save)
    assert record.sealed and not record.part.own.tensors
    with pytest.raises(SidesaveError):
        session.commit(replace(save, sequence=2))
    session.commit(save)
    assert Path(session.root, "step-00000001/keys.json").exists()
