"""The engine's link to one gateway. Credits ensure that a slow gateway costs only the memory for its own tokens."""

from __future__ import annotations

from collections.abc import Callable

from loramux.engine.protocol.messages import (
    Finished,
    FromEngine,
    PromptLogprob,
    SequenceOutput,
    StepOutput,
    TokenLogprobs,
)

Send = Callable[[FromEngine], None]


class GatewayLink:
    """Sends no more StepOutput messages than the gateway has granted credits for.

    Without credit, new tokens are appended to their sequence's held tokens, and the end of the sequence is sent after
    them. The batch never waits, and nothing is dropped. The `max_tokens` limits of this gateway's sequences bound the
    number of held tokens, and appending takes constant time.
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
                    held = self._held.get(output.sequence_id)
                    if held is None:
                        held = self._held[output.sequence_id] = HeldTokens()
                    held.join(output)
            case Finished():
                self._held_ends.append(message)
            case _:
                self._send(message)
                return
        self._flush()

    def _flush(self) -> None:
        if self._held and self._credit > 0:
            self._credit -= 1
            outputs = tuple(held.output(sequence_id) for sequence_id, held in self._held.items())
            self._held.clear()
            self._send(StepOutput(outputs=outputs))
        waiting = []
        for end in self._held_ends:
            if end.sequence_id in self._held:
                waiting.append(end)
            else:
                self._send(end)
        self._held_ends = waiting


class HeldTokens:
    """One sequence's tokens that are waiting for credit."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[PromptLogprob] = []
        self._pooled = b""

    def join(self, output: SequenceOutput) -> None:
        self._token_ids.extend(output.token_ids)
        self._logprobs.extend(output.logprobs)
        self._prompt_logprobs.extend(output.prompt_logprobs)
        self._pooled += output.pooled

    def output(self, sequence_id: str) -> SequenceOutput:
        return SequenceOutput(
            sequence_id=sequence_id,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            pooled=self._pooled,
        )
