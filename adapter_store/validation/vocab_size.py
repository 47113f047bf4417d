"""The vocabulary size of an adapter whose embedding and head were resized to fit its own tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.safetensors_header import TensorEntry
from loramux.adapter_store.formats.packed.module_places import TENSOR_PREFIX
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.trained_rows import BASE_SUFFIXES, TrainedRows
from loramux.adapter_store.validation.peft_config import PeftConfig
from loramux.kernels.layout import MAX_EXTRA_TOKENS, trained_rows_of

_TOKENS = "trainable_token_indices"


@dataclass(frozen=True, slots=True)
class ResizedVocabulary:
    """An embedding and head with `num_tokens` rows, more or fewer than the base's.

    `param` names the field or tensor that states the number.
    """

    num_tokens: int
    param: str

    def check(self, rows: Mapping[str, TrainedRows], target: PackTarget, adapted: Collection[str]) -> None:
        """Raise AdapterRejected unless the embedding and the head are both resized, and neither has a LoRA.

        `rows` maps modules to the rows that the adapter replaces, and `adapted` contains the keys of the modules with a
        LoRA.
        """
        for module in target.outer_modules:
            num_rows, found = trained_rows_of(module)[0], rows.get(module.name)
            if self.num_tokens > num_rows and target.has_fixed_vocabulary:
                raise AdapterRejected(
                    "unsupported_config",
                    f"the adapter has {self.num_tokens} tokens and the base {num_rows}, but tokens of this base also "
                    "have per-layer embeddings, which an adapter does not contain",
                    self.param,
                )
            if module.has_bias:
                raise AdapterRejected(
                    "unsupported_config",
                    f"the adapter has {self.num_tokens} tokens and the base {num_rows}, but the base's head has a "
                    "bias, which cannot be resized",
                    self.param,
                )
            if not 0 < self.num_tokens <= num_rows + MAX_EXTRA_TOKENS:
                raise AdapterRejected(
                    "base_mismatch",
                    f"the base has {num_rows} tokens; an adapter can have at most {MAX_EXTRA_TOKENS} more",
                    self.param,
                )
            if module.name in adapted:
                raise AdapterRejected(
                    "unsupported_config",
                    f"the adapter has {self.num_tokens} tokens and the base {num_rows}, so the embedding and the head "
                    "cannot have a LoRA: list them in modules_to_save instead",
                    "target_modules",
                )
            # A smaller vocabulary has no tokens beyond the base's, and only a whole weight can have fewer rows.
            beyond = range(num_rows, self.num_tokens)
            if found is None or not (found.has_all(beyond) if beyond else found.whole is not None):
                missing = f"the tokens {num_rows} to {self.num_tokens - 1} of" if beyond else "the weight of"
                raise AdapterRejected(
                    "base_mismatch",
                    f"the adapter has {self.num_tokens} tokens and the base {num_rows}, but the file lacks {missing} "
                    f"{module.name}: save the adapter with save_pretrained(..., save_embedding_layers=True)",
                    self.param,
                )
            # From `num_rows` rows on, the layout stores no ids: row `i` then belongs to token `i`, without gaps.
            if found.whole is None and num_rows <= len(found.ids) < self.num_tokens:
                raise AdapterRejected(
                    "unsupported_config",
                    "with tokens beyond the base's vocabulary, train either all tokens or fewer than the base has",
                    _TOKENS,
                )


def resized_vocabulary(
    config: PeftConfig, target: PackTarget, entries: Mapping[str, TensorEntry]
) -> ResizedVocabulary | None:
    """Return the vocabulary to which the file's embedding and head were resized, or None if they were not resized.

    If the file has no whole weight, trained tokens beyond the base's vocabulary extend it. `entries` are the file's
    tensors by current names.
    """
    usual = target.vocab_size
    if usual is None:
        return None
    for module in target.outer_modules:
        _, row_len = trained_rows_of(module)
        for suffix in BASE_SUFFIXES:
            entry = entries.get(TENSOR_PREFIX + module.name + suffix)
            if entry is not None and entry.shape[1:] == (row_len,):
                return None if entry.shape[0] == usual else ResizedVocabulary(entry.shape[0], entry.name)
    last = max((token for _, tokens in config.token_indices for token in tokens), default=0)
    return ResizedVocabulary(last + 1, _TOKENS) if last >= usual else None
