from __future__ import annotations

import pytest

from loramux.engine.sequences.cache_groups import UNLIMITED, CacheLayout, cache_layout, narrow_windows, uneven_layout

GEMMA3_27B = tuple(None if layer % 6 == 5 else 1024 for layer in range(62))
GPT_OSS_20B = (128, None) * 12
STEP = 512


def groups_of(layout: CacheLayout) -> list[tuple[int, int | None, int]]:
    return [(len(group.layers), group.window, group.num_blocks) for group in layout.groups]


@pytest.mark.parametrize(
    ("windows", "max_len", "groups"),
    [
        pytest.param((None,) * 4, 4096, [(4, None, 1)], id="no windows"),
        pytest.param((64,) * 4, 4096, [(4, 64, 1)], id="all windowed"),
        pytest.param(GEMMA3_27B, 131072, [(10, None, 6), (52, 1024, 1)], id="gemma 3 27B"),
        pytest.param(GPT_OSS_20B, 131072, [(12, None, 2), (12, 128, 2)], id="gpt-oss 20B"),
        pytest.param((64,) * 4, 64, [(4, None, 1)], id="contexts within the window"),
        # Unless the numbers of layers divide evenly, separate pages leave some space unused. They are worth it only if
        # contexts are much longer than the window.
        pytest.param(GEMMA3_27B, 1100, [(62, None, 1)], id="contexts little longer than the window"),
    ],
)
def test_windowed_layers_have_pages_of_their_own_if_that_saves_memory(
    windows: tuple[int | None, ...], max_len: int, groups: list[tuple[int, int | None, int]]
) -> None:
    layout = cache_layout(windows, max_len)
    assert groups_of(layout) == groups
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(windows)))


@pytest.mark.parametrize("windows", [(None, None), (64, 64), GEMMA3_27B, GPT_OSS_20B], ids=len)
def test_blocks_of_different_pages_and_layers_do_not_overlap(windows: tuple[int | None, ...]) -> None:
    layout = cache_layout(windows, 131072)
    num_layers = len(windows)
    stride = 1 if layout.has_pages_of_blocks else num_layers
    places = {layout.place(layer): layer for layer in range(num_layers)}
    assert len(places) == num_layers
    for index, group in enumerate(layout.groups):
        taken = [
            block * stride + layer
            for page in range(3)
            for block in layout.blocks(group, page)
            for layer in range(len(group.layers))
        ]
        assert len(taken) == len(set(taken)) <= 3 * num_layers
        assert max(taken) < 3 * num_layers
        assert {places[index, layer] for layer in range(len(group.layers))} == set(group.layers)


@pytest.mark.parametrize(
    ("windows", "num_tokens", "num_pages"),
    [
        pytest.param((None,) * 62, 8192, 512, id="no windows"),
        # 1024 + 16 + 512 tokens, and a page that begins before them.
        pytest.param((1024,) * 62, 8192, 98, id="all windowed"),
        # ceil(8192 / 96) pages, and ceil((1024 + 96 + 512) / 16) + 1.
        pytest.param(GEMMA3_27B, 8192, 86 + 103, id="mixed"),
        pytest.param(GEMMA3_27B, 96, 1 + 6, id="mixed and short"),
    ],
)
def test_sequences_hold_no_more_than_their_windows(
    windows: tuple[int | None, ...], num_tokens: int, num_pages: int
) -> None:
    assert cache_layout(windows, 131072).max_pages(num_tokens, STEP) == num_pages


@pytest.mark.parametrize("windows", [(None,) * 4, (64,) * 4, GEMMA3_27B, GPT_OSS_20B], ids=len)
@pytest.mark.parametrize("num_pages", [-3, 0, 1, 2, 7, 40, 97, 98, 99, 500, 4000])
def test_the_longest_sequence_fits_and_a_longer_one_does_not(windows: tuple[int | None, ...], num_pages: int) -> None:
    layout = cache_layout(windows, 131072)
    longest = layout.max_tokens(num_pages, STEP)
    if longest == UNLIMITED:
        assert layout.max_pages(1 << 40, STEP) <= num_pages
        return
    assert layout.max_pages(max(0, longest), STEP) <= max(0, num_pages)
    assert layout.max_pages(max(0, longest) + 1, STEP) > num_pages


def uneven(pattern: str, num_shared: int, widths: dict[str, int], max_len: int = 131072) -> CacheLayout:
    """Lay out layers `w` (window of 512) and `f` (no window). The last `num_shared` read K and V of earlier layers."""
    num_own = len(pattern) - num_shared
    last = {kind: layer for layer, kind in enumerate(pattern[:num_own])}
    sources = [layer if layer < num_own else last[kind] for layer, kind in enumerate(pattern)]
    windows = narrow_windows([512 if kind == "w" else None for kind in pattern], max_len)
    return uneven_layout(windows, [widths[kind] for kind in pattern], sources)


GEMMA4_E2B = ("wwwwf" * 7, 20, {"w": 256, "f": 512})
GEMMA4_31B = ("wwwwwf" * 10, 0, {"w": 4096, "f": 2048})


@pytest.mark.parametrize(
    ("layout", "groups", "num_used", "shared_tokens"),
    [
        # A page has room for 35 or 70 layers. Eleven blocks of the first group would fit, too.
        pytest.param(uneven(*GEMMA4_E2B), [(3, None, 10), (12, 512, 5)], [30 / 35, 60 / 70], 160, id="gemma 4 E2B"),
        pytest.param(uneven(*GEMMA4_31B), [(10, None, 12), (50, 512, 1)], [1, 50 / 60], 192, id="gemma 4 31B"),
        pytest.param(uneven("ff" * 4, 4, {"f": 64}), [(4, None, 2)], [1], 32, id="one kind"),
        pytest.param(uneven("wf", 0, {"w": 32, "f": 64}, 512), [(1, None, 4), (1, None, 2)], [1, 1], 64, id="short"),
    ],
)
def test_layers_with_small_k_and_v_have_more_tokens_in_a_page(
    layout: CacheLayout, groups: list[tuple[int, int | None, int]], num_used: list[float], shared_tokens: int
) -> None:
    assert groups_of(layout) == groups
    assert layout.shared_tokens == shared_tokens
    assert [len(one.layers) * one.num_blocks / one.page_step for one in layout.groups] == pytest.approx(num_used)
    for group in layout.groups:
        taken = [
            block + layer
            for page in range(3)
            for block in layout.blocks(group, page)
            for layer in range(len(group.layers))
        ]
        assert len(taken) == len(set(taken))
        assert [place // group.page_step for place in taken] == sorted([0, 1, 2] * (len(taken) // 3))
