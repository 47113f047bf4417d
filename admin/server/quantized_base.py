"""Quantises the base model when a server starts, or finds the weights that an earlier start quantised."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
from rich.console import Console
from rich.progress import Progress

from loramux.admin.errors import StartRefused
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.weight_shapes import weight_shapes
from loramux.engine.device.machine_limits import free_memory
from loramux.engine.loop.config import ITEMSIZE, EngineConfig, resolve_dtype
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.engine.quantizing.messages import (
    QuantizeJob,
    QuantizeLine,
    QuantizeProgress,
    QuantizeRefused,
    QuantizeResult,
)
from loramux.engine.quantizing.reading import MAX_TOKENS, reading_text
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class QuantizedBase:
    """Quantised weights, a sentence on how well they predict, and a warning if the float model is much better."""

    directory: Path
    quality: str
    warning: str | None = None


def quantize_base(config: EngineConfig, root: Path, method: str) -> QuantizedBase:
    """Quantise the model of `config` in another process and store the result below `root`. Raises StartRefused.

    On a CPU, if the float model fits into memory, the quality is measured on `reading_text`.
    """
    text: tuple[int, ...] = ()
    why_not = "it is measured only on CPUs"
    if config.device == "cpu":
        why_not = "the float model does not fit into the free memory"
        if float_bytes(config) * _WORKING_SPACE < free_memory():
            text = _encode(Path(config.model_dir), reading_text())
    result = _run(QuantizeJob(config=config, root=str(root), method=method, text=text))
    directory, quality = Path(result.directory), result.quality
    if quality is None:
        return QuantizedBase(directory, f"the quality was not measured: {result.why_not or why_not}")
    if not quality.is_poor:
        return QuantizedBase(directory, quality.sentence)
    warning = f"{quality.problem}: {quality.advice}"
    log.warning(warning, divergence=round(quality.divergence, 4))
    return QuantizedBase(directory, quality.sentence, warning)


_WORKING_SPACE = 1.25
"""Memory needed to load the float model, as a multiple of the size of its weights."""


def float_bytes(config: EngineConfig) -> int:
    """The size of the float model's weights on a CPU, in the dtype in which they are loaded."""
    model = ModelConfig.load(Path(config.model_dir))
    count = sum(map(math.prod, weight_shapes(model).values()))
    if model.tied_embeddings:
        # The head is a copy of the embedding in another layout.
        count += model.vocab_size * model.hidden_size
    return count * ITEMSIZE[resolve_dtype(config.dtype, model, config.device)]


def _encode(model_dir: Path, text: str) -> tuple[int, ...]:
    try:
        return ModelTokenizer.load(model_dir).encode(text)[:MAX_TOKENS]
    except ModelNotSupported as error:
        raise StartRefused(str(error)) from error


def _run(job: QuantizeJob) -> QuantizeResult:
    command = (sys.executable, "-m", "loramux.engine.quantizing.process")
    pipe = subprocess.PIPE
    # The other process has its own session, so that Ctrl-C reaches only this process, which then kills the other.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:  # noqa: S603 - our own
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(job))
            process.stdin.close()
            result = _follow(_lines(process), job.method)
        except BaseException:
            process.kill()
            raise
    if isinstance(result, QuantizeRefused):
        raise StartRefused(result.message)
    if result is not None:
        return result
    # Imported here because only this failure needs it, and each start takes the time.
    from loramux.engine.quantizing.quantize import quantized_directory

    finished = quantized_directory(Path(job.root), Path(job.config.model_dir), job.method)
    if not job.text or not finished.is_dir():
        raise StartRefused(f"the process that quantises the model ended with status {process.returncode}")
    # The weights are complete, so only the measurement failed, for example because memory ran out.
    why_not = f"the process that measures it ended with status {process.returncode}"
    return QuantizeResult(directory=str(finished), quality=None, why_not=why_not)


def _lines(process: subprocess.Popen[bytes]) -> Iterator[QuantizeLine]:
    assert process.stdout is not None
    decoder: msgspec.json.Decoder[QuantizeLine] = msgspec.json.Decoder(QuantizeLine)
    for line in process.stdout:
        yield decoder.decode(line)


def _follow(lines: Iterator[QuantizeLine], method: str) -> QuantizeResult | QuantizeRefused | None:
    """Show progress on standard error until the result arrives. Return None if there is no result."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"quantising to {method}", total=None)
        for line in lines:
            if not isinstance(line, QuantizeProgress):
                return line
            if line.total:
                progress.update(bar, completed=line.done, total=line.total)
            else:
                progress.update(bar, description="measuring the quality", completed=0, total=None)
    return None
