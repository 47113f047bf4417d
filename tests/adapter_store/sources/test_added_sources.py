"""Adapter sources of extensions, with the source in docs/extending.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from loramux.adapter_store.errors import AdapterRejected, SourceUnavailable, UploadRefused
from loramux.adapter_store.extensions import ExtensionKind, read_entries
from loramux.adapter_store.sources import adapter_sources
from loramux.adapter_store.sources.adapter_sources import AdapterSource, AdapterSources, Source, is_allowable
from tests.written_extension import write_distribution

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"
FAILING = """
class Failing:
    def pin(self, url):
        raise OSError("not mounted")

    def open(self, url):
        return {} if url.endswith("wrong") else 1 / 0
"""


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that `share://` reads. `failing://` is the scheme of a source that fails."""
    example = re.search(r"```python\n(import os\nimport shutil\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert example is not None
    site = write_distribution(
        tmp_path / "site",
        "sources-dist",
        {"loramux.adapter_sources": {"share": "shared_source:SharedDirectory", "failing": "failing_source:Failing"}},
        shared_source=example[1],
        failing_source=FAILING,
    )
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("SHARED_ADAPTERS", str(tmp_path / "shared"))
    kind = ExtensionKind[AdapterSource]("adapter_sources", "adapter source", AdapterSource, read=read_entries)
    monkeypatch.setattr(adapter_sources, "ADAPTER_SOURCES", kind)
    return tmp_path / "shared"


def test_files_of_an_extension_are_read(shared: Path, tmp_path: Path) -> None:
    (shared / "team" / "support").mkdir(parents=True)
    (shared / "team" / "support" / "adapter_config.json").write_bytes(b"{}")
    allowed = AdapterSources(("share://team",))
    url = allowed.pin("share://team/support/")
    assert url == "share://team/support"
    source = allowed.open(url)
    assert isinstance(source, Source)
    assert (source.has("adapter_config.json"), source.has("adapter_model.safetensors")) == (True, False)
    assert source.size("adapter_config.json", 10) == 2
    source.fetch_file("adapter_config.json", tmp_path / "copy", 10)
    assert (tmp_path / "copy").read_bytes() == b"{}"
    for call, code in (
        (lambda: source.size("adapter_config.json", 1), "file_too_large"),
        (lambda: source.size("README.md", 1), "source_not_found"),
    ):
        with pytest.raises(AdapterRejected) as rejected:
            call()
        assert rejected.value.code == code


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("share://other/support", "source_not_allowed"),
        ("share://teams/support", "source_not_allowed"),
        ("share://team/../other", "invalid_source"),
        ("share://team/.hidden", "invalid_source"),
        ("share://team/a b", "invalid_source"),
        ("share://team/a?b", "invalid_source"),
        ("share://team/a#b", "invalid_source"),
        ("share://team//a", "invalid_source"),
        ("share:///etc", "invalid_source"),
        ("share://team/" + "a" * 1000, "invalid_source"),
        ("failing://x", "invalid_source"),
        ("nothing://x", "invalid_source"),
    ],
)
def test_other_urls_are_refused(url: str, code: str) -> None:
    allowed = AdapterSources(("share://team",))
    for call in (allowed.check, allowed.pin, allowed.open):
        with pytest.raises(UploadRefused) as refused:
            call(url)
        assert refused.value.code == code


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        pytest.param(lambda allowed: allowed.pin("failing://x/a"), "OSError: not mounted", id="pin"),
        pytest.param(lambda allowed: allowed.open("failing://x/a"), "ZeroDivisionError: division by zero", id="open"),
        pytest.param(
            lambda allowed: allowed.open("failing://x/wrong"),
            "TypeError: open returned an object of type dict instead of Source",
            id="wrong type",
        ),
    ],
)
def test_failing_source_is_tried_again_later(call: Callable[[AdapterSources], object], reason: str) -> None:
    with pytest.raises(SourceUnavailable, match=f"the adapter source 'failing' failed: {reason}"):
        call(AdapterSources(("failing://x",)))


def test_a_name_with_each_allowed_character_is_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/extending.md lists the characters."""
    name = "a9+._-z"
    site = write_distribution(
        tmp_path / "other",
        "named-dist",
        {"loramux.adapter_sources": {name: "named_source:Failing"}},
        named_source=FAILING,
    )
    monkeypatch.syspath_prepend(site)
    kind = ExtensionKind[AdapterSource]("adapter_sources", "adapter source", AdapterSource, read=read_entries)
    monkeypatch.setattr(adapter_sources, "ADAPTER_SOURCES", kind)
    assert is_allowable(f"{name}://team")
    assert AdapterSources((f"{name}://team",)).check(f"{name}://team/support") == f"{name}://team/support"


def test_prefixes_of_extensions_can_be_allowed() -> None:
    assert is_allowable("share://team")
    assert is_allowable("share://team/support/")
    assert not is_allowable("share://")
    assert not is_allowable("share://team/..")
    assert not is_allowable("nothing://team")
