"""Directories that ms-swift writes.

- Each run has a folder `v0-DATE` with folders `checkpoint-N`, which contain PEFT's files, `args.json`, the trainer's
  state and, with the options of LoRA+, `additional_config.json`.
- `target_modules: all-linear` becomes the list of names for a text model, and a regular expression with the parts of
  the model for a multimodal one.
- Up to release 2, the tuner backend `swift` wrote a folder `default`. Its configuration has `swift_type` and LoRA+'s
  options. Its tensors have the adapter's name, but not PEFT's prefix. `sft_args.json` was the former `args.json`.
- LoRA-GA saves the converted adapter in `converted/default`.
- `swift export --merge_lora` writes a whole model, and Megatron's export one adapter per expert.

Sources: swift/tuners/peft.py, swift/tuners/lora.py, swift/tuners/base.py, `get_multimodal_target_regex`.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.conformance.expert_adapters import ExpertPlan
from tests.conformance.tiny_models import ALL_LINEARS, ATTENTION
from tests.conformance.trainers import refusals
from tests.conformance.trainers.recipe import Recipe, Settings, SingleExpertsRecipe, all_linears
from tests.conformance.trainers.saved_files import (
    Change,
    has,
    has_adapter_name,
    has_files,
    has_no_prefix,
    is_classifier,
    is_in,
    is_whole_model,
    sets,
)

PEFT = {"1.6": "0.5", "2.4": "0.12", "3.1": "0.14", "3.8": "0.17", "4.0": "0.18"}
"""The release of PEFT that each release of ms-swift used."""

_STATE = (
    "README.md",
    "args.json",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
)
_LORA_PLUS = b'{"lora_dtype": null, "lorap_lr_ratio": null, "lorap_emb_lr": 1e-06}'
_BY_TENSORS = ("older_names", "selected_by_tensors")
_EXCLUDED = ".*(vision|visual|projector|merger).*"


def _recipe(release: str, about: str, base: str, settings: Settings, *changes: Change, **further: Any) -> Recipe:
    usual = (has(*(f"checkpoint-100/{name}" for name in _STATE)), is_in("checkpoint-100"))
    usual += (has_files({"checkpoint-100/additional_config.json": _LORA_PLUS}),)
    return Recipe(
        name=f"ms-swift {release}: {about}",
        base=base,
        peft=PEFT[release],
        settings=settings,
        changes=(*usual, *changes),
        **{"pushed": "checkpoint-100", **further},
    )


def seven(rank: int = 8, **further: Any) -> Settings:
    return {"r": rank, "lora_alpha": 32, "target_modules": ALL_LINEARS, **further}


def of_parts(*parts: str) -> Change:
    """Write the regular expression that selects all but embeddings and heads of some parts."""
    return sets(target_modules=f"^({'|'.join(parts)})(?!.*(lm_head|output|emb|wte|shared)).*")


def writes_swift_options(files: Any) -> None:
    """Write the configuration of the backend `swift`, which has further keys."""
    sets(
        enable_lora=None,
        lora_dtype="AUTO",
        lorap_emb_lr=1e-06,
        lorap_lr_ratio=16.0,
        model_key_mapping=None,
        runtime_config={"ephemeral_gpu_offload": False},
        swift_type="LORA",
        use_merged_linear=False,
        use_qa_lora=False,
    )(files)


_SWIFT = (
    writes_swift_options,
    has_no_prefix,
    has_adapter_name(),
    is_in("checkpoint-100/default"),
    has("checkpoint-100/configuration.json", "checkpoint-100/sft_args.json"),
)

MS_SWIFT = [
    *(_recipe(release, "all-linear", "llama", all_linears()) for release in PEFT),
    *(
        _recipe("3.8", f"all-linear of {base}", base, all_linears())
        for base in ("qwen2", "qwen3", "glm4", "phi3-window", "mistral-window")
    ),
    _recipe("4.0", "all-linear of a hybrid", "qwen3_5", all_linears(lora_alpha=32)),
    *(
        _recipe(
            "3.1",
            f"the decoder of {base}",
            base,
            seven(exclude_modules=_EXCLUDED),
            of_parts("model.language_model"),
            sets(exclude_modules=None),
            loads_in_peft=False,
            warnings=_BY_TENSORS,
        )
        for base in ("qwen2_5_vl", "internvl", "gemma3-multimodal", "qwen3_vl")
    ),
    _recipe(
        "3.8",
        "the decoder and the tower",
        "qwen2_5_vl",
        seven(),
        of_parts("model.language_model", "model.visual"),
        loads_in_peft=False,
        warnings=("other_parts_ignored", *_BY_TENSORS),
    ),
    _recipe(
        "1.6",
        "the backend swift",
        "llama",
        seven(),
        *_SWIFT,
        pushed="checkpoint-100/default",
        loads_in_peft=False,
        warnings=("older_names",),
    ),
    _recipe(
        "1.6",
        "the backend swift, pushed from above",
        "llama",
        seven(),
        *_SWIFT,
        refusal=refusals.is_in_folder("default"),
    ),
    _recipe(
        "2.4", "the output directory", "llama", seven(), pushed="", refusal=refusals.is_in_folder("checkpoint-100")
    ),
    _recipe("3.1", "modules_to_save", "llama", seven(modules_to_save=["embed_tokens", "lm_head"])),
    _recipe("3.1", "modules_to_save of a tied base", "qwen2", seven(modules_to_save=["embed_tokens"])),
    _recipe("3.8", "rsLoRA", "qwen2", all_linears(use_rslora=True)),
    _recipe("3.8", "DoRA", "qwen3", all_linears(use_dora=True)),
    _recipe("3.8", "float32", "llama", seven(), dtype=torch.float32),
    _recipe("3.8", "float16", "llama", seven(), dtype=torch.float16),
    _recipe(
        "2.4",
        "LoRA-GA, converted",
        "llama",
        seven(16),
        is_in("checkpoint-100/converted/default"),
        pushed="checkpoint-100/converted/default",
    ),
    _recipe("3.8", "PiSSA", "llama", seven(), sets(init_lora_weights="pissa"), refusal=refusals.changed_base("pissa")),
    *(
        _recipe("3.8", kind, "llama", seven(), sets(peft_type=kind), refusal=refusals.NOT_LORA)
        for kind in ("ADALORA", "BOFT", "FOURIERFT")
    ),
    _recipe("3.8", "lora_bias=all", "llama", seven(), sets(bias="all")),
    _recipe("3.8", "a classifier", "qwen2", seven(), is_classifier("SEQ_CLS", "score"), is_classifier=True),
    _recipe("3.8", "merge_lora", "llama", seven(1), is_whole_model, pushed="", refusal=refusals.WHOLE_MODEL),
    SingleExpertsRecipe(
        name="ms-swift 3.8: experts exported by Megatron",
        base="qwen3-moe",
        peft="0.17",
        plan=ExpertPlan("experts", 4, alpha=32.0, modules=(*ATTENTION, "gate_proj", "up_proj", "down_proj")),
    ),
    SingleExpertsRecipe(
        name="ms-swift 3.8: routers and experts exported by Megatron",
        base="qwen3-moe",
        peft="0.17",
        plan=ExpertPlan("routers", 4, alpha=32.0, modules=(*ATTENTION, "gate", "gate_proj", "up_proj", "down_proj")),
    ),
]
