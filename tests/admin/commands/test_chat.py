"""`loramux chat` over a pipe and in a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.admin.byte_server import byte_server, events
from tests.admin.command_line import invoke
from tests.admin.scripted_gateway import MODEL, Gateway, open_gateway

EVIL = '{"choices": [{"delta": {"content": "\\u001b[31mred"}}]}'


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, demo_base: Path) -> Iterator[Gateway]:
    with open_gateway(tmp_path_factory.mktemp("gateway"), demo_base) as gateway:
        yield gateway


def test_each_line_of_a_pipe_is_a_question(gateway: Gateway) -> None:
    num_requests = len(gateway.engine.adds)
    done = invoke("chat", "--max-tokens", 4, input="Hello\n\n/quit\nAgain", env=gateway.variables)
    assert done.exit_code == 0, done.output
    adds = gateway.engine.adds[num_requests:]
    # A pipe has no commands.
    assert len(adds) == 3
    assert len(adds[0].prompt) < len(adds[1].prompt) < len(adds[2].prompt)
    assert {add.max_tokens for add in adds} == {4}
    assert done.stderr == ""


def test_a_whole_input_is_one_question(gateway: Gateway) -> None:
    num_requests = len(gateway.engine.adds)
    done = invoke("chat", MODEL, "--whole", "--system", "Be brief", input="Hello\nAgain", env=gateway.variables)
    assert done.exit_code == 0
    assert len(gateway.engine.adds) == num_requests + 1


def test_failures_have_exit_codes(gateway: Gateway) -> None:
    def failed(*arguments: str, **variables: str | None) -> tuple[int, str]:
        done = invoke("chat", *arguments, input="Hello", env={**gateway.variables, **variables})
        assert done.stdout == ""
        return done.exit_code, done.stderr

    assert failed("the-bass")[0] == 1
    assert "did you mean the-base?" in failed("the-bass")[1]
    assert failed(OPENAI_API_KEY="sk-lmx-wrong")[0] == 1
    code, said = failed("--url", "http://127.0.0.1:9/v1")
    assert (code, said.startswith("loramux: no server answers at http://127.0.0.1:9/v1")) == (3, True)
    code, said = failed(OPENAI_API_KEY=None, OPENAI_BASE_URL=None)
    assert (code, "set OPENAI_BASE_URL and OPENAI_API_KEY" in said) == (3, True)


def test_a_terminal_has_commands_and_shows_no_control_sequences() -> None:
    with byte_server([events(EVIL)]) as server:
        command = [sys.executable, "-m", "loramux.admin.cli", "chat", "m", "--url", server.url]
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "dumb"}
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as chat:
            os.close(theirs)
            os.write(ours, b"Hello\n/nothing\n/quit\n")
            shown = b""
            # Linux reports the end of a terminal's other side as an error.
            while data := _read(ours):
                shown += data
        os.close(ours)
    assert chat.returncode == 0
    assert b"/help lists the commands" in shown
    assert "\ufffd[31mred".encode() in shown
    assert b"there is no command /nothing" in shown
    assert b"\x1b[31m" not in shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
