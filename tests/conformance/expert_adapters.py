"""Adapters on the experts and routers of tiny models, in both forms of files, with references from transformers."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import pack_target
from tests.conformance.parity import Subject
from tests.conformance.tiny_models import make_base, pack_peft_directory


@dataclass(frozen=True)
class ExpertPlan:
    """The plan of one adapter.

    If `parameters` is set, peft writes the file, and both `modules` and `parameters` use the names of transformers 5.
    Otherwise, the file has tensors for each expert, and `modules` uses the names of transformers 4.
    """

    name: str
    rank: int
    alpha: float = 8.0
    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    is_swapped: bool = False
    """True for a file of PEFT before 0.19.1, which swapped the inputs and outputs of stacks."""
    is_grouped: bool = False
    """True for a file whose B has all ranks of expert 0 first, as Unsloth trained it before September 2026."""

    @property
    def config(self) -> dict[str, Any]:
        return {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.modules),
            "target_parameters": list(self.parameters) or None,
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
            "task_type": "CAUSAL_LM",
        }

    def value(self, pattern: dict[str, Any], key: str, default: Any) -> Any:
        return next((value for name, value in pattern.items() if f".{key}".endswith(f".{name}")), default)

    def rank_of(self, key: str) -> int:
        return int(self.value(self.rank_pattern, key, self.rank))

    def scale_of(self, key: str) -> float:
        rank = self.rank_of(key)
        return float(self.value(self.alpha_pattern, key, self.alpha)) / (rank**0.5 if self.use_rslora else rank)


_MIXTRAL_NAMES = ("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
SINGLE_NAMES = {"mixtral": _MIXTRAL_NAMES, "minimax-m2": _MIXTRAL_NAMES}
"""The names of the router, the experts, gate, up and down in transformers 4, where they differ from Qwen's names."""

QWEN_NAMES = ("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
STACKED_ONLY = (
    "gemma4_moe",
    "gpt-oss",
    "granite-moe",
    "granite-moe-shared",
    "granite-moe-hybrid",
    "granite_moe_swa",
)
"""Families whose checkpoints have always stacked the experts."""

_GROUPED = ExpertPlan("grouped", 6, parameters=("experts.gate_up_proj", "experts.down_proj"), is_grouped=True)
EARLIER_PLANS = [
    _GROUPED,
    replace(_GROUPED, name="swapped", is_grouped=False, is_swapped=True),
    replace(_GROUPED, name="grouped-swapped", is_swapped=True),
]
"""Adapters with stacked tensors in the forms of earlier releases of Unsloth and PEFT."""

WRAPPED = "glm4v_moe"
"""A family whose vision tower has linear layers with the same names as the experts' linear layers."""
NOT_TARGETED = ("llama4", "llama4-multimodal", "llama4-two-experts", "qwen3_5_moe-multimodal", "qwen3_vl_moe")
"""Families whose experts cannot be targeted, or that have a vision tower and decode like another family."""


def plans_for(family: str) -> list[ExpertPlan]:
    router, experts, gate, up, down = SINGLE_NAMES.get(family, QWEN_NAMES)
    last, layer = "router" if family in STACKED_ONLY else "gate", 0 if family in ("qwen3-moe", "exaone-moe") else 1
    if family == "gemma4_moe":
        last = "router.proj"
    plans = [
        ExpertPlan("attention", 3, modules=("q_proj", "o_proj")),
        ExpertPlan(
            "stacked", 70, alpha=16.0, modules=("q_proj",), parameters=("experts.gate_up_proj", "experts.down_proj")
        ),
        ExpertPlan(
            "stacked-down", 2, parameters=("down_proj",), use_rslora=True, alpha=2.0, rank_pattern={"down_proj": 5}
        ),
        ExpertPlan(
            "stacked-router",
            5,
            parameters=("experts.gate_up_proj", f"{last}.weight"),
            alpha_pattern={f"{last}.weight": 3.0, r".*\.gate_up_proj": 2.0},
            rank_pattern={f"{last}.weight": 2},
        ),
    ]
    if family in (*STACKED_ONLY, WRAPPED):
        return plans
    few = tuple(f"experts.{expert}.{name}" for expert in (0, 2) for name in (gate, up, down))
    return [
        *plans,
        ExpertPlan("single", 4, modules=("q_proj", gate, up, down)),
        ExpertPlan(
            "single-rslora",
            3,
            alpha=2.0,
            modules=(gate, down),
            use_rslora=True,
            rank_pattern={f"experts.1.{down}": 7, down: 2},
            alpha_pattern={f"layers.{layer}.{experts}.0.{gate}": 5.0},
        ),
        ExpertPlan("single-few", 65, modules=few),
        ExpertPlan("single-dora", 3, modules=("q_proj", gate, up, down), use_dora=True),
        ExpertPlan("single-router", 2, modules=(router.rpartition(".")[2], f"experts.1.{up}")),
    ]


def linears(base: PreTrainedModel, family: str) -> dict[str, torch.Tensor]:
    """The base's weights by their names in transformers 4. Experts' weights are views into the stacked weights."""
    router, experts, gate, up, down = SINGLE_NAMES.get(family, QWEN_NAMES)
    found: dict[str, torch.Tensor] = {}
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear):
            found[name] = module.weight.data
        elif name.endswith(".experts") and family not in STACKED_ONLY:
            layer = name.rpartition(".mlp.")[0]
            found[f"{layer}.{router}"] = base.get_submodule(f"{layer}.mlp.gate").weight.data
            for expert, (both, of_down) in enumerate(zip(module.gate_up_proj.data, module.down_proj.data, strict=True)):
                size = both.shape[0] // 2
                for part, view in ((gate, both[:size]), (up, both[size:]), (down, of_down)):
                    found[f"{layer}.{experts}.{expert}.{part}"] = view
    return found


@dataclass(frozen=True)
class ExpertSubject(Subject):
    """A subject with a separate reference per adapter: a peft model, or a copy of the base with the adapter merged."""

    references: dict[str | None, Any] = field(default_factory=dict)

    @torch.no_grad()
    def reference_logits(self, name: str | None, tokens: list[int], num_prompt: int | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.references[name](input_ids=torch.tensor([tokens])).logits[0]
        return logits


def make_expert_subject(
    family: str, directory: Path, plans: Sequence[ExpertPlan], shape: dict[str, Any], window: int
) -> ExpertSubject:
    base = make_base(family, directory / "base", shape, window)
    target = pack_target(ModelConfig.load(directory / "base"), "float32")
    references: dict[str | None, Any] = {None: base}
    packed: dict[str, PackedAdapter] = {}
    for seed, plan in enumerate(plans):
        torch.manual_seed(seed)
        path = directory / plan.name
        make = _with_peft if plan.parameters else merged
        references[plan.name] = make(copy.deepcopy(base), family, plan, path)
        packed[plan.name] = pack_peft_directory(path, target, directory / "base")
    return ExpertSubject(
        directory / "base",
        None,
        {name: one.digest for name, one in packed.items()},
        {one.digest: one for one in packed.values()},
        {name: one.num_pages for name, one in packed.items()},
        references,
    )


def _with_peft(base: PreTrainedModel, _: str, plan: ExpertPlan, directory: Path) -> Any:
    with warnings.catch_warnings():
        # peft uses patterns for parameters too, but warns that they match no module.
        for message in (
            "Model has `tie_word_embeddings=True`",
            "The following (rank|alpha)_pattern keys did not match",
        ):
            warnings.filterwarnings("ignore", message)
        with _unswapped(base) if plan.is_swapped else nullcontext():
            model = get_peft_model(base, LoraConfig(**plan.config, init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.08)
    model.save_pretrained(directory, save_embedding_layers=False)
    if plan.is_grouped:
        _group(directory)
    return model.eval()


@contextmanager
def _unswapped(base: PreTrainedModel) -> Iterator[None]:
    """Let PEFT take the outputs of stacks for their inputs, as it did before 0.19.1."""
    experts = [module for name, module in base.named_modules() if name.endswith(".experts")]
    before = [module.is_transposed for module in experts]
    for module in experts:
        module.is_transposed = True
    yield
    for module, is_transposed in zip(experts, before, strict=True):
        module.is_transposed = is_transposed


def _group(directory: Path) -> None:
    """Reorder the columns of each B of a file from ranks of all experts to experts with all their ranks."""
    tensors = load_file(directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text())
    for name, stored in tensors.items():
        if ".experts." in name and ".lora_B." in name:
            by_rank = stored.reshape(len(stored), config["r"], -1)
            tensors[name] = by_rank.transpose(1, 2).reshape(stored.shape).contiguous()
    save_file(tensors, directory / "adapter_model.safetensors")
    config["lora_B_layout"] = "grouped_by_expert"
    (directory / "adapter_config.json").write_text(json.dumps(config))


def merged(base: PreTrainedModel, family: str, plan: ExpertPlan, directory: Path) -> Any:
    """Write a file with a tensor for each expert, and merge the adapter into `base`."""
    tensors = {}
    for key, weight in linears(base, family).items():
        if not any(f".{key}".endswith(f".{name}") for name in plan.modules):
            continue
        rank = plan.rank_of(key)
        a, b = torch.randn(rank, weight.shape[1]) * 0.08, torch.randn(weight.shape[0], rank) * 0.08
        weight += plan.scale_of(key) * (b @ a)
        if plan.use_dora:
            magnitude = torch.rand(weight.shape[0]) + 0.5
            weight *= (magnitude / weight.norm(dim=1))[:, None]
            tensors[f"base_model.model.{key}.lora_magnitude_vector"] = magnitude
        tensors[f"base_model.model.{key}.lora_A.weight"] = a
        tensors[f"base_model.model.{key}.lora_B.weight"] = b
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **plan.config}))
    return base
