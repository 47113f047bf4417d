"""A fake engine for tests, which emits scripted tokens."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from loramux.adapter_store.tiers.tier_contents import KeptAdapter, TierContents
from loramux.adapter_store.tiers.tier_figures import TierFigures
from loramux.engine.protocol.messages import (
    Abort,
    AdapterState,
    Add,
    AnswerT,
    DecodeReads,
    EngineCall,
    EngineReady,
    Extend,
    Finished,
    ForgetPrefixes,
    Load,
    Pin,
    PromptLogprob,
    ResidentAdapter,
    SequenceOutput,
    Stats,
    StatsRequest,
    TokenLogprobs,
    Unload,
)
from loramux.platform.base_draw import BaseOrder
from loramux.platform.engine_link.engine_client import EngineUnavailable

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The behaviour of one sequence: emit `token_ids` up to `max_tokens`, pause there if the Add message allows it,
    then end.

    If there are fewer than `max_tokens` tokens, the sequence ends as if the model had chosen an end-of-sequence token,
    which is committed but not emitted.
    """

    token_ids: tuple[int, ...]
    delay_s: float = 0.0
    """Delay before each output, in seconds."""
    tokens_per_output: int = 1
    stall_after: int | None = None
    """Emit this many tokens, then nothing more until aborted."""
    resume: asyncio.Event | None = None
    """Once this is set, a stalled sequence goes on."""
    ignores_abort: bool = False
    """Never answer an abort, like an engine that hangs."""
    abort_delay_s: float = 0.0
    """Answer an abort after this many seconds, like an engine in a long step."""
    error: str | None = None
    """End with this code after the tokens."""
    has_run: bool = True
    """False if the sequence ends before a step includes it."""
    cached_tokens: int = 0
    predicted: tuple[int, int] = (0, 0)
    """The numbers of accepted and rejected tokens of the prediction."""
    stop_token_id: int | None = None
    """The end-of-sequence token."""
    logprob: float = -0.5
    """The log-probability of each token."""
    state: tuple[float, ...] = (3.0, 0.0, -4.0)
    """The pooled state of the prompt, if the Add message asks for it."""


def echo(add: Add) -> Script:
    if add.pooling is not None:
        return Script(token_ids=())
    times = -(-add.max_tokens // len(add.prompt))
    return Script(token_ids=(add.prompt * times)[: add.max_tokens])


class ScriptedEngine:
    """An EngineClient that runs no engine. `adds`, `extensions` and `aborts` record the calls made to it."""

    def __init__(
        self, script: Callable[[Add], Script] = echo, max_model_len: int = 1024, base_sha256: str = ""
    ) -> None:
        self.script = script
        self.adds: list[Add] = []
        self.extensions: list[Extend] = []
        self.aborts: list[Abort] = []
        self._num_committed = 0
        self.num_waiting = self.num_background_waiting = 0
        """The number of waiting sequences that the engine reports."""
        self.figures: dict[str, Any] = {}
        """Fields that replace those of the reports."""
        self.resident: dict[str, int] = {}
        self.pinned: set[str] = set()
        self.unloadable: set[str] = set()
        self.purged: list[str] = []
        self.forgotten_prefixes: list[bytes] = []
        self._info = EngineReady(
            max_model_len=max_model_len,
            num_pages=64,
            page_tokens=16,
            device="cpu",
            dtype="float32",
            base_sha256=base_sha256,
        )
        self.quantization: str | None = None
        self.decode_reads = DecodeReads()
        self._is_ready = True
        self.is_live = True
        self._running: dict[str, _Sequence] = {}

    @property
    def info(self) -> EngineReady | None:
        return structs.replace(self._info, quantization=self.quantization) if self._is_ready else None

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    @property
    def is_own_ready(self) -> bool:
        return self.is_ready

    @property
    def trouble(self) -> str | None:
        return None if self._is_ready else "killed by SIGKILL: last words"

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, add: Add, order: BaseOrder | None = None) -> AsyncIterator[SequenceOutput | Finished]:
        self._check_ready()
        self.adds.append(add)
        sequence = self._running[add.sequence_id] = _Sequence(add, self.script(add), self._info.max_model_len)
        return self._stream(sequence)

    def abort(self, sequence_id: str) -> None:
        self.aborts.append(Abort(sequence_id=sequence_id))
        sequence = self._running.get(sequence_id)
        if sequence is not None and not sequence.script.ignores_abort:
            asyncio.get_running_loop().call_later(sequence.script.abort_delay_s, sequence.end, "abort")

    def die(self, has_run: bool = True) -> None:
        """End every stream as if the engine had died, and stay unavailable until `revive` is called. If not `has_run`,
        the sequences were still waiting.
        """
        self._is_ready = False
        for sequence in self._running.values():
            sequence.has_run = has_run
            sequence.end("engine_unavailable")

    def revive(self) -> None:
        self._is_ready = True

    def extend(self, sequence_id: str, max_tokens: int) -> None:
        self.extensions.append(Extend(sequence_id=sequence_id, max_tokens=max_tokens))
        if sequence_id in self._running:
            self._running[sequence_id].extend(max_tokens)

    def end_pauses(self) -> None:
        """Let the pauses of the running sequences be over, also those that have not begun."""
        for sequence in self._running.values():
            sequence.end_pause()

    async def call(self, message: EngineCall[AnswerT], timeout_s: float) -> AnswerT:
        answer: AnswerT = self._answer(message)
        return answer

    def _answer(self, message: EngineCall[Any]) -> Any:
        match message:
            case Load(digest=digest):
                return self._load(digest)
            case Pin(digest=digest, is_pinned=True):
                self.pinned.add(digest)
                return self._load(digest)
            case Pin(digest=digest):
                self.pinned.discard(digest)
                state = "resident" if digest in self.resident else "absent"
                return AdapterState(call_id="pin", digest=digest, state=state)
            case Unload(digest=digest, is_purge=is_purge):
                if is_purge:
                    self.purged.append(digest)
                self.resident.pop(digest, None)
                self.pinned.discard(digest)
                return AdapterState(call_id="unload", digest=digest, state="absent")
            case ForgetPrefixes(isolation_keys=isolation_keys):
                self._check_ready()
                self.forgotten_prefixes += isolation_keys
                return AdapterState(call_id="forget", digest="", state="absent")
            case StatsRequest(with_tiers=with_tiers):
                return self._stats(with_tiers)

    def _load(self, digest: str) -> AdapterState:
        self._check_ready()
        if digest in self.unloadable:
            return AdapterState(call_id="load", digest=digest, state="failed", code="adapter_unavailable")
        self.resident[digest] = 1
        return AdapterState(call_id="load", digest=digest, state="resident", num_pages=1)

    def _check_ready(self) -> None:
        if not self._is_ready:
            raise EngineUnavailable("the engine is not running")

    def _stats(self, with_tiers: bool) -> Stats:
        self._check_ready()
        num_used = sum(self.resident.values())
        stats = Stats(
            call_id="stats",
            num_steps=len(self.adds),
            num_running=len(self._running),
            num_waiting=self.num_waiting,
            num_background_waiting=self.num_background_waiting,
            num_pages=self._info.num_pages,
            num_free_pages=self._info.num_pages - num_used,
            num_kv_pages=0,
            num_adapter_pages=num_used,
            num_prefix_pages=0,
            cached_tokens=0,
            prompt_tokens=sum(len(add.prompt) for add in self.adds),
            completion_tokens=self._num_committed,
            num_adapter_loads=len(self.resident),
            num_adapter_evictions=0,
            num_preemptions=0,
            mixed_steps=0,
            max_adapters_in_step=0,
            loading=TierFigures().snapshot(),
            adapters=tuple(
                ResidentAdapter(digest=digest, slot=slot, num_pages=pages, num_users=0, is_pinned=digest in self.pinned)
                for slot, (digest, pages) in enumerate(self.resident.items())
            ),
            page_bytes=PAGE_BYTES,
            decode_reads=self.decode_reads,
            num_slots=self._info.num_pages,
            tiers=tuple(self._tier(tier) for tier in ("host", "disk")) if with_tiers else (),
        )
        return structs.replace(stats, **self.figures)

    def _tier(self, tier: str) -> TierContents:
        """Every tier contains the same adapters as the pool."""
        kept = tuple(
            KeptAdapter(digest=digest, num_bytes=pages * PAGE_BYTES, idle_s=0.0)
            for digest, pages in self.resident.items()
        )
        return TierContents(
            tier=tier,
            used_bytes=sum(one.num_bytes for one in kept),
            max_bytes=self._info.num_pages * PAGE_BYTES,
            num_adapters=len(kept),
            num_evictions=0,
            adapters=kept,
        )

    async def close(self) -> None:
        self.die()

    async def _stream(self, sequence: _Sequence) -> AsyncIterator[SequenceOutput | Finished]:
        add, script = sequence.add, sequence.script
        try:
            if add.sampling.num_prompt_logprobs is not None and len(add.prompt) > 1:
                scored = tuple(_prompt_logprob(add, token, script.logprob) for token in add.prompt[1:])
                yield SequenceOutput(sequence_id=add.sequence_id, token_ids=(), prompt_logprobs=scored)
            while sequence.ending is None and (tokens := sequence.next_tokens() or await sequence.later_tokens()):
                if await sequence.ends_within(script.delay_s):
                    break
                is_first = sequence.num_committed == 0
                sequence.num_committed += len(tokens)
                yield SequenceOutput(
                    sequence_id=add.sequence_id,
                    token_ids=tokens,
                    cached_tokens=script.cached_tokens if is_first else 0,
                    logprobs=tuple(_logprobs(add, token, script.logprob) for token in tokens)
                    if add.sampling.num_logprobs is not None
                    else (),
                )
            if sequence.has_stalled:
                await sequence.ends_within(None)
            end = sequence.finished()
            if add.pooling is not None and end.reason == "stop":
                state = struct.pack(f"<{len(script.state)}f", *script.state)
                yield SequenceOutput(sequence_id=add.sequence_id, token_ids=(), pooled=state)
            self._num_committed += end.completion_tokens
            yield end
        finally:
            self._running.pop(add.sequence_id, None)


class _Sequence:
    def __init__(self, add: Add, script: Script, max_model_len: int) -> None:
        self.add = add
        self._most_tokens = max_model_len - len(add.prompt)
        self.script = script
        self.num_committed = 0
        self.has_run = script.has_run
        self.ending: str | None = None
        self._max_tokens = add.max_tokens
        self._stall_after = script.stall_after
        self._ended = asyncio.Event()
        self._extended = asyncio.Event()

    def extend(self, max_tokens: int) -> None:
        self._max_tokens = max(self._max_tokens, max_tokens)
        self._extended.set()

    def end_pause(self) -> None:
        self.add = structs.replace(self.add, pause_s=0.0)
        self._extended.set()

    @property
    def has_stalled(self) -> bool:
        return self._stall_after is not None and self.num_committed >= self._stall_after

    async def later_tokens(self) -> tuple[int, ...]:
        """Wait until a stalled sequence may go on, or for an extension if the sequence has reached its limit, may pause
        and has not filled the context. Return the next tokens.
        """
        resume = self.script.resume
        if resume is not None and self.has_stalled:
            while not resume.is_set():
                if await self.ends_within(0.005):
                    return ()
            self._stall_after = None
            if tokens := self.next_tokens():
                return tokens
        may_pause = self.add.pause_s > 0 and self._max_tokens < self._most_tokens
        if self.num_committed < self._max_tokens or not may_pause:
            return ()
        self._extended.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.add.pause_s):
                await self._extended.wait()
        return self.next_tokens()

    def end(self, ending: str) -> None:
        self.ending = self.ending or ending
        self._ended.set()

    async def ends_within(self, seconds: float | None) -> bool:
        if seconds == 0.0:
            await asyncio.sleep(0)
            return self._ended.is_set()
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def next_tokens(self) -> tuple[int, ...]:
        limit = min(self._max_tokens, len(self.script.token_ids))
        if self._stall_after is not None:
            limit = min(limit, self._stall_after)
        return self.script.token_ids[
            self.num_committed : min(limit, self.num_committed + self.script.tokens_per_output)
        ]

    def finished(self) -> Finished:
        reason, code, committed = "length", None, self.num_committed
        if self.ending == "abort":
            reason = "abort"
        elif self.ending is not None or self.script.error is not None:
            reason, code = "error", self.ending or self.script.error
        elif self.add.pooling is not None:
            reason = "stop"
        elif committed < self._max_tokens:
            reason, committed = "stop", committed + 1
        stop_token_id = self.script.stop_token_id if reason == "stop" else None
        stop_logprobs = None
        if stop_token_id is not None and self.add.sampling.num_logprobs is not None:
            stop_logprobs = _logprobs(self.add, stop_token_id, self.script.logprob)
        return Finished(
            sequence_id=self.add.sequence_id,
            reason=reason,
            prompt_tokens=len(self.add.prompt) if self.has_run else 0,
            completion_tokens=committed,
            cached_tokens=self.script.cached_tokens,
            stop_token_id=stop_token_id,
            stop_logprobs=stop_logprobs,
            accepted_prediction_tokens=self.script.predicted[0],
            rejected_prediction_tokens=self.script.predicted[1],
            code=code,
        )


def _logprobs(add: Add, token_id: int, logprob: float) -> TokenLogprobs:
    named = add.sampling.logprob_token_ids
    if named:
        return TokenLogprobs(token_id, logprob, tuple((one, logprob) for one in dict.fromkeys((token_id, *named))))
    return TokenLogprobs(token_id, logprob, _top(token_id, logprob, add.sampling.num_logprobs or 0))


def _prompt_logprob(add: Add, token_id: int, logprob: float) -> PromptLogprob:
    return PromptLogprob(token_id, logprob, 1, _top(token_id, logprob, add.sampling.num_prompt_logprobs or 0))


def _top(token_id: int, logprob: float, count: int) -> tuple[tuple[int, float], ...]:
    """Put the token first, then IDs from 0 up, so that tests can predict the result."""
    ranked = [token_id, *(other for other in range(count + 1) if other != token_id)][:count]
    return tuple((other, logprob * (i + 1)) for i, other in enumerate(ranked))
