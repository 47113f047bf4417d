"""What a request asks for, and the sequences that it becomes in the engine."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from loramux.engine.messages import Add, SamplingParams
from loramux.platform.accounts.model_names import ResolvedModel
from loramux.platform.accounts.tenants import Share

CHUNK_TOKENS = 1024
"""How many tokens a choice is granted at a time where its request does not say how many it wants."""

PAUSE_S = 2.0
"""How long a sequence waits at the end of what was granted; a refused one ends after it, with `length`."""


@dataclass(frozen=True, slots=True)
class Target:
    """Who asks for which model, and the tenant's place in the engine."""

    tenant_id: str
    api_key_id: str
    model: ResolvedModel
    share: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a request asks for, checked and tokenised. `max_tokens` and `granted_tokens` are each choice's.

    Only `granted_tokens` are reserved and run at first; what lies beyond is asked for when it is needed.
    """

    request_id: str
    target: Target
    endpoint: str
    prompts: tuple[tuple[int, ...], ...]
    num_choices: int
    max_tokens: int
    granted_tokens: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    tokens_at_once: int
    """So many the engine may tell of together: 1 where the client, or a stop string, waits for each."""
    base: str
    end_user: str | None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def reserved_tokens(self) -> int:
        return self.prompt_tokens + self.num_sequences * self.granted_tokens

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.num_choices

    def adds(self, traceparent: str | None = None) -> list[Add]:
        """One sequence a choice, in the order of the choices' indices; their spans lie below `traceparent`."""
        return [self._add(p, c, traceparent) for p in range(len(self.prompts)) for c in range(self.num_choices)]

    def _add(self, prompt_index: int, choice: int, traceparent: str | None) -> Add:
        sampling = self.sampling
        if sampling.seed is not None and choice:
            # Choices of one prompt differ; the first is what n = 1 would give.
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + choice)
        adapter, share = self.target.model.adapter, self.target.share
        return Add(
            sequence_id=f"{self.request_id}-{prompt_index * self.num_choices + choice}",
            prompt=self.prompts[prompt_index],
            max_tokens=self.granted_tokens,
            pause_s=PAUSE_S if self.granted_tokens < self.max_tokens else 0.0,
            tokens_at_once=self.tokens_at_once,
            sampling=sampling,
            digest=adapter.digest if adapter is not None else None,
            share_key=share.key,
            weight=share.weight,
            isolation_key=share.isolation_key,
            traceparent=traceparent,
            host_floor_bytes=share.host_floor_bytes,
        )
