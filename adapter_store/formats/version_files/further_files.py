"""The optional files of a version, and the digest that tells versions with the same weights apart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from loramux.adapter_store.formats.files.file_names import (
    FURTHER_FILES,
    GENERATION_FILE,
    PARSERS_FILE,
    POOLING_FILE,
    TEMPLATE_FILE,
    VOCABULARY_FILE,
)
from loramux.adapter_store.formats.version_files.added_vocabulary import AddedVocabulary
from loramux.adapter_store.formats.version_files.answer_parsers import AnswerParsers
from loramux.adapter_store.formats.version_files.generation_config import GenerationConfig
from loramux.adapter_store.formats.version_files.pooling_files import Pooling

MAX_FURTHER_BYTES: Mapping[str, int] = MappingProxyType(
    {
        TEMPLATE_FILE: 64 << 10,
        GENERATION_FILE: 16 << 10,
        PARSERS_FILE: 1 << 10,
        VOCABULARY_FILE: 128 << 10,
        POOLING_FILE: 1 << 10,
    }
)
"""Largest size of each optional file, in bytes."""


@dataclass(frozen=True, slots=True)
class FurtherFiles:
    """A version's optional files as uploaded, by name, and the parsed contents of four of them, all validated.

    `has_template` is False if the chat template is a copy of the base's.
    """

    contents: Mapping[str, bytes] = field(default_factory=dict)
    generation: GenerationConfig | None = None
    parsers: AnswerParsers | None = None
    vocabulary: AddedVocabulary | None = None
    has_template: bool = True
    pooling: Pooling | None = None

    @property
    def checksums(self) -> dict[str, str]:
        """Each file's SHA-256, in hexadecimal."""
        return {name: hashlib.sha256(content).hexdigest() for name, content in self.contents.items()}

    def report(self) -> dict[str, Any]:
        """Return JSON values that describe the files, to store with the version."""
        facts: dict[str, Any] = {}
        if TEMPLATE_FILE in self.contents and self.has_template:
            facts["chat_template"] = {
                "sha256": self.checksums[TEMPLATE_FILE],
                "size": len(self.contents[TEMPLATE_FILE]),
            }
        if self.generation is not None:
            facts["generation_config"] = self.generation.document()
        if self.parsers is not None:
            facts["parsers"] = self.parsers.document()
        if self.vocabulary is not None:
            facts["added_vocabulary"] = self.vocabulary.report()
        if self.pooling is not None:
            facts["pooling"] = self.pooling.document()
        return facts


NO_FURTHER_FILES = FurtherFiles()


def version_digest(weights_digest: str, checksums: Mapping[str, str]) -> str:
    """Return a digest of a version's weights and optional files, in hexadecimal.

    Without optional files, it is the digest of the weights. Otherwise, it is the SHA-256 of a text with the digest of
    the weights on the first line, and then one line, `NAME SHA256`, for each file, in the order of FURTHER_FILES.
    """
    if not checksums:
        return weights_digest
    lines = [weights_digest, *(f"{name} {checksums[name]}" for name in FURTHER_FILES if name in checksums)]
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
