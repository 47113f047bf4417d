from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loramux.adapter_store.extensions import ExtensionKind, read_entries
from loramux.admin.errors import StartRefused
from loramux.admin.server.extensions import KINDS, load_extensions
from tests.written_extension import write_distribution

PARSERS = """
from loramux.platform.tool_calls.call_parser import CallParser
from loramux.platform.tool_calls.call_syntax import Block, CallSyntax
from loramux.platform.tool_calls.json_calls import HermesParser

class Good(HermesParser):
    syntax = CallSyntax({"<tool_call>": Block()})

class Abstract(CallParser):
    syntax = CallSyntax({})

class Plain(HermesParser):
    pass

class Other(HermesParser):
    syntax = CallSyntax({"<call>": Block()})

class Opened(HermesParser):
    openers = "{"
    syntax = CallSyntax({"<tool_call>": Block()})

def function():
    return Good()
"""


def fresh(kind: ExtensionKind[Any]) -> ExtensionKind[Any]:
    """Return a kind that reads the entry points again."""
    group = kind.group.removeprefix("loramux.")
    return ExtensionKind(group, kind.kind, kind._product, kind._taken, kind._problem, read_entries)


def load(site: Path, entries: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch, **modules: str) -> list[str]:
    monkeypatch.syspath_prepend(write_distribution(site, "some-dist", entries, **modules))
    return [str(extension) for extension in load_extensions([fresh(kind) for kind in KINDS])]


def test_all_extensions_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {kind.group: {"some": "builtins:dict"} for kind in KINDS}
    entries["loramux.tool_parsers"] = {"some": "all_parsers:Good"}
    found = load(tmp_path, entries, monkeypatch, all_parsers=PARSERS)
    assert found == [f"the {kind.kind} 'some' of some-dist 1.0" for kind in KINDS]


@pytest.mark.parametrize(
    ("attribute", "problem"),
    [
        ("function", "is not a subclass of CallParser"),
        ("Block", "is not a subclass of CallParser"),
        ("Abstract", "has no method _block"),
        ("Plain", "has no syntax"),
        ("Other", "has markers that its syntax lacks, or the reverse"),
        ("Opened", "has markers that its syntax lacks, or the reverse"),
    ],
)
def test_unusable_tool_parser_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attribute: str, problem: str
) -> None:
    entries = {"loramux.tool_parsers": {"odd": f"odd_parsers:{attribute}"}}
    with pytest.raises(StartRefused) as refused:
        load(tmp_path, entries, monkeypatch, odd_parsers=PARSERS)
    assert str(refused.value) == f"the tool parser 'odd' of some-dist 1.0 {problem}: repair or uninstall it"


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("blob_stores", "s3"),
        ("eviction_policies", "lru"),
        ("routers", "homes"),
        ("tool_parsers", "auto"),
        ("tool_parsers", "harmony"),
        ("tool_parsers", "hermes"),
        ("adapter_sources", "hf"),
        ("checkpoint_formats", "gptq"),
    ],
)
def test_built_in_names_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, name: str) -> None:
    with pytest.raises(StartRefused, match=f"'{name}' of some-dist 1.0 has the name of a built-in "):
        load(tmp_path, {f"loramux.{group}": {name: "builtins:dict"}}, monkeypatch)
