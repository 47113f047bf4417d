"""The sampling defaults in `generation_config.json`, with the bounds of the API's fields.

As in vLLM, only six settings have an effect. transformers writes many more, which are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.file_names import GENERATION_FILE
from loramux.adapter_store.formats.strict_json import DuplicateKey, InvalidJson, parse_strict_json


@dataclass(frozen=True, slots=True)
class Bounds:
    """The valid values of a setting, both ends included."""

    least: float
    most: float
    is_integer: bool = False


SETTINGS: Mapping[str, Bounds] = MappingProxyType(
    {
        "temperature": Bounds(0.0, 2.0),
        # The lower bound is the smallest positive double, which excludes zero.
        "top_p": Bounds(math.ulp(0.0), 1.0),
        "top_k": Bounds(-1, 2**31 - 1, is_integer=True),
        "min_p": Bounds(0.0, 1.0),
        "repetition_penalty": Bounds(0.01, 100.0),
        "max_new_tokens": Bounds(1, 2**63 - 1, is_integer=True),
    }
)
"""The settings that have an effect, and their bounds."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for the fields that a request leaves out. None means that there is no default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def document(self) -> dict[str, float | int]:
        """Return the settings that have a value."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def over(self, base: SamplingDefaults) -> SamplingDefaults:
        """Return these defaults, with missing ones taken from `base`."""
        return SamplingDefaults(**{**base.document(), **self.document()})  # type: ignore[arg-type]


NO_DEFAULTS = SamplingDefaults()


def parse_generation_config(text: bytes) -> SamplingDefaults:
    """Read a `generation_config.json`. Raises AdapterRejected, whose `param` is the setting or the file's name."""
    try:
        document = parse_strict_json(text)
    except DuplicateKey as error:
        raise AdapterRejected("duplicate_key", f"a key appears twice in {GENERATION_FILE}", error.key) from None
    except InvalidJson as error:
        raise AdapterRejected("invalid_json", f"the file is not JSON: {error}", GENERATION_FILE) from None
    if not isinstance(document, dict):
        raise AdapterRejected("invalid_generation_config", f"{GENERATION_FILE} must be a JSON object", GENERATION_FILE)
    found = {name: _checked(name, document[name]) for name in SETTINGS if document.get(name) is not None}
    return SamplingDefaults(**found)


def _checked(name: str, value: Any) -> Any:
    bounds = SETTINGS[name]
    kinds = (int,) if bounds.is_integer else (int, float)
    # bool is a subclass of int, but true is not a number.
    if type(value) in kinds and bounds.least <= value <= bounds.most:
        return value if bounds.is_integer else float(value)
    kind = "a whole number" if bounds.is_integer else "a number"
    least = "above 0 and at most" if bounds.least == math.ulp(0.0) else f"from {bounds.least:g} to"
    raise AdapterRejected("invalid_generation_config", f"{name} must be {kind} {least} {bounds.most:g}", name)
