"""A validated request and its engine sequences."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import msgspec

from loramux.adapter_store.registry.records import AdapterRef
from loramux.engine.protocol.messages import Add, SamplingParams
from loramux.engine.protocol.service_tiers import DEFAULT_TIER
from loramux.platform.accounts.model_names import ResolvedModel
from loramux.platform.accounts.tenants import TenantShare
from loramux.platform.accounts.version_settings import VersionSettings
from loramux.platform.generation.mirrored_queue import Share
from loramux.platform.service_tiers import TierRights
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tool_calls.harmony import Channels
from loramux.platform.tool_calls.reasoning import Markers, ReasoningSplitter

CHUNK_TOKENS = 1024
"""Tokens granted to a choice at a time if the request sets no max_tokens."""

PAUSE_S = 2.0
"""Time, in seconds, that a sequence waits for an extension after using up its grant. It then ends with the reason
`length`.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """The caller, the requested model with its settings and tokenizer, and the tenant's share of the engine.

    `vocab_size` counts the model's tokens, including those that the adapter adds to the base's `base_vocab_size`.
    """

    tenant_id: str
    api_key_id: str
    model: ResolvedModel
    share: TenantShare
    settings: VersionSettings
    tokenizer: ModelTokenizer
    base_vocab_size: int
    tiers: TierRights
    """The service tiers of the key."""

    def share_in(self, service_tier: str) -> Share:
        return Share(self.tenant_id, service_tier, self.share.weight)

    @property
    def vocab_size(self) -> int:
        vocabulary = self.settings.vocabulary
        return self.base_vocab_size if vocabulary is None else vocabulary.vocab_size


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The markers around the reasoning in an answer. `is_open` is True if the prompt ends inside the reasoning."""

    markers: Markers
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How the tokens of a choice are turned into text.

    `skip_special_tokens` and `include_stop_str_in_output` have vLLM's names and defaults.
    """

    stops: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    """The stop tokens that the request names, without the model's own end tokens."""
    reasoning: Reasoning | None = None
    """None if the answer contains no reasoning."""
    channels: Channels | None = None
    """The rules for reading the answer's channels. None if the answer has no channels."""
    only_prompt: bool = False
    """True if the request asks only for the prompt. The engine still generates at least one token, which is not billed.
    """

    def splitter(self) -> ReasoningSplitter | None:
        wanted = self.reasoning
        if wanted is None:
            return None
        return ReasoningSplitter(wanted.markers.begin, wanted.markers.end, is_open=wanted.is_open)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A validated and tokenised request. `max_tokens` and `granted_tokens` are per choice.

    At first, only `granted_tokens` are reserved and run. More tokens are requested when they are needed.
    """

    request_id: str
    target: Target
    endpoint: str
    prompts: tuple[tuple[int, ...], ...]
    activations: tuple[int | None, ...]
    """The position in each prompt from which the adapter applies, or None if the adapter does not apply."""
    num_choices: int
    max_tokens: int
    granted_tokens: int
    sampling: SamplingParams
    grammar: str
    """The grammar that each choice must follow, in llguidance's format. Empty if there is none."""
    text_rules: TextRules
    tokens_at_once: int
    """Maximum number of tokens per SequenceOutput: 1 if the client or a stop string needs each token immediately."""
    base: str
    end_user: str | None
    service_tier: str = DEFAULT_TIER
    priority: int = 0
    """Order among the requests of one share. Lower values run first."""
    is_background: bool = False
    """True if the request uses only what others leave free in the engine: see `Add.is_background`."""
    speculates: bool = True
    """See `Add.speculates`."""
    prediction: tuple[int, ...] = ()
    """See `Add.prediction`."""
    pooling: str | None = None
    """How each prompt is pooled (see `Add.pooling`), or None if the request generates tokens."""
    num_labels: int | None = None
    """Number of classes if each prompt is classified, or None."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def reserved_tokens(self) -> int:
        return self.prompt_tokens + self.num_sequences * self.granted_tokens

    @property
    def adapter_to_load(self) -> AdapterRef | None:
        """The adapter that the engine needs. None if the model is the base or no prompt activates the adapter."""
        is_needed = any(activation is not None for activation in self.activations)
        return self.target.model.adapter if is_needed else None

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.num_choices

    def adds(self, traceparent: str | None = None) -> list[Add]:
        """Return one Add message per choice, by choice index. `traceparent` is the parent of the sequences' spans."""
        return [self._add(p, c, traceparent) for p in range(len(self.prompts)) for c in range(self.num_choices)]

    def _add(self, prompt_index: int, choice: int, traceparent: str | None) -> Add:
        sampling = self.sampling
        if sampling.seed is not None and choice:
            # Each choice of a prompt gets its own seed. The first choice keeps the request's seed, as with n = 1.
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + choice)
        if choice and sampling.num_prompt_logprobs is not None:
            # Only the first choice of each prompt scores the prompt.
            sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=None)
        activation, share = self.activations[prompt_index], self.target.share
        adapter = None if activation is None else self.target.model.adapter
        vocab_size = self.target.vocab_size
        is_resized = adapter is not None and vocab_size != self.target.base_vocab_size
        return Add(
            sequence_id=f"{self.request_id}-{prompt_index * self.num_choices + choice}",
            prompt=self.prompts[prompt_index],
            max_tokens=self.granted_tokens,
            pause_s=PAUSE_S if self.granted_tokens < self.max_tokens else 0.0,
            tokens_at_once=self.tokens_at_once,
            sampling=sampling,
            grammar=self.grammar,
            digest=adapter.digest if adapter is not None else None,
            activation=activation or 0,
            vocab_size=vocab_size if is_resized else None,
            share_key=share.key,
            weight=share.weight,
            isolation_key=share.isolation_key,
            pooling=self.pooling,
            num_labels=self.num_labels,
            speculates=self.speculates,
            prediction=self._drafted_from(vocab_size if adapter is not None else self.target.base_vocab_size),
            priority=self.priority,
            service_tier=self.service_tier,
            is_background=self.is_background,
            traceparent=traceparent,
            host_floor_bytes=share.host_floor_bytes,
        )

    def _drafted_from(self, vocab_size: int) -> tuple[int, ...]:
        """The prediction up to the first token that the model lacks, because the prompt does not activate the adapter
        that adds it. A request with several sequences has none, because each sequence would keep a copy.
        """
        if len(self.prompts) * self.num_choices > 1:
            return ()
        return tuple(takewhile(lambda token: token < vocab_size, self.prediction))
