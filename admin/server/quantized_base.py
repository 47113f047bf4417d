"""Quantises the base model when a server starts, or finds the weights that an earlier start quantised."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from loramux.adapter_store.formats.files.mapped_tensors import map_directory
from loramux.admin.errors import StartRefused
from loramux.engine.loop.config import EngineConfig
from loramux.engine.quantizing.messages import (
    QuantizeJob,
    QuantizeLine,
    QuantizeProgress,
    QuantizeRefused,
    QuantizeResult,
)
from loramux.platform.tokenizer.chat_template import ModelFilesError
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

MAX_PROMPTS = 32
MAX_PROMPT_TOKENS = 48
"""Limits on the texts with which the quality is measured, so that the measurement takes only seconds."""


@dataclass(frozen=True, slots=True)
class QuantizedBase:
    """Quantised weights, and a sentence on how far their predictions diverge from the float model's."""

    directory: Path
    quality: str


def quantize_base(
    config: EngineConfig, root: Path, method: str, texts: Callable[[int], Sequence[str]]
) -> QuantizedBase:
    """Quantise the model of `config` in another process and store the result below `root`. Raises StartRefused.

    On a CPU, if the float model fits into memory, the quality is measured on the beginnings of texts. `texts(n)`
    returns n texts.
    """
    prompts: tuple[tuple[int, ...], ...] = ()
    quality = "the quality was not measured: it is measured only on CPUs"
    if config.device == "cpu":
        quality = "the quality was not measured: the float model does not fit into the free memory"
        if float_bytes(Path(config.model_dir)) * _WORKING_SPACE < free_memory():
            prompts = _prompts(Path(config.model_dir), texts(MAX_PROMPTS))
    job = QuantizeJob(config=config, root=str(root), method=method, prompts=prompts)
    result = _run(job)
    if result.divergence is not None:
        quality = f"mean KL divergence from the float model: {result.divergence:.2g} nats per token"
    return QuantizedBase(Path(result.directory), quality)


_WORKING_SPACE = 1.25
"""Memory needed to load the float model, as a multiple of the size of its files."""


def float_bytes(model_dir: Path) -> int:
    return sum(tensor.nbytes for tensor in map_directory(model_dir).values())


def free_memory() -> int:
    """Linux's `MemAvailable`, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _prompts(model_dir: Path, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Encode the beginning of each text. Prompts get longer from text to text, so that different kinds of next tokens
    are predicted.
    """
    try:
        tokenizer = ModelTokenizer.load(model_dir)
    except ModelFilesError as error:
        raise StartRefused(str(error)) from error
    found = []
    for index, text in enumerate(texts):
        tokens = tokenizer.encode(text)[: 4 + index * (MAX_PROMPT_TOKENS - 4) // MAX_PROMPTS]
        if tokens:
            found.append(tuple(tokens))
    return tuple(found)


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
    if result is None:
        raise StartRefused(f"the process that quantises the model ended with status {process.returncode}")
    return result


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
