"""Parses the parts of PEFT's configuration that name trained weights: `modules_to_save`, `trainable_token_indices`."""

from __future__ import annotations

from typing import Any, NoReturn

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.text_names import is_other_part, text_module

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
_KEYS = {"embed_tokens": EMBEDDING, EMBEDDING: EMBEDDING, HEAD: HEAD}
"""The modules whose own weights an adapter may replace, keyed by every name that a configuration can use for them."""
_SAVED, _TOKENS = "modules_to_save", "trainable_token_indices"


def parse_modules_to_save(value: Any) -> tuple[frozenset[str], tuple[tuple[int, str], ...]]:
    """Return which of the embedding and the head were trained as a whole, and the other names with their places in the
    list, which must stand for norms. Raises AdapterRejected.
    """
    if not value and (value is None or isinstance(value, (list, dict, bool))):
        return frozenset(), ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        _refuse("invalid_config", f"{_SAVED} must be a list of module names", _SAVED)
    names = list(map(text_module, value))
    others = tuple((index, name) for index, name in enumerate(names) if name not in _KEYS and not is_other_part(name))
    return frozenset(_KEYS[name] for name in names if name in _KEYS), others


def parse_token_indices(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return each module with the tokens whose rows were trained, in file order. Raises AdapterRejected."""
    if not value and (value is None or isinstance(value, (list, dict, bool))):
        return ()
    if isinstance(value, list):
        return ((EMBEDDING, _tokens(value, _TOKENS)),)
    if not isinstance(value, dict):
        _refuse("invalid_config", f"{_TOKENS} must be a list of token ids, or one such list per module", _TOKENS)
    tokens: dict[str, tuple[int, ...]] = {}
    for name, listed in value.items():
        param, key = f"{_TOKENS}.{name}", _KEYS.get(text_module(name))
        if key is None:
            _refuse("unsupported_config", f"{_TOKENS} may name only embed_tokens and lm_head", param)
        if key in tokens:
            _refuse("invalid_config", "a module is named twice", param)
        tokens[key] = _tokens(listed, param)
    return tuple(tokens.items())


def _tokens(value: Any, param: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        _refuse("invalid_config", "trained tokens must be a list of one or more ids", param)
    seen: set[int] = set()
    for index, token in enumerate(value):
        if type(token) is not int or token < 0:
            _refuse("invalid_config", "a token id must be a non-negative integer", f"{param}[{index}]")
        if token in seen:
            _refuse("invalid_config", "a token id is listed twice", f"{param}[{index}]")
        seen.add(token)
    return tuple(value)


def _refuse(code: str, message: str, param: str) -> NoReturn:
    raise AdapterRejected(code, message, param)
