"""The last occurrence of an adapter's invocation tokens activates it, in time linear in the prompt's length."""

from __future__ import annotations

import random
import time

import pytest

from loramux.engine.sequences.activation import activation, activations


@pytest.mark.parametrize(
    ("prompt", "tokens", "position"),
    [
        ([5, 6], [5, 6], 0),
        ([1, 5, 6], [5, 6], 1),
        ([5, 6, 1, 2], [5, 6], 0),
        ([1, 5, 6, 2, 5, 6, 3], [5, 6], 4),
        ([5, 5, 5, 5], [5, 5], 2),
        ([7, 5, 7, 5, 7], [7, 5, 7], 2),
        ([1, 5, 6, 5], [5, 6], 1),
        ([0, 256, 0], [256], 1),
        ([55296, 57343, 65536, 262144], [57343, 65536], 1),
        ([1, 2, 3], [5, 6], None),
        ([6, 5], [5, 6], None),
        ([5], [5, 6], None),
        ([1, 5], [5, 6], None),
    ],
    ids=[
        "all", "end", "beginning", "twice", "overlapping", "overlapping itself", "begun again", "zeros", "large ids",
        "never", "reversed", "longer than the prompt", "cut off",
    ],
)  # fmt: skip
def test_last_occurrence_is_found(prompt: list[int], tokens: list[int], position: int | None) -> None:
    assert activation(prompt, tokens) == position


def test_random_prompts_are_searched_like_a_list_of_slices() -> None:
    rng = random.Random(3)
    num_found = 0
    for _ in range(3000):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(40))]
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 5))]
        starts = [start for start in range(len(prompt)) if prompt[start : start + len(tokens)] == tokens]
        assert activation(prompt, tokens) == (starts[-1] if starts else None)
        num_found += bool(starts)
    assert 500 < num_found < 2500


def test_each_prompt_has_its_own_activation() -> None:
    assert activations([[1, 5], [5, 1], [1]], [5]) == (1, 0, None)
    assert activations([[1, 5], [5, 1], [1]], []) == (0, 0, 0)


@pytest.mark.parametrize("tokens", [[5] * 255 + [6], [6] + [5] * 255, [5] * 127 + [6] + [5] * 128])
def test_a_hostile_prompt_is_searched_in_bounded_time(tokens: list[int]) -> None:
    """Comparing the tokens at every position would take 33 million steps here."""
    prompt = [5] * 131_072
    started_s = time.process_time()
    assert activation(prompt, tokens) is None
    assert time.process_time() - started_s < 0.5
