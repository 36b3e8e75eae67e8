"""Bytes that are sent and stored to do harm."""

import struct

MSGPACK_BOMBS = {
    "deep": b"\x91" * 100_000 + b"\xc0",
    "lists that say they are long": (b"\xdd" + struct.pack(">I", 900_000)) * 1000 + b"\0" * 900_000,
    "maps that say they are long": (b"\xdf" + struct.pack(">I", 400_000) + b"\xa1a") * 500
    + b"\0" * 900_000,
    "4 GiB of bytes": b"\x81\xa1a\xc6\xff\xff\xff\xff",
    "4 GiB of text": b"\x81\xa1a\xdb\xff\xff\xff\xff",
    "4 GiB of extension": b"\x81\xa1a\xc9\xff\xff\xff\xff\x05",
    "timestamp out of range": b"\x81\xa1a\xc7\x0c"
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    "two objects": b"\x80\x80",
    "keys that are no text": b"\x81\x01\x01",
    "nothing": b"",
}
