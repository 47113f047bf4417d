"""GPU sampling compared with its specification in float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.kernels.reference.sampling import kept_weights, reference_sample_tokens
from tests.kernels.gpu.interpreted import DEVICE, HAS_GPU, check_overflow, import_kernels

(sampling,) = import_kernels("sampling")

REAL_TILES = {name: getattr(sampling, name) for name in ("GROUP", "GROUPS_PER_PROGRAM", "BLOCK", "MAX_CANDIDATES")}

ALONE = "LORAMUX_TEST_ALONE"

EDGE = 2e-5
"""Distance of a uniform number from the border between two tokens, much larger than the error of float32 sums."""

LARGEST_UNIFORM = 1 - 2.0**-24


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


GREEDY = Settings(temperature=0)

RESTRICTIONS = {
    "none": Settings(temperature=0.8),
    "top-k": Settings(top_k=9),
    "top-p": Settings(top_p=0.7),
    "min-p": Settings(min_p=0.04),
    "top-k-within-top-p": Settings(temperature=1.3, top_k=6, top_p=0.95),
    "top-p-within-top-k": Settings(temperature=0.7, top_k=40, top_p=0.6),
    "min-p-within-both": Settings(temperature=1.1, top_k=30, top_p=0.9, min_p=0.06),
    "both-within-min-p": Settings(temperature=1.5, top_k=12, top_p=0.8, min_p=0.001),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "GROUP", 16)
    monkeypatch.setattr(sampling, "GROUPS_PER_PROGRAM", 8)
    monkeypatch.setattr(sampling, "BLOCK", 256)
    monkeypatch.setattr(sampling, "MAX_CANDIDATES", 64)
    if not HAS_GPU:
        # Parts of the interpreter read the environment when a kernel runs.
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def real_tiles(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in REAL_TILES.items():
        monkeypatch.setattr(sampling, name, value)
    check_overflow(monkeypatch)


def columns(rows: list[Settings]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.tensor([one.temperature for one in rows], dtype=torch.float32),
        torch.tensor([one.top_k for one in rows], dtype=torch.int32),
        torch.tensor([one.top_p for one in rows], dtype=torch.float32),
        torch.tensor([one.min_p for one in rows], dtype=torch.float32),
    )


def run_kernel(
    logits: torch.Tensor, rows: list[Settings], uniform: torch.Tensor | list[float], *, all_greedy: bool = False
) -> list[int]:
    """Sample with the kernel. The workspace is poisoned, and guard rows surround `out_tokens`."""
    num_rows, vocab_size = logits.shape
    workspace = sampling.sampling_workspace(num_rows + 1, vocab_size, DEVICE).fill_(torch.nan)
    guarded = torch.full((num_rows + 2,), -77, dtype=torch.int32, device=DEVICE)
    uniform = torch.as_tensor(uniform, dtype=torch.float32).to(DEVICE)
    settings = [one.to(DEVICE) for one in columns(rows)]
    sampling.sample_tokens(
        logits.to(DEVICE), *settings, uniform, guarded[1:-1], workspace=workspace, all_greedy=all_greedy
    )
    found: list[int] = guarded.tolist()
    assert found[0] == found[-1] == -77
    assert workspace[num_rows].isnan().all()
    return found[1:-1]


def run_reference(logits: torch.Tensor, rows: list[Settings], uniform: torch.Tensor) -> list[int]:
    out = torch.empty(len(rows), dtype=torch.int32)
    reference_sample_tokens(logits, *columns(rows), uniform, out)
    tokens: list[int] = out.tolist()
    return tokens


def weights_of(logits: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Return the weights `[V]` that the oracle keeps in one row. Asserts that rounding top_p or min_p cannot change
    them.
    """
    settings_of = columns([settings])
    weights = kept_weights(logits[None], *settings_of)[0]
    for factor in (1 - EDGE, 1 + EDGE):
        temperature, top_k, top_p, min_p = settings_of
        near = kept_weights(logits[None], temperature, top_k, torch.where(top_p < 1, top_p * factor, 1), min_p * factor)
        assert torch.equal(near[0] > 0, weights > 0), "the test's numbers put a token on a border"
    return weights


def borders(weights: torch.Tensor, shares: tuple[float, ...]) -> tuple[torch.Tensor, list[int]]:
    """Return uniform numbers just before and after the borders between two tokens, and the tokens that they select.

    These borders are nearest to the given `shares` of the total weight. Keeping one token more or fewer would shift
    every other border by most of that token's share. Two draws therefore show which tokens are kept, apart from tokens
    with less than 8 * EDGE of the total weight.
    """
    share = weights / weights.sum()
    end = share.cumsum(0)
    tokens = (share > 4 * EDGE).nonzero().squeeze(1)
    if len(tokens) == 1:
        return torch.tensor([0.0, LARGEST_UNIFORM]), [int(tokens)] * 2
    uniform, chosen = [], []
    for wanted in shares:
        i = int((end[tokens[:-1]] - wanted).abs().argmin())
        before, after = int(tokens[i]), int(tokens[i + 1])
        uniform += [float(end[before]) - EDGE, float(end[after] - share[after]) + EDGE]
        chosen += [before, after]
    return torch.tensor(uniform), chosen


def check_kept(logits: torch.Tensor, settings: Settings, shares: tuple[float, ...] = (0.5,)) -> set[int]:
    weights = weights_of(logits.float(), settings)
    uniform, expected = borders(weights, shares)
    rows = [settings] * len(expected)
    repeated = logits.expand(len(expected), -1)
    assert run_reference(repeated, rows, uniform) == expected
    assert run_kernel(repeated, rows, uniform) == expected
    return set(weights.nonzero().squeeze(1).tolist())


@pytest.mark.parametrize("settings", RESTRICTIONS.values(), ids=RESTRICTIONS.keys())
@pytest.mark.parametrize("vocab_size", [63, 1025])
def test_kept_and_drawn_tokens_match_the_specification(vocab_size: int, settings: Settings) -> None:
    kept = check_kept(torch.randn(vocab_size) * 3, settings)
    assert (len(kept) == vocab_size) == (settings == RESTRICTIONS["none"])


@pytest.mark.parametrize("name", ["none", "top-k", "top-p-within-top-k"])
def test_kept_tokens_with_real_tiles_match_the_specification(name: str, real_tiles: None) -> None:
    check_kept(torch.randn(1025) * 3, RESTRICTIONS[name])


@pytest.mark.parametrize("max_candidates", [16, 2048])
@pytest.mark.parametrize(
    ("settings", "fewest"),
    [
        pytest.param(Settings(top_p=0.9), 500, id="top-p"),
        pytest.param(Settings(top_k=700), 700, id="top-k"),
        pytest.param(Settings(top_k=700, top_p=0.98), 650, id="both"),
    ],
)
def test_flat_row_is_narrowed_in_passes(
    settings: Settings, fewest: int, max_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threshold is the same whether or not the candidates fit in their buffer."""
    monkeypatch.setattr(sampling, "MAX_CANDIDATES", max_candidates)
    assert len(check_kept(torch.randn(1025) * 0.5, settings)) >= fewest


@pytest.mark.parametrize("top_k", [21, 41, 900])
def test_search_can_end_exactly_at_a_token(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distances are multiples of 1/8, so some tokens are exactly at the ends of the search interval."""
    monkeypatch.setattr(sampling, "MAX_CANDIDATES", 16)
    logits = (torch.arange(1025) // 5).float() / -8
    settings = Settings(temperature=20, top_k=top_k)
    assert len(check_kept(logits, settings)) == -(-top_k // 5) * 5


@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_rows_with_different_settings_match_the_specification(num_rows: int) -> None:
    rows = [GREEDY, *RESTRICTIONS.values()][:num_rows]
    logits = torch.randn(num_rows, 500) * 4
    uniform = torch.zeros(num_rows)
    for i, settings in enumerate(rows):
        if settings != GREEDY:
            uniform[i] = borders(weights_of(logits[i], settings), (0.7,))[0][i % 2]
    expected = run_reference(logits, rows, uniform)
    assert expected[0] == logits[0].argmax()
    assert run_kernel(logits, rows, uniform) == expected


def test_zero_rows_return_zero_tokens() -> None:
    assert run_kernel(torch.empty(0, 63), [], []) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_ties_match_the_specification(dtype: torch.dtype) -> None:
    logits = (torch.randn(1000) * 3).to(dtype)
    check_kept(logits, Settings(top_k=20, top_p=0.95))
    check_kept(logits, RESTRICTIONS["none"], (0.1, 0.9))
    assert run_kernel(logits[None], [GREEDY], [0.0]) == [logits.float().argmax()]


def test_rows_inside_wider_rows_match_the_specification() -> None:
    wide = torch.full((6, 307), torch.nan)
    wide[::2, 3:-4] = torch.randn(3, 300) * 3
    logits, rows = wide[::2, 3:-4], [GREEDY, RESTRICTIONS["none"], RESTRICTIONS["top-k-within-top-p"]]
    uniform = torch.full((3,), 0.37)
    assert run_kernel(logits, rows, uniform) == run_reference(logits, rows, uniform)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        pytest.param(Settings(top_k=1), {7, 200, 299}, id="top-k-of-the-likeliest"),
        pytest.param(Settings(top_k=3), {7, 200, 299}, id="top-k-just-reached"),
        pytest.param(Settings(top_k=4), {7, 200, 299, 0, 100}, id="top-k-in-the-second"),
        pytest.param(Settings(top_p=0.0), {7, 200, 299}, id="top-p-0"),
        pytest.param(Settings(top_p=0.3), {7, 200, 299}, id="top-p-of-the-likeliest"),
        pytest.param(Settings(top_p=0.9), {7, 200, 299, 0, 100}, id="top-p-in-the-second"),
        pytest.param(Settings(top_k=4, top_p=0.78), {7, 200, 299}, id="top-p-of-the-top-k"),
        pytest.param(Settings(top_k=4, top_p=0.83), {7, 200, 299, 0, 100}, id="top-p-in-the-second-of-the-top-k"),
        pytest.param(Settings(min_p=0.9), {7, 200, 299}, id="min-p-of-the-likeliest"),
        pytest.param(Settings(min_p=0.3), {7, 200, 299, 0, 100}, id="min-p-in-the-second"),
    ],
)
def test_all_tokens_at_the_threshold_are_kept(settings: Settings, kept: set[int]) -> None:
    logits = torch.full((300,), -7.0)
    logits[[7, 200, 299]] = torch.tensor([-0.0, 0.0, -0.0])
    logits[[0, 100]] = -1
    assert check_kept(logits, settings) == kept


@pytest.mark.parametrize("token", [0, 131, 299])
def test_one_likely_token_is_always_chosen(token: int) -> None:
    logits = torch.zeros(300)
    logits[token] = 60
    rows = [GREEDY, Settings(), Settings(), Settings(top_k=3, top_p=0.2), Settings(min_p=0.01)]
    assert run_kernel(logits.expand(5, -1), rows, [0.5, 0.01, LARGEST_UNIFORM, 0.5, 0.5]) == [token] * 5


@pytest.mark.parametrize("value", [-0.0, -7.5, 1e30])
def test_equal_logits_are_equally_likely(value: float) -> None:
    logits = torch.full((1000,), value)
    if value == 0:
        # Positive and negative zeros are equal, so the order of tokens stays the same.
        logits[500:] = 0.0
    every = [Settings(), Settings(top_k=3), Settings(top_p=0.1), Settings(min_p=1.0)]
    rows = [GREEDY, *[Settings()] * 5, *every]
    uniform = [0.5, 0.0, 0.0015, 0.5005, 0.9995, LARGEST_UNIFORM, *[0.7777] * 4]
    assert run_kernel(logits.expand(10, -1), rows, uniform) == [0, 0, 1, 500, 999, 999, *[777] * 4]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("place", [0, 255, 298])
def test_non_finite_row_has_no_token(bad: float, place: int) -> None:
    rows = [GREEDY, Settings(), Settings(top_k=5, top_p=0.5, min_p=0.1)]
    logits = (torch.randn(299) * 3).repeat(2, 1).repeat_interleave(3, 0)
    logits[:3, place] = bad
    chosen = run_kernel(logits, rows * 2, [0.37] * 6)
    assert chosen[:3] == [-1, -1, -1]
    assert chosen[3:] == run_reference(logits[3:], rows, torch.full((3,), 0.37))
    assert run_reference(logits[:3], rows, torch.full((3,), 0.37)) == [-1, -1, -1]
    assert run_kernel(logits[2:4], [GREEDY] * 2, [0.0] * 2, all_greedy=True) == [-1, chosen[3]]


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-38])
def test_tiny_temperature_chooses_the_most_likely_token(temperature: float) -> None:
    logits = torch.randn(1000) * 3
    plain, cut = Settings(temperature=temperature), Settings(temperature=temperature, top_k=7, top_p=0.9, min_p=0.1)
    uniform = [0.0, LARGEST_UNIFORM, 0.5]
    assert run_kernel(logits.expand(3, -1), [plain, plain, cut], uniform) == [int(logits.argmax())] * 3


def test_huge_temperature_keeps_the_order_of_tokens() -> None:
    logits = torch.randn(1000) * 3
    assert check_kept(logits, Settings(temperature=1e4, top_k=5)) == set(logits.topk(5).indices.tolist())
    assert len(check_kept(logits, Settings(temperature=1e4, top_p=0.2))) == 200


@pytest.mark.parametrize("settings", [Settings(), Settings(top_k=4), Settings(top_p=0.999)], ids=["none", "k", "p"])
def test_token_without_weight_is_never_chosen(settings: Settings) -> None:
    """A token without weight is not chosen even if the uniform number is at an end of its range."""
    logits = torch.full((600,), -300.0)
    logits[[290, 301, 400, 511]] = torch.tensor([0.0, -1.0, -0.5, -2.0])
    assert run_kernel(logits.expand(2, -1), [settings] * 2, [0.0, LARGEST_UNIFORM]) == [290, 511]


def test_largest_uniform_number_selects_the_last_token_with_weight() -> None:
    logits = torch.randn(30, 250) * 0.1
    logits[:, 240:] = -300
    chosen = run_kernel(logits, [Settings()] * 30, [LARGEST_UNIFORM] * 30)
    # Sums in another order can reach the last border one token early.
    assert set(chosen) <= {238, 239}


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_largest_finite_logits_are_equally_likely() -> None:
    """A distance that overflows is not an error: the token has no weight."""
    logits = torch.full((300,), -3.3e38)
    logits[[20, 280]] = 3.3e38
    rows = [Settings(), Settings(top_k=9), Settings(top_p=0.9), Settings(min_p=0.1)]
    assert run_kernel(logits.expand(4, -1), rows, [0.4, 0.6, 0.4, 0.6]) == [20, 280, 20, 280]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_token_does_not_depend_on_other_rows() -> None:
    """Tokens must be identical, even where a random uniform number is within rounding of a border."""
    logits = torch.randn(4, 1000)
    names = ("none", "top-k", "top-p", "min-p-within-both")
    rows, uniform = [RESTRICTIONS[name] for name in names], torch.rand(4)
    together = run_kernel(logits, rows, uniform)
    for i in range(4):
        others = torch.randn(3, 1000) * 20
        others[0, 5] = torch.nan
        others[1] = logits[i]
        neighbours = [Settings(top_p=0.99), rows[i], GREEDY]
        assert run_kernel(others, neighbours, [0.9, float(uniform[i]), 0.1])[1] == together[i]


@pytest.mark.parametrize("vocab_size", [63, 1000, 1025])
def test_greedy_rows_do_not_need_the_all_greedy_flag(vocab_size: int) -> None:
    """The first of several equal maxima wins, wherever groups, programs and blocks end. Only the logits are read."""
    logits = torch.randn(5, vocab_size).clamp(max=4)
    for row, tokens in enumerate([[0], [15, 16], [vocab_size - 1], [40, 41, 62], list(range(vocab_size))]):
        logits[row, tokens] = 5
    expected = [0, 15, vocab_size - 1, 40, 0]
    assert run_kernel(logits, [GREEDY] * 5, [0.5] * 5) == expected
    poison = Settings(temperature=torch.nan, top_k=-9, top_p=torch.nan, min_p=torch.nan)
    assert run_kernel(logits, [poison] * 5, [torch.nan] * 5, all_greedy=True) == expected


def test_draws_follow_the_weights() -> None:
    """Pearson's chi-square for 200 draws. With 7 degrees of freedom, it exceeds 24.3 once in a thousand times."""
    logits = torch.full((63,), -9.0)
    tokens = torch.tensor([1, 5, 17, 30, 31, 32, 50, 62])
    logits[tokens] = torch.tensor([0.0, 0.3, -0.4, 0.9, -1.0, 0.1, 0.5, -0.2])
    settings = Settings(temperature=1.2, min_p=0.01)
    share = weights_of(logits, settings)[tokens]
    expected = 200 * share / share.sum()
    chosen = run_kernel(logits.expand(200, -1), [settings] * 200, torch.rand(200))
    counts = torch.tensor(chosen).bincount(minlength=63)[tokens]
    assert counts.sum() == 200
    assert ((counts - expected).square() / expected).sum() < 24.3


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_captured_graph_works_for_new_rows_without_synchronizing() -> None:
    settings = [one.to(DEVICE) for one in columns([GREEDY, Settings(), Settings(top_k=5), Settings(top_p=0.6)])]
    logits, uniform = torch.randn(4, 1000, device=DEVICE), torch.rand(4, device=DEVICE)
    out = torch.empty(4, dtype=torch.int32, device=DEVICE)
    workspace = sampling.sampling_workspace(4, 1000, DEVICE)
    sampling.sample_tokens(logits, *settings, uniform, out, workspace)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sampling.sample_tokens(logits, *settings, uniform, out, workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rows = [Settings(top_p=0.5), GREEDY, Settings(min_p=0.2), Settings(top_k=3)]
    for target, source in zip(settings, columns(rows), strict=True):
        target.copy_(source)
    logits.copy_(torch.randn(4, 1000) * 4)
    uniform.fill_(0.37)
    graph.replay()
    assert out.tolist() == run_reference(logits.cpu(), rows, uniform.cpu())


class CompiledForHopper:
    """Intercepts a kernel's launches and compiles them for compute capability 9.0, which needs no GPU."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.compiled: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compile

    def _compile(self, *arguments: Any, **options: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self._kernel.arg_names
        constants = {(names.index(name),): value for name, value in options.items() if name in names}
        pointers = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
        signature = dict.fromkeys(names, "constexpr")
        aligned = {}
        for i, argument in enumerate(arguments):
            is_tensor = isinstance(argument, torch.Tensor)
            signature[names[i]] = pointers[argument.dtype] if is_tensor else "i32"
            # Declare the alignment that Triton's launcher would derive from these arguments.
            if is_tensor or argument % 16 == 0:
                aligned[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self._kernel, signature=signature, constexprs=constants, attrs=aligned)
        launch = {name: value for name, value in options.items() if name not in names}
        self.compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)


@pytest.mark.campaign
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing")
def test_compiles_for_hopper(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler rejects some code that the interpreter accepts. The vocabularies are Llama 3's and an odd one."""
    if ALONE not in os.environ:
        # This test runs in its own process, because a process that has interpreted kernels can no longer compile them.
        test = f"{__file__}::{request.node.name}"
        command = [sys.executable, "-m", "pytest", "-m", "campaign", "-p", "no:cacheprovider", "--noconftest", test]
        done = subprocess.run(command, env={**os.environ, ALONE: "1"}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        return
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module = importlib.import_module("loramux.kernels.gpu.sampling")
    maxima, choose = CompiledForHopper(module.group_maxima), CompiledForHopper(module.choose_tokens)
    monkeypatch.setattr(module, "group_maxima", maxima)
    monkeypatch.setattr(module, "choose_tokens", choose)

    def launch(vocab_size: int, dtype: torch.dtype, *, all_greedy: bool) -> None:
        real = torch.empty(64, device="meta")
        whole = real.to(torch.int32)
        logits = torch.empty(64, vocab_size, dtype=dtype, device="meta")
        module.sample_tokens(logits, real, whole, real, real, real, whole, all_greedy=all_greedy)

    launch(128_256, torch.float32, all_greedy=False)
    # Logits are read 16 bytes at a time, and a row's next blocks are loaded while the current one is processed.
    assert "ld.global.v4.b32" in maxima.compiled.asm["ptx"]
    assert "cp.async.cg.shared.global" in choose.compiled.asm["ptx"]
    launch(128_256, torch.float32, all_greedy=True)
    launch(1025, torch.bfloat16, all_greedy=False)


@pytest.mark.campaign
@pytest.mark.parametrize("spread", [0.3, 3.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("settings", RESTRICTIONS.values(), ids=RESTRICTIONS.keys())
def test_real_vocabulary_matches_the_specification(settings: Settings, spread: float, real_tiles: None) -> None:
    logits = torch.randn(3, 128_256) * spread
    rows = [settings] * 3
    uniform = torch.rand(3)
    chosen, specified = run_kernel(logits, rows, uniform), run_reference(logits, rows, uniform)
    for found, expected, row in zip(chosen, specified, logits, strict=True):
        running = kept_weights(row[None], *columns([settings]))[0].cumsum(0)
        # With a vocabulary this large, some draws are within rounding of a border.
        assert abs(running[found] - running[expected]) <= EDGE * running[-1]
