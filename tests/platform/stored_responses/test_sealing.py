from __future__ import annotations

import zlib

import pytest

from loramux.platform.stored_responses import sealing
from loramux.platform.stored_responses.sealing import MAX_CONTENT_BYTES, ContentTooLong, Sealing

KEY = b"a key of at least 32 characters."


def test_content_is_limited_before_compression() -> None:
    sealer = Sealing(KEY)
    longest = b"a" * MAX_CONTENT_BYTES
    sealed = sealer.seal("ten_1", "resp_1", longest)
    assert len(sealed) < MAX_CONTENT_BYTES // 100
    assert sealer.open_bytes("ten_1", "resp_1", sealed) == longest
    with pytest.raises(ContentTooLong):
        sealer.seal("ten_1", "resp_1", longest + b"a")


def test_stored_content_beyond_the_limit_is_not_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    sealer = Sealing(KEY)
    monkeypatch.setattr(sealing, "MAX_CONTENT_BYTES", 2 * MAX_CONTENT_BYTES)
    sealed = sealer.seal("ten_1", "resp_1", b"a" * (MAX_CONTENT_BYTES + 1))
    assert sealer.open_bytes("ten_1", "resp_1", sealed)
    monkeypatch.setattr(sealing, "MAX_CONTENT_BYTES", MAX_CONTENT_BYTES)
    assert sealer.open_bytes("ten_1", "resp_1", sealed) is None


def test_content_of_any_length_up_to_the_limit_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sealer = Sealing(KEY)
    monkeypatch.setattr(sealing, "MAX_CONTENT_BYTES", 40)
    for length in range(41):
        content = zlib.compress(bytes(range(length)))[:length]
        assert sealer.open_bytes("ten_1", "x", sealer.seal("ten_1", "x", content)) == content
