from __future__ import annotations

import hashlib
import importlib
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.decoder.weights import WeightSource
from loramux.engine.device.accelerator import Accelerator, HostAccelerator
from loramux.engine.device.backend import Backend, CompileAhead, DenseLinear
from loramux.engine.loop.assembly import AssembledEngine, assemble_engine
from loramux.engine.loop.config import EngineConfig
from loramux.kernels.gpu.linear.coded_weights import place_codes
from loramux.kernels.quantized import E4M3, INT8, UINT4, QuantizedWeight

SIZES = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 208,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rope_theta": 1e4, **SIZES}
MIMO = {**LLAMA, "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "rope_theta": 1e4,
    **SIZES,
}
MIXTURE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "mlp_only_layers": [0],
    **SIZES,
}
GEMMA_MIXTURE = {
    "architectures": ["Gemma4ForCausalLM"],
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 64,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    **SIZES,
}

HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    **SIZES,
}

DEVICES = itertools.count(1000)
"""Unused device numbers. No number is reused, because kernels cache their compiled programs by device."""


class ZeroWeights:
    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)


CODEBOOKS = {
    "self_attn": UINT4,
    "o_proj": E4M3,
    "mlp": np.linspace(-1, 1, 16, dtype=np.float32) ** 3,
    "down_proj": INT8,
}
"""Codebooks by a part of a linear's name. If several parts match, the last one counts."""


class CodedZeroWeights:
    """Zero weights whose linear layers in layers are quantised in several formats."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | QuantizedWeight:
        codebook = next((CODEBOOKS[part] for part in reversed(name.split(".")) if part in CODEBOOKS), None)
        if codebook is None or len(shape) != 2:
            return torch.zeros(shape, dtype=torch.bfloat16)
        num_codes = shape[1] if codebook.size == 256 else shape[1] // 2
        # FP8 weights have one scale per output, so large steps can round their inputs.
        groups = shape[0], 1 if codebook is E4M3 else shape[1] // 16
        return QuantizedWeight(
            codes=np.zeros((shape[0], num_codes), np.uint8),
            codebook=codebook,
            scales=np.ones(groups, np.float32),
            zeros=np.ones(groups, np.int16) if codebook is UINT4 else None,
        )


@dataclass(frozen=True, slots=True)
class FakeDriver:
    capability: int
    device: int

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def fake_driver(capability: int) -> Iterator[None]:
    """Activate a driver for a new GPU without compiled kernels. `capability` is 10 times the compute capability."""
    from triton.runtime import driver

    before = driver._active
    driver.set_active(FakeDriver(capability, next(DEVICES)))
    try:
        yield
    finally:
        driver._active = before


class UnlaunchedProgram:
    function = packed_metadata = None

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        return None


def cache_key(source: Any, target: Any, options: dict[str, Any]) -> str:
    """A program's key in Triton's cache, which `triton.compile` looks up first."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    backend = make_backend(target)
    key = get_cache_key(source, backend, backend.parse_options(options), env_vars=get_cache_invalidating_env_vars())
    return f"{source.name}-{hashlib.sha256(key.encode()).hexdigest()}"


def start_engine(
    directory: Path,
    model: dict[str, Any],
    compile_ahead: CompileAhead | None,
    accelerator: Accelerator | None = None,
    weights: WeightSource | None = None,
    **settings: Any,
) -> AssembledEngine:
    """Start an engine that is set up for a GPU but uses host memory."""
    (directory / "config.json").write_text(json.dumps(model))
    names = "kernels", "sampling", "linear.coded_linear"
    gpu, sampling, coded_linear = (importlib.import_module(f"loramux.kernels.gpu.{name}") for name in names)
    accelerator = accelerator or HostAccelerator()
    device = accelerator.device
    backend = Backend(
        accelerator=accelerator,
        make_kernels=lambda pool, shapes: gpu.GpuKernels(
            pool, num_processors=132, contiguous_attention=lambda *arguments: None
        ),
        make_linear=DenseLinear,
        activation_dtype=None,
        make_quantized_linear=partial(coded_linear.make_coded_linear, device=device, rounds_inputs=True),
        make_quantized_experts=lambda number, weights, bias: place_codes(weights, number, bias, device),
        sample_tokens=sampling.sample_tokens,
        compiles=True,
        compile_ahead=compile_ahead,
    )
    config = EngineConfig(
        model_dir=str(directory),
        blob_url="",
        cache_dir="",
        dtype="bfloat16",
        **{"pool_bytes": 8 << 20, "max_batch_tokens": 16, "max_sequences": 4, "num_threads": 1, **settings},
    )
    return assemble_engine(config, lambda: None, MemoryStager({}), weights or ZeroWeights(), backend)
