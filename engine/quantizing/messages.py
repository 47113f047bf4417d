"""The messages between a server and the process that quantises its model."""

from __future__ import annotations

import msgspec

from loramux.engine.loop.config import EngineConfig

QUALITY_FILE = "quality.json"


class QuantizeJob(msgspec.Struct, frozen=True, kw_only=True):
    """Quantise the model of `config` and store it below `root`. Without `prompts`, the quality is not measured."""

    config: EngineConfig
    root: str
    method: str
    prompts: tuple[tuple[int, ...], ...] = ()


class QuantizeProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`done` is the number of weight elements quantised so far, and `total` is the number to quantise.

    A `total` of 0 means that the quality is being measured.
    """

    done: int
    total: int


class QuantizeResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`divergence` is the mean KL divergence from the float model, in nats, or None if it was not measured."""

    directory: str
    divergence: float | None


class QuantizeRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    message: str


QuantizeLine = QuantizeProgress | QuantizeResult | QuantizeRefused
