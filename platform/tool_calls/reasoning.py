"""Separates thinking from the rest of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from loramux.engine.text.detokenizer import overlap
from loramux.platform.tool_calls.reader import MAX_GAP, WHITESPACE


@dataclass(frozen=True, slots=True)
class Markers:
    begin: str
    end: str
    after_begin: str = ""
    """A text that some prompts have after the begin marker."""


THINK = Markers("<think>", "</think>")
"""Qwen3, QwQ, and the DeepSeek-R1 models distilled into Llama and Qwen."""

BRACKETED_THINK = Markers("[THINK]", "[/THINK]")
"""Magistral and Ministral."""

CHANNEL = Markers("<|channel>thought", "<channel|>")
"""Gemma 4."""

SEED_THINK = Markers("<seed:think>", "</seed:think>", "<seed:cot_budget_reflect>")
"""Seed-OSS."""

HARMONY = Markers("<|channel|>analysis<|message|>", "<|end|>")
"""gpt-oss. `harmony.py` reads its answers by token IDs, because any message can end with this end marker."""

REASONING_MARKERS: Mapping[str, Markers] = MappingProxyType(
    {"harmony": HARMONY, "think": THINK, "mistral": BRACKETED_THINK, "gemma4": CHANNEL, "seed_oss": SEED_THINK}
)
"""Maps names in the setting `reasoning_parser` to markers. Templates are searched in this order."""


class ReasoningSplitter:
    """Splits text that arrives in pieces of any length.

    An answer begins with thinking if the prompt ended inside the thinking (`is_open`) or if the answer starts with the
    begin marker, after optional whitespace. The thinking ends at the first end marker. If the prompt has already opened
    the thinking, a begin marker at the start of the answer is dropped. Any other marker is text. Neither part includes
    the markers or the newlines next to them. Thinking without an end marker lasts to the end of the answer.
    """

    def __init__(self, begin: str = THINK.begin, end: str = THINK.end, *, is_open: bool) -> None:
        self._begin = begin
        self._end = end
        self._is_open = is_open
        self._is_starting = True
        """True while the answer may still turn out to start with the begin marker."""
        self.is_thinking = is_open
        """True while the answer is inside the thinking."""
        self._is_trimming = is_open
        """True while newlines are dropped."""
        self._num_newlines = 0
        """Number of newlines at the end of the thinking so far. They are dropped if the end marker follows."""
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Add a piece of the answer. Return the thinking and the other text that are now certain."""
        return self._split(self._held + text, is_last=False)

    def flush(self) -> tuple[str, str]:
        reasoning, content = self._split(self._held, is_last=True)
        reasoning += "\n" * self._num_newlines
        self._num_newlines = 0
        return reasoning, content

    def _split(self, text: str, *, is_last: bool) -> tuple[str, str]:
        self._held = ""
        if self._is_starting:
            stripped = text.lstrip(WHITESPACE)
            is_short = len(text) - len(stripped) <= MAX_GAP
            if is_short and not is_last and len(stripped) < len(self._begin) and self._begin.startswith(stripped):
                self._held = text
                return "", ""
            self._is_starting = False
            if is_short and stripped.startswith(self._begin):
                text = stripped[len(self._begin) :]
                self.is_thinking = self._is_trimming = True
        reasoning = ""
        if self.is_thinking:
            thought, end, text = text.partition(self._end)
            if not end and not is_last:
                certain = len(thought) - overlap(thought, self._end)
                thought, self._held = thought[:certain], thought[certain:]
            reasoning = self._thinking(thought)
            if not end:
                return reasoning, ""
            self.is_thinking = False
            self._is_trimming = True
            self._num_newlines = 0
        return reasoning, self._trimmed(text)

    def _thinking(self, text: str) -> str:
        text = self._trimmed(text)
        body = text.rstrip("\n")
        before = self._num_newlines
        self._num_newlines = len(text) - len(body)
        if not body:
            self._num_newlines += before
            return ""
        return "\n" * before + body

    def _trimmed(self, text: str) -> str:
        if self._is_trimming:
            text = text.lstrip("\n")
            self._is_trimming = not text
        return text
