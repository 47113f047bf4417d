"""A strict JSON parser.

It refuses repeated keys (unless the caller allows them), NaN, infinity, floats beyond a double's range, integers of
more than 4,300 digits, and unpaired surrogates. Error messages never quote the text.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import sys
from typing import Any

from loramux.adapter_store.errors import AdapterRejected

_MAX_DIGITS = 4300
"""Longest integer that Python converts by default, in digits."""
_TOO_LARGE = "a number is too large"

# In ordinary text, a pattern is found in half the time of `in`.
_MINUS_ZERO = re.compile(rb"-0")
_SURROGATE = re.compile(rb"\\u[dD]")


class InvalidJson(ValueError):
    """The text is not acceptable JSON. The message says why."""


class DuplicateKey(InvalidJson):
    """An object contains a key twice, so two parsers could see different values."""

    def __init__(self, key: str) -> None:
        super().__init__("a key appears twice")
        self.key = key


def parse_strict_json(text: bytes, *, are_keys_unique: bool = True) -> Any:
    """Parse UTF-8 JSON. Raises InvalidJson.

    Without `are_keys_unique`, the last value of a repeated key counts.
    """
    # Some editors and shells write it, and do not show it.
    if text.startswith(codecs.BOM_UTF8):
        raise InvalidJson("it begins with a byte order mark: save it as UTF-8 without one")
    try:
        # A prompt of token ids has thousands of integers. Calling a function for each takes most of the time.
        has_plain_integers = _refuses_long_integers() and _MINUS_ZERO.search(text) is None
        decoder = _DECODERS[are_keys_unique, has_plain_integers]
        document = decoder.decode(text.decode("utf-8"))
        _check_characters(text, document)
    except InvalidJson:
        raise
    except UnicodeDecodeError:
        raise InvalidJson("the text is not UTF-8") from None
    except RecursionError:
        raise InvalidJson("nesting is too deep") from None
    except json.JSONDecodeError as error:
        if not text.strip():
            raise InvalidJson("it is empty") from None
        raise InvalidJson(f"it is malformed at character {error.pos}") from None
    except ValueError:
        # Python itself refuses to convert an integer beyond its limit.
        raise InvalidJson(_TOO_LARGE) from None
    return document


def parse_json_file(text: bytes, name: str) -> Any:
    """Parse a file of an adapter. Raises AdapterRejected, whose `param` is the repeated key or the file's name."""
    try:
        return parse_strict_json(text)
    except DuplicateKey as error:
        raise AdapterRejected("duplicate_key", f"a key appears twice in {name}", error.key) from None
    except InvalidJson as error:
        raise AdapterRejected("invalid_json", f"the file is not JSON: {error}", name) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise DuplicateKey(key)
        values[key] = value
    return values


def _check_characters(text: bytes, document: Any) -> None:
    """Raise InvalidJson for an unpaired surrogate, which JSON can express as an escape but UTF-8 cannot encode."""
    if _SURROGATE.search(text) is None:
        return
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidJson("a string contains an unpaired surrogate") from None


def _refuse_constant(name: str) -> Any:
    raise InvalidJson("NaN and infinity are not numbers")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidJson(_TOO_LARGE)
    return value


def _refuses_long_integers() -> bool:
    """Return whether Python itself refuses integers of more than _MAX_DIGITS. PYTHONINTMAXSTRDIGITS can change it."""
    return 0 < sys.get_int_max_str_digits() <= _MAX_DIGITS


def _integer(text: str) -> int | float:
    if len(text.removeprefix("-")) > _MAX_DIGITS:
        raise InvalidJson(_TOO_LARGE)
    # Python's integers have no negative zero, so return a float, as other readers such as the safetensors library do.
    return -0.0 if text == "-0" else int(text)


# By `are_keys_unique` and `has_plain_integers`: whether Python's own conversion of integers is right.
_DECODERS = {
    (are_keys_unique, has_plain_integers): json.JSONDecoder(
        object_pairs_hook=_unique if are_keys_unique else None,
        parse_constant=_refuse_constant,
        parse_float=_finite,
        parse_int=int if has_plain_integers else _integer,
    )
    for are_keys_unique in (True, False)
    for has_plain_integers in (True, False)
}
