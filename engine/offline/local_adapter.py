"""Reads an adapter from a directory that is trusted, with the checks that uploads go through, but without a sandbox."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import (
    CONFIG_FILE,
    FURTHER_FILES,
    MLX_FILE,
    TEMPLATE_FILE,
    TENSORS_FILE,
)
from loramux.adapter_store.formats.files.missing_files import missing_file
from loramux.adapter_store.formats.mlx.base_facts import BaseFacts
from loramux.adapter_store.formats.mlx.conversion import convert_mlx
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter, pack
from loramux.adapter_store.formats.packed.sharded_tensors import ShardIndex, join_shards
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.formats.version_files.pooling_files import Pooling, pooling_file
from loramux.adapter_store.formats.version_files.tokenizer_files import has_tokenizer, tokenizer_files
from loramux.adapter_store.validation.further_checks import check_further_files, check_vocab_size
from loramux.adapter_store.validation.report import Report
from loramux.adapter_store.validation.validation import validate_files
from loramux.engine.offline.local_template import LocalTemplate, adapter_template
from loramux.engine.sequences.activation import activation
from loramux.engine.text.end_tokens import end_tokens
from loramux.engine.text.text_tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class LocalAdapter:
    """An adapter in memory, and what requests need to know about it."""

    packed: PackedAdapter
    report: Report
    end_tokens: tuple[int, ...]
    """The adapter's own end tokens, besides those of the base."""
    tokenizer: TextTokenizer | None
    """The base's tokenizer with the adapter's own tokens, or None if it has none."""
    template: LocalTemplate | None = None
    """The adapter's own chat template, or None if it has none."""
    pooling: Pooling | None = None
    """How the adapter's own files say that embeddings are made, or None if it has none."""

    def activation(self, prompt: Sequence[int]) -> int | None:
        """Return the position from which the adapter applies to a prompt, or None if it is not activated."""
        return activation(prompt, self.report.invocation_tokens) if self.report.invocation_tokens else 0


def read_adapter(
    directory: Path,
    target: PackTarget,
    base: BaseWeights,
    tokenizer: TextTokenizer | None,
    special_tokens: Mapping[str, str],
) -> LocalAdapter:
    """Validate and pack the adapter in a directory of PEFT or mlx-lm. Raises AdapterRejected.

    `tokenizer` and `special_tokens`, by role, are the base's. Without a tokenizer, that of the directory is not read.
    """
    config = directory / CONFIG_FILE
    if not directory.is_dir():
        raise AdapterRejected("file_missing", "there is no such directory", CONFIG_FILE)
    if not config.is_file():
        raise AdapterRejected(*missing_file(directory, CONFIG_FILE))
    with tempfile.TemporaryDirectory() as scratch:
        config, tensors = _peft_files(directory, Path(scratch), target)
        report = validate_files(config.read_bytes(), tensors, target, needs_effect=False)
        contents = {name: (directory / name).read_bytes() for name in FURTHER_FILES if (directory / name).is_file()}
        contents |= pooling_file(directory)
        if tokenizer is not None and has_tokenizer(directory):
            assert target.vocab_size is not None
            contents |= tokenizer_files(directory, tokenizer.base_vocabulary(target.vocab_size, special_tokens))
        # A template is checked when it is used, because prompts may also be given as text or tokens.
        further = check_further_files(contents, lambda _source, _special_tokens: True)
        check_vocab_size(further, report.vocab_size, target)
        canonical = Path(scratch) / "canonical.safetensors"
        write_canonical(
            tensors,
            report.scales,
            canonical,
            report.names,
            report.invocation_tokens,
            report.trained,
            report.vocab_size,
            report.num_labels,
            report.stack_forms,
        )
        packed = pack(canonical, target, base)
    own, template, vocabulary = None, None, further.vocabulary
    ends = () if further.generation is None else further.generation.eos_token_ids
    if tokenizer is not None and vocabulary is not None:
        own = tokenizer.with_vocabulary(vocabulary)
        ends = end_tokens(ends, vocabulary.special_tokens, own, vocabulary.vocab_size)
    if TEMPLATE_FILE in contents:
        own_special_tokens = {} if vocabulary is None else dict(vocabulary.special_tokens)
        template = adapter_template(contents[TEMPLATE_FILE].decode(), {**special_tokens, **own_special_tokens})
    return LocalAdapter(packed, report, ends, own, template, further.pooling)


def _peft_files(directory: Path, scratch: Path, target: PackTarget) -> tuple[Path, Path]:
    """Return the paths of the adapter's configuration and of its tensors. Shards are joined, and mlx-lm's files
    converted, in the directory `scratch`.
    """
    config, tensors = directory / CONFIG_FILE, directory / TENSORS_FILE
    if tensors.is_file():
        # Validation refuses links, which are common in the cache of a hub.
        return config, tensors.resolve()
    if (directory / MLX_FILE).is_file():
        convert_mlx(directory, scratch, lambda: BaseFacts.of(target))
        return scratch / CONFIG_FILE, scratch / TENSORS_FILE
    index = ShardIndex.of_names([found.name for found in directory.iterdir()])
    if index is None:
        raise AdapterRejected(*missing_file(directory, TENSORS_FILE))
    join_shards(index, directory, scratch / TENSORS_FILE)
    return config, scratch / TENSORS_FILE
