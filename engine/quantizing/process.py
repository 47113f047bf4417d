"""Quantises a model in a separate process: `python -m loramux.engine.quantizing.process`.

The process reads a QuantizeJob as JSON from standard input, and writes lines of JSON: QuantizeProgress, and at the end
QuantizeResult or QuantizeRefused. A separate process is used because quantising may need torch, which a gateway never
imports, and a lot of memory, which is freed when the process exits.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from loramux.engine.loop.config import EngineConfig
from loramux.engine.protocol.errors import EngineError
from loramux.engine.quantizing.messages import (
    QUALITY_FILES,
    Quality,
    QuantizeJob,
    QuantizeLine,
    QuantizeProgress,
    QuantizeRefused,
    QuantizeResult,
)
from loramux.engine.quantizing.quantize import quantize, quantized_directory

_REPORT_S = 0.1


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=QuantizeJob)
    try:
        _send(run(job))
    except EngineError as error:
        _send(QuantizeRefused(message=str(error)))


def run(job: QuantizeJob) -> QuantizeResult:
    """Quantise the model and measure the quality. Work that an earlier run has finished is not repeated."""
    destination = quantized_directory(Path(job.root), Path(job.config.model_dir), job.method)
    if not destination.is_dir():
        reported = -1.0

        def progress(done: int, total: int) -> None:
            nonlocal reported
            if done == total or time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                _send(QuantizeProgress(done=done, total=total))

        quantize(Path(job.config.model_dir), destination, job.method, progress)
    config = msgspec.structs.replace(job.config, quantized_dir=str(destination))
    rounded = "int8" if job.config.activations == "int8" else None
    quality = _quality(job, config, destination / QUALITY_FILES[rounded])
    why_not = "the model's predictions are not finite" if quality is None and job.text else None
    return QuantizeResult(directory=str(destination), quality=quality, why_not=why_not)


def _quality(job: QuantizeJob, config: EngineConfig, path: Path) -> Quality | None:
    """The quality, which is stored beside the weights, or None if it was not measured."""
    # A file that cannot be read is measured again.
    with suppress(FileNotFoundError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=Quality)
    if not job.text:
        return None
    from loramux.engine.quantizing.quality import measure_quality

    _send(QuantizeProgress(done=0, total=0))
    quality = measure_quality(config, job.method, job.text)
    if quality is None:
        return None
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(msgspec.json.encode(quality))
    os.replace(unfinished, path)
    return quality


def _send(line: QuantizeLine) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
