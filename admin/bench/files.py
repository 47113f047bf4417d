"""Requests from files: datasets of prompts, and traces of arrivals. Both have one JSON object per line."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from loramux.admin.bench.asks import COMPLETIONS, Ask, Lengths, Prompt, RandomPrompts, WorkloadError

MAX_FILE_BYTES = 1 << 30
MAX_TOKENS = 10_000_000
"""Largest number of tokens that a line can ask for."""

Tokens = int | None
Line = TypeVar("Line")


class DatasetLine(msgspec.Struct, frozen=True):
    """A request of a dataset. vLLM's custom datasets have the same fields `prompt` and `output_tokens`."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: Tokens = None
    output_tokens: Tokens = None
    model: str | None = None


class TraceLine(msgspec.Struct, frozen=True):
    """An arrival, as in Mooncake's published traces. `timestamp` is in milliseconds."""

    timestamp: float
    input_length: int
    output_length: int
    model: str | None = None


def read_dataset(path: Path, endpoint: str, answer: Lengths, models: Iterator[str], dice: random.Random) -> list[Ask]:
    """Return the file's requests. A line without a length or a model gets one. Raises WorkloadError."""
    asks = []
    for number, line in _lines(path, DatasetLine):
        prompt = _prompt(line, endpoint, f"{path}, line {number}")
        given = line.max_tokens if line.max_tokens is not None else line.output_tokens
        num_tokens = answer.draw(dice) if given is None else _tokens(given, path, number)
        asks.append(Ask(model=line.model or next(models), prompt=prompt, num_tokens=num_tokens))
    return asks


def read_trace(path: Path, prompts: RandomPrompts, models: Iterator[str], dice: random.Random) -> list[Ask]:
    """Return the trace's requests in order of time, with the first at 0 s. Raises WorkloadError."""
    lines = list(_lines(path, TraceLine))
    for number, line in lines:
        if not (math.isfinite(line.timestamp) and line.timestamp >= 0):
            raise WorkloadError(f"{path}, line {number}: the timestamp must be a number of milliseconds from 0")
    lines.sort(key=lambda numbered: numbered[1].timestamp)
    first_ms = lines[0][1].timestamp
    return [
        Ask(
            model=line.model or next(models),
            prompt=prompts.draw(_tokens(line.input_length, path, number), dice),
            num_tokens=_tokens(line.output_length, path, number),
            at_s=(line.timestamp - first_ms) / 1e3,
        )
        for number, line in lines
    ]


def _prompt(line: DatasetLine, endpoint: str, where: str) -> Prompt:
    if (line.prompt is None) == (line.messages is None):
        raise WorkloadError(f"{where}: it needs either 'prompt' or 'messages'")
    if line.messages is not None:
        if endpoint == COMPLETIONS:
            raise WorkloadError(f"{where}: 'messages' need --endpoint chat")
        messages: tuple[Mapping[str, Any], ...] = tuple(line.messages)
        return messages
    if isinstance(line.prompt, list):
        if endpoint != COMPLETIONS:
            raise WorkloadError(f"{where}: token ids need --endpoint completions")
        return tuple(line.prompt)
    return line.prompt or ""


def _tokens(number: int, path: Path, line: int) -> int:
    if not 1 <= number <= MAX_TOKENS:
        raise WorkloadError(f"{path}, line {line}: a length must be from 1 to {MAX_TOKENS:,} tokens")
    return number


def _lines(path: Path, kind: type[Line]) -> Iterator[tuple[int, Line]]:
    decoder = msgspec.json.Decoder(kind)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise WorkloadError(f"{path} is larger than {MAX_FILE_BYTES >> 30} GiB")
        content = path.read_bytes()
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from None
    found = False
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                yield number, decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise WorkloadError(f"{path}, line {number}: {error}") from None
            found = True
    if not found:
        raise WorkloadError(f"{path} has no requests")
