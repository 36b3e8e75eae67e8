"""Messages about a save as the bookkeeping of the daemon needs them."""

from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.protocol import Extent, Failed, Save

ATTEMPT = 3
OBJECTS = Extent(name="objects", offset=4096, nbytes=10)


def a_save(save_id: int, world_size: int = 1) -> Save:
    return Save(
        attempt=ATTEMPT,
        save_id=save_id,
        arena=1,
        generation=1,
        step=save_id * 10,
        session="0123456789abcdef",
        sequence=save_id,
        rank=0,
        world_size=world_size,
        files=(),
        objects=OBJECTS,
        parent=None,
        replace=False,
        pickled=False,
        created_s=0.0,
        torch_version="",
        retry=False,
    )


def an_info(save: Save, nbytes: int = 100) -> CheckpointInfo:
    """Return the checkpoint that a commit of ``save`` has made."""
    path = f"/run/step-{save.step:08d}"
    return CheckpointInfo(
        save.step, path, nbytes, save.session, save.sequence, None, save.created_s
    )


def a_failure(save_id: int) -> Failed:
    return Failed(
        attempt=ATTEMPT, save_id=save_id, error="WriteError", message="no", errno=5, path="/x"
    )
