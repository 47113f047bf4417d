from __future__ import annotations

import pytest

from loramux.admin.bench.http_reader import BrokenResponse, ResponseReader

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def read(data: bytes, size: int) -> tuple[bytes, ResponseReader]:
    reader, found = ResponseReader(), b""
    for start in range(0, len(data), size):
        found += reader.feed(data[start : start + size])
    return found, reader


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("response", "body", "is_reusable"),
    [
        (CHUNKED + b"5\r\nhello\r\n1;a=b\r\n\r\r\n00\r\n\r\n", b"hello\r", True),
        (CHUNKED + b"A\r\n0123456789\r\n0\r\nx: y\r\n\r\n", b"0123456789", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + b"1\r\na\r\n0\r\n\r\n", b"a", True),
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 3\r\nConnection: Close\r\n\r\nabc", b"abc", False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", b"", False),
    ],
    ids=["chunks", "trailer", "interim", "length", "nothing", "old"],
)
def test_responses_are_read_however_they_are_cut(response: bytes, body: bytes, is_reusable: bool, size: int) -> None:
    found, reader = read(response, size)
    assert (found, reader.is_done, reader.is_reusable) == (body, True, is_reusable)


def test_a_body_without_length_ends_with_the_connection() -> None:
    found, reader = read(b"HTTP/1.1 200 OK\r\n\r\nabc", 5)
    assert not reader.is_done
    reader.end()
    assert (found, reader.is_done, reader.is_reusable) == (b"abc", True, False)


@pytest.mark.parametrize(
    "response",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"x" * (65 << 10),
        CHUNKED + b"-5\r\nhello\r\n",
        CHUNKED + b"1_0\r\n",
        CHUNKED + b"fffffffffffffffff\r\n",
        CHUNKED + b"1\r\nab\r\n",
        CHUNKED + b"1" * 5000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab",
    ],
    ids=["ssh", "status", "head", "sign", "underscore", "huge", "long", "line", "encoding", "length", "longer"],
)
def test_malformed_responses_are_refused(response: bytes) -> None:
    with pytest.raises(BrokenResponse):
        read(response, 1 << 20)


@pytest.mark.parametrize("response", [b"", b"HTTP/1.1 2", CHUNKED + b"5\r\nhel", CHUNKED + b"1\r\na\r\n"])
def test_an_incomplete_response_is_refused(response: bytes) -> None:
    _, reader = read(response, 1 << 20)
    with pytest.raises(BrokenResponse, match="closed the connection"):
        reader.end()
