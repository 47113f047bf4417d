"""The training loop of the demo's models, and the files of a trained adapter."""

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from rich.progress import Progress
from safetensors.torch import load_file, save_file

from tests.demo_models.tokenizer import IGNORED

SEED = 20240


@dataclass(frozen=True, slots=True)
class Recipe:
    steps: int
    batch_size: int
    learning_rate: float


def fit(
    model: torch.nn.Module,
    draw: Callable[[], tuple[list[int], list[int]]],
    pad: int,
    recipe: Recipe,
    title: str,
) -> float:
    """Train every parameter that requires a gradient on token ids and labels, and return the last loss."""
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, recipe.steps // 20)

    def rate(step: int) -> float:
        return min((step + 1) / warmup, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / recipe.steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    order = random.Random(SEED)
    waiting: list[list[tuple[list[int], list[int]]]] = []
    loss = math.nan
    model.train()
    with Progress() as progress:
        bar = progress.add_task(title, total=recipe.steps)
        for _ in range(recipe.steps):
            if not waiting:
                # Batch examples of similar length to reduce padding, then shuffle the batches.
                pool = [draw() for _ in range(recipe.batch_size * 16)]
                pool.sort(key=lambda example: len(example[0]))
                waiting = [pool[i : i + recipe.batch_size] for i in range(0, len(pool), recipe.batch_size)]
                order.shuffle(waiting)
            batch = waiting.pop()
            width = max(len(ids) for ids, _ in batch)
            input_ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in batch])
            labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in batch])
            # Padding is on the right, so causal attention never reads it and no mask is needed.
            output = model(input_ids=input_ids, labels=labels)
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(learnt, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            loss = output.loss.item()
            progress.update(bar, advance=1, description=f"{title} loss {loss:.4f}")
    return loss


def save_adapter(model: PeftModel, out: Path, base_name: str) -> None:
    """Write the two files of a PEFT directory, without this machine's paths."""
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(str(out))
    (out / "README.md").unlink(missing_ok=True)
    tensors = out / "adapter_model.safetensors"
    save_file({k: v.to(torch.bfloat16) for k, v in load_file(tensors).items()}, tensors, metadata={"format": "pt"})
    config_path = out / "adapter_config.json"
    config = json.loads(config_path.read_text())
    config["base_model_name_or_path"] = base_name
    config["target_modules"] = sorted(config["target_modules"])
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
