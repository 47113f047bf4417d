"""The bytes that decode steps must read, for the utilisation of a device's memory bandwidth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.sequences.batch import ScheduledSequence
from loramux.engine.sequences.cache_groups import UNLIMITED, CacheLayout


@dataclass(frozen=True, slots=True)
class ReadsPerStep:
    """What a decode step of one base reads at least, with every byte counted once.

    `weight_bytes` are read by each step: all weights except embeddings and experts. `expert_bytes` are all experts of
    all layers. Each token chooses `top_k` of `num_experts`, which are counted as if chosen at random. `page_bytes` is
    the size of a page of the pool. `bandwidth` is the measured bandwidth of the device's memory, in bytes per second.
    """

    weight_bytes: int
    expert_bytes: int
    num_experts: int
    top_k: int
    page_bytes: int
    cache: CacheLayout
    bandwidth: float

    @staticmethod
    def of(
        model: ModelConfig, weight_bytes: int, expert_bytes: int, page_bytes: int, cache: CacheLayout, bandwidth: float
    ) -> ReadsPerStep:
        routing = None if model.mixture is None else model.mixture.routing
        num_experts, top_k = (1, 1) if routing is None else (routing.num_experts, routing.top_k)
        return ReadsPerStep(weight_bytes, expert_bytes, num_experts, top_k, page_bytes, cache, bandwidth)

    def num_bytes(self, scheduled: Iterable[ScheduledSequence]) -> int:
        """Bytes that the step must read: weights, K and V of all contexts, states, and each adapter's pages once.

        0 if the step is not a decode, which has one token for each sequence. Must be called before the sequences
        advance.
        """
        contexts: list[int] = []
        adapters: dict[int, int] = {}
        for item in scheduled:
            if item.num_tokens != 1:
                return 0
            sequence = item.sequence
            contexts.append(sequence.num_computed + 1)
            if sequence.slot >= 0:
                adapters[sequence.slot] = sequence.num_adapter_pages
        num_tokens = len(contexts)
        num_pages = float(num_tokens * self.cache.num_state_pages + sum(adapters.values()))
        for group in self.cache.groups:
            most = group.window or UNLIMITED
            num_pages += sum([min(context, most) for context in contexts]) / group.page_tokens
        # A token leaves out an expert with probability 1 - top_k / num_experts.
        chosen = 1 - (1 - self.top_k / self.num_experts) ** num_tokens
        return int(self.weight_bytes + chosen * self.expert_bytes + num_pages * self.page_bytes) if num_tokens else 0
