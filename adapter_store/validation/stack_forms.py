"""Finds out in which form a file stores the tensors of stacked experts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE
from loramux.adapter_store.formats.files.safetensors_header import TensorEntry
from loramux.adapter_store.formats.packed.module_places import ModulePlace
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.stack_form import StackForm
from loramux.adapter_store.validation.peft_config import PeftConfig
from loramux.adapter_store.validation.stacked_config import GROUPED, LAYOUT_KEY, RANK_MAJOR
from loramux.adapter_store.validation.tensor_names import TensorNames

_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?")
_FIRST_USUAL = (0, 19, 1)
"""The first release of PEFT that wrote the usual A and B of every stack."""
_SWAPS_TRANSPOSED = (0, 19, 0)


def stack_forms(
    config: PeftConfig, target: PackTarget, places: Sequence[ModulePlace], entries: Mapping[str, TensorEntry]
) -> dict[str, StackForm]:
    """Return the form of each tensor of a stack that the file does not store in the usual form, by its name.

    `entries` are keyed by current names. Raises AdapterRejected if the file does not show its form.
    """
    stacks = [place for place in places if place.is_stacked and not place.expert and _has_matrices(place, entries)]
    if not stacks:
        return {}
    if config.b_layout is None and config.is_from_unsloth:
        raise AdapterRejected(
            "unsupported_config",
            f"Unsloth wrote this adapter of stacked experts without {LAYOUT_KEY}, which says how B is ordered: in "
            f'{CONFIG_FILE}, set {LAYOUT_KEY} to "{GROUPED}" if it was trained with Unsloth before 17 September 2026 '
            f'(unsloth_zoo up to 2026.9.5), and to "{RANK_MAJOR}" if it was trained later',
            LAYOUT_KEY,
        )
    swapped = _swapped(config, target, stacks, entries)
    forms = {
        place.key: StackForm(place.num_experts, config.b_layout == GROUPED, place.key in swapped) for place in stacks
    }
    return {
        name: form
        for place in stacks
        if (form := forms[place.key]).is_grouped or form.is_swapped
        for name in (place.a_name, place.b_name)
    }


def in_usual_form(
    forms: Mapping[str, StackForm],
    places: Sequence[ModulePlace],
    names: TensorNames,
    entries: Mapping[str, TensorEntry],
) -> tuple[TensorNames, dict[str, TensorEntry]]:
    """Give each A and B the shape of its usual form, and the name of the file's tensor that it comes from."""
    originals, found = dict(names.originals), dict(entries)
    for place in places:
        if place.expert or not place.is_stacked or place.a_name not in forms or not forms[place.a_name].is_swapped:
            continue
        for name, source in ((place.a_name, place.b_name), (place.b_name, place.a_name)):
            originals[name] = names.originals[source]
            found[name] = replace(entries[source], shape=forms[name].usual_shape(entries[source].shape))
    return replace(names, originals=originals), found


def _has_matrices(place: ModulePlace, entries: Mapping[str, TensorEntry]) -> bool:
    found = (entries.get(place.a_name), entries.get(place.b_name))
    return all(entry is not None and len(entry.shape) == 2 for entry in found)


def _swapped(
    config: PeftConfig, target: PackTarget, stacks: Sequence[ModulePlace], entries: Mapping[str, TensorEntry]
) -> set[str]:
    """Return the keys of the stacks whose A and B are swapped.

    Where a stack has as many inputs as outputs, the other stacks or the release of PEFT decide.
    """
    swapped: set[str] = set()
    usual: set[str] = set()
    square: set[str] = set()
    for place in stacks:
        sizes = (entries[place.a_name].shape[1], entries[place.b_name].shape[0])
        inputs, outputs = place.shape.in_features, place.file_outputs
        if inputs == outputs:
            square.add(place.key)
        elif sizes == (outputs, inputs):
            swapped.add(place.key)
        else:
            usual.add(place.key)
    if square and bool(swapped) == bool(usual):
        assert target.experts is not None
        are_transposed = any(linear.alternates for linear in target.experts.linears)
        is_swapped = _is_swapped_by(config.recorded.get("peft_version"), are_transposed)
    else:
        is_swapped = bool(swapped)
    return swapped | square if is_swapped else swapped


def _is_swapped_by(peft_version: str | None, are_transposed: bool) -> bool:
    """Return whether a release of PEFT swapped A and B. Raises AdapterRejected if that depends on an unknown release.

    `are_transposed` applies to gpt-oss, whose weights are `[num_experts, in_features, out_features]`. Only PEFT 0.19.0
    swapped those.
    """
    matched = _VERSION.match(peft_version or "")
    version = None if matched is None else tuple(int(number or 0) for number in matched.groups())
    if are_transposed:
        return version == _SWAPS_TRANSPOSED
    if version is None:
        raise AdapterRejected(
            "invalid_config",
            "peft_version is missing or not a release number, which shows how PEFT stored stacked experts with as many "
            f"inputs as outputs: set it in {CONFIG_FILE} to the release of PEFT that saved the adapter, or to "
            '"0.17.0" for any release before 0.18, which did not write it',
            "peft_version",
        )
    return version < _FIRST_USUAL
