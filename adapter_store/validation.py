"""Whether an uploaded pair of files is an adapter of our base; fails closed, with a code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.expected_modules import TENSOR_PREFIX, ExpectedModule, expected_modules
from loramux.adapter_store.peft_config import parse_peft_config
from loramux.adapter_store.safetensors_header import TensorEntry
from loramux.adapter_store.target import PackTarget
from loramux.adapter_store.tensor_file import TensorFile
from loramux.adapter_store.weight_checks import WeightChecks

_LAYER = re.compile(r"base_model\.model\.model\.layers\.(\d{1,4})\.")


@dataclass(frozen=True, slots=True)
class Report:
    """What validation found. `scales` holds each module's scale, in the order of the packed stream."""

    scales: Mapping[str, float]
    max_rank: int
    num_pages: int
    num_parameters: int
    dtypes: tuple[str, ...]
    largest_effect: float
    recorded: Mapping[str, str | None]

    def document(self) -> dict[str, Any]:
        """The facts that are kept with a version."""
        return {
            "num_modules": len(self.scales),
            "num_parameters": self.num_parameters,
            "max_rank": self.max_rank,
            "num_pages": self.num_pages,
            "dtypes": list(self.dtypes),
            "largest_effect": self.largest_effect,
            "recorded": dict(self.recorded),
        }


def validate_files(config: bytes, tensors: Path | bytes, target: PackTarget) -> Report:
    """Check an upload against the base; raises AdapterRejected. No base weights are needed: shapes decide."""
    parsed = parse_peft_config(config)
    with TensorFile(tensors) as file:
        entries = file.header.tensors
        expected = expected_modules(parsed, target)
        _check_names(entries, expected, target)
        _check_shapes(entries, expected)
        checks = WeightChecks()
        for module in expected:
            checks.check(module, file.float32(module.a_name), file.float32(module.b_name))
    if checks.largest_effect == 0.0:
        raise AdapterRejected("zero_effect", "the adapter changes nothing: its products B A are zero")
    ranks = np.zeros((target.geometry.num_layers, len(target.modules)), np.int32)
    outer_ranks = np.zeros(len(target.outer_modules), np.int32)
    for module in expected:
        if module.layer is None:
            outer_ranks[module.module] = module.rank
        else:
            ranks[module.layer, module.module] = module.rank
    return Report(
        scales={module.key: module.scale for module in expected},
        max_rank=max(module.rank for module in expected),
        num_pages=target.num_pages(ranks, outer_ranks),
        num_parameters=sum(entry.shape[0] * entry.shape[1] for entry in entries.values()),
        dtypes=tuple(sorted({entry.dtype for entry in entries.values()})),
        largest_effect=checks.largest_effect,
        recorded=parsed.recorded,
    )


def _check_names(entries: Mapping[str, TensorEntry], expected: Sequence[ExpectedModule], target: PackTarget) -> None:
    wanted = {name for module in expected for name in (module.a_name, module.b_name)}
    missing, unexpected = wanted - entries.keys(), entries.keys() - wanted
    if not missing and not unexpected:
        return
    num_layers = target.geometry.num_layers
    layers = {int(match[1]) for match in map(_LAYER.match, entries) if match}
    if max(layers, default=0) >= num_layers:
        raise AdapterRejected(
            "base_mismatch",
            f"the adapter has weights for layer {max(layers)}, the base has {num_layers} layers",
            min(unexpected),
        )
    base_weights = [name for name in unexpected if _is_base_weight(name, target)]
    if base_weights:
        # Nobody can tell here whether training has left them as they were.
        raise AdapterRejected(
            "unexpected_tensor",
            "the file holds weights of the base itself, which an adapter cannot bring: "
            "save it with save_pretrained(..., save_embedding_layers=False)",
            min(base_weights),
        )
    if unexpected:
        raise AdapterRejected("unexpected_tensor", "the configuration does not name this tensor", min(unexpected)[:300])
    wanted_layers = {module.layer for module in expected if module.layer is not None}
    if len(wanted_layers) == num_layers > len(layers) > 0 and layers == set(range(len(layers))):
        raise AdapterRejected(
            "base_mismatch", f"the adapter has {len(layers)} layers, the base has {num_layers}", min(missing)
        )
    raise AdapterRejected("missing_tensor", "the configuration names this tensor, the file lacks it", min(missing))


def _is_base_weight(name: str, target: PackTarget) -> bool:
    """Whether PEFT stores an outer module's own weights under this name, as it does unless it is told not to."""
    places = [TENSOR_PREFIX + module.name for module in target.outer_modules]
    return any(name in (f"{place}.base_layer.weight", f"{place}.weight") for place in places)


def _check_shapes(entries: Mapping[str, TensorEntry], expected: Sequence[ExpectedModule]) -> None:
    for module in expected:
        a_rank, in_features = entries[module.a_name].shape
        out_features, b_rank = entries[module.b_name].shape
        for name, found, wanted in (
            (module.a_name, in_features, module.shape.in_features),
            (module.b_name, out_features, module.shape.out_features),
        ):
            if found != wanted:
                raise AdapterRejected(
                    "base_mismatch", f"the tensor is for {found} features, the base has {wanted}", name
                )
        for name, rank in ((module.a_name, a_rank), (module.b_name, b_rank)):
            if rank != module.rank:
                raise AdapterRejected(
                    "rank_mismatch", f"the tensor has rank {rank}, the configuration says {module.rank}", name
                )
