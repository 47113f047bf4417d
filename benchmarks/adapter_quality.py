"""Measures how much adapters in FP8 (`--adapter-dtype fp8`) change the predictions of a model.

The texts are a prompt of each adapter's task and the greedy answer of the same adapter in bfloat16. For each adapter:
the mean KL divergence of the next token's distribution with the adapter in FP8 from that with the adapter in bfloat16,
and the share of the texts' tokens after which both predict the same token. For comparison, it also computes the
divergence of the adapter in bfloat16 from the adapter in float32, on weights in float32, and the divergence of the base
alone. The last shows how much the adapter changes the predictions. No time is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.harness import begin, new_parser, reports_failure
from benchmarks.tables import table
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.admin.demo.prompts import DEMO_PROMPTS
from loramux.admin.demo.real.held_out import PROMPTS, read_prompts
from loramux.engine.architectures.gguf_model import model_directory
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.llm import LLM, SamplingParams
from loramux.engine.loop.config import EngineConfig, pack_target
from loramux.engine.offline.local_adapter import read_adapter
from loramux.engine.quantizing.quality import divergence, log_probabilities
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

MAX_ANSWER_TOKENS = 48


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(_parse(argv))
    given = run.arguments
    rows = measure(given.model, given.adapter, given.prompts, given.threads)
    shown = [[row["adapter"], *(f"{value:.4g}" for name, value in row.items() if name != "adapter")] for row in rows]
    run.console.print(table(given.model.name, list(rows[0]), shown))
    run.write({"model": given.name or given.model.name, "adapters": rows})
    return 0


def measure(model: Path, directories: Sequence[Path], num_prompts: int, num_threads: int) -> list[dict[str, Any]]:
    """The figures of each adapter in `directories` on the base `model`, a directory or a GGUF file."""
    model_dir = model_directory(model)
    adapters = {directory.name: directory for directory in directories}
    texts = answered_prompts(model, model_dir, adapters, num_prompts, num_threads)
    usual = EngineConfig(model_dir=str(model_dir), blob_url="", cache_dir="", dtype="bfloat16", num_threads=num_threads)
    in_fp8 = msgspec.structs.replace(usual, adapter_dtype="fp8")
    in_float32 = msgspec.structs.replace(usual, dtype="float32")
    rows = []
    for name, directory in adapters.items():
        packed = {config: packed_adapter(config, directory) for config in (usual, in_fp8, in_float32)}
        figures = []
        for text in texts[name]:
            # The three floats of each text's next tokens are compared before the next text is read.
            halves, codes, floats = (log_probabilities(config, text, packed[config]) for config in packed)
            base = log_probabilities(usual, text)
            agreement = float((halves.argmax(1) == codes.argmax(1)).double().mean())
            compared = (divergence(halves, codes), divergence(floats, halves), divergence(halves, base))
            figures.append((len(text), agreement, *compared))
        means = [_weighted([row[column] for row in figures], [row[0] for row in figures]) for column in range(1, 5)]
        rows.append(
            {
                "adapter": name,
                "tokens": sum(row[0] for row in figures),
                "same_token": round(means[0], 5),
                "kl_fp8": round(means[1], 7),
                "kl_bfloat16": round(means[2], 7),
                "kl_base": round(means[3], 5),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float:
    return statistics.fmean(values, weights)


def packed_adapter(config: EngineConfig, directory: Path) -> PackedAdapter:
    model_dir = Path(config.model_dir)
    target = pack_target(ModelConfig.load(model_dir), config.dtype, config.adapter_dtype, config.kv_dtype)
    return read_adapter(directory, target, BaseWeights(model_dir), None, {}).packed


def answered_prompts(
    model: Path, model_dir: Path, adapters: Mapping[str, Path], num_prompts: int, num_threads: int
) -> dict[str, list[tuple[int, ...]]]:
    """Prompts with their greedy answers, by the adapter's name."""
    tokenizer = ModelTokenizer.load(model_dir)
    greedy = SamplingParams(temperature=0.0)
    found = {}
    with LLM(
        model, adapters, device="cpu", dtype="bfloat16", pool_bytes=512 << 20, max_model_len=1024,
        num_threads=num_threads, speculate="off",
    ) as llm:  # fmt: skip
        for name in adapters:
            prompts = task_prompts(tokenizer, name, num_prompts)
            answers = llm.generate(prompts, adapter=name, max_tokens=MAX_ANSWER_TOKENS, sampling=greedy)
            found[name] = [(*answer.prompt_token_ids, *answer.token_ids) for answer in answers]
    return found


def task_prompts(tokenizer: ModelTokenizer, name: str, num_prompts: int) -> list[tuple[int, ...]]:
    """Prompts of the task of the adapter `name`: held-out prompts of the real demo, or those of the demo."""
    template = tokenizer.chat_template
    assert template is not None, "the prompts are conversations, so the model needs a chat template"
    if (PROMPTS / f"{name}.jsonl").exists():
        conversations = [[dict(one) for one in prompt.messages] for prompt in read_prompts(name)]
    else:
        conversations = [[{"role": "user", "content": prompt}] for prompt in DEMO_PROMPTS]
    return [tokenizer.encode_rendered(template.render(messages)) for messages in conversations[:num_prompts]]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("adapter_quality", __doc__, is_timed=False)
    parser.add_argument("--model", type=Path, required=True, help="a directory or a GGUF file")
    parser.add_argument("--name", help="the model's name in the figures, by default the file's")
    parser.add_argument(
        "--adapter", type=Path, action="append", required=True, help="a PEFT directory; may be repeated"
    )
    parser.add_argument("--prompts", type=int, default=20, help="prompts for each adapter")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
