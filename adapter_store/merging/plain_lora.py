"""Reads an adapter's files for a merge: the modules that it changes, by name, with their scales."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from loramux.adapter_store.errors import AdapterRejected, MergeRefused
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.formats.files.ignored_tensors import is_of_training
from loramux.adapter_store.formats.files.strict_json import InvalidJson, parse_strict_json
from loramux.adapter_store.formats.files.tensor_file import TensorFile
from loramux.adapter_store.formats.packed.canonical import MAX_HEADER_BYTES
from loramux.adapter_store.formats.packed.module_places import (
    A_SUFFIX,
    B_SUFFIX,
    EMBEDDING_A_SUFFIX,
    EMBEDDING_B_SUFFIX,
    TENSOR_PREFIX,
)
from loramux.adapter_store.merging.methods import Matrix
from loramux.adapter_store.validation.expected_modules import Scales
from loramux.adapter_store.validation.peft_config import MAX_CONFIG_BYTES, PeftConfig, parse_peft_config
from loramux.adapter_store.validation.tensor_names import current_names

_NAME = re.compile(rf"{re.escape(TENSOR_PREFIX)}(.+?)(\.lora_[AB]\.weight|\.lora_embedding_[AB])", re.DOTALL)

_NOT_PLAIN = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "target_parameters",
)
"""Settings that are unset in a plain LoRA adapter, which consists only of products B A."""


@dataclass(frozen=True, slots=True)
class PlainModule:
    """One module of an adapter: `scale * B A`, with A `[rank, in_features]` and B `[out_features, rank]`.

    `a_name` and `b_name` are the tensors' names as current versions of PEFT write them.
    """

    key: str
    a_name: str
    b_name: str
    in_features: int
    out_features: int
    rank: int
    scale: float


class PlainLora:
    """An open directory with a plain LoRA adapter.

    Raises MergeRefused, with `name` as `param`, if the directory contains no plain LoRA adapter.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.config = self._read_config(directory / CONFIG_FILE)
        try:
            self._file = TensorFile(directory / TENSORS_FILE, MAX_HEADER_BYTES)
        except AdapterRejected as error:
            raise self._refusal(error.code, error.message) from None
        try:
            self._tensors = current_names(self._file.header.tensors)
            named = self._tensors.originals.items()
            self._names = {name: original for name, original in named if not is_of_training(original)}
            self.modules = self._find_modules()
        except AdapterRejected as error:
            self._file.__exit__()
            raise self._refusal(error.code, error.message) from None
        except BaseException:
            self._file.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__()

    def tensor(self, name: str) -> Matrix:
        """Return a matrix in float32, by the name that current versions of PEFT give it."""
        return self._file.float32(self._names[name])

    def _read_config(self, path: Path) -> PeftConfig:
        try:
            with path.open("rb") as file:
                text = file.read(MAX_CONFIG_BYTES + 1)
            for feature in self._not_plain(text):
                raise self._refusal("merge_unsupported", f"{feature} is set: only plain LoRA adapters can be merged")
            return parse_peft_config(text)
        except AdapterRejected as error:
            raise self._refusal(error.code, error.message) from None

    @staticmethod
    def _not_plain(text: bytes) -> list[str]:
        try:
            document: Any = parse_strict_json(text)
        except InvalidJson:
            return []
        if not isinstance(document, dict):
            return []
        return [name for name in _NOT_PLAIN if document.get(name)] + ["bias"] * (
            document.get("bias", "none") not in ("none", None)
        )

    def _find_modules(self) -> dict[str, PlainModule]:
        halves: dict[str, set[str]] = {}
        for name in self._names:
            match = _NAME.fullmatch(name)
            if match is None:
                raise self._refusal("merge_unsupported", f"{name} is not a LoRA matrix of a module")
            halves.setdefault(match[1], set()).add(match[2])
        scales = Scales(self.config, halves, self._tensors)
        return {key: self._module(key, halves[key], scales) for key in sorted(halves, key=_natural)}

    def _module(self, key: str, halves: set[str], scales: Scales) -> PlainModule:
        pairs = ((A_SUFFIX, B_SUFFIX), (EMBEDDING_A_SUFFIX, EMBEDDING_B_SUFFIX))
        pair = next((pair for pair in pairs if halves == set(pair)), None)
        if pair is None:
            raise self._refusal("missing_tensor", f"{key} must have exactly one A and one B")
        a_name, b_name = (TENSOR_PREFIX + key + half for half in pair)
        a, b = (self._file.header.tensors[self._names[name]].shape for name in (a_name, b_name))
        if (len(a), len(b)) != (2, 2):
            raise self._refusal("wrong_dimensions", f"A and B of {key} are not matrices")
        if a[0] != b[1] or a[0] == 0:
            raise self._refusal("rank_mismatch", f"A and B of {key} have ranks {a[0]} and {b[1]}")
        return PlainModule(key, a_name, b_name, a[1], b[0], a[0], scales.of(key, a[0]))

    def _refusal(self, code: str, message: str) -> MergeRefused:
        return MergeRefused(code, f"{self.name} cannot be merged: {message}", self.name)


def _natural(key: str) -> list[tuple[int, str]]:
    """Return a sort key that puts `layers.2` before `layers.10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in key.split(".")]
