"""The chat template, sampling defaults, parsers and added tokens of a resolved model."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import (
    GENERATION_FILE,
    PARSERS_FILE,
    POOLING_FILE,
    TEMPLATE_FILE,
    VOCABULARY_FILE,
)
from loramux.adapter_store.formats.version_files.added_vocabulary import (
    AddedVocabulary,
    SpecialTokens,
    parse_added_vocabulary,
)
from loramux.adapter_store.formats.version_files.answer_parsers import NO_CHOICE, AnswerParsers, parse_answer_parsers
from loramux.adapter_store.formats.version_files.further_files import version_digest
from loramux.adapter_store.formats.version_files.generation_config import (
    NO_DEFAULTS,
    SamplingDefaults,
    parse_generation_config,
)
from loramux.adapter_store.formats.version_files.pooling_files import DEFAULT_POOLING, Pooling, parse_pooling
from loramux.adapter_store.registry.records import AdapterRef
from loramux.adapter_store.registry.version_files import read_further_files
from loramux.migrations.database import Database
from loramux.platform.accounts.model_names import ResolvedModel
from loramux.platform.errors import Unavailable

MAX_CACHED_VERSIONS = 1024
"""Maximum number of versions with cached settings. The optional files of a version take at most 209 KiB."""


@dataclass(frozen=True, slots=True)
class VersionSettings:
    """`template` is the source of the adapter's own chat template, and `vocabulary` its own tokens, if it has any."""

    template: str | None
    defaults: SamplingDefaults
    parsers: AnswerParsers = NO_CHOICE
    vocabulary: AddedVocabulary | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, in addition to the base's."""
    pooling: Pooling = DEFAULT_POOLING
    """How embeddings are made."""

    @property
    def special_tokens(self) -> SpecialTokens:
        """The adapter's own special tokens."""
        return () if self.vocabulary is None else self.vocabulary.special_tokens


class VersionSettingsCache:
    """Finds the settings of resolved models. Thread-safe.

    A version without optional files has the base's settings. The settings of other versions are read from the database
    and cached by digest, because equal digests mean equal files. `applies_adapter_defaults` enables adapters' own
    sampling defaults. A version with its own template does not use the base's parsers, which fit the base's template.
    `is_copied_template` says whether a template, with a version's special tokens, is only a copy of the base's.
    """

    def __init__(
        self,
        database: Database,
        base: SamplingDefaults = NO_DEFAULTS,
        applies_adapter_defaults: bool = True,
        base_parsers: AnswerParsers = NO_CHOICE,
        is_copied_template: Callable[[str, SpecialTokens], bool] = lambda _source, _special_tokens: False,
        base_pooling: Pooling = DEFAULT_POOLING,
    ) -> None:
        self._database = database
        self._base = VersionSettings(None, base, base_parsers, pooling=base_pooling)
        self._applies_adapter_defaults = applies_adapter_defaults
        self._is_copied_template = is_copied_template
        self._lock = threading.Lock()
        # Least recently used first.
        self._recent: OrderedDict[str, VersionSettings] = OrderedDict()

    def find(self, model: ResolvedModel) -> VersionSettings:
        """Return a model's settings. Blocks if they have to be read from the database.

        Raises Unavailable if the adapter's stored files are damaged.
        """
        adapter = model.adapter
        if adapter is None or adapter.version_digest == adapter.digest:
            return self._base
        with self._lock:
            found = self._recent.get(adapter.version_digest)
            if found is not None:
                self._recent.move_to_end(adapter.version_digest)
                return found
        found = self._read(adapter)
        with self._lock:
            self._recent[adapter.version_digest] = found
            if len(self._recent) > MAX_CACHED_VERSIONS:
                self._recent.popitem(last=False)
        return found

    def _read(self, adapter: AdapterRef) -> VersionSettings:
        contents = read_further_files(self._database, adapter.version_id)
        checksums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        if version_digest(adapter.digest, checksums) != adapter.version_digest:
            raise Unavailable("the adapter's files do not match its digest", code="adapter_unavailable")
        template, config = contents.get(TEMPLATE_FILE), contents.get(GENERATION_FILE)
        settings = self._base
        if VOCABULARY_FILE in contents:
            settings = replace(settings, vocabulary=parse_added_vocabulary(contents[VOCABULARY_FILE]))
        if template is not None:
            source = template.decode("utf-8")
            if not self._is_copied_template(source, settings.special_tokens):
                settings = replace(settings, template=source, parsers=NO_CHOICE)
        if config is not None:
            generation = parse_generation_config(config)
            settings = replace(settings, eos_token_ids=generation.eos_token_ids)
            if self._applies_adapter_defaults:
                settings = replace(settings, defaults=generation.defaults.over(settings.defaults))
        if POOLING_FILE in contents:
            settings = replace(settings, pooling=parse_pooling(contents[POOLING_FILE]))
        if PARSERS_FILE in contents:
            chosen = _stored_parsers(contents[PARSERS_FILE])
            settings = replace(settings, parsers=chosen.over(settings.parsers))
        return settings


def _stored_parsers(text: bytes) -> AnswerParsers:
    try:
        return parse_answer_parsers(text)
    except AdapterRejected as error:
        # The file was valid when it was uploaded, so the server has lost the extension with the parser.
        raise Unavailable(
            f"this server lacks a parser that the adapter's files name: {error}", code="adapter_unavailable"
        ) from error
