"""The rotary settings of a GGUF model, in the form of `config.json`.

llama.cpp stores the frequencies of Llama 3 as a tensor of factors by which each frequency is divided. Here the settings
from which the factors were computed are found again, and checked against every factor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import ConversionRefused
from loramux.adapter_store.gguf.base_metadata import BaseMetadata
from loramux.adapter_store.gguf.base_records import BaseRecord

Factors = npt.NDArray[np.float32]

SCALED, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (SCALED, LONG, SHORT)
"""The tensors with rotary factors."""

_LOW, _HIGH = 1.0, 4.0
"""The frequency factors of all published models with Llama 3's settings."""

_USUAL_LENGTHS = [1 << exponent for exponent in range(8, 24)]
_TOLERANCE = 1e-4


def rope_fields(
    metadata: BaseMetadata, record: BaseRecord, head_dim: int, factors: dict[str, Factors]
) -> dict[str, Any]:
    theta = metadata.number("rope.freq_base", record.theta)
    rotated = metadata.integer("rope.dimension_count", head_dim)
    found: dict[str, Any] = {"rope_theta": theta}
    if rotated != head_dim:
        if not 0 < rotated < head_dim:
            raise metadata.refused("rope.dimension_count", rotated, f"at most {head_dim}")
        found["partial_rotary_factor"] = rotated / head_dim
    original = metadata.find("rope.scaling.original_context_length")
    if LONG in factors or SHORT in factors:
        if LONG not in factors or SHORT not in factors:
            raise ConversionRefused(
                "missing_tensor", "the file has only one of the tensors of LongRoPE's factors", LONG
            )
        # The kind may also be stated, and the factor for cosine and sine that follows from the lengths.
        metadata.find("rope.scaling.type")
        metadata.find("rope.scaling.attn_factor")
        length = metadata.integer("rope.scaling.original_context_length")
        scaling = {
            "rope_type": "longrope",
            "long_factor": factors[LONG].tolist(),
            "short_factor": factors[SHORT].tolist(),
        }
        return {**found, "original_max_position_embeddings": length, "rope_scaling": scaling}
    if SCALED in factors:
        scaling_of_factors = _llama3(factors[SCALED], theta, rotated, original)
        return found if scaling_of_factors is None else {**found, "rope_scaling": scaling_of_factors}
    stated = _stated(metadata)
    return found if stated is None else {**found, "rope_scaling": stated}


def _stated(metadata: BaseMetadata) -> dict[str, Any] | None:
    """The scaling that the metadata states, or None."""
    kind = metadata.find("rope.scaling.type")
    factor = metadata.number("rope.scaling.factor", 1.0)
    if kind in (None, "none"):
        if kind is None and factor not in (0.0, 1.0):
            kind = "linear"
        else:
            return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise metadata.refused("rope.scaling.type", kind, "none, linear or yarn")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
    }
    for key in ("beta_fast", "beta_slow"):
        if metadata.find(f"rope.scaling.yarn_{key}") is not None:
            scaling[key] = metadata.number(f"rope.scaling.yarn_{key}")
    if metadata.find("rope.scaling.attn_factor") is not None:
        scaling["attn_factor"] = metadata.number("rope.scaling.attn_factor")
    if metadata.architecture == "gpt-oss":
        # The file does not say that gpt-oss leaves the bounds of YaRN's transition as they are.
        scaling["truncate"] = False
    return scaling


def _llama3(factors: Factors, theta: float, rotated: int, stated: Any) -> dict[str, Any] | None:
    """Llama 3's settings that give these factors, or None if all factors are 1."""
    if factors.shape != (rotated // 2,) or not np.isfinite(factors).all() or (factors < 1 - _TOLERANCE).any():
        raise ConversionRefused("invalid_metadata", "the rotary factors do not fit the heads", SCALED)
    if np.allclose(factors, 1, rtol=_TOLERANCE):
        return None
    largest = float(factors.max())
    wavelengths = 2 * math.pi * theta ** (2 * np.arange(rotated // 2, dtype=np.float64) / rotated)
    between = np.flatnonzero((factors > 1 + _TOLERANCE) & (factors < largest * (1 - _TOLERANCE)))
    # Between the two bounds, the smoothing is linear in the number of turns within the original length.
    smooth = (1 / factors[between].astype(np.float64) - 1 / largest) / (1 - 1 / largest)
    lengths = wavelengths[between] * (smooth * (_HIGH - _LOW) + _LOW)
    candidates = [stated] if type(stated) is int else []
    for length in (*candidates, *_USUAL_LENGTHS, *(round(length) for length in lengths[:4])):
        if length > 0 and np.allclose(_smoothed(wavelengths, largest, length), factors, rtol=_TOLERANCE):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": length,
            }
    raise ConversionRefused("unsupported_metadata", "the rotary factors are not those of Llama 3's formula", SCALED)


def _smoothed(wavelengths: npt.NDArray[np.float64], factor: float, length: int) -> npt.NDArray[np.float64]:
    smooth = np.clip((length / wavelengths - _LOW) / (_HIGH - _LOW), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
