"""Messages between a gateway and an engine, one record type per message.

The gateway sends Add. The engine answers with StepOutput messages, which contain new token ids of one or more of the
gateway's sequences, and finally with Finished. The engine sees adapter digests, never tenants.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from loramux.adapter_store.tiers.tier_contents import TierContents
from loramux.adapter_store.tiers.tier_figures import LoadCounts
from loramux.engine.protocol.service_tiers import DEFAULT_TIER

PROTOCOL = 14
"""Protocol version, increased with each incompatible change to these messages."""


POOLINGS = ("last", "mean", "cls")
"""How a prompt's hidden states become one vector: the last token's, the mean of all, or the first token's."""

AnswerT = TypeVar("AnswerT")


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Limits a sequence's thinking, which is enclosed in two markers. After `num_tokens` tokens, the end marker is
    forced.

    `begin` and `end` are the tokens of the markers. `is_open` is True if the prompt ends inside the thinking.
    """

    num_tokens: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for choosing a sequence's next token. Defaults are as in the OpenAI API and vLLM."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means that all tokens are considered."""
    min_p: float = 0.0
    """Drops tokens whose probability is below this fraction of the highest probability. 0 drops none."""
    repetition_penalty: float = 1.0
    """Divides positive logits and multiplies negative logits of tokens in the prompt or the answer. 1 is neutral."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens that occur in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of these tokens before penalties are applied. Each token occurs at most once."""
    seed: int | None = None
    num_logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are returned in addition to the chosen token's. If None, no
    log-probabilities are returned."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    num_prompt_logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are returned for each prompt token, in addition to the
    prompt token's own. If None, the prompt is not scored."""
    logprob_token_ids: tuple[int, ...] = ()
    """If set, log-probabilities list these tokens, after the chosen token, in place of the most likely tokens."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that can be generated, including end-of-sequence tokens. If empty, all tokens are allowed."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are never generated. The last token of a sequence is forbidden whenever the tokens before it
    have just been generated.
    """
    thinking: ThinkingBudget | None = None
    """None if thinking is not limited."""

    @property
    def has_penalties(self) -> bool:
        """True if a penalty makes the logits depend on earlier tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class Add(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run one sequence. `max_tokens` is the number of new tokens that the quota grants. `digest` names the adapter
    (None for the base).

    `sequence_id` is unique within one gateway. Another gateway may use the same id. Durations must be finite and not
    negative, or the sequence ends with `invalid_request`.
    """

    sequence_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    digest: str | None = None
    activation: int = 0
    """Position of the first prompt token to which the adapter applies. The base alone computes the tokens before it."""
    vocab_size: int | None = None
    """Vocabulary size of the adapter, or None if it has the base's vocabulary."""
    share_key: str = ""
    weight: int = 1
    host_floor_bytes: int = 0
    """Bytes of host memory that the share's adapters keep under pressure from other shares. 0 means no guarantee."""
    grammar: str = ""
    """A grammar for the new tokens, in llguidance's JSON or Lark form. If empty, all tokens are allowed."""
    isolation_key: bytes = b""
    """Sequences with the same key can share the K and V of equal prefixes, and compiled grammars. An empty key means no
    sharing.
    """
    priority: int = 0
    """Orders the sequences of one share: lower values run first. It does not affect the order between shares."""
    service_tier: str = DEFAULT_TIER
    """One of SERVICE_TIERS. The sequences of a share key in one tier are a share of their own."""
    is_background: bool = False
    """True if the sequence uses only what other sequences leave free: see `Scheduler`. The background sequences of a
    share key are a share of their own.
    """
    traceparent: str | None = None
    """Parent (W3C Trace Context) of the engine's spans for this sequence. If None, the sequence is not traced."""
    pause_s: float = 0.0
    """Seconds that the sequence waits at `max_tokens` for an Extend before it ends with `length`."""
    tokens_at_once: int = 1
    """Number of tokens per output. Values above 1 suit answers that are not streamed. The first token and each token
    with log-probabilities are sent immediately. The last tokens are sent before Finished. If the engine dies, up to
    `tokens_at_once - 1` committed tokens are lost before they are sent, and are not billed.
    """
    pooling: str | None = None
    """One of POOLINGS if the sequence is to return its prompt's pooled hidden state instead of generating tokens.
    `max_tokens` is then 0. Such a sequence neither uses nor fills the prefix cache.
    """
    num_labels: int | None = None
    """Number of classes of the adapter, which must be a classifier. The sequence returns the logits of the classes in
    place of the last token's hidden state. None for other sequences.
    """
    speculates: bool = True
    """Whether steps may verify drafts of the next tokens, and tokens that the grammar forces. It changes neither the
    tokens nor their number.
    """
    prediction: tuple[int, ...] = ()
    """Tokens that the answer will probably contain, from which drafts are taken. They are not part of the prompt."""


class Extend(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Raise a sequence's limit to `max_tokens`. This has no effect on a sequence that has already ended.

    The limit is capped by the context length and by the pool space that the sequence's adapter and the pinned adapters
    leave. For a sequence with an adapter, the higher limit takes effect no earlier than its first step.
    """

    sequence_id: str
    max_tokens: int


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop a sequence."""

    sequence_id: str


class EngineCall(msgspec.Struct, Generic[AnswerT], frozen=True, kw_only=True):
    """A message that the engine answers with one record of the type `AnswerT`, which repeats `call_id`.

    A gateway's connection sets the id.
    """

    call_id: str = ""


class Load(EngineCall["AdapterState"], frozen=True, kw_only=True, tag=True):
    """Make an adapter resident. An AdapterState follows once the adapter is resident or has failed to load.

    Pending Unloads of the adapter are answered with `superseded`. If one of them has `is_purge`, the load waits until
    the adapter is unloaded.
    """

    digest: str


class Unload(EngineCall["AdapterState"], frozen=True, kw_only=True, tag=True):
    """Free an adapter's pages and cached prefixes once no sequence needs the adapter. The answer is an AdapterState.

    Sequences may use the adapter until then, and the next one after the answer loads it again. An unload ends the
    adapter's pin, and answers waiting loads and pins with `superseded`. A later Load or Pin answers the unload in the
    same way.

    `is_purge` also deletes the host tier's copy. Until the answer, new sequences are refused with `adapter_unloaded`,
    and later loads and pins wait, so the pages are freed once earlier sequences have ended.
    """

    digest: str
    is_purge: bool = False


class Pin(EngineCall["AdapterState"], frozen=True, kw_only=True, tag=True):
    """Load an adapter and keep it resident until a Pin with `is_pinned = False` or an Unload.

    A pin outlives the gateway that requested it. A pinned adapter that is evicted because it produced non-finite values
    is loaded and pinned again. If it cannot be loaded again, it loses its pin and disappears from Stats. A pin fails
    with `pin_limit` if it exceeds the allowed share of pages or slots, or if it would leave too few pages for a request
    that was already accepted.
    """

    digest: str
    is_pinned: bool = True


class ForgetPrefixes(EngineCall["AdapterState"], frozen=True, kw_only=True, tag=True):
    """Delete all pages of some isolation keys from the prefix cache, in the pool and in host memory.

    Running sequences of these keys continue, and cache their pages when they fill them. The answer is `absent`.
    """

    isolation_keys: tuple[bytes, ...]


class Credit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Allow the engine to send this gateway `count` more StepOutput messages."""

    count: int


class StatsRequest(EngineCall["Stats"], frozen=True, kw_only=True, tag=True):
    """Request Stats. `with_tiers` adds the contents of the host and disk tiers, which takes longer. `changes_after`
    adds the changes to adapters with higher numbers.
    """

    with_tiers: bool = False
    changes_after: int | None = None


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one chosen token and of the most likely tokens, most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprob(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one position of a prompt: of its token, and of the most likely tokens, most likely first."""

    token_id: int
    logprob: float
    rank: int
    """1 plus the number of more likely tokens."""
    top: tuple[tuple[int, float], ...] = ()


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New tokens of one sequence. `logprobs` has one entry per token if requested, and is empty otherwise.

    A token that ends the sequence (end of sequence or stop id) is reported in Finished and not included here.
    """

    sequence_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    """Log-probabilities of the next prompt tokens, if requested. Every prompt token except the first has an entry,
    which is sent before the first new token.
    """
    pooled: bytes = b""
    """The pooled hidden state of a sequence with `Add.pooling`, after the final norm, or the logits of its classes, as
    little-endian float32. It is sent once, whole.
    """
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache. It is sent once, before the first new token, so that it can be
    billed if the engine dies or reports the end late. 0 in other outputs.
    """


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Output of one or more steps for one gateway."""

    outputs: tuple[SequenceOutput, ...]


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end of a sequence and its final token counts. It follows the sequence's last SequenceOutput.

    `reason` is `stop` (end of sequence, stop id or pooled prompt), `length`, `abort` or `error`. With `error`, `code`
    is one of `adapter_unavailable`, `adapter_unloaded`, `adapter_quarantined`, `invalid_request`,
    `prompt_too_long`, `request_too_large`, `not_finite`, `grammar_failed`, `no_token_allowed`, `engine_unavailable`,
    `request_excluded`, `replica_draining` or `overloaded`. `completion_tokens` counts the committed new tokens,
    including the end-of-sequence token; Stats counts the same tokens. `prompt_tokens` is 0 if the sequence was never
    part of a step.
    """

    sequence_id: str
    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    stop_token_id: int | None = None
    """The token that ended the sequence, if `reason` is `stop`. None if the sequence ended because its grammar was
    complete.
    """
    stop_logprobs: TokenLogprobs | None = None
    """Log-probabilities of `stop_token_id`, if requested."""
    accepted_prediction_tokens: int = 0
    """Tokens of `Add.prediction` that were drafted and are part of the answer. They are in `completion_tokens`."""
    rejected_prediction_tokens: int = 0
    """Tokens of `Add.prediction` that were drafted but are not part of the answer. They are in no other count."""
    code: str | None = None
    message: str | None = None


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reports a message that had no effect: it could not be decoded, or it was an Add with an id that is in use.

    Such an Add is not answered with Finished, which would end the stream of the running sequence with the same id.
    """

    message: str
    sequence_id: str | None = None


class AdapterState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to Load, Unload, Pin or ForgetPrefixes. `state` is `resident`, `absent` or `failed`. For ForgetPrefixes,
    `digest` is empty.

    With `failed`, `code` is `adapter_unavailable` (the adapter cannot be loaded), `superseded` (a later call requested
    the opposite), `pin_limit` or `invalid_request`.
    """

    call_id: str
    digest: str
    state: str
    num_pages: int = 0
    code: str | None = None
    message: str | None = None


class ResidentAdapter(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    slot: int
    num_pages: int
    num_users: int
    """Number of running sequences that use the adapter."""
    is_pinned: bool = False
    """True if the engine, or each of several engines, has pinned the adapter."""
    is_pinned_somewhere: bool = False
    """True if one of several engines has pinned the adapter. An engine does not set it."""
    idle_s: float = 0.0
    """Seconds since a sequence last used the adapter. 0 while a sequence uses it."""


class AdapterChange(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`kind` is `loaded`, `evicted` (also by an unload) or `struck` (the adapter produced non-finite values)."""

    number: int
    """Higher than the numbers of earlier changes and, unless the clock has been set back, of earlier engines."""
    digest: str
    kind: str


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Histogram of step times: `counts[i]` steps took at most `bounds_s[i]` and more than the previous bound.

    `counts` has one more entry than `bounds_s`, for the steps beyond the last bound.
    """

    bounds_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    seconds: float = 0.0
    """Total time of all steps."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Number of waiting sequences, by reason. Each sequence is counted once."""

    adapter: int = 0
    """Sequences waiting for an adapter that is not in the pool yet."""
    pages: int = 0
    """Sequences waiting for pages, because the last step found too few in the pool."""
    slot: int = 0
    """Sequences waiting for a free sequence slot, for rows in a step, or for their grammar or its next mask."""
    grant: int = 0
    """Sequences waiting for an Extend that raises their token limit."""


class GraphMemory(msgspec.Struct, frozen=True, kw_only=True):
    num_graphs: int = 0
    num_bytes: int = 0
    """Device memory taken by the captures, in bytes, measured as the drop in free memory."""


class GrammarCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and times of grammar compilation and mask computation since the engine started."""

    num_compiled: int = 0
    num_reused: int = 0
    """Sequences that needed no compilation of their own, because the grammar was already compiled or being compiled."""
    compile_s: float = 0.0
    num_masks: int = 0
    mask_s: float = 0.0
    """Processor time to follow tokens and compute the next masks, in seconds. Other processes spend it."""
    wait_s: float = 0.0
    """Time that steps have waited for masks, in seconds."""
    num_processes: int = 0
    """Processes that follow grammars, one per tenant with grammars."""


class DraftCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Drafted tokens that steps have verified since startup, by their source: the sequence's own text, the prediction
    of its request, the base's own head, the head with a drafter of the sequence's adapter, or its grammar.
    """

    text_tokens: int = 0
    accepted_text_tokens: int = 0
    prediction_tokens: int = 0
    accepted_prediction_tokens: int = 0
    head_tokens: int = 0
    accepted_head_tokens: int = 0
    drafter_tokens: int = 0
    accepted_drafter_tokens: int = 0
    grammar_tokens: int = 0
    accepted_grammar_tokens: int = 0
    """A token that a grammar forces is accepted unless the sequence ends before it."""
    wasted_s: float = 0.0
    """Estimated time of steps that was spent on rejected tokens, in seconds."""
    head_s: float = 0.0
    """Time that decode steps of few sequences spent on the base's own head, in seconds. On a GPU, it is the time for
    which the engine waited for drafts.
    """


class HostPageCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of evicted prefix pages in host memory (`EngineConfig.kv_host_bytes`), and what happened to them since
    startup. All 0 if there is no such memory.
    """

    num_slots: int = 0
    """Maximum number of pages in host memory."""
    num_pages: int = 0
    num_saved: int = 0
    """Pages copied to host memory."""
    num_loaded: int = 0
    """Pages copied back into the pool."""
    num_evictions: int = 0
    """Pages deleted from host memory to make room for others."""
    restored_tokens: int = 0
    """Tokens with which sequences began because their pages were copied back, after a preemption, too."""
    recomputed_tokens: int = 0
    """Tokens that were computed although their pages were in host memory, because copying them would have been slower.
    """


class DiskPageCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Copies on disk of prefix pages that host memory has evicted (`EngineConfig.kv_disk_bytes`), and what happened to
    them since startup. All 0 if there is no such file.
    """

    num_slots: int = 0
    """Maximum number of pages on disk."""
    num_pages: int = 0
    num_written: int = 0
    num_read: int = 0
    """Pages read back into host memory."""
    num_evictions: int = 0
    """Pages replaced on disk by others."""
    num_lost: int = 0
    """Pages that host memory evicted before they could be written."""
    num_failed: int = 0
    """Pages that could not be written, read or erased, or were not those that had been written."""
    read_tokens: int = 0
    """Tokens with which sequences could begin because their pages were read from disk."""
    recomputed_tokens: int = 0
    """Tokens that were computed although their pages were on disk, because reading them would have been slower."""


class DecodeReads(msgspec.Struct, frozen=True, kw_only=True):
    """What decode steps had to read since startup, and how long these steps took. All 0 on a CPU.

    `num_bytes` counts weights, K and V, and adapters once per step (`engine/loop/decode_reads.py`). `bandwidth` is the
    device's bandwidth in bytes per second, measured at startup, or 0 if it is not known.
    """

    num_bytes: int = 0
    seconds: float = 0.0
    bandwidth: float = 0.0

    @property
    def utilization(self) -> float | None:
        """Share of the bandwidth that the steps used, or None if no decode step has been measured."""
        return self.num_bytes / self.seconds / self.bandwidth if self.seconds and self.bandwidth else None


class TierLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The sequences of one service tier, or the background sequences."""

    num_running: int = 0
    num_waiting: int = 0
    prompt_tokens: int = 0
    """Prompt tokens that are still to be computed, without those of preempted sequences."""


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A snapshot of the engine. Counters never decrease while the engine is running."""

    call_id: str
    num_steps: int
    num_running: int
    num_waiting: int
    num_background_running: int = 0
    """The background sequences in `num_running`. They make room for others at once."""
    num_background_waiting: int = 0
    service_tiers: tuple[TierLoad, ...] = ()
    """The load by rank: each of SERVICE_TIERS, then the background sequences."""
    max_sequences: int = 0
    """Number of sequences that can run at once."""
    num_engines: int = 1
    """Number of engines whose statistics these are."""
    num_ended: int = 0
    """Sequences that ended while they were running."""
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    """Prompt tokens of large steps, which compute at least half of `max_batch_tokens`, and the duration of these steps.
    """
    num_pages: int
    num_free_pages: int
    num_kv_pages: int
    num_adapter_pages: int
    num_prefix_pages: int
    """KV pages in the prefix cache, in use or idle."""
    num_idle_prefix_pages: int = 0
    """Pages in the prefix cache that no sequence uses. They can be evicted."""
    prompt_tokens: int
    """Prompt tokens computed, each counted once."""
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    recomputed_tokens: int = 0
    """Prompt and answer tokens that were computed again after a preemption."""
    num_adapter_loads: int
    num_adapter_evictions: int
    num_preemptions: int
    given_up_steps: int = 0
    """Steps of background sequences that were given up because other sequences arrived. No other figure has them."""
    mixed_steps: int
    """Steps with at least two different adapters."""
    max_adapters_in_step: int
    num_rows: int = 0
    """Token rows computed by all steps, for prompts and answers."""
    num_step_sequences: int = 0
    """Number of sequences in each step, summed over all steps."""
    num_prefix_evictions: int = 0
    """Idle prefix-cache pages evicted."""
    step_times: StepTimes = StepTimes()
    waiting: Waiting = Waiting()
    loading: LoadCounts = LoadCounts()
    adapters: tuple[ResidentAdapter, ...] = ()
    num_pinned_pages: int = 0
    page_bytes: int = 0
    """Bytes per page, over all layers, with the scales of K and V."""
    num_slots: int = 0
    """Maximum number of resident adapters."""
    graphs: GraphMemory = GraphMemory()
    decode_reads: DecodeReads = DecodeReads()
    grammars: GrammarCounts = GrammarCounts()
    drafts: DraftCounts = DraftCounts()
    host_pages: HostPageCounts = HostPageCounts()
    disk_pages: DiskPageCounts = DiskPageCounts()
    tiers: tuple[TierContents, ...] = ()
    """Contents of the tiers. Empty unless the request sets `with_tiers`."""
    changes: tuple[AdapterChange, ...] = ()
    """The last changes to adapters, oldest first. Empty unless the request sets `changes_after`."""

    @property
    def num_foreground(self) -> int:
        """Number of running and waiting sequences that are not background sequences."""
        num_background = self.num_background_running + self.num_background_waiting
        return self.num_running + self.num_waiting - num_background

    @property
    def num_reclaimable_pages(self) -> int:
        """Number of pages available to new requests: free pages, and pages of idle adapters and prefixes."""
        idle = sum(one.num_pages for one in self.adapters if one.num_users == 0 and not one.is_pinned)
        return self.num_free_pages + self.num_idle_prefix_pages + idle


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An engine's first message to each gateway, with the engine's limits on sequences."""

    max_model_len: int
    num_pages: int
    page_tokens: int
    device: str
    dtype: str
    quantization: str | None = None
    """The format of the base's weights, followed by the formats of activations, adapters and the KV cache if they are
    rounded too. None if nothing is rounded."""
    adapter_dtype: str | None = None
    """`EngineConfig.adapter_dtype`."""
    kv_dtype: str = "auto"
    """`EngineConfig.kv_dtype`."""
    num_kv_tokens: int = 0
    """Number of tokens whose K and V fit into an empty pool: `CacheLayout.num_tokens`."""
    num_host_kv_tokens: int = 0
    """The same for the host memory of `EngineConfig.kv_host_bytes`."""
    num_disk_kv_tokens: int = 0
    """The same for the file of `EngineConfig.kv_disk_bytes`."""
    num_dequantized: int = 0
    """`LoadedBase.num_dequantized`."""
    protocol: int = PROTOCOL
    model_sha256: str = ""
    """SHA-256 of the files that must be identical on the gateway and the engine: see `model_files.py`."""
    base_sha256: str = ""
    """Identifies the base, including its weights. Adapters are validated for one base: see `model_files.py`."""
    guesses: str | None = None
    """Where the engine guesses drafts, besides predictions: `text` or `head`. None if it guesses none."""
    max_sequences: int = 16
    """Number of sequences that the engine runs at once."""
    ran_at_death: tuple[str, ...] = ()
    """Ids of the sequences, from all gateways, that the previous engine was running when it died."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Carries no data. If sending a Heartbeat fails, the engine knows that the gateway is gone."""


ToEngine = Add | Extend | Abort | Load | Unload | Pin | ForgetPrefixes | Credit | StatsRequest
FromEngine = StepOutput | Finished | Rejected | AdapterState | Stats | EngineReady | Heartbeat
