"""Extends a base's tokenizer with the tokens that an adapter adds, exactly as transformers does."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import Tokenizer

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.added_vocabulary import AddedToken

_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def next_token_id(tokenizer: Tokenizer) -> int:
    """Return the id that the next token added to the tokenizer will have."""
    return max(
        tokenizer.get_vocab_size(with_added_tokens=False), *(i + 1 for i in tokenizer.get_added_tokens_decoder()), 0
    )


def extended_tokenizer(base: Tokenizer, tokens: Sequence[AddedToken]) -> Tokenizer:
    """Return a tokenizer that shares the model of `base` and has additional tokens.

    Raises AdapterRejected, with the token in `param`, if the base already has a token, if a token's id is not the next
    free id, or if the base cannot add a token.
    """
    first_id = next_token_id(base)
    for index, token in enumerate(tokens):
        param = f"tokens[{index}]"
        if base.token_to_id(token.content) is not None:
            raise AdapterRejected("token_collision", "the base's tokenizer already has this token", f"{param}.content")
        if token.id != first_id + index:
            message = f"the base's tokenizer has {first_id} tokens, so the id must be {first_id + index}"
            raise AdapterRejected("token_collision", message, f"{param}.id")
        if token.normalized and base.normalizer is not None and not base.normalizer.normalize_str(token.content):
            message = "the base's tokenizer normalizes this content to an empty string"
            raise AdapterRejected("invalid_vocabulary", message, f"{param}.content")
    extended = _shared_copy(base)
    extended.add_tokens([_library_token(token) for token in tokens])
    for index, token in enumerate(tokens):
        if extended.token_to_id(token.content) != token.id:
            message = "the base's tokenizer cannot add this token"
            raise AdapterRejected("token_collision", message, f"tokens[{index}].content")
    return extended


def _library_token(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _shared_copy(base: Tokenizer) -> Tokenizer:
    """Return a copy of `base` that shares its parts, such as the model and the decoder.

    If the ids of the added tokens have gaps, adding the tokens to another tokenizer would change their ids. In that
    case, the whole base is copied, which takes about a second.
    """
    copy, added = Tokenizer(base.model), base.get_added_tokens_decoder()
    for part in _PARTS:
        if getattr(base, part) is not None:
            setattr(copy, part, getattr(base, part))
    copy.add_tokens([added[token_id] for token_id in sorted(added)])
    if _contents(copy) != _contents(base):
        copy = Tokenizer.from_str(base.to_str())
    return copy


def _contents(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
