"""The forms in which chat templates read a message's content: as a string, or as a list of content parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

Content: TypeAlias = str | tuple[str, ...]
"""A message's content: a string, or the texts of the content parts that the client sent."""

ContentForm = Literal["text", "parts", "one_part", "as_sent"]
"""`text`: a string. `parts`: a list of parts `{"type": "text", "text": ...}`. `one_part`: such a list, of which the
template reads only the first part. `as_sent`: the template reads both, so the client's form decides, as it does in
transformers. Prompts can differ between the two forms.
"""


class ContentForms(msgspec.Struct, frozen=True, kw_only=True):
    """The form of each role's content. Some templates read different forms for different roles."""

    system: ContentForm = "text"
    user: ContentForm = "text"
    assistant: ContentForm = "text"
    tool: ContentForm = "text"

    def of(self, role: str) -> ContentForm:
        form: ContentForm = getattr(self, role)
        return form


def formed_content(form: ContentForm, content: str | Sequence[str]) -> str | list[dict[str, Any]]:
    """Return a content in this form. `content` is a string, or the texts of the parts that a client sent.

    As in vLLM, texts that have to be joined are separated by line breaks.
    """
    texts = [content] if isinstance(content, str) else list(content)
    if form == "text" or (form == "as_sent" and isinstance(content, str)):
        return "\n".join(texts)
    if form == "one_part":
        texts = ["\n".join(texts)]
    return [{"type": "text", "text": text} for text in texts]


def joined_content(contents: Iterable[Content]) -> Content:
    """Return the content of messages that become one, with a blank line between them and without empty texts.

    Many templates put nothing between the parts of a message, so the blank line is within a part.
    """
    parts: list[list[str]] = []
    for content in contents:
        texts = [text for text in ((content,) if isinstance(content, str) else content) if text]
        if parts and texts:
            parts[-1] += ("\n\n", texts.pop(0))
        parts += [[text] for text in texts]
    joined = tuple(map("".join, parts))
    return joined if len(joined) > 1 else "".join(joined)
