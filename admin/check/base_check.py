"""Checks a base model's directory: its configuration, tokenizer, templates, and the headers of its weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import GENERATION_FILE
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.version_files.answer_parsers import NO_CHOICE
from loramux.adapter_store.formats.version_files.generation_config import parse_generation_config
from loramux.adapter_store.validation.report import Warn
from loramux.admin.check.verdict import CheckVerdict, Problem
from loramux.engine.architectures.gguf_model import model_directory
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.weight_files import HEAD, stored_tensors
from loramux.engine.architectures.weight_shapes import check_shapes, weight_shapes
from loramux.engine.chat_templates.chat_template import ChatTemplate
from loramux.engine.chat_templates.template_refused import TemplateRefused
from loramux.engine.loop.config import pack_target, resolve_device, resolve_dtype
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tool_calls.detection import chosen_markers, chosen_parser
from loramux.platform.tool_calls.reasoning import REASONING_MARKERS

RANKS = (8, 16, 64)
"""The report shows how many pages an adapter for all linear layers takes at each of these ranks."""


def check_base(directory: Path, dtype: str = "auto") -> CheckVerdict:
    """Check everything that a server reads when it starts, except the weights themselves.

    `directory` can also be a GGUF file.
    """
    model = directory
    try:
        directory = model_directory(model)
        config = ModelConfig.load(directory)
        resolved = resolve_dtype(dtype, config, resolve_device("auto"))
        target, in_fp8 = pack_target(config, resolved), pack_target(config, resolved, "fp8")
    except ModelNotSupported as error:
        param = "config.json" if model.is_dir() else None
        return CheckVerdict("base", str(model), problems=(Problem("model_not_supported", str(error), param),))
    facts = _facts(config, target, in_fp8)
    problems: list[Problem] = []
    warnings: list[Warn] = []
    try:
        stored = stored_tensors(directory)
        check_shapes(config, stored)
        facts["quantization"] = None if config.quantization is None else config.quantization.name
        facts["stored_dtypes"] = sorted({tensor.dtype for tensor in stored.values()})
        if config.tied_embeddings and HEAD in stored and not stored[HEAD].is_coded:
            message = f"{HEAD} must equal the embedding; the server compares them when it starts"
            warnings.append(Warn("head_not_compared", message))
    except ModelNotSupported as error:
        problems.append(Problem("model_not_supported", str(error), "model.safetensors"))
    try:
        tokenizer = ModelTokenizer.load(directory)
        template_facts, template_warnings = _template(tokenizer.chat_template)
        facts |= template_facts
        warnings += template_warnings
    except ModelNotSupported as error:
        problems.append(Problem("model_files_not_usable", str(error), "tokenizer.json"))
    if (problem := _generation_problem(directory / GENERATION_FILE)) is not None:
        problems.append(problem)
    return CheckVerdict("base", str(model), facts, tuple(problems), tuple(warnings))


def _facts(config: ModelConfig, target: PackTarget, in_fp8: PackTarget) -> dict[str, Any]:
    """Return facts about the base. `in_fp8` is the target of a server with `adapter_dtype` fp8."""
    geometry = target.geometry
    return {
        "architecture": config.architecture,
        "dtype": target.dtype,
        "num_parameters": sum(map(math.prod, weight_shapes(config).values())),
        "num_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "max_model_len": config.max_model_len,
        "adapter_modules": _module_names(config),
        "page_bytes": geometry.total_page_bytes,
        "state_pages": config.num_state_pages(geometry),
        "pages_by_rank": {str(rank): _num_pages(target, rank) for rank in RANKS},
        "fp8_pages_by_rank": {str(rank): _num_pages(in_fp8, rank) for rank in RANKS},
    }


def _module_names(config: ModelConfig) -> list[str]:
    """Return the modules that adapters may change. `*` stands for the number of an expert."""
    linears = () if config.experts is None else config.experts.linears
    single = [linear.name.format("*") for linear in linears if linear.name is not None]
    stacked = [linear.stack for linear in linears if linear.stack is not None]
    names = [module.name for module in config.modules]
    outer = [module.name for module in (*config.outer_modules, *config.draft_modules)]
    return [*names, *single, *stacked, *outer]


def _num_pages(target: PackTarget, rank: int) -> int:
    """Return the number of pages that an adapter of this rank on all linear layers takes."""
    return target.layout(target.equal_ranks(rank)).num_pages


def _template(template: ChatTemplate | None) -> tuple[dict[str, Any], list[Warn]]:
    """Return what the chat template supports, which parsers it selects, and warnings about it."""
    nothing = {"chat_template": False, "takes_tools": False, "tool_call_parser": None, "reasoning_parser": None}
    if template is None:
        message = "the base has no chat template: chat works only with adapters that have their own"
        return nothing, [Warn("no_chat_template", message)]
    try:
        features = template.features()
        source = template.source(has_tools=features.tools)
    except TemplateRefused as refused:
        return nothing, [Warn("chat_template_refused", f"chat requests will fail: {refused.message}")]
    markers = chosen_markers(NO_CHOICE, source)
    parser = chosen_parser(NO_CHOICE, source)
    warnings = []
    if features.tools and parser is None:
        message = "the chat template accepts tools, but no parser recognises its calls: they stay part of the text"
        warnings.append(Warn("no_tool_parser", message))
    facts = {
        "chat_template": True,
        "takes_tools": features.tools,
        "tool_call_parser": parser,
        "reasoning_parser": next((name for name, known in REASONING_MARKERS.items() if known == markers), None),
    }
    return facts, warnings


def _generation_problem(path: Path) -> Problem | None:
    if not path.is_file():
        return None
    try:
        parse_generation_config(path.read_bytes())
    except AdapterRejected as error:
        message = f"{error.message}; correct it, or start with --generation-config off"
        return Problem(error.code, message, error.param or GENERATION_FILE)
    return None
