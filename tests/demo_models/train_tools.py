"""Trains the tool model's tokenizer, base and adapters.

`python -m tests.demo_models.train_tools --out DIR --threads 2` takes about 30 minutes on two cores.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.demo_models.fitting import SEED, Recipe, fit, save_adapter
from tests.demo_models.tool_corpus import ToolCorpus
from tests.demo_models.tool_tokenizer import CONTEXT, TEMPLATES, encoded_example, train_tool_tokenizer

BASE_RECIPES = (
    Recipe(steps=1600, batch_size=12, learning_rate=2e-3),
    Recipe(steps=1900, batch_size=12, learning_rate=1.5e-3),
)
"""Training stages, in order. After the first stage, the model still confuses digits that it copies."""
ADAPTER_RECIPE = Recipe(steps=300, batch_size=12, learning_rate=3e-3)
ADAPTERS = {
    "sailor": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "concierge": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
"""The linear layers that each adapter targets."""


def train_base(out: Path, recipes: Sequence[Recipe] = BASE_RECIPES) -> None:
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    tokenizer = train_tool_tokenizer(out, SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    for number, recipe in enumerate(recipes):
        corpus = ToolCorpus(SEED + 10 * number + 1)
        fit(
            model,
            lambda corpus=corpus: encoded_example(corpus.example(), "base", tokenizer),  # type: ignore[misc]
            tokenizer.pad_token_id,
            recipe,
            f"base {number}",
        )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.bfloat16().save_pretrained(out)


def train_adapter(base: Path, out: Path, style: str, recipe: Recipe = ADAPTER_RECIPE) -> None:
    """Train an adapter on the saved base, in float32 arithmetic. The base's weights are already rounded to bfloat16."""
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=ADAPTERS[style], task_type=TaskType.CAUSAL_LM)
    torch.manual_seed(SEED)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    model = get_peft_model(Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32), lora)
    corpus = ToolCorpus(SEED + 2)
    fit(model, lambda: encoded_example(corpus.example(), style, tokenizer), tokenizer.pad_token_id, recipe, style)
    save_adapter(model, out, "loramux-tools-demo")
    if style == "concierge":
        shutil.copy(TEMPLATES / "concierge.jinja", out / "chat_template.jinja")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="train everything into this directory")
    parser.add_argument("--only", nargs="+", choices=("base", *ADAPTERS), default=("base", *ADAPTERS))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if "base" in arguments.only:
        train_base(arguments.out / "base")
    for style in ADAPTERS:
        if style in arguments.only:
            train_adapter(arguments.out / "base", arguments.out / "adapters" / style, style)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
