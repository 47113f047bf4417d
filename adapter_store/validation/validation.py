"""Checks whether an upload's configuration and tensors form an adapter for the served base."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE
from loramux.adapter_store.formats.files.ignored_tensors import is_ignored
from loramux.adapter_store.formats.files.safetensors_header import TensorEntry
from loramux.adapter_store.formats.files.tensor_file import TensorFile
from loramux.adapter_store.formats.packed.fp8 import not_in_fp8
from loramux.adapter_store.formats.packed.invocation_tokens import INVOCATION_KEY
from loramux.adapter_store.formats.packed.module_places import (
    A_SUFFIX,
    BIAS_SUFFIX,
    MAGNITUDE_SUFFIX,
    TENSOR_PREFIX,
    ModulePlace,
    draft_places,
    module_of,
    shared_places,
    unused_projections,
)
from loramux.adapter_store.formats.packed.pack_target import FP8, PackTarget
from loramux.adapter_store.formats.packed.rearranged_places import places_in_file
from loramux.adapter_store.formats.packed.stack_form import StackForm
from loramux.adapter_store.formats.packed.trained_rows import max_row_counts, outer_weight_names, tokens_of
from loramux.adapter_store.formats.packed.trained_vectors import TrainedVector
from loramux.adapter_store.formats.version_files.adapter_task import EMBEDDING_TASK
from loramux.adapter_store.validation.expected_modules import ExpectedModule, expected_modules
from loramux.adapter_store.validation.expected_vectors import expected_vectors
from loramux.adapter_store.validation.peft_config import PeftConfig, parse_peft_config
from loramux.adapter_store.validation.report import CheckList, Report, Warn, tensor_warnings, unmatched, without_effect
from loramux.adapter_store.validation.stack_forms import in_usual_form, stack_forms
from loramux.adapter_store.validation.stacked_names import with_stacked_names
from loramux.adapter_store.validation.tensor_names import TensorNames, current_names
from loramux.adapter_store.validation.trained_config import EMBEDDING, HEAD
from loramux.adapter_store.validation.trained_parts import TrainedParts, trained_parts
from loramux.adapter_store.validation.weight_checks import WeightChecks

_EXPERT = re.compile(r"\.experts\.([0-9]{1,9})\.")
_LAYER = re.compile(r"base_model\.model\.model\.layers\.([0-9]{1,4})\.")


def validate_files(
    config: bytes,
    tensors: Path | bytes,
    target: PackTarget,
    checks: CheckList | None = None,
    needs_effect: bool = True,
) -> Report:
    """Check an upload against the base. Raises AdapterRejected. Needs only the base's shapes, not its weights.

    Records its checks in `checks`, to which the caller can add its own. Without `needs_effect`, an adapter whose
    products are all zero is valid.
    """
    checks = checks or CheckList()
    with checks.check("configuration"):
        parsed = parse_peft_config(config)
        _check_vocabulary(parsed.invocation_tokens, target.vocab_size)
    with ExitStack() as stack:
        with checks.check("container"):
            file = stack.enter_context(TensorFile(tensors, target.max_header_bytes))
        with checks.check("modules"):
            names = with_stacked_names(current_names(file.header.tensors), parsed, target)
            of_drafter = _of_drafter(file, names, target)
            # Packing decides by the current names, too.
            ignored = sorted(
                original
                for name, original in names.originals.items()
                if is_ignored(name) and original not in of_drafter
            )
            unused = _of_modules(names, unused_projections(target))
            entries = _used(file, names, [*ignored, *unused])
            places = places_in_file(target, _modules(entries))
            forms = stack_forms(parsed, target, places, entries)
            names, entries = in_usual_form(forms, places, names, entries)
            expectation = expected_modules(parsed, target, places, _ranks(entries, places), names)
            expected = expectation.modules
            if parsed.invocation_tokens and any(module.shape.is_embedding for module in expected):
                raise AdapterRejected(
                    "unsupported_config",
                    "neither loramux nor PEFT supports an activated LoRA that changes the embedding",
                    INVOCATION_KEY,
                )
        with checks.check("names"):
            adapted = {module.key for module in expected}
            parts = trained_parts(parsed, target, entries, adapted)
            # Copies of the base's weights are allowed, because packing compares them with the base.
            has_trained = parsed.modules_to_save or parsed.token_indices or parts.vocab_size is not None
            if parsed.invocation_tokens and has_trained:
                raise AdapterRejected(
                    "unsupported_config",
                    "an activated LoRA cannot have trained weights of the embedding or the head, because PEFT would "
                    "use them even before the invocation",
                    INVOCATION_KEY,
                )
            vectors = expected_vectors(parsed, target, entries, adapted)
            if parsed.invocation_tokens and vectors:
                raise AdapterRejected(
                    "unsupported_config",
                    "an activated LoRA cannot have trained biases or norms, because PEFT would use them even before "
                    "the invocation",
                    INVOCATION_KEY,
                )
            has_vectors = vectors or any(module.vector_name is not None for module in expected)
            if target.dtype == FP8 and (has_trained or has_vectors or parts.task is not None):
                raise not_in_fp8()
            _check_names(parsed, entries, expected, parts, vectors, target)
            if parts.vocabulary is not None:
                parts.vocabulary.check(parts.rows, target, adapted)
        with checks.check("shapes"):
            _check_shapes(entries, expected)
            _check_vectors(entries, vectors)
            parts.check_shapes(entries)
        with checks.check("weights"):
            weights = WeightChecks()
            for module, A, B in _matrices(file, entries, expected, forms):
                weights.check(module, A, B, (entries[module.a_name].name, entries[module.b_name].name))
                if module.vector_name is not None:
                    vector = entries[module.vector_name].name
                    check_vector = weights.check_magnitude if parsed.use_dora else weights.check_bias
                    check_vector(vector, file.float32(vector))
            for name in sorted(vectors):
                weights.check_vector(entries[name].name, file.float32(entries[name].name))
            parts.check_values(file, entries)
            if parsed.ensure_weight_tying and target.tied_embeddings:
                _check_tied(file, entries, expected)
            rounded = sorted(entry.name for entry in entries.values() if file.is_rounded(entry.name))
    with checks.check("effect"):
        is_idle = weights.largest_effect == 0.0 and not weights.has_vectors and not parts.rows
        if needs_effect and is_idle:
            raise AdapterRejected("zero_effect", "the adapter has no effect: its products B A are all zero")
    warnings = without_effect(weights.effects) + unmatched(expectation.unmatched)
    warnings += tensor_warnings(ignored, unused, rounded)
    if not names.are_current:
        warnings.append(
            Warn(
                "older_names",
                "the tensor names differ from those that PEFT now writes for a text-only model, and were translated",
            )
        )
    if forms:
        warnings.append(
            Warn(
                "stacks_reordered",
                "the tensors of stacked experts are in the order of an earlier Unsloth or PEFT, and were reordered",
            )
        )
    if parsed.targets_from_tensors:
        warnings.append(
            Warn(
                "selected_by_tensors",
                "the tensors show what the configuration's regular expressions selected; the expressions were not run",
            )
        )
    if parts.base_copies:
        warnings.append(
            Warn(
                "base_weights_included",
                "the file has copies of the base's weights, and rows that differ from the base's are served: unless "
                "these rows were trained, save the adapter with save_pretrained(..., save_embedding_layers=False)",
                len(parts.base_copies),
                tuple(parts.base_copies),
            )
        )
    return Report(
        scales={module.key: module.scale for module in expected},
        trained=parts.rows,
        vocab_size=parts.vocab_size,
        num_trained_rows={
            module.name: parts.rows[module.name].max_count(tokens_of(module, parts.vocab_size))
            for module in target.outer_modules
            if module.name in parts.rows and (parts.task is None or module.name != HEAD)
        },
        task=EMBEDDING_TASK if parsed.is_for_embeddings else parts.task,
        num_trained_vectors=Counter(f"{one.place.kind}.{name.rpartition('.')[2]}" for name, one in vectors.items()),
        names=names.originals,
        stack_forms=forms,
        max_rank=max(expectation.total_ranks.values()),
        num_pages=_num_pages(expected, parts, vectors, target),
        num_parameters=sum(math.prod(entry.shape) for entry in entries.values()),
        dtypes=tuple(sorted({entry.dtype for entry in entries.values()})),
        features=(
            *parsed.features,
            *(("bias",) if parsed.trains_biases and vectors else ()),
            *(("drafter",) if any(module.is_draft for module in expected) else ()),
        ),
        invocation_tokens=parsed.invocation_tokens,
        effects=weights.effects,
        recorded=parsed.recorded,
        warnings=warnings,
        checks=checks,
    )


def _check_vocabulary(token_ids: Sequence[int], vocab_size: int | None) -> None:
    for index, token_id in enumerate(token_ids):
        if vocab_size is not None and token_id >= vocab_size:
            raise AdapterRejected(
                "base_mismatch",
                f"the base has no such token: its vocabulary has {vocab_size} tokens, numbered from 0",
                f"{INVOCATION_KEY}[{index}]",
            )


def _matrices(
    file: TensorFile,
    entries: Mapping[str, TensorEntry],
    expected: Sequence[ExpectedModule],
    forms: Mapping[str, StackForm],
) -> Iterator[tuple[ExpectedModule, npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Yield each module with its A `[rank, in_features]` and B `[out_features, rank]`.

    The tensors of stacked experts are read only once.
    """
    for _, modules in groupby(expected, key=lambda module: module.key):
        stack: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None = None
        for module in modules:
            if stack is None:
                stack = _matrix(file, entries, module.a_name, forms), _matrix(file, entries, module.b_name, forms)
            rows = module.a_rows(module.rank)
            yield module, stack[0][rows.start : rows.stop], module.of_module(stack[1][:, module.b_columns])


def _matrix(
    file: TensorFile, entries: Mapping[str, TensorEntry], name: str, forms: Mapping[str, StackForm]
) -> npt.NDArray[np.float32]:
    stored = file.float32(entries[name].name)
    return forms[name].usual(name, stored) if name in forms else stored


def _used(file: TensorFile, names: TensorNames, ignored: Collection[str]) -> dict[str, TensorEntry]:
    """Return the tensors that are not ignored, by their current names."""
    skipped = frozenset(ignored)
    used = {name: original for name, original in names.originals.items() if original not in skipped}
    if skipped and not used:
        raise AdapterRejected(
            "unsupported_config",
            "the adapter changes only parts of the model other than its text decoder, which loramux does not serve",
            "target_modules",
        )
    return {name: file.header.tensors[original] for name, original in used.items()}


def _of_drafter(file: TensorFile, names: TensorNames, target: PackTarget) -> set[str]:
    """Return the tensors that change the base's own head for drafts, by their names in the file."""
    found: set[str] = set()
    for place in draft_places(target):
        tensors = [
            names.originals.get(name) for name in (place.b_name, place.a_name, place.magnitude_name, place.bias_name)
        ]
        # PEFT makes tensors for MiMo's head, but does not train them: each B is zero, and they would only take pages.
        if tensors[0] is None or not is_ignored(place.b_name) or file.float32(tensors[0]).any():
            found.update(name for name in tensors if name is not None)
    return found


def _of_modules(names: TensorNames, modules: Collection[str]) -> list[str]:
    """Return the tensors of some modules, by their names in the file."""
    return sorted(original for name, original in names.originals.items() if module_of(name) in modules)


def _modules(entries: Mapping[str, TensorEntry]) -> set[str]:
    """Return the names of the modules with an A in the file, except embeddings."""
    return {name.removeprefix(TENSOR_PREFIX).removesuffix(A_SUFFIX) for name in entries if name.endswith(A_SUFFIX)}


def _check_tied(file: TensorFile, entries: Mapping[str, TensorEntry], expected: Sequence[ExpectedModule]) -> None:
    """Check that the LoRA of the head is the transposed LoRA of the embedding, as it is in PEFT's tied modules."""
    outer = {module.key: module for module in expected if module.layer is None}
    # PEFT ties only these two, not the modules of a head for drafts.
    if EMBEDDING not in outer or HEAD not in outer:
        return
    embedding, head = outer[EMBEDDING], outer[HEAD]
    for of_embedding, of_head in ((embedding.a_name, head.b_name), (embedding.b_name, head.a_name)):
        name = entries[of_head].name
        if not np.array_equal(file.float32(entries[of_embedding].name), file.float32(name).T):
            raise AdapterRejected(
                "base_mismatch",
                "ensure_weight_tying gives the head the transposed LoRA of the embedding, but the file has different "
                "weights for the two",
                name,
            )


def _ranks(entries: Mapping[str, TensorEntry], places: Sequence[ModulePlace]) -> dict[str, int]:
    """Return the rank of each of the base's modules that has an A in the file, by the module's key."""
    found = ((place, entries.get(place.a_name)) for place in places)
    return {place.key: place.rank_of(entry.shape) for place, entry in found if entry is not None and entry.shape}


def _num_pages(
    expected: Sequence[ExpectedModule], parts: TrainedParts, vectors: Mapping[str, TrainedVector], target: PackTarget
) -> int:
    ranks = np.zeros((target.geometry.num_layers, len(target.all_modules)), np.int32)
    outer_ranks = np.zeros(len(target.all_outer_modules), np.int32)
    for module in expected:
        if module.layer is None:
            outer_ranks[module.module] = module.rank
        else:
            # A module that the file divides has the ranks of all its parts.
            ranks[module.layer, module.module] += module.rank
    with_affine: list[ModulePlace] = [vector.place for vector in vectors.values()]
    # The products with replaced rows of a head lack the base's bias, which the affine adds.
    if parts.task is None:
        with_affine += [place for place in shared_places(target) if place.shape.has_bias and place.key in parts.rows]
    for place in with_affine:
        # A module without a LoRA needs rank 1 for its affine.
        if place.layer is None:
            outer_ranks[place.module] = max(outer_ranks[place.module], 1)
        else:
            ranks[place.layer, place.module] = max(ranks[place.layer, place.module], 1)
    has_affines = bool(with_affine) or any(module.vector_name is not None for module in expected)
    try:
        rows = max_row_counts(parts.rows, target, parts.vocab_size)
        return target.layout(ranks, outer_ranks, has_affines, rows).num_pages
    except ValueError:
        raise AdapterRejected(
            "adapter_too_large",
            "the adapter has more elements than the page pool can address: use a lower rank, or train fewer rows",
            "modules_to_save" if parts.rows else "r",
        ) from None


def _check_names(
    config: PeftConfig,
    entries: Mapping[str, TensorEntry],
    expected: Sequence[ExpectedModule],
    parts: TrainedParts,
    vectors: Collection[str],
    target: PackTarget,
) -> None:
    """Check that `entries`, keyed by current names, are the expected tensors.

    Errors about a tensor in the file use its name in the file.
    """
    wanted = {name for module in expected for name in (module.a_name, module.b_name, module.vector_name) if name}
    wanted |= {*parts.shapes, *vectors}
    missing, unexpected = wanted - entries.keys(), entries.keys() - wanted
    if not missing and not unexpected:
        return
    # Look for the most specific cause first: one mistake, such as another base, usually makes many names wrong. Of the
    # wrong names, report the smallest, because sets have no order and the report must not change between runs.
    num_layers = target.geometry.num_layers
    # The head for drafts can be named like one more layer.
    of_head = {place.key for place in draft_places(target)}
    in_layers = (_LAYER.match(name) for name in entries if module_of(name) not in of_head)
    layers = {int(match[1]) for match in in_layers if match}
    if max(layers, default=0) >= num_layers:
        raise AdapterRejected(
            "base_mismatch",
            f"the adapter has weights for layer {max(layers)}, but the base has {num_layers} layers",
            entries[min(unexpected)].name,
        )
    if (beyond := _beyond_experts(unexpected, target)) is not None:
        expert, name = beyond
        num_experts = 0 if target.experts is None else target.experts.num_experts
        raise AdapterRejected(
            "base_mismatch",
            f"the adapter has weights for expert {expert}, but the base has {num_experts} experts, numbered from 0",
            entries[name].name,
        )
    base_weights = [
        name for module in target.outer_modules for name in outer_weight_names(module.name) if name in unexpected
    ]
    if base_weights:
        raise AdapterRejected(
            "unexpected_tensor",
            "the file contains weights of the base where PEFT would not load them: "
            "save it with save_pretrained(..., save_embedding_layers=False)",
            entries[min(base_weights)].name,
        )
    biases = [name for name in unexpected if name.endswith(".bias")]
    if config.trains_biases and biases:
        raise AdapterRejected(
            "unexpected_tensor",
            "the base has no bias that PEFT would replace with this tensor",
            entries[min(biases)].name,
        )
    of_drafter = [
        name for name in unexpected if name.endswith((MAGNITUDE_SUFFIX, BIAS_SUFFIX)) and module_of(name) in of_head
    ]
    if of_drafter:
        raise AdapterRejected(
            "unexpected_tensor",
            "the LoRA of the head for drafts must be plain, without magnitudes of DoRA and without biases",
            entries[min(of_drafter)].name,
        )
    magnitudes = [name for name in unexpected if name.endswith(MAGNITUDE_SUFFIX)]
    if magnitudes and not any(name.endswith(MAGNITUDE_SUFFIX) for name in wanted):
        raise AdapterRejected(
            "unexpected_tensor",
            "the file has magnitudes of DoRA, but the configuration does not mention DoRA: set use_dora to true in "
            + CONFIG_FILE,
            entries[min(magnitudes)].name,
        )
    if unexpected:
        raise AdapterRejected(
            "unexpected_tensor", "the configuration does not target this tensor", entries[min(unexpected)].name
        )
    if all(name.endswith(MAGNITUDE_SUFFIX) for name in missing):
        raise AdapterRejected(
            "missing_tensor",
            "the configuration has use_dora, but the file lacks this module's magnitudes: save the adapter again with "
            "its magnitudes",
            min(missing),
        )
    wanted_layers = {module.layer for module in expected if module.layer is not None}
    if len(wanted_layers) == num_layers > len(layers) > 0 and layers == set(range(len(layers))):
        # The layer after the adapter's last one: the smallest name would be that of a layer 10.
        beyond_last = [name for name in missing if (match := _LAYER.match(name)) and int(match[1]) == len(layers)]
        raise AdapterRejected(
            "base_mismatch",
            f"the adapter has {len(layers)} layers, but the base has {num_layers}",
            min(beyond_last or missing),
        )
    raise AdapterRejected(
        "missing_tensor", "the configuration targets this tensor, but the file lacks it", min(missing)
    )


def _beyond_experts(names: Collection[str], target: PackTarget) -> tuple[int, str] | None:
    """Return the lowest expert number that the base lacks, with the name of one of the expert's tensors, or None."""
    found = ((int(match[1]), name) for name in names if (match := _EXPERT.search(name)) is not None)
    num_experts = 0 if target.experts is None else target.experts.num_experts
    return min((one for one in found if one[0] >= num_experts), default=None)


def _check_vectors(entries: Mapping[str, TensorEntry], vectors: Mapping[str, TrainedVector]) -> None:
    for name, vector in vectors.items():
        entry = entries[name]
        if entry.shape != (vector.size,):
            raise AdapterRejected(
                "base_mismatch",
                f"the tensor has shape {list(entry.shape)}, but the base needs {[vector.size]}",
                entry.name,
            )


def _check_shapes(entries: Mapping[str, TensorEntry], expected: Sequence[ExpectedModule]) -> None:
    for module in expected:
        a, b = entries[module.a_name], entries[module.b_name]
        vector = [] if module.vector_name is None else [entries[module.vector_name]]
        for entry, num_dimensions in ((a, 2), (b, 2), *((one, 1) for one in vector)):
            if len(entry.shape) != num_dimensions:
                raise AdapterRejected(
                    "wrong_dimensions",
                    f"the tensor has {len(entry.shape)} dimensions, not {num_dimensions}",
                    entry.name,
                )
        a_rank, in_features = a.shape
        out_features, b_rank = b.shape
        for name, found, wanted in (
            (a.name, in_features, module.shape.in_features),
            (b.name, out_features, module.file_outputs),
            *((one.name, one.shape[0], module.file_outputs) for one in vector),
        ):
            if found != wanted:
                raise AdapterRejected(
                    "base_mismatch", f"the tensor is for {found} features, but the base has {wanted}", name
                )
        for name, rank in ((a.name, a_rank), (b.name, b_rank)):
            if module.is_stacked and rank != module.rank * module.num_experts:
                raise AdapterRejected(
                    "rank_mismatch",
                    f"the tensor has {rank} ranks, not {module.rank} for each of {module.num_experts} experts",
                    name,
                )
            if not module.is_stacked and rank != module.rank:
                raise AdapterRejected(
                    "rank_mismatch", f"the tensor has rank {rank}, but the configuration says {module.rank}", name
                )
