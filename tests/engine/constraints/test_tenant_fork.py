from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from loramux.engine.constraints.grammar_messages import LENGTH, MAX_ANSWER_BYTES, Follow, Followed, frame
from loramux.engine.constraints.tenant_fork import TenantFork

ANSWER = {"number": 0, "forced": [1], "mask": b"\x01", "failure": None, "cpu_s": 0.1, "compile_s": None}


def framed(message: Any) -> bytes:
    return frame(msgspec.msgpack.encode(message))


BEGUN = framed(Followed(number=-1))


@pytest.fixture
def far_end() -> Iterator[tuple[TenantFork, socket.socket]]:
    """A fork that has been asked for one mask, and its end of the socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fork = TenantFork(b"acme", ours, None)  # type: ignore[arg-type]
        fork.send(Follow(0))
        yield fork, theirs


def test_answers_are_received_in_pieces(far_end: tuple[TenantFork, socket.socket]) -> None:
    fork, theirs = far_end
    sent, received = BEGUN + framed(ANSWER), list[Followed]()
    for byte in sent:
        theirs.send(bytes([byte]))
        received += fork.receive()
    assert [answer.number for answer in received] == [-1, 0]
    assert (received[1].forced, received[1].mask, list(fork.unanswered)) == ((1,), b"\x01", [])


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(framed(ANSWER), id="before it has begun"),
        pytest.param(BEGUN + BEGUN, id="begins twice"),
        pytest.param(BEGUN + framed({**ANSWER, "number": 1}), id="of another sequence"),
        pytest.param(BEGUN + framed(ANSWER) + framed(ANSWER), id="unasked"),
        pytest.param(BEGUN + framed(ANSWER) + BEGUN, id="begins again"),
        pytest.param(BEGUN + frame(b"\xc1"), id="not MessagePack"),
        pytest.param(BEGUN + frame(b"\x81\xa6number\xa1\xff"), id="not UTF-8"),
        pytest.param(BEGUN + framed([1]), id="another type"),
        pytest.param(BEGUN + framed({**ANSWER, "cpu_s": -1.0}), id="negative time"),
        pytest.param(BEGUN + framed({**ANSWER, "cpu_s": float("nan")}), id="no time"),
        pytest.param(BEGUN + framed({**ANSWER, "forced": [-1]}), id="negative token"),
        pytest.param(BEGUN + LENGTH.pack(MAX_ANSWER_BYTES + 1), id="too long"),
    ],
)
def test_false_answers_end_the_fork(far_end: tuple[TenantFork, socket.socket], sent: bytes) -> None:
    fork, theirs = far_end
    theirs.sendall(sent)
    with pytest.raises(OSError, match="the fork has sent"):
        list(fork.receive())
