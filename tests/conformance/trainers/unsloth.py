"""Directories that Unsloth's `save_pretrained` and `save_pretrained_merged` write.

- FastLanguageModel saves PEFT's files in float32 beside the tokenizer. Seven linear layers are usual.
- `auto_mapping` has a third key, `unsloth_fixed`, because Unsloth fills it in after training.
- FastModel and FastVisionModel choose modules by a regular expression, made of the parts of the model to train. By
  default, they train the vision tower too.
- Embeddings and heads for continued pretraining are in `modules_to_save`.
- Phi-3 is trained with the names of Llama, since Unsloth divides its fused linear layers.
- `save_pretrained_merged` writes a whole model, and `save_pretrained_gguf` a GGUF file.

Sources: `get_peft_regex` in unsloth_zoo/peft_utils.py, `fix_lora_auto_mapping` in unsloth_zoo/hf_utils.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.conformance.tiny_models import ALL_LINEARS
from tests.conformance.trainers import refusals
from tests.conformance.trainers.recipe import Recipe, Refusal, Settings
from tests.conformance.trainers.saved_files import (
    Change,
    SavedFiles,
    has,
    has_files,
    is_another_format,
    is_classifier,
    is_in,
    is_whole_model,
    lists_full_names,
    renames,
    sets,
)

PEFT = {"2024.8": "0.12", "2025.3": "0.14", "2025.10": "0.17", "2026.3": "0.18"}
"""The release of PEFT that each release of Unsloth used."""

TEMPLATE = b"{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
_KINDS = "self_attn|attention|attn|mixer|mlp|feed_forward|ffn|dense"
_LANGUAGE, _VISION = "language|text", "vision|image|visual|patch"
_FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def seven(rank: int = 16, **further: Any) -> Settings:
    return {"r": rank, "lora_alpha": rank, "target_modules": ALL_LINEARS, **further}


def by_regex(parts: str) -> Settings:
    """Select the linear layers whose last name is not unique, in some parts of the model."""

    def settings(base: PreTrainedModel) -> Mapping[str, Any]:
        linears = [name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)]
        counts = Counter(name.rpartition(".")[2] for name in linears)
        names = "(?:" + "|".join(name for name, count in counts.items() if count > 1) + ")"
        regex = (
            rf"(?:.*?(?:{parts}).*?(?:{_KINDS}).*?{names})|(?:\bmodel\.layers\.[\d]{{1,}}\.(?:{_KINDS})\.(?:{names}))"
        )
        return {"r": 8, "lora_alpha": 8, "target_modules": regex, "task_type": None}

    return settings


def is_fixed(files: Any) -> None:
    """Complete the mapping that PEFT writes for an adapter without a task type."""
    if files.config["auto_mapping"] is not None:
        files.config["auto_mapping"]["unsloth_fixed"] = True


def _recipe(release: str, about: str, base: str, settings: Settings, *changes: Change, **further: Any) -> Recipe:
    facts = {"base_model_name_or_path": f"unsloth/{base}-bnb-4bit"}
    usual = (sets(**facts), has("README.md", "vocab.json"))
    if PEFT[release] >= "0.17":
        usual += (has_files({"chat_template.jinja": TEMPLATE}),)
    return Recipe(
        name=f"unsloth {release}: {about}",
        base=base,
        peft=PEFT[release],
        settings=settings,
        changes=(*usual, *changes),
        **{"dtype": torch.float32, **further},
    )


_BEFORE_4_52 = (r"^model\.language_model\.", "language_model.model.")
_READ = ("older_names",)
_BY_TENSORS = ("selected_by_tensors",)


def shares_k_and_v(files: SavedFiles) -> None:
    """Add K and V in the last two of six layers, which read earlier layers, as earlier releases of transformers did."""
    own = [name for name in files.tensors if re.search(r"\.layers\.[01]\..*\.[kv]_proj\.", name)]
    for name in own:
        later = re.sub(r"\.layers\.([01])\.", lambda match: f".layers.{int(match[1]) + 4}.", name)
        # Without an effect, B is never trained.
        files.tensors[later] = (torch.ones_like if ".lora_A" in name else torch.zeros_like)(files.tensors[name])


UNSLOTH = [
    *(_recipe(release, "seven linear layers", "llama", seven()) for release in PEFT),
    *(
        _recipe("2025.10", f"seven linear layers of {base}", base, seven(8))
        for base in ("mistral-window", "qwen2", "qwen3", "gemma2", "gemma3")
    ),
    _recipe("2025.3", "rsLoRA", "qwen3", seven(32, use_rslora=True)),
    _recipe("2025.10", "DoRA", "llama", seven(8, use_dora=True)),
    _recipe("2025.3", "a few layers", "llama", seven(layers_to_transform=[1])),
    _recipe("2024.8", "continued pretraining", "llama", seven(8, modules_to_save=["lm_head", "embed_tokens"])),
    _recipe(
        "2025.10",
        "continued pretraining of a tied base",
        "qwen2",
        seven(8, modules_to_save=["lm_head", "embed_tokens"]),
    ),
    _recipe("2025.10", "new tokens", "llama", seven(8, modules_to_save=["embed_tokens", "lm_head"]), num_added=4),
    _recipe("2025.10", "attention by FastModel", "gemma3", by_regex(_LANGUAGE), is_fixed, warnings=_BY_TENSORS),
    _recipe("2026.3", "attention by FastModel", "qwen3", by_regex(_LANGUAGE), is_fixed, warnings=_BY_TENSORS),
    *(
        _recipe("2026.3", f"the decoder of {base}", base, by_regex(_LANGUAGE), is_fixed, warnings=_READ + _BY_TENSORS)
        for base in ("qwen2_5_vl", "gemma3-multimodal", "mistral3")
    ),
    *(
        _recipe(
            "2026.3",
            f"all parts of {base}",
            base,
            by_regex(f"{_VISION}|{_LANGUAGE}"),
            is_fixed,
            warnings=("other_parts_ignored", *_READ, *_BY_TENSORS),
        )
        for base in ("qwen2_5_vl", "gemma3-multimodal", "llava")
    ),
    _recipe(
        "2025.3",
        "the decoder before transformers 4.52",
        "gemma3-multimodal",
        by_regex(_LANGUAGE),
        renames(*_BEFORE_4_52),
        loads_in_peft=False,
        warnings=_READ + _BY_TENSORS,
    ),
    _recipe(
        "2026.3", "attention of a mixture", "gpt-oss", {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]}
    ),
    _recipe(
        "2026.3",
        "stacked experts",
        "gpt-oss",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    _recipe("2026.3", "experts by the names of transformers 4", "qwen3-moe", seven(4)),
    *(
        _recipe(
            "2025.10",
            f"layers of {base} that read the K and V of others",
            base,
            seven(4),
            shares_k_and_v,
            warnings=("shared_layers_ignored",),
        )
        for base in ("gemma3n", "gemma4")
    ),
    *(
        _recipe(
            "2025.10",
            f"layers of {base} that read the K and V of others, by full names",
            base,
            seven(4),
            shares_k_and_v,
            lists_full_names,
            warnings=("shared_layers_ignored", "unmatched_names"),
        )
        for base in ("gemma3n", "gemma4")
    ),
    _recipe(
        "2024.8",
        "LoftQ",
        "llama",
        seven(),
        sets(init_lora_weights="loftq", loftq_config={"loftq_bits": 4, "loftq_iter": 1}),
        refusal=refusals.LOFTQ,
    ),
    _recipe(
        "2025.10",
        "sequence classification",
        "llama",
        seven(8),
        is_classifier("SEQ_CLS", "score"),
        is_classifier=True,
    ),
    _recipe("2025.10", "save_pretrained_merged", "llama", seven(1), is_whole_model, refusal=refusals.WHOLE_MODEL),
    _recipe(
        "2025.10",
        "save_pretrained_gguf",
        "llama",
        seven(1),
        is_another_format,
        has("model.Q4_K_M.gguf"),
        refusal=Refusal(
            "file_missing",
            "{path} has no adapter_config.json: to push an adapter in GGUF format, choose the file itself",
            "model.Q4_K_M.gguf",
        ),
    ),
    _recipe(
        "2025.10",
        "the output directory",
        "llama",
        seven(1),
        is_in("checkpoint-60"),
        refusal=refusals.is_in_folder("checkpoint-60"),
    ),
    _recipe("2025.10", "a checkpoint", "llama", seven(4), is_in("checkpoint-60"), pushed="checkpoint-60"),
]
