"""Checks the arguments of calls, which come from programs without types."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loramux.engine.constraints.constraint_grammar import constraint_grammar
from loramux.engine.protocol.messages import SamplingParams

Prompt = str | Sequence[int]
"""A text, or token ids."""


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts of a call. Raises ValueError."""
    if isinstance(prompts, str | bytes | bytearray | memoryview):
        return [prompts]
    if isinstance(prompts, Mapping):
        # Its keys are texts, and would be taken for prompts. A tokenizer of transformers returns such a mapping.
        keys = ", ".join(map(str, prompts))
        raise ValueError(f"prompts is a mapping with the keys {keys}: give the token ids themselves")
    listed: list[Any] = list(prompts)
    return [listed] if listed and _is_token_id(listed[0]) else listed


def _is_token_id(one: Any) -> bool:
    # Every prompt has a length. A tensor has the method even if it is a single number.
    return not isinstance(one, str) and (not hasattr(one, "__len__") or getattr(one, "ndim", None) == 0)


def token_ids_of(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return the token ids of a prompt. Raises ValueError."""
    # Bytes are a sequence of integers, but of no tokens.
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise ValueError("a prompt is a text or a list of token ids: decode bytes first")
    try:
        ids = tuple(map(operator.index, prompt))
    except TypeError:
        listed = prompt if isinstance(prompt, list | tuple) else [prompt]
        is_chat = any(isinstance(one, Mapping) and "role" in one for one in listed)
        instead = ": `chat` answers messages" if is_chat else ""
        raise ValueError(f"a prompt is a text or a list of token ids, not {prompt!r:.80}{instead}") from None
    if min(ids, default=0) < 0:
        raise ValueError("token ids must not be negative")
    return ids


def adapter_names(
    listed: Sequence[Any], adapter: str | Sequence[str | None] | None, kind: str = "prompts"
) -> list[str | None]:
    """Return the name of the adapter of each prompt or conversation. Raises ValueError."""
    names = [adapter] * len(listed) if adapter is None or isinstance(adapter, str) else list(adapter)
    if len(names) != len(listed):
        raise ValueError(f"there are {len(listed)} {kind}, but {len(names)} adapters")
    return names


def token_limit(max_tokens: int) -> int:
    """Return the token limit of an answer. Raises ValueError."""
    if not hasattr(max_tokens, "__index__") or max_tokens < 1:
        raise ValueError(f"max_tokens must be a whole number of at least 1, not {max_tokens!r}")
    return operator.index(max_tokens)


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(one, str) and one for one in stops):
        raise ValueError("stop strings are texts and must not be empty")
    return stops


def checked_sampling(sampling: SamplingParams) -> SamplingParams:
    """Return the parameters with the types that the engine expects. Raises ValueError."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams)
    except (msgspec.ValidationError, TypeError, OverflowError) as error:
        raise ValueError(f"the sampling parameters cannot be used: {error}") from error


def grammar_of(
    schema: Mapping[str, Any] | bool | None, regex: str | None, choice: Sequence[str] | None, grammar: str | None
) -> str:
    # A text is a sequence of texts, too, but its letters are not meant.
    is_text = isinstance(choice, str)
    if choice is not None and (is_text or not choice or not all(isinstance(one, str) and one for one in choice)):
        raise ValueError("choice must be a list of texts that are not empty")
    try:
        schema_text = None if schema is None else json.dumps(schema)
    except TypeError as error:
        raise ValueError(f"schema must be a JSON Schema of dictionaries and lists: {error}") from None
    given = {
        "json_schema": schema_text,
        "regex": regex,
        "choice": None if choice is None else json.dumps(list(choice)),
        "grammar": grammar,
    }
    constraints = [(kind, text) for kind, text in given.items() if text is not None]
    if len(constraints) > 1:
        raise ValueError("schema, regex, choice and grammar exclude each other")
    return constraint_grammar(*constraints[0]) if constraints else ""
