"""Formats the log-probabilities of prompts as vLLM does."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from loramux.engine.protocol.messages import PromptLogprob
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.requests.answers import Document, shown_logprob
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer


def prompt_logprobs_body(
    tokenizer: ModelTokenizer, scored: Sequence[PromptLogprob], count: int
) -> list[Document | None]:
    return [None, *(_position(tokenizer, one, count) for one in scored)]


def shared_by_choices(choices: Sequence[ChoiceDelta], num_generated: int) -> list[ChoiceDelta]:
    """Copy the log-probabilities of each prompt to all its choices. Only the sequence of the first choice computes
    them.
    """
    return [
        replace(choice, prompt_logprobs=choices[place - place % num_generated].prompt_logprobs)
        for place, choice in enumerate(choices)
    ]


def _position(tokenizer: ModelTokenizer, scored: PromptLogprob, count: int) -> Document:
    # As in vLLM, the prompt's own token comes first.
    shown = {scored.token_id: (scored.logprob, scored.rank)}
    for rank, (token_id, logprob) in enumerate(scored.top[:count], start=1):
        shown.setdefault(token_id, (logprob, rank))
    return {
        str(token_id): {
            "logprob": shown_logprob(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
        }
        for token_id, (logprob, rank) in shown.items()
    }
