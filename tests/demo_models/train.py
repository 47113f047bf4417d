"""Trains the demo's tokenizer, base model and three adapters, or checks existing files.

`python -m tests.demo_models.train --out DIR` takes about 25 minutes on one core. `--check DIR` takes one minute.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.demo_models.check import check
from tests.demo_models.corpus import Corpus
from tests.demo_models.fitting import SEED, Recipe, fit, save_adapter
from tests.demo_models.styles import ADAPTER_STYLES
from tests.demo_models.tokenizer import PAD, encoded, train_tokenizer

ATTENTION_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj"]


BASE_RECIPE = Recipe(steps=2500, batch_size=32, learning_rate=2e-3)
ADAPTER_RECIPES = {
    "pirate": Recipe(600, 32, 4e-3),
    "formal": Recipe(800, 32, 4e-3),
    "json": Recipe(450, 32, 2e-3),
}
ADAPTER_SHAPES = {
    "pirate": (8, 16, ATTENTION_LINEARS),
    "formal": (4, 16, ["q_proj", "v_proj"]),
    "json": (16, 32, [*ATTENTION_LINEARS, "gate_proj", "up_proj", "down_proj"]),
}


def train_base(out: Path, recipe: Recipe = BASE_RECIPE) -> None:
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer(out, SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        attention_bias=False,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    corpus = Corpus(SEED + 1)
    fit(model, lambda: encoded(corpus.base_example(), tokenizer), tokenizer.get_vocab()[PAD], recipe, "base")
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.bfloat16().save_pretrained(out)


def train_adapter(base: Path, out: Path, style: str, recipe: Recipe | None = None) -> None:
    rank, alpha, modules = ADAPTER_SHAPES[style]
    # Without a task type, PEFT writes an auto_mapping that names classes of this machine's libraries.
    lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, task_type=TaskType.CAUSAL_LM)
    torch.manual_seed(SEED)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), lora)
    corpus = Corpus(SEED + 2)
    pad = tokenizer.get_vocab()[PAD]
    fit(
        model,
        lambda: encoded(corpus.conversation(style), tokenizer),
        pad,
        recipe or ADAPTER_RECIPES[style],
        style,
    )
    save_adapter(model, out, "loramux-demo")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="train everything into this directory")
    what.add_argument("--check", type=Path, help="check the base and the adapters in this directory")
    parser.add_argument("--only", nargs="+", choices=("base", *ADAPTER_STYLES), default=("base", *ADAPTER_STYLES))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.check:
        return check(arguments.check)
    if "base" in arguments.only:
        train_base(arguments.out / "base")
    for style in ADAPTER_STYLES:
        if style in arguments.only:
            train_adapter(arguments.out / "base", arguments.out / "adapters" / style, style)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
