"""Checks an upload's optional files: the chat template, the generation settings, the parsers, the added tokens and
the pooling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loramux.adapter_store.errors import AdapterRejected, printable
from loramux.adapter_store.formats.files.file_names import (
    GENERATION_FILE,
    PARSERS_FILE,
    POOLING_FILE,
    TEMPLATE_FILE,
    VOCABULARY_FILE,
)
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.version_files.added_vocabulary import (
    AddedVocabulary,
    SpecialTokens,
    parse_added_vocabulary,
)
from loramux.adapter_store.formats.version_files.answer_parsers import parse_answer_parsers
from loramux.adapter_store.formats.version_files.further_files import MAX_FURTHER_BYTES, FurtherFiles
from loramux.adapter_store.formats.version_files.generation_config import EOS_KEY, parse_generation_config
from loramux.adapter_store.formats.version_files.pooling_files import parse_pooling
from loramux.adapter_store.validation.report import Warn

_MAX_REASON = 200
"""Longest excerpt of Jinja2's error in a message, in characters. The error may quote the template."""

TemplateCheck = Callable[[str, SpecialTokens], bool]
"""Called with a chat template's source and the version's own special tokens. Returns False if the template is a copy of
the base's. Raises AdapterRejected if the template cannot be served.
"""

VocabularyCheck = Callable[[AddedVocabulary], None]
"""Called with an adapter's own tokens. Raises AdapterRejected if they do not extend the base's tokenizer."""


def check_template_syntax(source: str, special_tokens: SpecialTokens = ()) -> bool:
    """Parse a template without executing it. Raises AdapterRejected if it is malformed."""
    try:
        ImmutableSandboxedEnvironment(extensions=[loopcontrols]).parse(source)
    except (TemplateError, ValueError) as error:
        # Jinja2 passes on Python's ValueError for a number with thousands of digits.
        reason = printable(str(error), _MAX_REASON)
        raise AdapterRejected("invalid_template", f"the template is malformed: {reason}", TEMPLATE_FILE) from None
    except RecursionError:
        raise AdapterRejected("invalid_template", "the template is nested too deeply", TEMPLATE_FILE) from None
    return True


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
    config, parsers = contents.get(GENERATION_FILE), contents.get(PARSERS_FILE)
    vocabulary, has_template = None, True
    if VOCABULARY_FILE in contents:
        vocabulary = parse_added_vocabulary(contents[VOCABULARY_FILE])
        check_vocabulary(vocabulary)
    if TEMPLATE_FILE in contents:
        try:
            source = contents[TEMPLATE_FILE].decode("utf-8")
        except UnicodeDecodeError:
            raise AdapterRejected("invalid_template", "the template is not UTF-8", TEMPLATE_FILE) from None
        has_template = check_template(source, () if vocabulary is None else vocabulary.special_tokens)
    return FurtherFiles(
        contents,
        None if config is None else parse_generation_config(config),
        None if parsers is None else parse_answer_parsers(parsers),
        vocabulary,
        has_template,
        parse_pooling(contents[POOLING_FILE]) if POOLING_FILE in contents else None,
    )


def check_vocab_size(files: FurtherFiles, vocab_size: int | None, target: PackTarget) -> None:
    """Raise AdapterRejected if the files state a different number of tokens than the embedding and the head have rows,
    or an end token without a row.

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
    ends = () if files.generation is None else files.generation.eos_token_ids
    if num_rows is not None and max(ends, default=0) >= num_rows:
        raise AdapterRejected(
            "invalid_generation_config",
            f"{EOS_KEY} has the token {max(ends)}, but the adapter's tokens have the IDs 0 to {num_rows - 1}",
            EOS_KEY,
        )


def further_warnings(files: FurtherFiles) -> list[Warn]:
    """Return warnings about facts in the optional files that are not used."""
    ignored = () if files.generation is None else files.generation.ignored
    if not ignored:
        return []
    message = f"these settings of {GENERATION_FILE} change answers in transformers, but have no effect here"
    return [Warn("generation_settings_ignored", message, len(ignored), ignored)]
