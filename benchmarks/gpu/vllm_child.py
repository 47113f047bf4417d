"""Runs vLLM in a process of its own: `python -m benchmarks.gpu.vllm_child JOB.json`, with vLLM in `PYTHONPATH`.

The job is a VllmJob as JSON. The process makes the weights on the device, answers the job's checked prompts, measures
decode steps and first tokens, and writes a VllmFigures as JSON to `out` after each of them. The engine runs in this
process and schedules asynchronously, which is vLLM's default. Times are those of the wall clock.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.random_weights import RandomWeights

LOAD_FORMAT = "benchmark_random"
NUM_WARM_STEPS = 4
"""Untimed decode steps between the last prompt and the first timed step."""

NUM_STAGGERED = 12
"""Further tokens of each answer, because prompts are computed in several steps and the first answers end first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmJob:
    """What vLLM runs. `shapes` are the base's tensors by name, and `adapters` the PEFT directories, or empty.

    `checked` prompts are answered with `num_checked` tokens. `decode` prompts are computed together, and then
    `num_steps` steps are timed. `prefill` prompts are computed `num_prefills` times, after `num_warm_prefills` untimed
    times. Prompts use the adapters in turn.
    """

    model_dir: str
    dtype: str
    device: str
    out: str
    shapes: Mapping[str, Sequence[int]]
    adapters: Sequence[str]
    rank: int
    max_len: int
    max_batch_tokens: int
    cache_bytes: int
    checked: Sequence[Sequence[int]]
    num_checked: int
    decode: Sequence[Sequence[int]]
    num_steps: int
    prefill: Sequence[Sequence[int]]
    num_prefills: int
    num_warm_prefills: int


@dataclass(frozen=True, slots=True)
class PeerToken:
    """A token, its log-probability, and the most likely tokens with theirs, most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class VllmFigures:
    """The results so far, by "base" and "adapters". Times are in seconds."""

    version: str = ""
    start_s: float = 0.0
    answers: dict[str, list[list[PeerToken]]] = field(default_factory=dict)
    step_s: dict[str, float] = field(default_factory=dict)
    context: dict[str, float] = field(default_factory=dict)
    prefill_s: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> VllmFigures:
        """The figures in a file, or none if the process ended before it wrote any."""
        if not path.exists():
            return cls()
        found = cls(**json.loads(path.read_text()))
        found.answers = {
            kind: [
                [PeerToken(one["token_id"], one["logprob"], tuple(map(tuple, one["top"]))) for one in answer]
                for answer in answers
            ]
            for kind, answers in found.answers.items()
        }
        return found

    def write(self, path: Path) -> None:
        whole = path.with_name(path.name + ".new")
        whole.write_text(json.dumps(asdict(self)))
        whole.replace(path)


def register_weights(job: VllmJob) -> None:
    """Make `LOAD_FORMAT` a load format of vLLM whose weights are the same as loramux's."""
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    base: Any = importlib.import_module("vllm.model_executor.model_loader.base_loader").BaseModelLoader
    weights = RandomWeights(torch.device(job.device), getattr(torch, job.dtype))

    class RandomLoader(base):  # type: ignore[misc,valid-type]
        def download_model(self, model_config: Any) -> None:
            """Nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights((name, weights.tensor(name, tuple(shape))) for name, shape in job.shapes.items())

    loaders.register_model_loader(LOAD_FORMAT)(RandomLoader)


class VllmEngine:
    def __init__(self, job: VllmJob) -> None:
        self.job = job
        arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
        engine = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine
        self._sampling = importlib.import_module("vllm.sampling_params").SamplingParams
        lora = importlib.import_module("vllm.lora.request").LoRARequest
        register_weights(job)
        num_adapters = len(job.adapters)
        lora_settings = {
            "enable_lora": True,
            "max_loras": num_adapters,
            "max_cpu_loras": num_adapters,
            "max_lora_rank": job.rank,
        }
        sizes = sorted({1, len(job.checked), len(job.prefill), len(job.decode)})
        self.engine: Any = engine.from_engine_args(
            arguments(
                model=job.model_dir,
                load_format=LOAD_FORMAT,
                skip_tokenizer_init=True,
                dtype=job.dtype,
                seed=0,
                max_model_len=job.max_len,
                max_num_seqs=len(job.decode),
                max_num_batched_tokens=job.max_batch_tokens,
                kv_cache_memory_bytes=job.cache_bytes,
                enable_prefix_caching=False,
                enable_flashinfer_autotune=False,
                generation_config="vllm",
                disable_log_stats=True,
                compilation_config={"cudagraph_capture_sizes": sizes},
                **(lora_settings if num_adapters else {}),
            )
        )
        self.adapters = [lora(f"a{place}", place + 1, path) for place, path in enumerate(job.adapters)]
        self._numbers = itertools.count()

    def add(self, prompts: Sequence[Sequence[int]], num_tokens: int, has_adapters: bool, **sampling: Any) -> list[str]:
        """Queue a request per prompt, and return their ids."""
        params = self._sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **sampling)
        names = []
        for place, prompt in enumerate(prompts):
            names.append(str(next(self._numbers)))
            adapter = self.adapters[place % len(self.adapters)] if has_adapters else None
            self.engine.add_request(names[-1], {"prompt_token_ids": list(prompt)}, params, lora_request=adapter)
        return names

    def run(self) -> Iterator[tuple[float, list[Any]]]:
        """Step until all requests have ended. For each step with outputs, the time and the outputs."""
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            if outputs:
                yield time.perf_counter(), outputs

    def answers(self, has_adapters: bool) -> list[list[PeerToken]]:
        found: dict[str, list[PeerToken]] = {}
        names = self.add(self.job.checked, self.job.num_checked, has_adapters, logprobs=2)
        for _, outputs in self.run():
            for output in outputs:
                completion = output.outputs[0]
                found[output.request_id] = [
                    _token(token, listed)
                    for token, listed in zip(completion.token_ids, completion.logprobs or (), strict=True)
                ]
        return [found[name] for name in names]

    def decode(self, has_adapters: bool) -> tuple[float, float]:
        """Mean seconds of a step in which all sequences decode, as for loramux, and their mean context in tokens."""
        prompts, wanted = self.job.decode, self.job.num_steps
        num_tokens = NUM_STAGGERED + NUM_WARM_STEPS + wanted
        names = set(self.add(prompts, num_tokens, has_adapters))
        times: list[float] = []
        contexts: list[float] = []
        for now, outputs in self.run():
            listed = [output for output in outputs if output.request_id in names]
            if len(listed) < len(prompts) or any(output.finished for output in listed):
                continue
            times.append(now)
            generated = statistics.mean(len(output.outputs[0].token_ids) for output in listed)
            contexts.append(statistics.mean(map(len, prompts)) + generated)
        times, contexts = times[NUM_WARM_STEPS:], contexts[NUM_WARM_STEPS:]
        if len(times) < wanted // 2 + 1:
            raise RuntimeError(f"only {len(times)} steps decoded all {len(prompts)} sequences")
        return (times[-1] - times[0]) / (len(times) - 1), statistics.mean(contexts)

    def prefill(self, has_adapters: bool) -> float:
        """Median seconds from the first of the prompts to the last first token."""
        seconds = []
        for _ in range(self.job.num_warm_prefills + self.job.num_prefills):
            started = time.perf_counter()
            self.add(self.job.prefill, 1, has_adapters)
            ended = max(now for now, _ in self.run())
            seconds.append(ended - started)
        return statistics.median(seconds[self.job.num_warm_prefills :])


def _token(token: int, listed: Mapping[int, Any]) -> PeerToken:
    top = sorted(((int(one), float(value.logprob)) for one, value in listed.items()), key=lambda item: -item[1])
    return PeerToken(int(token), float(listed[token].logprob), tuple(top))


def main(argv: Sequence[str]) -> int:
    job = VllmJob(**json.loads(Path(argv[0]).read_text()))
    out, figures = Path(job.out), VllmFigures()
    figures.version = importlib.import_module("vllm").__version__
    started = time.perf_counter()
    engine = VllmEngine(job)
    figures.start_s = time.perf_counter() - started
    figures.write(out)
    for kind in ("base", "adapters") if job.adapters else ("base",):
        has_adapters = kind == "adapters"
        figures.answers[kind] = engine.answers(has_adapters)
        figures.write(out)
        figures.step_s[kind], figures.context[kind] = engine.decode(has_adapters)
        figures.write(out)
        figures.prefill_s[kind] = engine.prefill(has_adapters)
        figures.write(out)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # Everything is written. Do not spend a card's time on taking the engine apart.
    os._exit(status)
