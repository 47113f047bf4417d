"""Text to token ids and back, for one base model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from loramux.platform.errors import InvalidRequest
from loramux.platform.tokenizer.chat_template import ChatTemplate, ModelFilesError
from loramux.platform.tokenizer.token_bytes import TokenBytes

MAX_TOKENISED_AT_ONCE = 4 * 1024
"""Characters that are tokenised in less than a millisecond; more would hold up every other request."""


class ModelTokenizer:
    """The tokenizer and chat template of a Hugging Face directory. Safe to call from several threads."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._bytes = TokenBytes(tokenizer)
        # Spelled in bytes or in characters, a token is at least as long as its text.
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    @staticmethod
    def load(model_dir: Path) -> ModelTokenizer:
        """Raises ModelFilesError with the file and the reason."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ModelFilesError(f"{path} is missing: a fast tokenizer is needed")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelFilesError(f"{path} is not a tokenizer: {error}") from error
        return ModelTokenizer(tokenizer, ChatTemplate.load(model_dir))

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, max_tokens: int | None = None) -> tuple[int, ...]:
        """A plain prompt, with the special tokens that the model expects around one.

        Raises InvalidRequest for a text that cannot fit in `max_tokens`, before any work is done for it; one that
        passes may still have more.
        """
        self._check_length(text, max_tokens, "prompt")
        return self._ids(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], max_tokens: int | None = None) -> tuple[int, ...]:
        """A conversation up to where the assistant speaks; raises InvalidRequest, as `encode` does too."""
        if self._chat_template is None:
            raise InvalidRequest(
                "this model has no chat template: call /v1/completions", param="messages", code="no_chat_template"
            )
        text = self._chat_template.render(messages)
        self._check_length(text, max_tokens, "messages")
        return self._ids(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids without special tokens; an incomplete character at either end becomes U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; a special token's are its name."""
        return self._bytes.of(token_id)

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text; a special token adds none."""
        return self._bytes.in_text(token_id)

    def _ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        if len(text) <= MAX_TOKENISED_AT_ONCE:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        # A batch of one: only for a batch does the library let other threads, and so the event loop, run meanwhile.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def _check_length(self, text: str, max_tokens: int | None, param: str) -> None:
        if max_tokens is not None and len(text) > max_tokens * self._longest_token:
            raise InvalidRequest(
                f"This model's maximum context length is {max_tokens} tokens; {len(text)} characters cannot fit.",
                param=param,
                code="context_length_exceeded",
            )
