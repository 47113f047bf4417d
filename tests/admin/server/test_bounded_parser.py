from __future__ import annotations

import time

import h11
import pytest

from loramux.admin.server.bounded_parser import MAX_HEAD_BYTES, BoundedParser
from tests.admin.server.bounded_listener import HELLO, listening

LONG_HEAD = HELLO.replace(b"\r\n\r\n", b"\r\nx-long: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n")


@pytest.mark.parametrize("before", [b"", HELLO], ids=["first", "pipelined"])
def test_long_head_is_refused_even_if_it_arrives_at_once(before: bytes) -> None:
    with listening() as listener, listener.open(before + LONG_HEAD) as connection:
        received = b"".join(iter(lambda: connection.recv(1 << 20), b""))
        assert received.count(b"HTTP/1.1 431 ") == 1
        assert received.endswith(b"\r\n\r\nThe request head exceeds 16384 bytes.")
        assert received.count(b"HTTP/1.1 200 ") == listener.num_asked == (1 if before else 0)


def test_head_below_the_limit_is_read_with_the_body_that_follows_it() -> None:
    head = HELLO.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\nx-long: " + b"a" * (MAX_HEAD_BYTES - 500))
    body = b"\r\n\r\n" * 5000
    parser = BoundedParser()
    parser.receive_data(head + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert isinstance(parser.next_event(), h11.Request)
    data = parser.next_event()
    assert isinstance(data, h11.Data)
    assert bytes(data.data) == body


CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        pytest.param(b"a:", b"\0\r\n\r\n", "illegal header line", id="head"),
        pytest.param(CHUNKED + b"0\r\na:", b"\0\r\n\r\n", "illegal header line", id="trailers"),
        pytest.param(CHUNKED + b"1;", b"\n\r\n", "illegal chunk header", id="chunk extension"),
    ],
)
def test_spaces_before_malformed_bytes_take_linear_time(before: bytes, after: bytes, refused: str) -> None:
    # With h11's own patterns, the head takes 0.7 s, and the others 7 to 10 s.
    is_chunked = before.startswith(CHUNKED)
    spaces = b" " * (60_000 if is_chunked else MAX_HEAD_BYTES - 100)
    parser = BoundedParser()
    parser.receive_data(b"POST / HTTP/1.1\r\nhost: x\r\n" + before + spaces + after)
    begun_s = time.thread_time()
    if is_chunked:
        assert isinstance(parser.next_event(), h11.Request)
    with pytest.raises(h11.RemoteProtocolError, match=refused):
        parser.next_event()
    assert time.thread_time() - begun_s < 0.3


@pytest.mark.parametrize("extension", [b"", b" \t", b";", b";a=b; c", b';a="b c" \t'])
def test_chunk_extensions_are_ignored(extension: bytes) -> None:
    parser = BoundedParser()
    parser.receive_data(b"POST / HTTP/1.1\r\nhost: x\r\n" + CHUNKED + b"2" + extension + b"\r\nhi\r\n0\r\n\r\n")
    assert isinstance(parser.next_event(), h11.Request)
    data = parser.next_event()
    assert isinstance(data, h11.Data)
    assert bytes(data.data) == b"hi"
    assert isinstance(parser.next_event(), h11.EndOfMessage)


def test_spaces_around_values_are_removed() -> None:
    parser = BoundedParser()
    parser.receive_data(b"GET / HTTP/1.1\r\nhost: x\r\na:  \t b  c \r\nd:\r\ne:  \r\n\r\n")
    request = parser.next_event()
    assert isinstance(request, h11.Request)
    assert list(request.headers) == [(b"host", b"x"), (b"a", b"b  c"), (b"d", b""), (b"e", b"")]
