"""Lies of a server about the sequences that it runs for others. Each rewrites its engine's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from loramux.engine.protocol.messages import Finished, FromEngine, PromptLogprob, StepOutput, TokenLogprobs

Lie = Callable[[FromEngine], Iterable[FromEngine]]


def ending(**changes: Any) -> Lie:
    """Change the end of each sequence."""

    def lie(message: FromEngine) -> Iterable[FromEngine]:
        return (msgspec.structs.replace(message, **changes) if isinstance(message, Finished) else message,)

    return lie


def output(**changes: Any) -> Lie:
    """Change each output of each sequence."""

    def lie(message: FromEngine) -> Iterable[FromEngine]:
        if not isinstance(message, StepOutput):
            return (message,)
        return (StepOutput(outputs=tuple(msgspec.structs.replace(one, **changes) for one in message.outputs)),)

    return lie


def repeated(message: FromEngine) -> Iterable[FromEngine]:
    return (message,) if not isinstance(message, StepOutput) else (message,) * 20


def doubled(message: FromEngine) -> Iterable[FromEngine]:
    return (message,) if not isinstance(message, StepOutput) else (StepOutput(outputs=message.outputs * 2),)


def one_more(message: FromEngine) -> Iterable[FromEngine]:
    if isinstance(message, Finished) and message.reason == "length":
        message = msgspec.structs.replace(message, completion_tokens=message.completion_tokens + 1)
    return (message,)


LIES: Mapping[str, Lie] = {
    "a billion tokens": ending(completion_tokens=10**9),
    "more than a database holds": ending(completion_tokens=2**63 - 1),
    "negative tokens": ending(completion_tokens=-5),
    "fewer tokens than it sent": ending(completion_tokens=1),
    "many tokens too many": ending(completion_tokens=10),
    "one token too many": one_more,
    "a longer prompt": ending(prompt_tokens=10**9),
    "a negative prompt": ending(prompt_tokens=-1),
    "more cached tokens than the prompt has": ending(cached_tokens=10**6),
    "negative cached tokens": ending(cached_tokens=-4),
    "no such stop token": ending(reason="stop", stop_token_id=1 << 40),
    "no such token": output(token_ids=(1 << 40,)),
    "a negative token": output(token_ids=(-7,)),
    "more tokens than granted": output(token_ids=(5,) * 9),
    "each output twenty times": repeated,
    "each output twice in one message": doubled,
    "an unknown sequence": output(sequence_id="req_of_another-0"),
    "log-probabilities without tokens": output(logprobs=(TokenLogprobs(5, -0.5),) * 7),
    "log-probabilities of other tokens": output(logprobs=(TokenLogprobs(6, -0.5),)),
    "log-probabilities of another end": ending(stop_logprobs=TokenLogprobs(6, -0.5)),
    "a state that nobody asked for": output(pooled=b"\0\0\0\0"),
    "log-probabilities of a longer prompt": output(prompt_logprobs=(PromptLogprob(5, -0.5, 1),) * 100),
}
