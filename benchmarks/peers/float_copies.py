"""Float copies of quantised bases, with which peft computes the reference for a quantised server's answers."""

from __future__ import annotations

import shutil
import subprocess

import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.child_server import server_environment
from benchmarks.peers.llama_server import LlamaFiles, quantize
from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.system import SystemFailed
from benchmarks.random_model import Shape
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.quantizing import quantize as quantizing

WEIGHTS = "model.safetensors"

READ_GGUF = """
import sys
scripts, source, destination = sys.argv[1:]
sys.path.insert(0, scripts + "/gguf-py")
import gguf, torch
from safetensors.torch import save_file
tensors = {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(source).tensors}
save_file({name: torch.from_numpy(value.copy()).float() for name, value in tensors.items()}, destination)
"""
"""Dequantises with llama.cpp's own Python package, in the interpreter of its scripts."""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def own_copy(files: ModelFiles, method: str) -> ModelFiles:
    """A copy of the files whose base has the values of loramux's base after `--quantization`, as floats."""
    codes = files.directory / f"codes-{method}"
    if not codes.exists():
        quantizing.quantize(files.base, codes, method, lambda done, total: None)
    tensors = load_file(files.base / WEIGHTS)
    weights = BaseWeights(files.base, codes)
    for name in quantizing.quantized_names(ModelConfig.load(files.base)):
        tensors[name] = torch.from_numpy(weights.rows(name.removesuffix(".weight"), 0, len(tensors[name])).copy())
    return _copy(files, method, tensors)


def llama_copy(files: ModelFiles, found: LlamaFiles, quantized: str) -> ModelFiles:
    """A copy of the files whose base has the values of llama.cpp's base in the format `quantized`, as floats."""
    source, read = quantize(found, files, quantized), files.directory / "gguf" / f"floats-{quantized}.safetensors"
    command = [str(found.python), "-c", READ_GGUF, str(found.scripts), str(source), str(read)]
    ran = subprocess.run(command, capture_output=True, text=True, env=server_environment({}), check=False)
    if ran.returncode != 0:
        raise SystemFailed(f"{source} cannot be dequantised:\n{ran.stderr[-2000:]}")
    return _copy(files, quantized, dict(named(*tensor, files.shape) for tensor in load_file(read).items()))


def named(name: str, values: torch.Tensor, shape: Shape) -> tuple[str, torch.Tensor]:
    """Return a GGUF tensor's name in transformers, and its values with the rows in transformers' order."""
    stem = name.removesuffix(".weight")
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.weight", values
    _, layer, kind = stem.split(".")
    num_heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}.get(kind)
    if num_heads is not None:
        # llama.cpp rotates pairs of adjacent features. transformers rotates pairs that are half a head apart.
        values = values.view(num_heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight", values


def _copy(files: ModelFiles, name: str, tensors: dict[str, torch.Tensor]) -> ModelFiles:
    copy = ModelFiles(files.directory / f"floats-{name}", files.shape, files.num_adapters, files.rank)
    shutil.rmtree(copy.directory, ignore_errors=True)
    shutil.copytree(files.base, copy.base, ignore=shutil.ignore_patterns(WEIGHTS))
    save_file(
        {key: value.float().contiguous() for key, value in tensors.items()}, copy.base / WEIGHTS, {"format": "pt"}
    )
    (copy.directory / "adapters").symlink_to(files.directory / "adapters")
    return copy
