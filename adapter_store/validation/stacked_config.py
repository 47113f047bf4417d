"""Parses what a configuration says about the order of the columns of B of stacked experts.

Since 17 September 2026, Unsloth writes `lora_B_layout` and, for each parameter, the same key in
`unsloth_fused_expert_lora` (https://github.com/unslothai/unsloth-zoo/pull/1232). Before, it trained with another order
than PEFT, and the configuration only shows that Unsloth wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from loramux.adapter_store.errors import AdapterRejected

LAYOUT_KEY, DETAIL_KEY = "lora_B_layout", "unsloth_fused_expert_lora"
GROUPED, RANK_MAJOR = "grouped_by_expert", "rank_major"


def parse_b_layout(document: Mapping[str, Any]) -> str | None:
    """Return `GROUPED` or `RANK_MAJOR`, PEFT's order, or None if the configuration does not say. Raises
    AdapterRejected.
    """
    stated = {LAYOUT_KEY: document.get(LAYOUT_KEY)}
    detail = document.get(DETAIL_KEY)
    if detail is not None:
        parameters = (detail.get("parameters") or {}) if isinstance(detail, dict) else None
        if not isinstance(parameters, dict) or not all(isinstance(one, dict) for one in parameters.values()):
            _refuse("invalid_config", f"{DETAIL_KEY} must be an object with an object for each parameter", DETAIL_KEY)
        if detail.get("lora_A_layout") not in (None, GROUPED):
            _refuse("unsupported_config", f"lora_A_layout must be {GROUPED}", f"{DETAIL_KEY}.lora_A_layout")
        stated[f"{DETAIL_KEY}.{LAYOUT_KEY}"] = detail.get(LAYOUT_KEY)
        stated |= {f"{DETAIL_KEY}.parameters.{name}": one.get(LAYOUT_KEY) for name, one in parameters.items()}
    found: set[str] = set()
    for param, layout in stated.items():
        if layout is None:
            continue
        if layout not in (GROUPED, RANK_MAJOR):
            _refuse("unsupported_config", f"{LAYOUT_KEY} must be {GROUPED} or {RANK_MAJOR}", param)
        found.add(layout)
        if len(found) > 1:
            _refuse("unsupported_config", f"all stacked experts of an adapter must have the same {LAYOUT_KEY}", param)
    return next(iter(found), None)


def is_from_unsloth(document: Mapping[str, Any]) -> bool:
    mapping = document.get("auto_mapping")
    return isinstance(mapping, dict) and bool(mapping.get("unsloth_fixed"))


def _refuse(code: str, message: str, param: str) -> NoReturn:
    raise AdapterRejected(code, message, param)
