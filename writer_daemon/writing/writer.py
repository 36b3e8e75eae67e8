"""One rank's part of a save: images in shared memory become durable, published files.

The path of a byte: ``pwrite`` from the arena with O_DIRECT, 16 MiB at a time, several chunks in flight, while one more
thread digests the same memory. Nothing is copied. Writing may begin while the trainer still copies its state into the
arena: it follows the arena's mark.

Publish once: files are written under attempt names as new inodes, made durable, and only then linked to their final
names. A file that already has its final name was published by an earlier daemon of this save; it is compared with the
memory and kept. No file is ever replaced or reopened for writing, so what has not changed since the last save can be
linked (:mod:`sidesave.writer_daemon.writing.frozen`).
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import xxhash

from sidesave.errors import IntegrityError, NoSpaceError, ProtocolError
from sidesave.stager.memory.arena import Arena, page_up
from sidesave.writer_daemon.commit import coordination
from sidesave.writer_daemon.format import layout, manifest, tensor_file
from sidesave.writer_daemon.format.extra_files import unpack_files
from sidesave.writer_daemon.format.layout import Part
from sidesave.writer_daemon.format.manifest import FileRecord, RankRecord
from sidesave.writer_daemon.format.sealed_records import name_of_extra, seal_record
from sidesave.writer_daemon.format.tensor_file import DIGEST_NBYTES, TensorFile
from sidesave.writer_daemon.protocol import Extent, Save
from sidesave.writer_daemon.sealing.keys import KEYS, SaveKey, save_key
from sidesave.writer_daemon.storage import OutputFile, Storage
from sidesave.writer_daemon.writing.frozen import FrozenFiles, is_frozen
from sidesave.writer_daemon.writing.links import link_all
from sidesave.writer_daemon.writing.pace import Turns
from sidesave.writer_daemon.writing.record import build_record, read_part, small_file, whole_part
from sidesave.writer_daemon.writing.sealed import Sealed
from sidesave.writer_daemon.writing.small_files import CHUNK_NBYTES, SmallFiles, publish

T = TypeVar("T")

UTF_8: Final = ("utf-8", "surrogatepass")
_FOLLOW_POLL_S: Final = 0.0005
_FOLLOW_FROM: Final = 2
"""Writing begins when 1 / this of the state is copied. For 1.4 GB, starting at once made the call 84 ms long and the
save durable in 379-405 ms; from the half on 79 and 401-430; after all of it 73 and 420-453. A memory copy took 65."""
MAX_OPEN: Final = 64
"""Tensor files open at the same time, and reserved together: a process may have no more than 256 descriptors."""
IN_FLIGHT: Final = 4
"""Chunks written at the same time: 1 reached 2.0-2.3 GB/s on an ext4 virtual disk, 4 reached 2.3-3.0."""


@dataclass(slots=True)
class _TensorImage:
    """A tensor file on its way from the arena to its final name."""

    extent: Extent
    final: str
    temporary: str
    layout: TensorFile
    blocks: list[tuple[int, int]]
    digests: bytearray
    output: OutputFile | None = None
    chunks_left: int = 0
    linked: bool = False
    """It has its final name already: the last save had these very bytes."""
    sealed: Sealed | None = None
    """Where it is encrypted; ``blocks`` and ``digests`` are those of its memory then."""

    @property
    def name(self) -> str:
        """That of the file."""
        return os.path.basename(self.final)

    @property
    def origin(self) -> tuple[int, int]:
        """See ``record.Image``."""
        return (0, 0) if self.sealed is None else self.sealed.origin

    def lists(self, rank: int) -> dict[str, bytes]:
        """See ``record.Image``."""
        if self.sealed is not None:
            return self.sealed.lists()
        return {manifest.rank_file(self.extent.name, rank, "xxh3"): bytes(self.digests)}


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
        """Serve ``storage``; ``attempt`` makes this daemon's temporary names differ from any other's.

        ``trainer_gone`` ends the wait for memory that nobody fills any more; ``check_lease`` raises once the lease is
        lost; other ranks are waited for up to ``commit_timeout_s``. ``run`` is the run directory, if
        ``storage`` is another one.
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
        """Stop the threads; a write stuck in the kernel is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._digester.shutdown(wait=False, cancel_futures=True)

    def write(
        self,
        save: Save,
        arena: Arena,
        on_progress: Callable[[int, int], None],
        waiting: Callable[[], None] | None = None,
    ) -> RankRecord:
        """Make the save's files and record durable under their final names; blocking.

        Args:
            save: What to write; its extents lie in ``arena``.
            arena: The staging memory, whose generation must be the save's throughout.
            on_progress: Called from any thread with bytes written and bytes in all.
            waiting: Called now and then while other ranks are waited for; may raise.

        Raises:
            NoSpaceError: There is too little space, found before the first byte where the system tells.
            WriteError: Storage refused; everything of this save is left for :func:`reclaim`.
            ProtocolError: The memory does not hold what SAVE says.
        """
        self._tries += 1  # what an earlier try has left, and could not remove, has other names
        directory = coordination.partial_of(save)
        self._storage.check_root()
        alone = save.world_size == 1
        if not alone:
            coordination.refuse_aborted(self._storage, save)
        if not self._storage.make_directory(directory, 0o700) and alone and not save.retry:
            self._storage.remove_tree(directory)  # left by a failed save of the same step
            self._storage.make_directory(directory, 0o700)
        # Once it is there: made without the lease it must never become whole, or the next start would commit it.
        self._check_lease()
        _check_generation(save, arena)
        key = save_key(save.sealing, save.session, save.sequence)
        temporary = functools.partial(self._temporary, directory)
        replaces = key is not None and save.retry
        with (
            SmallFiles(self._storage, directory, temporary, self._pool, replaces=replaces) as small,
            _ended(self._digester.submit(self._add_objects, save, arena, small, key)) as staged,
        ):
            plan = functools.partial(self._plan, save, arena, directory, key)
            images = [plan(*each) for each in enumerate(save.files)]
            linked = link_all(self._storage, self._run, save, f"{self._attempt}.{self._tries}")
            self._store(save, images, arena, small, save.nbytes, on_progress)
            objects, extra_files = staged.result()
            part = None if save.table is None else read_part(save, arena, save.table)
            if save.unshared is not None:
                rest = [plan(*each) for each in enumerate(save.unshared.files, len(images))]
                unshared = read_part(save, arena, save.unshared.table)
                unshared = replace(unshared, compared=self._digest_tensors([*images, *rest], arena, unshared))
                digests = "".join(map("\0".join, sorted(unshared.compared.items())))
                replica_digest = tensor_file.digest(digests.encode(*UTF_8)).hex()
                replica_digest = replica_digest if key is None else key.keyed_digest(replica_digest)
                if part is not None and self._are_alike(save, replica_digest, waiting or self._check_lease):
                    part = replace(part, replica_digest=replica_digest)
                else:
                    part = unshared
                    nbytes = sum(image.extent.nbytes for image in rest)
                    self._store(save, rest, arena, small, nbytes, lambda done, total: None)
                    images += rest
            small.wait()
            _check_generation(save, arena)
            for image in (image for image in images if not image.linked):
                read = _reader(arena, image)
                publish(self._storage, image.temporary, image.final, image.extent.nbytes, read, replaces=replaces)
            small.publish()
            about = save.metadata
            metadata = "" if about is None else bytes(arena.view(about.offset, about.nbytes)).decode()
            part = part or whole_part(save, [*images], linked)
            extra = tuple(extra_files.values())
            record = build_record(save, [*images], linked, objects, extra, part, metadata)
            record = record if key is None else seal_record(record, tuple(extra_files), key)
            content = record.to_bytes()
            self._storage.sync_directory("")  # else what is WRITTEN could be lost with its directory
            small.add(manifest.record_file(save.rank), content)
            small.publish()
            self._storage.sync_directory(directory)
            written = {image.extent.name: (image.digests, image.sealed) for image in images}
            self._frozen.wrote(save, content, written, frozenset(image.extent.name for image in images if image.linked))
            on_progress(save.nbytes, save.nbytes)
            return record

    def _add_objects(
        self, save: Save, arena: Arena, small: SmallFiles, key: SaveKey | None
    ) -> tuple[FileRecord, dict[str, FileRecord]]:
        """Once all is staged, begin to write what is no tensor; returns it, the user's files by their true names."""
        self._await_filled(save, arena, arena.nbytes)
        objects = bytes(arena.view(save.objects.offset, save.objects.nbytes))
        at = save.extra_files
        extra_files = {} if at is None else unpack_files(arena.view(at.offset, at.nbytes))
        name, stored = manifest.rank_file(save.objects.name, save.rank, "msgpack"), {each: each for each in extra_files}
        if key is not None:
            name, objects = f"{name}.enc", key.file(save.rank, "objects").seal(objects)
            stored = {each: name_of_extra(number, save.rank) for number, each in enumerate(extra_files)}
            extra_files = {each: key.file(save.rank, stored[each]).seal(data) for each, data in extra_files.items()}
        small.add(name, objects)
        for each, data in extra_files.items():
            small.add(stored[each], data)
        if save.sealing is not None and save.rank == 0:
            small.add(KEYS, save.sealing.keys)
        return small_file(name, objects), {each: small_file(stored[each], data) for each, data in extra_files.items()}

    def _store(
        self,
        save: Save,
        images: list[_TensorImage],
        arena: Arena,
        small: SmallFiles,
        total: int,
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Write images, except those that the last save has written with the same bytes, which are linked."""
        known = [(image, self._frozen.digests(image.extent.name)) for image in images]
        likely = [(image, digests) for image, digests in known if len(digests) == len(image.digests)]
        some = [image for image, digests in known if len(digests) != len(image.digests)]
        if not save.retry:  # what is there already needs no more room
            self._check_space(save, total - sum(image.extent.nbytes for image, _ in likely))
        done = self._write_images(save, some, arena, small, 0, total, on_progress)
        changed: list[_TensorImage] = []
        for image, digests in likely:
            if self._link_unchanged(save, image, digests, arena, small):
                done += image.extent.nbytes
                on_progress(done, total)
            else:
                changed.append(image)
        if changed and not save.retry:
            self._check_space(save, sum(image.extent.nbytes for image in changed))
        self._write_images(save, changed, arena, small, done, total, on_progress)

    def _link_unchanged(
        self, save: Save, image: _TensorImage, known: bytearray, arena: Arena, small: SmallFiles
    ) -> bool:
        """Whether an image has these digests, and now has its name; else it is left at the first block that has not."""
        self._await_filled(save, arena, arena.nbytes)
        turns = Turns(arena, self._trainer_gone.is_set)
        for offset in range(0, image.extent.nbytes, CHUNK_NBYTES):
            nbytes = min(CHUNK_NBYTES, image.extent.nbytes - offset)
            turns.take(nbytes)
            some = _digest_chunk(image, arena, offset, nbytes)
            arena.drop_pages(image.extent.offset + offset, nbytes)
            if image.digests[some] != known[some]:
                return False
        _check_generation(save, arena)
        before, directory = self._frozen.sealed(image.extent.name), os.path.dirname(image.final)
        image.linked = self._frozen.link(image.name if before is None else before.name, image.final)
        if not image.linked:
            return False
        if image.sealed is not None and before is not None:
            image.sealed = image.sealed.linked_to(before)
        lists = image.lists(save.rank)
        for old, (name, data) in zip(lists if before is None else before.lists(), lists.items(), strict=True):
            if not self._frozen.link(old, f"{directory}/{name}"):
                small.add(name, data)
        return True

    def _write_images(
        self,
        save: Save,
        images: list[_TensorImage],
        arena: Arena,
        small: SmallFiles,
        done: int,
        total: int,
        on_progress: Callable[[int, int], None],
    ) -> int:
        """Write images, and begin to write their digest lists.

        Returns how many of ``total`` bytes are done then, of which ``done`` were before.
        """
        lock = threading.Lock()
        stop = threading.Event()
        check = functools.partial(_check_generation, save, arena)
        # Each has its own: the same bytes are written and digested, at about the same time.
        writing, digesting = (Turns(arena, lambda: stop.is_set() or self._trainer_gone.is_set()) for _ in range(2))

        def work(image: _TensorImage, offset: int) -> None:
            nonlocal done
            if stop.is_set():
                return
            assert image.output is not None
            nbytes = min(CHUNK_NBYTES, image.extent.nbytes - offset)
            end = image.extent.offset + offset + page_up(nbytes)
            self._await_filled(save, arena, max(end, arena.nbytes // _FOLLOW_FROM))
            writing.take(nbytes)
            if stop.is_set():
                return
            if image.sealed is None:
                image.output.write_at(arena.view(image.extent.offset + offset, page_up(nbytes)), offset)
            else:
                data, keeps = arena.view(image.extent.offset + offset, nbytes), bool(self._storage.round_trip_s)
                for piece, at in image.sealed.pieces(data, offset, keeps=keeps, check=check):
                    image.output.write_at(piece, at)
            arena.drop_pages(image.extent.offset + offset, nbytes)
            with lock:
                image.chunks_left -= 1
                last = image.chunks_left == 0
                done += nbytes
                on_progress(done, total)
            if last:
                image.output.finish(image.layout.nbytes)
                for name, content in image.lists(save.rank).items() if image.sealed is not None else ():
                    small.add(name, content)

        def digest(images: list[_TensorImage]) -> None:
            # Not before all is staged: the trainer, which waits for its copy, needs the cores more than the disk does.
            self._await_filled(save, arena, arena.nbytes)
            for image in (one for one in images if one.sealed is None or is_frozen(one.extent.name)):
                for offset in range(0, image.extent.nbytes, CHUNK_NBYTES):
                    nbytes = min(CHUNK_NBYTES, image.extent.nbytes - offset)
                    digesting.take(nbytes)
                    if stop.is_set():
                        return
                    _digest_chunk(image, arena, offset, nbytes)
                    arena.drop_pages(image.extent.offset + offset, nbytes)
                for name, content in image.lists(save.rank).items() if image.sealed is None else ():
                    small.add(name, content)

        for first in range(0, len(images), MAX_OPEN):
            some = images[first : first + MAX_OPEN]
            try:
                for image in some:  # reserve everything before the first byte is written
                    image.output = self._storage.create(image.temporary, image.layout.nbytes, image.final)
                futures: list[Future[None]] = [self._digester.submit(digest, some)]
                for image in some:
                    offsets = range(0, image.extent.nbytes, CHUNK_NBYTES)
                    image.chunks_left = len(offsets)
                    futures += [self._pool.submit(work, image, offset) for offset in offsets]
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

    def _digest_tensors(self, images: list[_TensorImage], arena: Arena, part: Part) -> dict[str, str]:
        """For each tensor of ``part.compared`` 128 bits of its name, container, dtype, shape and all its bytes."""
        places = {
            (layout.container_of(image.extent.name), entry.name): (image.extent.offset + entry.offset, entry)
            for image in images
            for entry in image.layout.entries
        }

        def digest(fqn: str) -> str:
            container = part.own.tensors[fqn].container
            if (container, fqn) not in places:
                raise ProtocolError(f"{fqn} is not in the memory for {container}")
            offset, entry = places[container, fqn]
            about = f"{fqn}\0{container.removesuffix(layout.UNSHARED)}\0{entry.dtype}\0{entry.shape}\0"
            digest_state = xxhash.xxh3_128(about.encode(*UTF_8))
            for begin in range(offset, offset + entry.nbytes, CHUNK_NBYTES):
                nbytes = min(CHUNK_NBYTES, offset + entry.nbytes - begin)
                digest_state.update(arena.view(begin, nbytes))
                arena.drop_pages(begin, nbytes)
            return digest_state.hexdigest()

        return dict(zip(part.compared, self._pool.map(digest, part.compared), strict=True))

    def _are_alike(self, save: Save, replica_digest: str, waiting: Callable[[], None]) -> bool:
        def publish(name: str) -> None:
            self._storage.publish_bytes(coordination.partial_of(save), name, b"", f"{self._attempt}.{self._tries}")

        return coordination.are_alike(self._storage, save, replica_digest, self._commit_timeout_s, waiting, publish)

    def _check_space(self, save: Save, nbytes: int) -> None:
        """Refuse what does not fit before a byte is written; the file system then reserves file by file."""
        free = self._storage.free_nbytes()
        if nbytes > free:
            message = f"step {save.step} needs {nbytes:,} bytes, {free:,} are free"
            raise NoSpaceError(errno.ENOSPC, message, self._storage.root)

    def _temporary(self, directory: str, name: str) -> str:
        return f"{directory}/.{name}.{self._attempt}.{self._tries}"

    def _plan(
        self, save: Save, arena: Arena, directory: str, key: SaveKey | None, number: int, extent: Extent
    ) -> _TensorImage:
        name = manifest.rank_file(extent.name, save.rank, "safetensors")
        try:
            start = arena.view(extent.offset, min(8, extent.nbytes))
            header = arena.view(extent.offset, tensor_file.header_nbytes(start, extent.nbytes, name))
            layout = tensor_file.parse_tensor_file(header, name)
            arena.view(extent.offset, page_up(extent.nbytes))
        except (IntegrityError, ValueError) as error:
            raise ProtocolError(f"arena {save.arena} holds no tensor file at {extent.offset}: {error}") from error
        if layout.nbytes != extent.nbytes:
            raise ProtocolError(f"{name}: SAVE says {extent.nbytes} bytes, its header {layout.nbytes}")
        blocks = tensor_file.digest_blocks(layout)
        digests = bytearray(DIGEST_NBYTES * len(blocks))
        sealed = None
        if key is not None:
            cipher = key.file(save.rank, str(number))
            sealed = Sealed(number, save.rank, layout.nbytes, cipher, (save.sequence, number))
            name = sealed.name
        final, temporary = f"{directory}/{name}", self._temporary(directory, name)
        return _TensorImage(extent, final, temporary, layout, blocks, digests, sealed=sealed)

    def _await_filled(self, save: Save, arena: Arena, end: int) -> None:
        """Wait until the trainer has copied the state up to ``end``; it may still be at it. Nothing is read before."""
        end = min(end, arena.nbytes)
        while arena.filled < end:
            if self._trainer_gone.is_set() and arena.filled < end:
                raise ProtocolError(f"the trainer died before step {save.step} was staged")
            _check_generation(save, arena)
            time.sleep(_FOLLOW_POLL_S)


def _reader(arena: Arena, image: _TensorImage) -> Callable[[int, int], memoryview]:
    base = image.extent.offset
    if image.sealed is not None:
        return image.sealed.reader(arena.view(base, image.extent.nbytes))
    return lambda offset, nbytes: arena.view(base + offset, nbytes)


def _digest_chunk(image: _TensorImage, arena: Arena, offset: int, nbytes: int) -> slice:
    """Digest the blocks that begin in a chunk; the last of them may reach into the next chunk.

    Returns where their digests are in the list.
    """
    first = bisect.bisect_left(image.blocks, (offset, 0))
    last = bisect.bisect_left(image.blocks, (offset + nbytes, 0))
    place = slice(first * DIGEST_NBYTES, last * DIGEST_NBYTES)
    if first == last:
        return place
    base = image.blocks[first][0]
    view = arena.view(image.extent.offset + base, sum(image.blocks[last - 1]) - base)
    digests = [tensor_file.digest(view[start - base : start - base + size]) for start, size in image.blocks[first:last]]
    image.digests[place] = b"".join(digests)
    return place


def _check_generation(save: Save, arena: Arena) -> None:
    if arena.generation != save.generation:
        raise ProtocolError(
            f"the memory of step {save.step} holds generation {arena.generation} instead of {save.generation}: "
            "it was handed to a later save, so nothing is published"
        )


@contextlib.contextmanager
def _ended(future: Future[T]) -> Generator[Future[T]]:
    """Whatever happens, this is over afterwards."""
    try:
        yield future
    finally:
        wait([future])
