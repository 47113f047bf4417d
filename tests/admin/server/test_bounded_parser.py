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
        assert received.count(b"HTTP/1.1 400 ") == 1
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


@pytest.mark.parametrize("chunked", [b"", b"transfer-encoding: chunked\r\n\r\n0\r\n"], ids=["head", "trailers"])
def test_spaces_before_a_malformed_value_take_linear_time(chunked: bytes) -> None:
    # With h11's own pattern, the head takes 0.7 s and the trailers 10 s.
    spaces = b" " * (60_000 if chunked else MAX_HEAD_BYTES - 100)
    parser = BoundedParser()
    parser.receive_data(b"POST / HTTP/1.1\r\nhost: x\r\n" + chunked + b"a:" + spaces + b"\0\r\n\r\n")
    begun_s = time.thread_time()
    if chunked:
        assert isinstance(parser.next_event(), h11.Request)
    with pytest.raises(h11.RemoteProtocolError, match="illegal header line"):
        parser.next_event()
    assert time.thread_time() - begun_s < 0.3


def test_spaces_around_values_are_removed() -> None:
    parser = BoundedParser()
    parser.receive_data(b"GET / HTTP/1.1\r\nhost: x\r\na:  \t b  c \r\nd:\r\ne:  \r\n\r\n")
    request = parser.next_event()
    assert isinstance(request, h11.Request)
    assert list(request.headers) == [(b"host", b"x"), (b"a", b"b  c"), (b"d", b""), (b"e", b"")]
