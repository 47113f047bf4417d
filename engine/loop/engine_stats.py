"""An engine's counters since startup, and its current state."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from loramux.adapter_store.tiers.tier_contents import TierContents
from loramux.adapter_store.tiers.tier_figures import LoadCounts, TierFigures
from loramux.engine.adapters.adapter_load import AdapterPhase
from loramux.engine.adapters.adapter_pool import AdapterPool
from loramux.engine.loop.decode_reads import ReadsPerStep
from loramux.engine.pages.page_pool import PageOwner, PagePool
from loramux.engine.pages.prefix_cache import PrefixCache
from loramux.engine.protocol.messages import (
    DecodeReads,
    DraftCounts,
    GrammarCounts,
    GraphMemory,
    ResidentAdapter,
    Stats,
    StepTimes,
    Waiting,
)
from loramux.engine.protocol.service_tiers import BACKGROUND_RANK
from loramux.engine.scheduling.scheduler import Scheduler
from loramux.engine.sequences.batch import ScheduledSequence

STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class EngineStats:
    """Counts steps and tokens, and reads all other statistics from the engine's parts on request. See `Stats`."""

    def __init__(
        self,
        pages: PagePool,
        adapters: AdapterPool,
        prefixes: PrefixCache,
        scheduler: Scheduler,
        loading: Callable[[], LoadCounts] | None = None,
        contents: Callable[[], tuple[TierContents, ...]] = tuple,
        page_bytes: int = 0,
        graphs: Callable[[], GraphMemory] = GraphMemory,
        grammars: Callable[[], GrammarCounts] = GrammarCounts,
        reads: ReadsPerStep | None = None,
        drafts: Callable[[], DraftCounts] = DraftCounts,
    ) -> None:
        self._pages = pages
        self._loading = loading or TierFigures().snapshot
        self._contents = contents
        self._page_bytes = page_bytes
        self._graphs = graphs
        self._grammars = grammars
        self._reads = reads
        self._drafts = drafts
        self._adapters = adapters
        self._prefixes = prefixes
        self._scheduler = scheduler
        self._num_steps = 0
        self._num_given_up_steps = 0
        self._num_mixed_steps = 0
        self._max_adapters_in_step = 0
        self.computed_prompt_tokens = 0
        """Prompt tokens that all steps have computed for the first time."""
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._recomputed_tokens = 0
        self._num_rows = 0
        self._num_step_sequences = 0
        self._step_counts = [0] * (len(STEP_BOUNDS_S) + 1)
        self._step_seconds = 0.0
        self._decode_bytes = 0
        self._decode_seconds = 0.0
        self._prefill_tokens = 0
        self._prefill_seconds = 0.0
        # The smallest number of prompt tokens with which a step says how fast prompts are computed.
        self._min_prefill_tokens = max(1, scheduler.limits.max_batch_tokens // 2)

    def count_step(self, scheduled: list[ScheduledSequence], num_rows: int) -> None:
        """Count a step. This must be called before the step's sequences advance."""
        self._num_steps += 1
        self._num_rows += num_rows
        self._num_step_sequences += len(scheduled)
        slots = {item.sequence.slot for item in scheduled}
        num_adapters = len(slots) - (-1 in slots)
        self._num_mixed_steps += num_adapters > 1
        self._max_adapters_in_step = max(self._max_adapters_in_step, num_adapters)
        for item in scheduled:
            sequence = item.sequence
            begin = sequence.num_computed
            if begin == sequence.num_reached >= sequence.num_prompt:
                # The common case: the answer continues.
                continue
            end = begin + item.num_tokens
            if not sequence.has_run:
                self._cached_tokens += sequence.num_cached
            self._recomputed_tokens += max(0, min(end, sequence.num_reached) - begin)
            self.computed_prompt_tokens += max(0, min(end, sequence.num_prompt) - max(begin, sequence.num_reached))

    def count_given_up(self) -> None:
        self._num_given_up_steps += 1

    def count_step_time(self, seconds: float) -> None:
        self._step_counts[bisect_left(STEP_BOUNDS_S, seconds)] += 1
        self._step_seconds += seconds

    def read_bytes(self, scheduled: list[ScheduledSequence]) -> int:
        """Bytes that a decode step must read, or 0 for other steps and devices of unknown bandwidth.

        Must be called before the step's sequences advance.
        """
        return 0 if self._reads is None else self._reads.num_bytes(scheduled)

    def count_committed(self, read_bytes: int, prompt_tokens: int, seconds: float) -> None:
        """Count the time until a step was committed that computed `prompt_tokens`. `read_bytes` is 0 for steps that do
        not count as decode steps.

        The time of a large step also decides whether pages in host memory are worth copying: see `HostPages.pays`.
        """
        if prompt_tokens >= self._min_prefill_tokens:
            self._prefill_tokens += prompt_tokens
            self._prefill_seconds += seconds
            self._prefixes.host.note_computed(prompt_tokens, seconds)
        if read_bytes:
            self._decode_bytes += read_bytes
            self._decode_seconds += seconds

    def count_completion_tokens(self, num_tokens: int) -> None:
        self._completion_tokens += num_tokens

    def snapshot(self, call_id: str, with_tiers: bool = False, changes_after: int | None = None) -> Stats:
        resident = [load for load in self._adapters.loads() if load.phase is AdapterPhase.RESIDENT]
        return Stats(
            call_id=call_id,
            num_steps=self._num_steps,
            num_running=len(self._scheduler.running),
            num_background_running=self._scheduler.running_by_rank[BACKGROUND_RANK],
            num_background_waiting=self._scheduler.queue.waiting_by_rank[BACKGROUND_RANK],
            num_waiting=self._scheduler.queue.num_waiting,
            service_tiers=tuple(self._scheduler.loads()),
            max_sequences=self._scheduler.limits.max_sequences,
            num_ended=self._scheduler.num_ended,
            prefill_tokens=self._prefill_tokens,
            prefill_s=self._prefill_seconds,
            num_pages=self._pages.num_pages,
            num_free_pages=self._pages.num_free,
            num_kv_pages=self._pages.num_owned(PageOwner.KV),
            num_adapter_pages=self._pages.num_owned(PageOwner.ADAPTER),
            num_prefix_pages=len(self._prefixes),
            num_idle_prefix_pages=self._prefixes.num_idle,
            prompt_tokens=self.computed_prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens,
            recomputed_tokens=self._recomputed_tokens,
            num_adapter_loads=self._adapters.num_loads,
            num_adapter_evictions=self._adapters.num_evictions,
            num_preemptions=self._scheduler.num_preemptions,
            given_up_steps=self._num_given_up_steps,
            mixed_steps=self._num_mixed_steps,
            max_adapters_in_step=self._max_adapters_in_step,
            num_rows=self._num_rows,
            num_step_sequences=self._num_step_sequences,
            num_prefix_evictions=self._prefixes.num_evictions,
            step_times=StepTimes(bounds_s=STEP_BOUNDS_S, counts=tuple(self._step_counts), seconds=self._step_seconds),
            waiting=self._waiting(),
            loading=self._loading(),
            adapters=tuple(
                ResidentAdapter(
                    digest=load.digest,
                    slot=load.slot,
                    num_pages=load.num_pages,
                    # The pool counts a pin as a user.
                    num_users=load.num_users - load.is_pinned,
                    is_pinned=load.is_pinned,
                    idle_s=self._adapters.idle_s(load),
                )
                for load in resident
            ),
            num_pinned_pages=self._adapters.num_pinned_pages,
            page_bytes=self._page_bytes,
            num_slots=self._adapters.num_slots,
            graphs=self._graphs(),
            decode_reads=DecodeReads(
                num_bytes=self._decode_bytes,
                seconds=self._decode_seconds,
                bandwidth=0.0 if self._reads is None else self._reads.bandwidth,
            ),
            grammars=self._grammars(),
            drafts=self._drafts(),
            host_pages=self._prefixes.host.counts(),
            disk_pages=self._prefixes.host.disk.counts(),
            tiers=self._contents() if with_tiers else (),
            changes=() if changes_after is None else self._adapters.changes.after(changes_after),
        )

    def _waiting(self) -> Waiting:
        queue, is_short = self._scheduler.queue, self._scheduler.is_short_of_pages
        # A sequence that was preempted while paused waits in the queue for a higher limit.
        num_paused = queue.num_paused
        num_short = queue.num_ready if is_short else 0
        return Waiting(
            adapter=queue.num_cold,
            pages=num_short,
            slot=queue.num_waiting - queue.num_cold - num_paused - num_short,
            grant=num_paused + sum(sequence.is_paused for sequence in self._scheduler.running),
        )
