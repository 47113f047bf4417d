"""gpt-oss's harmony format: an answer is a sequence of messages, and each message has a channel.

One message: `<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>`. Its
header ends with `<|message|>`. Only special tokens separate messages and headers. Ordinary tokens that spell a marker
are text. See https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from loramux.engine.chat_templates.harmony_channel import HARMONY_CHANNEL
from loramux.platform.tool_calls.reader import is_function_name

NAME = "harmony"
"""The name of this format in the settings `tool_call_parser` and `reasoning_parser`."""

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", HARMONY_CHANNEL, "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"

MAX_HEADER_BYTES = 1024
"""Longest part of a header that is read, in bytes. Further bytes are dropped."""

_FUNCTIONS = "functions."
_READERS = ("all", "assistant", "user")
"""Recipients that are not tools."""
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")


class Destination(Enum):
    """The part of a chat message that a text belongs to."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


@dataclass(frozen=True, slots=True)
class Message:
    """An open message. `recipient` is the tool that it calls, if it calls one."""

    channel: str
    recipient: str | None = None

    @staticmethod
    def of_header(role: bytes, channel: bytes) -> Message:
        """Read the two parts of a header. Either can name the recipient."""
        parts = [part.decode("utf-8", "replace") for part in (channel, role)]
        recipients = (found[1] for part in parts if (found := _RECIPIENT.search(part)))
        recipient = next((one for one in recipients if one not in _READERS), None)
        first = next(iter(parts[0].split()), "")
        return Message("" if first.startswith("to=") else first, recipient)

    @property
    def function(self) -> str | None:
        """The name of the function that the message calls. None for other tools, which no request can offer."""
        name = (self.recipient or "").removeprefix(_FUNCTIONS)
        return name if name != self.recipient and is_function_name(name) else None

    @property
    def destination(self) -> Destination:
        """Only text that the model addresses to the user is content. Text in an unknown channel is reasoning."""
        if self.function is not None:
            return Destination.CALL
        is_content = self.recipient is None and self.channel in (FINAL, COMMENTARY, "")
        return Destination.CONTENT if is_content else Destination.REASONING


@dataclass(frozen=True, slots=True)
class Place:
    """A position in an answer: in the text of `message`, or in a header that has these parts so far."""

    message: Message | None = None
    role: bytes = b""
    channel: bytes | None = None


_BETWEEN = Place()


class Harmony:
    """The format, with the token IDs of one model. The place after a token depends only on that token and the place
    before it.

    Reading never raises, and a place takes bounded memory. A message without an end marker ends where the next header
    begins. Without `<|start|>`, a header begins after the end of a message.
    """

    def __init__(self, ids: Mapping[str, int], spelled: Callable[[int], bytes]) -> None:
        """`ids` maps each marker to its token ID. `spelled` returns the bytes of a token."""
        self.ids = ids
        self._markers = {token_id: marker for marker, token_id in ids.items()}
        self._spelled = spelled

    @staticmethod
    def of(token_id_of: Callable[[str], int | None], spelled: Callable[[int], bytes]) -> Harmony | None:
        """Return None if any marker is not one of the model's special tokens."""
        ids = {marker: token_id for marker in MARKERS if (token_id := token_id_of(marker)) is not None}
        return Harmony(ids, spelled) if len(ids) == len(MARKERS) else None

    @property
    def final_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer. `<|call|>` is one, because the client must run the call before the model
        continues.
        """
        return self.ids[RETURN], self.ids[CALL]

    def is_text(self, place: Place, token_id: int) -> bool:
        """True if the token belongs to the text of the place's message."""
        return place.message is not None and token_id not in self._markers

    def after(self, place: Place, token_id: int) -> Place:
        """Return the place after another token."""
        marker = self._markers.get(token_id)
        if place.message is not None and marker in (None, MESSAGE, CONSTRAIN):
            return place
        if marker is None:
            return self._longer_header(place, self._spelled(token_id))
        if marker == CONSTRAIN:
            return self._longer_header(place, b" ")
        if marker == CHANNEL:
            return Place(role=place.role, channel=b"")
        return Place(Message.of_header(place.role, place.channel or b"")) if marker == MESSAGE else _BETWEEN

    def _longer_header(self, place: Place, added: bytes) -> Place:
        if place.channel is None:
            return Place(role=(place.role + added)[:MAX_HEADER_BYTES])
        return Place(role=place.role, channel=(place.channel + added)[:MAX_HEADER_BYTES])

    def end_of(self, prompt: Sequence[int]) -> Place:
        """Return the place where a prompt ends. The answer continues there."""
        start, place = self.ids[START], _BETWEEN
        last = next((at for at in range(len(prompt) - 1, -1, -1) if prompt[at] == start), 0)
        for token_id in prompt[last:]:
            place = self.after(place, token_id)
        return place


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Decides the destination of each message in an answer. The answer begins at `place`."""

    format: Harmony
    place: Place
    has_reasoning: bool
    """If False, reasoning is part of the content."""
    has_calls: bool
    """If False, calls are part of the reasoning."""

    def destination(self, message: Message) -> Destination:
        found = message.destination
        if found is Destination.CALL and not self.has_calls:
            found = Destination.REASONING
        if found is Destination.REASONING and not self.has_reasoning:
            found = Destination.CONTENT
        return found
