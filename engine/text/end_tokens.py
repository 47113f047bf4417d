"""The tokens with which an adapter's answers end, besides those of the base. Servers and `LLM` share this rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from loramux.adapter_store.formats.version_files.added_vocabulary import SpecialTokens
from loramux.engine.protocol.messages import SamplingParams
from loramux.engine.text.text_tokenizer import TextTokenizer


def end_tokens(
    eos_token_ids: Sequence[int], special_tokens: SpecialTokens, tokenizer: TextTokenizer, vocab_size: int
) -> tuple[int, ...]:
    """Return the end tokens of an adapter: those of its `generation_config.json`, and its own `eos_token`.

    `tokenizer` and `vocab_size` include the adapter's own tokens.
    """
    contents = (content for role, content in special_tokens if role == "eos_token")
    ids = (*eos_token_ids, *map(tokenizer.token_id, contents))
    return tuple(one for one in ids if one is not None and one < vocab_size)


def ending_at(sampling: SamplingParams, token_ids: Iterable[int]) -> SamplingParams:
    """Return parameters with which a sequence also ends at these end tokens, unless it ignores end tokens."""
    if sampling.ignore_eos:
        return sampling
    return msgspec.structs.replace(
        sampling, stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *token_ids)))
    )
