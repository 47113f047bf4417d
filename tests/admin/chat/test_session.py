"""Conversations with a gateway of ours, and with servers that misbehave."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loramux.admin.chat.client import ChatClient, ChatError
from loramux.admin.chat.conversation import Conversation
from loramux.admin.chat.session import Session
from loramux.admin.client.openai_server import OpenAIServer
from tests.admin.byte_server import byte_server, events
from tests.admin.scripted_gateway import MODEL, Gateway, open_gateway
from tests.platform.scripted_engine import Script, echo

HELLO = '{"choices": [{"delta": {"content": "Hello"}}]}'


@dataclass(slots=True)
class Shown:
    """What a terminal would show."""

    answers: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    stops_after: int | None = None
    """Press Ctrl-C once this many parts have been shown."""

    def write(self, text: str, *, is_reasoning: bool = False) -> None:
        self.answers.append(f"({text})" if is_reasoning else text)
        if len(self.answers) == self.stops_after:
            raise KeyboardInterrupt

    def tell(self, text: str) -> None:
        self.told.append(text)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, demo_base: Path) -> Iterator[Gateway]:
    with open_gateway(tmp_path_factory.mktemp("gateway"), demo_base) as gateway:
        yield gateway


def converse(server: OpenAIServer, *lines: str | type[BaseException], stops_after: int | None = None) -> Session:
    """Have a conversation in which the user types these lines, or presses a key that raises."""
    typed = iter(lines)

    def read_line() -> str:
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    with ChatClient(server) as client:
        session = Session(client, Conversation(MODEL), Shown(stops_after=stops_after), {"max_tokens": 8})
        session.converse(read_line)
    return session


def told(session: Session) -> list[str]:
    return shown(session).told


def shown(session: Session) -> Shown:
    assert isinstance(session.screen, Shown)
    return session.screen


def test_a_conversation_has_a_history_and_a_system_message(gateway: Gateway) -> None:
    session = converse(gateway.server, "/system Be brief", "Who are you?", "And I?", "/clear", "Again", "/system -")
    prompts = [add.prompt for add in gateway.engine.adds[-3:]]
    assert len(prompts[1]) > len(prompts[0]) > len(prompts[2]) - 10
    assert prompts[1][: len(prompts[0]) - 8] == prompts[0][:-8]
    assert [turn["role"] for turn in session.conversation.turns] == ["user", "assistant"]
    assert session.conversation.turns[0]["content"] == "Again"
    assert "".join(shown(session).answers).rstrip("\n").endswith(session.conversation.turns[1]["content"])
    assert told(session) == ["system message: Be brief", "the conversation is empty", "there is no system message"]


def test_a_lone_surrogate_does_not_end_the_conversation(gateway: Gateway) -> None:
    session = converse(gateway.server, "a\udcff", "Again")
    assert told(session) == []
    assert len(session.conversation.turns) == 4


def test_commands_are_explained(gateway: Gateway, tmp_path: Path) -> None:
    session = converse(gateway.server, "/help", "/models", "/xyz", "/save", "/model", "/quit", "never asked")
    assert "/save FILE" in told(session)[0]
    assert told(session)[1:] == [
        "loramux: there is no command /models: did you mean /model?",
        "loramux: there is no command /xyz: /help lists them",
        "loramux: name a file: /save FILE",
        f"* {MODEL}",
    ]
    assert session.conversation.turns == []


def test_a_conversation_is_saved_but_overwrites_nothing(gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    session = converse(gateway.server, "/system x", "Hi", f"/save {file}", f"/save {file}", f"/save {tmp_path}/no/a")
    saved = json.loads(file.read_text())
    assert saved["model"] == MODEL
    assert saved["messages"] == [{"role": "system", "content": "x"}, *session.conversation.turns]
    assert [line.partition(file.name)[2] for line in told(session)[2:3]] == [" exists: choose another name"]
    assert "cannot be written" in told(session)[3]


def test_an_unknown_model_is_told_and_the_conversation_goes_on(gateway: Gateway) -> None:
    session = converse(gateway.server, "/model the-bass", "Hi", f"/model {MODEL}", "Hi")
    assert told(session)[1].startswith("loramux: ")
    assert told(session)[1].endswith(f"did you mean {MODEL}?")
    assert len(session.conversation.turns) == 2


def test_a_wrong_key_is_told(gateway: Gateway) -> None:
    session = converse(OpenAIServer(url=gateway.server.url, key="sk-lmx-wrong"), "Hi")
    assert told(session)[0].endswith("set OPENAI_API_KEY to a key of this server")


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(gateway: Gateway) -> None:
    # Without Ctrl-C, this answer would never end.
    gateway.engine.script = lambda add: Script(token_ids=add.prompt, stall_after=8)
    session = converse(gateway.server, KeyboardInterrupt, "Tell me more", "/system", stops_after=1)
    gateway.engine.script = echo
    assert told(session) == ["\n/quit or Ctrl-D ends the conversation", "\n[stopped]", "there is no system message"]
    assert [turn["content"] for turn in session.conversation.turns] == ["Tell me more", shown(session).answers[0]]
    while not gateway.engine.aborts:
        time.sleep(0.01)


def test_a_stopped_answer_is_kept_as_far_as_it_was_shown() -> None:
    with byte_server([events(HELLO, '{"choices": [{"delta": {"content": " you"}}]}', HELLO)]) as server:
        session = converse(server, "Hi", stops_after=2)
    assert session.conversation.turns[1]["content"] == "Hello you"


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (
            b"HTTP/1.1 429 No\r\nretry-after: 7\r\ncontent-length: 31\r\n\r\n"
            + b'{"error": {"message": "slower"}}'[:31],
            "7 s",
        ),
        (b"HTTP/1.1 500 No\r\ncontent-length: 6\r\n\r\n\x1b[2Jno", "the server returned 500: \ufffd[2Jno"),
        (b"HTTP/1.1 302 No\r\nlocation: http://elsewhere\r\ncontent-length: 0\r\n\r\n", "the server returned 302"),
        (events(HELLO, '{"error": {"message": "it broke"}}'), "it broke"),
        (events("{"), "does not answer with a stream"),
        (events('{"choices": [[]]}'), "does not answer with a stream"),
        (events('{"choices": {"a": 1}}'), "does not answer with a stream"),
        (events(HELLO)[:-3], "no server answers at"),
        (b"", "no server answers at"),
    ],
)
def test_failures_are_told_and_their_questions_forgotten(response: bytes, said: str) -> None:
    with byte_server([response]) as server:
        session = converse(server, "Hi")
    assert said in told(session)[0]
    assert "\x1b" not in told(session)[0]
    assert session.conversation.turns == []


def test_an_answer_that_is_cut_off_in_its_reasoning_is_explained() -> None:
    thought = '{"choices": [{"delta": {"reasoning": "Hm"}, "finish_reason": null}]}'
    cut = '{"choices": [{"delta": {}, "finish_reason": "length"}]}'
    for parts, is_told in (((thought, cut), True), ((thought, HELLO, cut), False), ((thought,), False)):
        with byte_server([events(*parts)]) as server:
            session = converse(server, "Who are you?")
        assert told(session) == (["[the answer reached its token limit before its text began]"] if is_told else [])
        assert shown(session).answers[0] == "(Hm)"


def test_text_cannot_control_the_terminal() -> None:
    evil = json.dumps(
        {"choices": [{"delta": {"content": "a\x1b]0;x\x07\x9b2J\u202e\r\nb\U0001f468\u200d\U0001f469\ud800"}}]}
    )
    thought = '{"choices": [{"delta": {"reasoning_content": "hm\\u001b[31m"}}]}'
    names = b'{"data": [{"id": "\\u001b[31mred"}]}'
    with byte_server([events(thought, evil)]) as server:
        session = converse(server, "Hi")
    assert shown(session).answers[0] == "(hm\ufffd[31m)"
    assert shown(session).answers[1] == "a\ufffd]0;x\ufffd\ufffd2J\ufffd\nb\U0001f468\u200d\U0001f469\ufffd"
    with byte_server([b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(names) + names]) as server:
        session = converse(server, "/model", "/model \x1b[31mx", "/system \x1b[31mx")
    assert told(session) == ["  \ufffd[31mred", "now asking \ufffd[31mx", "system message: \ufffd[31mx"]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"data": 5}', b"[" * 100_000])
def test_a_list_that_is_none_is_told(body: bytes) -> None:
    response = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with (
        byte_server([response]) as server,
        ChatClient(server) as client,
        pytest.raises(ChatError, match="not an OpenAI"),
    ):
        client.models()
