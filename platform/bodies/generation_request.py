"""The fields that the bodies of all generation requests share, with strict types, no unknown fields, and no unsupported
options.

A field that cannot change the answer is accepted and ignored. An unsupported field that would change it is accepted
only with a value that has no effect (`unsupported_fields.py`). The number of errors per body is bounded: lists fail at
their first invalid item, and if an object has more entries than its class has fields, only one unknown entry is
reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from loramux.adapter_store.formats.version_files.generation_config import NO_DEFAULTS, SamplingDefaults
from loramux.engine.protocol.messages import SamplingParams
from loramux.engine.scheduling.request_limits import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_PENALTY,
    MAX_PROMPT_LOGPROBS,
    REPETITION_PENALTIES,
)
from loramux.platform.bodies.response_formats import (
    Choices,
    ResponseFormat,
    StructuredOutputs,
    constraints,
)
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.bodies.structural_tags import Schema
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.plan import TextRules
from loramux.platform.grammars.constraint import Constraint

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_BAD_WORD_CHARACTERS = 128
MAX_MODEL_NAME = 256
MAX_PRIORITY = 2**31 - 1
INT64 = 2**63

T = TypeVar("T")


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
        raise ValueError(f"keys must be token ids, written as whole numbers, not {_named(unusable)}")
    unusable = [key for key, bias in value.items() if not _is_bias(bias)]
    if unusable:
        raise ValueError(f"the values of {_named(unusable)} must be numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return value


def _is_bias(value: Any) -> bool:
    return type(value) in (int, float) and -MAX_BIAS <= value <= MAX_BIAS


def _named(values: Sequence[str | int]) -> str:
    """List the first values for an error message, and shorten long ones."""
    named = ", ".join(json.dumps(one if isinstance(one, int) else one[:40]) for one in values[:MAX_NAMED])
    return named if len(values) <= MAX_NAMED else f"{named} and {len(values) - MAX_NAMED} more"


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(StrictModel):
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {"guided_decoding_backend", "stream_options.include_obfuscation"}
    )
    """Fields that cannot change the answer. They are accepted with any value of their type."""
    MAX_ALTERNATIVES: ClassVar[Mapping[str, int]] = {"prompt_logprobs": MAX_PROMPT_LOGPROBS}
    """Fields that ask for the log-probabilities of the most likely tokens, each with its limit."""
    PROMPT: ClassVar[str]
    """The name of the field that holds the prompt."""
    DEFAULT_MAX_TOKENS: ClassVar[int | None] = None
    """The default token limit of a choice. None means the rest of the context."""

    model: str = Field(max_length=MAX_MODEL_NAME)
    n: int | None = Field(None, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: Annotated[
        Annotated[list[str], Field(fail_fast=True)] | None, BeforeValidator(_one_or_many), AfterValidator(usable_stops)
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, lt=INT64)
    presence_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    logit_bias: Annotated[dict[str, float], BeforeValidator(_usable_bias)] | None = None

    # vLLM's extensions.
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=64)] | None = None
    allowed_token_ids: (
        Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None
    ) = None
    bad_words: Annotated[
        Annotated[list[str], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None, AfterValidator(_usable_words)
    ] = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=INT64)
    truncation_side: Literal["left", "right"] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=-1, le=MAX_PROMPT_LOGPROBS)
    logprob_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_LOGPROB_TOKEN_IDS)] | None = None
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)

    # Constraints on the answer: OpenAI's field, vLLM's field, vLLM's older fields, and SGLang's fields.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    regex: str | None = Field(None, min_length=1)
    ebnf: str | None = Field(None, min_length=1)

    guided_decoding_backend: str | None = None

    user: str | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_generated(self) -> int:
        """Number of choices to generate for each prompt. Only the best `num_choices` are returned."""
        return self.num_choices

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def token_limit(self) -> int | None:
        """The body's token limit for each choice, or None if the body sets no limit."""
        return self.max_tokens

    @property
    def fits_context(self) -> bool:
        """True if a token limit beyond the rest of the context means that rest. Otherwise, the request is refused."""
        return False

    @property
    def has_logprobs(self) -> bool:
        """True if the answer shows the log-probabilities of its tokens."""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives to report per token. None means no log-probabilities at all."""
        return None

    @property
    def max_thinking_tokens(self) -> int | None:
        """Maximum number of reasoning tokens. None means no limit."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of alternatives to report per prompt token. None means no log-probabilities of the prompt at all."""
        return self.num_alternatives("prompt_logprobs")

    def num_alternatives(self, name: str) -> int | None:
        """Return the number of alternatives that the field `name` asks for. The value -1 asks for the vocabulary, which
        `check_vocabulary` accepts only within the limit.
        """
        asked: int | None = getattr(self, name)
        return self.MAX_ALTERNATIVES[name] if asked == -1 else asked

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)

    def check(self) -> None:
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        if self.logprob_token_ids and not self.has_logprobs:
            raise InvalidRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check fields that refer to the model's `vocab_size` tokens. Raises InvalidRequest."""
        fields = {
            "stop_token_ids": self.stop_token_ids or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "logprob_token_ids": self.logprob_token_ids or (),
            "logit_bias": [int(key) for key in self.logit_bias or ()],
        }
        for param, ids in fields.items():
            unknown = [token for token in ids if not 0 <= token < vocab_size]
            if unknown:
                raise InvalidRequest(
                    f"{param}: the model has {vocab_size} tokens, 0 to {vocab_size - 1}, and not {_named(unknown)}",
                    param=param,
                )
        for param, most in self.MAX_ALTERNATIVES.items():
            if getattr(self, param) == -1 and vocab_size > most:
                raise InvalidRequest(
                    f"{param}: -1 asks for all {vocab_size} tokens of the vocabulary, but at most {most} are allowed",
                    param=param,
                )

    def constraint(self) -> Constraint | None:
        """Return the constraint on the answer. Raises InvalidRequest if the body sets more than one."""
        guided = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        found = [*constraints(self.response_format, self.structured_outputs, guided), *self.sglang_constraints()]
        if len(found) > 1:
            raise InvalidRequest("only one constraint on the answer is allowed", param=found[1].param)
        return found[0] if found else None

    def sglang_constraints(self) -> Iterator[Constraint]:
        if self.regex is not None:
            yield Constraint.of_text("regex", self.regex, "regex")
        if self.ebnf is not None:
            yield Constraint.of_text("grammar", self.ebnf, "ebnf")

    def sampling(self, defaults: SamplingDefaults = NO_DEFAULTS) -> SamplingParams:
        """Return the sampling parameters. An omitted field takes the model's default, or the API's default if the model
        has none.
        """
        bias = sorted((int(key), value) for key, value in (self.logit_bias or {}).items())
        return SamplingParams(
            temperature=_or(self.temperature, _or(defaults.temperature, 1.0)),
            top_p=_or(self.top_p, _or(defaults.top_p, 1.0)),
            # In vLLM and Hugging Face, -1 or 0 means all tokens.
            top_k=max(0, _or(self.top_k, _or(defaults.top_k, 0))),
            min_p=_or(self.min_p, _or(defaults.min_p, 0.0)),
            repetition_penalty=_or(self.repetition_penalty, _or(defaults.repetition_penalty, 1.0)),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=tuple((token, value) for token, value in bias if value),
            seed=self.seed,
            num_logprobs=self.num_logprobs,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=_or(self.min_tokens, 0),
            num_prompt_logprobs=self.num_prompt_logprobs,
            logprob_token_ids=tuple(dict.fromkeys(self.logprob_token_ids or ())),
            allowed_token_ids=tuple(sorted(set(self.allowed_token_ids or ()))),
        )

    def text_rules(self) -> TextRules:
        return TextRules(
            stops=tuple(self.stop or ()),
            skip_special_tokens=_or(self.skip_special_tokens, True),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
        )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
