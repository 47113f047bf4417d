"""The biases and norms of the base that a PEFT configuration replaces."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.safetensors_header import TensorEntry
from loramux.adapter_store.formats.packed.module_places import norm_places, shared_places
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.trained_vectors import UNUSED_BIAS_SUFFIXES, TrainedVector, known_vectors
from loramux.adapter_store.validation.peft_config import PeftConfig


def expected_vectors(
    config: PeftConfig, target: PackTarget, entries: Mapping[str, TensorEntry], adapted: Collection[str]
) -> dict[str, TrainedVector]:
    """Return the vectors that PEFT would load, by the names of their tensors. Raises AdapterRejected.

    A norm or a head in `modules_to_save` needs all of its tensors. With `bias`, PEFT loads the biases in the file.
    """
    if not config.trains_biases and not config.saved_norms and not config.modules_to_save:
        return {}
    saved = _saved_norms(config, target) | config.modules_to_save
    found = {}
    for name, vector in known_vectors(target, adapted).items():
        is_saved = vector.place.key in saved
        is_unused = name.endswith(UNUSED_BIAS_SUFFIXES)
        is_bias_in_file = config.trains_biases and name.endswith(".bias") and name in entries
        if (is_saved and not is_unused) or (is_bias_in_file and (is_saved or not is_unused)):
            found[name] = vector
    return found


def _saved_norms(config: PeftConfig, target: PackTarget) -> set[str]:
    """Return the keys of the norms in `modules_to_save`.

    In PEFT, a name stands for all modules whose names end with it, even in the middle of a word: `norm` stands for
    `input_layernorm`.
    """
    norms = [norm.key for norm in norm_places(target)]
    saved: set[str] = set()
    for index, name in config.saved_norms:
        found = {key for key in norms if key.endswith(name)}
        if not found or any(place.key.endswith(name) for place in shared_places(target)):
            raise AdapterRejected(
                "unsupported_config",
                "modules_to_save may name only embed_tokens, lm_head and the norms of the base: "
                + (", ".join(sorted({norm.name for norm in target.norms})) or "this base has none"),
                f"modules_to_save[{index}]",
            )
        saved |= found
    return saved
