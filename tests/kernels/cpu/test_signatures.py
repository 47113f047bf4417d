"""What the warm-up compiles, compared with what requests need, for every instruction set, without compiling."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kernels.cpu.instruction_sets import INSTRUCTION_SETS, run_python

PRODUCTS = {
    "no-avx2": (0, 0, "linear.multiply_panels"),
    "avx2": (5, 0, "linear.multiply_panels"),
    "avx-vnni": (7, 0, "linear.multiply_panels"),
    "avx512": (2, 0, "linear.multiply_panels"),
    "avx512-vnni": (4, 0, "linear.multiply_panels"),
    "avx512-bf16": (4, 0, "avx512_bf16.multiply_pair_panels"),
    "amx": (4, 2, "amx.multiply_tile_panels"),
}
"""For each instruction set: the number of signatures of products with codes, without and with tiles, and the kernel for
bfloat16 weights.
"""


QUICK = ("no-avx2", "avx2", "amx")
"""The sets of every test run. The campaign `kernels` adds the others."""


@pytest.fixture(scope="module")
def signatures(request: pytest.FixtureRequest) -> Any:
    """By selected instruction set, the signatures that each part of the warm-up compiles, and those of requests."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    selected = {item.callspec.params["name"] for item in items}
    return json.loads(run_python("-m", "tests.kernels.cpu.signatures", *sorted(selected)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.campaign) for name in INSTRUCTION_SETS]
)
def test_warm_compiles_what_requests_need(signatures: Any, name: str) -> None:
    adapters, base, requests = signatures[name]
    warm = adapters + base
    assert sorted(warm) == requests
    # The parts run at once. Two processes that add to the same kernel's index of compiled code would lose entries.
    assert not {kernel_of(one) for one in adapters} & {kernel_of(one) for one in base}
    num_codes, num_tiles, for_bfloat16 = PRODUCTS[name]
    for kernel, count in (
        ("quantized_linear.multiply_codes", num_codes),
        ("coded_experts.multiply_expert_codes", num_codes),
        ("quantized_amx.multiply_code_tiles", num_tiles),
    ):
        assert sum(signature.startswith(f"{kernel}(") for signature in warm) == count
    assert [signature for signature in warm if signature.startswith(f"{for_bfloat16}(") and "uint16" in signature]


def kernel_of(signature: str) -> str:
    return signature.partition("(")[0]
