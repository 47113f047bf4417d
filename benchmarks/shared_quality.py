"""Measures how much an alias's option `share_base_cache` changes the predictions of adapters.

A text is a long context (the text that comes with loramux), a prompt of the adapter's task, and the adapter's greedy
answer to both. For each adapter and each number of last prompt tokens that the adapter computes, with the base
computing the tokens before: the mean KL divergence of the answer's next-token distributions from those of the adapter
that computes the whole prompt, and the share of the answer's tokens before which both predict the same token. `kl_eval`
is the divergence as evals measure it, from the likeliest tokens only. The option `base` stands for the base alone,
which shows how much the adapter changes the predictions. No time is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapter_quality import MAX_ANSWER_TOKENS, packed_adapter, task_prompts
from benchmarks.harness import begin, new_parser, reports_failure
from benchmarks.tables import table
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.architectures.gguf_model import model_directory
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.llm import LLM, SamplingParams
from loramux.engine.loop.config import EngineConfig
from loramux.engine.protocol.messages import PromptLogprob
from loramux.engine.quantizing.quality import divergence, log_probabilities
from loramux.engine.quantizing.reading import reading_text
from loramux.engine.scheduling.request_limits import MAX_PROMPT_LOGPROBS
from loramux.platform.evals.divergence import mean_divergence
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

BASE = "base"


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(_parse(argv))
    given = run.arguments
    rows = measure(given)
    shown = [
        [row["adapter"], row["own"], *(f"{row[name]:.4g}" for name in ("kl", "kl_eval", "same_token"))] for row in rows
    ]
    run.console.print(table(given.model.name, ["adapter", "own", "kl", "kl_eval", "same_token"], shown))
    workload = {"context": given.context, "prompts": given.prompts}
    run.write({"model": given.name or given.model.name, "workload": workload, "options": rows})
    return 0


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of each adapter and option."""
    model_dir = model_directory(given.model)
    adapters = {directory.name: directory for directory in given.adapter}
    texts = answered_contexts(given, model_dir, adapters)
    config = EngineConfig(
        model_dir=str(model_dir), blob_url="", cache_dir="", dtype="bfloat16", num_threads=given.threads
    )
    rows = []
    for name, directory in adapters.items():
        packed = packed_adapter(config, directory)
        figures: dict[str, list[tuple[int, float, float, float]]] = {}
        for prompt, answer in texts[name]:

            def predictions(
                adapter: PackedAdapter | None,
                num_own: int,
                prompt: Sequence[int] = prompt,
                answer: Sequence[int] = answer,
            ) -> torch.Tensor:
                start = max(0, len(prompt) - num_own)
                found = log_probabilities(config, (*prompt, *answer), adapter, activation=start)
                return found[len(prompt) - 1 : -1]

            expected = predictions(packed, len(prompt))
            for option in (*given.own, BASE):
                is_base = option == BASE
                found = predictions(None, len(prompt)) if is_base else predictions(packed, option)
                same = float((expected.argmax(1) == found.argmax(1)).double().mean())
                of_eval = mean_divergence(_likeliest(expected, answer), _likeliest(found, answer))
                assert of_eval is not None
                measured = len(answer), divergence(expected, found), of_eval, same
                figures.setdefault(str(option), []).append(measured)
        for option, rows_of in figures.items():
            weights = [one[0] for one in rows_of]
            kl, of_eval, same = (statistics.fmean([one[column] for one in rows_of], weights) for column in (1, 2, 3))
            row = {"adapter": name, "own": option, "answer_tokens": sum(weights), "kl": round(kl, 6)}
            rows.append({**row, "kl_eval": round(of_eval, 6), "same_token": round(same, 5)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def answered_contexts(
    given: argparse.Namespace, model_dir: Path, adapters: Mapping[str, Path]
) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Prompts that begin with a context, and their greedy answers, by the adapter's name."""
    tokenizer = ModelTokenizer.load(model_dir)
    context = tokenizer.encode(reading_text())[: given.context]
    prompts = {
        name: [(*context, *prompt) for prompt in task_prompts(tokenizer, name, given.prompts)] for name in adapters
    }
    longest = max(len(prompt) for of_adapter in prompts.values() for prompt in of_adapter) + MAX_ANSWER_TOKENS
    limit = min(longest, ModelConfig.load(model_dir).max_model_len)
    found = {}
    with LLM(
        given.model, adapters, device="cpu", dtype="bfloat16", pool_bytes=512 << 20, max_model_len=limit,
        num_threads=given.threads,
    ) as llm:  # fmt: skip
        for name in adapters:
            greedy = SamplingParams(temperature=0.0)
            answers = llm.generate(prompts[name], adapter=name, max_tokens=MAX_ANSWER_TOKENS, sampling=greedy)
            found[name] = [(tuple(one.prompt_token_ids), tuple(one.token_ids)) for one in answers if one.token_ids]
    return found


def _likeliest(log_probabilities: torch.Tensor, tokens: Sequence[int]) -> list[PromptLogprob]:
    """What an engine reports of these predictions. The ranks are not computed."""
    values, ids = log_probabilities.topk(MAX_PROMPT_LOGPROBS, dim=1)
    return [
        PromptLogprob(token, float(row[token]), 0, tuple(zip(top_ids, top, strict=True)))
        for token, row, top_ids, top in zip(tokens, log_probabilities, ids.tolist(), values.tolist(), strict=True)
    ]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("shared_quality", __doc__, is_timed=False)
    parser.add_argument("--model", type=Path, required=True, help="a directory or a GGUF file")
    parser.add_argument("--name", help="the model's name in the figures, by default the file's")
    parser.add_argument(
        "--adapter", type=Path, action="append", required=True, help="a PEFT directory; may be repeated"
    )
    parser.add_argument("--prompts", type=int, default=5, help="prompts for each adapter")
    parser.add_argument("--context", type=int, default=1000, help="tokens of the context")
    parser.add_argument("--own", type=int, nargs="+", default=[256, 64, 16], help="values of share_base_cache")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
