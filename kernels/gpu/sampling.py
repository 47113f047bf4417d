"""Samples each row's next token on a GPU: two launches, no sort, and no host synchronization.

The first launch reads all logits once, across the whole GPU, and stores the maximum of each group of 128. The second
runs one program per row. For a greedy choice, the program reads these maxima and one group. For a random choice, it
reads its row, by then in the L2 cache, a few more times. The group maxima bound the tokens that top_k and top_p can
keep. The exact threshold is found among candidates that fit in registers. `reference/sampling.py` is the specification.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634

GROUP = 128
"""Number of logits that share one stored maximum."""

GROUPS_PER_PROGRAM = 32
"""Groups per program of the first launch: 16 KiB of float32."""

BLOCK = 4096
"""Number of a row's logits that the second launch reads at a time."""

MAX_CANDIDATES = 8192
"""Maximum number of tokens to search in registers. Larger searches are first narrowed by passes over the row."""

_INF_BITS = tl.constexpr(0x7F800000)
_NO_KEY = tl.constexpr(0x7FFFFFFF)
"""Key for entries that are not tokens. It is larger than the key of any distance."""

_LEAST_TEMPERATURE = tl.constexpr(1e-30)
_NUM_HALVINGS = tl.constexpr(16)
_EXPONENT_STEP = tl.constexpr(1 << 23)


def sampling_workspace(num_rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """float32 scratch for `sample_tokens` of up to `num_rows` rows. Its contents between calls do not matter."""
    return torch.empty((num_rows, _num_groups(vocab_size) + MAX_CANDIDATES), dtype=torch.float32, device=device)


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    out_tokens: torch.Tensor,
    workspace: torch.Tensor | None = None,
    *,
    all_greedy: bool = False,
) -> None:
    """Write each row's token to `out_tokens`, or -1 if any of the row's logits is not finite.

    With `d = max(logits) - logits` in float32 and `weight = exp(-d / temperature)`, for each row:

    - `temperature == 0`: the first index of the largest logit; the other settings are ignored.
    - otherwise, tokens with `d <= t` and `weight >= min_p` are kept, where `t` is the smallest distance within which
      there are at least `top_k` tokens or at least the share `top_p` of the total weight of the tokens that `top_k`
      keeps. The choice is the first index, in vocabulary order, at which the running sum of the kept weights exceeds
      `uniform` times their sum. The chosen token's weight is never 0.

    All tokens at distance `t` are kept, so top_k can keep more than k tokens if logits are equal. The CPU's sampler
    keeps k, and if they are few, it draws in order of likelihood. A seed therefore reproduces its tokens only on the
    same kind of device. A row's choice depends on that row alone.

    `logits` `[S, V]` float32, float16 or bfloat16, rows at any stride, columns contiguous; `temperature`, `top_p` (1:
    off, 0: only the most likely), `min_p` (0: off, at most 1), `uniform` (in [0, 1)) float32 `[S]`; `top_k` (0: off)
    int32 `[S]`; `out_tokens` int32 `[S]`. A temperature in (0, 1e-30) counts as 1e-30. `workspace`, from
    `sampling_workspace` for at least S rows and this V, is allocated if missing. `all_greedy` guarantees that every
    temperature is 0; in that case, `temperature` and the settings after it are not read.

    Nothing is copied to the host, and the launches depend only on shapes and `all_greedy`, so a CUDA graph can capture
    them. Using group maxima to bound the k-th largest element follows "Dr. Top-k" (Gaihre et al., 2021).
    """
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    if workspace is None:
        workspace = sampling_workspace(num_rows, vocab_size, logits.device)
    num_groups = _num_groups(vocab_size)
    assert logits.stride(1) == 1
    assert all(one.shape == (num_rows,) and one.is_contiguous() for one in (temperature, top_k, top_p, min_p, uniform))
    assert top_k.dtype == out_tokens.dtype == torch.int32
    assert all(one.dtype == torch.float32 for one in (temperature, top_p, min_p, uniform, workspace))
    assert out_tokens.shape == (num_rows,)
    assert out_tokens.is_contiguous()
    assert workspace.shape[0] >= num_rows
    assert workspace.shape[1] == num_groups + MAX_CANDIDATES
    assert workspace.is_contiguous()
    group_maxima[(num_rows, triton.cdiv(num_groups, GROUPS_PER_PROGRAM))](
        logits, workspace, logits.stride(0), workspace.stride(0),
        V=vocab_size, NUM_GROUPS=num_groups, GROUP=GROUP, GROUPS=GROUPS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    choose_tokens[(num_rows,)](
        logits, workspace, temperature, top_k, top_p, min_p, uniform, out_tokens,
        logits.stride(0), workspace.stride(0),
        V=vocab_size, NUM_GROUPS=num_groups, GROUP=GROUP, GROUPS=max(16, triton.next_power_of_2(num_groups)),
        BLOCK=BLOCK, BLOCKS=max(16, triton.next_power_of_2(triton.cdiv(vocab_size, BLOCK))),
        CANDIDATES=MAX_CANDIDATES, ALL_GREEDY=all_greedy, LOG2_E=LOG2_E, num_warps=4 if all_greedy else 16,
    )  # fmt: skip


def _num_groups(vocab_size: int) -> int:
    return triton.cdiv(vocab_size, GROUP)


@triton.jit
def group_maxima(
    logits_ptr: tl.tensor,
    workspace_ptr: tl.tensor,
    logits_stride: tl.tensor,
    workspace_stride: tl.tensor,
    V: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """The largest logit of each group, or infinity if the group has a non-finite logit.

    The grid is `(S, groups / GROUPS)`.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_column = column < V
    x = tl.load(logits_ptr + row * logits_stride + column, mask=is_column, other=0.0).to(tl.float32)
    # Comparisons with NaN are false, so NaN counts as non-finite.
    is_finite = tl.abs(x) < float("inf")
    x = tl.where(is_column, tl.where(is_finite, x, float("inf")), float("-inf"))
    tl.store(workspace_ptr + row * workspace_stride + group, tl.max(x, 1), mask=group < NUM_GROUPS)


@triton.jit
def choose_tokens(
    logits_ptr: tl.tensor,
    workspace_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    out_ptr: tl.tensor,
    logits_stride: tl.tensor,
    workspace_stride: tl.tensor,
    V: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    LOG2_E: tl.constexpr,
) -> None:
    """Choose one row's token. The grid is `(S,)`."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    workspace_ptr += row * workspace_stride
    group = tl.arange(0, GROUPS)
    maxima = tl.load(workspace_ptr + group, mask=group < NUM_GROUPS, other=float("-inf"))
    largest = tl.max(maxima, 0)
    if largest == float("inf"):
        tl.store(out_ptr + row, -1)
        return
    if ALL_GREEDY:
        token = first_largest(logits_ptr, maxima, largest, V, GROUP, GROUPS)
    else:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            sharpness = LOG2_E / tl.maximum(temperature, _LEAST_TEMPERATURE)
            top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
            threshold = tl.full((), _INF_BITS, tl.int32)
            if (top_k > 0) | (top_p < 1):
                threshold = find_threshold(
                    logits_ptr, workspace_ptr + NUM_GROUPS, maxima, largest, sharpness, top_k, top_p,
                    V, NUM_GROUPS, GROUPS, BLOCK, CANDIDATES,
                )  # fmt: skip
            min_p, uniform = tl.load(min_p_ptr + row), tl.load(uniform_ptr + row)
            token = draw(logits_ptr, largest, sharpness, threshold, min_p, uniform, V, BLOCK, BLOCKS)
        else:
            token = first_largest(logits_ptr, maxima, largest, V, GROUP, GROUPS)
    tl.store(out_ptr + row, token)


@triton.jit
def first_largest(
    logits_ptr: tl.tensor,
    maxima: tl.tensor,
    largest: tl.tensor,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """The first index of the largest logit. It is in the first group with this maximum."""
    group = tl.min(tl.where(maxima == largest, tl.arange(0, GROUPS), GROUPS), 0)
    column = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(logits_ptr + column, mask=column < V, other=float("-inf")).to(tl.float32)
    return tl.min(tl.where(x == largest, column, V), 0)


@triton.jit
def distance_keys(x: tl.tensor, largest: tl.tensor, is_token: tl.tensor) -> tl.tensor:
    """`largest - x` as float32 bits, which sort like the numbers themselves because none is negative.

    The absolute value removes the sign of `-0.0 - 0.0`. Entries that are not tokens get a key above all others.
    """
    return tl.where(is_token, tl.abs(largest - x).to(tl.int32, bitcast=True), _NO_KEY)


@triton.jit
def weights_of(keys: tl.tensor, sharpness: tl.tensor) -> tl.tensor:
    """`exp(-distance / temperature)`, 1 for the most likely token. `sharpness` is log2(e) / temperature."""
    return tl.exp2(-keys.to(tl.float32, bitcast=True) * sharpness)


@triton.jit
def read_keys(
    logits_ptr: tl.tensor, largest: tl.tensor, block: tl.tensor, V: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The keys of one block of the row."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + column, mask=column < V, other=0.0).to(tl.float32)
    return distance_keys(x, largest, column < V)


@triton.jit
def tally(
    logits_ptr: tl.tensor,
    largest: tl.tensor,
    sharpness: tl.tensor,
    bound: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The number of tokens with keys up to `bound`, and the sum of their weights.

    Weights are always added in the same order, so the sum never decreases as the bound rises.
    """
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for block in tl.range(0, (V + BLOCK - 1) // BLOCK, num_stages=4):
        keys = read_keys(logits_ptr, largest, block, V, BLOCK)
        is_within = keys <= bound
        count += is_within.to(tl.int32)
        mass += tl.where(is_within, weights_of(keys, sharpness), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def search(
    keys: tl.tensor,
    weights: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    k: tl.tensor,
    mass: tl.tensor,
) -> tl.tensor:
    """The smallest bound in `(low, high)` that covers `k` tokens or a total weight of `mass`, else `high`.

    Makes at most 31 passes over `keys`, which stay in registers.
    """
    while low + 1 < high:
        middle = low + (high - low) // 2
        is_within = keys <= middle
        num_within = tl.sum(is_within.to(tl.int32), 0)
        mass_within = tl.sum(tl.where(is_within, weights, 0.0), 0)
        is_enough = (num_within >= k) | (mass_within >= mass)
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle)
    return high


@triton.jit
def find_threshold(
    logits_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    maxima: tl.tensor,
    largest: tl.tensor,
    sharpness: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    V: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tl.tensor:
    """The smallest key that covers `top_k` tokens, or a share `top_p` of the total weight of the tokens up to that key.

    For each of the two, three steps narrow the half-open range `(low, high]` that contains the answer: bounds from the
    group maxima, passes over the row that halve the range until it contains only a few tokens, and a search among those
    tokens.
    """
    # 2^-151 is 0 in float32, so it does not matter whether tokens beyond this bound are kept.
    high = (151.0 / sharpness).to(tl.int32, bitcast=True)
    is_group = tl.arange(0, GROUPS) < NUM_GROUPS
    group_keys = distance_keys(maxima, largest, is_group)
    group_weights = tl.where(is_group, weights_of(group_keys, sharpness), 0.0)
    # A loop, because the code would be twice as long without it.
    for is_share in tl.range(tl.where(top_k > 0, 0, 1), tl.where(top_p < 1, 2, 1)):
        low, count_low, mass_low = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float32)
        k, mass = top_k, tl.full((), float("inf"), tl.float32)
        # An upper bound on the number of tokens with keys up to `high`.
        count_high = tl.full((), V, tl.int32)
        if is_share == 1:
            count_high, total = tally(logits_ptr, largest, sharpness, high, V, BLOCK)
            k, mass = tl.full((), _NO_KEY, tl.int32), top_p * total
            # The total weight of all tokens lighter than `share` is less than half of the weight that top_p excludes,
            # so the bound excludes them. The half and the factor 1.001 leave far more room than rounding errors need.
            share = (1 - tl.maximum(top_p, 0.0)) * total / (2 * V)
            high = tl.minimum(high, (-tl.log2(share) / sharpness * 1.001).to(tl.int32, bitcast=True))
        if count_high > CANDIDATES:
            # A bound covers at least one token of each group whose maximum is within the bound.
            high = search(group_keys, group_weights, low, high, k, mass)
            if high > 0:
                count_high, _ = tally(logits_ptr, largest, sharpness, high, V, BLOCK)
        num_passes = 0
        while (count_high - count_low > CANDIDATES) & (low + 1 < high):
            middle = low + (high - low) // 2
            # The midpoint of the bit patterns is a distance near 0, where there are few tokens. Therefore, halve the
            # distance itself at first.
            if num_passes < _NUM_HALVINGS:
                middle = tl.maximum(middle, high - _EXPONENT_STEP)
            num_within, mass_within = tally(logits_ptr, largest, sharpness, middle, V, BLOCK)
            is_enough = (num_within >= k) | (mass_within >= mass)
            high = tl.where(is_enough, middle, high)
            count_high = tl.where(is_enough, num_within, count_high)
            low = tl.where(is_enough, low, middle)
            count_low = tl.where(is_enough, count_low, num_within)
            mass_low = tl.where(is_enough, mass_low, mass_within)
            num_passes += 1
        if low + 1 < high:
            # The first barrier keeps candidates of the loop's first round until all threads have read them. After the
            # second, each thread can read what the program's other threads have stored.
            tl.debug_barrier()
            num_candidates = collect(logits_ptr, candidates_ptr, largest, low, high, V, BLOCK)
            tl.debug_barrier()
            candidate = tl.arange(0, CANDIDATES)
            is_candidate = candidate < num_candidates
            distances = tl.load(candidates_ptr + candidate, mask=is_candidate, other=0.0)
            keys = tl.where(is_candidate, distances.to(tl.int32, bitcast=True), _NO_KEY)
            weights = tl.where(is_candidate, weights_of(keys, sharpness), 0.0)
            high = search(keys, weights, low, high, k - count_low, mass - mass_low)
    return high


@triton.jit
def collect(
    logits_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    largest: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Store all distances with keys in `(low, high]` contiguously, and return their number."""
    num_stored = tl.full((), 0, tl.int32)
    for block in tl.range(0, (V + BLOCK - 1) // BLOCK, num_stages=4):
        keys = read_keys(logits_ptr, largest, block, V, BLOCK)
        is_inside = (keys > low) & (keys <= high)
        place = num_stored + tl.cumsum(is_inside.to(tl.int32), 0) - 1
        tl.store(candidates_ptr + place, keys.to(tl.float32, bitcast=True), mask=is_inside)
        num_stored += tl.sum(is_inside.to(tl.int32), 0)
    return num_stored


@triton.jit
def read_weights(
    logits_ptr: tl.tensor,
    largest: tl.tensor,
    sharpness: tl.tensor,
    threshold: tl.tensor,
    min_p: tl.tensor,
    block: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The weights of one block of the row, with 0 for tokens that are not kept."""
    keys = read_keys(logits_ptr, largest, block, V, BLOCK)
    weights = weights_of(keys, sharpness)
    return tl.where((keys <= threshold) & (weights >= min_p), weights, 0.0)


@triton.jit
def first_past(weights: tl.tensor, running: tl.tensor, target: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """The first index with a positive weight whose running sum exceeds `target`.

    If, because of rounding, no sum exceeds `target`, this is the last index with a positive weight.
    """
    index = tl.arange(0, SIZE)
    first = tl.min(tl.where((running > target) & (weights > 0), index, SIZE), 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    return tl.minimum(first, last)


@triton.jit
def draw(
    logits_ptr: tl.tensor,
    largest: tl.tensor,
    sharpness: tl.tensor,
    threshold: tl.tensor,
    min_p: tl.tensor,
    uniform: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """Find the block, then the token, at which the running sum of kept weights exceeds `uniform` times their sum."""
    index = tl.arange(0, BLOCKS)
    sums = tl.zeros((BLOCKS,), tl.float32)
    for block in tl.range(0, (V + BLOCK - 1) // BLOCK, num_stages=4):
        weights = read_weights(logits_ptr, largest, sharpness, threshold, min_p, block, V, BLOCK)
        sums = tl.where(index == block, tl.sum(weights, 0), sums)
    running = tl.cumsum(sums, 0)
    target = uniform * tl.sum(tl.where(index == BLOCKS - 1, running, 0.0), 0)
    block = first_past(sums, running, target, BLOCKS)
    before = tl.sum(tl.where(index == block - 1, running, 0.0), 0)
    weights = read_weights(logits_ptr, largest, sharpness, threshold, min_p, block, V, BLOCK)
    return block * BLOCK + first_past(weights, before + tl.cumsum(weights, 0), target, BLOCK)
