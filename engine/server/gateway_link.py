"""The engine's link to one gateway. Credits ensure that a slow gateway costs only the memory for its own tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loramux.engine.protocol.messages import (
    Finished,
    FromEngine,
    PromptLogprob,
    SequenceOutput,
    StepOutput,
    TokenLogprobs,
)

Send = Callable[[FromEngine], None]

MAX_OUTPUT_BYTES = 4 << 20
"""About the most bytes of held output that one message carries. Other servers refuse messages of 16 MiB."""
OUTPUT_BYTES = 64
TOKEN_BYTES = 5
ENTRY_BYTES = 64
TOP_BYTES = 16
"""Encoded sizes, about, in bytes: of an output without its contents, a token, its log-probability, and that of one of
the most likely tokens.
"""


class GatewayLink:
    """Sends no more StepOutput messages than the gateway has granted credits for.

    Without credit, new tokens are appended to their sequence's held tokens, and the end of the sequence is sent after
    them, in messages of bounded size. The batch never waits, and nothing is dropped. The `max_tokens` limits of this
    gateway's sequences bound the number of held tokens, and appending takes constant time.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._credit = 0
        self._held: dict[str, HeldTokens] = {}
        self._held_ends: list[Finished] = []

    def grant(self, count: int) -> None:
        self._credit += count
        self._flush()

    def post(self, message: FromEngine) -> None:
        match message:
            case StepOutput() if self._credit > 0 and not self._held:
                # The common case: the gateway keeps up, so nothing is held and there is credit.
                self._credit -= 1
                self._send(message)
                return
            case StepOutput(outputs=outputs):
                for output in outputs:
                    self._hold(output)
            case Finished():
                self._held_ends.append(message)
            case _:
                self._send(message)
                return
        self._flush()

    def post_joined(self, output: SequenceOutput) -> None:
        """Post an output that may come from many steps of an engine. A long one is split like held output."""
        if size_of(output) <= MAX_OUTPUT_BYTES:
            self.post(StepOutput(outputs=(output,)))
        else:
            self._hold(output)
            self._flush()

    def _hold(self, output: SequenceOutput) -> None:
        held = self._held.get(output.sequence_id)
        if held is None:
            held = self._held[output.sequence_id] = HeldTokens()
        held.join(output)

    def _flush(self) -> None:
        while self._held and self._credit > 0:
            self._credit -= 1
            self._send(StepOutput(outputs=tuple(self._take())))
        waiting = []
        for end in self._held_ends:
            if end.sequence_id in self._held:
                waiting.append(end)
            else:
                self._send(end)
        self._held_ends = waiting

    def _take(self) -> Sequence[SequenceOutput]:
        """Remove the first held outputs, about MAX_OUTPUT_BYTES of them."""
        outputs: list[SequenceOutput] = []
        num_bytes = 0
        while self._held and num_bytes < MAX_OUTPUT_BYTES:
            sequence_id, held = next(iter(self._held.items()))
            outputs.append(held.take(sequence_id, MAX_OUTPUT_BYTES - num_bytes))
            if not held.is_empty:
                break
            del self._held[sequence_id]
            num_bytes += size_of(outputs[-1])
        return outputs


class HeldTokens:
    """One sequence's tokens that are waiting for credit."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[PromptLogprob] = []
        self._pooled = b""
        self._cached_tokens = 0

    def join(self, output: SequenceOutput) -> None:
        self._token_ids.extend(output.token_ids)
        self._logprobs.extend(output.logprobs)
        self._prompt_logprobs.extend(output.prompt_logprobs)
        self._pooled += output.pooled
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)

    @property
    def is_empty(self) -> bool:
        return not (self._token_ids or self._prompt_logprobs or self._pooled)

    def output(self, sequence_id: str) -> SequenceOutput:
        return SequenceOutput(
            sequence_id=sequence_id,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            pooled=self._pooled,
            cached_tokens=self._cached_tokens,
        )

    def take(self, sequence_id: str, max_bytes: int) -> SequenceOutput:
        """Remove and return the first tokens, about `max_bytes` of them and at least one. Prompt tokens come first."""
        num_scores = num_fitting(self._prompt_logprobs, max_bytes)
        num_tokens = 0
        if num_scores == len(self._prompt_logprobs):
            left_bytes = max_bytes - size_of_entries(self._prompt_logprobs)
            num_tokens = num_fitting(self._logprobs, left_bytes) if self._logprobs else left_bytes // TOKEN_BYTES
            num_tokens = max(1, num_tokens)
        part = HeldTokens()
        part._cached_tokens, self._cached_tokens = self._cached_tokens, 0
        part._token_ids, self._token_ids = self._token_ids[:num_tokens], self._token_ids[num_tokens:]
        part._logprobs, self._logprobs = self._logprobs[:num_tokens], self._logprobs[num_tokens:]
        part._prompt_logprobs, self._prompt_logprobs = (
            self._prompt_logprobs[:num_scores],
            self._prompt_logprobs[num_scores:],
        )
        if not (self._token_ids or self._prompt_logprobs):
            part._pooled, self._pooled = self._pooled, b""
        return part.output(sequence_id)


def num_fitting(entries: Sequence[TokenLogprobs | PromptLogprob], max_bytes: int) -> int:
    """Return how many entries fit into `max_bytes`, and at least 1 if there are any."""
    num_bytes = 0
    for count, entry in enumerate(entries):
        num_bytes += ENTRY_BYTES + TOP_BYTES * len(entry.top)
        if num_bytes > max_bytes:
            return max(1, count)
    return len(entries)


def size_of(output: SequenceOutput) -> int:
    """Return about the encoded size of an output, in bytes."""
    num_bytes = OUTPUT_BYTES + TOKEN_BYTES * len(output.token_ids) + len(output.pooled)
    return num_bytes + size_of_entries(output.logprobs) + size_of_entries(output.prompt_logprobs)


def size_of_entries(entries: Sequence[TokenLogprobs | PromptLogprob]) -> int:
    return sum(ENTRY_BYTES + TOP_BYTES * len(entry.top) for entry in entries)
