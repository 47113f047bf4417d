from __future__ import annotations

import pytest
import torch

from loramux.kernels.gpu.linear.code_decoding import DTYPES, Decoding, decoding_of
from loramux.kernels.gpu.linear.code_layout import E4M3_FACTOR
from loramux.kernels.quantized import CodeKind

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def run_ptx(text: str, data: bytes) -> list[int]:
    """Execute the few instructions that decoding uses on packed bytes, and return the result registers."""
    results = ["$0", "$1"][: len(data) // 2]
    registers = {f"${len(results)}": int.from_bytes(data, "little")}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    def permuted(low: int, high: int, selector: int) -> int:
        both, picked = (low | high << 32).to_bytes(8, "little"), []
        for i in range(4):
            mode = selector >> (4 * i) & 15
            byte = both[mode & 7]
            picked.append(byte if mode < 8 else 255 * (byte >> 7))
        return int.from_bytes(bytes(picked), "little")

    def selected(a: int, b: int, c: int, table: int) -> int:
        terms = ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1)
        return sum(terms) & 0xFFFFFFFF

    def multiplied(*operands: int) -> int:
        a, b, c = (torch.tensor([one], dtype=torch.uint32).view(torch.bfloat16).double() for one in operands)
        return int((a * b + c).to(torch.bfloat16).view(torch.uint32))

    for line in text.splitlines():
        if line in "{}" or line.startswith(".reg"):
            continue
        name, target, *operands = line.rstrip(";").replace(",", "").split()
        match name, [value(one) for one in operands]:
            case "mov.b32" | "cvt.u32.u16", (a,):
                registers[target] = a
            case "and.b32", (a, b):
                registers[target] = a & b
            case "or.b32", (a, b):
                registers[target] = a | b
            case "shl.b32", (a, b):
                registers[target] = a << b & 0xFFFFFFFF
            case "shr.u32", (a, b):
                registers[target] = a >> b
            case "prmt.b32", (a, b, c):
                registers[target] = permuted(a, b, c)
            case "lop3.b32", (a, b, c, table):
                registers[target] = selected(a, b, c, table)
            case "fma.rn.bf16x2", (a, b, c):
                registers[target] = multiplied(a, b, c)
            case _:
                raise AssertionError(line)
    return [registers[result] for result in results]


def values_of(decoding: Decoding | None, dtype: torch.dtype) -> list[list[float]]:
    """The values of all codes, by the place of the code in its byte. Each code occurs in each byte."""
    assert decoding is not None
    bits = 8 // len(decoding.texts)
    found = []
    for part, text in enumerate(decoding.texts):
        values: list[set[float]] = [set() for _ in range(1 << bits)]
        for first in range(1 << bits):
            codes = [(first + 5 * place) % (1 << bits) for place in range(decoding.pack)]
            # The other code of a byte differs.
            data = bytes(code << bits * part | ((15 - code) << 4 * (1 - part) if bits == 4 else 0) for code in codes)
            words = torch.tensor(run_ptx(text, data), dtype=torch.uint32).view(dtype)
            for code, value in zip(codes, words.tolist(), strict=True):
                values[code].add(value)
        assert all(len(one) == 1 for one in values)
        found.append([one.pop() for one in values])
    return found


def test_integers_are_exact(dtype: torch.dtype) -> None:
    decoding = decoding_of(CodeKind.INTEGERS, 4, None, dtype)
    assert decoding is not None
    expected = [float(code + decoding.offset) for code in range(16)]
    assert values_of(decoding, dtype) == [expected] * 2


def test_values_of_a_table_are_rounded(dtype: torch.dtype) -> None:
    table = torch.randn(16, generator=torch.Generator().manual_seed(1))
    found = values_of(decoding_of(CodeKind.TABLE, 4, table.tolist(), dtype), dtype)
    assert found == [table.to(dtype).tolist()] * 2


def test_e4m3_is_exact(dtype: torch.dtype) -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double() / E4M3_FACTOR
    found = values_of(decoding_of(CodeKind.E4M3, 8, None, dtype), dtype)[0]
    is_number = ~expected.isnan()
    assert torch.tensor(found, dtype=torch.float64)[is_number].tolist() == expected[is_number].tolist()


def test_float32_has_no_decoding(dtype: torch.dtype) -> None:
    assert decoding_of(CodeKind.INTEGERS, 4, None, torch.float32) is None
