"""Trains the demo's tokenizer, base model and three adapters, or checks existing files.

`python admin/demo/train.py --out DIR` takes about 25 minutes on one core; `--check DIR` takes one minute.
"""

import argparse
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from loramux.admin.demo.check import check
from loramux.admin.demo.corpus import Conversation, Corpus
from loramux.admin.demo.styles import ADAPTER_STYLES
from loramux.admin.demo.tokenizer import IGNORED, PAD, encoded, train_tokenizer

SEED = 20240
ATTENTION_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The training schedule of one model."""

    steps: int
    batch_size: int
    learning_rate: float


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


def fit(
    model: torch.nn.Module,
    draw: Callable[[], Conversation],
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    title: str,
) -> float:
    """Train every parameter that requires a gradient, and return the last loss."""
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, recipe.steps // 20)

    def rate(step: int) -> float:
        return min((step + 1) / warmup, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / recipe.steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    pad = tokenizer.get_vocab()[PAD]
    order = random.Random(SEED)
    waiting: list[list[tuple[list[int], list[int]]]] = []
    loss = math.nan
    model.train()
    with Progress() as progress:
        bar = progress.add_task(title, total=recipe.steps)
        for _ in range(recipe.steps):
            if not waiting:
                # Batch examples of similar length to reduce padding, then shuffle the batches.
                pool = [encoded(draw(), tokenizer) for _ in range(recipe.batch_size * 16)]
                pool.sort(key=lambda example: len(example[0]))
                waiting = [pool[i : i + recipe.batch_size] for i in range(0, len(pool), recipe.batch_size)]
                order.shuffle(waiting)
            batch = waiting.pop()
            width = max(len(ids) for ids, _ in batch)
            input_ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in batch])
            labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in batch])
            # Padding is on the right, where causal attention never looks, so no mask is needed.
            output = model(input_ids=input_ids, labels=labels)
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(learnt, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            loss = output.loss.item()
            progress.update(bar, advance=1, description=f"{title} loss {loss:.4f}")
    return loss


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
    fit(model, Corpus(SEED + 1).base_example, tokenizer, recipe, "base")
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.bfloat16().save_pretrained(out)


def train_adapter(base: Path, out: Path, style: str, recipe: Recipe | None = None) -> None:
    """Train an adapter in float32 arithmetic on the shipped base, whose weights are rounded to bfloat16."""
    rank, alpha, modules = ADAPTER_SHAPES[style]
    # Without a task type, PEFT writes an auto_mapping that names classes of this machine's libraries.
    lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, task_type=TaskType.CAUSAL_LM)
    torch.manual_seed(SEED)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), lora)
    corpus = Corpus(SEED + 2)
    fit(model, lambda: corpus.conversation(style), tokenizer, recipe or ADAPTER_RECIPES[style], style)
    save_adapter(model, out)


def save_adapter(model: PeftModel, out: Path) -> None:
    """Write only the two files of a PEFT directory, without this machine's paths."""
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(str(out))
    (out / "README.md").unlink(missing_ok=True)
    tensors = out / "adapter_model.safetensors"
    save_file({k: v.to(torch.bfloat16) for k, v in load_file(tensors).items()}, tensors, metadata={"format": "pt"})
    config_path = out / "adapter_config.json"
    config = json.loads(config_path.read_text())
    config["base_model_name_or_path"] = "loramux-demo"
    config["target_modules"] = sorted(config["target_modules"])
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


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
