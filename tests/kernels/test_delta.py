"""The convolution and the gated delta rule, compared with plain loops over whole sequences in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch

from loramux.kernels.cpu.kernels import CpuKernels
from loramux.kernels.delta_spec import DeltaSpec
from loramux.kernels.layout import PageGeometry
from loramux.kernels.tables import AttentionBatch, PoolViews

GEOMETRY = PageGeometry(num_layers=3, num_kv_heads=1, head_dim=16, kv_itemsize=4, adapter_itemsize=4)
SPECS = {
    "one-head": DeltaSpec(num_layers=2, num_k_heads=1, num_v_heads=1, k_dim=8, v_dim=8, conv_len=2),
    "shared-keys": DeltaSpec(num_layers=3, num_k_heads=2, num_v_heads=4, k_dim=16, v_dim=16, conv_len=4),
    "uneven": DeltaSpec(num_layers=2, num_k_heads=1, num_v_heads=3, k_dim=24, v_dim=20, conv_len=3),
}
SEQUENCES = [[4], [1, 1], [3, 2, 1]]
"""The chunks in which each sequence is computed."""


@dataclass
class Inputs:
    """Random inputs of one layer, and its parameters."""

    spec: DeltaSpec
    x: torch.Tensor
    gates: torch.Tensor
    weight: torch.Tensor
    rates: torch.Tensor

    @staticmethod
    def random(spec: DeltaSpec, num_rows: int) -> Inputs:
        wide = torch.randn(num_rows, spec.channels + 2 * spec.num_v_heads + 3)
        rates = torch.stack([-torch.rand(spec.num_v_heads) * 4, torch.randn(spec.num_v_heads)])
        # Rows are views into wider rows, as one product for all projections of a layer yields them.
        gates = wide[:, spec.channels : spec.channels + 2 * spec.num_v_heads].mul_(6)
        return Inputs(spec, wide[:, : spec.channels], gates, torch.randn(spec.conv_len, spec.channels), rates)

    def expected(self, begin: int, end: int) -> torch.Tensor:
        """The layer's outputs for a whole sequence."""
        spec, x = self.spec, self.x[begin:end].double()
        padded = torch.cat([torch.zeros(spec.conv_len - 1, spec.channels, dtype=torch.double), x])
        taps = [padded[j : j + end - begin] * self.weight[j].double() for j in range(spec.conv_len)]
        mixed = torch.nn.functional.silu(sum(taps))
        rows = []
        states = torch.zeros(spec.num_v_heads, spec.v_dim, spec.k_dim, dtype=torch.double)
        for t in range(end - begin):
            q, k, v = mixed[t].split([spec.num_k_heads * spec.k_dim] * 2 + [spec.num_v_heads * spec.v_dim])
            b, a = self.gates[begin + t].double().split(spec.num_v_heads)
            out = []
            for head in range(spec.num_v_heads):
                key = slice(spec.k_dim * (head // (spec.num_v_heads // spec.num_k_heads)), None)
                unit_q, unit_k = (part[key][: spec.k_dim] for part in (q, k))
                unit_q, unit_k = (
                    unit_q / (unit_q.square().sum() + 1e-6).sqrt(),
                    unit_k / (unit_k.square().sum() + 1e-6).sqrt(),
                )
                own = v[head * spec.v_dim : (head + 1) * spec.v_dim]
                step = torch.log1p(torch.exp(a[head] + self.rates[1, head]))
                states[head] *= torch.exp(self.rates[0, head].double() * step)
                states[head] += torch.outer(b[head].sigmoid() * (own - states[head] @ unit_k), unit_k)
                out.append(states[head] @ unit_q / spec.k_dim**0.5)
            rows.append(torch.cat(out))
        return torch.stack(rows)


def batch_of(
    pool: PoolViews, spec: DeltaSpec, chunks: Sequence[tuple[int, int, int]], num_padding: int = 0
) -> AttentionBatch:
    """A step with sequences `(number, context, rows)`. Sequence `n` keeps its state in every fifth page from `n` on."""
    num_pages = spec.num_pages(pool.geometry)
    poison = pool.raw.shape[0] - 1
    pages, starts = [poison], []
    for number, _, _ in chunks:
        starts.append(len(pages))
        pages += [number + 5 * page for page in reversed(range(num_pages))]
        pages.append(poison)
    counts = [rows for _, _, rows in chunks] + [0] * num_padding
    return AttentionBatch(
        cu_q=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        seq_lens=torch.tensor([context for _, context, _ in chunks] + [0] * num_padding, dtype=torch.int32),
        pages=torch.tensor(pages, dtype=torch.int32),
        page_starts=torch.tensor(starts + [0] * num_padding, dtype=torch.int32),
        kv_slots=torch.zeros(sum(counts), dtype=torch.int64),
        max_q=max(counts),
    )


def run(kernels: Any, inputs: Inputs, layer: int, batch: AttentionBatch, rows: torch.Tensor) -> torch.Tensor:
    mixed = kernels.convolve(inputs.x[rows], inputs.weight, layer, batch, inputs.spec)
    return kernels.delta_rule(mixed, inputs.gates[rows], inputs.rates, layer, batch, inputs.spec)


def make_pool(make_poisoned_pool: Callable[..., PoolViews], spec: DeltaSpec) -> PoolViews:
    return make_poisoned_pool(5 * spec.num_pages(GEOMETRY) + 1, GEOMETRY, torch.float32)


def run_in_steps(kernels: Any, pool: PoolViews, inputs: Inputs, layer: int, num_padding: int) -> list[torch.Tensor]:
    """Compute one chunk of each sequence per step. Each sequence begins one step later than the previous one."""
    firsts = list(accumulate((sum(chunks) for chunks in SEQUENCES), initial=0))
    found: list[list[torch.Tensor]] = [[] for _ in SEQUENCES]
    for step in range(len(SEQUENCES) + max(map(len, SEQUENCES))):
        chunks, rows = [], []
        for number, sizes in enumerate(SEQUENCES):
            if 0 <= step - number < len(sizes):
                done = sum(sizes[: step - number])
                size = sizes[step - number]
                chunks.append((number, done + size, size))
                rows += range(firsts[number] + done, firsts[number] + done + size)
        if not chunks:
            continue
        batch = batch_of(pool, inputs.spec, chunks, num_padding)
        padded = torch.tensor([*rows, *[0] * num_padding])
        out = run(kernels, inputs, layer, batch, padded)
        assert not out[len(rows) :].any(), "padding rows are 0"
        for (number, _, size), begin in zip(chunks, batch.cu_q.tolist(), strict=False):
            found[number].append(out[begin : begin + size])
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, id=name, marks=pytest.mark.campaign if name == "shared-keys" else ())
        for name, spec in SPECS.items()
    ],
)
def test_sequences_in_chunks_equal_whole_sequences(
    make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., PoolViews], spec: DeltaSpec
) -> None:
    pool = make_pool(make_poisoned_pool, spec)
    kernels = make_kernels(pool)
    inputs = Inputs.random(spec, sum(map(sum, SEQUENCES)))
    num_padding = 2 if type(kernels).__name__ == "GpuKernels" else 0
    first = 0
    for out in run_in_steps(kernels, pool, inputs, spec.num_layers - 1, num_padding):
        expected = inputs.expected(first, first + len(out))
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
        first += len(out)


def test_chunks_of_many_rows_equal_the_whole_sequence(
    make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    """A GPU's convolution computes 16 rows at a time, and only the first of these rows read the stored tail."""
    spec, sizes = DeltaSpec(num_layers=1, num_k_heads=1, num_v_heads=1, k_dim=8, v_dim=8, conv_len=4), (35, 1, 18)
    pool = make_pool(make_poisoned_pool, spec)
    kernels = make_kernels(pool)
    inputs = Inputs.random(spec, sum(sizes))
    found = []
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        found.append(run(kernels, inputs, 0, batch_of(pool, spec, [(0, end, size)]), torch.arange(end - size, end)))
    expected = inputs.expected(0, sum(sizes))
    torch.testing.assert_close(torch.cat(found).double(), expected, rtol=1e-4, atol=1e-5)


def test_long_and_short_sequences_share_steps(
    make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    """A GPU computes sequences of 16 or more rows in chunks of 32, and others row by row. Either continues the other's
    states.
    """
    spec, steps = SPECS["uneven"], ((70, 1, 15, 16, 33), (5, 16, 17, 1, 64))
    pool = make_pool(make_poisoned_pool, spec)
    kernels = make_kernels(pool)
    num_padding = 2 if type(kernels).__name__ == "GpuKernels" else 0
    lengths = [sum(sizes) for sizes in zip(*steps, strict=True)]
    firsts = list(accumulate(lengths, initial=0))
    inputs = Inputs.random(spec, firsts[-1])
    found: list[list[torch.Tensor]] = [[] for _ in lengths]
    done = [0] * len(lengths)
    for sizes in steps:
        rows = [firsts[i] + done[i] + t for i, size in enumerate(sizes) for t in range(size)]
        done = [before + size for before, size in zip(done, sizes, strict=True)]
        chunks = list(zip(range(len(sizes)), done, sizes, strict=True))
        batch = batch_of(pool, spec, chunks, num_padding)
        out = run(kernels, inputs, 1, batch, torch.tensor([*rows, *[0] * num_padding]))
        assert not out[len(rows) :].any(), "padding rows are 0"
        for parts, part in zip(found, out[: len(rows)].split(list(sizes)), strict=True):
            parts.append(part)
    for parts, first, length in zip(found, firsts, lengths, strict=False):
        expected = inputs.expected(first, first + length)
        torch.testing.assert_close(torch.cat(parts).double(), expected, rtol=1e-4, atol=1e-5)


def test_repeated_keys_lose_no_digits(
    make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    """A prompt that repeats a token has equal keys. Without decay, powers of their products reach 10^8 in a chunk."""
    spec = DeltaSpec(num_layers=1, num_k_heads=1, num_v_heads=1, k_dim=8, v_dim=8, conv_len=2)
    pool = make_pool(make_poisoned_pool, spec)
    kernels = make_kernels(pool)
    inputs = Inputs.random(spec, 64)
    inputs.x[:, : 2 * spec.k_dim] = 1.0
    inputs.weight.abs_()
    inputs.gates[:] = 12.0
    inputs.rates[0] = -1e-4
    out = run(kernels, inputs, 0, batch_of(pool, spec, [(0, 64, 64)]), torch.arange(64))
    torch.testing.assert_close(out.double(), inputs.expected(0, 64), rtol=1e-4, atol=1e-5)


def test_layers_and_sequences_keep_their_states_apart(
    make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    """Steps of two layers and two sequences alternate, and the pages fill completely."""
    spec = SPECS["shared-keys"]
    pool = make_pool(make_poisoned_pool, spec)
    kernels = make_kernels(pool)
    layers = [Inputs.random(spec, 4) for _ in range(2)]
    found: list[list[torch.Tensor]] = [[], []]
    for step in range(2):
        for layer, inputs in enumerate(layers):
            batch = batch_of(pool, spec, [(0, step + 1, 1), (1, step + 1, 1)])
            found[layer].append(run(kernels, inputs, layer, batch, torch.tensor([step, 2 + step])))
    for inputs, steps in zip(layers, found, strict=True):
        for sequence in range(2):
            out = torch.stack([step[sequence] for step in steps]).double()
            torch.testing.assert_close(out, inputs.expected(2 * sequence, 2 * sequence + 2), rtol=1e-4, atol=1e-5)


def test_a_result_depends_neither_on_chunks_nor_on_other_sequences(
    make_poisoned_pool: Callable[..., PoolViews],
) -> None:
    """On a CPU, results are bitwise equal."""
    spec = DeltaSpec(num_layers=1, num_k_heads=2, num_v_heads=4, k_dim=32, v_dim=24, conv_len=4)
    pool = make_pool(make_poisoned_pool, spec)
    kernels = CpuKernels(pool)
    inputs = Inputs.random(spec, sum(map(sum, SEQUENCES)))
    first = 0
    for out in run_in_steps(kernels, pool, inputs, 0, num_padding=0):
        rows = torch.arange(first, first + len(out))
        assert torch.equal(run(kernels, inputs, 0, batch_of(pool, spec, [(2, len(out), len(out))]), rows), out)
        first += len(out)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_sequence_that_is_not_finite_changes_no_other(
    make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    spec = SPECS["uneven"]
    pool = make_pool(make_poisoned_pool, spec)
    kernels = make_kernels(pool)
    inputs = Inputs.random(spec, 6)
    expected = inputs.expected(3, 6)
    inputs.x[1] = torch.nan
    out = run(kernels, inputs, 0, batch_of(pool, spec, [(0, 3, 3), (1, 3, 3)]), torch.arange(6))
    assert out[1:3].isnan().all()
    torch.testing.assert_close(out[3:].double(), expected, rtol=1e-4, atol=1e-5)
    # The next owner of the pages starts from an empty state.
    out = run(kernels, inputs, 0, batch_of(pool, spec, [(0, 3, 3)]), torch.arange(3, 6))
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_state_whose_rows_do_not_fit_into_a_page_is_refused() -> None:
    spec = DeltaSpec(num_layers=1, num_k_heads=1, num_v_heads=1, k_dim=256, v_dim=8, conv_len=4)
    with pytest.raises(ValueError, match="a page of 512 bytes cannot hold 256 elements"):
        spec.num_pages(PageGeometry(1, 1, 8, 2, 2))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (DeltaSpec(1, 1, 1, 264, 8, 4), "keys have 264 elements"),
        (DeltaSpec(1, 1024, 1024, 1, 256, 4), "264192 channels take 264192 rows of 1 elements"),
    ],
    ids=["long-keys", "short-keys"],
)
def test_sizes_that_a_gpu_does_not_support_are_named(
    gpu_module: ModuleType, make_poisoned_pool: Callable[..., PoolViews], spec: DeltaSpec, problem: str
) -> None:
    pool = make_poisoned_pool(1, GEOMETRY, torch.float32)
    with pytest.raises(ValueError, match=problem):
        gpu_module.check_shapes(pool, (), (), delta=spec)
