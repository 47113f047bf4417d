"""The HTTP server of the example blob store: `python -m loramux_example.http_server DIRECTORY PORT`.

It prints its URL. Port 0 selects a free port.

- `PUT /blobs/KEY` stores a blob, or answers 412 and keeps the existing blob.
- `GET`, `HEAD` and `DELETE /blobs/KEY` answer 404 for a missing blob, except `DELETE`.
- `GET /keys?prefix=PREFIX` lists the keys that begin with a prefix, one per line.

A blob is on the disk when its put is answered. There is no authentication, so use it for tests only.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from loramux.adapter_store.blobs.local import LocalBlobStore
from loramux.adapter_store.errors import BlobNotFound, StoreError


class BlobHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    disable_nagle_algorithm = True

    def __init__(self, store: LocalBlobStore, *arguments: object) -> None:
        self._store = store
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self._answer(self._keys if urlsplit(self.path).path == "/keys" else self._get)

    def do_HEAD(self) -> None:
        self._answer(self._head)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        """Print nothing."""

    def _answer(self, method: Callable[[], None]) -> None:
        try:
            method()
        except BlobNotFound:
            self._reply(404)
        except ValueError:
            self._reply(400)
        except StoreError:
            self._reply(503)

    def _keys(self) -> None:
        prefix = parse_qs(urlsplit(self.path).query).get("prefix", [""])[0]
        self._reply(200, "\n".join(self._store.list_keys(prefix)).encode())

    def _get(self) -> None:
        with tempfile.NamedTemporaryFile() as copy:
            self._store.get(self._key(), Path(copy.name))
            self.send_response(200)
            self.send_header("content-length", str(Path(copy.name).stat().st_size))
            self.end_headers()
            shutil.copyfileobj(copy, self.wfile)

    def _head(self) -> None:
        info = self._store.head(self._key())
        self.send_response(404 if info is None else 200)
        self.send_header("content-length", str(0 if info is None else info.size))
        self.end_headers()

    def _put(self) -> None:
        left = int(self.headers["content-length"])
        with tempfile.NamedTemporaryFile() as received:
            while left:
                chunk = self.rfile.read(min(left, 1 << 20))
                if not chunk:
                    # The client has gone, so there is nobody to answer and no whole blob to store.
                    self.close_connection = True
                    return
                received.write(chunk)
                left -= len(chunk)
            received.flush()
            self._reply(201 if self._store.put(self._key(), Path(received.name)) else 412)

    def _delete(self) -> None:
        self._store.delete(self._key())
        self._reply(200)

    def _key(self) -> str:
        return urlsplit(self.path).path.removeprefix("/blobs/")

    def _reply(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def open_server(directory: Path, port: int = 0) -> ThreadingHTTPServer:
    """Bind the server to a port of this machine, or to a free port if it is 0. The caller calls `serve_forever`."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(BlobHandler, LocalBlobStore(directory)))


def main() -> None:
    with open_server(Path(sys.argv[1]), int(sys.argv[2])) as server:
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
