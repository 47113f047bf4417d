"""The `tokenizer.json` of a vocabulary in a GGUF file: its tokens, merges, normalizer and decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loramux.adapter_store.errors import ConversionRefused, printable
from loramux.adapter_store.gguf.pre_tokenizers import PRE_TOKENIZERS, Document, PreTokenizer
from loramux.adapter_store.gguf.tokenizer_metadata import (
    BYTE_LEVEL,
    CONTROL,
    MAX_MERGES,
    NORMAL,
    PREFIX,
    SENTENCEPIECE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    TokenizerMetadata,
    refuse,
)

_SPACE = "\u2581"
"""The character that stands for a space in SentencePiece's tokens."""

MAX_PIECE_CHARS = 256
"""Longest token of a vocabulary without merges, in characters. SentencePiece makes tokens of at most 16 by default."""

_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""The control tokens of Phi-3 after which a space is part of the text."""


def tokenizer_document(found: TokenizerMetadata) -> Document:
    """Return the contents of a `tokenizer.json`. Raises ConversionRefused."""
    pre = _pre_tokenizer(found)
    tokens = _respelled(found)
    vocabulary = {token: index for index, token in enumerate(tokens[: _num_kept(found)])}
    if found.merges is None:
        merges = list(_implied_merges(found, vocabulary))
    else:
        merges = list(_listed_merges(found.merges, vocabulary))
    is_byte_level = found.model == BYTE_LEVEL
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(found, vocabulary)),
        "normalizer": (pre.normalizer if pre else _space_normalizer(found)),
        "pre_tokenizer": (pre.document() if pre else None),
        "post_processor": _post_processor(found, adds_bos=adds_bos(found)),
        "decoder": _byte_level_decoder() if is_byte_level else _space_decoder(found),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if is_byte_level else found.token("unk_token"),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": not is_byte_level,
            "byte_fallback": not is_byte_level,
            "ignore_merges": pre is not None and pre.ignores_merges,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def adds_bos(found: TokenizerMetadata) -> bool:
    """Return whether BOS begins every text. If the file does not say so, llama.cpp's default for its kind counts."""
    if found.add_bos is not None:
        return found.add_bos
    pre = _pre_tokenizer(found)
    return (pre is None or pre.adds_bos) and "bos_token" in found.roles


def is_special(found: TokenizerMetadata, token_id: int) -> bool:
    return found.types[token_id] in (CONTROL, UNKNOWN)


def _pre_tokenizer(found: TokenizerMetadata) -> PreTokenizer | None:
    """Return the rule that divides texts for byte-level BPE, or None for SentencePiece, which has none."""
    if found.model != BYTE_LEVEL:
        return None
    key = f"{PREFIX}pre"
    if found.pre is None:
        message = "the file does not name its pre-tokenizer: convert the model again with a current llama.cpp"
        raise ConversionRefused("unsupported_tokenizer", message, key)
    if found.pre not in PRE_TOKENIZERS:
        message = f"the pre-tokenizer {printable(found.pre, 40)} is not supported"
        raise ConversionRefused("unsupported_tokenizer", message, key)
    return PRE_TOKENIZERS[found.pre]


def _num_kept(found: TokenizerMetadata) -> int:
    """Return the number of tokens without those at the end that only fill the embedding.

    llama.cpp's converter names them after their IDs. The original tokenizer does not have them, and an adapter's own
    tokens take their IDs.
    """
    first = max(found.roles.values(), default=-1) + 1
    kept = len(found.tokens)
    fillers = (UNUSED, USER_DEFINED, UNKNOWN)
    while kept > first and found.tokens[kept - 1] == f"[PAD{kept - 1}]" and found.types[kept - 1] in fillers:
        kept -= 1
    return kept


def _respelled(found: TokenizerMetadata) -> Sequence[str]:
    """Return the tokens with the spelling of the original tokenizer.

    llama.cpp's converter writes runs of spaces as such. SentencePiece builds these tokens by merges.
    """
    if found.model != SENTENCEPIECE:
        return found.tokens
    known = frozenset(found.tokens)
    spelled = [_SPACE * len(token) if token and not token.strip(" ") else token for token in found.tokens]
    return [new if new not in known else old for new, old in zip(spelled, found.tokens, strict=True)]


def _listed_merges(merges: Sequence[str], vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for index, merge in enumerate(merges):
        # A token can begin with a space, so the divider is not the first character.
        divider = merge.find(" ", 1)
        left, right = merge[:divider], merge[divider + 1 :]
        if divider < 0 or not right:
            raise refuse(f"{PREFIX}merges", f"merge {index} does not consist of two tokens")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise refuse(f"{PREFIX}merges", f"merge {index} names a token that the vocabulary does not have")
        if merge not in seen:
            seen.add(merge)
            yield left, right


def _implied_merges(found: TokenizerMetadata, vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the merges that SentencePiece makes: two tokens whose concatenation is a token, the best score first.

    The order of merges with equal scores is that of transformers. Tokens that SentencePiece never makes by merging are
    left out. User-defined tokens have no score in the file. In SentencePiece, their score is the best one, 0.
    """
    assert found.scores is not None
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocabulary.items():
        kind = found.types[token_id]
        if kind not in (NORMAL, USER_DEFINED):
            continue
        if len(token) > MAX_PIECE_CHARS:
            raise refuse(f"{PREFIX}tokens", f"a token has more than {MAX_PIECE_CHARS} characters")
        score = 0.0 if kind == USER_DEFINED else found.scores[token_id]
        for middle in range(len(token) - 1, 0, -1):
            left, right = token[:middle], token[middle:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, -middle, middle - len(token), left, right))
        if len(ranked) > MAX_MERGES:
            raise refuse(f"{PREFIX}tokens", f"the vocabulary implies more than {MAX_MERGES} merges")
    ranked.sort(key=lambda merge: merge[:3])
    for *_, left, right in ranked:
        yield left, right


def _added_tokens(found: TokenizerMetadata, vocabulary: Mapping[str, int]) -> Iterator[Document]:
    """Yield the tokens that are found in a text before it is divided."""
    for token, token_id in vocabulary.items():
        kind = found.types[token_id]
        if kind not in (CONTROL, USER_DEFINED, UNKNOWN):
            continue
        if kind == USER_DEFINED and found.model == SENTENCEPIECE and not token.strip(_SPACE):
            continue
        yield {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": found.strips_after_controls and token not in _NOT_STRIPPED,
            "normalized": False,
            "special": is_special(found, token_id),
        }


def _space_normalizer(found: TokenizerMetadata) -> Document:
    steps: list[Document] = []
    if found.remove_extra_whitespaces:
        # SentencePiece strips only spaces, not other blanks.
        steps.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if found.add_space_prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _space_decoder(found: TokenizerMetadata) -> Document:
    steps: list[Document] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if found.add_space_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _byte_level_decoder() -> Document:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _post_processor(found: TokenizerMetadata, *, adds_bos: bool) -> Document | None:
    """Return the rule that adds BOS and EOS to a text, or None if neither is added."""
    roles = [role for role, is_added in (("bos_token", adds_bos), ("eos_token", found.add_eos)) if is_added]
    if not roles:
        return None
    tokens: dict[str, str] = {}
    for role in roles:
        token = found.token(role)
        if token is None:
            raise refuse(f"{PREFIX}add_{role}", f"the token to add is not named: {role} has no ID")
        tokens[role] = token
    around = {role: {"SpecialToken": {"id": token, "type_id": 0}} for role, token in tokens.items()}
    before, after = ([around[role]] if role in around else [] for role in ("bos_token", "eos_token"))
    single: list[Any] = [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *before, {"Sequence": {"id": "B", "type_id": 0}}, *after],
        "special_tokens": {
            token: {"id": token, "ids": [found.roles[role]], "tokens": [token]} for role, token in tokens.items()
        },
    }
