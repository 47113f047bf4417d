"""Directories that NeMo's programs write: NeMo 2.0, NeMo Automodel and Megatron Bridge.

NeMo 2.0 (`llm.export_ckpt(target="hf-peft")`) saves with PEFT, without a task type. Since Megatron fuses linear layers,
q, k and v have equal A matrices, and so do gate and up, unless the adapter was trained as CanonicalLoRA. Checkpoints
themselves are distributed (`weights/*.distcp`), and those of NeMo 1 are archives, `.nemo`.

NeMo Automodel writes `model/` in each `epoch_N_step_M`: a configuration of eight keys that lists modules by their full
names, `automodel_peft_config.json` and the tokenizer. For a quantised base, tensors lack PEFT's prefix, and magnitudes
of DoRA are called `lora_magnitude`. Experts are stacked, or separate with `v4_compatible`.

Megatron Bridge (`save_hf_adapter`) writes only PEFT's two files. Modules of other ranks are listed in full in
`rank_pattern`. It exports A and B of DoRA, but no magnitudes.

Sources: NeMo's nemo/collections/llm/gpt/model/llama.py (`HFLlamaPEFTExporter`), Automodel's
components/checkpoint/addons.py and stateful_wrappers.py, Megatron Bridge's models/conversion/peft_bridge.py.
"""

from __future__ import annotations

from typing import Any

from tests.conformance.expert_adapters import ExpertPlan
from tests.conformance.tiny_models import ALL_LINEARS, ATTENTION
from tests.conformance.trainers import refusals
from tests.conformance.trainers.fused_parts import fused, make_blocks, writes_parts
from tests.conformance.trainers.recipe import Recipe, Refusal, Settings, SingleExpertsRecipe
from tests.conformance.trainers.saved_files import (
    Change,
    SavedFiles,
    has,
    has_no_prefix,
    is_another_format,
    is_in,
    keeps,
    lists_full_names,
    renames,
    sets,
)

_AUTOMODEL_KEYS = (
    "task_type",
    "peft_type",
    "r",
    "lora_alpha",
    "use_dora",
    "target_modules",
    "target_parameters",
    "bias",
    "base_model_name_or_path",
)
_BRIDGE_KEYS = (
    *_AUTOMODEL_KEYS,
    "auto_mapping",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "lora_dropout",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
)


def seven(rank: int = 8, **further: Any) -> Settings:
    return {"r": rank, "lora_alpha": 32, "target_modules": ALL_LINEARS, **further}


def share_a(trained: Any) -> None:
    """Give q, k and v equal A matrices, and gate and up, as for fused linear layers."""
    parameters = dict(trained.named_parameters())
    for name, parameter in parameters.items():
        for first, others in (("q_proj", ("k_proj", "v_proj")), ("gate_proj", ("up_proj",))):
            for other in others if f".{first}.lora_A" in name else ():
                parameters[name.replace(first, other)].copy_(parameter)


def writes_no_tokenizer(files: SavedFiles) -> None:
    files.others = {}


def writes_no_magnitudes(files: SavedFiles) -> None:
    files.tensors = {name: tensor for name, tensor in files.tensors.items() if "magnitude" not in name}


def writes_little(files: SavedFiles) -> None:
    """Leave out options that are off, as a program without PEFT does."""
    assert files.config is not None
    if not files.config.get("target_parameters"):
        files.config.pop("target_parameters", None)


def _nemo(about: str, base: str, settings: Settings, *changes: Change, **further: Any) -> Recipe:
    return Recipe(
        name=f"NeMo 2.0: {about}",
        base=base,
        peft="0.14",
        settings={**settings, "task_type": None},
        changes=(writes_no_tokenizer, has("README.md"), *changes),
        save_embedding_layers=False,
        **further,
    )


def _automodel(release: str, about: str, base: str, settings: Settings, *changes: Change, **further: Any) -> Recipe:
    usual = (lists_full_names, keeps(*_AUTOMODEL_KEYS), writes_little, is_in("model"))
    others = has("model/automodel_peft_config.json", "config.yaml", "optim/__0_0.distcp", "step_scheduler.pt")
    return Recipe(
        name=f"NeMo Automodel {release}: {about}",
        base=base,
        peft="0.18",
        settings=settings,
        changes=(*usual, others, *changes),
        save_embedding_layers=False,
        **{"pushed": "model", **further},
    )


def _bridge(release: str, about: str, base: str, settings: Settings, *changes: Change, **further: Any) -> Recipe:
    return Recipe(
        name=f"Megatron Bridge {release}: {about}",
        base=base,
        peft="0.18",
        settings=settings,
        changes=(writes_no_tokenizer, keeps(*_BRIDGE_KEYS), writes_little, *changes),
        save_embedding_layers=False,
        **further,
    )


NEMO = [
    _nemo("LoRA", "llama", seven(), adjust=share_a),
    _nemo("LoRA of attention", "mistral-window", {**seven(), "target_modules": ATTENTION}, adjust=share_a),
    _nemo("CanonicalLoRA", "llama", seven(4)),
    _nemo("DoRA", "llama", seven(use_dora=True), adjust=share_a),
    _nemo(
        "a checkpoint",
        "llama",
        seven(1),
        is_another_format,
        has("context/model.yaml", "weights/__0_0.distcp", "weights/adapter_metadata.json", "weights/.metadata"),
        refusal=Refusal("file_missing", refusals.DISTRIBUTED, "weights/__0_0.distcp"),
    ),
    _nemo(
        "an archive of NeMo 1",
        "llama",
        seven(1),
        is_another_format,
        has("lora.nemo"),
        pushed="lora.nemo",
        refusal=Refusal(
            "not_gguf", "the file is not in GGUF format: to push an adapter in PEFT's format, choose its directory"
        ),
    ),
    *(
        _automodel("0.2", f"all linear layers of {base}", base, seven())
        for base in ("llama", "qwen2", "qwen3", "mistral-window", "gemma3")
    ),
    _automodel(
        "0.2",
        "all linear layers of a multimodal base",
        "qwen2_5_vl",
        seven(exclude_modules=".*visual.*"),
        warnings=("older_names",),
    ),
    _automodel("0.4", "DoRA", "llama", seven(use_dora=True)),
    _automodel(
        "0.4", "a quantised base", "llama", seven(), has_no_prefix, loads_in_peft=False, warnings=("older_names",)
    ),
    _automodel(
        "0.4",
        "DoRA on a quantised base",
        "llama",
        seven(use_dora=True),
        renames("lora_magnitude_vector$", "lora_magnitude"),
        has_no_prefix,
        loads_in_peft=False,
        warnings=("older_names",),
    ),
    _automodel(
        "0.4",
        "parts of fused linear layers",
        "phi3-window",
        fused(4, 8),
        writes_parts,
        lists_full_names,
        adjust=make_blocks,
        loads_in_peft=False,
    ),
    _automodel(
        "0.4",
        "stacked experts",
        "qwen3-moe",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ATTENTION,
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    _automodel(
        "0.4",
        "stacked experts of gpt-oss",
        "gpt-oss",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ATTENTION,
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    SingleExpertsRecipe(
        name="NeMo Automodel 0.4: separate experts",
        base="qwen3-moe",
        peft="0.18",
        changes=(lists_full_names, keeps(*_AUTOMODEL_KEYS), writes_little),
        plan=ExpertPlan("experts", 4, modules=("q_proj", "gate_proj", "up_proj", "down_proj")),
    ),
    _automodel("0.4", "the folder of a step", "llama", seven(1), pushed="", refusal=refusals.is_in_folder("model")),
    *(_bridge("0.2", f"all linear layers of {base}", base, seven(), adjust=share_a) for base in ("llama", "qwen3")),
    _bridge(
        "0.4",
        "ranks by full names",
        "llama",
        seven(rank_pattern={"model.layers.0.self_attn.q_proj": 2}),
        sets(base_model_name_or_path=""),
    ),
    _bridge(
        "0.4",
        "DoRA without magnitudes",
        "llama",
        seven(use_dora=True),
        writes_no_magnitudes,
        refusal=Refusal(
            "missing_tensor",
            refusals.NO_MAGNITUDES,
            "base_model.model.model.layers.0.mlp.down_proj.lora_magnitude_vector",
        ),
    ),
    SingleExpertsRecipe(
        name="Megatron Bridge 0.4: separate experts",
        base="qwen3-moe",
        peft="0.18",
        changes=(writes_no_tokenizer, keeps(*_BRIDGE_KEYS), writes_little),
        plan=ExpertPlan("experts", 4, modules=("q_proj", "gate_proj", "up_proj", "down_proj")),
    ),
    _bridge(
        "0.4",
        "a distributed checkpoint",
        "llama",
        seven(1),
        is_another_format,
        has("iter_0000100/__0_0.distcp", "latest_checkpointed_iteration.txt"),
        refusal=Refusal("file_missing", refusals.DISTRIBUTED, "iter_0000100/__0_0.distcp"),
    ),
]
