"""What a conversion must know about the base."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, TypeAlias

from loramux.adapter_store.formats.packed.pack_target import PackTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFacts:
    """The base's traits that mlx-lm's files do not show.

    With `tied_embeddings`, the head uses the weight of the embedding. `num_experts` is 0 for a base without experts.
    `gate_up` and `down` name the stacked weights of a layer's experts, such as `mlp.experts.down_proj`, or are None if
    adapters cannot change them. With `alternates`, the outputs of gate and up alternate in the stack.
    """

    tied_embeddings: bool
    num_experts: int = 0
    gate_up: str | None = None
    down: str | None = None
    alternates: bool = False

    @classmethod
    def of(cls, target: PackTarget) -> Self:
        experts = target.experts
        if experts is None:
            return cls(tied_embeddings=target.tied_embeddings)
        return cls(
            tied_embeddings=target.tied_embeddings,
            num_experts=experts.num_experts,
            gate_up=experts.linears[0].stack,
            down=experts.linears[-1].stack,
            alternates=experts.linears[0].alternates,
        )

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Parse the server's document `server/structure`."""
        return cls(**{field.name: document[field.name] for field in fields(cls)})


ReadBase: TypeAlias = Callable[[], BaseFacts]
"""Returns the facts about the base, which only adapters of experts or of the embedding need."""
