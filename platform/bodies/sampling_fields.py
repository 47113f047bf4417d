"""The fields that all surfaces share: the model, and how its tokens are chosen and when an answer ends."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from loramux.engine.scheduling.request_limits import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_PENALTY,
    REPETITION_PENALTIES,
)
from loramux.platform.bodies.strict_model import StrictModel

MAX_MODEL_NAME = 256
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_BAD_WORD_CHARACTERS = 128
MAX_PRIORITY = 2**31 - 1
INT64 = 2**63


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def usable_stops(stops: list[str] | None) -> list[str] | None:
    if stops is not None and len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are allowed")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops or ()):
        raise ValueError(f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters")
    return stops


def _usable_words(words: list[str] | None) -> list[str] | None:
    for word in words or ():
        if len(word) > MAX_BAD_WORD_CHARACTERS:
            raise ValueError(f"a bad word must have at most {MAX_BAD_WORD_CHARACTERS} characters")
        if not word.strip():
            raise ValueError("a bad word must not be blank; use logit_bias to forbid white space")
    return words


_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)

MAX_NAMED = 8
"""Maximum number of invalid keys or token IDs that an error names."""


def _usable_bias(value: Any) -> Any:
    """Check that keys are token IDs in canonical form, so that no token appears under two keys."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"at most {MAX_BIASED_TOKENS} entries are allowed")
    unusable = [key for key in value if not _TOKEN_ID.fullmatch(key)]
    if unusable:
        raise ValueError(f"keys must be token ids, written as whole numbers, not {named_values(unusable)}")
    unusable = [key for key, bias in value.items() if not _is_bias(bias)]
    if unusable:
        raise ValueError(f"the values of {named_values(unusable)} must be numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return value


def _is_bias(value: Any) -> bool:
    return type(value) in (int, float) and -MAX_BIAS <= value <= MAX_BIAS


def named_values(values: Sequence[str | int]) -> str:
    """List the first values for an error message, and shorten long ones."""
    named = ", ".join(json.dumps(one if isinstance(one, int) else one[:40]) for one in values[:MAX_NAMED])
    return named if len(values) <= MAX_NAMED else f"{named} and {len(values) - MAX_NAMED} more"


class SamplingFields(StrictModel):
    model: str = Field(max_length=MAX_MODEL_NAME)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: Annotated[
        Annotated[list[str], Field(fail_fast=True)] | None, BeforeValidator(_one_or_many), AfterValidator(usable_stops)
    ] = None
    presence_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    logit_bias: Annotated[dict[str, float], BeforeValidator(_usable_bias)] | None = None

    # vLLM's extensions.
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)] | None = None
    allowed_token_ids: (
        Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None
    ) = None
    bad_words: Annotated[
        Annotated[list[str], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None, AfterValidator(_usable_words)
    ] = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
