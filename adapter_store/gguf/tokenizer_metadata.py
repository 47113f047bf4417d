"""Checks the tokenizer in a GGUF file's metadata: types, numbers of entries, IDs and lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import ConversionRefused, printable

BYTE_LEVEL, SENTENCEPIECE, GEMMA4 = "gpt2", "llama", "gemma4"
MODELS = (BYTE_LEVEL, SENTENCEPIECE, GEMMA4)
"""The values of `tokenizer.ggml.model` that can be read."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)
"""The values of `tokenizer.ggml.token_type`."""

MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 21
MAX_TOKEN_CHARS = 1024
MAX_VOCABULARY_CHARS = 1 << 22
"""Most characters of all tokens together. 262,144 tokens of Gemma 3 have 1.7 million."""
_MAX_MERGES_CHARS = 1 << 26
MAX_TEMPLATE_CHARS = 256 * 1024
"""Longest chat template, in characters. The longest of about 70 known ones has 30,000."""
MAX_TEMPLATES = 16

_T = TypeVar("_T")

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"

ROLES: Mapping[str, str] = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
    "eot_token": "eot_token_id",
    "eom_token": "eom_token_id",
}
"""The keys of special tokens' IDs, by role. `seperator` is spelled as in the format."""

_ROLES_OF_SENTENCEPIECE = {"bos_token": 1, "eos_token": 2, "unk_token": 0}
"""The IDs that a SentencePiece vocabulary has if the file does not say so."""


def refuse(key: str, message: str) -> ConversionRefused:
    return ConversionRefused("invalid_tokenizer", message, key)


@dataclass(frozen=True, slots=True)
class TokenizerMetadata:
    """A vocabulary and its settings. `tokens`, `types` and `scores` have one entry for each ID."""

    model: str
    pre: str | None
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...] | None
    merges: tuple[str, ...] | None
    roles: Mapping[str, int]
    add_bos: bool | None
    add_eos: bool | None
    add_space_prefix: bool
    remove_extra_whitespaces: bool
    templates: Mapping[str, str]
    strips_after_controls: bool
    """True if the space after control tokens is not part of the text, as in Phi-3."""

    def token(self, role: str) -> str | None:
        return self.tokens[self.roles[role]] if role in self.roles else None


def read_tokenizer_metadata(metadata: Mapping[str, Any]) -> TokenizerMetadata:
    """Read and check the tokenizer's entries. Raises ConversionRefused."""
    model = _find(metadata, "model", str)
    if model not in MODELS:
        shown = "absent" if model is None else printable(model, 40)
        message = f"the tokenizer {shown} is not supported; supported: {', '.join(MODELS)}"
        raise ConversionRefused("unsupported_tokenizer", message, f"{PREFIX}model")
    if model != BYTE_LEVEL and metadata.get(f"{PREFIX}precompiled_charsmap") is not None:
        message = "a vocabulary with a table of normalized characters is not supported"
        raise ConversionRefused("unsupported_tokenizer", message, f"{PREFIX}precompiled_charsmap")
    tokens = _tokens(metadata)
    types = _numbers(metadata, "token_type", len(tokens), "iu")
    scores = _numbers(metadata, "scores", len(tokens), "iuf") if model == SENTENCEPIECE else None
    if model == SENTENCEPIECE and scores is None:
        raise refuse(f"{PREFIX}scores", "a SentencePiece vocabulary must have scores")
    if scores is not None and not np.isfinite(scores).all():
        raise refuse(f"{PREFIX}scores", "a score is not finite")
    merges = (
        None
        if metadata.get(f"{PREFIX}merges") is None
        else _strings(metadata, "merges", MAX_MERGES, 2 * MAX_TOKEN_CHARS + 1, _MAX_MERGES_CHARS)
    )
    if model != SENTENCEPIECE and merges is None:
        raise refuse(f"{PREFIX}merges", f"a vocabulary of the kind {model} must have merges")
    return TokenizerMetadata(
        model=model,
        pre=_find(metadata, "pre", str),
        tokens=tokens,
        types=(NORMAL,) * len(tokens) if types is None else tuple(types.tolist()),
        scores=None if scores is None else tuple(scores.tolist()),
        merges=merges,
        roles=_roles(metadata, model, len(tokens)),
        add_bos=_find(metadata, "add_bos_token", bool),
        add_eos=_find(metadata, "add_eos_token", bool),
        add_space_prefix=_flag(metadata, "add_space_prefix", default=model == SENTENCEPIECE),
        remove_extra_whitespaces=_flag(metadata, "remove_extra_whitespaces", default=False),
        templates=_templates(metadata),
        strips_after_controls=model == SENTENCEPIECE and metadata.get("general.architecture") == "phi3",
    )


def _find(metadata: Mapping[str, Any], name: str, kind: type[_T]) -> _T | None:
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    if type(value) is not kind:
        raise refuse(PREFIX + name, f"the value must be {'text' if kind is str else 'true or false'}")
    return value


def _flag(metadata: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = _find(metadata, name, bool)
    return default if value is None else value


def _strings(metadata: Mapping[str, Any], name: str, most: int, longest: int, most_chars: int) -> tuple[str, ...]:
    key, values = PREFIX + name, metadata.get(PREFIX + name)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise refuse(key, "the value must be an array of texts")
    if len(values) > most:
        raise refuse(key, f"the array has {len(values)} entries; at most {most} are allowed")
    if any(type(value) is not str for value in values):
        raise refuse(key, "an entry is not text")
    lengths = [len(value) for value in values]
    if max(lengths, default=0) > longest:
        raise refuse(key, f"an entry has more than {longest} characters")
    if sum(lengths) > most_chars:
        raise refuse(key, f"the entries have more than {most_chars} characters together")
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        raise refuse(key, "an entry is not UTF-8") from None
    return tuple(values)


def _tokens(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    key = f"{PREFIX}tokens"
    # llama.cpp gives empty tokens the same names.
    listed = _strings(metadata, "tokens", MAX_TOKENS, MAX_TOKEN_CHARS, MAX_VOCABULARY_CHARS)
    tokens = tuple(one or f"[EMPTY_{index}]" for index, one in enumerate(listed))
    if not tokens:
        raise refuse(key, "the vocabulary is empty")
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(one for one in tokens if one in seen or seen.add(one))  # type: ignore[func-returns-value]
        raise refuse(key, f"the token {printable(twice, 60)} appears twice")
    return tokens


def _numbers(metadata: Mapping[str, Any], name: str, length: int, kinds: str) -> npt.NDArray[Any] | None:
    """Return one number for each token, or None if the file has none. `kinds` are the kinds of numpy's dtypes."""
    key, values = PREFIX + name, metadata.get(PREFIX + name)
    if values is None:
        return None
    if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str | bytes) or len(values) < length:
        raise refuse(key, f"the value must be an array of {length} numbers, one for each token")
    try:
        numbers = np.asarray(values)
    except (ValueError, OverflowError):
        raise refuse(key, "the value must be an array of numbers") from None
    if numbers.ndim != 1 or numbers.dtype.kind not in kinds:
        raise refuse(key, "the value must be an array of numbers")
    return numbers[:length]


def _roles(metadata: Mapping[str, Any], model: str, num_tokens: int) -> dict[str, int]:
    roles = dict(_ROLES_OF_SENTENCEPIECE) if model == SENTENCEPIECE else {}
    roles = {role: token_id for role, token_id in roles.items() if token_id < num_tokens}
    for role, name in ROLES.items():
        value = metadata.get(PREFIX + name)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < num_tokens:
            raise refuse(PREFIX + name, f"the value is not the ID of one of the {num_tokens} tokens")
        roles[role] = value
    return roles


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name. The keys after `tokenizer.chat_template.` name those besides the default."""
    found = {key: value for key, value in metadata.items() if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")}
    if len(found) > MAX_TEMPLATES:
        raise ConversionRefused("invalid_template", f"the file has more than {MAX_TEMPLATES} chat templates", TEMPLATE)
    for key, value in found.items():
        if type(value) is not str:
            raise ConversionRefused("invalid_template", "a chat template must be text", key)
        if len(value) > MAX_TEMPLATE_CHARS:
            message = f"the chat template has {len(value)} characters; at most {MAX_TEMPLATE_CHARS} are allowed"
            raise ConversionRefused("invalid_template", message, key)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConversionRefused("invalid_template", "the chat template is not UTF-8", key) from None
    return {key.removeprefix(TEMPLATE).removeprefix(".") or "default": value for key, value in found.items()}
