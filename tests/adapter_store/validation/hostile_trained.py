"""Trained heads, embeddings and tokens that do not fit the configuration, the base or each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from loramux.adapter_store.formats.packed.invocation_tokens import INVOCATION_KEY
from loramux.kernels.layout import MAX_EXTRA_TOKENS
from tests.adapter_store.adapter_files import AdapterFiles
from tests.adapter_store.small_base import HIDDEN, VOCAB_SIZE
from tests.adapter_store.validation.hostile import MARK, Hostile

HEAD = "base_model.model.lm_head"
EMBEDDING = "base_model.model.model.embed_tokens"
DELTA = ".token_adapter.trainable_tokens_delta"
BOTH = ["lm_head", "embed_tokens"]
LORA_OF_BOTH: dict[str, Any] = {"modules": ("model.embed_tokens", "lm_head")}
WHOLE = np.ones((VOCAB_SIZE, HIDDEN), np.float32)
ROWS = np.ones((2, HIDDEN), np.float32)


def _resized(num_rows: int, num_head_rows: int | None = None) -> dict[str, np.ndarray]:
    """An embedding and a head with this many tokens."""
    sizes = {EMBEDDING: num_rows, HEAD: num_rows if num_head_rows is None else num_head_rows}
    return {f"{module}.weight": np.ones((size, HIDDEN), np.float32) for module, size in sizes.items()}


def _with(value: float, like: np.ndarray = WHOLE) -> np.ndarray:
    """Change one value in the last row."""
    changed = like.copy()
    changed[-1, 1] = value
    return changed


def _trained(
    name: str,
    code: str,
    param: str,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    is_tied: bool = False,
    adapter: dict[str, Any] | None = None,
    **config: Any,
) -> Hostile:
    """A valid adapter with additional tensors and a changed configuration."""

    def change(files: AdapterFiles) -> None:
        files.config |= config
        files.tensors |= tensors or {}

    return Hostile(name=name, code=code, param=param, change=change, is_tied=is_tied, adapter=adapter or {})


def _tokens(name: str, code: str, param: str, value: Any, rows: np.ndarray = ROWS) -> Hostile:
    return _trained(name, code, param, {EMBEDDING + DELTA: rows}, trainable_token_indices=value)


SAVED, TOKENS = "modules_to_save", "trainable_token_indices"

CONFIGURATIONS = [
    _trained("a saved norm", "unsupported_config", f"{SAVED}[0]", modules_to_save=["norm"]),
    _trained("a saved linear", "unsupported_config", f"{SAVED}[1]", modules_to_save=["lm_head", "q_proj"]),
    _trained("a saved score head", "unsupported_config", f"{SAVED}[0]", modules_to_save=["score"]),
    _trained("a saved part of a name", "unsupported_config", f"{SAVED}[0]", modules_to_save=["head"]),
    _trained("a saved module of any name", "unsupported_config", f"{SAVED}[0]", modules_to_save=[MARK]),
    _trained("saved modules as text", "invalid_config", SAVED, modules_to_save="lm_head"),
    _trained("saved modules as object", "invalid_config", SAVED, modules_to_save={"lm_head": True}),
    _trained("saved modules of numbers", "invalid_config", SAVED, modules_to_save=[1]),
    _trained("tying as text", "invalid_config", "ensure_weight_tying", ensure_weight_tying=MARK),
    _tokens("tokens as text", "invalid_config", TOKENS, "1, 2"),
    _tokens("tokens of no list", "invalid_config", f"{TOKENS}.lm_head", {"lm_head": 3}),
    _tokens("no tokens of a module", "invalid_config", f"{TOKENS}.lm_head", {"lm_head": []}),
    _tokens("tokens of a norm", "unsupported_config", f"{TOKENS}.norm", {"norm": [1, 2]}),
    _tokens("tokens of a module twice", "invalid_config", f"{TOKENS}.model.embed_tokens",
            {"embed_tokens": [1, 2], "model.embed_tokens": [1, 2]}),
    _tokens("a token twice", "invalid_config", f"{TOKENS}[2]", [5, 3, 5]),
    _tokens("a negative token", "invalid_config", f"{TOKENS}[0]", [-1, 3]),
    _tokens("a token that is true", "invalid_config", f"{TOKENS}[1]", [0, True]),
    _tokens("a token that is a fraction", "invalid_config", f"{TOKENS}[0]", [1.0, 2]),
    _tokens("a token beyond the vocabulary", "base_mismatch", TOKENS, [1, VOCAB_SIZE]),
    _tokens("a token of 4000 digits", "base_mismatch", TOKENS, [1, 10**4000]),
    _trained("tokens of a saved module", "invalid_config", TOKENS, {EMBEDDING + ".weight": WHOLE},
             modules_to_save=["embed_tokens"], trainable_token_indices=[1, 2]),
    _trained("tokens of an adapted module", "unsupported_config", TOKENS, {EMBEDDING + DELTA: ROWS},
             adapter=LORA_OF_BOTH, trainable_token_indices=[1, 2]),
]  # fmt: skip

TENSORS = [
    _trained("a saved head is missing", "missing_tensor", HEAD + ".weight", modules_to_save=["lm_head"]),
    _trained("one of two saved modules is missing", "missing_tensor", EMBEDDING + ".weight",
             {HEAD + ".weight": WHOLE}, modules_to_save=BOTH),
    _trained("trained tokens are missing", "missing_tensor", EMBEDDING + DELTA, trainable_token_indices=[1, 2]),
    _trained("trained tokens without their ids", "unexpected_tensor", EMBEDDING + DELTA, {EMBEDDING + DELTA: ROWS}),
    _trained("trained tokens of another module", "unexpected_tensor", HEAD + DELTA,
             {EMBEDDING + DELTA: ROWS, HEAD + DELTA: ROWS}, trainable_token_indices=[1, 2]),
    _trained("a LoRA of a saved head", "unexpected_tensor", HEAD + ".lora_A.weight", {HEAD + ".weight": WHOLE},
             adapter={"modules": ("lm_head", "self_attn.q_proj")}, modules_to_save=["lm_head"]),
    _trained("a saved head of more tokens", "base_mismatch", HEAD + ".weight",
             {HEAD + ".weight": np.ones((VOCAB_SIZE + 1, HIDDEN), np.float32)}, modules_to_save=["lm_head"]),
    _trained("a saved head of fewer tokens", "base_mismatch", HEAD + ".weight",
             {HEAD + ".weight": WHOLE[1:]}, modules_to_save=["lm_head"]),
    _trained("a saved head of a wider base", "base_mismatch", HEAD + ".weight",
             {HEAD + ".weight": np.ones((VOCAB_SIZE, HIDDEN + 1), np.float32)}, modules_to_save=["lm_head"]),
    _trained("a saved head on its side", "base_mismatch", HEAD + ".weight",
             {HEAD + ".weight": np.ascontiguousarray(WHOLE.T)}, modules_to_save=["lm_head"]),
    _trained("a saved head without rows", "empty_tensor", HEAD + ".weight",
             {HEAD + ".weight": WHOLE[:0]}, modules_to_save=["lm_head"]),
    _trained("an unused copy of another size", "base_mismatch", HEAD + ".original_module.weight",
             {HEAD + ".weight": WHOLE, HEAD + ".original_module.weight": ROWS}, modules_to_save=["lm_head"]),
    _trained("a base's head of fewer tokens", "base_mismatch", HEAD + ".weight", {HEAD + ".weight": ROWS}),
    _trained("one token more than allowed", "base_mismatch", EMBEDDING + ".weight",
             _resized(VOCAB_SIZE + MAX_EXTRA_TOKENS + 1), modules_to_save=BOTH),
    _trained("head and embedding of different sizes", "base_mismatch", HEAD + ".weight",
             _resized(VOCAB_SIZE + 2, VOCAB_SIZE + 1), modules_to_save=BOTH),
    _trained("a resized embedding beside the base's head", "base_mismatch", HEAD + ".weight",
             _resized(VOCAB_SIZE + 2, VOCAB_SIZE), modules_to_save=BOTH),
    _trained("resized weights of different sizes", "base_mismatch", HEAD + ".weight",
             _resized(VOCAB_SIZE + 2, VOCAB_SIZE + 3), modules_to_save=["embed_tokens"]),
    _trained("a resized embedding and head with a LoRA", "unsupported_config", "target_modules",
             {f"{module}.base_layer.weight": np.ones((VOCAB_SIZE + 2, HIDDEN), np.float32)
              for module in (EMBEDDING, HEAD)}, adapter=LORA_OF_BOTH),
    _trained("an activated adapter with a resized embedding", "unsupported_config", INVOCATION_KEY,
             _resized(VOCAB_SIZE + 2), **{INVOCATION_KEY: [1]}),
    _trained("trained tokens with a gap beyond the vocabulary", "base_mismatch", TOKENS,
             {EMBEDDING + DELTA: ROWS}, is_tied=True, trainable_token_indices=[VOCAB_SIZE, VOCAB_SIZE + 2]),
    _trained("more trained tokens than the base has", "unsupported_config", TOKENS,
             {EMBEDDING + DELTA: np.ones((VOCAB_SIZE, HIDDEN), np.float32)}, is_tied=True,
             trainable_token_indices=list(range(1, VOCAB_SIZE + 1))),
    _tokens("more ids than rows", "token_mismatch", EMBEDDING + DELTA, [1, 2, 3]),
    _tokens("fewer ids than rows", "token_mismatch", EMBEDDING + DELTA, [1]),
    _tokens("rows of a narrower base", "base_mismatch", EMBEDDING + DELTA, [1, 2], ROWS[:, :8].copy()),
    _tokens("NaN in a trained token", "not_finite", EMBEDDING + DELTA, [1, 2], _with(np.nan, ROWS)),
    _tokens("a huge trained token", "norm_too_large", EMBEDDING + DELTA, [1, 2], _with(1e30, ROWS)),
    _trained("NaN in a saved head", "not_finite", HEAD + ".weight",
             {HEAD + ".weight": _with(np.nan)}, modules_to_save=["lm_head"]),
    _trained("infinity in a saved embedding", "not_finite", EMBEDDING + ".weight",
             {EMBEDDING + ".weight": _with(-np.inf)}, modules_to_save=["embed_tokens"]),
    _trained("a huge value in a saved head", "norm_too_large", HEAD + ".weight",
             {HEAD + ".weight": _with(65505.0)}, modules_to_save=["lm_head"]),
    _trained("NaN in a copy of the base's head", "not_finite", HEAD + ".base_layer.weight",
             {HEAD + ".base_layer.weight": _with(np.nan)}, adapter=LORA_OF_BOTH),
]  # fmt: skip

TIED = [
    _trained("copies of a tied weight that differ", "base_mismatch", HEAD + ".weight",
             {EMBEDDING + ".weight": WHOLE, HEAD + ".weight": _with(0.5)}, is_tied=True),
    _trained("tied modules that differ", "base_mismatch", HEAD + ".weight",
             {EMBEDDING + ".weight": WHOLE, HEAD + ".weight": _with(0.5)},
             is_tied=True, modules_to_save=BOTH, ensure_weight_tying=True),
    _trained("tied tokens that differ", "base_mismatch", HEAD + DELTA,
             {EMBEDDING + DELTA: ROWS, HEAD + DELTA: _with(0.5, ROWS)}, is_tied=True, trainable_token_indices=[1, 2]),
    _trained("a saved head beside tied tokens", "invalid_config", SAVED,
             {EMBEDDING + DELTA: ROWS, HEAD + ".weight": WHOLE},
             is_tied=True, modules_to_save=["lm_head"], trainable_token_indices=[1, 2]),
    _trained("tied tokens of two lists", "unsupported_config", "ensure_weight_tying",
             {EMBEDDING + DELTA: ROWS, HEAD + DELTA: ROWS}, is_tied=True, ensure_weight_tying=True,
             trainable_token_indices={"lm_head": [1, 2], "embed_tokens": [1, 3]}),
    _trained("tied LoRAs that differ", "base_mismatch", HEAD + ".lora_B.weight",
             is_tied=True, adapter=LORA_OF_BOTH, ensure_weight_tying=True),
    _trained("a tied LoRA of the embedding alone", "missing_tensor", HEAD + ".lora_A.weight",
             is_tied=True, adapter={"modules": ("model.embed_tokens",)}, ensure_weight_tying=True),
    _trained("tied LoRAs beside tied tokens", "unsupported_config", "trainable_token_indices",
             {EMBEDDING + DELTA: ROWS}, is_tied=True, adapter=LORA_OF_BOTH, ensure_weight_tying=True,
             trainable_token_indices=[1, 2]),
    _trained("tied LoRAs beside a saved embedding", "unsupported_config", "ensure_weight_tying",
             {EMBEDDING + ".weight": WHOLE}, is_tied=True, adapter={"modules": ("lm_head",)},
             ensure_weight_tying=True, modules_to_save=["embed_tokens"]),
]  # fmt: skip

ACTIVATED = [
    _trained("an activated head", "unsupported_config", INVOCATION_KEY, {HEAD + ".weight": WHOLE},
             modules_to_save=["lm_head"], alora_invocation_tokens=[1, 2]),
    _trained("activated tokens", "unsupported_config", INVOCATION_KEY, {EMBEDDING + DELTA: ROWS},
             trainable_token_indices=[1, 2], alora_invocation_tokens=[1, 2]),
]  # fmt: skip

TRAINED = [*CONFIGURATIONS, *TENSORS, *TIED, *ACTIVATED]
