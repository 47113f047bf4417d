"""The reasoning efforts that requests can ask for, and those that a chat template knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias, get_args

ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: Final[tuple[ReasoningEffort, ...]] = get_args(ReasoningEffort)
"""From the least reasoning to the most."""

_TRAINED: Final[frozenset[ReasoningEffort]] = frozenset({"low", "medium", "high"})
"""The efforts of models whose templates print any effort, such as gpt-oss."""
_COMMON: Final[frozenset[ReasoningEffort]] = _TRAINED | {"none"}
"""The efforts that other templates get as they are, because they may have a default prompt for some of them."""

_UNKNOWN = "effort_6153"


def known_efforts(render: Callable[[str | None], str | None]) -> tuple[tuple[ReasoningEffort, ...], bool]:
    """Return the efforts that a template can get, and whether it turns thinking off unless it gets one. It can get no
    effort if they do not change its prompt.

    `render` returns the prompt with an effort, or without any, or None if the template refuses it.
    """

    def rendered(effort: str | None) -> str | None:
        text = render(effort)
        return None if text is None else text.lower()

    default = rendered(None)
    prompts = {effort: text for effort in EFFORTS if (text := rendered(effort)) is not None}
    if len({default, *prompts.values()}) == 1:
        return (), False
    off = prompts.get("none")
    is_off = off is not None and off == default and off not in {prompts.get(effort) for effort in _TRAINED}
    unknown = rendered(_UNKNOWN)
    if unknown is None:
        return tuple(prompts), is_off
    usual = _TRAINED if _UNKNOWN in unknown else _COMMON
    known = [effort for effort, text in prompts.items() if effort in usual or text != unknown.replace(_UNKNOWN, effort)]
    return tuple(known), is_off


def nearest_effort(known: Sequence[ReasoningEffort], asked: ReasoningEffort) -> ReasoningEffort | None:
    """Return the effort among `known` that is nearest to `asked`, the lower of two, or None if there is none.

    A request for reasoning never gets `none`.
    """
    allowed = [effort for effort in known if asked == "none" or effort != "none"]
    return min(allowed, key=lambda effort: abs(EFFORTS.index(effort) - EFFORTS.index(asked)), default=None)
