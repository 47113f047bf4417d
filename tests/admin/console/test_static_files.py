from __future__ import annotations

import hashlib
import json
import re

import httpx
import pytest
from markupsafe import Markup

from loramux.adapter_store.formats.files.file_names import FURTHER_FILES, UPLOAD_FILES
from loramux.admin.console.rendering import STATIC, visible

pytestmark = pytest.mark.anyio
VENDOR = STATIC / "vendor"


def vendored() -> dict[str, str]:
    rows = re.findall(r"^\| `([^`]+)` .*`([0-9a-f]{64})` \|$", (VENDOR / "VENDORED.md").read_text(), re.MULTILINE)
    return dict(rows)


def test_vendored_files_match_the_published_checksums() -> None:
    libraries = {path.name for path in VENDOR.iterdir() if path.suffix in (".js", ".css")}
    assert libraries == set(vendored())
    for name, sha256 in vendored().items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == sha256, name


def test_upload_form_reads_the_files_that_a_version_can_have() -> None:
    script = (STATIC / "console.js").read_text()
    lists = dict(re.findall(r"const (wanted|optional) = (\[[^\]]*\]);", script))
    assert tuple(json.loads(lists["wanted"])) == UPLOAD_FILES
    assert tuple(json.loads(lists["optional"])) == FURTHER_FILES
    (ignored,) = re.findall(r"const ignored = \[([^\]]*)\];", script)
    left_by_training = set(re.findall(r'"([^"]+)"', ignored))
    assert {"trainer_state.json", "special_tokens_map.json", "added_tokens.json"} <= left_by_training
    assert left_by_training.isdisjoint({*UPLOAD_FILES, *FURTHER_FILES})
    hint = (STATIC.parent / "templates" / "adapter.html").read_text()
    assert [name for name in (*UPLOAD_FILES, *FURTHER_FILES) if name not in hint] == []


def test_templates_contain_no_inline_script_or_style() -> None:
    for path in (STATIC.parent / "templates").glob("*.html"):
        text = path.read_text()
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=|hx-on|javascript:", text), path.name
        assert "| safe" not in text, path.name


async def test_static_files_are_served_without_a_session(browser: httpx.AsyncClient) -> None:
    for path in STATIC.rglob("*.*"):
        name = path.relative_to(STATIC).as_posix()
        response = await browser.get(f"/console/static/{name}?v=1")
        assert response.status_code == 200, name
        assert response.content == path.read_bytes()
        assert "immutable" in response.headers["cache-control"]
    assert (await browser.get("/console/static/console.css")).headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", ["../rendering.py", "..%2frendering.py", "vendor", "vendor/", "nothing.js", ""])
async def test_no_other_file_is_served(browser: httpx.AsyncClient, path: str) -> None:
    response = await browser.get(httpx.URL(f"http://admin.example/console/static/{path}"))
    assert response.status_code in (303, 404)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("plain text\n\tindented", "plain text\n\tindented", id="plain"),
        pytest.param("a\x00b\x1b[31m\x9b", "a\\u0000b\\u001b[31m\\u009b", id="control characters"),
        pytest.param("exe\u202egpj", "exe\\u202egpj", id="turned text"),
        pytest.param("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff", id="unseen"),
        pytest.param("Grüße 漢字 🙂", "Grüße 漢字 🙂", id="other scripts"),
        pytest.param(Markup("<b>\u202e</b>"), Markup("<b>\u202e</b>"), id="markup of ours"),
        pytest.param(3, 3, id="number"),
    ],
)
def test_deceptive_characters_are_spelled_out(text: object, shown: object) -> None:
    assert visible(text) == shown
