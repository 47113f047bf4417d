"""JSON as it is written, or an error: no duplicate keys, no NaN, no numbers beyond a double, no half characters.

No message repeats a part of the text.
"""

from __future__ import annotations

import json
import math
from typing import Any

_MAX_DIGITS = 4300
"""What Python turns into a number without being told to."""


class InvalidJson(ValueError):
    """The text is not the JSON that we accept; the message says why."""


class DuplicateKey(InvalidJson):
    """An object has a key twice, so that two readers could see two different values."""

    def __init__(self, key: str) -> None:
        super().__init__("a key appears twice")
        self.key = key


def parse_strict_json(text: bytes) -> Any:
    """Parse UTF-8 JSON; raises InvalidJson."""
    try:
        document = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
        _check_characters(text, document)
    except InvalidJson:
        raise
    except UnicodeDecodeError:
        raise InvalidJson("the text is not UTF-8") from None
    except RecursionError:
        raise InvalidJson("values are nested too deeply") from None
    except json.JSONDecodeError as error:
        raise InvalidJson(f"it is malformed at character {error.pos}") from None
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise DuplicateKey(key)
        values[key] = value
    return values


def _check_characters(text: bytes, document: Any) -> None:
    """Raises InvalidJson for half of a surrogate pair: JSON can spell it, but no text could be written with it."""
    if b"\\ud" not in text.lower():
        return
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidJson("a text holds half of a surrogate pair") from None


def _refuse_constant(name: str) -> Any:
    raise InvalidJson("NaN and infinity are not numbers")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidJson("a number is too large")
    return value


def _integer(text: str) -> int | float:
    if len(text) > _MAX_DIGITS:
        raise InvalidJson("a number is too large")
    # Other readers, such as the safetensors library, know no integer minus zero either.
    return -0.0 if text == "-0" else int(text)
