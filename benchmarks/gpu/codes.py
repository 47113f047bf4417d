"""Measures products with quantised weights against the bandwidth floor, and against cuBLAS with bfloat16 weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.gpu.bench import Bench, Row, require_close
from benchmarks.gpu.code_formats import FORMATS, FP8, FP8_INPUTS
from benchmarks.gpu.model import Model, model_of
from loramux.engine.device.backend import DenseLinear, Linear
from loramux.kernels.gpu.linear.coded_linear import MIN_DEQUANTIZED_ROWS, RoundingLinear, make_coded_linear
from loramux.kernels.quantized import QuantizedWeight

DENSE = "bfloat16, cuBLAS"
CHECKED_OUTPUTS = 64
"""Number of outputs that are compared with the outputs of the dequantised weight."""

HOST_S = 0.3
"""Assumed seconds to draw a weight's codes on the host and to lay them out."""

QUICK_FORMATS = ("int4, groups of 128", FP8)
TINY_FORMATS = ("mxfp4", FP8, FP8_INPUTS)
"""Formats whose group size divides the tiny model's numbers of inputs."""


@dataclass(frozen=True, slots=True)
class CodesCase:
    """One linear layer of the model, measured in each of `formats` with each number of rows in `rows`."""

    linear: str
    out_features: int
    in_features: int
    rows: tuple[int, ...]
    formats: tuple[str, ...]

    def floor_parts(self, weight_bytes: float, num_rows: int, itemsize: int) -> tuple[float, int]:
        """The fewest bytes that a product can move, and its number of operations."""
        activations = num_rows * (self.in_features + self.out_features) * itemsize
        return weight_bytes + activations, 2 * num_rows * self.in_features * self.out_features

    def __str__(self) -> str:
        return f"{self.linear} {self.out_features} x {self.in_features}"


def cases(bench: Bench) -> list[CodesCase]:
    model = model_of(bench)
    rows = (3, 512) if bench.is_tiny else (1, 64) if bench.is_quick else (1, 16, 64, 512, 2048)
    formats = TINY_FORMATS if bench.is_tiny else QUICK_FORMATS if bench.is_quick else tuple(FORMATS)
    linears = linears_of(model)
    if not bench.is_full:
        linears.pop("o")
    return [CodesCase(name, *shape, rows, formats) for name, shape in linears.items()]


def linears_of(model: Model) -> dict[str, tuple[int, int]]:
    """Numbers of outputs and inputs of each linear layer. The gate and up projections are fused."""
    return {
        "gate/up": (2 * model.intermediate_size, model.hidden_size),
        "down": (model.hidden_size, model.intermediate_size),
        "o": (model.hidden_size, model.hidden_size),
    }


def run(bench: Bench) -> Iterator[Row]:
    yield from bench.each(cases(bench), "loramux", lambda case: _run_case(bench, case))


def warm(bench: Bench, shard: int, num_shards: int) -> None:
    for case in cases(bench)[shard::num_shards]:
        for way in ways_of(bench, case).values():
            for rows in case.rows:
                if rows >= way.min_rows:
                    way.linear(torch.zeros(rows, case.in_features, dtype=bench.dtype, device=bench.device))


@dataclass(frozen=True, slots=True)
class Way:
    """A method of computing a product, measured only with `min_rows` rows or more. `weight_bytes` is the size of its
    weight.

    `figures` contains the error of its outputs, and is empty if the outputs need no check.
    """

    linear: Linear
    weight_bytes: int
    min_rows: int = 1
    figures: dict[str, float] = field(default_factory=dict)


class ScaledInt8:
    """torch's integer product with int8 weights and one scale per output, after rounding each row of `x` to int8."""

    def __init__(self, weight: QuantizedWeight, device: torch.device) -> None:
        self._weight = torch.from_numpy(weight.codes).to(device).view(torch.int8).T
        self._scales = torch.from_numpy(weight.scales).to(device).T.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        factors = x.abs().amax(1, keepdim=True).float() / 127
        sums = torch._int_mm((x / factors).round().to(torch.int8), self._weight)
        return (sums * factors * self._scales).to(x.dtype)


SCALED_ROWS = 64
"""Smallest number of rows with which torch's integer product is measured. It needs more than 16 rows."""

ROUNDING_ERROR = 5e-2
"""Allowed error of products whose inputs are rounded to 8 bits, which is larger than all other rounding."""


def ways_of(bench: Bench, case: CodesCase) -> dict[str, Way]:
    """Make the case's methods and check their outputs. Raises CheckError if an error is too large."""
    generator = bench.generator(8)
    shape = case.out_features, case.in_features
    dense = torch.randn(shape, generator=generator, device=bench.device).mul_(0.02).to(bench.dtype)
    ways = {DENSE: Way(DenseLinear(dense), dense.nbytes)}
    for name in case.formats:
        form = FORMATS[name]
        weight = form.random(*shape)
        linear = make_coded_linear(weight, None, bench.device, rounds_inputs=form.rounds_inputs)
        if linear is None:
            raise ValueError(f"there is no product of {name} for {case}")
        if isinstance(linear, RoundingLinear):
            errors = _errors(bench, linear, weight, ROUNDING_ERROR, MIN_DEQUANTIZED_ROWS)
            ways[name] = Way(linear, weight.nbytes, MIN_DEQUANTIZED_ROWS, errors)
        elif form.rounds_inputs:
            bench.say(f"  {case}: torch cannot multiply {name} on this device")
        else:
            ways[name] = Way(linear, weight.nbytes, figures=_errors(bench, linear, weight, 1e-2))
        if name == "int8" and max(case.rows) >= SCALED_ROWS:
            scaled = ScaledInt8(weight, bench.device)
            errors = _errors(bench, scaled, weight, ROUNDING_ERROR)
            ways["int8 and int8 rows, torch"] = Way(scaled, weight.nbytes, SCALED_ROWS, errors)
    return ways


def _errors(
    bench: Bench, linear: Linear, weight: QuantizedWeight, tolerance: float, num_rows: int = SCALED_ROWS
) -> dict[str, float]:
    """Compare some outputs with the dequantised weight's outputs. Raises CheckError if the error is too large."""
    if bench.is_warming or bench.planned is not None:
        return {}
    x = torch.randn(num_rows, weight.in_features, generator=bench.generator(9), device=bench.device).to(bench.dtype)
    dequantized = torch.from_numpy(weight.dequantize(0, CHECKED_OUTPUTS)).to(bench.device)
    expected = x.double() @ dequantized.double().T
    return {"error": require_close(linear(x)[:, :CHECKED_OUTPUTS], expected, tolerance=tolerance)}


def _run_case(bench: Bench, case: CodesCase) -> Iterator[Row]:
    ways = ways_of(bench, case)
    if not bench.is_timed:
        yield from (Row(str(case), name, way.figures) for name, way in ways.items())
        return
    assert bench.ceilings is not None
    for num_rows in case.rows:
        x = torch.randn(num_rows, case.in_features, device=bench.device).to(bench.dtype)
        used = {name: way for name, way in ways.items() if num_rows >= way.min_rows}
        replays = {}
        for name, way in used.items():
            launch = partial(way.linear, x)
            launch()
            replays[name] = bench.capture(launch)
        seconds = bench.time(replays)
        for name, way in used.items():
            num_bytes, operations = case.floor_parts(way.weight_bytes, num_rows, bench.dtype.itemsize)
            floor = max(num_bytes / bench.ceilings.bandwidth, operations / bench.ceilings.matmul)
            figures = {
                "us": seconds[name] * 1e6,
                "floor_us": floor * 1e6,
                "over_floor": seconds[name] / floor,
                "over_bfloat16": seconds[name] / seconds[DENSE],
            }
            yield Row(f"{case}, {num_rows} rows", name, figures | way.figures)
    bench.say(f"  {case}: {len(case.rows)} numbers of rows")
