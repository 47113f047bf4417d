"""A push uploads the facts in which the directory's tokenizer differs from the base's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loramux.admin.client.client import AdminClient
from loramux.admin.client.push import PushedVersion, PushRefused, push_adapter
from tests.adapter_store.base_tokenizer import ORDINARY, with_tokenizer
from tests.admin.admin_side import ADMIN_KEY

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def client(admin_url: str) -> Iterator[AdminClient]:
    with AdminClient(admin_url, ADMIN_KEY) as client:
        client.post("tenants", {"slug": "acme"})
        yield client


def version_of(client: AdminClient, pushed: PushedVersion) -> dict[str, Any]:
    adapter_id = client.get("adapters", tenant="acme")["data"][0]["id"]
    return client.get(f"adapters/{adapter_id}/versions/{pushed.version}")


def test_a_push_uploads_the_added_tokens(client: AdminClient, make_adapter: Callable[..., Path]) -> None:
    directory = with_tokenizer(make_adapter(), {"<a>": 60, "<b>": 61})
    pushed = push_adapter(client, directory, "acme", "support")
    without = push_adapter(client, directory, "acme", "support", without=["added_vocabulary.json"])
    versions = [version_of(client, one) for one in (pushed, without)]
    assert [version["added_tokens"] for version in versions] == [{"<a>": 60, "<b>": 61}, None]
    assert pushed.digest == without.digest != pushed.version_digest
    with pytest.raises(PushRefused) as refused:
        push_adapter(client, with_tokenizer(make_adapter(), {"<a>": 60, "<b>": 62}), "acme", "support")
    assert (refused.value.code, refused.value.param) == ("invalid_vocabulary", "tokens[1].id")


def test_a_push_uploads_the_template_and_the_tokens_of_the_tokenizer(
    client: AdminClient, make_adapter: Callable[..., Path]
) -> None:
    config = {"chat_template": TEMPLATE, "eos_token": "<|reserved_1|>"}
    directory = with_tokenizer(make_adapter(), {"<|tool|>": 4}, **config)
    version = version_of(client, push_adapter(client, directory, "acme", "support"))
    assert version["chat_template"] == hashlib.sha256(TEMPLATE.encode()).hexdigest()
    own = version["report"]["added_vocabulary"]
    assert (own["renamed"], own["special_tokens"]) == ({"<|tool|>": 4}, {"eos_token": "<|reserved_1|>"})
    nothing = ("chat_template.jinja", "added_vocabulary.json")
    plain = push_adapter(client, directory, "acme", "support", without=nothing)
    assert plain.version_digest == plain.digest


def test_a_push_reads_the_template_of_earlier_processors(
    client: AdminClient, make_adapter: Callable[..., Path]
) -> None:
    directory = make_adapter()
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    version = version_of(client, push_adapter(client, directory, "acme", "support"))
    assert version["chat_template"] == hashlib.sha256(TEMPLATE.encode()).hexdigest()


def test_a_tokenizer_that_is_not_the_bases_is_refused(client: AdminClient, make_adapter: Callable[..., Path]) -> None:
    directory = with_tokenizer(make_adapter(), ordinary={**ORDINARY, "other": 9})
    with pytest.raises(PushRefused) as refused:
        push_adapter(client, directory, "acme", "support")
    assert (refused.value.code, refused.value.param) == ("tokenizer_mismatch", "tokenizer.json")
    assert not list(client.items("adapters"))


def test_settings_without_effect_are_warned_of(client: AdminClient, make_adapter: Callable[..., Path]) -> None:
    directory = make_adapter()
    assert push_adapter(client, directory, "acme", "support").warnings == ()
    (directory / "generation_config.json").write_text(json.dumps({"stop_strings": ["x"], "eos_token_id": [3, 4]}))
    pushed = push_adapter(client, directory, "acme", "support")
    assert [warning["params"] for warning in pushed.warnings] == [["stop_strings"]]
    assert version_of(client, pushed)["generation_config"] == {"eos_token_id": [3, 4]}


def test_end_tokens_outside_the_vocabulary_are_refused(client: AdminClient, make_adapter: Callable[..., Path]) -> None:
    directory = with_tokenizer(make_adapter(), {"<a>": 60})
    for last, is_served in ((63, True), (64, False)):
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, last]}))
        if is_served:
            push_adapter(client, directory, "acme", "support")
            continue
        with pytest.raises(PushRefused) as refused:
            push_adapter(client, directory, "acme", "support")
        assert (refused.value.code, refused.value.param) == ("invalid_generation_config", "eos_token_id")
