from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.platform.batches.form_data import MAX_HEADER_BYTES, FormParser, Part
from loramux.platform.errors import InvalidRequest

TYPE = "multipart/form-data; boundary=XyZ"


def part(header: bytes, content: bytes) -> bytes:
    return b"--XyZ\r\nContent-Disposition: form-data; " + header + b"\r\n\r\n" + content + b"\r\n"


def parsed(body: bytes, sizes: list[int], content_type: str = TYPE) -> list[tuple[Part, bytes]]:
    parser, found, start = FormParser(content_type), list[tuple[Part, bytes]](), 0
    for size in [*sizes, len(body)]:
        for item in parser.feed(body[start : start + size]):
            if isinstance(item, Part):
                found.append((item, b""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + item)
        start += size
    assert parser.is_complete
    return found


@settings(deadline=None)
@given(st.binary(max_size=60), st.lists(st.integers(0, 40), max_size=12))
def test_any_content_arrives_in_any_chunks(content: bytes, sizes: list[int]) -> None:
    content = content.replace(b"\r\n--XyZ", b"")
    sent = [(b'name="purpose"', b"batch"), (b'name="file"; filename="a.jsonl"', content + b"\r\n--Xy")]
    body = b"".join(part(*one) for one in sent) + b"--XyZ--\r\n"
    assert parsed(body, sizes) == [
        (Part("purpose", None), b"batch"),
        (Part("file", "a.jsonl"), content + b"\r\n--Xy"),
    ]


def test_name_is_read_as_utf8() -> None:
    body = part('name="file"; filename="é\u202e.jsonl"'.encode(), b"x") + b"--XyZ--"
    assert parsed(body, []) == [(Part("file", "é\u202e.jsonl"), b"x")]


@pytest.mark.parametrize(
    ("content_type", "said"),
    [
        ("application/json", "send a form"),
        ("multipart/form-data", "no valid boundary"),
        ("multipart/form-data; boundary=" + "a" * 71, "no valid boundary"),
        ("multipart/form-data; boundary=\xe9", "send a form|no valid boundary"),
        ("multipart/form-data; boundary=XyZ; a=" + ";" * 300, "exceeds 300 characters"),
        ("", "send a form"),
    ],
)
def test_other_types_are_refused(content_type: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        FormParser(content_type)


@pytest.mark.parametrize(
    "body",
    [
        b"preamble\r\n" + part(b'name="a"', b"x"),
        b"--XyZabc\r\n\r\n\r\n",
        b"--XyZ\r\nContent-Type: text/plain\r\n\r\nx\r\n--XyZ--",
        b"--XyZ\r\nContent-Disposition: attachment; name=a\r\n\r\nx\r\n--XyZ--",
        b"--XyZ\r\n" + b"x" * (MAX_HEADER_BYTES + 10),
        part(b'name="a"', b"x") * 40,
    ],
    ids=["preamble", "longer boundary", "no name", "attachment", "long header", "many parts"],
)
def test_malformed_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        list(FormParser(TYPE).feed(body))
    assert refusal.value.code == "invalid_form"


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_body_raises_anything_else(body: bytes) -> None:
    parser = FormParser(TYPE)
    with suppress(InvalidRequest):
        list(parser.feed(b"--XyZ\r\nContent-Disposition: form-data; name=" + body))
