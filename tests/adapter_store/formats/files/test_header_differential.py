from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.float_formats import STORAGE
from loramux.adapter_store.formats.files.tensor_file import TensorFile

# JSON parsers treat these spellings differently. Each one replaces a part of a header or is inserted into it.
_ODD_TEXTS = [
    b"-0", b"0.0", b"4.0", b"1e0", b"00", b"+1", b"0x10", b"-1", b"18446744073709551616", b"9223372036854775808",
    b"NaN", b"Infinity", b"null", b"true", b"[]", b"{}", b'""', b'"\\u0000"', b'"\\ud800"', b'"\\ud83d\\ude00"',
    b"\x00", b"\t", b"\n", b" ", b"\x0b", b"\x0c", b"\xc2\xa0", b"\xef\xbb\xbf", b"\xff", b"\x7f", b"/**/", b",", b":",
    b'"a":', b"'", b"\\", b"[4,32]", b'"F32"', b'"F64"', b'"BF16"', b"[0,0]",
]  # fmt: skip
_TEXT = st.text(st.characters(codec="utf-8"), max_size=12)


@st.composite
def valid_files(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Return the header and data of a file with random matrices, with any valid formatting of the JSON."""
    names = draw(st.lists(_TEXT.filter(lambda name: name != "__metadata__"), max_size=5, unique=True))
    entries: dict[str, Any] = {}
    position = 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(STORAGE)))
        shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
        end = position + shape[0] * shape[1] * STORAGE[dtype].itemsize
        fields = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        order = draw(st.permutations(list(fields)))
        entries[name] = {field: fields[field] for field in order}
        position = end
    header = {name: entries[name] for name in draw(st.permutations(names))}
    if draw(st.booleans()):
        header = {"__metadata__": draw(st.dictionaries(_TEXT, _TEXT, max_size=3)), **header}
    text = json.dumps(
        header, ensure_ascii=draw(st.booleans()), separators=draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    )
    blanks = draw(st.text(st.sampled_from(" \n\t\r"), max_size=9))
    return (text + blanks).encode(), draw(st.binary(min_size=position, max_size=position))


@st.composite
def mutated_files(draw: st.DrawFn) -> bytes:
    """A valid file with a few random changes to its header, data or header length."""
    header, data = draw(valid_files())
    for _ in range(draw(st.integers(0, 2))):
        begin = draw(st.integers(0, len(header)))
        length = draw(st.integers(0, 6))
        odd = draw(st.sampled_from(_ODD_TEXTS) | st.binary(max_size=3))
        header = header[:begin] + odd + header[begin + length :]
    if draw(st.booleans()):
        # Also replace a digit, so that numbers change more often.
        starts = [i for i, byte in enumerate(header) if chr(byte).isdigit()]
        if starts:
            at = draw(st.sampled_from(starts))
            header = header[:at] + draw(st.sampled_from(_ODD_TEXTS)) + header[at + 1 :]
    if draw(st.integers(0, 3)) == 0:
        data = data[: draw(st.integers(0, len(data)))] + draw(st.binary(max_size=4))
    length = len(header) + (draw(st.integers(-2, 2)) if draw(st.integers(0, 3)) == 0 else 0)
    return struct.pack("<Q", max(length, 0)) + header + data


def is_accepted_alike(content: bytes) -> bool:
    """Return whether our parser accepts the file. If it does, check that the library reads the same tensors."""
    try:
        with TensorFile(content) as ours:
            found = {
                name: (entry.dtype, list(entry.shape), ours.raw(name).tobytes())
                for name, entry in ours.header.tensors.items()
            }
    except AdapterRejected:
        return False
    theirs = {name: (one["dtype"], one["shape"], bytes(one["data"])) for name, one in deserialize(content)}
    assert found == theirs
    return True


FEW = settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=20_000)


@FEW
@given(valid_files())
def test_valid_files_are_accepted(file: tuple[bytes, bytes]) -> None:
    header, data = file
    assert is_accepted_alike(struct.pack("<Q", len(header)) + header + data)


@FEW
@given(mutated_files())
def test_library_agrees_on_accepted_mutated_files(content: bytes) -> None:
    is_accepted_alike(content)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_library_agrees_on_twenty_thousand_mutated_files() -> None:
    accepted, refused, refused_by_us_alone = 0, 0, 0

    @MANY
    @given(mutated_files())
    def check(content: bytes) -> None:
        nonlocal accepted, refused, refused_by_us_alone
        if is_accepted_alike(content):
            accepted += 1
            return
        refused += 1
        try:
            deserialize(content)
        except SafetensorError:
            return
        refused_by_us_alone += 1

    check()
    print(f"{accepted} accepted by both parsers, {refused} refused by ours, {refused_by_us_alone} refused only by ours")
    assert accepted > 1000
    assert refused > 1000
