from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest

pytestmark = pytest.mark.anyio

TEXT = "/v1/completions"
BODY = json.dumps({"model": "base", "prompt": "Hello", "max_tokens": 1}).encode()


async def sent(gateway: Any, content: bytes, encoding: str, path: str = TEXT) -> Any:
    return await gateway.http.post(path, content=content, headers={"content-encoding": encoding})


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", " GZIP ", "identity"])
async def test_compressed_body_is_read(gateway: Any, encoding: str) -> None:
    body = BODY if encoding == "identity" else gzip.compress(BODY)
    for path in (TEXT, "/tokenize"):
        answer = await sent(gateway, body if path == TEXT else gzip.compress(b'{"prompt": "Hello"}'), encoding, path)
        if path == TEXT or encoding != "identity":
            assert answer.status_code == 200, answer.text


async def test_body_can_be_long_and_random(gateway: Any) -> None:
    text = BODY[:-1] + b', "user": "' + bytes(range(97, 122)) * 40_000 + b'"}'
    answer = await sent(gateway, gzip.compress(text), "gzip")
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("encoding", ["br", "deflate", "zstd", "gzip, gzip", "gzip, br", "x" * 5000, "*"])
async def test_other_codings_are_refused_by_name(gateway: Any, encoding: str) -> None:
    answer = await sent(gateway, BODY, encoding)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        415,
        "unsupported_content_encoding",
        "Content-Encoding",
    )
    assert encoding[:64] in error["message"]
    assert len(error["message"]) < 300
    assert answer.headers["accept-encoding"] == "gzip"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        BODY,
        zlib.compress(BODY),
        gzip.compress(BODY)[:-1],
        gzip.compress(BODY)[:10],
        gzip.compress(BODY)[:-8] + bytes(8),
        gzip.compress(BODY) + b"x",
        gzip.compress(BODY) + gzip.compress(BODY),
    ],
    ids=["empty", "plain", "zlib", "cut", "only a head", "wrong checksum", "more after it", "two members"],
)
async def test_body_that_is_not_gzip_is_refused(gateway: Any, content: bytes) -> None:
    answer = await sent(gateway, content, "gzip")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_gzip")
    assert gateway.engine.adds == []


async def test_bomb_is_decompressed_only_up_to_the_limit(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decompressed = []
    real = zlib.decompressobj

    class Counted:
        def __init__(self, *arguments: Any) -> None:
            self._stream = real(*arguments)

        def decompress(self, *arguments: Any) -> bytes:
            part = self._stream.decompress(*arguments)
            decompressed.append(len(part))
            return part

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

    monkeypatch.setattr(zlib, "decompressobj", Counted)
    limit = gateway.services.settings.max_body_bytes
    # The body itself is below the limit.
    bomb = gzip.compress(bytes(limit * 50), 9)
    assert len(bomb) < limit
    answer = await sent(gateway, bomb, "gzip")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
    assert limit < sum(decompressed) <= limit + max(decompressed)
    assert max(decompressed) <= 64 * 1024


async def test_compressed_body_above_the_limit_is_refused_unread(gateway: Any) -> None:
    answer = await sent(gateway, bytes(gateway.services.settings.max_body_bytes + 1), "gzip")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")


async def test_byte_order_mark_is_named(gateway: Any) -> None:
    answer = await gateway.http.post(TEXT, content=b"\xef\xbb\xbf" + BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert "byte order mark" in answer.json()["error"]["message"]
