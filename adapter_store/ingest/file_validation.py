"""Validates the files of one adapter, in a directory, for the base that this server serves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from loramux.adapter_store.errors import AdapterCorrupt
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, FURTHER_FILES, TENSORS_FILE
from loramux.adapter_store.formats.packed.canonical import digest_of
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.version_files.further_files import FurtherFiles
from loramux.adapter_store.validation.further_checks import (
    TemplateCheck,
    VocabularyCheck,
    check_further_files,
    check_vocab_size,
    further_warnings,
)
from loramux.adapter_store.validation.validator import Accepted, ValidationJob, Validator


@dataclass(frozen=True, slots=True)
class ValidFiles:
    """Files that passed validation, and the canonical and packed files made from them."""

    job: ValidationJob
    accepted: Accepted
    further: FurtherFiles


@dataclass(frozen=True, slots=True)
class FileValidation:
    """Validates adapters for `target`.

    `check_template` decides whether a chat template can be served, and `check_vocabulary` decides whether the adapter's
    tokens can be added to the base's tokenizer.
    """

    target: PackTarget
    validator: Validator
    check_template: TemplateCheck
    check_vocabulary: VocabularyCheck

    def validate(self, directory: Path, *, needs_effect: bool) -> ValidFiles:
        """Validate the files in `directory`, which must be named like the files of an upload.

        `ValidationJob` describes `needs_effect`. Raises AdapterRejected, or StoreError if the validation process fails.
        """
        job = ValidationJob(
            config=directory / CONFIG_FILE,
            tensors=directory / TENSORS_FILE,
            canonical=directory / "canonical",
            packed=directory / "packed",
            needs_effect=needs_effect,
        )
        further = {name: directory / name for name in FURTHER_FILES if (directory / name).exists()}
        contents = {name: path.read_bytes() for name, path in further.items()}
        files = check_further_files(contents, self.check_template, self.check_vocabulary)
        accepted = self.validator.validate(job, self.target)
        check_vocab_size(files, accepted.vocab_size, self.target)
        warnings = [*accepted.report["warnings"], *(one.document() for one in further_warnings(files))]
        accepted = replace(accepted, report={**accepted.report, "warnings": warnings})
        # Do not trust the digest from a process that has parsed a tenant's bytes.
        if digest_of(job.canonical) != accepted.digest:
            raise AdapterCorrupt("the validation process wrote a file with a different digest")
        return ValidFiles(job, accepted, files)
