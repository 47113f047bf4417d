"""Measures products and whole decode steps with 8-bit and 4-bit weights, compared with bfloat16, on a CPU.

The formats take turns: each product and each step is measured with one format after the other, so that drift in the
machine's speed affects all formats alike. Medians are compared. Before that, each product is compared with the product
by its dequantised weight, and each engine's tokens are compared with the tokens of an engine whose weights are
dequantised to float32.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.answers import CheckError
from benchmarks.harness import SCRATCH, begin, new_parser, reports_failure, rotated
from benchmarks.random_model import SHAPES, Shape, make_base
from benchmarks.running_engine import RunningEngine, greedy_adds, start_engine
from benchmarks.tables import table
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.device.backend import Linear, open_backend
from loramux.engine.loop.config import EngineConfig
from loramux.engine.quantizing.grids import encode_groups
from loramux.kernels.cpu.instructions.integer_blocks import HAS_VNNI
from loramux.kernels.cpu.instructions.threads import set_num_threads
from loramux.kernels.cpu.linear.linear import PackedLinear
from loramux.kernels.cpu.linear.quantized_layout import BLOCKS
from loramux.kernels.cpu.linear.quantized_linear import make_quantized_linear
from loramux.kernels.quantized import INT4, INT8, UINT4, QuantizedWeight
from loramux.kernels.reference.quantized import round_to_bytes

LARGEST_BLOCK = BLOCKS[0]
PROMPT = 16
CHECKED_TOKENS = 4

TOLERANCE = 1e-3
"""Largest accepted error of an output, relative to the largest output. Rounding the input to bfloat16 causes an error
of about this size.
"""

COLD_BYTES, MAX_COPIES = 128 << 20, 16
"""Total size of a weight's copies in bytes, which exceeds the caches, and the maximum number of copies."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of the weights of linear layers, and the number of bits to which their inputs are rounded.

    If `group` is None, each output has one scale. With `has_minima`, 4-bit groups have minima, too.
    """

    name: str
    bits: int = 16
    group: int | None = None
    x_bits: int = 16
    has_minima: bool = False

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Round `x` as the format's own kernels do. Rounding to 16 bits is left out, because `TOLERANCE` covers its
        error.
        """
        return round_to_bytes(x, min(self.group or LARGEST_BLOCK, LARGEST_BLOCK)).float() if self.x_bits == 8 else x

    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        """Round to the nearest integer. The largest magnitude in a group becomes the largest integer."""
        if self.has_minima:
            return _with_minima(weight, self.group or weight.shape[1])
        values = weight.float().view(len(weight), -1, self.group or weight.shape[1])
        largest = 127 if self.bits == 8 else 7
        scales = values.abs().amax(2) / largest
        integers = (values / scales[:, :, None].clamp_min(1e-30)).round().flatten(1).int()
        if self.bits == 8:
            codes, codebook = integers.to(torch.int8).view(torch.uint8), INT8
        else:
            nibbles = (integers + 8).to(torch.uint8)
            codes, codebook = nibbles[:, ::2] | nibbles[:, 1::2] << 4, INT4
        return QuantizedWeight(codes=codes.numpy(), codebook=codebook, scales=scales.numpy())

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        if self.bits == 16:
            return PackedLinear(weight, bias)
        linear = make_quantized_linear(self.quantize(weight), bias, self.x_bits)
        if linear is None:
            raise SystemExit("this CPU has no kernels for quantised weights")
        return linear


def _with_minima(weight: torch.Tensor, group: int) -> QuantizedWeight:
    """4-bit codes as `--quantization int4` makes them."""
    codes, scales, minima = encode_groups(weight.float().numpy().reshape(-1, group))
    codes = codes.reshape(len(weight), -1)
    return QuantizedWeight(
        codes=codes[:, ::2] | codes[:, 1::2] << np.uint8(4),
        codebook=UINT4,
        scales=scales.reshape(len(weight), -1),
        minima=minima.reshape(len(weight), -1),
    )


class RoundingLinear:
    """A linear layer with a format's dequantised weights. It rounds its input as the format's own kernels do."""

    def __init__(self, form: Format, linear: Linear) -> None:
        self._form = form
        self._linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(self._form.round(x))


FORMATS = {
    each.name: each
    for each in (
        Format("bfloat16"),
        Format("int8", 8),
        Format("int8-g32", 8, 32),
        Format("int4", 4, 128),
        Format("int4-g32", 4, 32),
        Format("int4-minima", 4, 32, has_minima=True),
        Format("int8-a8", 8, x_bits=8),
        Format("int4-a8", 4, 128, x_bits=8),
        Format("int4-g32-a8", 4, 32, x_bits=8),
    )
    if each.x_bits == 16 or HAS_VNNI
}


def products_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """Numbers of outputs and inputs of a layer's products and of the head."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    kv = hidden // shape.num_heads * shape.num_kv_heads
    return {
        "qkv": (hidden + 2 * kv, hidden),
        "o": (hidden, hidden),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (shape.vocab_size, hidden),
    }


def take_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each function. The first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in rotated(list(ways), number):
            begin = time.perf_counter()
            ways[name]()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def multiply_all(linears: list[Linear], x: torch.Tensor) -> None:
    for linear in linears:
        linear(x)


def check_product(form: Format, weight: torch.Tensor, linear: Linear, inputs: Sequence[torch.Tensor]) -> float:
    """The largest error relative to the largest output of an input. Each number of rows can use another kernel."""
    values = torch.from_numpy(form.quantize(weight).dequantize())
    worst = 0.0
    for x in inputs:
        expected = form.round(x) @ values.T
        error = float((linear(x) - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCE:
            raise CheckError(f"an output of {form.name} with {len(x)} rows is wrong by {error:.1e} of the largest")
        worst = max(worst, error)
    return worst


def measure_products(shape: Shape, forms: list[Format], rows: list[int], rounds: int) -> dict[str, Any]:
    cases: list[dict[str, Any]] = []
    worst = 0.0
    for name, (out_features, in_features) in products_of(shape).items():
        weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
        generator = torch.Generator().manual_seed(1)
        inputs = [torch.randn(num_rows, in_features, generator=generator) for num_rows in rows]
        layers: dict[str, list[Linear]] = {}
        for form in forms:
            size = out_features * in_features * form.bits // 8
            layers[form.name] = [form.linear(weight) for _ in range(min(MAX_COPIES, -(-COLD_BYTES // size)))]
            if form.bits < 16:
                worst = max(worst, check_product(form, weight, layers[form.name][0], inputs))
        for x in inputs:
            ways = {each: partial(multiply_all, linears, x) for each, linears in layers.items()}
            seconds = take_turns(ways, rounds)
            milliseconds = {each: 1000 * value / len(layers[each]) for each, value in seconds.items()}
            cases.append({"product": name, "rows": len(x), "ms": milliseconds})
    return {"largest_error": worst, "cases": cases}


def open_base(
    base: Path, make_linear: Callable[..., Linear], dtype: str, threads: int
) -> AbstractContextManager[RunningEngine]:
    backend = replace(open_backend("cpu"), make_linear=make_linear)
    config = EngineConfig(
        model_dir=str(base), blob_url="", cache_dir="", dtype=dtype, pool_bytes=256 << 20, num_threads=threads
    )
    return start_engine(config, MemoryStager({}), backend=backend)


def make_linears(form: Format, head: Format, vocab_size: int, is_dequantized: bool = False) -> Callable[..., Linear]:
    """Return a function that makes linear layers in one format and the head in another. If `is_dequantized`, it makes
    float32 layers with the same values.
    """

    def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        own = head if len(weight) == vocab_size else form
        if not is_dequantized:
            return own.linear(weight, bias)
        values = torch.from_numpy(own.quantize(weight).dequantize()) if own.bits < 16 else weight
        return RoundingLinear(own, PackedLinear(values, bias))

    return make_linear


def check_tokens(base: Path, form: Format, head: Format, vocab_size: int, prompts: torch.Tensor, threads: int) -> None:
    """Compare the tokens of two float32 engines: one multiplies by codes, the other by dequantised weights."""
    answers = []
    for is_dequantized in (False, True):
        make_linear = make_linears(form, head, vocab_size, is_dequantized)
        with open_base(base, make_linear, "float32", threads) as engine:
            found = engine.answer(greedy_adds(prompts.tolist(), CHECKED_TOKENS))
        answers.append({name: answer.tokens for name, answer in found.items()})
        del engine
        gc.collect()
    if answers[0] != answers[1]:
        raise CheckError(f"the tokens of {form.name} differ from those of the dequantised weights")


def measure_steps(
    shape: Shape, base: Path, forms: list[Format], head: Format, rows: list[int], rounds: int, threads: int
) -> dict[str, Any]:
    """Median milliseconds of a decode step with each format."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(10, shape.vocab_size, (max(rows), PROMPT), generator=generator)
    cases: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines: dict[str, RunningEngine] = {}
        for form in forms:
            own_head = form if form.bits == 16 else head
            if form.bits < 16:
                check_tokens(base, form, own_head, shape.vocab_size, prompts[:2], threads)
            make_linear = make_linears(form, own_head, shape.vocab_size)
            engines[form.name] = stack.enter_context(open_base(base, make_linear, "bfloat16", threads))
        for num_rows in rows:
            for engine in engines.values():
                engine.prefill(greedy_adds(prompts[:num_rows].tolist(), rounds + 4))
            steps = {name: engine.assembled.engine.step for name, engine in engines.items()}
            milliseconds = {name: 1000 * value for name, value in take_turns(steps, rounds).items()}
            cases.append({"rows": num_rows, "ms": milliseconds})
            for engine in engines.values():
                engine.abort()
    return {"head": head.name, "checked_tokens": 2 * CHECKED_TOKENS, "cases": cases}


def print_cases(title: str, cases: list[dict[str, Any]], console: Console) -> None:
    """Print each case with the speed of each format relative to bfloat16, and add these ratios to the cases."""
    names = list(cases[0]["ms"])
    headings = (*(key for key in cases[0] if key != "ms"), "bfloat16, ms", *names[1:])
    rows = []
    for case in cases:
        labels = [str(value) for key, value in case.items() if key != "ms"]
        case["speedup"] = {name: case["ms"][names[0]] / case["ms"][name] for name in names[1:]}
        speeds = (f"{value:.2f}x" for value in case["speedup"].values())
        rows.append([*labels, f"{case['ms'][names[0]]:.2f}", *speeds])
    console.print(table(title, headings, rows))


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("quantized", __doc__)
    add = parser.add_argument
    add("--model", choices=sorted(SHAPES), default="1b")
    add("--formats", nargs="+", choices=list(FORMATS)[1:], default=list(FORMATS)[1:])
    add("--head", choices=list(FORMATS), default="bfloat16", help="format of the quantised bases' head")
    add("--rows", type=int, nargs="+", default=[1, 4, 16], help="rows per step")
    add("--prefill", type=int, nargs="*", default=[512], help="additional numbers of rows for the products")
    add("--rounds", type=int, default=21)
    add("--threads", type=int, default=2)
    run = begin(parser.parse_args(argv))
    parsed, console = run.arguments, run.console
    set_num_threads(parsed.threads)
    shape, forms = SHAPES[parsed.model], [FORMATS["bfloat16"], *(FORMATS[name] for name in parsed.formats)]
    base = SCRATCH / parsed.model / "base"
    products = measure_products(shape, forms, [*parsed.rows, *parsed.prefill], parsed.rounds)
    print_cases("products", products["cases"], console)
    make_base(shape, base)
    steps = measure_steps(shape, base, forms, FORMATS[parsed.head], parsed.rows, parsed.rounds, parsed.threads)
    print_cases(f"decode steps, head in {parsed.head}", steps["cases"], console)
    workload = {name: getattr(parsed, name) for name in ("model", "rounds", "threads")}
    run.write({"workload": workload, "products": products, "steps": steps})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
