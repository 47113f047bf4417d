"""Distinguishes device failures from bugs, and describes each failure in one line instead of a traceback."""

from __future__ import annotations

import subprocess
import traceback

import torch

MAX_FAULT = 240
"""Longest description of a failure, in characters."""


def device_fault(error: BaseException) -> str | None:
    """Describe a device failure in one line. Returns None if the device did not cause the error.

    CUDA errors arrive as `torch.AcceleratorError`, as `torch.OutOfMemoryError`, or as a plain RuntimeError that names
    CUDA, from libraries such as cuBLAS and from Triton when it loads or launches a kernel. Errors from Triton itself,
    and from the compilers that Triton calls, mean that a kernel cannot be compiled for this device.
    """
    is_fault = (
        isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError)
        or any(_is_triton(cls.__module__) for cls in type(error).__mro__)
        or (isinstance(error, RuntimeError) and "CUDA" in str(error))
        or (isinstance(error, RuntimeError | OSError | subprocess.SubprocessError) and _passed_through_triton(error))
    )
    return reason_of(error) if is_fault else None


def reason_of(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if the message is empty.

    The other lines of a CUDA error are debugging advice. Triton's compile errors begin with an excerpt of the kernel's
    source, so their `error_message` is used instead.
    """
    text = getattr(error, "error_message", None) or str(error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= MAX_FAULT else f"{line[: MAX_FAULT - 3]}..."


def _passed_through_triton(error: BaseException) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(_is_triton(frame.f_globals.get("__name__", "")) for frame in frames)


def _is_triton(module: str) -> bool:
    return module.split(".")[0] == "triton"
