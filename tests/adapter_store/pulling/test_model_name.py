from __future__ import annotations

import time

import pytest

from loramux.adapter_store.errors import PullRefused
from loramux.adapter_store.pulling.model_name import ModelName, is_model_url

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "url", "name"),
    [
        ("acme/base", "hf://acme/base@main", "base"),
        ("hf://acme/base", "hf://acme/base@main", "base"),
        ("acme/base-1.5_x@v1.0", "hf://acme/base-1.5_x@v1.0", "base-1.5_x"),
        ("hf://acme/base@refs/pr/3", "hf://acme/base@refs/pr/3", "base"),
        (f"acme/base@{COMMIT}", f"hf://acme/base@{COMMIT}", "base"),
        ("hf://acme/base/Q4_K_M.gguf", "hf://acme/base/Q4_K_M.gguf@main", "Q4_K_M"),
        ("acme/base/Q4/b.Q4_0.gguf@v1", "hf://acme/base/Q4/b.Q4_0.gguf@v1", "b.Q4_0"),
        ("s3://bucket", "s3://bucket", "bucket"),
        ("s3://bucket/models/base/", "s3://bucket/models/base", "base"),
        ("s3://bucket/models/base.Q4_0.gguf", "s3://bucket/models/base.Q4_0.gguf", "base.Q4_0"),
    ],
)
def test_name(text: str, url: str, name: str) -> None:
    parsed = ModelName.parse(text)
    assert (parsed.url, parsed.name) == (url, name)
    assert ModelName.parse(parsed.url) == parsed


def test_gguf_file_in_a_bucket_is_below_its_prefix() -> None:
    parsed = ModelName.parse("s3://bucket/a/b/c.gguf")
    assert (parsed.place, parsed.file) == ("bucket/a/b", "c.gguf")


@pytest.mark.parametrize(
    "text",
    [
        *("", "base", "hf://base", "acme/", "/acme/base", "acme/base@", "acme/base/", "acme/base/config.json", "a//b"),
        *("acme/../base", "acme/base/../x.gguf", "acme/base/.x.gguf", "hf://acme/base@-x", "hf://acme/base#x", "a b/c"),
        *("s3://", "s3://B/x", "s3://bucket/../x", "s3://bucket/a//b", "https://x/y", "gs://bucket/x", "acme/base\n"),
        *("hf://user:secret@host/x", "acme/\u202ebase", "a" * 96 + "x/b", "a/b/" + "x" * 300 + ".gguf"),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(PullRefused) as error:
        ModelName.parse(text)
    assert error.value.code == "invalid_model"
    assert "\u202e" not in error.value.message


def test_long_texts_are_refused_at_once() -> None:
    started = time.thread_time()
    for text in ("hf://a/b/" + "a/" * 500_000 + ".gguf", "s3://abc/" + "a/" * 500_000, "a" * 1_000_000):
        with pytest.raises(PullRefused) as error:
            ModelName.parse(text)
        assert len(error.value.message) < 1000
    assert time.thread_time() - started < 1


def test_all_splits_are_named_by_any() -> None:
    expected = tuple(f"a-{number:05}-of-00003.gguf" for number in (1, 2, 3))
    assert ModelName.parse("acme/base/a-00002-of-00003.gguf").files == expected
    for wrong in ("a-00004-of-00003.gguf", "a-00000-of-00003.gguf", "a-00001-of-99999.gguf"):
        with pytest.raises(PullRefused):
            _ = ModelName.parse(f"acme/base/{wrong}").files


def test_urls_are_told_from_paths() -> None:
    assert is_model_url("hf://a/b")
    assert is_model_url("s3://b")
    assert not any(map(is_model_url, ("a/b", "./hf", "/models/x", "hf", "C:\\x")))
