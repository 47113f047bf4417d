from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import harness, quantized
from benchmarks.answers import CheckError
from benchmarks.quantized import FORMATS, Format, check_product, main, measure_products, take_turns
from benchmarks.random_model import Shape
from loramux.engine.device.backend import Linear

TINY = Shape(hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=256, vocab_size=320)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quantized, "SHAPES", {"1b": TINY})
    monkeypatch.setattr(quantized, "SCRATCH", tmp_path)
    monkeypatch.setattr(quantized, "COLD_BYTES", 1)
    monkeypatch.setattr(harness, "require_idle", lambda is_allowed: 0.5)


def test_every_product_is_measured_in_every_format() -> None:
    products = measure_products(TINY, list(FORMATS.values()), [1, 3], rounds=1)
    assert [(case["product"], case["rows"]) for case in products["cases"]] == [
        (name, rows) for name in ("qkv", "o", "gate_up", "down", "head") for rows in (1, 3)
    ]
    assert all(set(case["ms"]) == set(FORMATS) for case in products["cases"])
    assert 0 < products["largest_error"] < quantized.TOLERANCE


@pytest.mark.parametrize("name", list(FORMATS)[1:])
def test_a_wrong_product_stops_the_benchmark(name: str) -> None:
    form, weight, inputs = FORMATS[name], torch.randn(40, 128).bfloat16(), [torch.randn(2, 128)]
    assert check_product(form, weight, form.linear(weight), inputs) < quantized.TOLERANCE
    weight_of_another = weight.clone()
    weight_of_another[7, 5] += 1
    with pytest.raises(CheckError, match=name):
        check_product(form, weight, form.linear(weight_of_another), inputs)


def test_a_product_that_is_wrong_for_some_numbers_of_rows_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Format.linear

    def linear(form: Format, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        sound = make(form, weight, bias)
        return lambda x: sound(x) * (1.5 if len(x) > 12 and form.bits < 16 else 1.0)

    monkeypatch.setattr(Format, "linear", linear)
    forms = [FORMATS["bfloat16"], FORMATS["int8"]]
    measure_products(TINY, forms, [1, 12], rounds=1)
    with pytest.raises(CheckError, match="int8 with 16 rows"):
        measure_products(TINY, forms, [1, 16], rounds=1)


@pytest.mark.parametrize("name", list(FORMATS)[1:])
def test_quantized_weights_are_close(name: str) -> None:
    form, weight = FORMATS[name], torch.randn(40, 128).bfloat16()
    quantized_weight = form.quantize(weight)
    dequantized = torch.from_numpy(quantized_weight.dequantize())
    assert quantized_weight.group == (form.group or 128)
    errors = (dequantized - weight.float()).abs() / float(quantized_weight.scales.max())
    # A grid with minima may leave out up to 1.1 steps at each end of a group's range.
    assert errors.max() <= (1.7 if form.has_minima else 0.51)
    assert errors.square().mean().sqrt() <= 0.3


def test_ways_take_turns() -> None:
    order: list[str] = []
    seconds = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert all(0 <= value < 1 for value in seconds.values())


@pytest.mark.campaign
def test_figures_of_products_and_steps_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "quantized.json"
    assert main(["--rows", "1", "4", "--prefill", "20", "--rounds", "2", "--head", "int8", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert [case["rows"] for case in document["steps"]["cases"]] == [1, 4]
    for case in [*document["products"]["cases"], *document["steps"]["cases"]]:
        assert case["speedup"]["int4"] == pytest.approx(case["ms"]["bfloat16"] / case["ms"]["int4"])
    assert "decode steps, head in int8" in capsys.readouterr().out
