"""Merges several adapters into the files of a new adapter, one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from loramux.adapter_store.errors import MergeRefused
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.formats.files.tensor_writer import write_tensors
from loramux.adapter_store.formats.version_files.peft_document import peft_document
from loramux.adapter_store.merging.methods import Matrix, MergeMethod, MergeSettings, combine
from loramux.adapter_store.merging.plain_lora import PlainLora, PlainModule
from loramux.adapter_store.validation.peft_config import MAX_NAMES
from loramux.kernels.layout import MAX_RANK

MAX_ADAPTERS = 16
"""Maximum number of adapters in one merge.

All their A matrices, or all their B matrices, of one module are in memory at the same time.
"""

MAX_WEIGHT = 1000.0

Wrote = Callable[[int], None]
"""Called with the number of bytes just written."""


def check_weights(weights: Sequence[float]) -> None:
    """Raise MergeRefused for too few or too many adapters, or for a weight that is out of range."""
    if not 2 <= len(weights) <= MAX_ADAPTERS:
        raise MergeRefused("invalid_sources", f"a merge needs 2 to {MAX_ADAPTERS} adapters", "sources")
    for weight in weights:
        if not (math.isfinite(weight) and 0 < abs(weight) <= MAX_WEIGHT):
            raise MergeRefused(
                "invalid_weight",
                f"a weight must be a number from -{MAX_WEIGHT:g} to {MAX_WEIGHT:g}, other than 0",
                "weight",
            )


def merge_adapters(
    adapters: Sequence[PlainLora],
    weights: Sequence[float],
    settings: MergeSettings,
    directory: Path,
    wrote: Wrote = lambda _: None,
) -> None:
    """Write the merged adapter's two files into `directory`. Raises MergeRefused.

    The tensors equal the result of PEFT's `add_weighted_adapter` in float32, apart from the random choices of the DARE
    methods and PEFT's zero padding: with `cat`, the rank of a module is the sum of its ranks in the adapters that
    change it. The scale of every module is 1. With `use_rslora`, PEFT scales the merged adapter once more, but this
    function does not.
    """
    check_weights(weights)
    members = _members(adapters, weights)
    if len(members) > MAX_NAMES:
        message = f"the adapters change {len(members)} modules, but a configuration can name only {MAX_NAMES}"
        raise MergeRefused("merge_unsupported", message, "target_modules")
    modules = {key: _merged_module(key, found, settings.method) for key, found in members.items()}
    shapes: dict[str, tuple[int, int]] = {}
    makers: dict[str, Callable[[], Matrix]] = {}
    for key, module in modules.items():
        shapes[module.a_name] = (module.rank, module.in_features)
        shapes[module.b_name] = (module.out_features, module.rank)
        for name, is_a in ((module.a_name, True), (module.b_name, False)):
            makers[name] = _maker(members[key], name, is_a, settings)

    def tensor(name: str) -> Matrix:
        # If a sum is too large, validation refuses the merged adapter.
        with np.errstate(over="ignore", invalid="ignore"):
            made = makers[name]()
        wrote(made.nbytes)
        return made

    ranks = {key: module.rank for key, module in modules.items()}
    config = peft_document(ranks, None, **_recorded(adapters[0]))
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_tensors(directory / TENSORS_FILE, shapes, tensor)


_Member = tuple[PlainLora, PlainModule, float]


def _members(adapters: Sequence[PlainLora], weights: Sequence[float]) -> dict[str, list[_Member]]:
    """Return the adapters that change each module, with their weights."""
    members: dict[str, list[_Member]] = {}
    for adapter, weight in zip(adapters, weights, strict=True):
        for key, module in adapter.modules.items():
            members.setdefault(key, []).append((adapter, module, weight))
    return members


def _merged_module(key: str, members: Sequence[_Member], method: MergeMethod) -> PlainModule:
    first_adapter, first, _ = members[0]
    for adapter, module, _ in members[1:]:
        pair = f"{first_adapter.name} and {adapter.name}"
        if (module.a_name, module.in_features, module.out_features) != (
            first.a_name,
            first.in_features,
            first.out_features,
        ):
            raise MergeRefused("shape_mismatch", f"{pair} have different shapes of {key}: their bases differ", key)
        if method is not MergeMethod.CAT and module.rank != first.rank:
            raise MergeRefused(
                "rank_mismatch",
                f"{pair} have ranks {first.rank} and {module.rank} on {key}, but {method} needs equal ranks: use cat",
                key,
            )
    rank = sum(module.rank for _, module, _ in members) if method is MergeMethod.CAT else first.rank
    if rank > MAX_RANK:
        raise MergeRefused(
            "rank_out_of_range", f"the merged rank of {key} is {rank}; at most {MAX_RANK} is served", key
        )
    return PlainModule(key, first.a_name, first.b_name, first.in_features, first.out_features, rank, 1.0)


def _maker(members: Sequence[_Member], name: str, is_a: bool, settings: MergeSettings) -> Callable[[], Matrix]:
    """Return a function that reads one tensor from each member and combines these tensors."""
    if settings.method is MergeMethod.CAT:
        return lambda: _concatenated(members, name, is_a)

    def make() -> Matrix:
        weights = []
        for _, module, weight in members:
            # A and B are each scaled by the square root of |weighted|, and A also by the sign of `weighted`.
            weighted = weight * module.scale
            weights.append(math.copysign(math.sqrt(abs(weighted)), weighted if is_a else 1.0))
        return combine(name, [adapter.tensor(name) for adapter, _, _ in members], weights, settings)

    return make


def _concatenated(members: Sequence[_Member], name: str, is_a: bool) -> Matrix:
    if not is_a:
        return np.concatenate([adapter.tensor(name) for adapter, _, _ in members], axis=1)
    return np.concatenate(
        [adapter.tensor(name) * np.float32(weight) * np.float32(module.scale) for adapter, module, weight in members]
    )


def _recorded(first: PlainLora) -> dict[str, str]:
    """Return the configuration entries that describe the base, from the first adapter."""
    recorded = {name: first.config.recorded.get(name) for name in ("base_model_name_or_path", "revision")}
    return {name: value for name, value in recorded.items() if value is not None}
