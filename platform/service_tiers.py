"""The service tiers that tenants and keys may use, and the tier that a request gets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from loramux.engine.protocol.service_tiers import DEFAULT_TIER, SERVICE_TIERS
from loramux.platform.errors import InvalidRequest

ServiceTier: TypeAlias = Literal["priority", "default", "flex"]

AskedTier: TypeAlias = Literal["auto", "default", "fast", "flex", "priority", "scale", "ultrafast"]
"""The values of OpenAI's field."""

_OTHER_NAMES = {"fast": "priority", "ultrafast": "priority", "scale": DEFAULT_TIER}
"""What values mean that are no tier here. `scale` is a tier that OpenAI sells in advance."""


@dataclass(frozen=True, slots=True)
class TierRights:
    """The tiers of a tenant's or a key's requests, from `lowest` to `highest`. A request that names no tier gets
    `default`.
    """

    highest: str = DEFAULT_TIER
    default: str = DEFAULT_TIER
    lowest: str = SERVICE_TIERS[-1]

    def for_key(self, highest: str | None, default: str | None) -> TierRights:
        """Return the rights of a tenant's key with these settings. None stands for the tenant's setting."""
        highest = self.highest if highest is None else worse(self.highest, highest)
        return TierRights(highest, self.default if default is None else default, self.lowest)

    def tier(self, asked: str | None) -> str:
        """Return the tier of a request whose `service_tier` is `asked`. As in the OpenAI API, a request for a tier that
        it may not have is not refused. It gets the nearest tier that it may have.
        """
        wanted = self.default if asked is None or asked == "auto" else _OTHER_NAMES.get(asked, asked)
        return better(self.lowest, worse(self.highest, wanted or DEFAULT_TIER))


DEFAULT_RIGHTS = TierRights()
"""The rights of a tenant without settings: requests can only choose to be `flex`."""

MAX_OBJECTIVE_S = 3600
"""Longest objective, in seconds."""

BATCH_RIGHTS = TierRights(lowest=DEFAULT_TIER)
"""The rights of the lines of a batch. They run after every tier and have a price of their own."""


def worse(one: str, other: str) -> str:
    return max(one, other, key=SERVICE_TIERS.index)


def better(one: str, other: str) -> str:
    return min(one, other, key=SERVICE_TIERS.index)


def check_tier(tier: str | None, param: str) -> None:
    """Raise InvalidRequest unless this is a tier, or None."""
    if tier is not None and tier not in SERVICE_TIERS:
        raise InvalidRequest(f"a service tier must be one of {', '.join(SERVICE_TIERS)}", param=param)


def parse_objectives(text: str) -> dict[str, float]:
    """Return the longest times until the first token, in seconds, by tier, from a text such as
    `priority=1s,default=5s,flex=none`. `auto` stands for `default`. Raises ValueError.
    """
    objectives: dict[str, float] = {}
    named: set[str] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, wanted = part.partition("=")
        tier = DEFAULT_TIER if name == "auto" else name
        if tier not in SERVICE_TIERS or tier in named:
            raise ValueError(f"{part!r} does not name one of the service tiers {', '.join(SERVICE_TIERS)}, once")
        named.add(tier)
        if wanted == "none":
            continue
        found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(ms|s)", wanted)
        seconds = 0.0 if found is None else float(found[1]) / (1000 if found[2] == "ms" else 1)
        if not 0 < seconds <= MAX_OBJECTIVE_S:
            raise ValueError(f"{part!r} must be a time of up to {MAX_OBJECTIVE_S} s, such as 500ms or 5s, or none")
        objectives[tier] = seconds
    return objectives
