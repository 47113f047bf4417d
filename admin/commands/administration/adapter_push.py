"""`loramux adapters push`: upload an adapter, or have the server fetch it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.administration.adapter_views import shown_targets
from loramux.admin.commands.options import AsJson, Tenant
from loramux.admin.commands.output import (
    connected,
    error_document,
    fail,
    located,
    print_json,
    print_text,
    print_warnings,
)
from loramux.admin.commands.transfer_progress import transfer_progress
from loramux.admin.exit_codes import REFUSED

if TYPE_CHECKING:
    from loramux.admin.client.client import Document
    from loramux.admin.client.push import PushedVersion

DEFAULT_ALIAS = "default"
PARSER_OPTIONS = {"tool_call_parser": "--tool-parser", "reasoning_parser": "--reasoning-parser"}

Source = Annotated[
    str,
    typer.Argument(
        metavar="DIRECTORY|FILE.gguf|s3://BUCKET/PREFIX|hf://OWNER/NAME@REVISION|file:///DIRECTORY",
        help="Output of PEFT's save_pretrained, a llama.cpp LoRA file, or a source that the server fetches.",
    ),
]
Name = Annotated[str, typer.Option(help="The adapter's name within the tenant.")]
BaseDirectory = Annotated[
    Path | None,
    typer.Option(
        help="Directory with the base model's config.json, or its GGUF file, to convert a .gguf file for Llama or "
        "Mistral.",
        exists=True,
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait for validation.")]
NoTemplate = Annotated[bool, typer.Option("--no-template", help="Leave out the directory's chat template.")]
NoGenerationConfig = Annotated[
    bool, typer.Option("--no-generation-config", help="Leave out the directory's generation_config.json.")
]
NoAddedTokens = Annotated[
    bool, typer.Option("--no-added-tokens", help="Leave out the tokens that the directory's tokenizer adds or renames.")
]
ToolParser = Annotated[
    str | None, typer.Option(help="Parser for the version's tool calls: auto, off or a parser's name.")
]
ReasoningParser = Annotated[
    str | None, typer.Option(help="Parser for the version's reasoning: auto, off or a parser's name.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    source: str
    tenant: str
    name: str
    model: Path | None
    timeout_s: float
    without: Sequence[str]
    """Names of the files to leave out."""
    parsers: Mapping[str, str]
    """The parsers that take precedence over the directory's `parsers.json`, by setting."""

    @property
    def is_remote(self) -> bool:
        return "://" in self.source

    def check(self) -> None:
        """Raise BadParameter before anything is read or sent."""
        from loramux.adapter_store.formats.version_files.answer_parsers import problem_with_parser

        # Unlike Path.exists, this also answers for a name that is too long.
        if not self.is_remote and not os.path.exists(self.source):
            raise typer.BadParameter(f"there is no directory or file {self.source}", param_hint="DIRECTORY")
        for setting, value in self.parsers.items():
            problem = problem_with_parser(setting, value)
            if problem is not None:
                raise typer.BadParameter(problem, param_hint=PARSER_OPTIONS[setting])
        if self.is_remote and self.without:
            raise typer.BadParameter("the server reads all files of this source", param_hint="--no-template")
        if self.is_remote and self.parsers:
            raise typer.BadParameter("put a parsers.json into the source", param_hint="--tool-parser")


def push(
    source: Source,
    tenant: Tenant,
    name: Name,
    model: BaseDirectory = None,
    timeout_s: Timeout = 300.0,
    no_template: NoTemplate = False,
    no_generation_config: NoGenerationConfig = False,
    no_added_tokens: NoAddedTokens = False,
    tool_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    as_json: AsJson = False,
) -> None:
    """Upload a PEFT directory as the adapter's next version and wait until it is ready.

    A chat template, a generation_config.json and a parsers.json in the directory become part of the version, and so do
    the facts in which the directory's tokenizer differs from the base's: added and renamed tokens, and special tokens.
    Files of sentence-transformers become a pooling.json. --tool-parser and --reasoning-parser take precedence over
    parsers.json. On this machine, a .gguf file or a directory of mlx-lm is converted, and shards of the tensors are
    joined. The server itself fetches all files of an s3://, hf:// or file:// source, which its operator must allow.
    """
    from loramux.adapter_store.errors import AdapterRejected, ConversionRefused
    from loramux.adapter_store.formats.version_files.answer_parsers import AnswerParsers
    from loramux.adapter_store.validation.recorded_base import with_recorded_base
    from loramux.admin.client.push import GENERATION_NAME, TEMPLATE_NAME, VOCABULARY_NAME, PushRefused

    left_out = {
        TEMPLATE_NAME: no_template,
        GENERATION_NAME: no_generation_config,
        VOCABULARY_NAME: no_added_tokens,
    }
    options = PushOptions(
        source=source,
        tenant=tenant,
        name=name,
        model=model,
        timeout_s=timeout_s,
        without=[file_name for file_name, is_left_out in left_out.items() if is_left_out],
        parsers=AnswerParsers(tool_parser, reasoning_parser).document(),
    )
    options.check()
    try:
        pushed, default = push_source(options, as_json)
    except (PushRefused, ConversionRefused, AdapterRejected) as error:
        message = with_recorded_base(error.code, error.message, Path(source))
        document = error_document(message, error.code, error.param)
        fail(f"rejected ({error.code}): {located(message, error.param)}", REFUSED, document if as_json else None)
    except OSError as error:
        fail(str(error), REFUSED, error_document(str(error), "not_a_file") if as_json else None)
    if as_json:
        digests = {"digest": pushed.digest, "version_digest": pushed.version_digest}
        warnings = list(pushed.warnings)
        print_json({"model": pushed.model, "version": pushed.version, **digests, "warnings": warnings})
        return
    print_warnings(pushed.warnings)
    print_text(
        f"{pushed.model} version {pushed.version} is ready (rank {pushed.max_rank}, {pushed.version_digest[:12]})"
    )
    if [target["version"] for target in default] != [pushed.version]:
        still = f"its bare name still selects version {shown_targets(default)}" if default else "no alias selects it"
        print_text(f"{still}: loramux adapters promote {pushed.model}@{pushed.version}")


def push_source(options: PushOptions, as_json: bool) -> tuple[PushedVersion, Sequence[Document]]:
    """Push the source. Return the version, and the targets of the adapter's default alias.

    Raises PushRefused, ConversionRefused, AdapterRejected or OSError.
    """
    from loramux.adapter_store.formats.mlx.base_facts import BaseFacts
    from loramux.admin.client.gguf_source import converted_gguf
    from loramux.admin.client.named_adapter import find_named
    from loramux.admin.client.peft_directory import peft_directory
    from loramux.admin.client.push import num_bytes_of, push_adapter, register_source

    tenant, name, timeout_s = options.tenant, options.name, options.timeout_s
    path = Path(options.source)
    with ExitStack() as stack:
        client = stack.enter_context(connected(as_json))
        num_bytes = None
        if not options.is_remote and path.is_dir():
            # The progress bar shows the size of the joined or converted tensors, so make them first.
            path = stack.enter_context(
                peft_directory(path, lambda: BaseFacts.from_document(client.get("server/structure")))
            )
            num_bytes = num_bytes_of(path, options.without)
        progress = stack.enter_context(transfer_progress(num_bytes, as_json))
        if options.is_remote:
            pushed = register_source(client, options.source, tenant, name, timeout_s)
        else:
            if not path.is_dir():
                path = stack.enter_context(converted_gguf(path, options.model, progress))
            pushed = push_adapter(client, path, tenant, name, timeout_s, progress, options.without, options.parsers)
        default: Sequence[Document] = find_named(client, pushed.model).document["aliases"].get(DEFAULT_ALIAS, ())
    return pushed, default
