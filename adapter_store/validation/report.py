"""The validation report for the tenant: the checks that ran, and the adapter's properties."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from loramux.adapter_store.errors import AdapterRejected, printable
from loramux.adapter_store.formats.files.ignored_tensors import is_of_training
from loramux.adapter_store.formats.packed.stack_form import StackForm
from loramux.adapter_store.formats.packed.trained_rows import TrainedRows
from loramux.adapter_store.formats.version_files.adapter_task import AdapterTask
from loramux.adapter_store.validation.weight_checks import Effect

CHECKS = ("configuration", "container", "modules", "names", "shapes", "weights", "effect", "packing")
"""All checks, in order. Validation stops at the first check that fails."""

_MAX_LISTED = 20
_MAX_PARAM_LEN = 200


class CheckList:
    """The checks that ran, with their outcomes and durations."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[str, float]] = {}

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Record the outcome of the check `name`. If it raises AdapterRejected, attach all outcomes to the error."""
        assert name in CHECKS
        start = time.perf_counter()
        outcome = "failed"
        try:
            yield
            outcome = "passed"
        except AdapterRejected as error:
            self._made[name] = (outcome, time.perf_counter() - start)
            error.report = {"checks": self.document()}
            raise
        finally:
            self._made[name] = (outcome, time.perf_counter() - start)

    def document(self) -> list[dict[str, Any]]:
        return [
            {"check": name, "outcome": self._made[name][0], "ms": round(self._made[name][1] * 1000, 1)}
            if name in self._made
            else {"check": name, "outcome": "not_made"}
            for name in CHECKS
        ]


@dataclass(frozen=True, slots=True)
class Warn:
    """A probable mistake that does not prevent serving; `params` lists the first affected modules or tensors."""

    code: str
    message: str
    count: int = 1
    params: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "count": self.count, "params": list(self.params)}


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a validation. `scales` contains each module's scale, in the order of the packed streams.

    `trained` maps outer modules to the rows that the adapter replaces. `vocab_size` is the adapter's vocabulary size,
    or None if the adapter has the base's vocabulary. `num_trained_vectors` counts the biases and norms that replace the
    base's, by their names without layers. `names` maps PEFT's current name of each tensor to the file's own name, and
    `stack_forms` maps tensors of stacked experts to their forms in the file, if they are not in the usual one.
    `invocation_tokens` is empty unless the adapter is an activated LoRA.
    """

    scales: Mapping[str, float]
    trained: Mapping[str, TrainedRows]
    vocab_size: int | None
    num_trained_rows: Mapping[str, int]
    num_trained_vectors: Mapping[str, int]
    names: Mapping[str, str]
    stack_forms: Mapping[str, StackForm]
    max_rank: int
    num_pages: int
    num_parameters: int
    dtypes: tuple[str, ...]
    features: tuple[str, ...]
    invocation_tokens: tuple[int, ...]
    effects: Sequence[Effect]
    recorded: Mapping[str, str | None]
    warnings: Sequence[Warn]
    checks: CheckList
    task: AdapterTask | None = None
    """What the adapter is for, or None for generation."""

    @property
    def num_labels(self) -> int | None:
        """Number of classes of a classifier, or None."""
        return len(self.task.labels) if self.task is not None and self.task.labels else None

    @property
    def largest_effect(self) -> float:
        return max(effect.largest for effect in self.effects)

    def document(self) -> dict[str, Any]:
        """Return the facts to store with the version."""
        facts = {
            "num_modules": len(self.scales),
            "num_parameters": self.num_parameters,
            "max_rank": self.max_rank,
            "num_pages": self.num_pages,
            "dtypes": list(self.dtypes),
            "features": list(self.features),
            "largest_effect": _rounded(self.largest_effect),
            "modules": _by_kind(self.effects),
            "trained_rows": dict(self.num_trained_rows),
            "warnings": [warning.document() for warning in self.warnings],
            "checks": self.checks.document(),
            "recorded": dict(self.recorded),
        }
        if self.task is not None:
            facts["task"] = self.task.document()
        if self.num_trained_vectors:
            facts["trained_vectors"] = dict(self.num_trained_vectors)
        return {**facts, "invocation_tokens": list(self.invocation_tokens)} if self.invocation_tokens else facts


def without_effect(effects: Sequence[Effect]) -> list[Warn]:
    """Return a warning if some modules have no effect, for example because B is still zero, as before training."""
    idle = [effect.module.name for effect in effects if effect.largest == 0.0]
    if not idle:
        return []
    return [
        Warn("module_without_effect", "the product B A of these modules is zero", len(idle), tuple(idle[:_MAX_LISTED]))
    ]


def unmatched(params: Sequence[str]) -> list[Warn]:
    """Return a warning about the names and patterns in the configuration that match no module."""
    if not params:
        return []
    message = "these parts of the configuration match no module that the adapter changes, and are ignored"
    return [_listed("unmatched_names", message, params)]


def tensor_warnings(ignored: Sequence[str], unused: Sequence[str], rounded: Sequence[str]) -> list[Warn]:
    """Return the warnings about tensors that are not used, or not used exactly as they are."""
    of_training = [name for name in ignored if is_of_training(name)]
    of_other_parts = [name for name in ignored if not is_of_training(name)]
    found = (
        (
            "other_parts_ignored",
            "these tensors are not used: they belong to a part other than the text decoder, or to a head for drafts "
            "that the base lacks or that was not trained",
            of_other_parts,
        ),
        ("training_state_ignored", "these tensors are used only in training", of_training),
        (
            "shared_layers_ignored",
            "these layers use the K and V of earlier layers, but not these tensors",
            unused,
        ),
        ("values_rounded", "these float64 values were rounded to float32", rounded),
    )
    return [_listed(code, message, params) for code, message, params in found if params]


def _listed(code: str, message: str, params: Sequence[str]) -> Warn:
    shown = tuple(printable(param, _MAX_PARAM_LEN) for param in params[:_MAX_LISTED])
    return Warn(code, message, len(params), shown)


def _by_kind(effects: Sequence[Effect]) -> dict[str, Any]:
    """Return the layers, ranks, scales and effects of each kind of module, such as `self_attn.q_proj`."""
    kinds: dict[str, list[Effect]] = {}
    for effect in _largest_of_experts(effects):
        kinds.setdefault(effect.module.kind.replace("{}.", ""), []).append(effect)
    return {
        kind: {
            "layers": [effect.module.layer for effect in members if effect.module.layer is not None],
            "ranks": [effect.module.rank for effect in members],
            "scales": [_rounded(effect.module.scale) for effect in members],
            "effects": [_rounded(effect.largest) for effect in members],
            "largest_effect": _rounded(max(effect.largest for effect in members)),
        }
        for kind, members in kinds.items()
    }


def _largest_of_experts(effects: Sequence[Effect]) -> list[Effect]:
    """Return all effects, but for experts only the largest of each kind and layer."""
    largest: dict[tuple[str, int | None], Effect] = {}
    for effect in effects:
        place = effect.module.kind, effect.module.layer
        if place not in largest or effect.largest > largest[place].largest:
            largest[place] = effect
    return list(largest.values())


def _rounded(value: float) -> float:
    """Round to four significant digits, which is enough for comparisons."""
    return float(f"{value:.4g}")
