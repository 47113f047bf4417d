"""Random base models of known shapes and random PEFT adapters for them, created once in a scratch folder.

`python -m benchmarks.random_model small DIRECTORY` creates a base model for the benchmarks that accept `--base`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class Shape:
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int = 32000


SHAPES = {
    "1b": Shape(2048, 16, 32, 8, 8192),
    "small": Shape(512, 8, 8, 2, 2048),
    "tiny": Shape(128, 2, 2, 1, 512, 4000),
}
"""`1b` is Llama-3.2-1B's shape with a vocabulary of 32,000."""


def make_base(shape: Shape, directory: Path, max_model_len: int = 2048) -> None:
    """Write a random bfloat16 Llama with tied embeddings to `directory`, unless the directory already contains one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if (directory / "model.safetensors").exists():
        return
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=max_model_len,
        tie_word_embeddings=True,
        # The weights are larger than usual, so that rounding does not change greedy choices.
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def load_peft(base: Path, num_adapters: int, rank: int, dtype: torch.dtype) -> Any:
    """Load the base with random adapters `a0`, `a1`, ... on all seven linear layers. The values are the same in every
    dtype.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=MODULES, init_lora_weights=False, task_type="CAUSAL_LM")
    model: Any = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=dtype), config, adapter_name="a0")
    for index in range(1, num_adapters):
        model.add_adapter(f"a{index}", config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                values = torch.randn(parameter.shape, generator=generator) * 0.05
                # Round to bfloat16, so that the values are the same in every dtype.
                parameter.copy_(values.to(torch.bfloat16))
    return model.to(dtype).eval()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_model", description=make_base.__doc__)
    parser.add_argument("size", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    if arguments.directory.exists():
        parser.error(f"{arguments.directory} exists; name a new directory")
    make_base(SHAPES[arguments.size], arguments.directory)


if __name__ == "__main__":
    main()
