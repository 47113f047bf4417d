"""A proxy on loopback that gives our server the model names and keys which a suite uses.

It replaces model names in requests and answers, and replaces a dummy key or a missing one by a real key. vLLM serves
one model, whose name the bodies of its tests can leave out: the proxy adds it where our server needs it. It changes
nothing else: bodies, statuses, headers and the times of streamed chunks are the server's.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

NAMING_CALLS = frozenset({"/v1/responses"})
"""Calls that need a model, and whose tests leave it out."""
HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    key: str
    names: Mapping[str, str]
    """Our model name for each name that the suite uses."""
    dummy_keys: Collection[str]

    def named(self, path: str, content: bytes) -> bytes:
        """Return a request's content with the model's name, if the call needs one and the content has none."""
        if path not in NAMING_CALLS or not self.names or not content:
            return content
        document = json.loads(content)
        if document.get("model") is None:
            document["model"] = next(iter(self.names))
        return json.dumps(document).encode()

    def renamed(self, content: bytes) -> tuple[bytes, dict[bytes, bytes]]:
        """Return a request's content with our names, and the replacements that its answer needs."""
        back = {}
        for theirs, ours in self.names.items():
            quoted = json.dumps(theirs).encode()
            if quoted in content:
                content = content.replace(quoted, json.dumps(ours).encode())
                back[json.dumps(ours).encode()] = quoted
        if not back:
            # The first name takes precedence, for example in lists of models.
            for theirs, ours in reversed(self.names.items()):
                back[json.dumps(ours).encode()] = json.dumps(theirs).encode()
        return content, back


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    target: Target

    def _pass_on(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path
        content, back = self.target.renamed(self.target.named(path, content))
        for theirs, ours in self.target.names.items():
            for spelling in (quote(theirs), quote(theirs, safe=""), theirs):
                path = path.replace(f"/models/{spelling}", f"/models/{ours}")
        upstream = http.client.HTTPConnection(self.target.host, self.target.port, timeout=TIMEOUT_S)
        try:
            upstream.putrequest(self.command, path, skip_accept_encoding=True)
            for name, value in self._request_headers():
                upstream.putheader(name, value)
            if content or self.command in ("POST", "PUT", "PATCH"):
                upstream.putheader("content-length", str(len(content)))
            upstream.endheaders(content or None)
            self._answer(upstream.getresponse(), back)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            upstream.close()

    def _request_headers(self) -> list[tuple[str, str]]:
        headers = []
        key = None
        for name, value in self.headers.items():
            lowered = name.lower()
            if lowered in ("authorization", "x-api-key"):
                key = value.removeprefix("Bearer ")
            # Without this, answers would be compressed, and their names could not be replaced.
            elif lowered not in HOP_BY_HOP and lowered != "accept-encoding":
                headers.append((name, value))
        is_dummy = key is None or key in self.target.dummy_keys
        return [*headers, ("authorization", f"Bearer {self.target.key if is_dummy else key}")]

    def _answer(self, answer: http.client.HTTPResponse, back: Mapping[bytes, bytes]) -> None:
        is_streamed = answer.getheader("transfer-encoding") == "chunked"
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        if is_streamed:
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            rest = b""
            while part := answer.read1(65536):
                # Names are replaced in whole lines.
                lines, newline, rest = (rest + part).rpartition(b"\n")
                self._send_chunk(lines + newline, back)
            self._send_chunk(rest, back)
            self.wfile.write(b"0\r\n\r\n")
            return
        content = _replaced(answer.read(), back)
        if answer.status not in (204, 304):
            self.send_header("content-length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_chunk(self, content: bytes, back: Mapping[bytes, bytes]) -> None:
        content = _replaced(content, back)
        if content:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))

    def log_message(self, *_arguments: object) -> None:
        return


for _method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"):
    setattr(_Handler, f"do_{_method}", _Handler._pass_on)


def _replaced(content: bytes, back: Mapping[bytes, bytes]) -> bytes:
    for ours, theirs in back.items():
        content = content.replace(ours, theirs)
    return content


class RenamingProxy:
    """Runs until `close`, on a free port."""

    def __init__(self, target: Target) -> None:
        handler = type("Handler", (_Handler,), {"target": target})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
