"""Extends a base's tokenizer with the tokens that an adapter adds or renames, exactly as transformers does."""

from __future__ import annotations

import tokenizers
from tokenizers import Tokenizer

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.version_files.added_vocabulary import AddedToken, AddedVocabulary

_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def next_token_id(tokenizer: Tokenizer) -> int:
    """Return the id that the next token added to the tokenizer will have."""
    return max(
        tokenizer.get_vocab_size(with_added_tokens=False), *(i + 1 for i in tokenizer.get_added_tokens_decoder()), 0
    )


def extended_tokenizer(base: Tokenizer, vocabulary: AddedVocabulary) -> Tokenizer:
    """Return a tokenizer that shares the model of `base`, and also knows a version's added and renamed tokens.

    The library cannot rename a token, so a renamed token gets another id, after those of all other tokens. Raises
    AdapterRejected, with the token in `param`, if the base already has a token, if an added token's id is not the next
    free id, if a renamed token is not an added token of the base, or if the base cannot add a token.
    """
    first_id, known = next_token_id(base), base.get_added_tokens_decoder()
    renamed: list[AddedToken] = []
    for index, token in enumerate(vocabulary.renamed):
        if base.id_to_token(token.id) == token.content:
            continue
        if token.id not in known:
            message = f"the base's token {token.id} is another one, so this is not the base's tokenizer"
            raise AdapterRejected("tokenizer_mismatch", message, f"renamed[{index}].id")
        _check_new(base, token, f"renamed[{index}]")
        renamed.append(token)
    for index, token in enumerate(vocabulary.tokens):
        param = f"tokens[{index}]"
        _check_new(base, token, param)
        if token.id != first_id + index:
            message = f"the base's tokenizer has {first_id} tokens, so the id must be {first_id + index}"
            raise AdapterRejected("token_collision", message, f"{param}.id")
    extended = _shared_copy(base)
    extended.add_tokens([_library_token(token) for token in (*vocabulary.tokens, *renamed)])
    for index, token in enumerate((*vocabulary.tokens, *renamed)):
        if extended.token_to_id(token.content) != first_id + index:
            message = "the base's tokenizer cannot add this token"
            raise AdapterRejected("token_collision", message, f"{_place(vocabulary, token)}.content")
    return extended


def renamed_ids(extended: Tokenizer, vocabulary: AddedVocabulary) -> dict[int, int]:
    """Return the ids that renamed tokens have in `extended_tokenizer`, each with the id that the model knows."""
    ids = [(extended.token_to_id(token.content), token.id) for token in vocabulary.renamed]
    return {given: token_id for given, token_id in ids if given is not None and given != token_id}


def _place(vocabulary: AddedVocabulary, token: AddedToken) -> str:
    if token in vocabulary.tokens:
        return f"tokens[{vocabulary.tokens.index(token)}]"
    return f"renamed[{vocabulary.renamed.index(token)}]"


def _check_new(base: Tokenizer, token: AddedToken, param: str) -> None:
    if base.token_to_id(token.content) is not None:
        raise AdapterRejected("token_collision", "the base's tokenizer already has this token", f"{param}.content")
    if token.normalized and base.normalizer is not None and not base.normalizer.normalize_str(token.content):
        message = "the base's tokenizer normalizes this content to an empty string"
        raise AdapterRejected("invalid_vocabulary", message, f"{param}.content")


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
