"""Trains an adapter with TRL's AsyncGRPOTrainer, whose rollouts a server generates. Writes what the trainer logged.

The reward is the share of vowels, because a tiny model can learn it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

TOPICS = ("ships", "tea", "rain", "trains")
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {"content": {"close_pattern": r"(?:<\|end\|>|$)", "content": "text"}},
}
"""How TRL finds the answer between the demo base's tokens."""


def share_of_vowels(completions: list[Any], **_: Any) -> list[float]:
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(character in "aeiou" for character in text) / max(1, len(text)) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--url", "--base", "--output"):
        parser.add_argument(name, required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    # TRL asks for the name of a card even on a CPU.
    torch.cuda.get_device_name = lambda device=None: "CPU"
    prompts = [{"prompt": [{"role": "user", "content": f"Tell me about {topic}"}]} for topic in TOPICS]
    tokenizer = AutoTokenizer.from_pretrained(arguments.base, padding_side="left")
    tokenizer.response_template = TEMPLATE
    config = AsyncGRPOConfig(
        output_dir=arguments.output,
        vllm_server_base_url=arguments.url,
        max_steps=arguments.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-3,
        weight_sync_steps=1,
        max_staleness=1,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = AsyncGRPOTrainer(
        model=arguments.base,
        reward_funcs=share_of_vowels,
        args=config,
        train_dataset=Dataset.from_list(prompts * 60),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
    Path(arguments.output, "log.json").write_text(json.dumps(trainer.state.log_history))


# TRL's own process for rollouts imports this file.
if __name__ == "__main__":
    main()
