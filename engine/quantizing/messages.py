"""The messages between a server and the process that quantises its model."""

from __future__ import annotations

from typing import Literal

import msgspec

from loramux.engine.loop.config import EngineConfig

QUALITY_FILES = {None: "predictions.json", "int8": "predictions-int8-activations.json"}
"""Names of the files with a Quality, by the format of 8 bits to which inputs are rounded."""


MAX_DIVERGENCE = 0.1
"""Mean KL divergence, in nats per token, above which a server warns that another format is better."""


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """How well the model quantised by `method` predicts a text, compared with the float model.

    `divergence` is the mean KL divergence of the next token's distribution from the float model's, in nats.
    `activations` is the format of 8 bits to which inputs of linear layers were rounded, or None.
    """

    method: str
    divergence: float
    perplexity: float
    float_perplexity: float
    activations: Literal["int8"] | None = None

    @property
    def sentence(self) -> str:
        return (
            f"mean KL divergence from the float model: {self.divergence:.2g} nats per token; "
            f"perplexity of a plain text: {self.perplexity:.4g} (float model: {self.float_perplexity:.4g})"
        )

    @property
    def format(self) -> str:
        return self.method if self.activations is None else f"{self.method} with activations in {self.activations}"

    @property
    def is_poor(self) -> bool:
        return self.divergence > MAX_DIVERGENCE

    @property
    def problem(self) -> str:
        """What is wrong if the quality is poor."""
        return (
            f"{self.format} changes this model's predictions by {self.divergence:.2g} nats per token, "
            f"which is more than {MAX_DIVERGENCE} and shows in answers"
        )

    @property
    def advice(self) -> str:
        """What to do if the quality is poor."""
        return "omit --activations" if self.activations else _BETTER.get(self.method, "omit --quantization")


_BETTER = {
    "int4": "use --quantization int8",
    "fp8": "use --quantization int8",
    "int4+head": "use --quantization int8+head",
    "fp8+head": "use --quantization int8+head",
    "int8+head": "use --quantization int8",
}
"""What to do instead, by the value of `--quantization`."""


class QuantizeJob(msgspec.Struct, frozen=True, kw_only=True):
    """Quantise the model of `config` and store it below `root`. The quality is measured on the tokens `text`, if there
    are any.
    """

    config: EngineConfig
    root: str
    method: str
    text: tuple[int, ...] = ()


class QuantizeProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`done` is the number of weight elements quantised so far, and `total` is the number to quantise.

    A `total` of 0 means that the quality is being measured.
    """

    done: int
    total: int


class QuantizeResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`quality` is None if it was not measured. `why_not` says why, unless no text was given."""

    directory: str
    quality: Quality | None
    why_not: str | None = None


class QuantizeRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    message: str


QuantizeLine = QuantizeProgress | QuantizeResult | QuantizeRefused
