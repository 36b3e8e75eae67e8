"""A run in the tests' object store, and what it must hold."""

from object_server import ObjectServer
from trainers import a_state, same

import sidesave

URL = "s3://bucket/runs/exp"
WRITES = ("PUT", "PUT-NEW", "START", "PART", "COMPLETE")


def check_store(server: ObjectServer, *steps: int) -> None:
    """These steps are all there is, whole and bit for bit; the server answers from here on."""
    server.fault = lambda request, number: None
    options = server.options
    found = sidesave.find(URL, storage_options=options)
    assert sorted(info.step for info in found) == [*steps]
    for info in found:
        assert sidesave.verify(info, storage_options=options).ok
        assert same(sidesave.load(info, storage_options=options), a_state(info.step))
