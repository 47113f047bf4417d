"""The places of tokens in a text, for the `text_offset` of completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loramux.engine.text.detokenizer import Detokenizer, new_detokenizer
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer


class TextOffsets:
    """Counts the characters of a choice's text before each of its tokens.

    The first token of a character that several tokens spell has the character's place, and so do the others.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._num_characters = 0

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_characters)
            self._num_characters += len(self._detokenizer.feed(token_id))
        return offsets


def prompt_offsets(tokenizer: ModelTokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Return the offset of each token of a prompt in `text`, the prompt as it is echoed.

    Special tokens count where the text shows them. A token that the tokenizer adds, such as the start token, has no
    characters. If the tokenizer changes the text, for example to lower case, the offsets are those of its own text.
    """
    detokenizer = new_detokenizer(tokenizer, (), skip_special_tokens=True)
    offsets, place = [], 0
    for token_id in token_ids:
        offsets.append(min(place, len(text)))
        if tokenizer.text_bytes(token_id):
            place += len(detokenizer.feed(token_id))
            continue
        name = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        if text.startswith(name, place):
            place += len(name)
    return offsets
