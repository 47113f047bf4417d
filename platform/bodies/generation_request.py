"""The fields that the bodies of all generation requests share, with strict types, no unknown fields, and no unsupported
options.

A field that cannot change the answer is accepted and ignored. An unsupported field that would change it is accepted
only with a value that has no effect (`unsupported_fields.py`). The number of errors per body is bounded: lists fail at
their first invalid item, and if an object has more entries than its class has fields, only one unknown entry is
reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field

from loramux.adapter_store.formats.version_files.generation_config import NO_DEFAULTS, SamplingDefaults
from loramux.engine.protocol.messages import SamplingParams
from loramux.engine.scheduling.request_limits import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_PROMPT_LOGPROBS,
)
from loramux.platform.bodies.response_formats import (
    Choices,
    ResponseFormat,
    StructuredOutputs,
    constraints,
)
from loramux.platform.bodies.sampling_fields import INT64, SamplingFields, named_values
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.bodies.structural_tags import Schema
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.plan import TextRules
from loramux.platform.grammars.constraint import Constraint
from loramux.platform.service_tiers import AskedTier

T = TypeVar("T")


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(SamplingFields):
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

    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, lt=INT64)

    # vLLM's extensions.
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=INT64)
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=-1, le=MAX_PROMPT_LOGPROBS)
    logprob_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_LOGPROB_TOKEN_IDS)] | None = None

    # Constraints on the answer: OpenAI's field, vLLM's field, vLLM's older fields, and SGLang's fields.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_choice: Choices | None = None
    guided_grammar: str | None = Field(None, min_length=1)
    regex: str | None = Field(None, min_length=1)
    ebnf: str | None = Field(None, min_length=1)

    guided_decoding_backend: str | None = None

    speculation: bool | None = None
    """False if the engine must not draft tokens. Drafts do not change the answer."""

    user: str | None = None
    service_tier: AskedTier | None = None

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

    @property
    def has_long_answer(self) -> bool:
        """True if building the response's body takes so long that it happens on a thread."""
        return self.num_prompt_logprobs is not None

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

    def shown_as(self, *, with_usage: bool, by_token_id: bool) -> Self:
        """Return the body with what the server shows by default: the usage in each chunk of a stream, and
        log-probabilities that name tokens by their ids.
        """
        changes: dict[str, Any] = {}
        if with_usage and self.stream:
            changes["stream_options"] = StreamOptions(include_usage=True, continuous_usage_stats=True)
        if by_token_id and self.return_tokens_as_token_ids is None:
            changes["return_tokens_as_token_ids"] = True
        return self.model_copy(update=changes) if changes else self

    def answered_by(self, model: str, service_tier: str) -> Self:
        """Return the same request to another model, in another service tier."""
        return self.model_copy(update={"model": model, "service_tier": service_tier})

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
                named = named_values(unknown)
                raise InvalidRequest(
                    f"{param}: the model has {vocab_size} tokens, 0 to {vocab_size - 1}, and not {named}",
                    param=param,
                )
        for param, most in self.MAX_ALTERNATIVES.items():
            if getattr(self, param) == -1 and vocab_size > most:
                raise InvalidRequest(
                    f"{param}: -1 asks for all {vocab_size} tokens of the vocabulary, but at most {most} are allowed",
                    param=param,
                )

    def constraint(self) -> Constraint | None:
        """Return the constraint on the answer. Raises InvalidRequest if the body sets more than one.

        Clients send the same constraint under vLLM's older and newer name, because each version knows only one.
        """
        guided = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        found = [*constraints(self.response_format, self.structured_outputs, guided), *self.sglang_constraints()]
        for other in found[1:]:
            if (other.kind, other.text) != (found[0].kind, found[0].text):
                raise InvalidRequest("only one constraint on the answer is allowed", param=other.param)
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
