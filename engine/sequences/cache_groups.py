"""Groups the layers of a decoder by the size of their K and V, and by how long they need the K and V of a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 16
"""Number of tokens in a block. Attention reads the K and V of a block through one entry of a sequence's table."""

MAX_BLOCKS = 16
"""Maximum number of blocks in a page. Cached prefixes consist of whole pages, so larger pages leave more of a prefix
uncached.
"""

UNLIMITED = 1 << 62
"""A number of tokens larger than any other limit."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep K and V of all tokens or, with a `window`, of the tokens that later tokens can still see.

    A page of the pool contains `num_blocks` blocks, each with K and V of `block_tokens` tokens in these layers. The
    numbers of the first blocks of two consecutive pages differ by `page_step`.
    """

    layers: tuple[int, ...]
    window: int | None
    num_blocks: int = 1
    block_tokens: int = BLOCK_TOKENS
    page_step: int = 1

    @property
    def page_tokens(self) -> int:
        return self.num_blocks * self.block_tokens

    def first_seen(self, position: int) -> int:
        """The first position that a token at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How K and V of all `num_layers` layers are stored in pages.

    If one group has all layers, a page contains one block. With two groups, a page contains blocks of one group only,
    so that sequences can free the pages of windowed layers and keep the other pages. In a hybrid decoder, the layers
    with attention form the only group, and each sequence also has `num_state_pages` pages for the state of the other
    layers. Layers that read the K and V of another layer are in no group.
    """

    num_layers: int
    groups: tuple[CacheGroup, ...]
    num_state_pages: int = 0

    @property
    def block_tokens(self) -> int:
        return self.groups[0].block_tokens

    @property
    def has_pages_of_blocks(self) -> bool:
        """True if a block has K and V of only some layers. False if each block fills a whole page."""
        return any(group.page_step > 1 for group in self.groups)

    @property
    def shared_tokens(self) -> int:
        """The length of each cached prefix, in tokens, is a multiple of this number, so it fills whole pages of every
        group.
        """
        return math.lcm(*(group.page_tokens for group in self.groups))

    def blocks(self, group: CacheGroup, page: int) -> range:
        """The numbers of a page's blocks. If a block is a whole page, it has the page's number. Otherwise, its number
        is the index of its first layer, counted over all pages.
        """
        first, step = page * group.page_step, len(group.layers)
        return range(first, first + group.num_blocks * step, step)

    def place(self, layer: int) -> tuple[int, int]:
        """The index of a layer's group, and the layer's index within the group."""
        index = next(index for index, group in enumerate(self.groups) if layer in group.layers)
        return index, self.groups[index].layers.index(layer)

    def max_kept(self, group: CacheGroup, step_tokens: int) -> int:
        """Maximum number of tokens for which a sequence has pages in a group. See `KvPages` for `step_tokens`."""
        if group.window is None:
            return UNLIMITED
        # The range of tokens may begin and end within a page.
        num_pages = 1 - (-(group.window + self.shared_tokens + step_tokens) // group.page_tokens)
        return num_pages * group.page_tokens

    def num_tokens(self, num_pages: int) -> int:
        """Number of tokens whose K and V of all layers fit into `num_pages` pages. Sequences that outgrow a window need
        less, and the states of hybrid decoders take pages, too.
        """
        return int(num_pages / sum(1 / group.page_tokens for group in self.groups))

    def max_pages(self, num_tokens: int, step_tokens: int) -> int:
        """Maximum number of pages that a sequence of up to `num_tokens` tokens holds at any time."""
        kept = ((min(num_tokens, self.max_kept(group, step_tokens)), group) for group in self.groups)
        return self.num_state_pages + sum(-(-count // group.page_tokens) for count, group in kept)

    def max_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Maximum number of blocks plus state pages that a sequence of up to `num_tokens` tokens has at any time."""
        kept = (min(num_tokens, self.max_kept(group, step_tokens)) for group in self.groups)
        pages = ((-(-tokens // group.page_tokens), group) for tokens, group in zip(kept, self.groups, strict=True))
        return self.num_state_pages + sum(num_pages * group.num_blocks for num_pages, group in pages)

    def max_tokens(self, num_pages: int, step_tokens: int) -> int:
        """The length of the longest sequence that never holds more than `num_pages` pages."""
        if len(self.groups) == 1 and self.groups[0].window is None:
            return (num_pages - self.num_state_pages) * self.groups[0].page_tokens
        longest = max(0, num_pages) * max(group.page_tokens for group in self.groups)
        if self.max_pages(longest + 1, step_tokens) <= num_pages:
            return UNLIMITED
        # The number of pages never decreases as a sequence grows, so search for the largest number of blocks that fits.
        low, high = 0, longest // self.block_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.max_pages(middle * self.block_tokens, step_tokens) <= num_pages:
                low = middle
            else:
                high = middle - 1
        return low * self.block_tokens


def narrow_windows(windows: Sequence[int | None], max_len: int) -> tuple[int | None, ...]:
    """Each layer's window, or None if the layer sees every token of a context of `max_len` tokens."""
    return tuple(window if window is not None and window < max_len else None for window in windows)


def cache_layout(windows: Sequence[int | None], max_len: int, block_tokens: int = BLOCK_TOKENS) -> CacheLayout:
    """The layout for layers with these windows whose K and V all have the same size, for contexts of up to `max_len`
    tokens.

    Windowed layers form a separate group if the longest sequence then holds fewer pages.
    """
    num_layers = len(windows)
    narrow = narrow_windows(windows, max_len)
    windowed = tuple(layer for layer in range(num_layers) if narrow[layer] is not None)
    others = tuple(layer for layer in range(num_layers) if narrow[layer] is None)
    if not windowed or not others:
        return CacheLayout(num_layers, (CacheGroup(windowed or others, narrow[0], block_tokens=block_tokens),))

    def group(layers: tuple[int, ...]) -> CacheGroup:
        num_blocks = min(MAX_BLOCKS, num_layers // len(layers))
        return CacheGroup(layers, narrow[layers[0]], num_blocks, block_tokens, num_layers)

    apart = CacheLayout(num_layers, (group(others), group(windowed)))
    together = CacheLayout(num_layers, (CacheGroup(tuple(range(num_layers)), None, block_tokens=block_tokens),))
    saves = apart.max_pages(max_len, 0) < together.max_pages(max_len, 0)
    return apart if saves else together


def hybrid_layout(num_layers: int, attention_layers: tuple[int, ...], num_state_pages: int) -> CacheLayout:
    """The layout for a decoder in which only some layers have attention."""
    num_blocks = min(MAX_BLOCKS, num_layers // len(attention_layers))
    group = CacheGroup(attention_layers, None, num_blocks, page_step=num_layers)
    return CacheLayout(num_layers, (group,), num_state_pages)


def uneven_layout(windows: Sequence[int | None], widths: Sequence[int], sources: Sequence[int]) -> CacheLayout:
    """The layout for layers whose K and V differ in size, or that read the K and V of another layer.

    `windows` contains None for windows that cover every context. `widths` contains the number of elements of a token's
    K in each layer. The largest width must be a multiple of every width, and there must be at most two combinations of
    width and window. A layer reads the K and V of layer `sources[layer]`, which is the layer itself unless it computes
    no K and V.
    """
    num_layers = len(windows)
    kinds: dict[tuple[int, int | None], list[int]] = {}
    for layer in sorted(set(sources)):
        kinds.setdefault((widths[layer], windows[layer]), []).append(layer)
    # Number of blocks of a single layer that fit in a page, for each kind of layer.
    places = [num_layers * max(widths) // width for width, _ in kinds]
    counts = [min(MAX_BLOCKS, count // len(layers)) for count, layers in zip(places, kinds.values(), strict=True)]
    # Make all counts multiples of the smallest, so that sequences can share short prefixes.
    counts = [count - count % min(counts) for count in counts]
    groups = [
        CacheGroup(tuple(layers), window, num_blocks, page_step=num_places)
        for (_, window), layers, num_blocks, num_places in zip(kinds, kinds.values(), counts, places, strict=True)
    ]
    return CacheLayout(num_layers, tuple(sorted(groups, key=lambda group: group.window is not None)))
