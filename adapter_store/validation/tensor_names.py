"""Translates tensor names of older PEFT versions, other trainers and wrappers into PEFT's current names.

A current name is `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`. Other names may

- lack PEFT's prefix `base_model.model.`, or repeat it, because PEFT wrapped a model that it had wrapped before;
- lack the `model.` of a base that was trained without its head, or have an additional `model.` from a wrapper around
  the base;
- begin with `module.`, or contain `_orig_mod.`, `_fsdp_wrapped_module.` or `_checkpoint_wrapped_module.`, because
  distributed training, compilation or checkpointing wrapped a module;
- contain `language_model.` or `text_model.`, before or after the base's `model.`, because the base is multimodal;
- contain the adapter's name, as in `lora_A.default.weight`, because the state dict was saved without PEFT;
- call the head `unembed_tokens` and put it into `model`, as Tinker does.

Each of these names identifies its module. But two naming styles in one file might belong to different adapters, so all
names in a file must follow one style. After translation to current names, equal weights have equal digests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.ignored_tensors import WRAPPERS
from loramux.adapter_store.formats.packed.module_places import BASE_BIAS_SUFFIXES, MAGNITUDE_SUFFIX
from loramux.adapter_store.formats.packed.trained_rows import BASE_SUFFIXES, DELTA_SUFFIX, UNUSED_SUFFIXES
from loramux.adapter_store.formats.packed.trained_vectors import UNUSED_BIAS_SUFFIXES

_PEFT_PREFIX = "base_model.model."
_PARALLEL = "module."
_HEAD, UNEMBEDDING = "lm_head", "unembed_tokens"
_MAX_DEPTH = 2
# PEFT stores the two matrices of an embedding's LoRA as plain tensors, not as modules with a weight. Magnitude vectors
# are stored either way, depending on PEFT's version. NeMo Automodel calls them `lora_magnitude` for a quantised base.
_WEIGHTS = {
    "lora_A": (".weight",),
    "lora_B": (".weight", ".bias"),
    "lora_embedding_A": ("",),
    "lora_embedding_B": ("",),
    "lora_magnitude_vector": ("", ".weight"),
    "lora_magnitude": ("",),
}
_OUTER_SUFFIXES = "|".join(re.escape(suffix) for suffix in (*BASE_SUFFIXES, *UNUSED_SUFFIXES, DELTA_SUFFIX))
_OWN_SUFFIXES = "|".join(map(re.escape, (".weight", *BASE_BIAS_SUFFIXES, *UNUSED_BIAS_SUFFIXES)))
_NAME = re.compile(
    rf"""
    (?P<prefix>(?:base_model\.model\.){{0,3}})
    (?P<outer>(?:language_model\.|text_model\.)?)
    (?P<models>(?:model\.){{0,2}})
    (?P<inner>(?:language_model\.|text_model\.)?)
    (?:
        (?P<place>
            (?:mtp_)?layers\.[0-9]{{1,4}}\.[a-z0-9_.]+
            |embed_tokens|unembed_tokens|lm_head|per_layer_model_projection
        )
        \.(?P<half>lora_[AB]|lora_embedding_[AB]|lora_magnitude(?:_vector)?)
        (?P<adapter>(?:\.[A-Za-z0-9_-]{{1,64}})??)
        (?P<weight>(?:\.weight|\.bias)?)
    |
        (?P<module>embed_tokens|lm_head)(?P<suffix>{_OUTER_SUFFIXES})
    |
        (?P<own>(?:mtp_)?layers\.[0-9]{{1,4}}\.[a-z0-9_.]+|[a-z_]*norm|lm_head)(?P<tail>{_OWN_SUFFIXES})
    )
    """,
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class _Spelling:
    """A file's naming style: the wrapper, PEFT's prefixes, the number of `model.` levels, and the adapter name.

    `outer_part` is the text decoder's name if it precedes `model.`, and `inner_part` is its name if it follows
    `model.`. `inner_part` is None for the head, which is outside `model`. `adapter` is None for the base's own weights
    and biases, which PEFT saves without the adapter's name.
    """

    is_parallel: bool
    prefix: str
    outer_part: str
    depth: int
    inner_part: str | None
    adapter: str | None

    def completed_by(self, other: _Spelling) -> _Spelling:
        """Return this style, with fields that are None taken from another name's style."""
        return replace(
            self,
            inner_part=other.inner_part if self.inner_part is None else self.inner_part,
            adapter=other.adapter if self.adapter is None else self.adapter,
        )

    def agrees_with(self, other: _Spelling) -> bool:
        return self.completed_by(other) == other.completed_by(self)


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Maps current names to the file's own names. A name in no known style is kept unchanged.

    `spelling` is the file's naming style, or None if no name has a known style.
    """

    originals: dict[str, str]
    are_current: bool
    spelling: _Spelling | None = None

    def trained_name(self, module: str) -> str:
        """Return a module's name in the model that was trained, such as `model.language_model.layers.0.mlp.up_proj`."""
        if self.spelling is None:
            return module
        outer, inner, depth = self.spelling.outer_part, self.spelling.inner_part or "", self.spelling.depth
        if module == _HEAD:
            return outer + "model." * (depth - 1) + module
        return outer + "model." * depth + inner + module.removeprefix("model.")


def current_names(names: Iterable[str]) -> TensorNames:
    """Find each tensor's current name. Raises AdapterRejected if the file mixes naming styles or if names collide."""
    originals: dict[str, str] = {}
    spelling: _Spelling | None = None
    are_current = True
    for original in sorted(names):
        name, found = _parse(original)
        if found is not None:
            spelling = spelling or found
            if not found.agrees_with(spelling):
                raise AdapterRejected("ambiguous_names", "the tensors are not all named in the same way", original)
            spelling = spelling.completed_by(found)
        if name in originals:
            raise AdapterRejected("ambiguous_names", "two tensors have names for the same module", original)
        originals[name] = original
        are_current = are_current and (found is None or name == original)
    return TensorNames(originals, are_current, spelling)


def _parse(original: str) -> tuple[str, _Spelling | None]:
    parts = [part for part in original.removeprefix(_PARALLEL).split(".") if part not in WRAPPERS]
    match = _NAME.fullmatch(".".join(parts))
    if match is None:
        return original, None
    prefix, outer, models, inner, place, half, adapter, weight, module, suffix, own, tail = match.groups()
    place = place or module or own
    if (half and weight not in _WEIGHTS[half]) or (inner and (outer or place == _HEAD)):
        return original, None
    if not half and not prefix:
        # PEFT saves the base's own weights and biases only with its prefix.
        return original, None
    suffix = suffix or tail
    if half:
        suffix = MAGNITUDE_SUFFIX if half.startswith("lora_magnitude") else f".{half}{weight}"
    depth = models.count("model.")
    if place == _HEAD:
        # The head is a sibling of the base's `model`, one level above all other modules.
        depth += 1
        inside = place
    else:
        inside = _HEAD if place == UNEMBEDDING else "model." + place
    if depth > _MAX_DEPTH:
        return original, None
    inner_part = None if place == _HEAD else inner
    spelling = _Spelling(original.startswith(_PARALLEL), prefix, outer, depth, inner_part, adapter)
    return f"{_PEFT_PREFIX}{inside}{suffix}", spelling
