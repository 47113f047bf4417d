"""What threads need to share work in one parallel region: atomic counters, pauses, and calls by address."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from loramux.kernels.cpu.instructions.compiled import intrinsic

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_INT, _LONG = ir.IntType(32), ir.IntType(64)
_OPERATION = ir.FunctionType(ir.VoidType(), (_LONG, _LONG, _LONG))


@intrinsic
def take_next(typing_context: Any, counter: Any) -> Any:
    """Add 1 to the int64 at an address, and return its old value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], _LONG.as_pointer())
        return builder.atomic_rmw("add", place, _LONG(1), "acq_rel")

    return types.int64(types.int64), generate


@intrinsic
def value_at(typing_context: Any, counter: Any) -> Any:
    """The int64 at an address. Everything that other threads wrote before they changed it is visible afterwards."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], _LONG.as_pointer())
        return builder.load_atomic(place, "acquire", align=8)

    return types.int64(types.int64), generate


@intrinsic
def pause(typing_context: Any) -> Any:
    """Wait a few dozen cycles."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_X86:
            builder.call(_declared(builder, "llvm.x86.sse2.pause", ir.FunctionType(ir.VoidType(), ())), [])
        else:
            builder.fence("acquire")
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def give_up_slice(typing_context: Any) -> Any:
    """Let another thread use this core."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.call(_declared(builder, "sched_yield", ir.FunctionType(_INT, ())), [])
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def call_operation(typing_context: Any, address: Any, arguments: Any, step: Any, task: Any) -> Any:
    """Call the compiled function at `address` with three int64 arguments."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, *rest = args
        builder.call(builder.inttoptr(address, _OPERATION.as_pointer()), rest)
        return context.get_dummy_value()

    long = types.int64
    return types.none(long, long, long, long), generate


def _declared(builder: Any, name: str, kind: Any) -> Any:
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
