"""A conversation in a terminal or over a pipe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from loramux.admin.chat.client import ChatClient, ChatError, ModelUnknown, explained
from loramux.admin.chat.conversation import Conversation
from loramux.admin.client.safe_text import safe_text
from loramux.admin.client.suggestions import did_you_mean

HELP: Mapping[str, str] = {
    "/model [NAME]": "list the models, or ask another one from now on",
    "/system [TEXT]": "show or set the system message; '/system -' removes it",
    "/clear": "forget the messages so far",
    "/save FILE": "write the conversation to a new JSON file",
    "/help": "show these commands",
    "/quit": "end (or Ctrl-D)",
}


class Screen(Protocol):
    """Where a session writes. It receives only text that is safe for a terminal."""

    def write(self, text: str, *, is_reasoning: bool = False) -> None:
        """Show a part of an answer."""

    def tell(self, text: str) -> None:
        """Show a line that is not part of an answer."""


@dataclass(slots=True)
class Session:
    """`more` are fields that are added to each request."""

    client: ChatClient
    conversation: Conversation
    screen: Screen
    more: Mapping[str, Any] = field(default_factory=dict)

    def converse(self, read_line: Callable[[], str]) -> None:
        """Answer lines until `/quit` or until `read_line` raises EOFError; Ctrl-C discards a line or an answer."""
        while True:
            try:
                line = read_line().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self.screen.tell("\n/quit or Ctrl-D ends the conversation")
                continue
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                with contextlib.suppress(KeyboardInterrupt):
                    self._ask_or_tell(line)

    def ask(self, question: str) -> None:
        """Ask a question, show the answer, and keep both. Raises ChatError.

        If Ctrl-C stops the answer, its part so far is kept, and KeyboardInterrupt is raised.
        """
        shown: list[str] = []
        is_cut = False
        messages = self.conversation.messages(question)
        try:
            with contextlib.closing(self.client.answer(self.conversation.model, messages, self.more)) as parts:
                for part in parts:
                    is_cut |= part.is_cut
                    if not part.text:
                        continue
                    if not part.is_reasoning:
                        shown.append(part.text)
                    self.screen.write(safe_text(part.text), is_reasoning=part.is_reasoning)
        except ModelUnknown as error:
            raise ChatError(explained(error, self.client, self.conversation.model)) from None
        except KeyboardInterrupt:
            if shown:
                self.conversation.keep(question, "".join(shown))
            self.screen.tell("\n[stopped]")
            raise
        self.conversation.keep(question, "".join(shown))
        self.screen.write("\n")
        if is_cut and not shown:
            # A pipe shows no reasoning, so nothing else would explain the empty answer.
            self.screen.tell("[the answer reached its token limit before its text began]")

    def _ask_or_tell(self, question: str) -> None:
        try:
            self.ask(question)
        except ChatError as error:
            self.screen.tell(f"loramux: {error}")

    def _command(self, line: str) -> bool:
        """Return False to end the conversation."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        match name:
            case "/quit" | "/exit":
                return False
            case "/help":
                width = max(map(len, HELP))
                self.screen.tell("\n".join(f"{command:{width}}  {meaning}" for command, meaning in HELP.items()))
            case "/clear":
                self.conversation.clear()
                self.screen.tell("the conversation is empty")
            case "/model":
                self._model(argument)
            case "/system":
                self._system(argument)
            case "/save":
                self._save(argument)
            case _:
                close = did_you_mean(name, [command.partition(" ")[0] for command in HELP])
                self.screen.tell(f"loramux: there is no command {safe_text(name)}{close or ': /help lists them'}")
        return True

    def _model(self, name: str) -> None:
        if name:
            self.conversation.model = name
            self.screen.tell(f"now asking {safe_text(name)}")
            return
        try:
            names = self.client.models()
        except ChatError as error:
            self.screen.tell(f"loramux: {error}")
            return
        for one in names:
            mark = "*" if one == self.conversation.model else " "
            self.screen.tell(f"{mark} {safe_text(one)}")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text == "-" else text
        now = self.conversation.system
        self.screen.tell("there is no system message" if now is None else f"system message: {safe_text(now)}")

    def _save(self, name: str) -> None:
        if not name:
            self.screen.tell("loramux: name a file: /save FILE")
            return
        path = Path(name).expanduser()
        try:
            self.conversation.save(path)
        except FileExistsError:
            self.screen.tell(f"loramux: {path} exists: choose another name")
        except (OSError, ValueError) as error:
            self.screen.tell(f"loramux: {path} cannot be written: {getattr(error, 'strerror', None) or error}")
        else:
            self.screen.tell(f"saved {len(self.conversation.turns)} messages in {path}")
