"""An object store on loopback that counts requests and fails as it is told: as much of S3 as is
used here, and HTTP.

It serves the directories in ``root``, each as a bucket of its name. What is signed is not checked.
Parts of an upload are in memory until it is completed, and are written as they come, so that
completing it is quick, as in a store.
"""

import contextlib
import itertools
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape


@dataclass(frozen=True)
class After:
    """A fault that comes when the request has been carried out: a status, or ``"cut"``, without an
    answer.
    """

    fault: str | int


@dataclass(frozen=True)
class Refusal:
    """A status with a code of S3's, and nothing is done."""

    status: int
    code: str


Fault = str | int | After | Refusal | None
"""A status to answer with, and nothing is done; ``"cut"``: the connection, of an answer with
content in the middle, and of others before anything is done; of content ``"short"`` and ``"flip"``
(the last byte); ``"gone"``: the connection, before anything is done; or one :class:`After` or
:class:`Refusal`.
"""

_PIECE_NBYTES = 64 << 10


@dataclass(frozen=True)
class Request:
    """``key`` begins with the bucket; that of a list is its prefix, that of DELETE-MANY the bucket.

    ``method`` is GET, HEAD, LIST, PUT, PUT-NEW (``If-None-Match: *``), COPY, of which ``source`` is
    the key, DELETE, DELETE-MANY, or of an upload in parts START, PART, COMPLETE, ABORT.
    """

    method: str
    key: str
    range: tuple[int, int] | None = None
    encryption: str | None = None
    """What ``x-amz-server-side-encryption`` says."""
    source: str = ""


@dataclass(frozen=True)
class _Answer:
    status: int
    data: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    nbytes: int | None = None
    """Of an answer without its content."""


@dataclass
class _Upload:
    """In parts; ``written`` are those that are in ``file``, all as long as the first one."""

    key: str
    file: Path
    parts: dict[int, bytes] = field(default_factory=dict[int, bytes])
    written: set[int] = field(default_factory=set[int])

    def write(self, number: int) -> None:
        part, first = self.parts[number], self.parts.get(1)
        if first is not None and len(part) == len(first):
            self.write_at((number - 1) * len(first), part)
            self.written.add(number)

    def write_rest(self, numbers: list[int]) -> None:
        """What is to be the object's content, with the parts of these numbers one after the other,
        is in the file.
        """
        offset = 0
        for place, number in enumerate(numbers):
            part = self.parts[number]
            if (
                number not in self.written
                or offset != place * len(self.parts[1])
                or number != place + 1
            ):
                self.write_at(offset, part)
            offset += len(part)
        os.truncate(self.file, offset)

    def write_at(self, offset: int, data: bytes) -> None:
        fd = os.open(self.file, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(fd, data, offset)
        finally:
            os.close(fd)


class ObjectServer:
    """What was asked is in ``requests``; ``fault`` is asked for each, and what it is the
    how-manieth of its key.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requests: list[Request] = []
        self.fault: Callable[[Request, int], Fault]
        self.heal()
        self.page = 1000
        self.most_at_once = 0
        self.ignores_conditions = False
        """Whether ``If-None-Match`` keeps nothing from being replaced, as several kinds of stores
        have it.
        """
        self.ignores_offsets = False
        """Whether lists begin at the beginning wherever they are to start, as Azurite's do."""
        self.uploads: dict[str, _Upload] = {}
        """Those in parts that are unfinished."""
        self._upload_ids = map(str, itertools.count(1))
        self._busy = 0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def heal(self) -> None:
        """Have no request fail from here on."""
        self.fault = lambda request, number: None

    @property
    def options(self) -> dict[str, str]:
        """Of an S3 client that is to ask here."""
        return {
            "aws_endpoint": self.endpoint,
            "aws_access_key_id": "an-id",
            "aws_secret_access_key": "a-secret",
            "aws_allow_http": "true",
        }

    def announce(self, environment: Callable[[str, str], None]) -> None:
        """Let clients that are configured by the environment, of this process and its children, ask
        here.
        """
        for name, value in self.options.items():
            environment(name.upper(), value)

    def count(self, method: str) -> int:
        return sum(request.method == method for request in self.requests)

    def wait_until_idle(self, timeout_s: float = 300) -> None:
        """Wait until every request has been carried out, also those whose client has given up."""
        with self._idle:
            assert self._idle.wait_for(lambda: self._busy == 0, timeout_s)

    def _take(self, request: Request) -> Fault:
        with self._lock:
            self._busy += 1
            self.most_at_once = max(self.most_at_once, self._busy)
            number = sum(other.key == request.key for other in self.requests)
            self.requests.append(request)
        return self.fault(request, number)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            wbufsize = -1  # head and body in one packet

            def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002

            def _serve(self) -> None:
                url = urlsplit(self.path)
                query = {
                    name: values[0]
                    for name, values in parse_qs(url.query, keep_blank_values=True).items()
                }
                key = unquote(url.path).lstrip("/")
                with contextlib.suppress(ConnectionError):
                    body = self._receive(int(self.headers.get("Content-Length") or 0))
                    request = self._request(key, query)
                    if encryption := self.headers.get("x-amz-server-side-encryption"):
                        request = replace(request, encryption=encryption)
                    fault = server._take(request)
                    try:
                        self._respond(request, query, body, fault)
                    finally:
                        with server._idle:
                            server._busy -= 1
                            server._idle.notify_all()

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

            def _receive(self, nbytes: int) -> bytes:
                body = bytearray()
                while len(body) < nbytes:
                    piece = self.rfile.read(min(_PIECE_NBYTES, nbytes - len(body)))
                    if not piece:
                        raise ConnectionError
                    body += piece
                return bytes(body)

            def _request(self, key: str, query: dict[str, str]) -> Request:
                found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                span = (int(found[1]), int(found[2] or 1 << 62) + 1) if found else None
                match self.command:
                    case "GET" if "list-type" in query:
                        return Request("LIST", f"{key.rstrip('/')}/{query.get('prefix', '')}")
                    case "PUT" if "uploadId" in query:
                        return Request("PART", key)
                    case "PUT" if source := self.headers.get("x-amz-copy-source"):
                        return Request("COPY", key, source=unquote(source).lstrip("/"))
                    case "PUT" if self.headers.get("If-None-Match") == "*":
                        return Request("PUT-NEW", key)
                    case "POST" if "delete" in query:
                        return Request("DELETE-MANY", key.rstrip("/"))
                    case "POST":
                        return Request("START" if "uploads" in query else "COMPLETE", key)
                    case "DELETE" if "uploadId" in query:
                        return Request("ABORT", key)
                    case _:
                        return Request(self.command, key, span)

            def _respond(
                self, request: Request, query: dict[str, str], body: bytes, fault: Fault
            ) -> None:
                if isinstance(fault, int):
                    fault = Refusal(fault, "Told")
                if isinstance(fault, Refusal):
                    self._answer(
                        _Answer(fault.status, f"<Error><Code>{fault.code}</Code></Error>".encode())
                    )
                    return
                if fault == "gone" or (fault == "cut" and request.method != "GET"):
                    self.close_connection = True
                    return
                answer = server._carry_out(request, query, body)
                if isinstance(fault, After):
                    if fault.fault == "cut":
                        self.close_connection = True
                        return
                    answer = _Answer(int(fault.fault), b"<Error><Code>Told</Code></Error>")
                elif fault == "flip" and answer.data:
                    answer = _Answer(
                        answer.status,
                        answer.data[:-1] + bytes([answer.data[-1] ^ 1]),
                        answer.headers,
                    )
                self._answer(answer, fault)

            def _answer(self, answer: _Answer, fault: Fault = None) -> None:
                data = answer.data
                if fault == "short":
                    data = data[: len(data) // 2]
                self.send_response(answer.status)
                self.send_header(
                    "Content-Length", str(len(data) if answer.nbytes is None else answer.nbytes)
                )
                self.send_header("Last-Modified", "Tue, 24 Nov 2026 12:00:00 GMT")
                self.send_header("ETag", '"an-etag"')
                for name, value in answer.headers:
                    if fault == "short" and name == "Content-Range":
                        first, size = re.findall(r"\d+", value)[::2]
                        value = f"bytes {first}-{int(first) + len(data) - 1}/{size}"
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    data = data[: len(data) // 2] if fault == "cut" else data
                    for begin in range(0, len(data), _PIECE_NBYTES):
                        self.wfile.write(data[begin : begin + _PIECE_NBYTES])
                if fault == "cut":
                    self.wfile.flush()
                    self.close_connection = True

        return Handler

    # What a request does --------------------------------------------------------------------------

    def _carry_out(self, request: Request, query: dict[str, str], body: bytes) -> _Answer:
        path = self.root / request.key
        match request.method:
            case "LIST":
                bucket = request.key.partition("/")[0]
                return _Answer(200, self._listing(bucket, query))
            case "GET" | "HEAD":
                return self._content(path, request)
            case "PUT" | "PUT-NEW":
                with self._lock:
                    if (
                        request.method == "PUT-NEW"
                        and path.is_file()
                        and not self.ignores_conditions
                    ):
                        return _Answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                    self._store(path, body)
                return _Answer(200)
            case "COPY":
                source = self.root / request.source
                with self._lock:
                    if not source.is_file():
                        return _Answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
                    self._store(path, source.read_bytes())
                return _Answer(200, b"<CopyObjectResult><ETag>an-etag</ETag></CopyObjectResult>")
            case "DELETE":
                with self._lock:
                    self._delete(path)
                return _Answer(204)
            case "DELETE-MANY":
                keys = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", body.decode())]
                with self._lock:
                    for key in keys:
                        self._delete(path / key)
                deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
                return _Answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
            case _:
                return self._upload(request, query, body)

    def _upload(self, request: Request, query: dict[str, str], body: bytes) -> _Answer:
        with self._lock:
            number = next(self._upload_ids) if request.method == "START" else query["uploadId"]
            if request.method == "START":
                self.uploads[number] = _Upload(request.key, self.root / f".upload-{number}")
                tag = "InitiateMultipartUploadResult"
                return _Answer(200, f"<{tag}><UploadId>{number}</UploadId></{tag}>".encode())
            upload = self.uploads.get(number)
            if upload is None:
                return _Answer(404, b"<Error><Code>NoSuchUpload</Code></Error>")
            if request.method == "PART":
                upload.parts[int(query["partNumber"])] = body
            elif request.method == "COMPLETE":
                return self._complete(number, upload, body)
            else:
                del self.uploads[number]
                upload.file.unlink(missing_ok=True)
                return _Answer(204)
        upload.write(int(query["partNumber"]))
        return _Answer(200)

    def _complete(self, number: str, upload: _Upload, body: bytes) -> _Answer:
        named = [int(each) for each in re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())]
        if any(len(upload.parts[each]) < 5 << 20 for each in named[:-1]):
            return _Answer(400, b"<Error><Code>EntityTooSmall</Code></Error>")
        upload.write_rest(named)
        self._give_name(upload.file, self.root / upload.key)
        del self.uploads[number]
        tag = "CompleteMultipartUploadResult"
        return _Answer(200, f"<{tag}><ETag>an-etag</ETag></{tag}>".encode())

    def _content(self, path: Path, request: Request) -> _Answer:
        try:
            file: BinaryIO = path.open("rb")
        except OSError:
            return _Answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        with file:
            size = file.seek(0, 2)
            if request.method == "HEAD":
                return _Answer(200, nbytes=size)
            start, stop = request.range or (0, size)
            stop = min(stop, size)
            if request.range and start >= size:
                return _Answer(416)
            file.seek(start)
            data = file.read(stop - start)
        headers = (("Content-Range", f"bytes {start}-{stop - 1}/{size}"),) if request.range else ()
        return _Answer(206 if request.range else 200, data, headers)

    def _store(self, path: Path, content: bytes) -> None:
        new = self.root / ".new-object"
        new.write_bytes(content)
        self._give_name(new, path)

    def _give_name(self, new: Path, path: Path) -> None:
        """An object appears whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new.rename(path)

    def _delete(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
            for parent in path.parents[: len(path.relative_to(self.root).parts) - 2]:
                parent.rmdir()

    def _listing(self, bucket: str, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        root = self.root / bucket
        with self._lock:
            sizes = {
                path.relative_to(root).as_posix(): path.stat().st_size
                for path in root.rglob("*")
                if path.is_file()
            }
        found: dict[str, int | None] = {}
        for key in sorted(sizes):
            if key.startswith(prefix):
                head, cut, _ = (
                    key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
                )
                found[prefix + head + cut if cut else key] = None if cut else sizes[key]
        start = "" if self.ignores_offsets else query.get("start-after", "")
        after = query.get("continuation-token") or start
        names = [name for name in found if name > after]
        parts = ["<ListBucketResult>", f"<Name>{bucket}</Name>"]
        for name in names[: self.page]:
            size = found[name]
            if size is None:
                parts.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
            else:
                when = "<LastModified>2026-11-24T12:00:00.000Z</LastModified>"
                parts.append(
                    f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size>{when}</Contents>"
                )
        more = len(names) > self.page
        parts.append(f"<IsTruncated>{str(more).lower()}</IsTruncated>")
        if more:
            parts.append(
                f"<NextContinuationToken>{escape(names[self.page - 1])}</NextContinuationToken>"
            )
        return "".join([*parts, "</ListBucketResult>"]).encode()

    def __enter__(self) -> "ObjectServer":
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def serving(root: Path) -> Iterator[ObjectServer]:
    with ObjectServer(root) as server:
        yield server


class Killer:
    """Kills processes when a certain request comes, which is carried out all the same, or is
    not.
    """

    def __init__(self, server: ObjectServer) -> None:
        self._pids: tuple[int, ...] = ()
        self._left, self._fault = 0, None
        self._lock = threading.Lock()
        server.fault = self._come_to

    def arm(self, *pids: int, after: int, fault: Fault) -> None:
        with self._lock:
            self._pids, self._left, self._fault = pids, after, fault

    @property
    def is_armed(self) -> bool:
        """Whether the request is still to come."""
        return bool(self._pids)

    def disarm(self) -> bool:
        """Whether it has come to that."""
        with self._lock:
            armed, self._pids = bool(self._pids), ()
        return not armed

    def _come_to(self, request: Request, number: int) -> Fault:
        with self._lock:
            if self._pids:
                self._left -= 1
            if not self._pids or self._left >= 0:
                return None
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._pids = ()
            return self._fault
