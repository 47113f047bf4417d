from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from benchmarks.gpu import table_bytes
from benchmarks.gpu.cards import CARDS
from benchmarks.gpu.model import TINY
from benchmarks.gpu.table_step import TritonLaunch

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("card", "registers", "shared_bytes", "num_warps", "expected"),
    [
        pytest.param("h200", 32, 0, 4, 16, id="warps"),
        pytest.param("h200", 128, 0, 4, 4, id="registers"),
        pytest.param("h200", 129, 0, 4, 3, id="registers-rounded-up"),
        pytest.param("h200", 32, 56 << 10, 4, 4, id="shared-memory"),
        pytest.param("h200", 16, 0, 1, 32, id="programs"),
        pytest.param("4090", 16, 0, 1, 24, id="programs-ada"),
        pytest.param("l4", 255, 99 << 10, 8, 1, id="everything"),
    ],
)
def test_scarcest_resource_limits_programs_per_multiprocessor(
    card: str, registers: int, shared_bytes: int, num_warps: int, expected: int
) -> None:
    assert CARDS[card].resident_programs(registers, shared_bytes, num_warps) == expected


@pytest.mark.parametrize(
    ("num_resident", "elements_loaded"),
    [
        pytest.param(100, 10 * (8 + 8), id="all-share"),
        pytest.param(4, 10 * (4 + 4 + 4 + 8), id="tiles-of-one-expert-share"),
        pytest.param(3, 10 * (4 + 6 + 4 + 2 + 3 + 3 + 3 + 1), id="waves-split-tiles"),
        pytest.param(1, 10 * (5 * 4 + 2 * 8), id="none-share"),
    ],
)
def test_programs_of_one_wave_share_their_loads(
    num_resident: int, elements_loaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tiles of one expert and two of another, with two columns of programs each. One expert has no pairs."""
    monkeypatch.setattr(table_bytes, "_pairs_by_expert", lambda step: np.array([3, 0, 5]))
    arguments = {"ROWS": 2, "BLOCK_N": 2, "IN": 10, "OUT": 4, "x_ptr": torch.empty(0, dtype=torch.bfloat16)}
    launch = TritonLaunch("_multiply", (2, 5, 1), arguments, None)
    written = 8 * 4
    moved = table_bytes.shared_bytes(launch, cast(Any, None), num_resident)
    assert moved == 2 * (elements_loaded + written)


# In a process of its own, because the interpreter has no programs to inspect.
COUNT_ADAPTERS = """
import json
import sys

from benchmarks.gpu.cards import CARDS
from benchmarks.gpu.model import TINY
from benchmarks.gpu.random_models import ALL_MODULES
from benchmarks.gpu.table_bytes import bytes_of
from benchmarks.gpu.table_step import MetaEngine, TableCase

found = {}
for adapter_dtype in (None, "fp8"):
    engine = MetaEngine(
        TINY, CARDS["h200"], max_len=64, max_batch_tokens=16, max_sequences=16, max_resident_adapters=16,
        num_pages=128, adapter_dtype=adapter_dtype,
    )
    moved = found[str(adapter_dtype)] = {}

    def note(launch, step):
        name = launch.name
        moved[name] = moved.get(name, 0) + bytes_of(launch, step).least

    engine.record(TableCase("decode", 16, 31, 1, 16, ALL_MODULES, 8), note)
json.dump(found, sys.stdout)
"""


@pytest.mark.campaign
def test_a_decode_reads_half_as_many_bytes_of_adapters_in_fp8() -> None:
    """Sixteen sequences, each with its own adapter. Activations and all other bytes stay the same."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COUNT_ADAPTERS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    halves, codes = json.loads(done.stdout).values()
    assert halves.keys() == codes.keys()
    changed = {name: halves[name] - codes[name] for name in halves if halves[name] != codes[name]}
    assert changed.keys() == {"shrink_kernel", "expand_kernel"}
    elements = {
        "shrink_kernel": sum(module.in_features for module in TINY.modules),
        "expand_kernel": sum(module.out_features for module in TINY.modules),
    }
    assert changed == {name: 16 * 8 * TINY.num_layers * count for name, count in elements.items()}


def steps_of(model: str, card: str, directory: Path, *options: str) -> dict[str, Any]:
    """The steps of a model's table, after checks that hold for every table."""
    out = directory / "table.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.table",
        "--model",
        model,
        "--card",
        card,
        "--out",
        str(out),
        *options,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(directory / "triton")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = {step["case"]: step for step in json.loads(out.read_text())["steps"]}
    for step in steps.values():
        assert step["launches"] == sum(row["launches"] for row in step["rows"])
        assert all(0 < row["least_mb"] <= row["asked_mb"] or row["asked_mb"] <= 0.001 for row in step["rows"])
    assert out.with_suffix(".md").read_text() == done.stdout[:-1]
    return steps


@pytest.mark.campaign
@pytest.mark.parametrize("card", ["a100", "h200", "b200", "5090"])
def test_tiny_model_table_is_complete_for_every_card_generation(card: str, tmp_path: Path) -> None:
    """Every kernel of a step compiles, and the counts match the model's two layers."""
    steps = steps_of("tiny", card, tmp_path)
    decode = "decode, batch 64, context 1024: "
    base, adapted = steps[decode + "base only"], steps[decode + "16 adapters, rank 16"]
    assert adapted["launches"] - base["launches"] == 2 * 4 * 2, "a shrink and an expand for each of four groups"
    fused = steps[decode + "16 adapters, rank 16, fused"]
    assert adapted["launches"] - fused["launches"] == 4 * 2, "one launch for a product and its expand"
    products = [row["program"] for row in fused["rows"] if row["kernel"] == "lora_linear_kernel"]
    assert products
    assert not any(program["spilled_bytes"] for program in products)


@pytest.mark.campaign
@pytest.mark.parametrize("card", ["a100", "h200"])
def test_tiny_mixture_table_is_complete(card: str, tmp_path: Path) -> None:
    steps = steps_of("tiny-experts", card, tmp_path)
    decode = "decode, batch 64, context 1024: "
    base, attention = steps[decode + "base only"], steps[decode + "16 adapters, rank 16, attention"]
    experts = steps[decode + "16 adapters, rank 16, attention and experts"]
    shared = base["experts"]
    assert shared["least_mb"] <= shared["shared_mb"] <= shared["asked_mb"]
    assert attention["launches"] - base["launches"] == 2 * 2 * 2, "a shrink and an expand for each of two groups"
    assert experts["launches"] - attention["launches"] == 5 * 2, "the grouping of pairs, two shrinks and two expands"


@pytest.mark.campaign
@pytest.mark.parametrize("card", ["a100", "h200", "b200", "5090"])
def test_tiny_hybrid_table_is_complete(card: str, tmp_path: Path) -> None:
    """Prompts use two more kernels than decodes in each layer with a delta rule, and neither spills registers."""
    steps = steps_of("tiny-hybrid", card, tmp_path)
    found = {row["kernel"]: row for row in steps["prefill, 1 x 2048: base only"]["rows"]}
    decoded = {row["kernel"] for row in steps["decode, batch 64, context 1024: base only"]["rows"]}
    for kernel in ("_prepare_chunks", "_apply_chunks"):
        assert found[kernel]["launches"] == 2
        assert found[kernel]["program"]["spilled_bytes"] == 0
        assert kernel not in decoded


@pytest.mark.campaign
@pytest.mark.parametrize("card", ["a100", "h200", "b200", "5090"])
def test_rows_are_rounded_without_spilling_registers(card: str, tmp_path: Path) -> None:
    steps = steps_of("tiny", card, tmp_path, "--weights", "fp8, inputs in fp8")
    rows = [row for row in steps["prefill, 16 prompts of 128: base only"]["rows"] if row["kernel"] == "_round_rows"]
    assert sum(row["launches"] for row in rows) == 2 * 4, "qkv, o, gate/up and down in each layer"
    assert not any(row["program"]["spilled_bytes"] for row in rows)
    decode = steps["decode, batch 64, context 1024: base only"]["rows"]
    assert not any(row["kernel"] == "_round_rows" for row in decode)


LORA = ("shrink_kernel", "expand_kernel", "lora_linear_kernel")


@pytest.mark.campaign
@pytest.mark.parametrize("card", ["a100", "h200", "b200", "5090"])
def test_adapters_in_fp8_spill_no_registers(card: str, tmp_path: Path) -> None:
    steps = steps_of("tiny", card, tmp_path, "--adapter-dtype", "fp8")
    found = [row for step in steps.values() for row in step["rows"] if row["kernel"] in LORA]
    assert {row["kernel"] for row in found} == {*LORA}
    assert not any(row["program"]["spilled_bytes"] for row in found)


@pytest.mark.campaign
@pytest.mark.parametrize("card", ["a100", "h200", "b200", "5090"])
def test_k_and_v_in_int8_move_fewer_bytes_and_spill_no_registers(card: str, tmp_path: Path) -> None:
    codes, halves = (steps_of("tiny", card, tmp_path, *arguments) for arguments in (("--kv-dtype", "int8"), ()))
    names = ("_attend", "_rotate_and_store", "_gather_pages")
    assert not any(row["program"]["spilled_bytes"] for row in rows_of(codes.values(), *names))
    case = "decode, batch 64, context 1024: base only"
    [attention], [before] = (rows_of([steps[case]], "_attend") for steps in (codes, halves))
    assert attention["least_mb"] < 0.7 * before["least_mb"]


def rows_of(steps: Iterable[Any], *kernels: str) -> list[Any]:
    return [row for step in steps for row in step["rows"] if row["kernel"] in kernels]


PRODUCTS = ("_multiply_codes", "_dequantize_codes", "_round_rows")
"""A linear layer with a quantised weight launches one of these kernels."""


@pytest.mark.campaign
@pytest.mark.parametrize("weights", ["mxfp4", "fp8", "fp8, inputs in fp8"])
@pytest.mark.parametrize("model", ["tiny", "tiny-experts"])
def test_table_of_quantised_weights_counts_products_by_codes(model: str, weights: str, tmp_path: Path) -> None:
    steps = steps_of(model, "h200", tmp_path, "--weights", weights)
    for step in steps.values():
        # Large steps dequantise the weights of linears or round their inputs, but not those of experts.
        rows = [row for row in step["rows"] if row["kernel"] in PRODUCTS]
        assert sum(row["launches"] for row in rows) == 2 * 4, "qkv, o, gate/up and down in each layer"


@pytest.mark.campaign
def test_adapters_add_no_exchange_to_a_workers_step(tmp_path: Path) -> None:
    alone = steps_of("tiny", "h200", tmp_path)
    steps = steps_of("tiny", "h200", tmp_path, "--tensor-parallel-size", "2")
    for name, step in steps.items():
        exchanges = {one: rows_of([step], one) for one in ("all_reduce_", "all_gather_into_tensor")}
        counted = {one: sum(row["launches"] for row in rows) for one, rows in exchanges.items()}
        assert counted == {"all_reduce_": 2 * 2, "all_gather_into_tensor": 1}
        # The joined logits are put into the order of the tokens once more.
        assert step["launches"] == alone[name]["launches"] + 2 * 2 + 1 + 1
    case = "decode, batch 64, context 1024: base only"
    [kernel], [whole] = (rows_of([found[case]], "_attend") for found in (steps, alone))
    assert kernel["least_mb"] < 0.6 * whole["least_mb"]
