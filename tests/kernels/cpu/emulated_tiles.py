"""Compares the AMX kernels for quantised weights with the other kernels, on a CPU without AMX.

The instructions are replaced by calls of `emulated_tiles.c`, compiled by gcc. The program runs with its own
NUMBA_CACHE_DIR, because its code must not be cached as the code of the kernels. With the argument `compile`, it
compiles the kernels with the real instructions, which LLVM can do on any x86 CPU.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import typeof

from loramux.kernels.cpu import amx, quantized_amx, quantized_linear
from loramux.kernels.cpu.threads import set_num_threads
from loramux.kernels.quantized import INT4, INT8, UINT4, UINT8
from tests.kernels.cpu.codebooks import MXFP4, NF4, random_weight

INSTRUCTIONS = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd64", "tilestored64", "tdpbssd", "tdpbusd")

CASES = [
    (codebook, has_zeros, *shape)
    for codebook, has_zeros in (
        (INT8, False),
        (UINT8, True),
        (INT4, False),
        (UINT4, True),
        (MXFP4, False),
        (NF4, False),
    )
    for shape in ((64, 128, 32), (100, 256, 256), (33, 640, 64), (40, 96, 48), (70, 130, 130))
]


def load_instructions(directory: Path) -> None:
    library = directory / "emulated_tiles.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    loaded = ctypes.CDLL(str(library))
    for name in INSTRUCTIONS:
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
            for num_rows in (13, 16, 33, 70):
                results = []
                for has_tiles in (False, True):
                    quantized_linear.has_integer_tiles = lambda has_tiles=has_tiles: has_tiles
                    results.append(linear(x[:num_rows]).view(torch.int32))
                assert torch.equal(*results), (*case[1:], x_bits)


def compile_kernels() -> None:
    """Compile the kernel for 8 and for 4 bits, and check that the instructions are used."""
    kernel = quantized_amx.multiply_code_tiles

    def compile_only(*arguments: Any) -> None:
        kernel.compile(tuple(typeof(argument) for argument in arguments))

    quantized_linear.has_integer_tiles = lambda: True
    quantized_linear.multiply_code_tiles = compile_only
    for codebook in (INT8, INT4):
        linear = quantized_linear.make_quantized_linear(random_weight(codebook, False, 64, 128, 32), None)
        assert linear is not None
        linear(torch.zeros(40, 128))
    code = list(kernel.inspect_asm().values())
    assert len(code) == 2
    assert all(name.removesuffix("64") in text for text in code for name in INSTRUCTIONS)


def main(arguments: list[str]) -> None:
    if "NUMBA_CACHE_DIR" not in os.environ:
        raise SystemExit("set NUMBA_CACHE_DIR to an empty directory")
    if arguments == ["compile"]:
        compile_kernels()
        print("compiled with AMX")
        return
    with tempfile.TemporaryDirectory() as directory:
        load_instructions(Path(directory))
        quantized_amx.emit_call = amx.emit_call = emit_call
        set_num_threads(2)
        torch.manual_seed(0)
        compare()
    print("the products are the same with tiles")


if __name__ == "__main__":
    main(sys.argv[1:])
