"""Checks an upload's optional files: the chat template, the generation settings, the parsers and the added tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loramux.adapter_store.errors import AdapterRejected, printable
from loramux.adapter_store.formats.added_vocabulary import AddedVocabulary, parse_added_vocabulary
from loramux.adapter_store.formats.answer_parsers import parse_answer_parsers
from loramux.adapter_store.formats.file_names import GENERATION_FILE, PARSERS_FILE, TEMPLATE_FILE, VOCABULARY_FILE
from loramux.adapter_store.formats.further_files import MAX_FURTHER_BYTES, FurtherFiles
from loramux.adapter_store.formats.generation_config import parse_generation_config
from loramux.adapter_store.formats.pack_target import PackTarget

_MAX_REASON = 200
"""Longest excerpt of Jinja2's error in a message, in characters. The error may quote the template."""

TemplateCheck = Callable[[str], None]
"""Called with a chat template's source. Raises AdapterRejected if the template cannot be served."""

VocabularyCheck = Callable[[AddedVocabulary], None]
"""Called with an adapter's own tokens. Raises AdapterRejected if they do not extend the base's tokenizer."""


def check_template_syntax(source: str) -> None:
    """Parse a template without executing it. Raises AdapterRejected if it is malformed."""
    try:
        ImmutableSandboxedEnvironment(extensions=[loopcontrols]).parse(source)
    except (TemplateError, ValueError) as error:
        # Jinja2 passes on Python's ValueError for a number with thousands of digits.
        reason = printable(str(error), _MAX_REASON)
        raise AdapterRejected("invalid_template", f"the template is malformed: {reason}", TEMPLATE_FILE) from None
    except RecursionError:
        raise AdapterRejected("invalid_template", "the template is nested too deeply", TEMPLATE_FILE) from None


def accept_vocabulary(vocabulary: AddedVocabulary) -> None:
    """Accept any vocabulary, for programs that have no tokenizer."""


def check_further_files(
    contents: Mapping[str, bytes],
    check_template: TemplateCheck,
    check_vocabulary: VocabularyCheck = accept_vocabulary,
) -> FurtherFiles:
    """Check the optional files that were uploaded. Raises AdapterRejected."""
    for name, content in contents.items():
        if len(content) > MAX_FURTHER_BYTES[name]:
            raise AdapterRejected("file_too_large", f"the file is larger than {MAX_FURTHER_BYTES[name]} bytes", name)
    if TEMPLATE_FILE in contents:
        try:
            source = contents[TEMPLATE_FILE].decode("utf-8")
        except UnicodeDecodeError:
            raise AdapterRejected("invalid_template", "the template is not UTF-8", TEMPLATE_FILE) from None
        check_template(source)
    config, parsers = contents.get(GENERATION_FILE), contents.get(PARSERS_FILE)
    vocabulary = None
    if VOCABULARY_FILE in contents:
        vocabulary = parse_added_vocabulary(contents[VOCABULARY_FILE])
        check_vocabulary(vocabulary)
    return FurtherFiles(
        contents,
        None if config is None else parse_generation_config(config),
        None if parsers is None else parse_answer_parsers(parsers),
        vocabulary,
    )


def check_vocab_size(files: FurtherFiles, vocab_size: int | None, target: PackTarget) -> None:
    """Raise AdapterRejected if the files state a different number of tokens than the embedding and the head have rows.

    `vocab_size` is the number of these rows, or None if they were not resized. If they were resized, the files must
    state their number of tokens.
    """
    stated = None if files.vocabulary is None else files.vocabulary.vocab_size
    if stated is None and vocab_size is not None:
        raise AdapterRejected(
            "vocabulary_missing",
            f"the embedding and the head have {vocab_size} rows, but the base's have {target.vocab_size}: push the "
            f"adapter with its own tokenizer.json, or upload its tokens in {VOCABULARY_FILE}",
            VOCABULARY_FILE,
        )
    num_rows = target.vocab_size if vocab_size is None else vocab_size
    if stated is not None and num_rows is not None and stated != num_rows:
        raise AdapterRejected(
            "token_mismatch",
            f"{VOCABULARY_FILE} states {stated} tokens, but the embedding and the head have {num_rows} rows",
            "vocab_size",
        )
