"""The part of vLLM's interface that `benchmarks.gpu.vllm_child` uses, over transformers and peft on a CPU.

A test copies this file to `vllm/__init__.py`. Each step computes every sequence from its start.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

__version__ = "stand-in"

_LOADERS: dict[str, type] = {}


def register_model_loader(load_format: str) -> Callable[[type], type]:
    def register(loader: type) -> type:
        return _LOADERS.setdefault(load_format, loader)

    return register


class BaseModelLoader:
    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config


class EngineArgs(SimpleNamespace):
    pass


@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    ignore_eos: bool
    detokenize: bool
    logprobs: int | None = None


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class _Request:
    name: str
    prompt: list[int]
    params: SamplingParams
    adapter: LoRARequest | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Any]] = field(default_factory=list)


class LLMEngine:
    def __init__(self, arguments: EngineArgs) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig.from_pretrained(arguments.model)
        self._base = LlamaForCausalLM(config).to(getattr(torch, arguments.dtype)).eval()
        own = self._base.state_dict()

        def load_weights(weights: Any) -> None:
            given = dict(weights)
            assert given.keys() == own.keys()
            for name, tensor in given.items():
                own[name].copy_(tensor)

        _LOADERS[arguments.load_format](None).load_weights(SimpleNamespace(load_weights=load_weights), None)
        self._max_sequences = arguments.max_num_seqs
        self._peft: Any = None
        self._requests: list[_Request] = []

    @classmethod
    def from_engine_args(cls, arguments: EngineArgs) -> LLMEngine:
        return cls(arguments)

    def add_request(
        self, name: str, prompt: dict[str, list[int]], params: SamplingParams, lora_request: LoRARequest | None = None
    ) -> None:
        self._requests.append(_Request(name, prompt["prompt_token_ids"], params, lora_request))

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @torch.no_grad()
    def step(self) -> list[Any]:
        running = self._requests[: self._max_sequences]
        for request in running:
            logits = self._model_of(request.adapter)(torch.tensor([request.prompt + request.tokens])).logits[0, -1]
            best = logits.log_softmax(-1).topk(2)
            listed = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            request.logprobs.append({token: SimpleNamespace(logprob=logprob) for token, logprob in listed})
            request.tokens.append(int(best.indices[0]))
        outputs = [
            SimpleNamespace(
                request_id=request.name,
                finished=len(request.tokens) == request.params.max_tokens,
                outputs=[SimpleNamespace(token_ids=list(request.tokens), logprobs=request.logprobs)],
            )
            for request in running
        ]
        ended = {output.request_id for output in outputs if output.finished}
        self._requests = [request for request in self._requests if request.name not in ended]
        return outputs

    def _model_of(self, adapter: LoRARequest | None) -> Any:
        from peft import PeftModel

        if adapter is None:
            return self._base if self._peft is None else self._without_adapters
        if self._peft is None:
            self._peft = PeftModel.from_pretrained(self._base, adapter.lora_path, adapter_name=adapter.lora_name)
        elif adapter.lora_name not in self._peft.peft_config:
            self._peft.load_adapter(adapter.lora_path, adapter.lora_name)
        self._peft.set_adapter(adapter.lora_name)
        return self._peft

    def _without_adapters(self, tokens: torch.Tensor) -> Any:
        with self._peft.disable_adapter():
            return self._peft(tokens)


for _name in (
    "vllm.engine.arg_utils",
    "vllm.lora.request",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.model_loader.base_loader",
    "vllm.sampling_params",
    "vllm.v1.engine.llm_engine",
):
    sys.modules[_name] = sys.modules[__name__]
