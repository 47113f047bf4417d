"""Train the adapters of `loramux demo --real` with peft, on examples that this script makes.

python docs/examples/train/train.py --base SmolLM2-135M-Instruct.Q4_1.gguf --out my-adapters
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from examples import Example, Task, draw_training
from peft import LoraConfig, PeftModel, get_peft_model
from tasks import TASKS
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
SEED = 54
RANK = 8
FIRST_LAYER = 14
"""Layers before this one stay as they are. Training needs no gradients there."""

BATCH = 8
BATCHES_TO_SORT = 10
WARM_UP = 10
LEARNING_RATE = 1e-3
PROGRESS_EVERY = 10
SAVE_EVERY = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", type=Path, required=True, help="the base as a GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="directory of the new adapters")
    parser.add_argument("--only", choices=[task.name for task in TASKS], help="train this adapter alone")
    parser.add_argument("--steps", type=int, help="number of steps, instead of each task's own")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for task in TASKS:
        if arguments.only in (None, task.name):
            train(task, arguments.base, arguments.out / task.name, arguments.steps or task.num_steps)


def train(task: Task, base: Path, out: Path, num_steps: int) -> None:
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(base.parent, gguf_file=base.name)
    model = adapted(base)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)
    rows = [encode(example, tokenizer) for example in draw_training(task, num_steps * BATCH, SEED)]
    prefix = common_prefix([prompt for prompt, _ in rows])
    batches = sorted_batches([(prompt[len(prefix) :], answer) for prompt, answer in rows])
    started = time.monotonic()
    for step, batch in enumerate(batches, start=1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate(step, num_steps)
        loss = answer_loss(model, prefix, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % PROGRESS_EVERY == 0:
            print(f"{task.name} {step}/{num_steps} loss {loss:.4f} {time.monotonic() - started:.0f} s", flush=True)
        if step % SAVE_EVERY == 0 or step == num_steps:
            save(model, out)


def adapted(base: Path) -> PeftModel:
    """Return the base, dequantised, with an untrained adapter. The base keeps bfloat16, the adapter float32."""
    model = AutoModelForCausalLM.from_pretrained(
        base.parent, gguf_file=base.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    num_layers = model.config.num_hidden_layers
    config = LoraConfig(
        r=RANK,
        lora_alpha=4 * RANK,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
        layers_to_transform=list(range(FIRST_LAYER, num_layers)),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def rate(step: int, num_steps: int) -> float:
    """Return the share of the learning rate: up in a line, then down along a cosine."""
    if step < WARM_UP:
        return step / WARM_UP
    return 0.5 + 0.5 * math.cos(math.pi * (step - WARM_UP) / max(1, num_steps - WARM_UP))


Row = tuple[list[int], list[int]]
"""The tokens of a prompt, and those of its answer."""

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens, which of them are no padding, and which of them belong to answers; each of [batch, length]."""


def common_prefix(prompts: list[list[int]]) -> list[int]:
    """Return the tokens that start all prompts. Each step computes them once, not once for each row."""
    first, last = min(prompts), max(prompts)
    return first[: next(place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)]


def sorted_batches(rows: list[Row]) -> list[Batch]:
    """Put examples of about the same length into one batch, which then needs little padding."""
    order = torch.Generator().manual_seed(SEED)
    batches: list[list[Row]] = []
    for start in range(0, len(rows), BATCH * BATCHES_TO_SORT):
        near = sorted(rows[start : start + BATCH * BATCHES_TO_SORT], key=lambda row: sum(map(len, row)))
        cut = [near[first : first + BATCH] for first in range(0, len(near), BATCH)]
        batches += [cut[index] for index in torch.randperm(len(cut), generator=order).tolist()]
    return [padded(batch) for batch in batches]


def encode(example: Example, tokenizer: PreTrainedTokenizerBase) -> Row:
    text = tokenizer.apply_chat_template(example.messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = tokenizer(example.answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return prompt, answer


def padded(rows: list[Row]) -> Batch:
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    is_real, is_answer = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        is_real[row, :end] = 1
        is_answer[row, len(prompt) : end] = True
    return tokens, is_real, is_answer


def answer_loss(
    model: PeftModel, prefix: list[int], tokens: torch.Tensor, is_real: torch.Tensor, is_answer: torch.Tensor
) -> torch.Tensor:
    causal = model.get_base_model()
    cache = causal.model(input_ids=torch.tensor([prefix]), use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(tokens))
    mask = torch.cat([torch.ones(len(tokens), len(prefix), dtype=torch.long), is_real], dim=1)
    hidden = causal.model(input_ids=tokens, attention_mask=mask, past_key_values=cache).last_hidden_state
    # The vocabulary is large: compute logits only where the next token belongs to an answer.
    logits = causal.lm_head(hidden[:, :-1][is_answer[:, 1:]])
    return cross_entropy(logits.float(), tokens[is_answer])


def save(model: PeftModel, out: Path) -> None:
    """Save the adapter in bfloat16, in PEFT's format."""
    weights = {name: weight.bfloat16() for name, weight in model.state_dict().items() if "lora_" in name}
    model.peft_config["default"].base_model_name_or_path = BASE
    # Without this argument, peft would look for the base on a hub.
    model.save_pretrained(out, state_dict=weights, save_embedding_layers=False)


if __name__ == "__main__":
    main()
