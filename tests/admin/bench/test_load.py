from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from loramux.admin.bench.answers import read_answer
from loramux.admin.bench.asks import CHAT, COMPLETIONS, Ask
from loramux.admin.bench.load import Connections, Received, run_load
from loramux.admin.client.openai_server import OpenAIServer
from tests.admin.byte_server import byte_server, events
from tests.admin.scripted_gateway import MODEL, Gateway, open_gateway

ASK = Ask(model=MODEL, prompt="the cat", num_tokens=2)
TOKEN = '{"choices": [{"text": "a"}]}'
USAGE = '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, demo_base: Path) -> Iterator[Gateway]:
    with open_gateway(tmp_path_factory.mktemp("gateway"), demo_base) as gateway:
        yield gateway


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_every_answer_of_a_load_is_read(gateway: Gateway, endpoint: str) -> None:
    asks = [Ask(model=MODEL, prompt="the cat", num_tokens=number, more={"ignore_eos": True}) for number in range(1, 9)]
    counts: list[int] = []
    outcome = run_load(gateway.server, endpoint, [(0.0, ask) for ask in asks], max_open=3, advance=counts.append)
    answers = [read_answer(received) for received in outcome.received]
    assert [answer.error for answer in answers] == [None] * 8
    assert [answer.num_tokens for answer in answers] == list(range(1, 9))
    assert all(answer.num_prompt > 0 and answer.is_counted for answer in answers)
    assert answers[-1].text
    assert not any(answer.has_other_length for answer in answers)
    assert counts == list(range(1, 9))
    for answer in answers:
        times = (answer.received.sent_s, *answer.times_s, answer.received.ended_s)
        assert list(times) == sorted(times)
    assert outcome.seconds >= max(answer.latency_s for answer in answers)


def test_requests_are_sent_when_due_and_only_as_many_as_allowed(gateway: Gateway) -> None:
    due = [(0.02 * number, ASK) for number in range(4)]
    received = run_load(gateway.server, COMPLETIONS, due, max_open=1).received
    # The event loop's timers have a resolution of a millisecond.
    assert all(one.sent_s >= one.due_s - 0.002 for one in received)
    assert all(later.sent_s >= earlier.ended_s for earlier, later in itertools.pairwise(received))
    assert [round(one.due_s - received[0].due_s, 6) for one in received] == [0.0, 0.02, 0.04, 0.06]


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (b"HTTP/1.1 429 No\r\ncontent-length: 33\r\n\r\n" + b'{"error": {"message": "\\u001b[2J"}}'[:33], "429"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 4\r\n\r\n\x1bbad", "the server returned 500: \ufffdbad"),
        (events(TOKEN, '{"error": {"message": "the engine stopped"}}'), "the engine stopped"),
        (events('{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 0}}'), "the answer has no tokens"),
        (events("{}"), "the answer has no tokens"),
        (events('{"choices": [1]}'), "not a stream of events"),
        (
            events('{"choices": [{"text": "a"}], "usage": {"prompt_tokens": -1, "completion_tokens": 1}}'),
            "not a stream",
        ),
        (events('{"choices": '), "not a stream of events"),
        (b"HTTP/1.1 200 OK\r\n\r\n[" * 1000, "no tokens"),
        (b"SSH-2.0\r\n\r\n", "does not speak HTTP"),
        (b"", "closed the connection"),
        (events(TOKEN)[:-5], "closed the connection"),
    ],
)
def test_failures_are_told(response: bytes, error: str) -> None:
    with byte_server([response]) as server:
        (received,) = run_load(server, COMPLETIONS, [(0.0, ASK)]).received
    answer = read_answer(received)
    assert answer.error is not None
    assert error in answer.error
    assert "\x1b" not in answer.error


def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    with byte_server([events(TOKEN, TOKEN, USAGE)]) as server:
        due = [(0.0, ASK), (0.05, ASK), (0.1, ASK)]
        answers = [read_answer(one) for one in run_load(server, COMPLETIONS, due, max_open=1).received]
    assert [answer.error for answer in answers] == [None] * 3
    assert [answer.num_tokens for answer in answers] == [2] * 3


def test_an_idle_connection_that_the_server_reset_is_replaced() -> None:
    async def send_twice() -> list[Received]:
        connections, sent = Connections(server, COMPLETIONS), [Received(ASK, 0.0) for _ in range(2)]
        for received in sent:
            await connections.send(received)
            for _, writer in connections._idle:
                # Like a reset, this closes the transport.
                writer.transport.abort()
                await writer.wait_closed()
        connections.close()
        return sent

    with byte_server([events(TOKEN, TOKEN, USAGE)], closes=False) as server:
        assert [read_answer(received).error for received in uvloop.run(send_twice())] == [None] * 2


def test_a_server_that_is_silent_runs_into_the_time_limit() -> None:
    with byte_server([b"HTTP/1.1 200 OK\r\n"], closes=False) as server:
        (received,) = run_load(server, COMPLETIONS, [(0.0, ASK)], timeout_s=0.05).received
    assert read_answer(received).error == "no complete answer within 0.05 s"


def test_a_port_without_a_server_is_told() -> None:
    server = OpenAIServer(url="http://127.0.0.1:9/v1", key=None)
    (received,) = run_load(server, COMPLETIONS, [(0.0, ASK)]).received
    assert "refused" in str(read_answer(received).error).lower()


def test_tokens_without_text_have_arrived_with_the_usage() -> None:
    with byte_server([events(USAGE)]) as server:
        (received,) = run_load(server, COMPLETIONS, [(0.0, ASK)]).received
    answer = read_answer(received)
    assert (answer.error, answer.num_tokens, answer.text, len(answer.times_s)) == (None, 2, "", 1)


def test_events_are_counted_if_the_server_reports_no_usage() -> None:
    with byte_server([events(TOKEN, TOKEN, TOKEN, "[DONE]")]) as server:
        (received,) = run_load(server, COMPLETIONS, [(0.0, ASK)]).received
    answer = read_answer(received)
    assert (answer.num_tokens, answer.is_counted, answer.has_other_length) == (3, False, True)


def test_events_of_chat_count_as_in_vllm() -> None:
    deltas = (
        '{"role": "assistant", "content": ""}',
        '{"content": ""}',
        '{"reasoning_content": "hm"}',
        '{"content": "a\u2028b"}',
        '{"tool_calls": [{}]}',
        "{}",
    )
    with byte_server([events(*(f'{{"choices": [{{"delta": {delta}}}]}}' for delta in deltas))]) as server:
        (received,) = run_load(server, CHAT, [(0.0, ASK)]).received
    answer = read_answer(received)
    assert (len(answer.times_s), answer.text, answer.error) == (4, "a\u2028b", None)
