from __future__ import annotations

from pathlib import Path

import pytest

from loramux.adapter_store.blobs.blob_url import BLOB_STORES, open_blob_store
from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.errors import InvalidBlobUrl
from loramux.adapter_store.extensions import ExtensionKind, ExtensionRefused, read_entries
from tests.adapter_store.memory_blobs import MemoryBlobStore
from tests.written_extension import write_distribution

GROUP = "loramux.blob_stores"
STORE = """
from loramux.adapter_store.errors import InvalidBlobUrl
from tests.adapter_store.memory_blobs import MemoryBlobStore

class Store(MemoryBlobStore):
    def __init__(self, url):
        super().__init__()
        if "bad" in url:
            raise InvalidBlobUrl("the blob URL is bad")
        if "broken" in url:
            raise KeyError("disk")

def other(url):
    return {}

NUMBER = 7
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory from which packages are imported."""
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def stores() -> ExtensionKind[BlobStore]:
    return ExtensionKind("blob_stores", "blob store", BlobStore, taken=("file", "s3"), read=read_entries)


def test_extension_is_found_by_name(site: Path) -> None:
    write_distribution(site, "some-stores", {GROUP: {"found1": "store_one:Store"}}, store_one=STORE)
    kind = stores()
    assert kind.names == ("found1",)
    assert isinstance(kind.make("found1", "found1://x"), MemoryBlobStore)
    assert kind.make("missing", "missing://x") is None
    (loaded,) = kind.load_all()
    assert str(loaded) == "the blob store 'found1' of some-stores 1.0"
    assert kind.find("found1") is loaded
    with pytest.raises(ExtensionRefused, match="no installed distribution offers the blob store 'missing'"):
        kind.required("missing")


def test_names_are_read_without_an_import(site: Path) -> None:
    write_distribution(site, "some-stores", {GROUP: {"lazy": "store_lazy:Store"}}, store_lazy="raise SystemExit(9)")
    assert stores().names == ("lazy",)


@pytest.mark.parametrize(
    ("value", "source", "said"),
    [
        pytest.param(
            "store_raises:Store",
            "raise RuntimeError('no disk\\nand more')",
            "spoilt-dist 2.1 cannot be imported (RuntimeError: no disk): repair or uninstall it",
            id="raises at import",
        ),
        pytest.param("store_exits:Store", "raise SystemExit(0)", "cannot be imported (SystemExit: 0)", id="exits"),
        pytest.param("store_missing:Store", "", "cannot be imported (AttributeError: ", id="no such class"),
        pytest.param("store_typed:NUMBER", STORE, "is an object of type int, not a class or function", id="wrong type"),
    ],
)
def test_unusable_extension_is_named(site: Path, value: str, source: str, said: str) -> None:
    module = value.partition(":")[0]
    write_distribution(site, "spoilt-dist", {GROUP: {"spoilt": value}}, "2.1", **{module: source})
    with pytest.raises(ExtensionRefused) as refused:
        stores().load_all()
    assert said in str(refused.value)
    assert "the blob store 'spoilt' of spoilt-dist 2.1" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_module_is_named(site: Path) -> None:
    write_distribution(site, "spoilt-dist", {GROUP: {"spoilt": "no_such_module_at_all:Store"}})
    with pytest.raises(ExtensionRefused, match="ModuleNotFoundError: No module named 'no_such_module_at_all'"):
        stores().find("spoilt")


def test_wrong_product_is_named(site: Path) -> None:
    write_distribution(site, "odd-dist", {GROUP: {"odd": "store_odd:other"}}, store_odd=STORE)
    with pytest.raises(ExtensionRefused) as refused:
        stores().make("odd", "odd://x")
    said = "the blob store 'odd' of odd-dist 1.0 returned an object of type dict instead of BlobStore"
    assert str(refused.value) == said


def test_own_errors_pass_and_others_are_named(site: Path) -> None:
    write_distribution(site, "own-errors", {GROUP: {"own": "store_own:Store"}}, store_own=STORE)
    with pytest.raises(InvalidBlobUrl, match="the blob URL is bad"):
        stores().make("own", "own://bad")
    with pytest.raises(ExtensionRefused, match=r"the blob store 'own' of own-errors 1\.0 failed: KeyError: 'disk'"):
        stores().make("own", "own://broken")


def test_name_that_two_distributions_offer_is_refused(site: Path) -> None:
    for name in ("first-dist", "second-dist"):
        write_distribution(site, name, {GROUP: {"twice": "store_twice:Store"}}, store_twice=STORE)
    with pytest.raises(ExtensionRefused) as refused:
        _ = stores().names
    assert str(refused.value).startswith("the blob store 'twice' is offered twice, by ")
    assert "first-dist 1.0" in str(refused.value)
    assert "second-dist 1.0" in str(refused.value)


def test_of_one_distribution_installed_twice_the_first_on_the_path_counts(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_distribution(site, "same-dist", {GROUP: {"same": "store_same:Store"}}, "1.0", store_same=STORE)
    later = tmp_path / "later"
    write_distribution(later, "same-dist", {GROUP: {"same": "store_same:Store"}}, "2.0", store_same="raise KeyError")
    monkeypatch.syspath_prepend(later)
    monkeypatch.syspath_prepend(site)
    (loaded,) = stores().load_all()
    assert loaded.distribution == "same-dist 1.0"


@pytest.mark.parametrize("name", ["file", "s3"])
def test_name_of_a_built_in_part_is_refused(site: Path, name: str) -> None:
    write_distribution(site, "greedy-dist", {GROUP: {name: "store_greedy:Store"}}, store_greedy=STORE)
    with pytest.raises(ExtensionRefused, match=f"'{name}' of greedy-dist 1.0 has the name of a built-in blob store"):
        _ = stores().names


@pytest.mark.parametrize("name", ["Upper", "two words", "ä", "-x", "x" * 65])
def test_unusable_name_is_refused(site: Path, name: str) -> None:
    write_distribution(site, "named-dist", {GROUP: {name: "store_named:Store"}}, store_named=STORE)
    with pytest.raises(ExtensionRefused, match=r"of named-dist 1\.0 cannot have this name"):
        _ = stores().names


def test_every_unusable_extension_is_reported(site: Path) -> None:
    entries = {"a": "store_every:Store", "b": "store_every:NUMBER", "c": "store_every:nothing"}
    write_distribution(site, "every-dist", {GROUP: entries}, store_every=STORE)
    found = [type(one).__name__ for one in stores().try_all()]
    assert found == ["Extension", "ExtensionRefused", "ExtensionRefused"]


def test_blob_store_of_an_extension_is_opened(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(site, "url-dist", {GROUP: {"url+x": "store_url:Store"}}, store_url=STORE)
    monkeypatch.setattr("loramux.adapter_store.blobs.blob_url.BLOB_STORES", stores())
    assert open_blob_store("url+x://anything").put("k/one", b"1")
    with pytest.raises(InvalidBlobUrl, match=r"use file://DIRECTORY or s3://BUCKET/PREFIX or url\+x://\.\.\."):
        open_blob_store("gs://bucket")


def test_no_extension_is_installed_with_loramux() -> None:
    assert BLOB_STORES.group == GROUP
