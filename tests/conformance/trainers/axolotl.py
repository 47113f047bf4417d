"""Directories that axolotl writes.

- `lora_target_linear: true` lists the last names of all linear layers but the head, in the order of a set.
- Options that a configuration leaves out are null, such as `fan_in_fan_out`.
- The output directory also contains the model's `config.json`, and folders `checkpoint-N`.
- Releases before 0.4.1 wrote `adapter_model.bin` unless `save_safetensors` was set.
- With FSDP or DeepSpeed, tensors can keep a wrapper's name. ZeRO-3 can leave them empty.
- `lora_target_parameters` trains stacked experts. Up to transformers 4, each expert had its own linear layers.

Sources: loaders/adapter.py (`find_all_linear_names`, `_build_lora_config_kwargs`), train.py.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.conformance.tiny_models import ALL_LINEARS, ATTENTION
from tests.conformance.trainers import refusals
from tests.conformance.trainers.recipe import Recipe, Settings, all_linears
from tests.conformance.trainers.saved_files import (
    Change,
    SavedFiles,
    has,
    has_prefix,
    is_classifier,
    is_in,
    is_named,
    is_whole_model,
    renames,
    sets,
)

PEFT = {"0.4.0": "0.9", "0.6.0": "0.13", "0.9.2": "0.15", "0.12.2": "0.17", "0.13.0": "0.18"}
"""The release of PEFT that each release of axolotl used."""

DECODER = r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"
_OUTPUT = ("README.md", "config.json", "special_tokens_map.json", "debug.log")
CHECKPOINT = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin")
SOME: Settings = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def _recipe(release: str, about: str, base: str, settings: Settings, *changes: Change, **further: Any) -> Recipe:
    usual = (has(*_OUTPUT), sets(fan_in_fan_out=None))
    return Recipe(
        name=f"axolotl {release}: {about}",
        base=base,
        peft=PEFT[release],
        settings=settings,
        changes=(*usual, *changes),
        **further,
    )


def is_emptied(files: SavedFiles) -> None:
    """Save what one process of ZeRO-3 holds: tensors without elements."""
    files.tensors = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in files.tensors.items()}


def named(*names: str, **further: Any) -> Settings:
    return {"r": 8, "lora_alpha": 16, "target_modules": list(names), **further}


AXOLOTL = [
    *(_recipe(release, "all linear layers", "llama", all_linears()) for release in PEFT if release != "0.4.0"),
    *(
        _recipe("0.12.2", f"all linear layers of {base}", base, all_linears())
        for base in ("mistral-window", "qwen2", "gemma2", "phi3-window", "qwen3_5", "granite")
    ),
    _recipe("0.4.0", "all linear layers, safetensors", "llama", all_linears()),
    _recipe(
        "0.4.0",
        "all linear layers",
        "llama",
        all_linears(),
        is_named("adapter_model.bin"),
        refusal=refusals.is_pickle("adapter_model.bin"),
    ),
    _recipe("0.9.2", "ChatML's tokens", "llama", all_linears(modules_to_save=["embed_tokens", "lm_head"]), num_added=2),
    _recipe(
        "0.9.2", "ChatML's tokens, tied", "qwen2", all_linears(modules_to_save=["embed_tokens", "lm_head"]), num_added=2
    ),
    _recipe("0.6.0", "DoRA", "llama", all_linears(use_dora=True)),
    _recipe("0.13.0", "DoRA of a tied base", "qwen2", all_linears(use_dora=True), dtype=torch.float32),
    _recipe("0.6.0", "rsLoRA", "mistral-window", all_linears(use_rslora=True)),
    _recipe(
        "0.9.2",
        "layers 0 and 1 by pattern",
        "llama",
        named(*ATTENTION, layers_to_transform=[0, 1], layers_pattern="layers"),
    ),
    _recipe(
        "0.9.2",
        "repeated layers",
        "llama",
        SOME,
        sets(layer_replication=[[0, 2], [1, 2]]),
        refusal=refusals.is_not_supported("layer_replication"),
    ),
    _recipe(
        "0.9.2",
        "LoftQ",
        "llama",
        SOME,
        sets(init_lora_weights="loftq", loftq_config={"loftq_bits": 4}),
        refusal=refusals.LOFTQ,
    ),
    _recipe(
        "0.12.2",
        "PiSSA",
        "llama",
        SOME,
        sets(init_lora_weights="pissa_niter_16"),
        refusal=refusals.changed_base("pissa_niter_16"),
    ),
    _recipe(
        "0.12.2",
        "EVA",
        "llama",
        named(*ATTENTION, init_lora_weights="eva"),
        sets(eva_config={"rho": 1.0, "tau": 0.99}),
    ),
    _recipe("0.12.2", "a few tokens", "llama", named(*ATTENTION, trainable_token_indices=[5, 310, 7])),
    _recipe("0.12.2", "a few tokens of a tied base", "qwen2", named(*ATTENTION, trainable_token_indices=[5, 310])),
    _recipe(
        "0.13.0",
        "stacked experts",
        "mixtral",
        named("q_proj", "v_proj", target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ),
    _recipe(
        "0.13.0",
        "patterns",
        "llama",
        named(*ALL_LINEARS, rank_pattern={"q_proj": 4, "layers.1.mlp.up_proj": 2}, alpha_pattern={"q_proj": 12}),
    ),
    _recipe("0.12.2", "excluded modules", "llama", named(*ALL_LINEARS, exclude_modules=["layers.0.mlp.up_proj"])),
    _recipe(
        "0.9.2",
        "FSDP",
        "llama",
        all_linears(),
        renames(r"layers\.(\d+)\.", r"layers.\1._fsdp_wrapped_module."),
        loads_in_peft=False,
        warnings=("older_names",),
    ),
    _recipe(
        "0.9.2",
        "torch.compile",
        "llama",
        all_linears(),
        has_prefix("_orig_mod."),
        loads_in_peft=False,
        warnings=("older_names",),
    ),
    _recipe(
        "0.6.0",
        "activation checkpoints",
        "llama",
        all_linears(),
        renames(r"\.mlp\.", r"._checkpoint_wrapped_module.mlp."),
        loads_in_peft=False,
        warnings=("older_names",),
    ),
    _recipe(
        "0.9.2",
        "a checkpoint of DeepSpeed",
        "llama",
        SOME,
        has("global_step10/mp_rank_00_model_states.pt", "latest", "zero_to_fp32.py", *CHECKPOINT),
    ),
    _recipe("0.9.2", "a checkpoint of ZeRO-3", "llama", SOME, is_emptied, refusal=refusals.ZERO_3),
    *(
        _recipe(
            "0.12.2",
            f"the decoder of {base} by a regular expression",
            base,
            {"r": 8, "lora_alpha": 16, "target_modules": DECODER},
            warnings=("older_names", "selected_by_tensors"),
        )
        for base in ("gemma3-multimodal", "qwen3_vl", "llava")
    ),
    _recipe("0.9.2", "full fine-tuning", "llama", SOME, is_whole_model, refusal=refusals.WHOLE_MODEL),
    _recipe("0.13.0", "a reward model", "llama", SOME, is_classifier("SEQ_CLS", "score"), is_classifier=True),
    _recipe(
        "0.13.0",
        "a process reward model",
        "llama",
        SOME,
        is_classifier("TOKEN_CLS", "score"),
        refusal=refusals.CLASSIFIER,
    ),
    _recipe(
        "0.9.2",
        "the output directory of a stopped run",
        "llama",
        SOME,
        is_in("checkpoint-10"),
        refusal=refusals.is_in_folder("checkpoint-10"),
    ),
]
