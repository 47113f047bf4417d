"""Directories that TRL's trainers write with the `peft_config` of their users, which can have any option of PEFT.

- `target_modules="all-linear"` is saved as the list of what it selected, by the releases of PEFT since 0.8.
- DPO with two adapters saves `train` and `reference` below the output directory, and later releases save `ref`.
- `setup_chat_format` adds ChatML's tokens and resizes the embedding, so that PEFT saves copies of both matrices.
- A reward model is a sequence classifier with a head, `score`.
- Older releases save pickles unless `save_safetensors` is set.

Sources: trl/trainer/*_trainer.py, `peft_model.py` and `tuners/lora/config.py` of PEFT, transformers' Trainer.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.conformance.tiny_models import ATTENTION
from tests.conformance.trainers import refusals
from tests.conformance.trainers.recipe import Recipe, Refusal, Settings
from tests.conformance.trainers.saved_files import (
    Change,
    has,
    is_classifier,
    is_in,
    is_named,
    sets,
)

PEFT = {
    "0.7.4": "0.6",
    "0.9.6": "0.11",
    "0.12.2": "0.13",
    "0.16.1": "0.15",
    "0.20.0": "0.17",
    "0.24.0": "0.18",
    "0.29.0": "0.19",
}
"""The release of PEFT that each release of TRL used."""

CHECKPOINT = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin")


def plain(*names: str, **further: Any) -> Settings:
    return {"r": 8, "lora_alpha": 16, "target_modules": list(names) or ATTENTION, **further}


def _recipe(release: str, about: str, base: str, settings: Settings, *changes: Change, **further: Any) -> Recipe:
    return Recipe(
        name=f"TRL {release}: {about}",
        base=base,
        peft=PEFT[release],
        settings=settings,
        changes=(has("README.md", "training_args.bin"), *changes),
        **further,
    )


def refused(release: str, about: str, refusal: Refusal, **keys: Any) -> Recipe:
    return _recipe(release, about, "llama", plain(), sets(**keys), refusal=refusal)


_ALL: Settings = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}

TRL = [
    *(
        _recipe("0.20.0", f"all-linear of {base}", base, _ALL)
        for base in (
            "llama",
            "qwen3",
            "mistral-window",
            "gemma3",
            "phi3-window",
            "smollm3",
            "olmo2",
            "granite",
            "cohere",
            "qwen3_5",
        )
    ),
    *(_recipe(release, "q and v", "llama", plain("q_proj", "v_proj")) for release in PEFT),
    _recipe("0.24.0", "a checkpoint", "qwen2", _ALL, has(*CHECKPOINT), is_in("checkpoint-25"), pushed="checkpoint-25"),
    _recipe(
        "0.12.2", "DPO with two adapters", "llama", plain(), is_in("train"), refusal=refusals.is_in_folder("train")
    ),
    _recipe("0.12.2", "DPO's trained adapter", "llama", plain(), is_in("train"), pushed="train"),
    _recipe(
        "0.29.0",
        "GRPO beside its reference",
        "llama",
        plain(),
        has("ref/adapter_config.json", "ref/adapter_model.safetensors"),
    ),
    _recipe("0.16.1", "setup_chat_format", "llama", plain(modules_to_save=["lm_head", "embed_tokens"]), num_added=2),
    _recipe(
        "0.16.1",
        "copies of a resized embedding",
        "llama",
        plain(),
        num_added=2,
        save_embedding_layers=True,
        dtype=torch.float32,
        warnings=("base_weights_included",),
    ),
    _recipe(
        "0.20.0",
        "copies of an embedding",
        "llama",
        plain(),
        save_embedding_layers=True,
        dtype=torch.float32,
        warnings=("base_weights_included",),
    ),
    _recipe("0.16.1", "trained tokens", "llama", plain(trainable_token_indices={"embed_tokens": [3, 300]})),
    _recipe(
        "0.24.0",
        "trained tokens of a tied base",
        "qwen2",
        plain(trainable_token_indices=[3, 300], ensure_weight_tying=True),
    ),
    _recipe("0.24.0", "tied matrices", "qwen2", plain(modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    _recipe("0.16.1", "a LoRA of the head", "llama", plain("q_proj", "lm_head"), save_embedding_layers=False),
    _recipe("0.16.1", "a LoRA of the embedding", "llama", plain("q_proj", "embed_tokens"), save_embedding_layers=False),
    _recipe("0.16.1", "biases of B", "llama", plain(lora_bias=True)),
    _recipe(
        "0.16.1",
        "rank and alpha by module",
        "llama",
        plain(rank_pattern={"q_proj": 4}, alpha_pattern={"v_proj": 4}, use_rslora=True),
    ),
    _recipe(
        "0.16.1",
        "ranks by regular expressions",
        "llama",
        plain(rank_pattern={r"layers\.0\..*q_proj": 2}),
    ),
    _recipe("0.24.0", "orthogonal", "llama", plain(init_lora_weights="orthogonal")),
    _recipe("0.24.0", "gaussian", "llama", plain(init_lora_weights="gaussian")),
    _recipe("0.16.1", "fp16", "qwen2", plain(), dtype=torch.float16),
    _recipe("0.20.0", "float32", "gemma2", plain(), dtype=torch.float32),
    _recipe(
        "0.20.0",
        "some experts",
        "gpt-oss",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": "all-linear",
            "target_parameters": ["1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"],
        },
    ),
    _recipe(
        "0.7.4",
        "a pickle",
        "llama",
        plain(),
        is_named("adapter_model.bin"),
        refusal=refusals.is_pickle("adapter_model.bin"),
    ),
    _recipe("0.24.0", "a reward model", "llama", plain(), is_classifier("SEQ_CLS", "score"), is_classifier=True),
    _recipe("0.24.0", "trained norms", "llama", plain(modules_to_save=["norm"])),
    refused("0.16.1", "OLoRA", refusals.changed_base("olora"), init_lora_weights="olora"),
    refused(
        "0.16.1",
        "CorDA",
        refusals.changed_base("corda"),
        init_lora_weights="corda",
        corda_config={"corda_method": "kpm"},
    ),
    refused(
        "0.29.0",
        "LoRA-GA",
        refusals.changed_base("lora_ga"),
        init_lora_weights="lora_ga",
        lora_ga_config={"direction": "ArB2r"},
    ),
    refused("0.20.0", "QALoRA", refusals.is_not_supported("use_qalora"), use_qalora=True),
    refused("0.29.0", "BD-LoRA", refusals.is_not_supported("use_bdlora"), use_bdlora={"nblocks": 2}),
    refused("0.24.0", "Arrow", refusals.is_not_supported("arrow_config"), arrow_config={"top_k": 3}),
    refused(
        "0.20.0", "rank 512", Refusal("rank_out_of_range", "a rank must be between 1 and 256, not 512", "r"), r=512
    ),
    *(
        refused("0.24.0", kind, refusals.NOT_LORA, peft_type=kind)
        for kind in ("ADALORA", "IA3", "LOHA", "VERA", "PROMPT_TUNING")
    ),
    *(
        _recipe("0.24.0", f"bias={bias} on a base without biases", "llama", plain(), sets(bias=bias))
        for bias in ("all", "lora_only")
    ),
    _recipe("0.24.0", "bias=all on a base with biases", "qwen2", plain(bias="all"), loads_in_peft=True),
]
