from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.strangers.stand_in.renaming_proxy import RenamingProxy, Target


class _Upstream(BaseHTTPRequestHandler):
    """Answers with what it received. A streamed answer arrives in parts that split the model's name."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = {"path": self.path, "key": self.headers["authorization"], "received": body, "model": "base"}
        content = json.dumps(answer).encode()
        self.send_response(200)
        if body.get("stream"):
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for part in (b'data: {"model": "ba', b'se"}\n\n', b"data: [DONE]\n\n", b""):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            return
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_arguments: object) -> None:
        return


@pytest.fixture
def proxy() -> Iterator[RenamingProxy]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Upstream) as upstream:
        threading.Thread(target=upstream.serve_forever, args=(0.01,), daemon=True).start()
        target = Target("127.0.0.1", upstream.server_port, "real", {"owner/Theirs": "base"}, ("dummy",))
        made = RenamingProxy(target)
        yield made
        made.close()
        upstream.shutdown()


def call(
    proxy: RenamingProxy, body: dict[str, Any], headers: dict[str, str], path: str = "/v1/models/owner%2FTheirs"
) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    connection.request("POST", path, json.dumps(body), headers)
    content = connection.getresponse().read()
    connection.close()
    return content


@pytest.mark.parametrize(
    ("headers", "key"),
    [({}, "real"), ({"authorization": "Bearer dummy"}, "real"), ({"authorization": "Bearer other"}, "other")],
)
def test_names_are_replaced_both_ways_and_only_dummy_keys(
    proxy: RenamingProxy, headers: dict[str, str], key: str
) -> None:
    answer = json.loads(call(proxy, {"model": "owner/Theirs", "prompt": "about owner/Theirs"}, headers))
    assert answer == {
        "path": "/v1/models/base",
        "key": f"Bearer {key}",
        "received": {"model": "owner/Theirs", "prompt": "about owner/Theirs"},
        "model": "owner/Theirs",
    }


def test_a_name_that_is_split_between_chunks_is_replaced(proxy: RenamingProxy) -> None:
    streamed = call(proxy, {"model": "owner/Theirs", "stream": True}, {})
    assert streamed == b'data: {"model": "owner/Theirs"}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("path", "model", "received"),
    [
        ("/v1/responses", {}, {"input": "a", "model": "base"}),
        ("/v1/responses", {"model": None}, {"input": "a", "model": "base"}),
        ("/v1/responses", {"model": "other"}, {"input": "a", "model": "other"}),
        ("/v1/completions", {}, {"input": "a"}),
    ],
)
def test_a_name_is_added_only_where_a_call_needs_it(
    proxy: RenamingProxy, path: str, model: dict[str, Any], received: dict[str, Any]
) -> None:
    answer = json.loads(call(proxy, {"input": "a", **model}, {}, path))
    # On the way back, the proxy replaces our name.
    assert answer["received"] == {name: value.replace("base", "owner/Theirs") for name, value in received.items()}
