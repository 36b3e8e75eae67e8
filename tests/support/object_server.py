"""An object store on loopback that counts requests and fails as it is told: as much of S3 as readers use, and HTTP.

It serves the directories in ``root``, each as a bucket of its name. What is signed is not checked.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Fault = str | int | None
"""A status to answer with, or ``"cut"`` (the connection, in the middle), ``"short"``, ``"flip"`` (the last byte)."""


@dataclass(frozen=True)
class Request:
    """``key`` begins with the bucket; that of a list is its prefix."""

    method: str
    key: str
    range: tuple[int, int] | None


class ObjectServer:
    """What was asked is in ``requests``; ``fault`` is asked for each, and what it is the how-manieth of its key."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requests: list[Request] = []
        self.fault: Callable[[Request, int], Fault] = lambda request, number: None
        self.page = 1000
        self.most_at_once = 0
        self._busy = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def options(self) -> dict[str, str]:
        """Of an S3 client that is to ask here."""
        return {
            "aws_endpoint": self.endpoint,
            "aws_access_key_id": "an-id",
            "aws_secret_access_key": "a-secret",
            "aws_allow_http": "true",
        }

    def count(self, method: str) -> int:
        return sum(request.method == method for request in self.requests)

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

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
                key = unquote(url.path).lstrip("/")
                found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                span = (int(found[1]), int(found[2] or 1 << 62) + 1) if found else None
                is_list = "list-type" in query
                if is_list:
                    request = Request("LIST", f"{key.rstrip('/')}/{query.get('prefix', '')}", None)
                else:
                    request = Request("GET", key, span)
                fault = server._take(request)
                with contextlib.suppress(ConnectionError):
                    if isinstance(fault, int):
                        self._answer(fault, b"<Error><Code>Told</Code></Error>")
                    elif is_list:
                        self._answer(200, server._listing(key.rstrip("/"), query))
                    else:
                        self._send(server.root / key, span, fault)
                with server._lock:
                    server._busy -= 1

            def _send(self, path: Path, span: tuple[int, int] | None, fault: Fault) -> None:
                if not path.is_file():
                    self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
                    return
                with path.open("rb") as file:
                    size = path.stat().st_size
                    start, stop = span or (0, size)
                    stop = min(stop, size)
                    if span and start >= size:
                        self._answer(416, b"")
                        return
                    file.seek(start)
                    data = file.read(stop - start)
                if fault == "flip":
                    data = data[:-1] + bytes([data[-1] ^ 1])
                if fault == "short":
                    data = data[: len(data) // 2]
                    stop = start + len(data)
                headers = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if span else {}
                self._answer(206 if span else 200, data, headers, cut=fault == "cut")

            def _answer(self, status: int, data: bytes, headers: dict[str, str] = {}, *, cut: bool = False) -> None:  # noqa: B006
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Last-Modified", "Tue, 24 Nov 2026 12:00:00 GMT")
                self.send_header("ETag", '"an-etag"')
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if cut else data)
                if cut:
                    self.wfile.flush()
                    self.close_connection = True

        return Handler

    def _listing(self, bucket: str, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        root = self.root / bucket
        keys = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
        found: dict[str, int | None] = {}
        for key in keys:
            if key.startswith(prefix):
                head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
                found[prefix + head + cut if cut else key] = None if cut else (root / key).stat().st_size
        names = [name for name in found if name > query.get("continuation-token", "")]
        parts = ["<ListBucketResult>", f"<Name>{bucket}</Name>"]
        for name in names[: self.page]:
            size = found[name]
            if size is None:
                parts.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
            else:
                when = "<LastModified>2026-11-24T12:00:00.000Z</LastModified>"
                parts.append(f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size>{when}</Contents>")
        more = len(names) > self.page
        parts.append(f"<IsTruncated>{str(more).lower()}</IsTruncated>")
        if more:
            parts.append(f"<NextContinuationToken>{escape(names[self.page - 1])}</NextContinuationToken>")
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
