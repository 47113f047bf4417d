"""Adapters cannot add tokens to a base whose tokens have embeddings that adapters do not contain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.validation.vocab_size import ResizedVocabulary
from loramux.kernels.layout import LinearShape, PageGeometry

USUAL = PackTarget(
    modules=(LinearShape("self_attn.q_proj", 64, 64),),
    geometry=PageGeometry(1, 1, 64, 4, 4),
    dtype="float32",
    outer_modules=(LinearShape("model.embed_tokens", 10, 64, is_embedding=True), LinearShape("lm_head", 64, 10)),
)
FIXED = replace(USUAL, has_fixed_vocabulary=True)


def test_further_tokens_are_refused() -> None:
    with pytest.raises(AdapterRejected, match="also have per-layer embeddings") as refused:
        ResizedVocabulary(11, "embedding").check({}, FIXED, ())
    assert (refused.value.code, refused.value.param) == ("unsupported_config", "embedding")


def test_the_validation_process_receives_the_rule() -> None:
    for target in (USUAL, FIXED):
        assert PackTarget.from_document(target.document()) == target
    assert "has_fixed_vocabulary" not in USUAL.document()
