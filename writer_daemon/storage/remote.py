"""A run directory in an object store, for who reads: a prefix, below which a key stands for each file.

There are no locks and no descriptors here: what is deleted or replaced while it is read is missing in the middle, or
does not match its digests. What one request costs is latency, so many are made at once, each for a range.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from sidesave.errors import InvalidArgumentError, NoSpaceError, WriteError, WriteStalledError
from sidesave.writer_daemon.storage.base import InputFile, ReadStorage

try:
    import obstore
    from obstore import exceptions
    from obstore.store import AzureStore, GCSStore, HTTPStore, LocalStore, MemoryStore, ObjectStore, S3Store
except ModuleNotFoundError as error:
    text = f"URLs need {error.name}, which an extra brings: pip install 'sidesave[remote]'"
    raise InvalidArgumentError(text) from error

logger = logging.getLogger(__name__)

AT_ONCE: Final = 16
"""Requests at a time: with 8 MiB each and 50 ms until the first byte that is 2.5 GiB/s, more than most links have."""
HEAD_NBYTES: Final = 256 << 10
"""Read of a tensor file with its length: more than most headers, and no dearer than less."""
_AHEAD: Final = 4
"""Ranges that are asked for before the one that is waited for has come: 16 MiB of a check, a part of a copy."""
_CHUNK_NBYTES: Final = 1 << 20
PART_NBYTES: Final = 5 << 20
"""Of an upload in parts, the least that S3 takes: what is in memory besides is this times the requests at once."""
_MAX_PARTS: Final = 10_000
"""S3 takes no more for one object."""
_SETTINGS: Final = ("client_options", "retry_config", "credential_provider")
"""Options of obstore's that are no strings; all others are its configuration of the store."""
_RETRIES: Final[Any] = {"max_retries": 1000}
"""Of a request, within the library's 3 minutes: its own limit of 10 is used up after seconds without a network."""
_FEW_RETRIES: Final[Any] = {"max_retries": 3}
"""Of a copy: what a store does not copy, for whatever reason, can be uploaded."""
_PAST_THE_END: Final = re.compile(r"\b416\b|range was invalid|[Ii]nvalid ?[Rr]ange")
_FULL: Final = re.compile(r"\b507 Insufficient Storage|<Code>\w*(Quota\w*Exceeded|StorageFull)</Code>")
_INSTANCE_ROLE: Final = "//169.254.169.254/"
"""Where clouds tell their machines who they are: asked when nothing else says so."""
_memory: Final[dict[str, MemoryStore]] = {}


def memory_store(bucket: str) -> MemoryStore:
    """What ``memory://bucket`` means in this process, for tests."""
    return _memory.setdefault(bucket, MemoryStore())


class Bucket:
    """A prefix in an object store, and what can be asked of it; keys are paths below it. Thread-safe."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        """Prepare a client of ``root``; ``InvalidArgumentError`` where the options are none of its. Asks nothing."""
        self.root = root
        if options and root.startswith("file:"):  # whose store has none, and so would refuse none
            names = ", ".join(sorted(map(str, options)))
            raise InvalidArgumentError(f"{root}: a directory takes no storage_options, and these are given: {names}")
        try:
            self._store, self._prefix = _connect(root, options)
            self._impatient = functools.partial(_connect, root, {**options, "retry_config": _FEW_RETRIES})
        except (exceptions.BaseError, TypeError, ValueError) as error:
            # Without its values, and without a cause that has them.
            told = isinstance(error, exceptions.UnknownConfigurationKeyError)
            hint = _first_line(error) if told else "a value is none, or an option is not known"
            raise InvalidArgumentError(f"{root}: storage_options are not those of this store: {hint}") from None

    # Reading ---------------------------------------------------------------------------------------------------

    def list_level(self, key: str) -> tuple[list[str], list[str]]:
        """Names directly below a key: those that lead on, and those of objects. One request for every 1000."""
        with self._doing("cannot list", key):
            found = obstore.list_with_delimiter(self._store, self._key(key) or None)
        levels = [each.rpartition("/")[2] for each in found["common_prefixes"]]
        objects = [each["path"].rpartition("/")[2] for each in found["objects"]]
        return [name for name in levels if name], [name for name in objects if name]

    def list_all(self, key: str, after: str = "") -> list[str]:
        """The keys of all objects below a key, in order; only those behind the key ``after``, if that is given."""
        offset = self._key(after) if after else None
        with self._doing("cannot list", key):
            found = [each["path"] for some in obstore.list(self._store, self._key(key), offset=offset) for each in some]
        cut = len(self._prefix) + 1 if self._prefix else 0
        # Not every server knows of offsets: Azurite answers with all there is.
        return sorted(path[cut:] for path in found if offset is None or path > offset)

    def has_any(self, key: str) -> bool:
        """Whether there is an object below a key; one request."""
        with self._doing("cannot list", key):
            return next(iter(obstore.list(self._store, self._key(key), chunk_size=1)), None) not in (None, [])

    def nbytes_of(self, key: str) -> int | None:
        """The length of an object, None where there is none; one request."""
        try:
            with self._doing("cannot ask for", key):
                return obstore.head(self._store, self._key(key))["size"]
        except WriteError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def read(self, key: str, max_nbytes: int) -> bytes | None:
        """A small object's content, None where there is none; longer than ``max_nbytes`` is an error. One request."""
        try:
            with self._doing("cannot read", key):
                result = obstore.get(self._store, self._key(key))
                nbytes = result.meta["size"]
                if nbytes > max_nbytes:
                    text = f"cannot read: {nbytes:,} bytes, over the limit of {max_nbytes:,}"
                    raise WriteError(errno.EFBIG, text, self.full(key))
                return bytes(result.bytes())
        except WriteError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def read_into(self, key: str, offset: int, window: memoryview) -> tuple[int, int]:
        """Fill memory with an object's bytes from ``offset`` on; how many there were, and the object's length.

        Blocks for one request, of which a piece of 1 MiB at a time is in memory besides.
        """
        done = 0
        if not window:
            return 0, 0
        with self._doing(f"cannot read {len(window):,} bytes at byte {offset:,}", key):
            try:
                wanted = {"range": (offset, offset + len(window))}
                result = obstore.get(self._store, self._key(key), options=wanted)  # pyright: ignore[reportArgumentType]
            except exceptions.BaseError as error:
                if _PAST_THE_END.search(str(error)):
                    return 0, 0
                raise
            for chunk in result.stream(min_chunk_size=_CHUNK_NBYTES):
                part = memoryview(chunk)
                if done + len(part) > len(window):
                    raise exceptions.GenericError("the answer is longer than what was asked for")
                window[done : done + len(part)] = part
                done += len(part)
        return done, result.meta["size"]

    # Writing ---------------------------------------------------------------------------------------------------

    def create(self, key: str, data: bytes) -> bool:
        """Put an object unless there is one; False where there is, which may be this one, put by a lost request."""
        try:
            with self._doing("cannot create", key):
                obstore.put(self._store, self._key(key), data, mode="create", use_multipart=False)
        except WriteError as error:
            if error.errno == errno.EEXIST:
                return False
            raise
        return True

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Put a small object, in the place of what is there."""
        with self._doing(f"cannot write {len(data):,} bytes", key):
            obstore.put(self._store, self._key(key), data, use_multipart=False)

    def put_parts(self, key: str, nbytes: int, parts: Iterator[memoryview], at_once: int) -> None:
        """Put an object of ``nbytes`` bytes that come one after the other, ``at_once`` requests at a time.

        No more than one part is one request. It is there when this returns, and nothing of it before; where ``parts``
        raises, nothing ever is. Memory of ``parts`` is not copied, and may be read until this returns.
        """
        with self._doing(f"cannot write {nbytes:,} bytes", key):
            size = max(PART_NBYTES, -(-nbytes // _MAX_PARTS))
            several = nbytes > PART_NBYTES
            kept = isinstance(self._store, MemoryStore)  # it goes on with the memory that it was given
            content = map(bytes, parts) if kept else parts
            obstore.put(
                self._store, self._key(key), content, use_multipart=several, chunk_size=size, max_concurrency=at_once
            )

    def copy(self, source: str, target: str) -> bool:
        """Have the store copy an object; False where it does not, as where there is none: then it has to be put.

        Blocks until it is there. S3 copies 5 GB at most. Azure may answer before it has copied, so it is not asked.
        """
        if isinstance(self._store, AzureStore):
            return False
        try:
            with self._doing("cannot copy", source):
                obstore.copy(self._impatient()[0], self._key(source), self._key(target))
        except WriteError as error:
            logger.debug("%s is not copied: %s", self.full(source), error)
            return False
        return self.nbytes_of(target) is not None  # a server may have begun its answer before it knew

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects; no error for those that are not there."""
        if keys:
            with self._doing("cannot remove", keys[0]):
                try:
                    obstore.delete(self._store, [self._key(key) for key in keys])
                except FileNotFoundError:  # which ends it, where each is a request of its own
                    for key in keys if len(keys) > 1 else ():
                        with contextlib.suppress(FileNotFoundError):
                            obstore.delete(self._store, self._key(key))

    # -----------------------------------------------------------------------------------------------------------

    def full(self, key: str) -> str:
        """The URL of a key, for messages."""
        return f"{self.root}/{key}" if key else self.root

    def _key(self, key: str) -> str:
        return "/".join(filter(None, (self._prefix, key)))

    @contextlib.contextmanager
    def _doing(self, what: str, key: str) -> Generator[None]:
        """Make a ``WriteError`` of what fails, without what a server says of credentials, and without a cause."""
        try:
            yield
        except WriteError:
            raise
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise WriteError(errno.EEXIST, f"{what}: there is such an object already", self.full(key)) from None
        except FileNotFoundError:
            raise WriteError(errno.ENOENT, f"{what}: there is no such object", self.full(key)) from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            if _FULL.search(str(error)):
                raise NoSpaceError(errno.EDQUOT, f"{what}: the quota is used up", self.full(key)) from None
            check = "check the credentials, what they may do here, the region and the endpoint"
            raise WriteError(errno.EACCES, f"{what}: the store denies access: {check}", self.full(key)) from None
        except (exceptions.BaseError, OSError, ValueError) as error:
            if "(os error 20)" in str(error):  # a file in a directory's place
                raise WriteError(errno.ENOENT, f"{what}: there is no such file", self.full(key)) from None
            if _INSTANCE_ROLE in str(error):
                text = f"{what}: there are no credentials, neither in the environment nor by a role of this machine"
                raise WriteError(errno.EACCES, text, self.full(key)) from None
            if _FULL.search(str(error)):
                raise NoSpaceError(errno.ENOSPC, f"{what}: the store is full", self.full(key)) from None
            stalled = "kind: Timeout" in str(error)
            kind, code = (WriteStalledError, errno.ETIMEDOUT) if stalled else (WriteError, errno.EIO)
            raise kind(code, f"{what}: {_first_line(error)}", self.full(key)) from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # obstore's, for an endpoint that is no URL for instance
                raise
            text = f"{what}: obstore has given up: check the endpoint and the other options of the store"
            raise WriteError(errno.EINVAL, text, self.full(key)) from None


class ObjectStorage(ReadStorage):
    """The prefix ``root``, a URL as ``urls.normalized`` gives it. Nothing is asked before something is read."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        """Prepare a client; ``InvalidArgumentError`` where the options are none of its."""
        self.root = root
        self.can_list = not root.startswith("http")
        self.bucket = Bucket(root, options)

    def close(self) -> None:
        return

    def list_directory(self, name: str) -> list[str]:
        if not self.can_list:
            raise InvalidArgumentError(f"{self.root}: http cannot list what there is; give the URL of one step")
        levels, objects = self.bucket.list_level(self.key_of(name))
        return [*levels, *objects]

    def read(self, path: str, max_nbytes: int) -> bytes | None:
        return self.bucket.read(self.key_of(path), max_nbytes)

    @contextlib.contextmanager
    def open(self, path: str) -> Generator[InputFile]:
        head = memoryview(bytearray(HEAD_NBYTES))
        filled, nbytes = self.bucket.read_into(self.key_of(path), 0, head)
        yield _ObjectInput(self, path, head[:filled], nbytes)

    def read_into(self, path: str, offset: int, window: memoryview) -> int:
        """Fill memory with a file's bytes from ``offset`` on; how many there were, fewer where the file ends.

        Thread-safe; blocks for one request, of which a piece of 1 MiB at a time is in memory besides.
        """
        return self.bucket.read_into(self.key_of(path), offset, window)[0]

    def key_of(self, path: str) -> str:
        """The key of a file or directory of the run, below the run's own."""
        return path


class _ObjectInput(InputFile):
    """A file whose beginning came with its length."""

    ahead = _AHEAD

    def __init__(self, storage: ObjectStorage, path: str, head: memoryview, nbytes: int) -> None:
        self._storage, self._path, self._head = storage, path, head
        self.nbytes = nbytes

    def read_at(self, offset: int, nbytes: int) -> memoryview:
        nbytes = max(min(nbytes, self.nbytes - offset), 0)
        if offset + nbytes <= len(self._head):
            return self._head[offset : offset + nbytes]
        window = memoryview(bytearray(nbytes))
        return window[: self._storage.read_into(self._path, offset, window)]

    def read_into(self, offset: int, window: memoryview) -> int:
        return self._storage.read_into(self._path, offset, window)

    def read_each(self, spans: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        with ThreadPoolExecutor(_AHEAD, "sidesave-ahead") as pool:
            asked: deque[Future[memoryview]] = deque()
            for span in spans:
                asked.append(pool.submit(self.read_at, *span))
                if len(asked) == _AHEAD:
                    yield asked.popleft().result()
            while asked:
                yield asked.popleft().result()


def _connect(url: str, options: Mapping[str, Any]) -> tuple[ObjectStore, str]:
    """A client of the bucket of a URL, and the key that the URL leads to in it."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    settings: dict[str, Any] = {name: options[name] for name in _SETTINGS if name in options}
    config: Any = {name: value for name, value in options.items() if name not in _SETTINGS}
    if scheme in ("s3", "gs", "az"):
        settings.setdefault("retry_config", _RETRIES)
    match scheme:
        case "s3":
            return S3Store(bucket, config=config, **settings), key
        case "gs":
            return GCSStore(bucket, config=config, **settings), key
        case "az":
            return AzureStore(bucket, config=config, **settings), key
        case "file":
            return LocalStore("/", automatic_cleanup=True), rest.strip("/")  # else empty directories are prefixes
        case "memory":
            return memory_store(bucket), key
        case _:
            client: Any = {"allow_http": scheme == "http", **settings.pop("client_options", {})}
            return HTTPStore(url, client_options=client, **config, **settings), ""


def _first_line(error: Exception) -> str:
    """What an error says of the transport: no query, which may be a signature, and of an answer only its code."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    code = re.search(r"<Code>(\w{1,80})</Code>", text)
    text = re.sub(r"(status code: \d+[^:]*):.*", r"\1", re.sub(r"\?\S*", "", text))
    return (text + (f" ({code[1]})" if code else ""))[:400]
