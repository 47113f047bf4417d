"""The modules that a PEFT configuration targets, with their ranks and scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.module_places import TENSOR_PREFIX, ModulePlace, module_places
from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.adapter_store.validation.name_patterns import NamePatterns, name_set, suffixes
from loramux.adapter_store.validation.peft_config import PeftConfig
from loramux.kernels.layout import MAX_EXPERT_RANK, MAX_RANK, ExpertModules


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedModule(ModulePlace):
    """A module that the adapter changes by `scale * B A`, with A `[rank, in]` and B `[out, rank]`.

    `vector_name` names the tensor of its magnitude or bias, `[out]`, or is None if it has neither.
    """

    rank: int
    scale: float
    vector_name: str | None


def expected_modules(config: PeftConfig, target: PackTarget, ranks_in_file: Mapping[str, int]) -> list[ExpectedModule]:
    """Return the modules that PEFT would target, layer by layer.

    `ranks_in_file` maps the key of each module with tensors to its rank. It is used instead of the configuration's
    regular expressions, and shows whether the experts are targeted: see `_Targets`.

    As in PEFT, `all-linear` leaves out `lm_head`, and with `layers_to_transform` the embedding must be named in full,
    `model.embed_tokens`. Raises AdapterRejected for a name that matches no module, so that typos do not go unnoticed.
    """
    num_layers = target.geometry.num_layers
    places = list(module_places(target))
    _check_names(config, target, places)
    if config.layers is not None and not config.targets_from_tensors and max(config.layers) >= num_layers:
        raise AdapterRejected(
            "base_mismatch", f"the base has {num_layers} layers, numbered from 0", "layers_to_transform"
        )
    targets, ranks = _Targets(config, target, places, ranks_in_file), NamePatterns(config.rank_pattern)
    alphas = NamePatterns(config.alpha_pattern)
    expected = []
    for place in places:
        name = targets.name_of(place)
        if name is None or place.key in config.modules_to_save:
            # PEFT adds no LoRA to a module whose own weight was trained.
            continue
        rank = ranks.value(name, config.rank)
        if config.ranks_from_tensors:
            rank = ranks_in_file.get(place.key, rank)
        _check_rank(rank, place, config)
        scale = _scale(config, alphas.value(name, config.alpha), rank)
        vector_name = place.magnitude_name if config.use_dora else place.bias_name if config.lora_bias else None
        if config.lora_bias and place.shape.is_embedding:
            raise AdapterRejected("unsupported_config", "PEFT does not support lora_bias for embeddings", "lora_bias")
        facts = {field.name: getattr(place, field.name) for field in fields(place)}
        expected.append(ExpectedModule(**facts, rank=rank, scale=scale, vector_name=vector_name))
    if not expected:
        raise AdapterRejected("invalid_config", "the configuration targets no module of the base", "target_modules")
    targets.check_forms(expected)
    return expected


def scale_of(config: PeftConfig, key: str, rank: int) -> float:
    """Return the factor that multiplies `B A` in the module `key`, whose rank is `rank`."""
    return _scale(config, NamePatterns(config.alpha_pattern).value(key, config.alpha), rank)


def _scale(config: PeftConfig, alpha: float, rank: int) -> float:
    return alpha / math.sqrt(rank) if config.use_rslora else alpha / rank


def _check_rank(rank: int, place: ModulePlace, config: PeftConfig) -> None:
    if place.is_expert and rank > MAX_EXPERT_RANK:
        raise AdapterRejected(
            "rank_out_of_range", f"the rank of an expert's module must be at most {MAX_EXPERT_RANK}", place.name
        )
    if config.ranks_from_tensors and not 1 <= rank <= MAX_RANK:
        raise AdapterRejected(
            "rank_out_of_range", f"a rank must be between 1 and {MAX_RANK}", TENSOR_PREFIX + place.key
        )


class _Targets:
    """Decides which modules a configuration targets.

    With transformers 4, names such as `gate_proj` also target the experts' linear layers, and `all-linear` targets
    experts and routers. With transformers 5, which stacks the experts and whose routers are not linear layers, they do
    not. The tensors in the file show which version was used. If the file has tensors for one module of a kind, it must
    have tensors for all modules of that kind that the configuration names.
    """

    def __init__(
        self,
        config: PeftConfig,
        target: PackTarget,
        places: Sequence[ModulePlace],
        ranks_in_file: Mapping[str, int],
    ) -> None:
        self._config = config
        self._experts = target.experts
        self._ranks_in_file = ranks_in_file
        self._kinds = {place.kind for place in places if place.key in ranks_in_file}
        self._modules = None if config.target_modules is None else name_set(config.target_modules)
        self._parameters = name_set(config.target_parameters)
        self._excluded = name_set(config.exclude_modules)

    def name_of(self, place: ModulePlace) -> str | None:
        """Return the module's name for rank and alpha patterns, or None if the module is not targeted."""
        for parameter in parameters_of(place, self._experts):
            if self._parameters.match(parameter) is not None:
                return parameter
        return place.key if not place.is_stacked and self._has_module(place) else None

    def check_forms(self, expected: Sequence[ExpectedModule]) -> None:
        """Raise AdapterRejected if the modules include both single experts and stacked experts."""
        single = next((one for one in expected if one.is_expert and not one.is_stacked), None)
        if single is not None and any(one.is_stacked for one in expected):
            raise AdapterRejected(
                "ambiguous_names", "the file has tensors for single experts and for all experts together", single.name
            )

    def _has_module(self, place: ModulePlace) -> bool:
        config = self._config
        if config.targets_from_tensors:
            return place.key in self._ranks_in_file
        if self._excluded.match(place.key) is not None:
            return False
        if self._modules is None:
            # "All linear" means the linear layers inside the decoder layers. PEFT omits the head, and embeddings are
            # not linear layers.
            is_router = self._experts is not None and place.kind == self._experts.router
            if place.layer is None or ((place.is_expert or is_router) and place.kind not in self._kinds):
                return False
        else:
            name = self._modules.match(place.key)
            if name is None:
                return False
            if name == place.key:
                # A full name selects its module, regardless of the list of layers.
                return True
            if place.is_expert and "." not in name and place.kind not in self._kinds:
                return False
        return config.layers is None or place.layer in config.layers


def parameters_of(place: ModulePlace, experts: ExpertModules | None) -> list[str]:
    """Return the names that `target_parameters` may use for the module's own weight."""
    if place.is_stacked:
        return [place.key]
    if place.layer is None or place.is_expert:
        return []
    names = [place.key + ".weight"]
    if experts is not None and place.kind == experts.router != experts.stacked_router:
        names.append(f"model.layers.{place.layer}.{experts.stacked_router}.weight")
    return names


def _check_names(config: PeftConfig, target: PackTarget, places: Sequence[ModulePlace]) -> None:
    modules = {name for place in places if not place.is_stacked for name in suffixes(place.key)}
    parameters = {
        name for place in places for parameter in parameters_of(place, target.experts) for name in suffixes(parameter)
    }
    named = []
    if not config.targets_from_tensors:
        named += [(f"target_modules[{index}]", name, modules) for index, name in enumerate(config.target_modules or ())]
    named += [(f"target_parameters[{i}]", name, parameters) for i, name in enumerate(config.target_parameters)]
    either = modules | parameters if config.target_parameters else modules
    if not config.ranks_from_tensors:
        named += [(f"rank_pattern.{name}", name, either) for name, _ in config.rank_pattern]
    named += [(f"alpha_pattern.{name}", name, either) for name, _ in config.alpha_pattern]
    for param, name, known in named:
        if name in known:
            continue
        # A base with fused q, k and v, for example, has no q_proj. The base's list of modules helps a tenant notice
        # that the adapter is for another base.
        present = ", ".join(dict.fromkeys(place.key.rsplit(".", 1)[-1] for place in places))
        raise AdapterRejected(
            "unknown_module", f"the base has no module of this name; adapters may change {present}", param
        )
