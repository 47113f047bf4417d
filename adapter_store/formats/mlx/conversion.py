"""Converts an adapter that mlx-lm has trained to PEFT's two files.

mlx-lm writes the transposes of PEFT's A and B to `adapters.safetensors`, and a scale in place of alpha to
`adapter_config.json`. Its magnitudes are those of PEFT's DoRA. The LoRAs of experts are converted by
`expert_stacks.py`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, MLX_FILE, TENSORS_FILE
from loramux.adapter_store.formats.files.safetensors_header import TensorEntry
from loramux.adapter_store.formats.files.strict_json import DuplicateKey, InvalidJson, parse_strict_json
from loramux.adapter_store.formats.files.tensor_file import TensorFile
from loramux.adapter_store.formats.mlx.base_facts import ReadBase
from loramux.adapter_store.formats.mlx.expert_stacks import ExpertPart, ExpertStack, expert_stacks
from loramux.adapter_store.formats.mlx.written_tensor import (
    WrittenTensor,
    copied,
    transposed_a,
    transposed_b,
    write_tensors,
)
from loramux.adapter_store.formats.packed.module_places import (
    A_SUFFIX,
    B_SUFFIX,
    EMBEDDING_A_SUFFIX,
    EMBEDDING_B_SUFFIX,
    MAGNITUDE_SUFFIX,
    TENSOR_PREFIX,
)
from loramux.adapter_store.formats.version_files.peft_document import peft_document
from loramux.kernels.layout import MAX_RANK

MAX_ALPHA = 65536.0
"""Largest product of scale and rank, and largest scale, alpha and rank that are read."""

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"

_A, _B, _MAGNITUDE = "lora_a", "lora_b", "m"
"""The last parts of the names of mlx-lm's tensors."""

_EXPERTS = re.compile(
    r"(?P<above>(?:(?:language_model|model)\.){0,2}layers\.[0-9]{1,4}\.)"
    r"(?:mlp\.switch_mlp|block_sparse_moe\.switch_mlp|experts\.switch_glu|mlp\.experts|feed_forward\.experts)"
    r"\.(?P<part>gate_proj|up_proj|down_proj)"
)
"""mlx-lm's names of the linear layers of all experts, in the families that are served."""

_RELEASE = "0.19.1"
"""The release of PEFT whose form of stacked experts is written. Validation reads it where the shapes do not show it."""

_Module = dict[str, TensorEntry]
"""The tensors of a module by the last parts of their names."""


def convert_mlx(directory: Path, destination: Path, read_base: ReadBase) -> None:
    """Write PEFT's two files of the adapter in `directory` into the directory `destination`. Raises AdapterRejected.

    `read_base` is called if the adapter changes experts or the embedding. Other shapes are not compared with the base,
    because validation does that. Memory use is bounded, because validation runs in a sandbox and the conversion does
    not.
    """
    scale, use_dora = _settings((directory / CONFIG_FILE).read_bytes())
    # Validation refuses links, which are common in the cache of a hub.
    with TensorFile((directory / MLX_FILE).resolve(), max_dimensions=3) as file:
        modules = _modules(file)
        stacks = list(_stacks(modules, use_dora, read_base))
        tensors = [tensor for stack in stacks for tensor in stack.tensors(file)]
        ranks: dict[str, int] = {}
        for name, module in modules.items():
            if _EXPERTS.fullmatch(name) is not None:
                continue
            _check_shapes(module)
            if _A in module:
                ranks[name] = module[_A].shape[1]
            if name.rpartition(".")[2] != EMBEDDING.rpartition(".")[2]:
                tensors += _linear_tensors(file, name, module)
                continue
            _check_embedding(name, module, use_dora)
            tensors += _embedding_tensors(file, name, module)
            if read_base().tied_embeddings:
                head = _head_of(name)
                if head in modules:
                    message = "the base ties its head to its embedding, so the two cannot have LoRAs of their own"
                    raise AdapterRejected("base_mismatch", message, head)
                ranks[head] = ranks[name]
                tensors += _tied_head_tensors(file, head, module)
        _check_ranks({*ranks.values(), *(part.rank for stack in stacks for part in stack.present)})
        document = _document(ranks, {stack.parameter: stack.rank for stack in stacks}, scale, use_dora)
        (destination / CONFIG_FILE).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
        write_tensors(tensors, destination / TENSORS_FILE)


def _settings(text: bytes) -> tuple[float, bool]:
    """Return the scale, and whether the adapter is a DoRA."""
    try:
        config = parse_strict_json(text)
    except (DuplicateKey, InvalidJson) as error:
        raise AdapterRejected("invalid_config", f"the configuration is not JSON: {error}", CONFIG_FILE) from None
    lora = config.get("lora_parameters") if isinstance(config, dict) else None
    if not isinstance(lora, dict):
        message = f"beside {MLX_FILE}, the configuration must be mlx-lm's, with lora_parameters"
        raise AdapterRejected("invalid_config", message, "lora_parameters")
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        message = "mlx-lm has trained all weights, not an adapter: serve the model as a base"
        raise AdapterRejected("unsupported_config", message, "fine_tune_type")
    scale: Any = lora.get("scale")
    if not _is_positive(scale):
        message = f"the scale must be a positive number, at most {MAX_ALPHA:g}"
        raise AdapterRejected("invalid_config", message, "lora_parameters.scale")
    _check_alpha(lora, float(scale))
    return float(scale), kind == "dora"


def _check_alpha(lora: Mapping[str, Any], scale: float) -> None:
    """Refuse an alpha, which only earlier releases of mlx-lm multiply by, unless it has no effect in any release."""
    alpha, rank = lora.get("alpha"), lora.get("rank")
    if alpha is None or alpha == rank:
        return
    hint = f", {scale * alpha / rank:g}" if _is_positive(alpha) and _is_positive(rank) else ""
    message = (
        "releases of mlx-lm differ in whether the scale is multiplied by alpha / rank: remove alpha and, if the "
        f"adapter was trained with a release that knows alpha, set scale to the product{hint}"
    )
    raise AdapterRejected("invalid_config", message, "lora_parameters.alpha")


def _is_positive(value: Any) -> bool:
    # JSON can have integers that are too large for a float.
    return type(value) in (int, float) and 0 < value <= MAX_ALPHA


def _modules(file: TensorFile) -> dict[str, _Module]:
    found: dict[str, _Module] = {}
    for name, entry in file.header.tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf not in (_A, _B, _MAGNITUDE):
            raise AdapterRejected("unexpected_tensor", "only lora_a, lora_b and m of modules are expected", name)
        found.setdefault(module, {})[leaf] = entry
    return found


def _stacks(modules: Mapping[str, _Module], use_dora: bool, read_base: ReadBase) -> Iterator[ExpertStack]:
    """Yield the stacks of experts that the adapter changes, layer by layer."""
    layers: defaultdict[str, dict[str, ExpertPart]] = defaultdict(dict)
    for name, module in modules.items():
        if (match := _EXPERTS.fullmatch(name)) is None:
            continue
        above, part = match.groups()
        if use_dora or _MAGNITUDE in module:
            message = "mlx-lm has no DoRA of experts: train a LoRA, or train without the keys of the experts"
            raise AdapterRejected("unsupported_config", message, name)
        _check_has_both(name, module)
        if part in layers[above]:
            raise AdapterRejected("ambiguous_names", "two modules have names for the same experts", name)
        layers[above][part] = ExpertPart(module[_A], module[_B])
    for above, parts in layers.items():
        yield from expert_stacks(above, parts, read_base())


def _linear_tensors(file: TensorFile, name: str, module: _Module) -> Iterator[WrittenTensor]:
    above = TENSOR_PREFIX + name
    if _A in module:
        yield transposed_a(file, module[_A], above + A_SUFFIX)
    if _B in module:
        yield transposed_b(file, module[_B], above + B_SUFFIX)
    if _MAGNITUDE in module:
        yield copied(file, module[_MAGNITUDE], above + MAGNITUDE_SUFFIX)


def _embedding_tensors(file: TensorFile, name: str, module: _Module) -> Iterator[WrittenTensor]:
    yield transposed_a(file, module[_A], TENSOR_PREFIX + name + EMBEDDING_A_SUFFIX)
    yield transposed_b(file, module[_B], TENSOR_PREFIX + name + EMBEDDING_B_SUFFIX)


def _tied_head_tensors(file: TensorFile, head: str, of_embedding: _Module) -> Iterator[WrittenTensor]:
    """The LoRA of a head that uses the embedding's weight, which mlx-lm changes with the embedding.

    The head multiplies by the transposed weight, so its A is the embedding's lora_b, and its B the lora_a.
    """
    yield copied(file, of_embedding[_B], TENSOR_PREFIX + head + A_SUFFIX)
    yield copied(file, of_embedding[_A], TENSOR_PREFIX + head + B_SUFFIX)


def _head_of(embedding: str) -> str:
    """Return the name of the head beside an embedding, such as `language_model.model.embed_tokens`."""
    return embedding.removesuffix(EMBEDDING) + HEAD if embedding.endswith(EMBEDDING) else HEAD


def _check_embedding(name: str, module: _Module, use_dora: bool) -> None:
    _check_has_both(name, module)
    if use_dora or _MAGNITUDE in module:
        message = (
            f"mlx-lm's DoRA of the embedding has a magnitude for each token, and PEFT's for each feature: train a "
            f"LoRA, or train without the key {EMBEDDING}"
        )
        raise AdapterRejected("unsupported_config", message, name)


def _check_has_both(name: str, module: _Module) -> None:
    for leaf in (_A, _B):
        if leaf not in module:
            raise AdapterRejected("missing_tensor", f"the module has no {leaf}", name)


def _check_shapes(module: _Module) -> None:
    for leaf, entry in module.items():
        # Opening the file does not check the shapes of tensors that validation ignores.
        if leaf == _MAGNITUDE and len(entry.shape) != 1:
            raise AdapterRejected("wrong_dimensions", "m must have one dimension", entry.name)
        if leaf != _MAGNITUDE and len(entry.shape) != 2:
            raise AdapterRejected("tensor_not_2d", "lora_a and lora_b must have two dimensions", entry.name)
        if (leaf == _A and entry.shape[1] > MAX_RANK) or (leaf == _B and entry.shape[0] > MAX_RANK):
            raise AdapterRejected("rank_out_of_range", f"a rank must be between 1 and {MAX_RANK}", entry.name)


def _check_ranks(ranks: Collection[int]) -> None:
    if not ranks:
        raise AdapterRejected("missing_tensor", "the file has no lora_a", MLX_FILE)
    if len(ranks) > 1:
        raise AdapterRejected("rank_mismatch", "the ranks of the modules differ", MLX_FILE)


def _document(
    modules: Mapping[str, int], parameters: Mapping[str, int], scale: float, use_dora: bool
) -> dict[str, Any]:
    """Return PEFT's configuration, given the ranks of the modules and of the stacks of experts."""
    ranks = {**modules, **parameters}
    if scale * max(ranks.values()) > MAX_ALPHA:
        message = f"for this rank, the scale must be at most {MAX_ALPHA / max(ranks.values()):g}"
        raise AdapterRejected("invalid_config", message, "lora_parameters.scale")
    document = peft_document(ranks, None, use_dora=use_dora)
    document["lora_alpha"] *= scale
    document["alpha_pattern"] = {name: scale * rank for name, rank in document["rank_pattern"].items()}
    if not parameters:
        return document
    stacked = {"target_parameters": list(parameters), "peft_version": _RELEASE}
    return {**document, "target_modules": list(modules), **stacked}
