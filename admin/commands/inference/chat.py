"""`loramux chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loramux.admin.commands.inference.openai_options import ApiKey, OpenAIUrl, openai_server
from loramux.admin.commands.output import fail, print_text
from loramux.admin.exit_codes import REFUSED, UNREACHABLE

if TYPE_CHECKING:
    from loramux.admin.chat.session import Session

MAX_STDIN_BYTES = 64 << 20
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def chat(
    model: Annotated[
        str | None, typer.Argument(help="The model to ask (default: the first that the server lists).")
    ] = None,
    url: OpenAIUrl = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="Sampling temperature.")] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Take the whole standard input as one question, not one per line.")
    ] = False,
) -> None:
    """Talk with a model of any OpenAI API. In the terminal, /help lists the commands, and Ctrl-C stops an answer.

    If standard input is a pipe, each of its lines is a question, and only answers are printed to standard output.
    """
    from loramux.admin.chat.client import ChatClient, ChatError, ChatUnreachable
    from loramux.admin.chat.conversation import Conversation
    from loramux.admin.chat.session import Session

    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    more = {name: value for name, value in given.items() if value is not None}
    try:
        with ChatClient(openai_server(url, api_key)) as client:
            name = model or _first(client.models())
            session = Session(client, Conversation(name, system), Terminal(), more)
            if sys.stdin.isatty() and not whole:
                _greet(session)
                session.converse(_line_reader())
            else:
                _answer_pipe(session, whole)
    except ChatUnreachable as error:
        fail(str(error), UNREACHABLE)
    except ChatError as error:
        fail(str(error), REFUSED)


class Terminal:
    """Answers go to standard output and everything else to standard error. A model's reasoning is shown in a terminal,
    dimmed.
    """

    def __init__(self) -> None:
        self._shows_reasoning = sys.stdout.isatty()
        self._is_dim = False

    def write(self, text: str, *, is_reasoning: bool = False) -> None:
        if is_reasoning and not self._shows_reasoning:
            return
        if is_reasoning != self._is_dim:
            sys.stdout.write(DIM if is_reasoning else f"{PLAIN}\n")
            self._is_dim = is_reasoning
        sys.stdout.write(text.encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding))
        sys.stdout.flush()

    def tell(self, text: str) -> None:
        if self._is_dim:
            sys.stdout.write(PLAIN)
            self._is_dim = False
        sys.stdout.flush()
        print_text(text, file=sys.stderr)


def _first(models: list[str]) -> str:
    if not models:
        fail("the key can use no model", REFUSED)
    return models[0]


def _greet(session: Session) -> None:
    from loramux.admin.client.safe_text import safe_text

    session.screen.tell(f"{safe_text(session.conversation.model)} at {session.client.url}: /help lists the commands")


def _line_reader() -> Callable[[], str]:
    # Importing readline gives input() a line editor and a history.
    import readline

    from loramux.admin.chat.session import HELP

    commands = [command.partition(" ")[0] for command in HELP]
    readline.set_completer_delims(" ")
    readline.set_completer(lambda text, number: dict(enumerate(_completed(text, commands))).get(number))
    readline.parse_and_bind("tab: complete")
    return lambda: input("> ")


def _completed(text: str, commands: list[str]) -> list[str]:
    return [command for command in commands if text.startswith("/") and command.startswith(text)]


def _answer_pipe(session: Session, is_whole: bool) -> None:
    """Lines of a pipe are never commands, because their author may not be the user."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    lines = [sys.stdin.read(MAX_STDIN_BYTES)] if is_whole else sys.stdin
    for line in lines:
        if line.strip():
            session.ask(line.strip())
