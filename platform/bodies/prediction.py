"""OpenAI's field `prediction`: a text that the answer will probably contain, such as a file that it edits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PlainValidator

from loramux.engine.chat_templates.content_form import Content
from loramux.engine.scheduling.request_limits import MAX_PREDICTION_TOKENS
from loramux.platform.bodies.conversation import ContentParts, text_content
from loramux.platform.bodies.strict_model import StrictModel

MAX_CHARACTERS = 4 * MAX_PREDICTION_TOKENS


def _usable(value: object) -> Content:
    content = text_content(value)
    if sum(map(len, [content] if isinstance(content, str) else content)) > MAX_CHARACTERS:
        raise ValueError(f"at most {MAX_CHARACTERS} characters are allowed")
    return content


class Prediction(StrictModel):
    type: Literal["content"]
    content: Annotated[Content, PlainValidator(_usable, json_schema_input_type=str | ContentParts)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(self.content)
