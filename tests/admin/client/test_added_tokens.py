"""A push extracts the tokens that the base lacks from the tokenizer beside the adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.added_vocabulary import AddedVocabulary
from loramux.admin.client.added_tokens import added_vocabulary
from loramux.admin.client.client import AdminClient
from loramux.admin.client.push import PushRefused, push_adapter
from tests.admin.admin_side import ADMIN_KEY

NUM_TOKENS, VOCAB_SIZE = 60, 70
FLAGS = {"special": True, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
HEAD = "base_model.model.lm_head.weight"


def with_tokenizer(directory: Path, *tokens: tuple[int, str], num_rows: int | None = None) -> Path:
    listed = [{"id": token_id, "content": content, **FLAGS} for token_id, content in ((3, "<|bos|>"), *tokens)]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": listed[::-1], "model": {}}))
    if num_rows is not None:
        path = directory / "adapter_model.safetensors"
        save_file({**load_file(path), HEAD: np.zeros((num_rows, 4), np.float32)}, path)
    return directory


def extracted(directory: Path) -> dict[str, Any] | None:
    found = added_vocabulary(directory, NUM_TOKENS, VOCAB_SIZE)
    return None if found is None else found.report()


def test_tokens_that_the_base_lacks_are_extracted(make_adapter: Callable[..., Path]) -> None:
    assert extracted(make_adapter()) is None
    assert extracted(with_tokenizer(make_adapter())) is None
    new = ((61, "<b>"), (60, "<a>"))
    assert extracted(with_tokenizer(make_adapter(), *new)) == {"vocab_size": 70, "tokens": {"<a>": 60, "<b>": 61}}
    grown = with_tokenizer(make_adapter(), *new, num_rows=72)
    assert extracted(grown) == {"vocab_size": 72, "tokens": {"<a>": 60, "<b>": 61}}
    shrunk = with_tokenizer(make_adapter(), num_rows=60)
    assert added_vocabulary(shrunk, NUM_TOKENS, VOCAB_SIZE) == AddedVocabulary(60, ())


def test_tokens_without_a_row_are_left_out(make_adapter: Callable[..., Path]) -> None:
    """An example is a padding token that the trainer added to a base whose tokenizer is full."""
    directory = with_tokenizer(make_adapter(), (VOCAB_SIZE, "[PAD]"))
    assert added_vocabulary(directory, VOCAB_SIZE, VOCAB_SIZE) is None


def test_trained_tokens_beyond_the_base_have_rows(make_adapter: Callable[..., Path]) -> None:
    directory = with_tokenizer(make_adapter(), *((token, f"<{token}>") for token in range(60, 72)))
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "trainable_token_indices": {"embed_tokens": [70, 71]}}))
    found = extracted(directory)
    assert found is not None
    assert (found["vocab_size"], len(found["tokens"])) == (72, 12)


def test_tokenizer_config_is_read_without_a_fast_tokenizer(make_adapter: Callable[..., Path]) -> None:
    directory = make_adapter()
    decoder = {"3": {"content": "<|bos|>", **FLAGS}, "60": {"content": "<a>", **FLAGS}}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert extracted(directory) == {"vocab_size": 70, "tokens": {"<a>": 60}}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        pytest.param("{", "invalid_tokenizer", id="no JSON"),
        pytest.param("[]", "invalid_tokenizer", id="no object"),
        pytest.param('{"added_tokens": {"a": 1}}', "invalid_tokenizer", id="no list"),
        pytest.param('{"added_tokens": [{"id": "60"}]}', "invalid_tokenizer", id="no id"),
        pytest.param('{"added_tokens": [{"id": 60, "content": 5}]}', "invalid_vocabulary", id="no content"),
        pytest.param("[" * 100_000, "invalid_tokenizer", id="nesting"),
    ],
)
def test_a_malformed_tokenizer_is_refused(make_adapter: Callable[..., Path], text: str, code: str) -> None:
    directory = make_adapter()
    (directory / "tokenizer.json").write_text(text)
    with pytest.raises(AdapterRejected) as refused:
        added_vocabulary(directory, NUM_TOKENS, VOCAB_SIZE)
    assert refused.value.code == code


def test_a_push_uploads_the_added_tokens(admin_url: str, make_adapter: Callable[..., Path]) -> None:
    with AdminClient(admin_url, ADMIN_KEY) as client:
        client.post("tenants", {"slug": "acme"})
        directory = with_tokenizer(make_adapter(), (60, "<a>"), (61, "<b>"))
        pushed = push_adapter(client, directory, "acme", "support")
        without = push_adapter(client, directory, "acme", "support", without=["added_vocabulary.json"])
        adapter_id = client.get("adapters", tenant="acme")["data"][0]["id"]
        versions = [client.get(f"adapters/{adapter_id}/versions/{one.version}") for one in (pushed, without)]
        assert [version["added_tokens"] for version in versions] == [{"<a>": 60, "<b>": 61}, None]
        assert pushed.digest == without.digest != pushed.version_digest
        with pytest.raises(PushRefused) as refused:
            push_adapter(client, with_tokenizer(make_adapter(), (60, "<a>"), (62, "<b>")), "acme", "support")
        assert (refused.value.code, refused.value.param) == ("invalid_vocabulary", "tokens[1].id")
