"""Everything that crosses between a gateway and an engine, one record each.

A request's hops: the gateway sends Add; the engine answers with StepOutput messages that hold the new token ids of
each of the gateway's sequences, and last with Finished. The engine knows digests, never tenants.
"""

from __future__ import annotations

import math

import msgspec

from loramux.adapter_store.tiers.tier_contents import TierContents
from loramux.adapter_store.tiers.tier_figures import LoadCounts

PROTOCOL = 1
"""Counts the changes that make gateways and engines of different versions misunderstand each other."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token of a sequence is chosen; names and defaults are those of the OpenAI API and of vLLM."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 considers every token."""
    min_p: float = 0.0
    """Leaves out tokens that are less likely than this share of the likeliest; 0 leaves out none."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens in the prompt or the answer; 1 changes none."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens in the answer."""
    frequency_penalty: float = 0.0
    """The same for each time that they are in the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of these tokens, each at most once, before everything else."""
    seed: int | None = None
    num_logprobs: int | None = None
    """None: no log-probabilities; 0: the chosen token's; n: also the n most likely tokens'."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class Add(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run one sequence. `max_tokens` is what the quota granted; the adapter is named by digest, None is the base.

    `sequence_id` tells apart the sequences of one gateway; another gateway may use the same. Times are finite and not
    negative, or the sequence ends with `invalid_request`.
    """

    sequence_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    digest: str | None = None
    share_key: str = ""
    weight: int = 1
    host_floor_bytes: int = 0
    """So much of the share's adapters stays in host memory when others' adapters come; 0 is no such promise."""
    isolation_key: bytes = b""
    """Sequences with the same key may share the K and V of equal prefixes; an empty one shares with nobody."""
    priority: int = 0
    """Higher ones go first, also before fairness between shares."""
    timeout_s: float | None = None
    """The sequence ends with `deadline_exceeded` when it is not through by then; None: never."""
    traceparent: str | None = None
    """The span (W3C Trace Context) that the engine's spans of this sequence belong to; None: it is not traced."""
    pause_s: float = 0.0
    """How long the sequence waits at `max_tokens` for an Extend before it ends with `length`."""
    tokens_at_once: int = 1
    """So many tokens are told in one output, of an answer that nobody reads before its end. The first is told at once,
    and so is each that comes with log-probabilities; what is still to be told comes before Finished. An engine that
    dies has told of up to `tokens_at_once - 1` fewer than it had committed, which nobody pays for."""


class Extend(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Raise a sequence's limit to `max_tokens`; one that has ended already is left as it was.

    The limit goes no further than the context and the pool reach beside the sequence's adapter and what is pinned. A
    sequence that wants an adapter and has not run yet gets its higher limit when it does.
    """

    sequence_id: str
    max_tokens: int


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop a sequence. With `keep`, at most that many of its committed tokens are billed (a stop string was found)."""

    sequence_id: str
    keep: int | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make an adapter resident; answered by AdapterState once it is or cannot be.

    While an Unload of the adapter is pending, it waits for that and loads afresh.
    """

    call_id: str
    digest: str


class Unload(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Free an adapter's pages, and forget what it computed, once no sequence wants it; answered by AdapterState.

    From now until the answer the adapter drains: sequences that were added before go on, and with `deadline_s` those
    that have not ended by then are ended with `adapter_unavailable`; sequences that are added in the meantime are
    refused with `adapter_unavailable`. So the pages become free whatever else is asked. After the answer the next
    sequence loads the adapter afresh. A pin ends, and loads and pins that still wait are answered with `superseded`.
    """

    call_id: str
    digest: str
    deadline_s: float | None = None


class Pin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load an adapter and keep it resident until a Pin with `is_pinned = False` or an Unload; answered by AdapterState.

    A pin outlives the gateway that asked for it. An adapter that is evicted because its values were not finite is
    loaded and pinned again; one that cannot be loaded again loses its pin, and Stats shows it no more.
    Pins beyond their share of the pool, or of its slots, are answered with `pin_limit`, and so is one that would leave
    too few pages for a request that was accepted before.
    """

    call_id: str
    digest: str
    is_pinned: bool = True


class Credit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Allow the engine to send this gateway `count` more StepOutput messages."""

    count: int


class StatsRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for Stats; `call_id` comes back in the answer. `with_tiers` asks what host and disk tier hold as well."""

    call_id: str
    with_tiers: bool = False


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probability of one chosen token and of the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New tokens of one sequence. `logprobs` has one entry a token when they were asked for, else none.

    The token that ends a sequence (end of sequence, stop id) is counted by Finished but is not among these.
    """

    sequence_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What one or several steps produced for one gateway."""

    outputs: tuple[SequenceOutput, ...]


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end of a sequence and the truth for its bill; follows its last SequenceOutput.

    `reason` is `stop` (end of sequence or stop id), `length`, `abort` or `error`; with `error`, `code` is one of
    `adapter_unavailable`, `adapter_quarantined`, `deadline_exceeded`, `invalid_request`, `prompt_too_long`,
    `request_too_large`, `not_finite`, `engine_unavailable`, `overloaded`.
    `completion_tokens` counts the tokens that the engine committed, the end-of-sequence token included;
    `prompt_tokens` is 0 where no step ever held the sequence.
    """

    sequence_id: str
    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    code: str | None = None
    message: str | None = None


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message that was not obeyed and changed nothing: it could not be read, or added an id that is running.

    No Finished answers such an Add: that would end the stream of the sequence that runs.
    """

    message: str
    sequence_id: str | None = None


class AdapterState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to Load, Unload or Pin. `state` is `resident`, `absent` or `failed`.

    With `failed`, `code` is `adapter_unavailable` (it cannot be loaded), `superseded` (a later call asked for the
    opposite), `pin_limit` or `invalid_request`.
    """

    call_id: str
    digest: str
    state: str
    num_pages: int = 0
    code: str | None = None
    message: str | None = None


class ResidentAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter that is in the pool."""

    digest: str
    slot: int
    num_pages: int
    num_users: int
    """Running sequences."""
    is_pinned: bool = False
    idle_s: float = 0.0
    """Since a sequence last used it; 0 while one does."""


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long the steps so far took: `counts[i]` of them at most `bounds_s[i]` and more than the bound before it.

    `counts` has one entry more than there are bounds, for the steps beyond the last.
    """

    bounds_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    seconds: float = 0.0
    """All of them together."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """What sequences wait for, each counted once."""

    adapter: int = 0
    """An adapter that is not in the pool yet."""
    pages: int = 0
    """Pages of the pool: the last step found none for someone."""
    seat: int = 0
    """Their turn: a place in a step."""
    grant: int = 0
    """More tokens than they were granted."""


class GraphMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Captured steps of a GPU."""

    num_graphs: int = 0
    num_bytes: int = 0
    """How much less memory the device had free after each capture than before it, added up."""


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A snapshot of the engine; counters only grow while the engine lives."""

    call_id: str
    num_steps: int
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_kv_pages: int
    num_adapter_pages: int
    num_prefix_pages: int
    """Pages of K and V that the prefix cache knows, in use or not."""
    prompt_tokens: int
    """Prompt tokens that were computed, each once."""
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that the prefix cache spared."""
    recomputed_tokens: int = 0
    """Tokens of prompts and answers that were computed again after a preemption."""
    num_adapter_loads: int
    num_adapter_evictions: int
    num_preemptions: int
    mixed_steps: int
    """Steps that held at least two different adapters."""
    max_adapters_in_step: int
    num_rows: int = 0
    """Tokens that steps computed, of prompts and of answers."""
    num_step_sequences: int = 0
    """Sequences that steps held; one counts in each of its steps."""
    num_prefix_evictions: int = 0
    """Idle pages of the prefix cache that gave way to others."""
    step_times: StepTimes = StepTimes()
    waiting: Waiting = Waiting()
    loading: LoadCounts = LoadCounts()
    adapters: tuple[ResidentAdapter, ...] = ()
    num_pinned_pages: int = 0
    page_bytes: int = 0
    """Of all layers."""
    num_slots: int = 0
    """How many adapters can be resident."""
    graphs: GraphMemory = GraphMemory()
    tiers: tuple[TierContents, ...] = ()
    """Only where they were asked for."""


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of an engine to each gateway: it can run sequences up to these limits."""

    max_model_len: int
    num_pages: int
    page_tokens: int
    device: str
    dtype: str
    protocol: int = PROTOCOL
    model_sha256: str = ""
    """Of the files that a gateway must have the same of: see `model_files.py`."""
    ran_at_death: tuple[str, ...] = ()
    """Sequences of any gateway that the engine before this one was running when it died."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Says nothing; sending it is how the engine finds out that a gateway is gone."""


ToEngine = Add | Extend | Abort | Load | Unload | Pin | Credit | StatsRequest
FromEngine = StepOutput | Finished | Rejected | AdapterState | Stats | EngineReady | Heartbeat


def is_duration(seconds: float | None) -> bool:
    """Whether a timer can be set by it; None is no timer."""
    return seconds is None or (math.isfinite(seconds) and seconds >= 0)
