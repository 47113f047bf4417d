"""The description of the base's tokenizer that `/tokenizer_info` returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loramux.adapter_store.formats.version_files.tokenizer_files import DEFAULT
from loramux.platform.tokenizer.chat_template import ChatTemplate, read_json, read_special_tokens


def read_tokenizer_info(model_dir: Path, template: ChatTemplate | None) -> dict[str, Any]:
    """Return the contents of `tokenizer_config.json`, with tokens as strings, and the chat template, as in vLLM.

    Raises ModelFilesError.
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
