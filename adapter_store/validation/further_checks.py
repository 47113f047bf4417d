"""Checks an upload's optional files: the chat template's syntax, the generation settings and the parsers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loramux.adapter_store.errors import AdapterRejected, printable
from loramux.adapter_store.formats.answer_parsers import parse_answer_parsers
from loramux.adapter_store.formats.file_names import GENERATION_FILE, PARSERS_FILE, TEMPLATE_FILE
from loramux.adapter_store.formats.further_files import MAX_FURTHER_BYTES, FurtherFiles
from loramux.adapter_store.formats.generation_config import parse_generation_config

_MAX_REASON = 200
"""Longest excerpt of Jinja2's error in a message, in characters. The error may quote the template."""

TemplateCheck = Callable[[str], None]
"""Called with a chat template's source. Raises AdapterRejected if the template cannot be served."""


def check_template_syntax(source: str) -> None:
    """Parse a template without executing it. Raises AdapterRejected."""
    try:
        ImmutableSandboxedEnvironment(extensions=[loopcontrols]).parse(source)
    except (TemplateError, ValueError) as error:
        # Jinja2 passes on Python's ValueError for a number with thousands of digits.
        reason = printable(str(error), _MAX_REASON)
        raise AdapterRejected("invalid_template", f"the template is malformed: {reason}", TEMPLATE_FILE) from None
    except RecursionError:
        raise AdapterRejected("invalid_template", "the template is nested too deeply", TEMPLATE_FILE) from None


def check_further_files(contents: Mapping[str, bytes], check_template: TemplateCheck) -> FurtherFiles:
    """Check the optional files that were uploaded. Raises AdapterRejected."""
    for name, content in contents.items():
        if len(content) > MAX_FURTHER_BYTES[name]:
            raise AdapterRejected("file_too_large", f"the file has more than {MAX_FURTHER_BYTES[name]} bytes", name)
    if TEMPLATE_FILE in contents:
        try:
            source = contents[TEMPLATE_FILE].decode("utf-8")
        except UnicodeDecodeError:
            raise AdapterRejected("invalid_template", "the template is not UTF-8", TEMPLATE_FILE) from None
        check_template(source)
    config, parsers = contents.get(GENERATION_FILE), contents.get(PARSERS_FILE)
    return FurtherFiles(
        contents,
        None if config is None else parse_generation_config(config),
        None if parsers is None else parse_answer_parsers(parsers),
    )
