from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
LAYERS, HEADS, HEAD_DIM, KV_HEADS, ITEMSIZE = 32, 32, 128, 8, 2


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((BENCHMARKS / "results" / "gpu-table-h200.json").read_text())
    document["steps"] = {step["case"]: step for step in document["steps"]}
    return document


@pytest.fixture(scope="module")
def text() -> str:
    return (BENCHMARKS / "gpu" / "next.md").read_text()


def total(step: dict[str, Any], kernel: str, figure: str) -> float:
    return float(sum(row[figure] for row in step["rows"] if row["kernel"] == kernel))


def test_gains_from_hidden_launches_match_the_table(table: dict[str, Any], text: str) -> None:
    step = table["steps"]["decode, batch 64, context 1024: 16 adapters, rank 16"]
    base = table["steps"]["decode, batch 64, context 1024: base only"]
    bandwidth, node_us = table["card"]["bandwidth"] / 1e12, table["card"]["node_s"] * 1e6
    hidden = total(step, "shrink_kernel", "launches") * node_us
    assert hidden == total(step, "expand_kernel", "launches") * node_us
    assert f"128 x {node_us:g} us = {hidden:g} us" in text
    added = step["least_mb"] - base["least_mb"]
    assert f"{step['launches']} launches and a floor of {step['floor_us']:,.1f} us" in text
    assert f"{added:,.1f} MB, {added / bandwidth:,.1f} us" in text.replace("\n", " ")
    assert f"Their ratio is {step['floor_us'] / base['floor_us']:.3f}" in text
    assert f"= {(step['floor_us'] - hidden) / base['floor_us']:.3f}" in text.replace("\n", " ")
    assert f"= {(step['floor_us'] - 2 * hidden) / base['floor_us']:.3f}" in text.replace("\n", " ")
    shrunk = total(step, "shrink_kernel", "least_mb")
    assert f"The shrinks' total floor is {total(step, 'shrink_kernel', 'floor_us'):.1f} us" in text
    assert f"{shrunk:.1f} MB, {shrunk / bandwidth:.1f} us" in text


@pytest.mark.parametrize("batch", [64, 256])
def test_savings_of_one_split_match_the_table(batch: int, table: dict[str, Any], text: str) -> None:
    step = table["steps"][f"decode, batch {batch}, context 1024: 16 adapters, rank 16"]
    answers = LAYERS * batch * HEADS * HEAD_DIM * ITEMSIZE / 1e6
    kv = LAYERS * batch * 1024 * 2 * KV_HEADS * HEAD_DIM * ITEMSIZE / 1e6
    # The queries are the same size as the outputs.
    partials = total(step, "_attend", "least_mb") - kv - answers
    written_us = (partials - answers) / (table["card"]["bandwidth"] / 1e12)
    saved_us = total(step, "_combine", "floor_us") + written_us
    share = saved_us / step["floor_us"]
    assert f"{partials:.1f} MB" in text
    assert f"{written_us:.1f} us" in text
    assert f"{saved_us:.1f} us, {share:.1%}".replace("%", " %") in text


def test_bound_of_another_attention_backend_matches_the_table(table: dict[str, Any], text: str) -> None:
    step = table["steps"]["decode, batch 64, context 1024: 16 adapters, rank 16"]
    floor = total(step, "_attend", "floor_us") + total(step, "_combine", "floor_us")
    assert f"= {floor:,.1f} us, {floor / step['floor_us']:.1%}".replace("%", " %") in text.replace("\n", " ")
    assert f"it can gain at most {floor / 4:.1f} us" in text
