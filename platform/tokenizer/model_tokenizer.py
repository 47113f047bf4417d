"""The tokenizer of one base model, with its chat template and the limits on texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from loramux.adapter_store.formats.version_files.added_vocabulary import AddedVocabulary
from loramux.adapter_store.formats.version_files.tokenizer_files import DEFAULT
from loramux.engine.chat_templates.chat_template import ChatTemplate, read_json, read_special_tokens
from loramux.engine.text.extended_tokenizer import extended_tokenizer, renamed_ids
from loramux.engine.text.text_tokenizer import TextTokenizer, load_tokenizer
from loramux.engine.text.truncation import Truncation
from loramux.platform.errors import context_exceeded


class ModelTokenizer(TextTokenizer):
    """The tokenizer and chat template of a Hugging Face directory. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        base: TextTokenizer | None = None,
        renamed: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(tokenizer, base, renamed)
        self.chat_template = chat_template
        """The base's own template, if it has one."""
        self.info: Mapping[str, Any] = {}
        """What `/tokenizer_info` says about a tokenizer that was loaded from a directory."""

    @staticmethod
    def load(model_dir: Path) -> ModelTokenizer:
        """Load the tokenizer. Raises ModelNotSupported with the file and the reason."""
        loaded = ModelTokenizer(load_tokenizer(model_dir / "tokenizer.json"), ChatTemplate.load(model_dir))
        loaded.info = read_tokenizer_info(model_dir, loaded.chat_template)
        return loaded

    def with_vocabulary(self, vocabulary: AddedVocabulary) -> ModelTokenizer:
        extended = extended_tokenizer(self._tokenizer, vocabulary)
        return ModelTokenizer(extended, self.chat_template, self, renamed_ids(extended, vocabulary))

    def encode(
        self,
        text: str,
        max_tokens: int | None = None,
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        truncation: Truncation | None = None,
    ) -> tuple[int, ...]:
        """Encode a plain prompt, by default with the special tokens that the model expects around it.

        Raises InvalidRequest, about the field `param`, before tokenising if the text is too long to fit in
        `max_tokens`. A text that passes this check can still have more tokens than that.
        """
        self._check_length(text, max_tokens, param)
        return super().encode(text, add_special_tokens=add_special_tokens, truncation=truncation)

    def encode_pair(
        self,
        first: str,
        second: str,
        max_tokens: int | None,
        *,
        add_special_tokens: bool,
        param: str,
        truncation: Truncation | None = None,
    ) -> tuple[int, ...]:
        """Encode two texts as one prompt, as the tokenizer joins a pair. Raises InvalidRequest as `encode` does."""
        # Each of the two is only roughly as long as its part of the prompt, so both together are checked.
        self._check_length(first + second, max_tokens, param)
        return self.joined(first, second, add_special_tokens=add_special_tokens, truncation=truncation)

    def encode_rendered(
        self,
        text: str,
        max_tokens: int | None = None,
        *,
        add_special_tokens: bool = False,
        truncation: Truncation | None = None,
    ) -> tuple[int, ...]:
        """Encode a rendered conversation, which already has its special tokens. Raises InvalidRequest as `encode`
        does.
        """
        self._check_length(text, max_tokens, "messages")
        return super().encode(text, add_special_tokens=add_special_tokens, truncation=truncation)

    def _check_length(self, text: str, max_tokens: int | None, param: str) -> None:
        if max_tokens is not None and len(text) > max_tokens * self.longest_token:
            raise context_exceeded(max_tokens, f"{len(text)} characters cannot fit", param)


def read_tokenizer_info(model_dir: Path, template: ChatTemplate | None) -> dict[str, Any]:
    """Return the contents of `tokenizer_config.json`, with tokens as strings, and the chat template, as in vLLM.

    Raises ModelNotSupported.
    """
    config = _plain(read_json(model_dir / "tokenizer_config.json"))
    info = {"tokenizer_class": "PreTrainedTokenizerFast", **config, **read_special_tokens(model_dir)}
    if template is not None:
        info["chat_template"] = template.sources.get(DEFAULT, next(iter(template.sources.values())))
    return info


def _plain(value: Any) -> Any:
    """Replace each description of a token by the token's text."""
    if isinstance(value, dict):
        content = value.get("content")
        return content if isinstance(content, str) else {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
