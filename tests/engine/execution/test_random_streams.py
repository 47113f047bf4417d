from __future__ import annotations

import numpy as np
import pytest

from loramux.engine.execution.sampler import philox, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_matches_the_published_values(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox(np.array([counter] * 2, np.uint64).T, np.array([key] * 2, np.uint64).T)
    assert words.T.tolist() == [list(expected)] * 2


def test_number_depends_only_on_stream_and_position() -> None:
    seeds, places = [3, 2**64 - 1, 3, 2**33], [0, 7, 2**32 + 5, 1]
    together = uniforms(seeds, places)
    alone = [float(uniforms([seed], [place])[0]) for seed, place in zip(seeds, places, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


@pytest.mark.parametrize("axis", ["seeds", "places"])
def test_numbers_are_uniform_and_below_one(axis: str) -> None:
    count = 200_000
    drawn = uniforms(range(count), [5] * count) if axis == "seeds" else uniforms([11] * count, range(count))
    assert drawn.dtype == np.float32
    assert drawn.min() >= 0
    assert drawn.max() < 1
    observed = np.histogram(drawn, 64, (0, 1))[0]
    # The 99.9th percentile of chi-square with 63 degrees of freedom.
    assert ((observed - count / 64) ** 2 / (count / 64)).sum() < 103.4
