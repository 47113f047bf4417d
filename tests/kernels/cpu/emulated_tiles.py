"""Compares the AMX kernels for quantised weights with the other kernels, on a CPU without AMX.

The instructions are replaced by calls of `emulated_tiles.c`, compiled by gcc. The program runs with its own
NUMBA_CACHE_DIR, because its code must not be cached as the code of the kernels. With the argument `compile`, it
compiles the kernels with the real instructions, which LLVM can do on any x86 CPU. With `test`, it runs pytest with the
remaining arguments in a process that imitates a CPU with AMX.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import typeof

from loramux.kernels.cpu.instructions import amx
from loramux.kernels.cpu.instructions.threads import set_num_threads
from loramux.kernels.cpu.linear import quantized_amx, quantized_linear
from loramux.kernels.quantized import INT4, INT8, UINT4, UINT8
from tests.kernels.cpu.codebooks import MXFP4, NF4, random_weight

FOR_INTEGERS = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd64", "tilestored64", "tdpbssd", "tdpbusd")
FOR_BFLOAT16 = ("ldtilecfg", "tilerelease", "tileloadd64", "tilestored64", "tdpbf16ps")

CASES = [
    (codebook, shift, *shape)
    for codebook, shift in (
        (INT8, None),
        (UINT8, "zeros"),
        (INT4, None),
        (UINT4, "minima"),
        (UINT4, "halves"),
        (MXFP4, None),
        (NF4, None),
    )
    for shape in ((64, 128, 32), (100, 256, 256), (33, 640, 64), (40, 96, 48), (70, 130, 130))
]


def load_instructions(directory: Path) -> None:
    library = directory / "emulated_tiles.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    loaded = ctypes.CDLL(str(library))
    for name in {*FOR_INTEGERS, *FOR_BFLOAT16}:
        address = ctypes.cast(getattr(loaded, f"emulated_{name}"), ctypes.c_void_p).value
        binding.add_symbol(f"emulated_{name}", address)


def emit_call(builder: Any, name: str, arguments: list[Any]) -> None:
    name = f"emulated_{name}"
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), arguments)


def compare() -> None:
    """Compare products with and without tiles, bit by bit."""
    for case in CASES:
        weight, x = random_weight(*case), torch.randn(70, case[3])
        x[5, 3] = torch.nan
        bias = torch.randn(case[2])
        for x_bits in (16, 8):
            linear = quantized_linear.make_quantized_linear(weight, bias, x_bits)
            if linear is None:
                # The integers of NF4 do not fit into the bytes of 8-bit products.
                assert (case[0], x_bits) == (NF4, 8)
                continue
            for num_rows in (13, 16, 17, 41, 70):
                results = []
                for has_tiles in (False, True):
                    quantized_linear.has_integer_tiles = lambda has_tiles=has_tiles: has_tiles  # type: ignore[attr-defined]
                    results.append(linear(x[:num_rows]).view(torch.int32))
                assert torch.equal(*results), (*case[1:], x_bits)


def compile_kernels() -> None:
    """Compile the kernels for 8 and 4 bits and for bfloat16, and check that the instructions are used."""

    def compile_only(kernel: Any) -> Any:
        return lambda *arguments: kernel.compile(tuple(typeof(argument) for argument in arguments))

    kernels = quantized_amx.multiply_code_tiles, amx.multiply_tile_panels
    quantized_linear.has_integer_tiles = lambda: True  # type: ignore[attr-defined]
    quantized_linear.multiply_code_tiles, amx.multiply_tile_panels = map(compile_only, kernels)  # type: ignore[attr-defined]
    for codebook in (INT8, INT4):
        linear = quantized_linear.make_quantized_linear(random_weight(codebook, None, 64, 128, 32), None)
        assert linear is not None
        linear(torch.zeros(40, 128))
    amx.AmxPanels(torch.zeros(64, 128, dtype=torch.bfloat16), None)(torch.zeros(40, 128))
    for kernel, instructions, count in zip(kernels, (FOR_INTEGERS, FOR_BFLOAT16), (2, 1), strict=True):
        code = list(kernel.inspect_asm().values())
        assert len(code) == count
        assert all(name.removesuffix("64") in text for text in code for name in instructions)


def permit_tiles() -> None:
    """Let the kernels believe that Linux permits this process to use tiles."""
    real, amx.ctypes = amx.ctypes, SimpleNamespace(CDLL=lambda name: SimpleNamespace(syscall=lambda *arguments: 0))  # type: ignore[attr-defined]
    # The answer is cached for the life of the process.
    assert amx.has_amx(), "NUMBA_CPU_FEATURES must contain AMX"
    amx.ctypes = real  # type: ignore[attr-defined]


def main(arguments: list[str]) -> int:
    if "NUMBA_CACHE_DIR" not in os.environ:
        raise SystemExit("set NUMBA_CACHE_DIR to an empty directory")
    if arguments == ["compile"]:
        compile_kernels()
        print("compiled with AMX")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        load_instructions(Path(directory))
        quantized_amx.emit_call = amx.emit_call = emit_call  # type: ignore[attr-defined]
        if arguments[:1] == ["test"]:
            permit_tiles()
            return int(pytest.main(arguments[1:]))
        set_num_threads(2)
        torch.manual_seed(0)
        compare()
    print("the products are the same with tiles")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
