"""The layout of a quantised weight on a CPU: panels of 32 outputs, divided into groups of inputs.

A panel stores its groups one after another. Each group contains everything that a product reads:

- the scales of the 32 outputs, float16 or float32 (`code_groups.py`);
- their minima, float16 or float32, if the weight has any;
- the codes of each pair of inputs. 8-bit codes take 64 bytes, `[output, input of the pair]`. 4-bit codes take 32 bytes,
  whose lower four bits belong to outputs `[0, 16)` and whose upper four bits belong to outputs `[16, 32)`. Each run of
  16 outputs is in the order `INTERLEAVED` if the codes are not looked up.

A product therefore reads a panel sequentially, and the weight is kept only once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.kernels.cpu.instructions.integer_blocks import HAS_BYTE_TABLES, INTERLEAVED, OUTPUTS
from loramux.kernels.cpu.linear.code_groups import groups_of
from loramux.kernels.quantized import INT4, INT8, QuantizedWeight

BLOCKS = (128, 64, 32, 16)
"""Possible numbers of inputs in a block, in descending order. The products of a block are summed as integers."""

PADDED_TO = 64
"""A single group is padded to a multiple of this many inputs. With a multiple of 128, there would be half as many
blocks, but reading up to 64 more inputs takes longer.
"""

LEAST_LIMIT = 8191
"""Smallest acceptable `limit`. A block's largest input is then rounded at least 32 times as precisely as in
bfloat16.
"""

CODEBOOK_FORMS = (INT8, INT4, -INT4, INT4**3)
"""One codebook of each form: 8-bit integers, and 4-bit codes of consecutive, other small, and large integers.

The warm-up compiles the products with these codebooks. Every other codebook has one of these forms, and its products
need no other code. The CPU determines which forms have tables of the same dtype, and therefore the same code.
"""

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class CodePanels:
    """A quantised weight in panels.

    `x` is rounded to integers in `[-limit, limit]`, so no sum over the `block` inputs of a block can overflow. `table`
    contains the integers of 4-bit codes and is None for 8 bits. If its dtype is np.uint8, it contains only the number
    to subtract from each code, and outputs are in the order `INTERLEAVED`. `scale_bytes` and
    `minimum_bytes` are the sizes of a scale and of a minimum: 2 or 4, or 0 without minima.
    """

    panels: npt.NDArray[np.uint8]
    table: npt.NDArray[Any] | None
    num_panels: int
    num_groups: int
    group: int
    block: int
    scale_bytes: int
    minimum_bytes: int
    limit: int
    fits_tiles: bool
    """True if all integers fit into 8 bits, as products with AMX or with an 8-bit `x` require."""

    @property
    def has_plain_codes(self) -> bool:
        """True if 4-bit codes represent consecutive integers, which this CPU multiplies without looking them up."""
        return self.table is not None and self.table.dtype == np.uint8


def pack_codes(weight: QuantizedWeight) -> CodePanels | None:
    """Lay out a weight, or return None if its products cannot be computed in integers.

    Integer products are impossible for an 8-bit codebook whose values are not 8-bit integers times a unit (such as
    FP8), and for several groups whose size is not a multiple of 16 inputs.
    """
    groups = groups_of(weight)
    if groups is None:
        return None
    integers, num_groups = groups.integers, weight.scales.shape[1]
    largest = int(np.abs(integers).max())
    # A single group is padded with inputs of 0.
    group = weight.group if num_groups > 1 else weight.in_features + -weight.in_features % PADDED_TO
    limits = {block: min(32767, _INT32_MAX // (block * largest)) for block in BLOCKS if group % block == 0}
    block = next((block for block, limit in limits.items() if limit >= LEAST_LIMIT), None)
    if block is None:
        return None
    num_panels = -(-weight.out_features // OUTPUTS)
    table = None
    parts = [_by_group(values, num_panels) for values in (groups.scales, groups.minima) if values is not None]
    if weight.bits == 8:
        parts.append(
            _pairs_of_8_bits(integers.astype(np.int8).view(np.uint8)[weight.codes], num_panels, num_groups, group)
        )
    else:
        table = _table(integers)
        parts.append(_pairs_of_4_bits(weight.codes, num_panels, num_groups, group, table.dtype == np.uint8))
    return CodePanels(
        panels=np.concatenate(parts, axis=2).reshape(-1),
        table=table,
        num_panels=num_panels,
        num_groups=num_groups,
        group=group,
        block=block,
        scale_bytes=groups.scales.itemsize,
        minimum_bytes=0 if groups.minima is None else groups.minima.itemsize,
        limit=limits[block],
        fits_tiles=weight.bits == 8 or bool(np.abs(integers).max() <= 127),
    )


def widened(packed: CodePanels, scale_bytes: int, minimum_bytes: int) -> CodePanels:
    """The same weight with scales and minima of at least their sizes so far. Minima that it lacks become 0.

    `packed.panels` may contain the panels of several weights.
    """
    if (packed.scale_bytes, packed.minimum_bytes) == (scale_bytes, minimum_bytes):
        return packed
    code_bytes = OUTPUTS * packed.group // (1 if packed.table is None else 2)
    begin = OUTPUTS * packed.scale_bytes
    end = begin + OUTPUTS * packed.minimum_bytes
    groups = packed.panels.reshape(-1, end + code_bytes)
    scales = _widened(groups[:, :begin], packed.scale_bytes, scale_bytes)
    minima = _widened(groups[:, begin:end], packed.minimum_bytes, minimum_bytes)
    panels = np.concatenate([scales, minima, groups[:, end:]], axis=1).reshape(-1)
    return replace(packed, panels=panels, scale_bytes=scale_bytes, minimum_bytes=minimum_bytes)


def _widened(values: npt.NDArray[np.uint8], itemsize: int, wanted: int) -> npt.NDArray[np.uint8]:
    """The bytes of each group's 32 values in another size."""
    if itemsize == wanted:
        return values
    if itemsize == 0:
        return np.zeros((len(values), OUTPUTS * wanted), np.uint8)
    return np.ascontiguousarray(values).view(np.float16).astype(np.float32).view(np.uint8)


def _table(integers: npt.NDArray[np.int16]) -> npt.NDArray[Any]:
    """`CodePanels.table` for the integers of 4-bit codes."""
    if HAS_BYTE_TABLES and -255 <= integers[0] <= 0 and np.array_equal(integers, integers[0] + np.arange(16)):
        return (-integers[:1]).astype(np.uint8)
    is_byte = HAS_BYTE_TABLES and np.abs(integers).max() <= 127
    return integers.astype(np.int8 if is_byte else np.int16)


def _by_group(values: npt.NDArray[Any], num_panels: int) -> npt.NDArray[np.uint8]:
    """The bytes of `[out_features, num_groups]` values, as `[num_panels, num_groups, bytes of 32 outputs]`.

    Missing outputs are 0.
    """
    num_groups = values.shape[1]
    padded = np.zeros((num_panels * OUTPUTS, num_groups), values.dtype)
    padded[: values.shape[0]] = values
    grouped = padded.reshape(num_panels, OUTPUTS, num_groups).swapaxes(1, 2)
    return np.ascontiguousarray(grouped).view(np.uint8)


def _pairs_of_8_bits(
    codes: npt.NDArray[np.uint8], num_panels: int, num_groups: int, group: int
) -> npt.NDArray[np.uint8]:
    """The codes of each pair of inputs, `[num_panels, num_groups, bytes]`. Missing codes are 0."""
    padded = np.zeros((num_panels * OUTPUTS, num_groups * group), np.uint8)
    padded[: codes.shape[0], : codes.shape[1]] = codes
    pairs = padded.reshape(num_panels, OUTPUTS, num_groups, group // 2, 2)
    return pairs.transpose(0, 2, 3, 1, 4).reshape(num_panels, num_groups, -1)


def _pairs_of_4_bits(
    codes: npt.NDArray[np.uint8], num_panels: int, num_groups: int, group: int, is_interleaved: bool
) -> npt.NDArray[np.uint8]:
    """The codes of each pair of inputs, `[num_panels, num_groups, bytes]`. Missing codes are 0."""
    half = OUTPUTS // 2
    padded = np.zeros((num_panels * OUTPUTS, num_groups * group // 2), np.uint8)
    padded[: codes.shape[0], : codes.shape[1]] = codes
    pairs = padded.reshape(num_panels, OUTPUTS, num_groups, group // 2).transpose(0, 2, 3, 1)
    first, second = pairs[..., :half], pairs[..., half:]
    if is_interleaved:
        first, second = first[..., INTERLEAVED], second[..., INTERLEAVED]
    # A byte of `codes` belongs to two inputs of one output; a byte of a panel belongs to one input of two outputs.
    even = first & 15 | second << 4
    odd = first >> 4 | second & 240
    return np.stack([even, odd], axis=-1).reshape(num_panels, num_groups, -1)
