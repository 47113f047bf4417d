"""Runs Triton kernels on a machine without a GPU, using a private copy of Triton in interpreter mode."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
FOR_GPUS: Any = () if HAS_GPU else pytest.mark.campaign
"""The mark of cases that only a GPU runs outside of campaigns, because the interpreter is slow."""
ARITHMETIC = {
    "__add__": "create_add",
    "__radd__": "create_add",
    "__sub__": "create_sub",
    "__mul__": "create_mul",
    "__rmul__": "create_mul",
    "__floordiv__": "create_sdiv",
    "__mod__": "create_srem",
    "__and__": "create_and",
    "__or__": "create_or",
}
COMPARISONS = {
    "__lt__": "create_icmpSLT",
    "__le__": "create_icmpSLE",
    "__gt__": "create_icmpSGT",
    "__ge__": "create_icmpSGE",
    "__eq__": "create_icmpEQ",
    "__ne__": "create_icmpNE",
}
"""The interpreter's operation for each operator. Those of signed integers and of floats are the same."""
OPERANDS = {
    **dict.fromkeys((*ARITHMETIC, *COMPARISONS), ("int32", "int64", "fp32")),
    **dict.fromkeys(("__floordiv__", "__mod__"), ("int32", "int64")),
    **dict.fromkeys(("__and__", "__or__"), ("int1", "int32", "int64")),
}
"""The types of operands that an operator does not convert."""
MAX_CONSTANTS = 1000
"""Most constant operands that the interpreter keeps."""
TRITON_MODULES = (
    "addresses",
    "attention",
    "attention_plan",
    "contiguous_attention",
    "delta",
    "experts",
    "fused",
    "kernels",
    "launches",
    "rotate_and_store",
    "routing",
    "sampling",
    "sigmoid",
    "linear.code_values",
    "linear.coded_linear",
    "linear.coded_products",
    "linear.dequantized_products",
    "linear.scaled_products",
    "lora.adapter_pairs",
    "lora.affines",
    "lora.expand",
    "lora.gather",
    "lora.lora_linear",
    "lora.shrink",
    "lora.trained_rows",
)


def import_kernels(*names: str) -> list[ModuleType]:
    """Modules of `loramux.kernels.gpu` by file name, compiled if there is a GPU and interpreted otherwise."""
    modules = _imported_modules() if HAS_GPU else _interpreted_modules()
    return [modules[name] for name in names]


def run_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch Triton to interpreter mode for the rest of a test. Parts of Triton read the mode when a kernel runs.

    Skips the test if the interpreter does not support loops whose bound is a tensor.
    """
    numbers = [int(part) for part in version("triton").split(".")[:2]]
    if numbers < [3, 7] and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("this triton's interpreter cannot loop up to a tensor with this numpy")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def check_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the rest of a test if a sum or product of integers overflows. The check takes half of the interpreter's
    time, so most tests do without it.
    """
    if not HAS_GPU:
        builder = _interpreted_modules()["sampling"].triton.runtime.interpreter.interpreter_builder
        monkeypatch.setattr(builder, "options", builder.options)
        _check_overflow(builder, True)


def _check_overflow(builder: Any, is_checked: bool) -> None:
    builder.options = replace(builder.options, sanitize_overflow=is_checked)


@cache
def _interpreted_modules() -> dict[str, ModuleType]:
    """All modules with kernels. Tests share them, because another copy of Triton takes over 0.1 s."""
    with _interpreted_triton():
        return _imported_modules()


def _imported_modules() -> dict[str, ModuleType]:
    modules = [importlib.import_module(f"loramux.kernels.gpu.{name}") for name in TRITON_MODULES]
    return {module.__name__.rpartition(".")[2]: module for module in modules}


@contextmanager
def _interpreted_triton() -> Iterator[None]:
    """Import a copy of Triton in interpreter mode, and restore the process's modules afterwards.

    Triton chooses between compiling and interpreting when it is imported, even for its own functions, and another
    test's library may already have imported a compiling Triton. Triton's C extension does not depend on this choice and
    cannot be loaded twice.
    """

    def is_ours(name: str) -> bool:
        _, package, module = name.rpartition("loramux.kernels.gpu.")
        return (bool(package) and module in TRITON_MODULES) or (
            name.split(".")[0] == "triton" and not name.startswith("triton._C")
        )

    before = {name: sys.modules.pop(name) for name in list(sys.modules) if is_ours(name)}
    switch = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        interpreter = importlib.import_module("triton.runtime.interpreter")
        _stay_prepared(interpreter)
        _remember_types(interpreter)
        _remember_shapes(interpreter.tl.core)
        _call_directly(interpreter)
        _check_operands_once(interpreter)
        _check_overflow(interpreter.interpreter_builder, False)
        yield
    finally:
        os.environ.pop("TRITON_INTERPRET")
        if switch is not None:
            os.environ["TRITON_INTERPRET"] = switch
        for name in [name for name in sys.modules if is_ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _stay_prepared(interpreter: Any) -> None:
    """Make the interpreter patch `triton.language` once per module instead of for each launch and each call of a device
    function.

    Each patch takes a millisecond. `tl.sum` is a device function, and a search calls it a hundred times. This copy of
    Triton compiles nothing, so it need not be restored.
    """
    prepare, prepared = interpreter._patch_lang, set()
    kept = SimpleNamespace(restore=lambda: None)

    def prepare_once(function: Any) -> Any:
        names = id(function.__globals__)
        if names not in prepared:
            prepared.add(names)
            prepare(function)
        return kept

    interpreter._patch_lang = prepare_once


def _remember_types(interpreter: Any) -> None:
    """Look up the numpy type of each Triton type only once. Each look-up makes a dictionary of all types."""
    find, found = interpreter._get_np_dtype, {}

    def find_once(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = find(kind)
        return found[name]

    interpreter._get_np_dtype = find_once


def _remember_shapes(core: Any) -> None:
    """Make the parts of tensors and their types that depend only on a shape once. They take a fifth of the
    interpreter's time, because each operation makes a tensor and up to three types.
    """
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple[Any, ...], tuple[Any, Any, str]] = {}
    tensors: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(shape.values if isinstance(shape, core.tuple) else shape))
        if key in types:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = types[key]
        else:
            make_type(self, element_ty, shape)
            types[key] = self.shape, self.numel, self.name

    def init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - Triton passes it by this name
        key = tuple(type.shape.values) if type.is_block() else ()
        if key in tensors:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = tensors[key]
        else:
            make_tensor(self, handle, type)
            tensors[key] = self.shape, self.numel

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor


def _call_directly(interpreter: Any) -> None:
    """Call a builtin without the wrapper that only checks the argument that the interpreter passes to all of them."""

    def patch(target: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return function(*args, **kwargs, _semantic=interpreter.interpreter_semantic)

        if target is interpreter.tl.core.tensor and name in (*ARITHMETIC, *COMPARISONS):
            call = _operator(interpreter, name, call)
        scope.set_attr(target, name, call)

    _check_parameters(interpreter._patch_attr, "obj", "name", "member", "builder", "scope")
    interpreter._patch_attr = patch


def _operator(interpreter: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The operator `name` of tensors. If no operand is converted, it runs the interpreter's operation immediately, and
    numpy broadcasts the operands. Otherwise, it calls Triton's function `call`.
    """
    core, builder = interpreter.tl.core, interpreter.interpreter_builder
    operation = getattr(builder, ARITHMETIC.get(name) or COMPARISONS[name])
    kinds, is_comparison = OPERANDS[name], name in COMPARISONS

    def operate(left: Any, right: Any) -> Any:
        kind, run, is_block = left.dtype.name, operation, left.type.is_block()
        if isinstance(right, core.tensor):
            operand, is_block = right.handle, is_block or right.type.is_block()
            is_direct = kind == right.dtype.name and kind in kinds
            if name == "__add__" and left.dtype.is_ptr() and right.dtype.name in ("int32", "int64"):
                is_direct, run = True, builder.create_addptr
        else:
            operand = SimpleNamespace(data=right)
            is_int = type(right) is int and -(2**31) <= right < 2**31 and kind != "int1"
            is_direct = kind in kinds and (is_int or (type(right) is float and kind == "fp32"))
        if not is_direct or (builder.options.sanitize_overflow and not is_comparison):
            return call(left, right)
        handle = run(left.handle, operand)
        element = core.int1 if is_comparison else left.dtype
        return core.tensor(handle, core.block_type(element, list(handle.data.shape)) if is_block else element)

    return operate


def _check_operands_once(interpreter: Any) -> None:
    """Skip the checks and conversions of operands that cannot change anything, and make a constant operand once for
    each type of the other. They take a third of the interpreter's time.
    """
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    integers = frozenset((*core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES))
    core.dtype.is_int = lambda self: self.name in integers
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    constants: dict[tuple[Any, ...], Any] = {}

    def broadcast_once(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def check_once(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        # The first two flags allow pointers. Later ones are for divisions.
        if named or len(flags) > 2 or not isinstance(lhs, core.tensor):
            return check(self, lhs, rhs, *flags, **named)
        if isinstance(rhs, core.tensor):
            # Two pointers may not be added.
            if lhs.type.scalar.name == rhs.type.scalar.name and not lhs.type.scalar.is_ptr():
                return broadcast_once(self, lhs, rhs)
            return check(self, lhs, rhs, *flags)
        key = (lhs.type.name, type(rhs), rhs, flags)
        if (constant := constants.get(key)) is None:
            converted, constant = check(self, lhs, rhs, *flags)
            if converted is not lhs:
                return converted, constant
            if len(constants) == MAX_CONSTANTS:
                constants.clear()
            constants[key] = constant
        # An operation may replace the data of a handle.
        return lhs, self.tensor(interpreter.TensorHandle(constant.handle.data, constant.handle.dtype), constant.type)

    operands = ("self", "lhs", "rhs")
    flags = ("allow_lhs_ptr", "allow_rhs_ptr", "arithmetic_check", "div_or_mod")
    _check_parameters(check, *operands, *flags)
    _check_parameters(broadcast, *operands)
    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = check_once, broadcast_once


def _check_parameters(replaced: Any, *names: str) -> None:
    """Fail if this Triton's private function differs from the one that a shortcut was written for."""
    found = tuple(inspect.signature(replaced).parameters)
    assert found == names, f"Triton's {replaced.__name__} takes {found}: adapt the shortcut that replaces it"
