"""Generates text with many adapters from Python, without a server.

    from loramux.engine.llm import LLM, SamplingParams

    with LLM("my-base", adapters={"support": "my-adapter"}) as llm:
        [answer] = llm.chat([{"role": "user", "content": "Hello"}], adapter="support", max_tokens=32)
        print(answer.text)

docs/python.md is the guide. Unlike a server, an LLM trusts the files that it is given: adapters are checked and packed
with the code that checks uploads, and chat templates rendered, but in this process, outside any confined process.
"""

from __future__ import annotations

import inspect
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Self, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import AdapterRejected, PullRefused
from loramux.adapter_store.formats.files.file_names import TOKENIZER_FILE
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.formats.version_files.adapter_task import AdapterTask
from loramux.adapter_store.formats.version_files.pooling_files import PoolingKind, base_pooling
from loramux.adapter_store.pulling.named_model import model_path
from loramux.adapter_store.validation.recorded_base import with_recorded_base
from loramux.engine.architectures.gguf_model import model_directory
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.chat_templates.chat_template import ChatTemplate, read_special_tokens
from loramux.engine.chat_templates.template_refused import TemplateRefused
from loramux.engine.constraints.constraint_grammar import GrammarRefused
from loramux.engine.loop.config import (
    DEFAULT_BATCH_TOKENS,
    DEFAULT_SEQUENCES,
    DEFAULT_SPECULATE,
    EngineConfig,
    pack_target,
    resolve_device,
    resolve_dtype,
)
from loramux.engine.offline.answer import Answer, Classes, Generation, Piece, RequestFailed, Score
from loramux.engine.offline.arguments import (
    Prompt,
    adapter_names,
    checked_sampling,
    grammar_of,
    listed_prompts,
    stop_strings,
    token_ids_of,
    token_limit,
)
from loramux.engine.offline.engine_thread import EngineClosed, EngineThread, Event
from loramux.engine.offline.local_adapter import LocalAdapter, read_adapter
from loramux.engine.offline.local_template import Chat, LocalTemplate, listed_chats
from loramux.engine.protocol.errors import ConfigNotUsable, EngineError
from loramux.engine.protocol.messages import Add, SamplingParams
from loramux.engine.sequences.class_probabilities import class_probabilities
from loramux.engine.sequences.embedding import embedding_of
from loramux.engine.text.end_tokens import ending_at
from loramux.engine.text.text_tokenizer import TextTokenizer, load_tokenizer

__all__ = [
    "LLM",
    "AdapterRejected",
    "Classes",
    "EngineClosed",
    "EngineError",
    "Generation",
    "GrammarRefused",
    "Piece",
    "PullRefused",
    "RequestFailed",
    "SamplingParams",
    "Score",
    "TemplateRefused",
]

DEFAULT_SAMPLING = SamplingParams()

_ISOLATION_KEY = b"llm"
"""All calls may share the K and V of equal prefixes, because they come from one program."""

_WAITS = {"max_waiting_tokens": 1 << 62, "max_waiting_s": None}
"""A server refuses requests that wait too long. A batch of any size is welcome here."""


_Named = tuple[str | None, LocalAdapter | None]
"""An adapter by its name, or the base."""


class LLM:
    """A base model and adapters, served by an engine in this process. Thread-safe: calls of all threads are batched.

    Close it, or use it as a context manager, to free its memory.
    """

    def __init__(
        self,
        model: str | Path,
        adapters: Mapping[str, str | Path] | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        **settings: Any,
    ) -> None:
        """Load a base from a Hugging Face directory or a GGUF file, and adapters from PEFT directories by the names
        used in calls.

        A base with a URL, such as `hf://OWNER/NAME`, is pulled unless it has been pulled before. Its directory and the
        hub follow from the environment, as for `loramux pull`.

        `settings` are further fields of `EngineConfig`, such as `pool_bytes`, `max_model_len` or `num_threads`. Raises
        EngineError if the base cannot be served or a setting has another type, AdapterRejected if an adapter does not
        fit the base, and PullRefused, another Refused or SourceUnavailable if the base cannot be pulled.
        """
        if adapters is not None and not isinstance(adapters, Mapping):
            raise ValueError(
                f"adapters maps names to directories, such as {{'support': 'my-adapter'}}, not {adapters!r}"
            )
        directory = model_directory(model_path(model))
        self._model = ModelConfig.load(directory)
        # A notebook may change its working directory later.
        self._directory = Path(os.path.abspath(directory))
        device = resolve_device(device)
        own = {
            "model_dir": str(self._directory),
            "blob_url": "",
            "cache_dir": "",
            "device": device,
            "dtype": dtype,
            "max_batch_tokens": DEFAULT_BATCH_TOKENS[device],
            "max_sequences": DEFAULT_SEQUENCES[device],
            "speculate": DEFAULT_SPECULATE[device],
        }
        config = _config({**own, **_WAITS, **settings})
        if device == "cuda" and config.tensor_parallel_size > 1:
            raise ConfigNotUsable(
                "LLM cannot divide a base among GPUs so far, because this process would have to end with any of the "
                "workers: use loramux serve, or omit tensor_parallel_size"
            )
        dtype_of_base = resolve_dtype(dtype, self._model, device)
        self._target = pack_target(self._model, dtype_of_base, config.adapter_dtype, config.kv_dtype)
        tokenizer_file = self._directory / TOKENIZER_FILE
        self._tokenizer = TextTokenizer(load_tokenizer(tokenizer_file)) if tokenizer_file.exists() else None
        self._template = LocalTemplate(partial(_base_template, self._directory))
        self._adapters: dict[str, LocalAdapter] = {}
        # Names and answers hold the adapters. One that has been replaced is freed once the last answer that uses it
        # is freed.
        self._packed: weakref.WeakValueDictionary[str, PackedAdapter] = weakref.WeakValueDictionary()
        self._adding = threading.Lock()
        for name, adapter in (adapters or {}).items():
            self._read(name, adapter)
        self._ids = itertools.count()
        self._engine = EngineThread(config, self._packed)
        # At exit, a thread that still computes could crash the interpreter.
        self._finalizer = weakref.finalize(self, self._engine.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and free its memory and the adapters. Calls of other threads raise EngineClosed."""
        self._finalizer()
        self._adapters.clear()

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters."""
        return tuple(self._adapters)

    @property
    def max_model_len(self) -> int:
        """The longest context in tokens, prompt and answer together."""
        return self._engine.ready.max_model_len

    def add_adapter(self, name: str, directory: str | Path) -> None:
        """Add an adapter, or replace the adapter of this name for later calls. Raises AdapterRejected."""
        self._engine.check_open()
        self._read(name, directory)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter. Calls in progress still use it."""
        self._adapter(name)
        self._adapters.pop(name, None)

    def _read(self, name: str, directory: str | Path) -> None:
        base = BaseWeights(self._directory)
        try:
            adapter = read_adapter(
                Path(directory), self._target, base, self._tokenizer, read_special_tokens(self._directory)
            )
        except AdapterRejected as error:
            place = "" if error.param is None or error.param in error.message else f" ({error.param})"
            told = with_recorded_base(error.code, error.message, Path(directory))
            message = f"the adapter {name!r} in {directory}: {told}{place}"
            raise AdapterRejected(error.code, message, error.param, error.report) from error
        for warning in adapter.report.warnings:
            params = f" ({warning.count}: {', '.join(warning.params)})" if warning.params else ""
            # The caller is above this method and the one that calls it.
            warnings.warn(f"the adapter {name!r} in {directory}: {warning.message}{params}", stacklevel=3)
        with self._adding:
            # Adapters with equal bytes share them.
            packed = self._packed.setdefault(adapter.packed.digest, adapter.packed)
            self._adapters[name] = replace(adapter, packed=packed)

    def tokenize(self, text: str, adapter: str | None = None, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the tokens of a text, by default with those that the model expects around it."""
        return self._text(self._adapter(adapter)).encode(text, add_special_tokens=add_special_tokens)

    def tokenize_chat(
        self,
        messages: Chat,
        adapter: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> tuple[int, ...]:
        """Return the prompt that `chat` answers, for the calls that take prompts, such as `score` and `embed`.

        Without `add_generation_prompt`, it lacks the start of the assistant's turn. The other arguments and the errors
        are those of `chat`.
        """
        return self._rendered(
            messages,
            self._adapter(adapter),
            tools,
            chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        *,
        adapter: str | Sequence[str | None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        max_tokens: int = 256,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        stop: str | Sequence[str] = (),
        schema: Mapping[str, Any] | bool | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        show_progress: bool = False,
    ) -> list[Generation]:
        """Answer one conversation or several in one batch. The answers have the order of the conversations.

        A conversation is a list of messages such as `{"role": "user", "content": "Hello"}`. The chat template of its
        adapter renders it, or that of the base if the adapter has none, as on a server but in this process. `tools` are
        function objects of OpenAI's API, and `chat_template_kwargs` further variables of the template, such as
        `enable_thinking`. `continue_final_message` continues the last message instead of answering it. An answer's text
        is what the model wrote: calls of tools and reasoning are not parsed. Raises TemplateRefused, EngineError if the
        base's template is malformed, and what `generate` raises, whose other arguments this method has.
        """
        options = _options(max_tokens, sampling, stop, grammar_of(schema, regex, choice, grammar))
        prompts: list[Prompt] = []
        chats = listed_chats(messages)
        adapters = self._named_adapters(adapter_names(chats, adapter, "conversations"))
        for index, (chat, (_, own)) in enumerate(zip(chats, adapters, strict=True)):
            try:
                prompt = self._rendered(
                    chat, own, tools, chat_template_kwargs, continue_final_message=continue_final_message
                )
            except TemplateRefused as refused:
                if len(chats) == 1:
                    raise
                message = f"conversations[{index}]: {refused.message}"
                raise TemplateRefused(message, refused.param, refused.code) from None
            prompts.append(prompt)
        answers = self._answers(prompts, adapters, options)
        return [answer.generation() for answer in self._finished(answers, show_progress)]

    def stream_chat(
        self,
        messages: Chat,
        *,
        adapter: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        max_tokens: int = 256,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        stop: str | Sequence[str] = (),
        schema: Mapping[str, Any] | bool | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
    ) -> Generator[Piece, None, None]:
        """Answer one conversation piece by piece, as `stream` does. The arguments and errors are those of `chat`."""
        options = _options(max_tokens, sampling, stop, grammar_of(schema, regex, choice, grammar))
        own = self._adapter(adapter)
        prompt = self._rendered(
            messages, own, tools, chat_template_kwargs, continue_final_message=continue_final_message
        )
        return self._pieces(self._answer(prompt, (adapter, own), options, is_streamed=True))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        adapter: str | Sequence[str | None] | None = None,
        max_tokens: int = 256,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        stop: str | Sequence[str] = (),
        schema: Mapping[str, Any] | bool | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        show_progress: bool = False,
    ) -> list[Generation]:
        """Answer all prompts in one batch. The answers have the order of the prompts.

        `adapter` is one name for all prompts, or a name for each; None is the base. An answer has at most `max_tokens`
        tokens, and fewer if the context is full. At most one of `schema` (JSON Schema), `regex`, `choice` and `grammar`
        (Lark or GBNF) restricts the answers. Raises RequestFailed or EngineClosed, and ValueError or GrammarRefused for
        arguments that cannot be used.
        """
        options = _options(max_tokens, sampling, stop, grammar_of(schema, regex, choice, grammar))
        listed = listed_prompts(prompts)
        answers = self._answers(listed, self._named_adapters(adapter_names(listed, adapter)), options)
        return [answer.generation() for answer in self._finished(answers, show_progress)]

    def stream(
        self,
        prompt: Prompt,
        *,
        adapter: str | None = None,
        max_tokens: int = 256,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        stop: str | Sequence[str] = (),
        schema: Mapping[str, Any] | bool | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
    ) -> Generator[Piece, None, None]:
        """Answer one prompt piece by piece. The request starts with the first piece, and ends with the iterator.

        The arguments and errors are those of `generate`.
        """
        options = _options(max_tokens, sampling, stop, grammar_of(schema, regex, choice, grammar))
        return self._pieces(self._answer(prompt, (adapter, self._adapter(adapter)), options, is_streamed=True))

    def score(
        self, prompts: Prompt | Sequence[Prompt], *, adapter: str | Sequence[str | None] | None = None
    ) -> list[Score]:
        """Return the log-probabilities of the prompts' own tokens. The arguments and errors are those of `generate`."""
        sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
        scored = self.generate(prompts, adapter=adapter, max_tokens=1, sampling=sampling)
        return [
            Score(one.prompt_token_ids, (None, *(found.logprob for found in one.prompt_logprobs)), one.adapter)
            for one in scored
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        adapter: str | Sequence[str | None] | None = None,
        pooling: Literal["auto", "last", "mean", "cls"] = "auto",
        dimensions: int | None = None,
        normalize: bool | None = None,
        show_progress: bool = False,
    ) -> list[npt.NDArray[np.float32]]:
        """Return an embedding of each prompt, float32 `[dimensions]`, by default of the size of the hidden states.

        `pooling` takes the hidden state of the last or the first token (`cls`) after the final norm, or the mean of
        all. `auto` follows the `modules.json` of the adapter, or else of the base, and takes the last token's without
        one. Embeddings have unit length, unless `normalize` is False or that file does not normalise. Raises what
        `generate` raises, and AdapterRejected if the base's files cannot be used.
        """
        if dimensions is not None and not 1 <= dimensions <= self._model.hidden_size:
            raise ValueError(f"dimensions must be from 1 to {self._model.hidden_size}")
        if pooling not in ("auto", *get_args(PoolingKind)):
            raise ValueError(f"pooling must be one of auto, {', '.join(get_args(PoolingKind))}, not {pooling!r}")
        of_base = base_pooling(self._directory, pooling)
        listed, poolings, answers = listed_prompts(prompts), [], []
        adapters = self._named_adapters(adapter_names(listed, adapter))
        for index, (prompt, (name, own)) in enumerate(zip(listed, adapters, strict=True)):
            chosen = own.pooling if own is not None and own.pooling is not None and pooling == "auto" else of_base
            poolings.append(chosen)
            options = _Options(0, DEFAULT_SAMPLING, (), "", chosen.kind)
            answers.append(self._answer(prompt, (name, own), options, None if len(listed) == 1 else index))
        return [
            embedding_of(answer.pooled, dimensions, chosen.is_normalized if normalize is None else normalize)
            for answer, chosen in zip(self._finished(answers, show_progress), poolings, strict=True)
        ]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, adapter: str | Sequence[str], show_progress: bool = False
    ) -> list[Classes]:
        """Return the classes of each prompt, by adapters that were trained for sequence classification.

        Raises what `generate` raises, and ValueError for an adapter that is not a classifier.
        """
        options = _Options(0, DEFAULT_SAMPLING, (), "", "last", classifies=True)
        listed = listed_prompts(prompts)
        answers = self._answers(listed, self._named_adapters(adapter_names(listed, adapter)), options)
        found = []
        for answer in self._finished(answers, show_progress):
            task = _classifier(answer.name, answer.adapter)
            probabilities = class_probabilities(answer.pooled, task.activation)
            found.append(Classes(task.labels[int(probabilities.argmax())], task.labels, probabilities, answer.name))
        return found

    def _rendered(
        self,
        messages: Chat,
        adapter: LocalAdapter | None,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool,
    ) -> tuple[int, ...]:
        template = self._template if adapter is None or adapter.template is None else adapter.template
        text = template.render(
            messages,
            tools,
            chat_template_kwargs,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
        )
        # The template has written the special tokens.
        return self._text(adapter).encode(text, add_special_tokens=False)

    def _answers(self, prompts: list[Prompt], adapters: list[_Named], options: _Options) -> list[Answer]:
        return [
            self._answer(prompt, named, options, None if len(prompts) == 1 else index)
            for index, (prompt, named) in enumerate(zip(prompts, adapters, strict=True))
        ]

    def _pieces(self, answer: Answer) -> Generator[Piece, None, None]:
        events: SimpleQueue[Event] = SimpleQueue()
        self._engine.add(answer.add, events)
        num_characters = num_tokens = 0
        try:
            while answer.finish_reason is None:
                if answer.take(events.get()):
                    self._engine.abort(answer.add.sequence_id)
                text, token_ids = answer.text[num_characters:], tuple(answer.token_ids[num_tokens:])
                if text or answer.finish_reason is not None:
                    num_characters, num_tokens = len(answer.text), len(answer.token_ids)
                    yield Piece(text, token_ids, answer.finish_reason)
        finally:
            if answer.finish_reason is None:
                self._engine.abort(answer.add.sequence_id)

    def _finished(self, answers: list[Answer], show_progress: bool) -> list[Answer]:
        """Run all answers to their ends. The first that fails ends the others."""
        running: dict[str, Answer] = {}
        # All answers share a queue, so that a failure is seen at once.
        events: SimpleQueue[Event] = SimpleQueue()
        try:
            for answer in answers:
                self._engine.add(answer.add, events)
                running[answer.add.sequence_id] = answer
            with _progress(len(answers), show_progress) as advance:
                while running:
                    event = events.get()
                    if isinstance(event, EngineClosed):
                        raise event
                    answer = running[event.sequence_id]
                    if answer.take(event):
                        self._engine.abort(event.sequence_id)
                    if answer.finish_reason is not None:
                        del running[event.sequence_id]
                        advance()
        finally:
            for sequence_id, answer in running.items():
                if answer.finish_reason is None:
                    self._engine.abort(sequence_id)
        return answers

    def _answer(
        self,
        prompt: Prompt,
        named: _Named,
        options: _Options,
        index: int | None = None,
        *,
        is_streamed: bool = False,
    ) -> Answer:
        name, adapter = named
        ids = self._text(adapter).encode(prompt) if isinstance(prompt, str) else token_ids_of(prompt)
        start = 0 if adapter is None else adapter.activation(ids)
        # An adapter that the prompt does not activate leaves the answer to the base.
        used = None if start is None else adapter
        # As on a server, its end tokens apply even then.
        sampling = options.sampling if adapter is None else ending_at(options.sampling, adapter.end_tokens)
        add = Add(
            sequence_id=str(next(self._ids)),
            prompt=ids,
            max_tokens=0 if options.pooling else max(1, min(options.max_tokens, self.max_model_len - len(ids))),
            pooling=options.pooling,
            num_labels=len(_classifier(name, adapter).labels) if options.classifies else None,
            sampling=sampling,
            digest=None if used is None else used.packed.digest,
            activation=start or 0,
            vocab_size=None if used is None else used.report.vocab_size,
            grammar=options.grammar,
            isolation_key=_ISOLATION_KEY,
            tokens_at_once=1 if is_streamed or options.stops else options.max_tokens,
        )
        return Answer(add, name, adapter, self._tokenizer_of(adapter), options.stops, index)

    def _named_adapters(self, names: Sequence[str | None]) -> list[_Named]:
        """Look up the adapters of a call, once. Other threads may replace or remove them meanwhile."""
        return [(name, self._adapter(name)) for name in names]

    def _adapter(self, name: str | None) -> LocalAdapter | None:
        if name is None:
            return None
        try:
            return self._adapters[name]
        except KeyError:
            self._engine.check_open()
            known = ", ".join(self._adapters) or "none"
            raise ValueError(f"there is no adapter {name!r}; the adapters are: {known}") from None

    def _tokenizer_of(self, adapter: LocalAdapter | None) -> TextTokenizer | None:
        return self._tokenizer if adapter is None or adapter.tokenizer is None else adapter.tokenizer

    def _text(self, adapter: LocalAdapter | None) -> TextTokenizer:
        tokenizer = self._tokenizer_of(adapter)
        if tokenizer is None:
            raise ValueError(f"{self._directory} has no {TOKENIZER_FILE}: give prompts as token ids")
        return tokenizer


@dataclass(frozen=True, slots=True)
class _Options:
    max_tokens: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    grammar: str
    pooling: str | None = None
    classifies: bool = False


def _options(max_tokens: int, sampling: SamplingParams, stop: str | Sequence[str], grammar: str) -> _Options:
    """Return the options of an answer. Raises ValueError for arguments that cannot be used."""
    return _Options(token_limit(max_tokens), checked_sampling(sampling), stop_strings(stop), grammar)


def _config(settings: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration with these fields. Raises ConfigNotUsable for a value of another type."""
    types = {field.name: field.type for field in msgspec.structs.fields(EngineConfig)}
    parsed = {}
    for name, value in settings.items():
        if name not in types:
            raise TypeError(f"EngineConfig has no field {name}")
        try:
            value = value.item() if isinstance(value, np.generic) else value
            parsed[name] = msgspec.convert(msgspec.to_builtins(value, enc_hook=os.fspath), types[name])
        except (msgspec.ValidationError, TypeError):
            needed = inspect.formatannotation(types[name])
            raise ConfigNotUsable(f"the setting {name} is {value!r}, but needs the type {needed}") from None
    return EngineConfig(**parsed)


def _base_template(directory: Path) -> ChatTemplate:
    template = ChatTemplate.load(directory)
    if template is None:
        raise TemplateRefused(f"{directory} has no chat template: give prompts to `generate`")
    return template


def _classifier(name: str | None, adapter: LocalAdapter | None) -> AdapterTask:
    task = None if adapter is None else adapter.report.task
    if task is None or not task.labels:
        raise ValueError(f"{name or 'the base'} is not a classifier: its adapter needs the task type SEQ_CLS")
    return task


@contextmanager
def _progress(total: int, is_shown: bool) -> Iterator[Callable[[], None]]:
    """Yield a function to call for each answer that has ended."""
    if not is_shown:
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress() as progress:
        task = progress.add_task("generating", total=total)
        yield lambda: progress.advance(task)
