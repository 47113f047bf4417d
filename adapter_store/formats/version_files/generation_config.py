"""The sampling defaults and end tokens in `generation_config.json`, with the bounds of the API's fields.

As in vLLM, only six settings and the end tokens have an effect. transformers writes many more. Those that change its
answers are reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import GENERATION_FILE
from loramux.adapter_store.formats.files.strict_json import parse_json_file


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

EOS_KEY = "eos_token_id"
MAX_EOS_TOKENS = 64
"""Maximum number of end tokens, as in a request's `stop_token_ids`."""

IGNORED: Mapping[str, Any] = MappingProxyType(
    {
        "bad_words_ids": [],
        "begin_suppress_tokens": [],
        "do_sample": True,
        "dola_layers": None,
        "epsilon_cutoff": 0,
        "eta_cutoff": 0,
        "exponential_decay_length_penalty": None,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "guidance_scale": 1,
        "min_length": 0,
        "min_new_tokens": 0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "penalty_alpha": None,
        "renormalize_logits": False,
        "sequence_bias": {},
        "stop_strings": [],
        "suppress_tokens": [],
        "top_h": None,
        "typical_p": 1,
        "watermarking_config": None,
    }
)
"""Settings that change the answers of transformers, but not of loramux. The values, and null, change nothing."""


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


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """`ignored` names the settings that change the answers of transformers, but not of loramux."""

    defaults: SamplingDefaults = NO_DEFAULTS
    eos_token_ids: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the settings that have an effect."""
        found: dict[str, Any] = dict(self.defaults.document())
        return {**found, EOS_KEY: list(self.eos_token_ids)} if self.eos_token_ids else found


def parse_generation_config(text: bytes) -> GenerationConfig:
    """Read a `generation_config.json`. Raises AdapterRejected, whose `param` is the setting or the file's name."""
    document = parse_json_file(text, GENERATION_FILE)
    if not isinstance(document, dict):
        raise AdapterRejected("invalid_generation_config", f"{GENERATION_FILE} must be a JSON object", GENERATION_FILE)
    found = {name: _checked(name, document[name]) for name in SETTINGS if document.get(name) is not None}
    ignored = tuple(name for name, neutral in IGNORED.items() if document.get(name) not in (None, neutral))
    return GenerationConfig(SamplingDefaults(**found), _eos_token_ids(document.get(EOS_KEY)), ignored)


def _eos_token_ids(value: Any) -> tuple[int, ...]:
    """Return the end tokens without duplicates. Some files have -1, which transformers never generates."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if len(listed) > MAX_EOS_TOKENS or not all(type(one) is int and -1 <= one < 2**31 for one in listed):
        message = f"{EOS_KEY} must be a token ID or a list of at most {MAX_EOS_TOKENS} token IDs"
        raise AdapterRejected("invalid_generation_config", message, EOS_KEY)
    return tuple(dict.fromkeys(one for one in listed if one >= 0))


def _checked(name: str, value: Any) -> Any:
    bounds = SETTINGS[name]
    kinds = (int,) if bounds.is_integer else (int, float)
    # bool is a subclass of int, but true is not a number.
    if type(value) in kinds and bounds.least <= value <= bounds.most:
        return value if bounds.is_integer else float(value)
    kind = "a whole number" if bounds.is_integer else "a number"
    least = "above 0 and at most" if bounds.least == math.ulp(0.0) else f"from {bounds.least:g} to"
    raise AdapterRejected("invalid_generation_config", f"{name} must be {kind} {least} {bounds.most:g}", name)
