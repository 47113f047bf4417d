"""The messages of a conversation."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Conversation:
    """A model, an optional system message, and the messages so far. A question without an answer is not kept."""

    model: str
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> list[dict[str, str]]:
        """Return the messages of a request with a new question."""
        return [*self._opening(), *self.turns, {"role": "user", "content": question}]

    def keep(self, question: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def clear(self) -> None:
        """Forget the messages, but not the model and the system message."""
        self.turns.clear()

    def save(self, path: Path) -> None:
        """Write the conversation as JSON, in the form of a request's body. Raises OSError, also if the file exists."""
        document: dict[str, Any] = {"model": self.model, "messages": [*self._opening(), *self.turns]}
        with path.open("x", encoding="utf-8") as file:
            # Non-ASCII characters are escaped, because a model can emit lone surrogates, which UTF-8 cannot encode.
            json.dump(document, file, indent=2)
            file.write("\n")

    def _opening(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]
