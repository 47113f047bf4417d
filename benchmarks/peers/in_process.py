"""Runs peft's two methods of serving many adapters and transformers' static batch in this process. In a static batch,
all requests start and end together.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.http_questions import require_lengths
from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.system import Peer, Running, System
from benchmarks.peers.workload import PEER_KINDS, Answers, Work

NAME = "peft"
DTYPES = ("float32", "bfloat16")


@torch.inference_mode()
def generate(
    model: Any, prompts: torch.Tensor, num_tokens: int, adapter_names: list[str] | None
) -> tuple[list[list[int]], float]:
    """Decode a static batch greedily, and return each row's tokens and the total time in seconds.

    `adapter_names` contains one name per row (`__base__` for no adapter). If it is None, all rows use the active
    adapter.
    """
    extra: dict[str, Any] = {} if adapter_names is None else {"adapter_names": adapter_names}
    started = time.perf_counter()
    output = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        **extra,
    )
    elapsed = time.perf_counter() - started
    return output[:, prompts.shape[1] :].tolist(), elapsed


def base_only(model: Any, prompts: torch.Tensor, num_tokens: int) -> tuple[list[list[int]], float]:
    with model.disable_adapter():
        return generate(model, prompts, num_tokens, None)


def mixed_batch(model: Any, prompts: torch.Tensor, num_tokens: int) -> tuple[list[list[int]], float]:
    """Run one static batch, each row with its own adapter."""
    return generate(model, prompts, num_tokens, [f"a{row}" for row in range(len(prompts))])


def switching(model: Any, prompts: torch.Tensor, num_tokens: int) -> tuple[list[list[int]], float]:
    """Run one request after another, with `set_adapter` before each."""
    answers, total = [], 0.0
    for row in range(len(prompts)):
        started = time.perf_counter()
        model.set_adapter(f"a{row}")
        total += time.perf_counter() - started
        answer, elapsed = generate(model, prompts[row : row + 1], num_tokens, None)
        answers += answer
        total += elapsed
    return answers, total


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield


@dataclass(frozen=True, slots=True)
class StaticBatch:
    model: Any

    def answer(self, work: Work, *, needs_token_ids: bool) -> Answers:
        prompts = torch.tensor([question.prompt for question in work.questions])
        adapters = [question.adapter for question in work.questions]
        if not any(adapters):
            answers, seconds = base_only(self.model, prompts, work.num_output)
        else:
            names = ["__base__" if adapter is None else adapter for adapter in adapters]
            answers, seconds = generate(self.model, prompts, work.num_output, names)
        require_lengths(NAME, [len(answer) for answer in answers], work)
        return Answers(seconds, tuple(map(tuple, answers)) if needs_token_ids else None)


@contextlib.contextmanager
def open_peft(dtype: str, threads: int, files: ModelFiles, is_check: bool) -> Iterator[Running]:
    torch.set_num_threads(threads)
    with quiet_transformers(), warnings.catch_warnings():
        # peft uses names that are deprecated in transformers 5. Ignore the warnings.
        warnings.simplefilter("ignore", FutureWarning)
        adapters = files.adapters | (files.attention_adapters if is_check else {})
        running = StaticBatch(_load(files.base, adapters, getattr(torch, dtype)))
        try:
            yield running
        finally:
            del running
            gc.collect()


def _load(base: Path, adapters: Mapping[str, Path], dtype: torch.dtype) -> Any:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(base, dtype=dtype)
    for number, (name, directory) in enumerate(adapters.items()):
        if number == 0:
            model = PeftModel.from_pretrained(model, directory, adapter_name=name)
        else:
            model.load_adapter(directory, adapter_name=name)
    return model.to(dtype).eval()


def find_peft(threads: int) -> Peer:
    systems = tuple(System(NAME, dtype, PEER_KINDS, partial(open_peft, dtype, threads)) for dtype in DTYPES)
    versions = [f"{package} {importlib.metadata.version(package)}" for package in ("peft", "transformers")]
    return Peer(NAME, ", ".join(versions), systems, systems[0])
