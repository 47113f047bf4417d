"""Requests of the S-LoRA workload as engine messages, with their arrival times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.running_engine import GREEDY
from benchmarks.s_lora.run import Arrival
from benchmarks.s_lora.workload import Lengths, draw_arrivals, draw_requests
from loramux.engine.protocol.messages import Add, SamplingParams


@dataclass(frozen=True, slots=True)
class Traffic:
    """Parameters of the requests.

    Cached prefixes are shared only among requests for the same adapter. All of an adapter's prompts start with the same
    `num_prefix` tokens, followed by a drawn number of random tokens. With `is_one_share`, all adapters belong to one
    account. Otherwise, each adapter belongs to its own account.
    """

    prompts: Lengths
    outputs: Lengths
    vocab_size: int
    alpha: float = 1.0
    cv: float = 1.0
    num_prefix: int = 0
    is_one_share: bool = False

    @property
    def full_prompts(self) -> Lengths:
        return Lengths(self.prompts.shortest + self.num_prefix, self.prompts.end + self.num_prefix)

    def requests(
        self, count: int, digests: Sequence[str], sampling: SamplingParams = GREEDY, seed: int = 42
    ) -> list[Add]:
        tokens = np.random.default_rng(seed + 2)
        adds = []
        for number, drawn in enumerate(
            draw_requests(count, len(digests), self.prompts, self.outputs, self.alpha, seed)
        ):
            digest = digests[drawn.adapter]
            adds.append(
                Add(
                    sequence_id=str(number),
                    prompt=(
                        *self._prefix(drawn.adapter),
                        *tokens.integers(self.vocab_size, size=drawn.num_prompt).tolist(),
                    ),
                    max_tokens=drawn.num_output,
                    sampling=sampling,
                    digest=digest,
                    share_key="" if self.is_one_share else digest,
                    isolation_key=digest.encode(),
                )
            )
        return adds

    def arrivals(
        self, digests: Sequence[str], rate: float, until_s: float, num_at_once: int = 0, seed: int = 42
    ) -> list[Arrival]:
        """`num_at_once` requests at the start, followed by random arrivals at `rate` per second."""
        times = [0.0] * num_at_once + list(draw_arrivals(rate, self.cv, until_s, seed))
        requests = self.requests(len(times), digests, seed=seed)
        return [Arrival(at_s, add) for at_s, add in zip(times, requests, strict=True)]

    def _prefix(self, adapter: int) -> list[int]:
        if not self.num_prefix:
            return []
        tokens: list[int] = np.random.default_rng(adapter).integers(self.vocab_size, size=self.num_prefix).tolist()
        return tokens
