from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from loramux.platform.tokenizer.prompt_hash import prompt_sha256
from tests.platform.tool_base import make_tool_base


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_tool_base(tmp_path)


def edit_tokenizer(base: Path) -> None:
    document = json.loads((base / "tokenizer.json").read_text())
    document["added_tokens"][0]["lstrip"] = True
    (base / "tokenizer.json").write_text(json.dumps(document))


def edit_template(base: Path) -> None:
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}")


def remove_template(base: Path) -> None:
    (base / "chat_template.jinja").unlink()


def edit_special_token(base: Path) -> None:
    document = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**document, "bos_token": "<begin>"}))


@pytest.mark.parametrize("edit", [edit_tokenizer, edit_template, remove_template, edit_special_token])
def test_hash_changes_with_everything_that_prepares_a_prompt(base: Path, edit: Callable[[Path], None]) -> None:
    before = prompt_sha256(base, 1024)
    edit(base)
    assert prompt_sha256(base, 1024) != before


def test_hash_depends_on_nothing_else(base: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(base, tmp_path / "copy")
    (copy / "config.json").write_text("{}")
    assert prompt_sha256(copy, 1024) == prompt_sha256(base, 1024) != prompt_sha256(base, 1025)
