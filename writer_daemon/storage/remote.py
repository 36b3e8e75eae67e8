"""A run directory in an object store, for reading: a prefix with one key for each file.

There are no locks and no descriptors: a file that is deleted or replaced while it is read goes
missing, or does not match its digests. Requests have a high latency, so many run at once, each for
a range.
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
    from obstore.store import (
        AzureStore,
        GCSStore,
        HTTPStore,
        LocalStore,
        MemoryStore,
        ObjectStore,
        S3Store,
    )
except ModuleNotFoundError as error:
    text = f"URLs need {error.name}: pip install 'sidesave[remote]'"
    raise InvalidArgumentError(text) from error

logger = logging.getLogger(__name__)

AT_ONCE: Final = 16
"""Concurrent requests: with 8 MiB each and a latency of 50 ms they can reach 2.5 GiB/s."""
HEAD_NBYTES: Final = 256 << 10
"""Bytes read together with a file's length; most headers fit."""
_AHEAD: Final = 4
"""Ranges requested ahead."""
_CHUNK_NBYTES: Final = 1 << 20
PART_NBYTES: Final = 5 << 20
"""Size of an upload's parts: the minimum of S3. Uploads buffer up to this much for each request."""
_MAX_PARTS: Final = 10_000
"""S3's maximum number of parts of one object."""
_SETTINGS: Final = ("client_options", "retry_config", "credential_provider")
"""Options that obstore takes as arguments; all others belong to its ``config``."""
_RETRIES: Final[Any] = {"max_retries": 1000}
"""Retries of a request within the library's 3 minutes.

The library's default of 10 lasts only seconds without a network.
"""
_FEW_RETRIES: Final[Any] = {"max_retries": 3}
"""Retries of a copy: if the store cannot copy an object, it is uploaded."""
_PAST_THE_END: Final = re.compile(r"\b416\b|range was invalid|[Ii]nvalid ?[Rr]ange")
_FULL: Final = re.compile(
    r"\b507 Insufficient Storage|<Code>\w*(Quota\w*Exceeded|StorageFull)</Code>"
)
_INSTANCE_ROLE: Final = "//169.254.169.254/"
"""The address of a cloud's metadata service, asked if no other credentials exist."""
_memory: Final[dict[str, MemoryStore]] = {}


def memory_store(bucket: str) -> MemoryStore:
    """Return this process's store for ``memory://bucket``, for tests."""
    return _memory.setdefault(bucket, MemoryStore())


class Bucket:
    """A prefix in an object store and its requests; keys are relative to it. Thread-safe."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        """Create a client; raises ``InvalidArgumentError`` for invalid options.

        Sends no request.
        """
        self.root = root
        if options and root.startswith("file:"):  # obstore would ignore them
            names = ", ".join(sorted(map(str, options)))
            raise InvalidArgumentError(f"{root}: file URLs take no storage_options; got {names}")
        try:
            self._store, self._prefix = _connect(root, options)
            self._impatient = functools.partial(
                _connect, root, {**options, "retry_config": _FEW_RETRIES}
            )
        except (exceptions.BaseError, TypeError, ValueError) as error:
            # Show neither the options' values nor a cause that contains them.
            is_unknown_key = isinstance(error, exceptions.UnknownConfigurationKeyError)
            hint = (
                _first_line(error)
                if is_unknown_key
                else "a value is invalid, or an option is unknown"
            )
            raise InvalidArgumentError(
                f"{root}: storage_options do not fit this store: {hint}"
            ) from None

    # Reading --------------------------------------------------------------------------------------

    def list_level(self, key: str) -> tuple[list[str], list[str]]:
        """Return the names of prefixes and objects directly below a key; one request per 1000."""
        with self._doing("cannot list", key):
            listing = obstore.list_with_delimiter(self._store, self._key(key) or None)
        levels = [each.rpartition("/")[2] for each in listing["common_prefixes"]]
        objects = [each["path"].rpartition("/")[2] for each in listing["objects"]]
        return [name for name in levels if name], [name for name in objects if name]

    def list_all(self, key: str, after: str = "") -> list[str]:
        """Return the sorted keys of all objects below a key, or of those after key ``after``."""
        offset = self._key(after) if after else None
        with self._doing("cannot list", key):
            pages = obstore.list(self._store, self._key(key), offset=offset)
            paths = [each["path"] for page in pages for each in page]
        cut = len(self._prefix) + 1 if self._prefix else 0
        # Some servers ignore the offset (Azurite).
        return sorted(path[cut:] for path in paths if offset is None or path > offset)

    def has_any(self, key: str) -> bool:
        """Whether an object exists below a key; one request."""
        with self._doing("cannot list", key):
            return next(
                iter(obstore.list(self._store, self._key(key), chunk_size=1)), None
            ) not in (None, [])

    def nbytes_of(self, key: str) -> int | None:
        """Return an object's length; None if it does not exist. One request."""
        try:
            with self._doing("cannot request", key):
                return obstore.head(self._store, self._key(key))["size"]
        except WriteError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def read(self, key: str, max_nbytes: int) -> bytes | None:
        """Return a small object's content, None if missing; raise if it exceeds ``max_nbytes``.

        One request.
        """
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
        """Fill ``window`` from byte ``offset`` on; return the bytes read and the object's length.

        Blocks for one request, and buffers 1 MiB of it at a time.
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
                    raise exceptions.GenericError("the response is longer than the requested range")
                window[done : done + len(part)] = part
                done += len(part)
        return done, result.meta["size"]

    # Writing --------------------------------------------------------------------------------------

    def create(self, key: str, data: bytes) -> bool:
        """Create an object; return False if it exists, maybe from a lost request of this call."""
        try:
            with self._doing("cannot create", key):
                obstore.put(self._store, self._key(key), data, mode="create", use_multipart=False)
        except WriteError as error:
            if error.errno == errno.EEXIST:
                return False
            raise
        return True

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Store a small object; replaces an existing one."""
        with self._doing(f"cannot write {len(data):,} bytes", key):
            obstore.put(self._store, self._key(key), data, use_multipart=False)

    def put_parts(self, key: str, nbytes: int, parts: Iterator[memoryview], at_once: int) -> None:
        """Upload an object of ``nbytes`` in consecutive ``parts``, ``at_once`` requests at a time.

        Blocks until the object exists; it never exists in part, and not at all if ``parts`` raises.
        The memory of ``parts`` is not copied and must stay unchanged until this returns.
        """
        with self._doing(f"cannot write {nbytes:,} bytes", key):
            size = max(PART_NBYTES, -(-nbytes // _MAX_PARTS))
            several = nbytes > PART_NBYTES
            kept = isinstance(self._store, MemoryStore)  # it keeps the memory passed to it
            content = map(bytes, parts) if kept else parts
            obstore.put(
                self._store,
                self._key(key),
                content,
                use_multipart=several,
                chunk_size=size,
                max_concurrency=at_once,
            )

    def copy(self, source: str, target: str) -> bool:
        """Let the store copy an object; return False if it does not: then the caller uploads it.

        Blocks until the copy exists. S3 copies up to 5 GB. Not used on Azure, which may respond
        before it has copied.
        """
        if isinstance(self._store, AzureStore):
            return False
        try:
            with self._doing("cannot copy", source):
                obstore.copy(self._impatient()[0], self._key(source), self._key(target))
        except WriteError as error:
            logger.debug("%s was not copied: %s", self.full(source), error)
            return False
        # a copy can fail after a successful status was sent
        return self.nbytes_of(target) is not None

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects; no error for those that do not exist."""
        if keys:
            with self._doing("cannot remove", keys[0]):
                try:
                    obstore.delete(self._store, [self._key(key) for key in keys])
                except FileNotFoundError:  # on stores without bulk requests it ends the call
                    for key in keys if len(keys) > 1 else ():
                        with contextlib.suppress(FileNotFoundError):
                            obstore.delete(self._store, self._key(key))

    # ----------------------------------------------------------------------------------------------

    def full(self, key: str) -> str:
        """Return the URL of a key, for messages."""
        return f"{self.root}/{key}" if key else self.root

    def _key(self, key: str) -> str:
        return "/".join(filter(None, (self._prefix, key)))

    @contextlib.contextmanager
    def _doing(self, what: str, key: str) -> Generator[None]:
        """Turn errors into ``WriteError`` without a cause or a response that may hold secrets."""
        try:
            yield
        except WriteError:
            raise
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise WriteError(errno.EEXIST, f"{what}: the object exists", self.full(key)) from None
        except FileNotFoundError:
            raise WriteError(errno.ENOENT, f"{what}: no such object", self.full(key)) from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            if _FULL.search(str(error)):
                raise NoSpaceError(
                    errno.EDQUOT, f"{what}: the quota is used up", self.full(key)
                ) from None
            check = "check the credentials and their permissions, the region and the endpoint"
            raise WriteError(
                errno.EACCES, f"{what}: the store denies access: {check}", self.full(key)
            ) from None
        except (exceptions.BaseError, OSError, ValueError) as error:
            if "(os error 20)" in str(error):  # ENOTDIR
                raise WriteError(errno.ENOENT, f"{what}: no such file", self.full(key)) from None
            if _INSTANCE_ROLE in str(error):
                text = (
                    f"{what}: no credentials, neither in the environment nor from a role of this "
                    "machine"
                )
                raise WriteError(errno.EACCES, text, self.full(key)) from None
            if _FULL.search(str(error)):
                raise NoSpaceError(
                    errno.ENOSPC, f"{what}: the store is full", self.full(key)
                ) from None
            stalled = "kind: Timeout" in str(error)
            kind, code = (
                (WriteStalledError, errno.ETIMEDOUT) if stalled else (WriteError, errno.EIO)
            )
            raise kind(code, f"{what}: {_first_line(error)}", self.full(key)) from None
        except BaseException as error:
            # obstore panics for example if the endpoint is not a URL
            if type(error).__name__ != "PanicException":
                raise
            text = f"{what}: obstore crashed: check the endpoint and the other storage_options"
            raise WriteError(errno.EINVAL, text, self.full(key)) from None


class ObjectStorage(ReadStorage):
    """The prefix ``root``, a URL from ``urls.normalized``; no request until a file is read."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        """Create a client; raises ``InvalidArgumentError`` for invalid options."""
        self.root = root
        self.can_list = not root.startswith("http")
        self.bucket = Bucket(root, options)

    def close(self) -> None:
        return

    def list_directory(self, name: str) -> list[str]:
        if not self.can_list:
            raise InvalidArgumentError(
                f"{self.root}: http cannot list checkpoints; pass the URL of one step"
            )
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
        """Fill ``window`` from byte ``offset`` on; return the bytes read, fewer at the file's end.

        Thread-safe. Blocks for one request, and buffers 1 MiB of it at a time.
        """
        return self.bucket.read_into(self.key_of(path), offset, window)[0]

    def key_of(self, path: str) -> str:
        """Return the key of a file or directory, relative to the run's prefix."""
        return path


class _ObjectInput(InputFile):
    """A file whose first bytes were read together with its length."""

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
    """Return a client for the URL's bucket, and the URL's key in it."""
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
            # cleanup removes empty directories
            return LocalStore("/", automatic_cleanup=True), rest.strip("/")
        case "memory":
            return memory_store(bucket), key
        case _:
            client: Any = {"allow_http": scheme == "http", **settings.pop("client_options", {})}
            return HTTPStore(url, client_options=client, **config, **settings), ""


def _first_line(error: Exception) -> str:
    """Return an error's text without queries, and only the code of a response.

    Queries may hold signatures.
    """
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    code = re.search(r"<Code>(\w{1,80})</Code>", text)
    text = re.sub(r"(status code: \d+[^:]*):.*", r"\1", re.sub(r"\?\S*", "", text))
    return (text + (f" ({code[1]})" if code else ""))[:400]
