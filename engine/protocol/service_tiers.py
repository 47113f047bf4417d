"""Service tiers: how requests of different urgency share an engine."""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_TIER = "default"

SERVICE_TIERS = ("priority", DEFAULT_TIER, "flex")
"""All tiers, best first. When the engine is short of memory or its queue is full, it preempts and refuses sequences of
later tiers first. The names are those of the OpenAI API.
"""

TIER_FACTORS: Mapping[str, float] = {"priority": 4.0, DEFAULT_TIER: 1.0, "flex": 0.25}
"""Factor of each tier's weight in the fair order. Powers of two, so that quotients by weights stay exact."""

INPUT_PRICE = 1.0
OUTPUT_PRICE = 2.0
"""Prices per token in the fair order. Each output token needs a pass over the weights. All tokens of a prompt chunk
share one pass.
"""

FIRST_TIER_LEAD = 16_384.0
"""How much more than its part a share of the first tier can have had before others go first, in prices of its tokens.
The lead of its counter is this, divided by the share's weight, so a heavy share has no larger lead. Requests of this
tier are few and urgent. Without a lead, a share that has just had more than its part waits until all others have had
theirs.
"""

BACKGROUND_RANK = len(SERVICE_TIERS)
"""The rank of background sequences, which come after every tier."""

_YIELDS_TO: Mapping[int, int] = {SERVICE_TIERS.index("flex"): 0, BACKGROUND_RANK: BACKGROUND_RANK - 1}
"""The highest rank for which running sequences of a rank make room. Those of other ranks make room for none."""


def rank_of(service_tier: str, is_background: bool) -> int:
    """Return a sequence's place in the order of preemption. Sequences of the highest rank are preempted first."""
    return BACKGROUND_RANK if is_background else SERVICE_TIERS.index(service_tier)


def makes_room(rank: int, other: int) -> bool:
    """True if a running sequence of `rank` is preempted so that a waiting one of rank `other` can begin: background
    sequences for all others, and those of the last tier for those of the first.
    """
    return other <= _YIELDS_TO.get(rank, -1)
