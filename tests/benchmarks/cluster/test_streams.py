from __future__ import annotations

import pytest

from benchmarks.cluster.streams import Overheads, note_answer
from benchmarks.gateway.clients import Received
from benchmarks.peers.system import SystemFailed
from benchmarks.sharing.stamping_engine import stamp

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
END = b"data: [DONE]\n\n"


def chunk(*times_s: float) -> bytes:
    stamps = ",".join(str(stamp(time_s)) for time_s in times_s)
    return f'data: {{"choices":[{{"logprobs":{{"token_logprobs":[{stamps}]}}}}]}}\n\n'.encode()


def received(*reads: tuple[float, bytes]) -> Received:
    return Received(100.0, [data for _, data in reads], [time_s for time_s, _ in reads])


def test_each_chunk_is_as_old_as_its_read_is_late() -> None:
    second, third = chunk(100.2), chunk(100.5, 100.6)
    found = Overheads()
    # A chunk counts as received with the read that completes it.
    answer = received((100.1, HEAD + chunk(100.05)), (100.25, second), (100.6, third[:30]), (100.7, third[30:] + END))
    note_answer(answer, 4, found)
    assert found.requests_s == [pytest.approx(0.1)]
    assert found.chunks_s == [pytest.approx(0.05), pytest.approx(0.2)]


@pytest.mark.parametrize(
    "data",
    [HEAD + chunk(100.0) + END, HEAD + chunk(100.0, 100.1), b"HTTP/1.1 503 X\r\n\r\n" + chunk(100.0, 100.1) + END],
    ids=["short", "cut", "refused"],
)
def test_a_failed_or_short_answer_ends_the_run(data: bytes) -> None:
    with pytest.raises(SystemFailed, match="tokens instead of 2"):
        note_answer(received((100.1, data)), 2, Overheads())
