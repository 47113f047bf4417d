"""The names that PEFT gives tensors today, for those that its older versions, other trainers and wrappers gave them.

Today a file of PEFT's says `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`. A module's name may also

- lack PEFT's prefix `base_model.model.`, or lack the `model.` of a base that was trained without its head, or have one
  more `model.`, of a wrapper around the base;
- begin with `module.`, and hold `_orig_mod.`, `_fsdp_wrapped_module.` or `_checkpoint_wrapped_module.` where
  distributed training, compilation or checkpointing wrapped a module;
- name the adapter, as in `lora_A.default.weight`, where a state was saved without PEFT.

Each of these says which module is meant, whatever it was; two of them in one file do not say whether they mean the same
adapter, so that all names of a file must be of one kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from loramux.adapter_store.errors import AdapterRejected

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PEFT_PREFIX = "base_model.model."
_PARALLEL = "module."
_HEAD = "lm_head"
_MAX_DEPTH = 2
_NAME = re.compile(
    r"""
    (?P<prefix>(?:base_model\.model\.)?)
    (?P<models>(?:model\.){0,2})
    (?P<place>layers\.[0-9]{1,4}\.[a-z0-9_.]+|embed_tokens|lm_head)
    \.(?P<half>lora_[AB]|lora_embedding_[AB])
    (?P<adapter>(?:\.[A-Za-z0-9_-]{1,64})??)
    (?P<weight>(?:\.weight)?)
    """,
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How the names of a file differ from today's: a wrapper around all, PEFT's prefix, the base's depth below it, the
    adapter's name."""

    is_parallel: bool
    has_prefix: bool
    depth: int
    adapter: str


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The file's own names by those of today; a name that no spelling explains stays as it is."""

    originals: dict[str, str]
    are_todays: bool


def todays_names(names: Iterable[str]) -> TensorNames:
    """Find today's name of each tensor; raises AdapterRejected where names of several kinds are mixed or collide."""
    originals: dict[str, str] = {}
    spelling: _Spelling | None = None
    are_todays = True
    for original in sorted(names):
        name, found = _parse(original)
        if found is not None:
            spelling = spelling or found
            if found != spelling:
                raise AdapterRejected("ambiguous_names", "the tensors are not all named in the same way", original)
        if name in originals:
            raise AdapterRejected("ambiguous_names", "two tensors are names of the same module", original)
        originals[name] = original
        are_todays = are_todays and (found is None or name == original)
    return TensorNames(originals, are_todays)


def _parse(original: str) -> tuple[str, _Spelling | None]:
    parts = [part for part in original.removeprefix(_PARALLEL).split(".") if part not in _WRAPPERS]
    match = _NAME.fullmatch(".".join(parts))
    if match is None:
        return original, None
    prefix, models, place, half, adapter, weight = match.groups()
    # An embedding's halves are tensors, not modules with a weight.
    if (weight == "") is not half.startswith("lora_embedding"):
        return original, None
    depth = models.count("model.")
    if place == _HEAD:
        # The head lies beside the base's `model`, one step above all else.
        depth += 1
        inside = place
    else:
        inside = "model." + place
    if depth > _MAX_DEPTH:
        return original, None
    spelling = _Spelling(original.startswith(_PARALLEL), prefix != "", depth, adapter)
    return f"{_PEFT_PREFIX}{inside}.{half}{weight}", spelling
