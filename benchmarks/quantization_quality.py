"""Measures how much each format of `--quantization` changes the predictions of real models.

For each model and format: the mean KL divergence of the next token's distribution from that of the float32 model, the
perplexity, and the size of the quantised weights. The text is the one that comes with loramux. Two rows show what int4
was before, and what its weights in 8 bits add. No time is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.harness import begin, new_parser, reports_failure
from benchmarks.tables import table
from loramux.adapter_store.formats.files.mapped_tensors import STORED, map_directory
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.weight_shapes import weight_shapes
from loramux.engine.loop.config import EngineConfig
from loramux.engine.quantizing import sensitivity
from loramux.engine.quantizing.messages import MAX_DIVERGENCE
from loramux.engine.quantizing.methods import METHODS, EncodedRows, Floats, Method
from loramux.engine.quantizing.quality import divergence, log_probabilities, longest_text, perplexity
from loramux.engine.quantizing.quantize import quantize, quantized_names
from loramux.engine.quantizing.reading import MAX_TOKENS, reading_text
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

BEFORE = "int4 before"
"""Symmetric groups of 64, rounded to the nearest codes: `--quantization int4` of earlier versions."""


@dataclass(frozen=True, slots=True)
class Format:
    """A row of the table. Without `method`, the weights stay floats."""

    name: str
    method: str | None = None
    dtype: str = "float32"
    extra_bytes: float | None = None
    """Replaces `sensitivity.EXTRA_BYTES`."""


FORMATS = (
    Format("bfloat16", dtype="bfloat16"),
    Format("int8", "int8"),
    Format("int4", "int4"),
    Format("int4, none in 8 bits", "int4", extra_bytes=0),
    Format(BEFORE, BEFORE),
    Format("fp8", "fp8"),
)


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(_parse(argv))
    METHODS[BEFORE] = _before()
    found = {}
    for given in run.arguments.model:
        name, _, directory = given.rpartition("=")
        figures = measure(Path(directory), run.arguments.threads)
        found[name or Path(directory).name] = figures
        rows = [
            (
                row["format"],
                *("" if row[key] is None else f"{row[key]:.4g}" for key in ("bits_per_weight", "divergence")),
                f"{row['perplexity']:.2f}",
                "" if row["divergence"] is None or row["divergence"] <= MAX_DIVERGENCE else "warned",
            )
            for row in figures["formats"]
        ]
        title = f"{name or directory}, {figures['tokens']} tokens"
        run.console.print(table(title, ("format", "bits per weight", "KL, nats", "perplexity", ""), rows))
    run.write({"models": found})
    return 0


def measure(model_dir: Path, num_threads: int) -> dict[str, Any]:
    config = EngineConfig(model_dir=str(model_dir), blob_url="", cache_dir="", dtype="float32", num_threads=num_threads)
    text = ModelTokenizer.load(model_dir).encode(reading_text())[:MAX_TOKENS]
    text = text[: longest_text(ModelConfig.load(model_dir))]
    floats = log_probabilities(config, text)
    rows: list[dict[str, Any]] = [
        {
            "format": "float32",
            "bits_per_weight": 32.0,
            "divergence": None,
            "perplexity": round(perplexity(floats, text), 4),
        }
    ]
    for form in FORMATS:
        with tempfile.TemporaryDirectory() as scratch, _extra_bytes(form.extra_bytes):
            own = msgspec.structs.replace(config, dtype=form.dtype)
            bits = 16.0
            if form.method is not None:
                directory = Path(scratch) / "quantized"
                quantize(model_dir, directory, form.method, lambda done, total: None)
                own = msgspec.structs.replace(own, quantized_dir=str(directory))
                bits = _bits_per_weight(model_dir, directory)
            found = log_probabilities(own, text)
        rows.append(
            {
                "format": form.name,
                "bits_per_weight": round(bits, 3),
                "divergence": round(divergence(floats, found), 6),
                "perplexity": round(perplexity(found, text), 4),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return {"tokens": len(text), "formats": rows}


def _bits_per_weight(model_dir: Path, directory: Path) -> float:
    """Bits of the stored codes, scales and minima per weight of the linear layers."""
    config = ModelConfig.load(model_dir)
    shapes = weight_shapes(config)
    num_weights = sum(math.prod(shapes[name]) for name in quantized_names(config))
    tensors = map_directory(directory)
    stored = sum(
        math.prod(tensor.shape) * STORED[tensor.dtype].itemsize
        for name, tensor in tensors.items()
        if not name.endswith(".weight_shape")
    )
    return 8 * stored / num_weights


@contextmanager
def _extra_bytes(share: float | None) -> Iterator[None]:
    usual = sensitivity.EXTRA_BYTES
    sensitivity.EXTRA_BYTES = usual if share is None else share
    try:
        yield
    finally:
        sensitivity.EXTRA_BYTES = usual


def _before() -> Method:
    def encode(rows: Floats, group: int) -> EncodedRows:
        grouped = rows.reshape(len(rows), -1, group)
        # The weight with the largest magnitude becomes -8.
        at = np.abs(grouped).argmax(axis=2, keepdims=True)
        scales = np.take_along_axis(grouped, at, axis=2) / np.float32(-8)
        scales[scales == 0] = 1
        codes = np.clip(np.rint(grouped / scales) + 8, 0, 15).astype(np.uint8).reshape(rows.shape)
        return EncodedRows((codes[:, ::2] | codes[:, 1::2] << np.uint8(4)).view("<i4"), scales[..., 0])

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
    return Method(".weight_packed", "I32", 8, encode, weights, (64, 32, 16))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("quantization_quality", __doc__, is_timed=False)
    parser.add_argument(
        "--model", action="append", required=True, metavar="NAME=DIRECTORY", help="a float model; may be repeated"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
