"""Writes `config.json` and `generation_config.json` from the metadata of a GGUF model."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import ConversionRefused
from loramux.adapter_store.gguf.base_metadata import BaseMetadata
from loramux.adapter_store.gguf.base_records import BaseRecord
from loramux.adapter_store.gguf.base_rope import rope_fields

_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


def config_fields(
    metadata: BaseMetadata, record: BaseRecord, factors: dict[str, npt.NDArray[np.float32]]
) -> dict[str, Any]:
    """Return the configuration in Hugging Face's form. `factors` are the file's tensors of rotary factors.

    Raises ConversionRefused.
    """
    embedding = metadata.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConversionRefused("missing_tensor", "the file has no embedding", "token_embd.weight")
    heads, size = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    if not heads:
        raise metadata.refused("attention.head_count", heads, "a positive count")
    head_dim = metadata.integer("attention.key_length", size // heads)
    if metadata.integer("attention.value_length", head_dim) != head_dim:
        raise metadata.refused("attention.value_length", metadata.find("attention.value_length"), "the key's length")
    own = record.fields(metadata)
    config = {
        "architectures": [record.architecture],
        "num_hidden_layers": metadata.integer("block_count"),
        "hidden_size": size,
        "intermediate_size": metadata.integer("feed_forward_length", own.get("moe_intermediate_size", 0)),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": metadata.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        record.eps_field: metadata.number(record.eps),
        **rope_fields(metadata, record, head_dim, factors),
        **own,
    }
    metadata.check_all_read()
    return config


def special_tokens(metadata: BaseMetadata) -> dict[str, Any]:
    """Return the fields of `generation_config.json`: the first token, and the tokens that end an answer."""
    found = {key: metadata.all.get(f"tokenizer.ggml.{key}") for key in ("bos_token_id", *_END_TOKENS)}
    for key, value in found.items():
        if value is not None and (type(value) is not int or value < 0):
            name = f"tokenizer.ggml.{key}"
            raise ConversionRefused("invalid_metadata", f"{name} is {value!r:.60}, not a token id", name)
    ends = list(dict.fromkeys(found[key] for key in _END_TOKENS if found[key] is not None))
    fields: dict[str, Any] = {}
    if found["bos_token_id"] is not None:
        fields["bos_token_id"] = found["bos_token_id"]
    if ends:
        fields["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return fields
