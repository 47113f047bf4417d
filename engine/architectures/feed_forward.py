"""The linear layers of the feed-forward blocks that all tokens use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FeedForwardNames:
    """The names of the linear layers of a feed-forward block: the layers that read its input, and the layer that writes
    its output.

    With a gate, the activations of one half of the inner features multiply the other half.
    """

    inputs: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    output: str = "mlp.down_proj"
    has_gate: bool = True


GATED = FeedForwardNames()
FUSED_GATE = FeedForwardNames(("mlp.gate_up_proj",))
WITHOUT_GATE = FeedForwardNames(("mlp.up_proj",), has_gate=False)


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """The gate of `Kernels.clamped_silu_and_mul`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The feed-forward block that all tokens use in addition to the experts that a router chooses.

    `size` is its inner size. `gate` is the name of a linear layer, or None. The sigmoid of its output scales the
    block's output for each token.
    """

    block: FeedForwardNames
    size: int
    gate: str | None
