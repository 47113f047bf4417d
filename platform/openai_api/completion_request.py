"""The body of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from loramux.platform.bodies import unsupported_fields
from loramux.platform.bodies.generation_request import GenerationRequest
from loramux.platform.bodies.prompts import listed_prompts
from loramux.platform.bodies.response_formats import schema_constraint
from loramux.platform.bodies.sampling_fields import INT64
from loramux.platform.bodies.structural_tags import Schema
from loramux.platform.bodies.unsupported_fields import Neutral
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.plan import TextRules
from loramux.platform.grammars.constraint import Constraint

MAX_COMPLETION_LOGPROBS = 5


class CompletionRequest(GenerationRequest):
    NEUTRAL: ClassVar[Neutral] = unsupported_fields.COMPLETIONS
    MAX_ALTERNATIVES: ClassVar[Mapping[str, int]] = {
        **GenerationRequest.MAX_ALTERNATIVES,
        "logprobs": MAX_COMPLETION_LOGPROBS,
    }
    PROMPT: ClassVar[str] = "prompt"
    DEFAULT_MAX_TOKENS: ClassVar[int | None] = 16

    prompt: Annotated[Any, AfterValidator(listed_prompts)]
    logprobs: int | None = Field(None, ge=-1, le=MAX_COMPLETION_LOGPROBS)
    best_of: int | None = Field(None, ge=1, lt=INT64)
    echo: bool | None = None
    json_schema: Schema | str | None = None
    """SGLang's field. Its chat requests do not have it."""
    max_tokens: int | None = Field(None, ge=0, lt=INT64)

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    @property
    def num_generated(self) -> int:
        return max(self.num_choices, self.best_of or 1)

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def num_logprobs(self) -> int | None:
        # Ranking needs the log-probability of each token, even if the client did not ask for it.
        if not self.has_logprobs and self.num_generated > self.num_choices:
            return 0
        return self.num_alternatives("logprobs")

    @property
    def token_limit(self) -> int | None:
        # The engine generates at least one token.
        return 1 if self.max_tokens == 0 else self.max_tokens

    @property
    def echoes_logprobs(self) -> bool:
        """True if the log-probabilities of each choice also cover the prompt."""
        return bool(self.echo) and self.has_logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        of_prompt = self.num_alternatives("prompt_logprobs")
        if not self.echoes_logprobs:
            return of_prompt
        return max(self.num_alternatives("logprobs") or 0, of_prompt or 0)

    def sglang_constraints(self) -> Iterator[Constraint]:
        yield from GenerationRequest.sglang_constraints(self)
        if self.json_schema is not None:
            yield schema_constraint(self.json_schema, "json_schema")

    def text_rules(self) -> TextRules:
        return replace(GenerationRequest.text_rules(self), only_prompt=self.max_tokens == 0)

    def check(self) -> None:
        GenerationRequest.check(self)
        # Some clients send OpenAI's default of 1, regardless of n.
        if self.best_of not in (None, 1) and self.best_of < self.num_choices:
            raise InvalidRequest("best_of must be at least n", param="best_of")
        if self.stream and self.num_generated > self.num_choices:
            raise InvalidRequest("best_of greater than n cannot be streamed", param="best_of")
        if self.stream and self.echoes_logprobs:
            raise InvalidRequest("echo with logprobs cannot be streamed", param="echo")
        if self.max_tokens == 0 and self.logprob_token_ids:
            raise InvalidRequest("logprob_token_ids needs max_tokens of at least 1", param="logprob_token_ids")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens must be at least 1 unless echo is true", param="max_tokens")
