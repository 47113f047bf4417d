"""PTX that decodes the codes of weights to 16-bit values, with fewer instructions than Triton generates.

Each text reads one register with two or four bytes, and writes registers with two values each. `prmt` selects four of
eight bytes (PTX ISA, "Integer Arithmetic Instructions: prmt").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loramux.kernels.gpu.linear.code_layout import E4M3_FACTOR
from loramux.kernels.quantized import CodeKind

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Decoding:
    """PTX texts, one for each code in a byte. A text reads `pack` bytes.

    A code of kind INTEGERS is decoded to `code + offset`. Codes of other kinds are decoded to the values that
    `values_of` returns.
    """

    texts: tuple[str, ...]
    pack: int = 4
    offset: int = 0


def decoding_of(kind: CodeKind, bits: int, table: Sequence[float] | None, dtype: torch.dtype) -> Decoding | None:
    """The PTX that decodes such codes to `dtype`, or None if this file has none."""
    if dtype not in DTYPES:
        return None
    if kind is CodeKind.TABLE:
        assert table is not None
        return Decoding(_of_halves("mov.b32 b, $2;", _look_up(table, dtype), "b, s, m, t, p, q"))
    if kind is CodeKind.E4M3:
        return Decoding((_text(_e4m3(dtype), "b, m, f, z"),), 2)
    if bits == 8:
        return None
    # The lowest bit of a value in `[base, 2 * base)` is worth 1, so the lowest bits of `base + code` are the code.
    base = {torch.bfloat16: 128, torch.float16: 1024}[dtype]
    pair = f"prmt.b32 $0, b, {_bits([base], dtype)[0] >> 8:#x}, 0x4140;"
    return Decoding(_of_halves("cvt.u32.u16 b, $1;", (pair,), "b"), 2, base)


def _look_up(table: Sequence[float], dtype: torch.dtype) -> tuple[str, ...]:
    """Look up each of a value's two bytes by the lower three bits of the code, in both halves of `table`.

    The highest bit of the code then selects one of the halves.
    """
    lines = [
        # The lowest 16 bits of s are the four codes, without their highest bits.
        "shr.u32 s, b, 4;",
        "or.b32 s, s, b;",
        "prmt.b32 s, s, 0, 0x20;",
        "and.b32 s, s, 0x7777;",
        # Each byte of m repeats the highest bit of its code.
        "shl.b32 m, b, 4;",
        "prmt.b32 m, m, 0, 0xBA98;",
    ]
    bits = _bits(table, dtype)
    for name, shift in (("p", 0), ("q", 8)):
        data = bytes(value >> shift & 0xFF for value in bits)
        words = [f"{int.from_bytes(data[at : at + 4], 'little'):#x}" for at in range(0, 16, 4)]
        lines += [
            f"prmt.b32 {name}, {words[0]}, {words[1]}, s;",
            f"prmt.b32 t, {words[2]}, {words[3]}, s;",
            # m ? t : the value from the first half.
            f"lop3.b32 {name}, {name}, t, m, 0xD8;",
        ]
    return (*lines, "prmt.b32 $0, p, q, 0x5140;", "prmt.b32 $1, p, q, 0x7362;")


def _e4m3(dtype: torch.dtype) -> tuple[str, ...]:
    """Decode E4M3 numbers, divided by `E4M3_FACTOR`.

    A float16 exponent has one more bit than an E4M3 exponent, so the bits of an E4M3 number, used as the sign and the
    upper bits of a float16, represent the number divided by 2**8. A bfloat16 exponent has four more bits, so there they
    represent the number divided by 2**120. bfloat16 products keep subnormal numbers.
    """
    shift, mask = (1, "0x3F803F80") if dtype is torch.float16 else (4, "0x07F007F0")
    lines = (
        "cvt.u32.u16 b, $1;",
        "prmt.b32 b, b, 0, 0x1404;",
        f"shr.u32 m, b, {shift};",
        f"and.b32 m, m, {mask};",
        # Add the sign: b & 0x80008000 | m.
        "lop3.b32 $0, b, 0x80008000, m, 0xEA;",
    )
    if dtype is torch.float16:
        return lines
    factor = _bits([2.0**120 / E4M3_FACTOR], torch.bfloat16)[0]
    factors = (f"mov.b32 f, {factor << 16 | factor:#x};", "mov.b32 z, 0x80008000;")
    return (*lines, *factors, "fma.rn.bf16x2 $0, $0, f, z;")


def _of_halves(load: str, lines: Sequence[str], registers: str) -> tuple[str, str]:
    """Texts for the codes in the lower and in the upper four bits. `lines` read one code from each byte of `b`."""
    return (
        _text((load, "and.b32 b, b, 0x0F0F0F0F;", *lines), registers),
        _text((load, "shr.u32 b, b, 4;", "and.b32 b, b, 0x0F0F0F0F;", *lines), registers),
    )


def _text(lines: Sequence[str], registers: str = "") -> str:
    return "\n".join(("{", *([f".reg .b32 {registers};"] if registers else []), *lines, "}"))


def _bits(values: Sequence[float], dtype: torch.dtype) -> list[int]:
    return [bits & 0xFFFF for bits in torch.tensor(values, dtype=dtype).view(torch.int16).tolist()]
