"""Directories that torchtune's checkpointer for Hugging Face models writes.

- A folder `epoch_N` (before 0.4, the output directory) has `adapter_config.json`, `adapter_model.safetensors`, the same
  adapter as `adapter_model.pt` (before 0.4, `adapter_N.pt`) and the base's other files. Unless only the adapter is
  saved, it also has the merged model.
- The configuration has only `r`, `lora_alpha`, `target_modules`, `peft_type` and, since 0.4,
  `base_model_name_or_path`.
- DoRA saves magnitudes, but the configuration does not mention DoRA.
- Without safe serialization, both files of the adapter are pickles.
- Adapters of Phi and Llama 3.2 Vision are saved only in torchtune's own format.
- B of q and k is in Hugging Face's order of rows.

Sources: training/checkpointing/_checkpointer.py, models/convert_weights.py, recipes/lora_finetune_single_device.py.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.conformance.tiny_models import ALL_LINEARS
from tests.conformance.trainers import refusals
from tests.conformance.trainers.recipe import Recipe, Refusal, Settings
from tests.conformance.trainers.saved_files import (
    Change,
    SavedFiles,
    has,
    is_another_format,
    is_in,
    is_named,
    keeps,
    renames,
)

_KEYS = ("r", "lora_alpha", "target_modules", "peft_type")
_OTHERS = ("config.json", "generation_config.json", "LICENSE", "original/params.json")
_FIRST = "base_model.model.model.layers.0.self_attn.o_proj"
BEFORE_0_4 = ("0.2", "0.3")
RELEASES = (*BEFORE_0_4, "0.4", "0.5", "0.6")


def _recipe(release: str, about: str, base: str, settings: Settings, *changes: Change, **further: Any) -> Recipe:
    if release in BEFORE_0_4:
        usual = (keeps(*_KEYS), has("adapter_0.pt", "hf_model_0001_0.pt"))
        pushed = ""
    else:
        usual = (
            keeps(*_KEYS, "base_model_name_or_path"),
            is_in("epoch_0"),
            has(*(f"epoch_0/{name}" for name in ("adapter_model.pt", *_OTHERS))),
        )
        pushed = "epoch_0"
    return Recipe(
        name=f"torchtune {release}: {about}",
        base=base,
        peft="0.18",
        settings=settings,
        changes=(*usual, *changes),
        save_embedding_layers=False,
        **{"pushed": pushed, **further},
    )


def attention(*names: str, **further: Any) -> Settings:
    return {"r": 8, "lora_alpha": 16, "target_modules": list(names) or ["q_proj", "v_proj", "o_proj"], **further}


def has_merged_model(files: SavedFiles) -> None:
    has(
        "epoch_0/model-00001-of-00002.safetensors",
        "epoch_0/model-00002-of-00002.safetensors",
        "epoch_0/model.safetensors.index.json",
    )(files)


TORCHTUNE = [
    *(_recipe(release, "q, v and output", "llama", attention()) for release in RELEASES),
    *(
        _recipe("0.6", f"all linear layers of {base}", base, attention(*ALL_LINEARS))
        for base in ("llama2", "llama-tied-bias-llama3-rope", "mistral-window", "qwen2", "qwen3", "gemma", "gemma2")
    ),
    _recipe("0.5", "the head too", "llama", attention(*ALL_LINEARS, "lm_head")),
    _recipe("0.6", "float32", "llama", attention(*ALL_LINEARS), dtype=torch.float32),
    _recipe("0.4", "beside the merged model", "llama", attention(), has_merged_model),
    _recipe(
        "0.2",
        "pickles",
        "llama",
        attention(),
        is_named("adapter_model.bin"),
        refusal=refusals.is_pickle("adapter_model.bin"),
    ),
    _recipe(
        "0.4",
        "torchtune's own format",
        "llama",
        attention(),
        is_another_format,
        has("epoch_0/adapter_model.pt"),
        refusal=refusals.is_foreign_pickle("adapter_model.pt"),
    ),
    _recipe(
        "0.6",
        "Phi-3",
        "phi3-window",
        attention("qkv_proj"),
        is_another_format,
        refusal=refusals.is_foreign_pickle("adapter_model.pt"),
    ),
    _recipe(
        "0.4",
        "the output directory",
        "llama",
        attention(),
        has("recipe_state/recipe_state.pt"),
        pushed="",
        refusal=refusals.is_in_folder("epoch_0"),
    ),
    _recipe(
        "0.6",
        "DoRA",
        "llama",
        attention(use_dora=True),
        refusal=Refusal("unexpected_tensor", refusals.NO_USE_DORA, f"{_FIRST}.lora_magnitude_vector"),
    ),
    _recipe(
        "0.4",
        "DoRA with the suffix of weights",
        "llama",
        attention(use_dora=True),
        renames(r"lora_magnitude_vector$", "lora_magnitude_vector.weight"),
        refusal=Refusal("unexpected_tensor", refusals.NO_USE_DORA, f"{_FIRST}.lora_magnitude_vector.weight"),
    ),
]
