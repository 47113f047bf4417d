"""PEFT's configuration of a plain LoRA, for adapters that loramux itself writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def peft_document(ranks: Mapping[str, int], alpha: float | None, **facts: Any) -> dict[str, Any]:
    """Return a configuration that names each module of `ranks` in full. If `alpha` is None, every scale is 1.

    `facts` are additional keys, such as `base_model_name_or_path`.
    """
    all_ranks = list(ranks.values())
    usual = max(sorted(set(all_ranks)), key=all_ranks.count)
    others = {key: rank for key, rank in ranks.items() if rank != usual}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        "use_rslora": False,
        "r": usual,
        "lora_alpha": usual if alpha is None else alpha,
        "rank_pattern": others,
        "alpha_pattern": others if alpha is None else {},
        "target_modules": list(ranks),
        **facts,
    }
