"""Measures how much a KV cache in 8 bits (`--kv-dtype int8`) changes the predictions of a model.

The texts are the text that comes with loramux, for the base, and a prompt of each adapter's task with its greedy
answer, for that adapter. For each, and for each format of K and V: the mean KL divergence of the next token's
distribution from that with K and V in bfloat16, and the share of tokens after which both predict the same token. The
formats are int8 as an engine stores it and, for comparison, FP8 (E4M3) with and without a scale for each token and
head. For FP8, K and V are rounded before they are stored in bfloat16. The last row has K, V and weights in float32. No
time is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.adapter_quality import answered_prompts, packed_adapter
from benchmarks.harness import begin, new_parser, reports_failure
from benchmarks.tables import table
from loramux.engine.architectures.gguf_model import model_directory
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.device.backend import Backend, open_backend
from loramux.engine.loop.config import EngineConfig
from loramux.engine.quantizing.quality import divergence, log_probabilities, longest_text
from loramux.engine.quantizing.reading import reading_text
from loramux.kernels.cpu.kernels import CpuKernels
from loramux.kernels.tables import AttentionBatch, PoolViews
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

Round = Callable[[torch.Tensor], torch.Tensor]

BASE = "base"
LARGEST_E4M3 = 448.0


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to E4M3. Larger numbers become the largest."""
    return x.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn).float()


def to_scaled_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round each row of each head to E4M3 times a power of two, so that its largest element is in [224, 448]."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    scale = torch.exp2((largest / LARGEST_E4M3).log2().ceil())
    return to_e4m3(x / scale) * scale


ROUNDINGS: dict[str, Round] = {"fp8 with scales": to_scaled_e4m3, "fp8": to_e4m3}


class RoundingKernels(CpuKernels):
    """The CPU's kernels, which round K and V before they store them."""

    def __init__(self, pool: PoolViews, rounded: Round) -> None:
        super().__init__(pool)
        self._rounded = rounded

    def kv_write(self, k: torch.Tensor, v: torch.Tensor, layer: int, batch: AttentionBatch) -> None:
        super().kv_write(self._rounded(k), self._rounded(v), layer, batch)


def rounding_backend(rounded: Round) -> Backend:
    return replace(open_backend("cpu"), make_kernels=lambda pool, shapes: RoundingKernels(pool, rounded))


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(_parse(argv))
    given = run.arguments
    rows = measure(given.model, given.adapter, given.prompts, given.tokens, given.threads)
    shown = [
        [row["text"], row["format"], *(f"{row[name]:.4g}" for name in ("tokens", "kl", "same_token"))] for row in rows
    ]
    run.console.print(table(given.model.name, ["text", "format", "tokens", "kl", "same_token"], shown))
    run.write({"model": given.name or given.model.name, "formats": rows})
    return 0


def measure(
    model: Path, directories: Sequence[Path], num_prompts: int, num_tokens: int, num_threads: int
) -> list[dict[str, Any]]:
    """The figures of each format with the base `model`, a directory or a GGUF file, and with each adapter."""
    model_dir = model_directory(model)
    texts = {BASE: [_reading(model_dir)[:num_tokens]]}
    adapters: dict[str, Path | None] = {BASE: None}
    if directories:
        named = {directory.name: directory for directory in directories}
        texts |= answered_prompts(model, model_dir, named, num_prompts, num_threads)
        adapters |= named
    usual = EngineConfig(model_dir=str(model_dir), blob_url="", cache_dir="", dtype="bfloat16", num_threads=num_threads)
    formats: dict[str, tuple[EngineConfig, Backend | None]] = {
        "int8": (msgspec.structs.replace(usual, kv_dtype="int8"), None),
        **{name: (usual, rounding_backend(rounded)) for name, rounded in ROUNDINGS.items()},
        "float32": (msgspec.structs.replace(usual, dtype="float32"), None),
    }
    rows = []
    for name, directory in adapters.items():
        figures: dict[str, list[tuple[int, float, float]]] = {format_name: [] for format_name in formats}
        for text in texts[name]:
            expected = _predictions(usual, text, directory, None)
            for format_name, (config, backend) in formats.items():
                found = _predictions(config, text, directory, backend)
                same = float((expected.argmax(1) == found.argmax(1)).double().mean())
                figures[format_name].append((len(text), divergence(expected, found), same))
        for format_name, measured in figures.items():
            weights = [one[0] for one in measured]
            kl, same = (statistics.fmean([one[column] for one in measured], weights) for column in (1, 2))
            row = {"text": name, "format": format_name, "tokens": sum(weights), "kl": round(kl, 7)}
            rows.append({**row, "same_token": round(same, 5)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _predictions(
    config: EngineConfig, text: tuple[int, ...], directory: Path | None, backend: Backend | None
) -> torch.Tensor:
    adapter = None if directory is None else packed_adapter(config, directory)
    return log_probabilities(config, text, adapter, backend)


def _reading(model_dir: Path) -> tuple[int, ...]:
    tokens = ModelTokenizer.load(model_dir).encode(reading_text())
    return tuple(tokens[: longest_text(ModelConfig.load(model_dir))])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("kv_quality", __doc__, is_timed=False)
    parser.add_argument("--model", type=Path, required=True, help="a directory or a GGUF file")
    parser.add_argument("--name", help="the model's name in the figures, by default the file's")
    parser.add_argument("--adapter", type=Path, action="append", default=[], help="a PEFT directory; may be repeated")
    parser.add_argument("--prompts", type=int, default=20, help="prompts for each adapter")
    parser.add_argument("--tokens", type=int, default=2048, help="most tokens of the text for the base")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
