"""Directories that LLaMA-Factory writes.

- `lora_target: all` lists the last names of the decoder's linear layers. A configuration has few options: rank, alpha,
  dropout, rsLoRA, DoRA and `additional_target`, which becomes `modules_to_save`.
- With a frozen vision tower, releases before 0.9.2 write a regular expression with a negative lookahead, and later
  releases list all modules by their full names.
- The adapter is in the output directory, beside logs, plots and the state of the trainer.
- PiSSA is saved as trained. A callback writes the converted adapter to `pissa_converted`: its rank is twice as large,
  and with rsLoRA, its alpha is a fraction.
- Reward models and PPO save a value head in a file of its own.
- Trainable weights are float32, unless `pure_bf16` is set.

Sources: model/adapter.py, model/model_utils/visual.py (`patch_target_modules`), train/callbacks.py.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from tests.conformance.expert_adapters import ExpertPlan
from tests.conformance.tiny_models import ALL_LINEARS
from tests.conformance.trainers import refusals
from tests.conformance.trainers.recipe import Recipe, Settings, SingleExpertsRecipe, all_linears
from tests.conformance.trainers.saved_files import (
    Change,
    has,
    is_in,
    is_whole_model,
    lists_full_names,
    renames,
    sets,
)

PEFT = {"0.6.3": "0.10", "0.8.3": "0.11", "0.9.1": "0.12", "0.9.3": "0.15", "0.9.4": "0.17"}
"""The release of PEFT that each release of LLaMA-Factory used."""

_OUTPUT = (
    "README.md",
    "all_results.json",
    "train_results.json",
    "trainer_log.jsonl",
    "trainer_state.json",
    "training_args.bin",
    "training_loss.png",
    "added_tokens.json",
    "checkpoint-500/optimizer.pt",
)


def _recipe(release: str, about: str, base: str, settings: Settings, *changes: Change, **further: Any) -> Recipe:
    return Recipe(
        name=f"LLaMA-Factory {release}: {about}",
        base=base,
        peft=PEFT[release],
        settings=settings,
        changes=(has(*_OUTPUT), *changes),
        **{"dtype": torch.float32, **further},
    )


@dataclass(frozen=True, kw_only=True)
class PissaRecipe(Recipe):
    """A recipe for an adapter that began as the principal components of the base's weights."""

    def train(self, base: PreTrainedModel) -> Any:
        torch.manual_seed(len(self.name))
        settings = dict(self.settings) if not callable(self.settings) else dict(self.settings(base))
        trained = get_peft_model(copy.deepcopy(base), LoraConfig(**settings, init_lora_weights="pissa"))
        trained.eval()
        return trained

    def write_plain(self, trained: Any, directory: Path) -> None:
        start = directory.with_name(directory.name + "-start")
        trained.peft_config["default"].init_lora_weights = True
        trained.save_pretrained(start)
        trained.peft_config["default"].init_lora_weights = "pissa"
        with torch.no_grad():
            for name, parameter in trained.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        trained.save_pretrained(directory, path_initial_model_for_weight_conversion=str(start))


def frozen_tower(part: str) -> Change:
    names = "|".join(["down_proj", "q_proj", "up_proj", "v_proj", "o_proj", "k_proj", "gate_proj"])
    return sets(target_modules=f"^(?!.*{part}).*(?:{names}).*")


SOME: Settings = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
_READ = ("older_names",)
_BY_TENSORS = ("selected_by_tensors",)
_EXCLUDED = ".*(vision|visual|projector).*"


def seven(rank: int = 8, **further: Any) -> Settings:
    return {"r": rank, "lora_alpha": 2 * rank, "target_modules": ALL_LINEARS, **further}


LLAMA_FACTORY = [
    *(_recipe(release, "all", "llama", all_linears()) for release in PEFT),
    *(
        _recipe("0.9.3", f"all of {base}", base, all_linears())
        for base in ("qwen2", "qwen3", "mistral-window", "gemma2", "phi3-window", "glm4", "smollm3")
    ),
    _recipe("0.6.3", "q and v", "mistral-window", SOME),
    _recipe("0.9.1", "rsLoRA", "qwen2", all_linears(use_rslora=True)),
    _recipe("0.9.3", "DoRA", "llama", all_linears(use_dora=True)),
    _recipe("0.9.1", "DoRA with rsLoRA", "qwen3", all_linears(use_dora=True, use_rslora=True)),
    _recipe("0.9.3", "pure_bf16", "llama", all_linears(), dtype=torch.bfloat16),
    _recipe("0.8.3", "fp16", "llama", all_linears(), dtype=torch.float16),
    _recipe(
        "0.9.3",
        "PiSSA",
        "llama",
        SOME,
        sets(init_lora_weights="pissa_niter_16"),
        refusal=refusals.changed_base("pissa_niter_16"),
    ),
    *(
        PissaRecipe(
            name=f"LLaMA-Factory 0.9.3: pissa_converted, {about}",
            base="llama",
            peft="0.15",
            settings={**seven(4), "use_rslora": use_rslora, "task_type": "CAUSAL_LM"},
            changes=(has(*_OUTPUT),),
            dtype=torch.float32,
        )
        for about, use_rslora in (("plain", False), ("rsLoRA", True))
    ),
    _recipe("0.9.1", "additional_target", "llama", seven(modules_to_save=["embed_tokens", "lm_head"])),
    _recipe("0.9.1", "additional_target of a tied base", "qwen2", seven(modules_to_save=["embed_tokens"])),
    _recipe("0.9.3", "resize_vocab", "llama", seven(modules_to_save=["embed_tokens", "lm_head"]), num_added=64),
    _recipe(
        "0.9.3",
        "additional_target of norms",
        "llama",
        seven(modules_to_save=["input_layernorm"]),
    ),
    *(
        _recipe(
            "0.9.1",
            f"a frozen tower of {base}",
            base,
            seven(exclude_modules=_EXCLUDED),
            frozen_tower(part),
            sets(exclude_modules=None),
            loads_in_peft=False,
            warnings=_READ + _BY_TENSORS,
        )
        for base, part in (("qwen2_vl", "visual"), ("llava", "vision_tower"))
    ),
    _recipe(
        "0.8.3",
        "a frozen tower before transformers 4.52",
        "llava",
        seven(exclude_modules=_EXCLUDED),
        frozen_tower("vision_tower"),
        renames(r"^model\.language_model\.", "language_model.model."),
        sets(exclude_modules=None),
        loads_in_peft=False,
        warnings=_READ + _BY_TENSORS,
    ),
    *(
        _recipe(
            "0.9.3",
            f"a frozen tower of {base} by full names",
            base,
            seven(exclude_modules=_EXCLUDED),
            lists_full_names,
            sets(exclude_modules=None),
            warnings=_READ,
        )
        for base in ("qwen2_5_vl", "gemma3-multimodal", "internvl")
    ),
    _recipe("0.9.4", "a trained tower", "qwen2_5_vl", seven(), warnings=("other_parts_ignored", *_READ)),
    _recipe("0.9.3", "a reward model", "llama", SOME, has("value_head.safetensors", "value_head.bin")),
    _recipe(
        "0.9.3",
        "a checkpoint",
        "llama",
        SOME,
        has("global_step500/mp_rank_00_model_states.pt"),
        is_in("checkpoint-500"),
        pushed="checkpoint-500",
    ),
    _recipe("0.9.4", "OFT", "llama", SOME, sets(peft_type="OFT"), refusal=refusals.NOT_LORA),
    _recipe("0.9.3", "full fine-tuning", "llama", SOME, is_whole_model, refusal=refusals.WHOLE_MODEL),
    _recipe("0.9.4", "Gemma 3n", "gemma3n", seven(4)),
    SingleExpertsRecipe(
        name="LLaMA-Factory 0.9.3: all of a mixture in transformers 4",
        base="qwen3-moe",
        peft="0.15",
        changes=(has(*_OUTPUT),),
        dtype=torch.float32,
        plan=ExpertPlan(
            "all", 4, modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        ),
    ),
]
