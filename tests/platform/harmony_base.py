"""A tokenizer with harmony's special tokens, and a small chat template in harmony's form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.demo_base import DEMO_BASE

RENAMED = {
    "<|pad|>": "<|end|>",
    "<|end|>": "<|return|>",
    "<|system|>": "<|start|>",
    "<|user|>": "<|channel|>",
    "<|assistant|>": "<|message|>",
}
ADDED = ("<|call|>", "<|constrain|>")
TEMPLATE = """\
{%- set final = "<|start|>assistant<|channel|>final<|message|>" %}
{%- set analysis = "<|start|>assistant<|channel|>analysis<|message|>" %}
{%- set last = namespace(name="") %}
{{- "<|start|>system<|message|>Reasoning: " + (reasoning_effort | default("medium")) + "<|end|>" }}
{%- if tools %}{{ "<|start|>developer<|message|>" }}
{%- for tool in tools %}{{ "// " + tool.function.description + (tool.function | tojson) }}{% endfor %}
{{- "<|end|>" }}{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" + message.content + "<|end|>" }}
{%- elif message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception("content and thinking") }}{% endif %}
{%- set thought = message.thinking or message.content %}
{%- if thought %}{{ analysis + thought + "<|end|>" }}{% endif %}
{%- set last.name = message.tool_calls[0].function.name %}
{{- "<|start|>assistant to=functions." + last.name + "<|channel|>commentary json<|message|>" }}
{{- message.tool_calls[0].function.arguments | tojson + "<|call|>" }}
{%- elif message.role == "assistant" %}{{ final + message.content + "<|end|>" }}
{%- else %}{{ "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}"""


def make_harmony_base(folder: Path) -> Path:
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(DEMO_BASE / name, folder / name)
    tokenizer = json.loads((DEMO_BASE / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None
    vocabulary, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    for token in added:
        if token["content"] in RENAMED:
            vocabulary[RENAMED[token["content"]]] = vocabulary.pop(token["content"])
            token["content"] = RENAMED[token["content"]]
    added += [{**added[0], "id": len(vocabulary) + i, "content": content} for i, content in enumerate(ADDED)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def tokens_of(tokenizer: ModelTokenizer, parts: str | Iterable[str]) -> tuple[int, ...]:
    """The tokens of several parts. A marker that is divided over two parts is not a special token."""
    texts = [parts] if isinstance(parts, str) else parts
    return tuple(token_id for text in texts for token_id in tokenizer.encode(text, add_special_tokens=False))
