"""Determines which instructions the kernels use on this CPU, without importing numba or torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from llvmlite import binding  # type: ignore[import-untyped]


def host_features() -> frozenset[str]:
    """LLVM's names for the features of this CPU."""
    return frozenset(name for name, is_there in binding.get_host_cpu_features().items() if is_there)


def byte_products(features: Collection[str]) -> Literal["int8 and int4", "int4"] | None:
    """The weights that this CPU can multiply by 8-bit activations.

    With VNNI, one instruction multiplies bytes and adds the products. AVX2 first adds pairs of products in 16 bits,
    which are enough only for 4-bit weights.
    """
    if integer_products(features) is None:
        return None
    if ("avx512vnni" if "avx512f" in features else "avxvnni") in features:
        return "int8 and int4"
    return None if "avx512f" in features else "int4"


def bfloat16_products(features: Collection[str]) -> str | None:
    """The instructions for products with bfloat16 weights, or None if they are computed in float32."""
    if "amx-bf16" in features:
        return "AMX"
    if "avx512bf16" in features:
        return "AVX512_BF16"
    # `bf16` is the name of the feature on ARM, where oneDNN uses it.
    return "oneDNN" if "bf16" in features else None


def integer_products(features: Collection[str]) -> str | None:
    """The instructions for products with 8-bit and 4-bit weights, or None if such weights are dequantised."""
    if "avx512f" in features:
        if "avx512bw" not in features:
            return None
        few_rows = "AVX512_VNNI" if "avx512vnni" in features else "AVX-512"
        return f"AMX and {few_rows}" if "amx-int8" in features else few_rows
    if "avx2" not in features:
        return None
    return "AVX_VNNI" if "avxvnni" in features else "AVX2"
