"""Checks an adapter's directory against a base, in confined processes like those that validate uploads on a server."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from loramux.adapter_store.errors import AdapterRejected, ConversionRefused
from loramux.adapter_store.formats.files.file_names import (
    CONFIG_FILE,
    FURTHER_FILES,
    TENSORS_FILE,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
)
from loramux.adapter_store.formats.mlx.base_facts import BaseFacts
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.formats.version_files.further_files import MAX_FURTHER_BYTES, FurtherFiles
from loramux.adapter_store.formats.version_files.pooling_files import pooling_file
from loramux.adapter_store.formats.version_files.tokenizer_files import tokenizer_files
from loramux.adapter_store.validation.further_checks import (
    accept_vocabulary,
    check_further_files,
    check_vocab_size,
    further_warnings,
)
from loramux.adapter_store.validation.peft_config import MAX_CONFIG_BYTES
from loramux.adapter_store.validation.recorded_base import with_recorded_base
from loramux.adapter_store.validation.report import Warn
from loramux.adapter_store.validation.validator import Accepted, SubprocessValidator, ValidationJob
from loramux.admin.check.verdict import CheckVerdict, Problem
from loramux.admin.client.gguf_source import converted_gguf
from loramux.admin.client.given_files import has_tokenizer
from loramux.admin.client.peft_directory import peft_directory
from loramux.admin.client.push import PushRefused, adapter_files
from loramux.engine.architectures.gguf_model import model_directory
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.chat_templates.chat_template import ChatTemplate, read_special_tokens
from loramux.engine.loop.config import pack_target, resolve_device, resolve_dtype
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tokenizer.tenant_templates import TenantTemplates
from loramux.platform.tokenizer.version_tokenizers import VersionTokenizers

REPORTED = ("num_parameters", "max_rank", "num_pages", "dtypes", "largest_effect", "modules", "recorded")
"""The fields of the validation report that are shown."""


def check_adapter(directory: Path, base: Path, dtype: str = "auto") -> CheckVerdict:
    """Check an adapter for the base `base`, a directory or a GGUF file. The base's weights are not needed.

    Raises ValidationFailed or Unavailable if a confined process cannot run. There is no verdict in this case.
    """
    try:
        base = model_directory(base)
        config = ModelConfig.load(base)
        target = _target(config, dtype)
        special_tokens, template = read_special_tokens(base), ChatTemplate.load(base)
    except ModelNotSupported as error:
        return _refused(directory, _unsupported(error))
    try:
        # Resolve links, which are common in a download cache and which validation would refuse.
        files = {path.name: path.resolve() for path in adapter_files(directory)}
        _check_sizes(files, target)
        needs_tokenizer = has_tokenizer(directory) or VOCABULARY_FILE in files
        tokenizer = ModelTokenizer.load(base) if needs_tokenizer else None
        contents = {name: path.read_bytes() for name, path in files.items() if name in FURTHER_FILES}
        contents |= pooling_file(directory)
        if tokenizer is not None and has_tokenizer(directory):
            contents |= tokenizer_files(directory, tokenizer.base_vocabulary(config.vocab_size, special_tokens))
        check_vocabulary = accept_vocabulary if tokenizer is None else VersionTokenizers(tokenizer).check_upload
        with closing(TenantTemplates(special_tokens, template)) as templates:
            further = check_further_files(contents, templates.check_upload, check_vocabulary)
        accepted = _validate(files, target, base)
        check_vocab_size(further, accepted.vocab_size, target)
    except ModelNotSupported as error:
        return _refused(
            directory, Problem("model_files_not_usable", f"the base is not served: {error}", TOKENIZER_FILE)
        )
    except (PushRefused, AdapterRejected) as error:
        message = with_recorded_base(error.code, error.message, directory)
        return _refused(directory, Problem(error.code or "not_an_adapter", message, error.param))
    except OSError as error:
        return _refused(directory, Problem("not_a_file", str(error), None))
    warnings = (*_warnings(accepted), *further_warnings(further))
    return CheckVerdict("adapter", str(directory), _facts(accepted, further, target), warnings=warnings)


def check_directory(path: Path, base: Path, dtype: str = "auto") -> CheckVerdict:
    """Check an adapter whose tensors may be divided into shards. Raises the same errors as `check_adapter`."""
    try:
        with peft_directory(path, lambda: _facts_of(base, dtype)) as directory:
            return replace(check_adapter(directory, base, dtype), path=str(path))
    except ModelNotSupported as error:
        return _refused(path, _unsupported(error))
    except AdapterRejected as error:
        return _refused(path, Problem.of(error))
    except OSError as error:
        return _refused(path, Problem("not_a_file", str(error), None))


def check_gguf(path: Path, base: Path, dtype: str = "auto") -> CheckVerdict:
    """Convert a llama.cpp adapter and check the result. Raises the same errors as `check_adapter`."""
    try:
        with converted_gguf(path, base) as directory:
            return replace(check_adapter(directory, base, dtype), path=str(path))
    except ConversionRefused as error:
        return _refused(path, Problem.of(error))


def _facts_of(base: Path, dtype: str) -> BaseFacts:
    return BaseFacts.of(_target(ModelConfig.load(model_directory(base)), dtype))


def _target(config: ModelConfig, dtype: str) -> PackTarget:
    return pack_target(config, resolve_dtype(dtype, config, resolve_device("auto")))


def _unsupported(error: ModelNotSupported) -> Problem:
    return Problem("model_not_supported", f"the base is not served: {error}", "config.json")


def _check_sizes(files: dict[str, Path], target: PackTarget) -> None:
    """Raise AdapterRejected if a file is too large or too small to be uploaded."""
    limits = {CONFIG_FILE: MAX_CONFIG_BYTES, TENSORS_FILE: target.max_tensors_bytes, **MAX_FURTHER_BYTES}
    for name, path in files.items():
        size = path.stat().st_size
        if not 0 < size <= limits[name]:
            code = "file_too_large" if size > 0 else "invalid_size"
            raise AdapterRejected(code, f"{name} must have 1 to {limits[name]} bytes", name)


def _validate(files: dict[str, Path], target: PackTarget, base: Path) -> Accepted:
    validator = SubprocessValidator(niceness=0, base=BaseWeights(base))
    with tempfile.TemporaryDirectory() as scratch, closing(validator):
        job = ValidationJob(
            config=files[CONFIG_FILE],
            tensors=files[TENSORS_FILE],
            canonical=Path(scratch) / "canonical",
            packed=Path(scratch) / "packed",
        )
        return validator.validate(job, target)


def _facts(accepted: Accepted, further: FurtherFiles, target: PackTarget) -> dict[str, Any]:
    return {
        "digest": accepted.digest,
        **{name: accepted.report[name] for name in REPORTED},
        "invocation_tokens": list(accepted.invocation_tokens) or None,
        "task": None if accepted.task is None else accepted.task.document(),
        "page_bytes": target.geometry.total_page_bytes,
        "dtype": target.dtype,
        **further.report(),
    }


def _warnings(accepted: Accepted) -> tuple[Warn, ...]:
    return tuple(
        Warn(found["code"], found["message"], found["count"], tuple(found["params"]))
        for found in accepted.report["warnings"]
    )


def _refused(directory: Path, problem: Problem) -> CheckVerdict:
    return CheckVerdict("adapter", str(directory), problems=(problem,))
