"""Writes one rank's part of a save: file images in shared memory become durable, published files.

Bytes go from the arena to storage by ``pwrite`` with O_DIRECT, without a copy: 16 MiB at a time,
several chunks in flight, while another thread digests the same memory. Writing may begin while the
trainer still fills the arena; it then follows the arena's fill level.

Files are written under temporary names as new inodes, made durable, and then linked to their final
names. A file that already has its final name was published by an earlier daemon of this save; it is
compared with the memory and kept. No file is ever replaced or reopened for writing, so files that
have not changed since the last save can be linked (:mod:`sidesave.writer_daemon.writing.frozen`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Final, TypeVar

from sidesave.errors import NoSpaceError, ProtocolError
from sidesave.stager.memory.arena import Arena, page_up
from sidesave.writer_daemon.commit import attempts, coordination
from sidesave.writer_daemon.format import tensor_file
from sidesave.writer_daemon.format.extra_files import unpack_files
from sidesave.writer_daemon.format.layout import Part
from sidesave.writer_daemon.format.manifest import FileRecord, RankRecord
from sidesave.writer_daemon.format.names import rank_file, record_file
from sidesave.writer_daemon.format.sealed_records import name_of_extra, seal_record
from sidesave.writer_daemon.protocol import Extent, Save
from sidesave.writer_daemon.sealing.keys import KEYS, SaveKey, save_key
from sidesave.writer_daemon.storage import Storage
from sidesave.writer_daemon.storage.base import temporary_part
from sidesave.writer_daemon.writing.frozen import FrozenFiles, is_frozen
from sidesave.writer_daemon.writing.links import link_all
from sidesave.writer_daemon.writing.record import build_record, read_part, small_file, whole_part
from sidesave.writer_daemon.writing.small_files import SmallFiles, publish
from sidesave.writer_daemon.writing.tensor_image import TensorImage

T = TypeVar("T")

_FOLLOW_POLL_S: Final = 0.0005
_FOLLOW_FROM: Final = 2
"""Writing begins when 1 / this of the state is copied.

For 1.4 GB, starting at once made the call 84 ms long and the save durable in 379-405 ms; starting
after half 79 and 401-430; after all of it 73 and 420-453. A memory copy took 65.
"""
MAX_OPEN: Final = 64
"""Tensor files open and reserved at a time: a process may be limited to 256 descriptors."""
IN_FLIGHT: Final = 4
"""Chunks written at a time: on ext4, a virtual disk, 1 reached 2.0-2.3 GB/s, 4 2.3-3.0 GB/s."""


class Writer:
    """Writes saves of one rank into one run directory, one save at a time."""

    def __init__(
        self,
        storage: Storage,
        attempt: str,
        trainer_gone: threading.Event,
        check_lease: Callable[[], None],
        commit_timeout_s: float = math.inf,
        run: Storage | None = None,
    ) -> None:
        """Write to ``storage``, the directory ``run`` or its fallback.

        ``attempt`` makes this daemon's temporary names unique. ``trainer_gone`` ends the wait for
        memory that the trainer has not filled, ``commit_timeout_s`` the wait for other ranks.
        ``check_lease`` raises if the lease is lost.
        """
        self._commit_timeout_s = commit_timeout_s
        self._check_lease = check_lease
        self._trainer_gone = trainer_gone
        self._storage = storage
        self._run = run
        self._frozen = FrozenFiles(storage)
        self._attempt = attempt
        self._pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="sidesave-write")
        self._digester = ThreadPoolExecutor(1, thread_name_prefix="sidesave-digest")
        self._tries = 0

    def close(self) -> None:
        """Stop the threads without waiting for a write that hangs in the kernel."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._digester.shutdown(wait=False, cancel_futures=True)

    def write(
        self,
        save: Save,
        arena: Arena,
        on_progress: Callable[[int, int], None],
        waiting: Callable[[], None] | None = None,
    ) -> RankRecord:
        """Make the save's files and record durable under their final names; blocks until done.

        Args:
            save: The save, whose extents are in ``arena``.
            arena: The staging memory; its generation must stay that of the save.
            on_progress: Called in any thread with bytes written and total bytes.
            waiting: Called repeatedly while waiting for other ranks; may raise.

        Raises:
            NoSpaceError: Too little space; detected before the first byte if the system reports it.
            WriteError: Storage failed; the files of this save stay until :func:`reclaim`.
            ProtocolError: The memory does not match the SAVE message.
        """
        self._tries += 1
        attempt = f"{self._attempt}.{self._tries}"  # files of earlier attempts have other names
        directory = attempts.partial_of(save)
        self._storage.check_root()
        alone = save.world_size == 1
        if not alone:
            attempts.refuse_aborted(self._storage, save)
        if not self._storage.make_directory(directory, 0o700) and alone and not save.retry:
            self._storage.remove_tree(directory)  # left by a failed save of the same step
            self._storage.make_directory(directory, 0o700)
        # After creating it: a directory made without the lease must not become complete, or
        # recovery would commit it.
        self._check_lease()
        _check_generation(save, arena)
        key = save_key(save.sealing, save.session, save.sequence)
        temporary = functools.partial(self._temporary, directory)
        replaces = key is not None and save.retry

        def images_of(extents: tuple[Extent, ...], first: int = 0) -> list[TensorImage]:
            numbered = enumerate(extents, first)
            return [TensorImage.of(save, arena, *each, directory, key) for each in numbered]

        with (
            SmallFiles(self._storage, directory, temporary, self._pool, replaces=replaces) as small,
            _ended(self._digester.submit(self._add_objects, save, arena, small, key)) as staged,
        ):
            images = images_of(save.files)
            linked = link_all(self._storage, self._run, save, attempt)
            self._store(save, images, arena, small, save.nbytes, on_progress)
            objects, extra_files = staged.result()
            part = None if save.table is None else read_part(save, arena, save.table)
            if save.unshared is not None:
                rest = images_of(save.unshared.files, len(images))
                unshared = read_part(save, arena, save.unshared.table)
                compared = self._digest_tensors([*images, *rest], unshared)
                unshared = replace(unshared, compared=compared)
                digests = "".join(map("\0".join, sorted(compared.items())))
                replica_digest = tensor_file.digest(digests.encode("utf-8", "surrogatepass")).hex()
                replica_digest = replica_digest if key is None else key.keyed_digest(replica_digest)
                if part is not None and coordination.are_alike(
                    self._storage,
                    save,
                    replica_digest,
                    self._commit_timeout_s,
                    waiting or self._check_lease,
                    attempt,
                ):
                    part = replace(part, replica_digest=replica_digest)
                else:
                    part = unshared
                    nbytes = sum(image.extent.nbytes for image in rest)
                    self._store(save, rest, arena, small, nbytes, lambda done, total: None)
                    images += rest
            small.wait()
            _check_generation(save, arena)
            for image in images:
                if not image.linked:
                    publish(
                        self._storage,
                        temporary(image.name),
                        image.final,
                        image.extent.nbytes,
                        image.reader(),
                        replaces=replaces,
                    )
            small.publish()
            about = save.metadata
            metadata = (
                "" if about is None else bytes(arena.view(about.offset, about.nbytes)).decode()
            )
            part = part or whole_part(save, images, linked)
            extra = tuple(extra_files.values())
            record = build_record(save, images, linked, objects, extra, part, metadata)
            record = record if key is None else seal_record(record, tuple(extra_files), key)
            content = record.to_bytes()
            self._storage.sync_directory("")  # before WRITTEN, or the directory could be lost
            small.add(record_file(save.rank), content)
            small.publish()
            self._storage.sync_directory(directory)
            self._frozen.wrote(save, content, images)
            on_progress(save.nbytes, save.nbytes)
            return record

    def _add_objects(
        self, save: Save, arena: Arena, small: SmallFiles, key: SaveKey | None
    ) -> tuple[FileRecord, dict[str, FileRecord]]:
        """Wait until all is staged, then start to write the objects file and extra files.

        Returns their entries; those of extra files are by their real names.
        """
        self._await_filled(save, arena, arena.nbytes)
        objects = bytes(arena.view(save.objects.offset, save.objects.nbytes))
        at = save.extra_files
        extra_files = {} if at is None else unpack_files(arena.view(at.offset, at.nbytes))
        name = rank_file(save.objects.name, save.rank, "msgpack")
        stored = {each: each for each in extra_files}
        if key is not None:
            name, objects = f"{name}.enc", key.file(save.rank, "objects").seal(objects)
            stored = {
                each: name_of_extra(number, save.rank) for number, each in enumerate(extra_files)
            }
            extra_files = {
                each: key.file(save.rank, stored[each]).seal(data)
                for each, data in extra_files.items()
            }

        def add(name: str, data: bytes) -> FileRecord:
            small.add(name, data)
            return small_file(name, data)

        if save.sealing is not None and save.rank == 0:
            small.add(KEYS, save.sealing.keys)
        return add(name, objects), {
            each: add(stored[each], data) for each, data in extra_files.items()
        }

    def _store(
        self,
        save: Save,
        images: list[TensorImage],
        arena: Arena,
        small: SmallFiles,
        total: int,
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Write images; link those that are the same as in the last save."""
        rewritten: list[TensorImage] = []
        same_size: list[tuple[TensorImage, bytearray]] = []
        for image in images:
            last_digests = self._frozen.digests(image.extent.name)
            if len(last_digests) == len(image.digests):
                same_size.append((image, last_digests))
            else:
                rewritten.append(image)
        if not save.retry:  # a repeated attempt may have space reserved already
            self._check_space(save, total - sum(image.extent.nbytes for image, _ in same_size))
        done = self._write_images(save, rewritten, arena, small, 0, total, on_progress)
        changed: list[TensorImage] = []
        for image, last_digests in same_size:
            if self._link_unchanged(save, image, last_digests, arena, small):
                done += image.extent.nbytes
                on_progress(done, total)
            else:
                changed.append(image)
        if changed and not save.retry:
            self._check_space(save, sum(image.extent.nbytes for image in changed))
        self._write_images(save, changed, arena, small, done, total, on_progress)

    def _link_unchanged(
        self,
        save: Save,
        image: TensorImage,
        last_digests: bytearray,
        arena: Arena,
        small: SmallFiles,
    ) -> bool:
        """Link an image's file if it has the digests of the last save's.

        Returns False if it has not, or if the link fails.
        """
        self._await_filled(save, arena, arena.nbytes)
        for chunk in image.chunks():
            place = image.digest_chunk(*chunk)
            if image.digests[place] != last_digests[place]:
                return False
        _check_generation(save, arena)
        before = self._frozen.sealed(image.extent.name)
        image.linked = self._frozen.link(image.name if before is None else before.name, image.final)
        if not image.linked:
            return False
        if image.sealed is not None and before is not None:
            image.sealed = image.sealed.linked_to(before)
        lists = image.lists()
        for old, (name, data) in zip(
            lists if before is None else before.lists(), lists.items(), strict=True
        ):
            if not self._frozen.link(old, f"{image.directory}/{name}"):
                small.add(name, data)
        return True

    def _write_images(
        self,
        save: Save,
        images: list[TensorImage],
        arena: Arena,
        small: SmallFiles,
        done: int,
        total: int,
        on_progress: Callable[[int, int], None],
    ) -> int:
        """Write images and start to write their digest lists.

        Returns ``done`` plus the bytes written.
        """
        lock = threading.Lock()
        stop = threading.Event()
        check = functools.partial(_check_generation, save, arena)

        def work(image: TensorImage, offset: int, nbytes: int) -> None:
            nonlocal done
            if stop.is_set():
                return
            assert image.output is not None
            end = image.extent.offset + offset + page_up(nbytes)
            self._await_filled(save, arena, max(end, arena.nbytes // _FOLLOW_FROM))
            if image.sealed is None:
                image.output.write_at(image.view(offset, page_up(nbytes)), offset)
            else:
                keeps = bool(self._storage.round_trip_s)
                view = image.view(offset, nbytes)
                for piece, at in image.sealed.pieces(view, offset, keeps=keeps, check=check):
                    image.output.write_at(piece, at)
            image.drop_pages(offset, nbytes)
            with lock:
                image.chunks_left -= 1
                last = image.chunks_left == 0
                done += nbytes
                on_progress(done, total)
            if last:
                image.output.finish(image.layout.nbytes)
                if image.sealed is not None:
                    add_lists(image)

        def digest(images: list[TensorImage]) -> None:
            # Not before all is staged: the trainer, which waits for its copy, needs the cores more
            # than the disk does.
            self._await_filled(save, arena, arena.nbytes)
            for image in images:
                if image.sealed is not None and not is_frozen(image.extent.name):
                    continue
                for chunk in image.chunks():
                    if stop.is_set():
                        return
                    image.digest_chunk(*chunk)
                if image.sealed is None:
                    add_lists(image)

        def add_lists(image: TensorImage) -> None:
            for name, content in image.lists().items():
                small.add(name, content)

        for first in range(0, len(images), MAX_OPEN):
            some = images[first : first + MAX_OPEN]
            try:
                for image in some:  # reserve everything before the first byte is written
                    temporary = self._temporary(image.directory, image.name)
                    image.output = self._storage.create(temporary, image.layout.nbytes, image.final)
                futures: list[Future[None]] = [self._digester.submit(digest, some)]
                for image in some:
                    chunks = list(image.chunks())
                    image.chunks_left = len(chunks)
                    futures += [self._pool.submit(work, image, *chunk) for chunk in chunks]
                _, unfinished = wait(futures, return_when=FIRST_EXCEPTION)
                if unfinished:
                    stop.set()
                    wait(futures)
                for future in futures:
                    future.result()
            finally:
                for image in some:
                    if image.output is not None:
                        image.output.close()
        return done

    def _digest_tensors(self, images: list[TensorImage], part: Part) -> dict[str, str]:
        """Return a digest for each tensor of ``part.compared``."""
        entries = {
            (image.container, entry.name): (image, entry)
            for image in images
            for entry in image.layout.entries
        }

        def digest(fqn: str) -> str:
            container = part.own.tensors[fqn].container
            if (container, fqn) not in entries:
                raise ProtocolError(f"{fqn} is not in the memory for {container}")
            image, entry = entries[container, fqn]
            return image.digest_tensor(entry)

        return dict(zip(part.compared, self._pool.map(digest, part.compared), strict=True))

    def _check_space(self, save: Save, nbytes: int) -> None:
        """Raise ``NoSpaceError`` if ``nbytes`` do not fit; each file is also reserved later."""
        free = self._storage.free_nbytes()
        if nbytes > free:
            message = f"step {save.step} needs {nbytes:,} bytes, {free:,} are free"
            raise NoSpaceError(errno.ENOSPC, message, self._storage.root)

    def _temporary(self, directory: str, name: str) -> str:
        return f"{directory}/.{temporary_part(name)}.{self._attempt}.{self._tries}"

    def _await_filled(self, save: Save, arena: Arena, end: int) -> None:
        """Wait until the trainer has filled the arena up to ``end``.

        No memory may be read before.
        """
        end = min(end, arena.nbytes)
        while arena.filled < end:
            if self._trainer_gone.is_set() and arena.filled < end:
                raise ProtocolError(f"the trainer died before step {save.step} was staged")
            _check_generation(save, arena)
            time.sleep(_FOLLOW_POLL_S)


def _check_generation(save: Save, arena: Arena) -> None:
    if arena.generation != save.generation:
        raise ProtocolError(
            f"the memory of step {save.step} holds generation {arena.generation} instead of "
            f"{save.generation}: it was handed to a later save, so nothing is published"
        )


@contextlib.contextmanager
def _ended(future: Future[T]) -> Generator[Future[T]]:
    """Wait for ``future`` at the end of the ``with`` block, also after an error."""
    try:
        yield future
    finally:
        wait([future])
