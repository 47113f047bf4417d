"""The modules that a PEFT configuration targets, with their ranks and scales."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.ignored_tensors import is_ignored
from loramux.adapter_store.formats.packed.module_places import ModulePlace, module_of, unused_projections
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.validation.name_patterns import MAX_NAME_LEN, NameSet, suffixes
from loramux.adapter_store.validation.pattern_keys import PatternKeys
from loramux.adapter_store.validation.peft_config import PeftConfig
from loramux.adapter_store.validation.tensor_names import UNEMBEDDING, TensorNames
from loramux.kernels.layout import MAX_RANK, ExpertModules

_NOT_SERVED = (
    "modality_router",
    "correction_coefs",
    "prediction_coefs",
    "linear_left",
    "linear_right",
)
"""Linear layers of Gemma 3n that adapters cannot change. PEFT's `all-linear` includes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedModule(ModulePlace):
    """A module that the adapter changes by `scale * B A`, with A `[rank, in]` and B `[out, rank]`.

    `vector_name` names the tensor of its magnitude or bias, `[out]`, or is None if it has neither.
    """

    rank: int
    scale: float
    vector_name: str | None


@dataclass(frozen=True, slots=True)
class Expectation:
    """The modules that the adapter changes, and the parts of the configuration that match none of them.

    `total_ranks` contains the rank of each module of the base, which is the sum of its parts' ranks if the file divides
    it.
    """

    modules: list[ExpectedModule]
    unmatched: list[str]
    total_ranks: Counter[str]


def expected_modules(
    config: PeftConfig,
    target: PackTarget,
    places: Sequence[ModulePlace],
    ranks_in_file: Mapping[str, int],
    names: TensorNames,
) -> Expectation:
    """Return the modules among `places` that PEFT would target, layer by layer.

    `ranks_in_file` maps the key of each module with tensors to its rank. It is used instead of the configuration's
    regular expressions for modules, and shows whether the experts are targeted: see `_Targets`.

    As in PEFT, `all-linear` leaves out `lm_head`, with `layers_to_transform` the embedding must be named in full,
    `model.embed_tokens`, and a name that matches no module is left out. Raises AdapterRejected for such a name if the
    file has tensors of this name.
    """
    num_layers = target.geometry.num_layers
    known = _KnownNames(places, target)
    unmatched = known.unmatched(config, names)
    if config.layers is not None and not config.targets_from_tensors and max(config.layers) >= num_layers:
        raise AdapterRejected(
            "base_mismatch", f"the base has {num_layers} layers, numbered from 0", "layers_to_transform"
        )
    targets = _Targets(config, target, places, ranks_in_file, names)
    modules = known.modules | known.parameters
    ranks = PatternKeys("rank_pattern", config.rank_pattern, modules)
    alphas = PatternKeys("alpha_pattern", config.alpha_pattern, modules)
    expected = []
    for place in places:
        name = targets.name_of(place)
        if name is None or place.key in config.modules_to_save:
            # PEFT adds no LoRA to a module whose own weight was trained.
            continue
        trained_name = names.trained_name(name)
        rank = ranks.value(name, trained_name, config.rank)
        scale = _scale(config, alphas.value(name, trained_name, config.alpha), rank)
        vector_name = place.magnitude_name if config.use_dora else place.bias_name if config.lora_bias else None
        if place.is_draft:
            # Magnitudes need weights of the head, which the base may lack even if `config.json` names the head.
            vector_name = None
        if config.lora_bias and place.shape.is_embedding:
            raise AdapterRejected("unsupported_config", "PEFT does not support lora_bias for embeddings", "lora_bias")
        facts = {field.name: getattr(place, field.name) for field in fields(place)}
        expected.append(ExpectedModule(**facts, rank=rank, scale=scale, vector_name=vector_name))
    if not expected:
        raise AdapterRejected("invalid_config", "the configuration targets no module of the base", "target_modules")
    targets.check_forms(expected)
    total_ranks = _total_ranks(expected)
    return Expectation(expected, unmatched + ranks.unmatched + alphas.unmatched, total_ranks)


def _total_ranks(expected: Sequence[ExpectedModule]) -> Counter[str]:
    total: Counter[str] = Counter()
    for module in expected:
        total[module.name] += module.rank
        if total[module.name] > MAX_RANK:
            raise AdapterRejected(
                "rank_out_of_range",
                f"the base fuses this layer with others, and their ranks add up to more than {MAX_RANK}",
                module.key,
            )
    return total


class Scales:
    """The factors that multiply the products `B A` of the modules in a file, given the names of all its modules."""

    def __init__(self, config: PeftConfig, modules: Iterable[str], names: TensorNames) -> None:
        known = {name for module in modules for name in suffixes(module)}
        self._config = config
        self._names = names
        self._alphas = PatternKeys("alpha_pattern", config.alpha_pattern, known)

    def of(self, module: str, rank: int) -> float:
        """Raises AdapterRejected for a regular expression that cannot be used."""
        alpha = self._alphas.value(module, self._names.trained_name(module), self._config.alpha)
        return _scale(self._config, alpha, rank)


def _scale(config: PeftConfig, alpha: float, rank: int) -> float:
    return alpha / math.sqrt(rank) if config.use_rslora else alpha / rank


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
        names: TensorNames,
    ) -> None:
        self._config = config
        self._names = names
        self._experts = target.experts
        self._ranks_in_file = ranks_in_file
        self._kinds = {place.kind for place in places if place.key in ranks_in_file}
        self._modules = None if config.target_modules is None else NameSet(config.target_modules)
        self._parameters = NameSet(config.target_parameters)
        self._excluded = NameSet(config.exclude_modules)
        # With `ensure_weight_tying`, PEFT targets both the embedding and the head of a tied base if either is named,
        # regardless of the list of layers.
        self._ties_outer_modules = (
            config.ensure_weight_tying
            and target.tied_embeddings
            and not config.modules_to_save
            and not config.targets_from_tensors
            and self._modules is not None
            and any(self._modules.match(shape.name) is not None for shape in target.outer_modules)
        )

    def name_of(self, place: ModulePlace) -> str | None:
        """Return the module's name for rank and alpha patterns, or None if the module is not targeted."""
        if place.is_draft:
            # A base that was trained without its head lacks these modules, so names such as `q_proj` do not show
            # whether they are targeted.
            return place.key if place.key in self._ranks_in_file else None
        if self._ties_outer_modules and place.layer is None:
            return place.key
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
            # not linear layers. Tinker trains the head too.
            if UNEMBEDDING in self._names.originals.get(place.a_name, ""):
                return True
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
        # The linear layers with a full name are outside the decoder layers.
        return config.layers is None or (place.layer in config.layers and place.key != place.shape.name)


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


class _KnownNames:
    """The names that a configuration may use for the base's modules and parameters."""

    def __init__(self, places: Sequence[ModulePlace], target: PackTarget) -> None:
        self._places = places
        self._unused = unused_projections(target)
        self.modules = {name for place in places if not place.is_stacked for name in suffixes(place.key)}
        self.parameters = {
            name
            for place in places
            for parameter in parameters_of(place, target.experts)
            for name in suffixes(parameter)
        }

    def unmatched(self, config: PeftConfig, names: TensorNames) -> list[str]:
        """Return the targets that the base does not have.

        Raises AdapterRejected if the file has tensors for one of them, or if the base has none of the targets.
        """
        modules = () if config.targets_from_tensors else config.target_modules or ()
        named = [(f"target_modules[{index}]", name, self.modules) for index, name in enumerate(modules)]
        named += [(f"target_parameters[{i}]", name, self.parameters) for i, name in enumerate(config.target_parameters)]
        unknown = [(param, name) for param, name, known in named if name not in known]
        if unknown:
            modules_in_file = set(map(_module_of, names.originals)) - self._unused
            in_file = {part for module in modules_in_file for part in suffixes(module)} - {""}
            # A parameter's tensors are named after its module.
            strange = [
                (param, name) for param, name in unknown if not in_file.isdisjoint((name, name.rpartition(".")[0]))
            ]
            if strange or len(unknown) == len(named):
                raise self._refusal(strange or unknown)
        return [param for param, _ in unknown]

    def _refusal(self, strange: list[tuple[str, str]]) -> AdapterRejected:
        named = {name.rpartition(".")[2]: param for param, name in strange}
        # An adapter of Gemma for another base has these names too, but would not fit the base without them either.
        is_gemma = any(place.key.endswith(".per_layer_input_gate") for place in self._places)
        if is_gemma and named.keys() <= set(_NOT_SERVED):
            not_served = [name for name in _NOT_SERVED if name in named]
            listed = ", ".join(not_served)
            message = f"adapters may not change {listed}: train the adapter with exclude_modules, which leaves them out"
            return AdapterRejected("unknown_module", message, named[not_served[0]])
        param = strange[0][0]
        # A base with fused q, k and v, for example, has no q_proj. The base's list of modules helps a tenant notice
        # that the adapter is for another base.
        present = ", ".join(dict.fromkeys(place.key.rsplit(".", 1)[-1] for place in self._places))
        return AdapterRejected(
            "unknown_module", f"the base has no module of this name; adapters may change {present}", param
        )


def _module_of(tensor: str) -> str:
    """Return the name of the module to which a tensor of an adapter belongs, or "" for a tensor that is ignored."""
    module = module_of(tensor)
    # Listing the ends of a name that is much longer than any module's would take long.
    return "" if len(module) > MAX_NAME_LEN or is_ignored(tensor) else module
