"""The examples in docs/extending.md are extensions that loramux accepts."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.extensions import ExtensionKind, read_entries
from loramux.adapter_store.formats.files.mapped_tensors import map_directory
from loramux.adapter_store.formats.quantization.base_format import find_coded
from loramux.admin.server.extensions import KINDS
from loramux.platform.tool_calls.events import ArgumentsEvent, CallBegun, TextEvent
from tests.docs.extension_site import own_tests
from tests.docs.write import DOCS
from tests.written_extension import write_distribution

PAGE = (DOCS / "extending.md").read_text()
GROUPS = {kind.group for kind in KINDS}
DECLARED: Mapping[str, Mapping[str, str]] = {
    group: entries
    for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    for group, entries in tomllib.loads(block)["project"]["entry-points"].items()
}
"""The entry points on the page, by group."""
SOURCES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory in which the page's examples are installed."""
    entries, modules = {}, {}
    for group, declared in DECLARED.items():
        ((_, value),) = declared.items()
        module, _, attribute = value.partition(":")
        source = next((source for source in SOURCES if f"class {attribute}" in source), None)
        # The example package contains the other two.
        if source is not None:
            entries[group] = declared
            modules[module] = source
    return write_distribution(tmp_path / "site", "page-dist", entries, **modules)


@pytest.fixture
def make(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Calls the example of a group."""
    monkeypatch.setenv("SIGNED_TOKENS_SECRET", "secret")
    monkeypatch.syspath_prepend(site)

    def call(group: str, *arguments: object, **named: object) -> Any:
        kind = next(kind for kind in KINDS if kind.group == f"loramux.{group}")
        ((name, _),) = DECLARED[kind.group].items()
        fresh = ExtensionKind[Any](group, kind.kind, kind._product, problem=kind._problem, read=read_entries)
        return fresh.required(name, *arguments, **named)

    yield call
    for path in site.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_page_describes_every_kind() -> None:
    assert DECLARED.keys() == GROUPS
    assert {f"loramux.{group}" for group in re.findall(r"\| `loramux\.(\w+)` \|", PAGE)} == GROUPS
    assert len(SOURCES) == 5


def test_tool_parser(make: Callable[..., Any]) -> None:
    parser = make("tool_parsers")
    pieces = ('Let me see. <invoke>{"name": "now", "arg', 'uments": {}}</invoke>')
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    assert events == [TextEvent("Let me see."), CallBegun(0, "now"), ArgumentsEvent(0, "{}")]


def test_key_authentication(make: Callable[..., Any]) -> None:
    def signed(text: str) -> str:
        return f"{text}.{hmac.new(b'secret', text.encode(), hashlib.sha256).hexdigest()}"

    tokens = make("key_authentication")
    later = int(time.time()) + 60
    assert tokens.key_id(signed(f"key_1.{later}")) == "key_1"
    for token in (signed("key_1.1"), f"key_1.{later}.forged", "", ".", "ä"):
        assert tokens.key_id(token) is None


def test_router(make: Callable[..., Any]) -> None:
    router = make("routers", clock=time.monotonic, random=Random(1))
    router.update([])
    assert router.prefetches() == ()


def test_adapter_source(make: Callable[..., Any]) -> None:
    assert make("adapter_sources").pin("share://team/a") == "share://team/a"


def test_checkpoint_format(make: Callable[..., Any], tmp_path: Path) -> None:
    codes = torch.randint(-128, 128, (6, 10), dtype=torch.int8)
    scales = torch.rand(6) + 0.5
    directory = tmp_path / "base"
    directory.mkdir()
    tensors = {"a.weight": codes, "a.row_scale": scales, "norm.weight": torch.ones(3)}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({}))
    found = find_coded(make("checkpoint_formats", {"quant_method": "rowwise", "bits": 8}), map_directory(directory))
    assert found.plain.keys() == {"model.norm.weight"}
    expected = codes.float() * scales[:, None]
    np.testing.assert_array_equal(found.coded["a.weight"].read().dequantize(), expected.numpy())
    with pytest.raises(BaseNotSupported, match="bits is 4"):
        make("checkpoint_formats", {"bits": 4})


@pytest.mark.campaign
def test_tool_parser_passes_the_tests_of_tool_parsers(site: Path) -> None:
    assert own_tests(site, "tests/platform/tool_calls", LORAMUX_TEST_TOOL_PARSER="invoke") == 14


@pytest.mark.campaign
def test_router_passes_the_tests_of_routers(site: Path) -> None:
    assert own_tests(site, "tests/platform/routing/test_routers.py", LORAMUX_TEST_ROUTER="least_loaded") == 5
