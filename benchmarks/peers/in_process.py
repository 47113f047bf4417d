"""Runs peft's mixed batch and transformers' static batch in this process. All requests start and end together."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import peft_ways
from benchmarks.peers.http_questions import require_lengths
from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.system import Peer, Running, System
from benchmarks.peers.workload import PEER_KINDS, Answers, Work

NAME = "peft"
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class StaticBatch:
    model: Any

    def answer(self, work: Work, *, needs_token_ids: bool) -> Answers:
        prompts = torch.tensor([question.prompt for question in work.questions])
        adapters = [question.adapter for question in work.questions]
        if not any(adapters):
            answers, seconds = peft_ways.base_only(self.model, prompts, work.num_output)
        else:
            names = ["__base__" if adapter is None else adapter for adapter in adapters]
            answers, seconds = peft_ways.generate(self.model, prompts, work.num_output, names)
        require_lengths(NAME, [len(answer) for answer in answers], work)
        return Answers(seconds, tuple(map(tuple, answers)) if needs_token_ids else None)


@contextlib.contextmanager
def open_peft(dtype: str, threads: int, files: ModelFiles, is_check: bool) -> Iterator[Running]:
    torch.set_num_threads(threads)
    with peft_ways.quiet_transformers(), warnings.catch_warnings():
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
