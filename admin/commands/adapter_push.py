"""`loramux adapters push`: upload an adapter, or have the server fetch it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from loramux.admin.commands.adapter_views import shown_targets
from loramux.admin.commands.options import AsJson, Tenant
from loramux.admin.commands.output import connected, error_document, fail, located, print_json, print_warnings
from loramux.admin.commands.transfer_progress import transfer_progress
from loramux.admin.exit_codes import REFUSED

DEFAULT_ALIAS = "default"


def push(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY|FILE.gguf|s3://BUCKET/PREFIX|hf://OWNER/NAME@REVISION",
            help="Output of PEFT's save_pretrained, a llama.cpp LoRA file, or a source that the server fetches.",
        ),
    ],
    tenant: Tenant,
    name: Annotated[str, typer.Option(help="The adapter's name within the tenant.", show_default=False)],
    model: Annotated[
        Path | None,
        typer.Option(
            help="Directory with the base model's config.json, to convert a .gguf file for Llama or Mistral.",
            file_okay=False,
            exists=True,
            show_default=False,
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for validation.")] = 300.0,
    no_template: Annotated[
        bool, typer.Option("--no-template", help="Leave out the directory's chat template.")
    ] = False,
    no_generation_config: Annotated[
        bool, typer.Option("--no-generation-config", help="Leave out the directory's generation_config.json.")
    ] = False,
    no_added_tokens: Annotated[
        bool,
        typer.Option("--no-added-tokens", help="Leave out the tokens that the directory's tokenizer adds or renames."),
    ] = False,
    tool_parser: Annotated[
        str | None,
        typer.Option(help="Parser for the version's tool calls: auto, off or a parser's name.", show_default=False),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(help="Parser for the version's reasoning: auto, off or a parser's name.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a PEFT directory as the adapter's next version and wait until it is ready.

    A chat template, a generation_config.json and a parsers.json in the directory become part of the version, and so do
    the facts in which the directory's tokenizer differs from the base's: added and renamed tokens, and special tokens.
    --tool-parser and --reasoning-parser take precedence over parsers.json. On this machine, a .gguf file is converted,
    and shards of the tensors are joined. The server itself fetches all files of an s3:// or hf:// source, which its
    operator must allow.
    """
    from loramux.adapter_store.errors import AdapterRejected, ConversionRefused
    from loramux.adapter_store.formats.version_files.answer_parsers import AnswerParsers, problem_with_parser
    from loramux.admin.client.gguf_source import converted_gguf
    from loramux.admin.client.named_adapter import find_named
    from loramux.admin.client.push import (
        GENERATION_NAME,
        TEMPLATE_NAME,
        VOCABULARY_NAME,
        PushRefused,
        num_bytes_of,
        push_adapter,
        register_source,
    )
    from loramux.admin.client.sharded_source import joined_directory

    left_out = {
        TEMPLATE_NAME: no_template,
        GENERATION_NAME: no_generation_config,
        VOCABULARY_NAME: no_added_tokens,
    }
    without = [file_name for file_name, is_left_out in left_out.items() if is_left_out]
    is_remote = "://" in source
    path = Path(source)
    if not is_remote and not path.exists():
        raise typer.BadParameter(f"there is no directory or file {source}", param_hint="DIRECTORY")
    is_file = not is_remote and not path.is_dir()
    parsers = AnswerParsers(tool_parser, reasoning_parser).document()
    for setting, value in parsers.items():
        problem = problem_with_parser(setting, value)
        if problem is not None:
            hint = {"tool_call_parser": "--tool-parser", "reasoning_parser": "--reasoning-parser"}[setting]
            raise typer.BadParameter(problem, param_hint=hint)
    if is_remote and without:
        raise typer.BadParameter("the server reads all files of this source", param_hint="--no-template")
    if is_remote and parsers:
        raise typer.BadParameter("put a parsers.json into the source", param_hint="--tool-parser")
    try:
        with ExitStack() as stack:
            directory = path if is_remote or is_file else stack.enter_context(joined_directory(path))
            num_bytes = None if is_remote or is_file else num_bytes_of(directory, without)
            client = stack.enter_context(connected(as_json))
            progress = stack.enter_context(transfer_progress(num_bytes, as_json))
            if is_remote:
                pushed = register_source(client, source, tenant, name, timeout_s)
            else:
                if is_file:
                    directory = stack.enter_context(converted_gguf(path, model, progress))
                pushed = push_adapter(client, directory, tenant, name, timeout_s, progress, without, parsers)
            default = find_named(client, pushed.model).document["aliases"].get(DEFAULT_ALIAS, ())
    except (PushRefused, ConversionRefused, AdapterRejected) as error:
        document = error_document(error.message, error.code, error.param)
        fail(f"rejected ({error.code}): {located(error.message, error.param)}", REFUSED, document if as_json else None)
    except OSError as error:
        fail(str(error), REFUSED, error_document(str(error), "not_a_file") if as_json else None)
    if as_json:
        digests = {"digest": pushed.digest, "version_digest": pushed.version_digest}
        warnings = list(pushed.warnings)
        print_json({"model": pushed.model, "version": pushed.version, **digests, "warnings": warnings})
    else:
        print_warnings(pushed.warnings)
        print(
            f"{pushed.model} version {pushed.version} is ready (rank {pushed.max_rank}, {pushed.version_digest[:12]})"
        )
        if [target["version"] for target in default] != [pushed.version]:
            still = (
                f"its bare name still selects version {shown_targets(default)}" if default else "no alias selects it"
            )
            print(f"{still}: loramux adapters promote {pushed.model}@{pushed.version}")
