from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from loramux.adapter_store.errors import AdapterRejected, UploadRefused
from loramux.adapter_store.formats.files.file_names import (
    FURTHER_FILES,
    GENERATION_FILE,
    PARSERS_FILE,
    POOLING_FILE,
    TEMPLATE_FILE,
    VOCABULARY_FILE,
)
from loramux.adapter_store.formats.version_files.added_vocabulary import (
    AddedToken,
    AddedVocabulary,
    SpecialTokens,
    encode_added_vocabulary,
)
from loramux.adapter_store.formats.version_files.further_files import version_digest
from loramux.adapter_store.ingest.export import VersionExport
from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.registry.version_files import read_further_files
from loramux.migrations.database import Database
from loramux.migrations.schema import adapter_version_files
from tests.adapter_store.ingest.ingest_world import DirectValidator, FailingBlobStore, IngestWorld
from tests.adapter_store.small_base import VOCAB_SIZE

TEMPLATE = b"{% for message in messages %}{{ message.content }}{% endfor %}"
SETTINGS = b'{"temperature": 0.5, "top_k": null, "eos_token_id": [1, 2]}'
PARSERS = b'{"tool_call_parser": "pythonic"}'
VOCABULARY = encode_added_vocabulary(
    AddedVocabulary(VOCAB_SIZE, (AddedToken(68, "<|ü|>", True, False, False, False, False),))
)
FURTHER = {
    TEMPLATE_FILE: TEMPLATE,
    GENERATION_FILE: SETTINGS,
    PARSERS_FILE: PARSERS,
    VOCABULARY_FILE: VOCABULARY,
    POOLING_FILE: b'{"pooling": "mean"}',
}


def test_equal_weights_with_another_template_are_another_version(world: IngestWorld, make_adapter: Any) -> None:
    plain = world.push(make_adapter())
    first = world.push(make_adapter(), **{TEMPLATE_FILE: TEMPLATE})
    second = world.push(make_adapter(), **{TEMPLATE_FILE: TEMPLATE + b" "})
    third = world.push(make_adapter(), **FURTHER)
    versions = [plain, first, second, third]
    assert [version.number for version in versions] == [1, 2, 3, 4]
    assert {version.digest for version in versions} == {plain.digest}
    assert plain.version_digest == plain.digest
    assert len({version.version_digest for version in versions}) == 4
    world.assert_nothing_left_over(*versions)
    for version in versions:
        assert version.version_digest is not None
        ref = world.registry.resolve("acme", "support", digest_prefix=version.version_digest)
        assert ref is not None
        assert (ref.version, ref.digest, ref.version_digest) == (version.number, plain.digest, version.version_digest)


def test_version_digest_covers_the_weights_and_each_file(world: IngestWorld, make_adapter: Any) -> None:
    version = world.push(make_adapter(), **FURTHER)
    named = [f"{name} {hashlib.sha256(FURTHER[name]).hexdigest()}" for name in FURTHER_FILES]
    lines = "".join(f"{line}\n" for line in (version.digest, *named))
    assert version.version_digest == hashlib.sha256(lines.encode()).hexdigest()
    assert version.report["chat_template"] == {"sha256": hashlib.sha256(TEMPLATE).hexdigest(), "size": len(TEMPLATE)}
    assert version.report["generation_config"] == {"temperature": 0.5, "eos_token_id": [1, 2]}
    assert version.report["parsers"] == {"tool_call_parser": "pythonic"}
    assert version.report["pooling"] == {"pooling": "mean", "normalize": True}
    assert version.report["added_vocabulary"] == {"vocab_size": VOCAB_SIZE, "tokens": {"<|ü|>": 68}}


def test_a_copy_of_the_bases_template_is_kept_but_not_reported(world: IngestWorld, make_adapter: Any) -> None:
    copies = [TEMPLATE.decode()]
    world.ingest = Ingest(
        world.registry,
        world.blobs,
        world.target,
        world.scratch,
        world.validator,
        check_template=lambda source, special_tokens: source not in copies,
    )
    version = world.push(make_adapter(), **{TEMPLATE_FILE: TEMPLATE})
    assert "chat_template" not in version.report
    assert read_further_files(world.registry.database, version.id) == {TEMPLATE_FILE: TEMPLATE}
    assert "chat_template" in world.push(make_adapter(), **{TEMPLATE_FILE: TEMPLATE + b"!"}).report


def test_settings_without_effect_are_reported(world: IngestWorld, make_adapter: Any) -> None:
    version = world.push(make_adapter(), **{GENERATION_FILE: b'{"stop_strings": ["x"], "num_beams": 4}'})
    [warning] = [one for one in version.report["warnings"] if one["code"] == "generation_settings_ignored"]
    assert (warning["count"], set(warning["params"])) == (2, {"stop_strings", "num_beams"})


def test_version_digests_without_parsers_are_those_of_earlier_releases() -> None:
    checksums = {TEMPLATE_FILE: "b" * 64, GENERATION_FILE: "c" * 64}
    assert version_digest("a" * 64, checksums) == "9330f84fb7f0211f56acc208ea7e0d6a4a09c4e143f8e2b07f903d780fa35559"
    assert version_digest("a" * 64, {}) == "a" * 64


def test_identical_weights_and_files_return_the_existing_version(world: IngestWorld, make_adapter: Any) -> None:
    first = world.push(make_adapter(), **FURTHER)
    assert world.push(make_adapter(), **dict(reversed(FURTHER.items()))) == first
    assert world.push(make_adapter()).number == 2
    world.ingest.remove_abandoned()
    assert not list(world.blobs.list_keys("uploads/"))


def test_optional_files_are_exported_as_uploaded(
    world: IngestWorld, make_adapter: Any, database: Database, tmp_path: Path
) -> None:
    version = world.push(make_adapter(), **FURTHER)
    export = VersionExport(database, world.blobs, tmp_path / "export")
    assert {file.name for file in export.files(version)} >= set(FURTHER)
    for name, content in FURTHER.items():
        with export.open(version, name) as file:
            assert b"".join(file.chunks()) == content


REFUSED = [
    pytest.param(TEMPLATE_FILE, b"{% for %}", "invalid_template", TEMPLATE_FILE, id="syntax"),
    pytest.param(TEMPLATE_FILE, b"\xff", "invalid_template", TEMPLATE_FILE, id="not UTF-8"),
    pytest.param(TEMPLATE_FILE, b"{{ " + b"(" * 60_000, "invalid_template", TEMPLATE_FILE, id="nesting"),
    pytest.param(TEMPLATE_FILE, b"{{ " + b"1" * 5_000 + b" }}", "invalid_template", TEMPLATE_FILE, id="digits"),
    pytest.param(TEMPLATE_FILE, b"{% " + b"x" * 60_000 + b" %}", "invalid_template", TEMPLATE_FILE, id="long tag"),
    pytest.param(GENERATION_FILE, b"[]", "invalid_generation_config", GENERATION_FILE, id="no object"),
    pytest.param(GENERATION_FILE, b"{", "invalid_json", GENERATION_FILE, id="no JSON"),
    pytest.param(GENERATION_FILE, b'{"top_p": NaN}', "invalid_json", GENERATION_FILE, id="NaN"),
    pytest.param(GENERATION_FILE, b'{"a": 1, "a": 2}', "duplicate_key", "a", id="key twice"),
    pytest.param(GENERATION_FILE, b'{"temperature": -1}', "invalid_generation_config", "temperature", id="setting"),
    pytest.param(GENERATION_FILE, b'{"eos_token_id": "1"}', "invalid_generation_config", "eos_token_id", id="end"),
    pytest.param(VOCABULARY_FILE, b"{}", "invalid_vocabulary", VOCABULARY_FILE, id="no vocabulary"),
    pytest.param(VOCABULARY_FILE, b'{"\xff": 1}', "invalid_json", VOCABULARY_FILE, id="no UTF-8 in a vocabulary"),
    pytest.param(POOLING_FILE, b"{}", "invalid_pooling", POOLING_FILE, id="no pooling"),
    pytest.param(POOLING_FILE, b'{"pooling": "max"}', "invalid_pooling", "pooling", id="another pooling"),
    pytest.param(POOLING_FILE, b'{"pooling": ["mean"]}', "invalid_pooling", "pooling", id="a list of poolings"),
    pytest.param(POOLING_FILE, b'{"pooling": "cls", "normalize": 1}', "invalid_pooling", "normalize", id="a number"),
    pytest.param(POOLING_FILE, b'{"pooling": "cls", "a": 1}', "invalid_pooling", POOLING_FILE, id="another key"),
    pytest.param(POOLING_FILE, b"[", "invalid_json", POOLING_FILE, id="no JSON of pooling"),
    pytest.param(PARSERS_FILE, b"{}", "invalid_parsers", PARSERS_FILE, id="no parser"),
    pytest.param(PARSERS_FILE, b"[1]", "invalid_parsers", PARSERS_FILE, id="no object of parsers"),
    pytest.param(PARSERS_FILE, b'"', "invalid_json", PARSERS_FILE, id="no JSON of parsers"),
    pytest.param(PARSERS_FILE, b'{"reasoning_parser": null}', "invalid_parsers", "reasoning_parser", id="null"),
    pytest.param(PARSERS_FILE, b'{"tool_call_parser": []}', "invalid_parsers", "tool_call_parser", id="list"),
    pytest.param(PARSERS_FILE, b'{"tool_call_parser": "x"}', "invalid_parsers", "tool_call_parser", id="unknown"),
    pytest.param(PARSERS_FILE, b'{"tool_parser": "off"}', "invalid_parsers", "tool_parser", id="unknown setting"),
]


@pytest.mark.parametrize(("name", "content", "code", "param"), REFUSED)
def test_bad_file_rejects_the_version_and_leaves_nothing(
    world: IngestWorld, make_adapter: Any, name: str, content: bytes, code: str, param: str
) -> None:
    version = world.push(make_adapter(), **{name: content})
    assert version.state == "rejected"
    assert (version.report["error"]["code"], version.report["error"]["param"]) == (code, param)
    assert len(version.report["error"]["message"]) < 300
    assert read_further_files(world.registry.database, version.id) == {}
    world.assert_nothing_left_over()


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [(TEMPLATE_FILE, 65_537), (GENERATION_FILE, 16_385), (PARSERS_FILE, 1_025), (VOCABULARY_FILE, 131_073)],
)
def test_large_file_is_refused_when_declared(world: IngestWorld, make_adapter: Any, name: str, num_bytes: int) -> None:
    files = make_adapter()
    with pytest.raises(UploadRefused) as refused:
        world.announce(files.config_bytes, files.tensor_bytes, **{name: b" " * num_bytes})
    assert (refused.value.code, refused.value.param) == ("file_too_large", "size")
    world.announce(files.config_bytes, files.tensor_bytes, **{name: b" " * (num_bytes - 1)})


def test_template_check_from_outside_can_reject_a_template(world: IngestWorld, make_adapter: Any) -> None:
    seen = []

    def refuse(source: str, special_tokens: SpecialTokens) -> bool:
        seen.append(source)
        raise AdapterRejected("template_too_slow", "the template takes too long", TEMPLATE_FILE)

    ingest = Ingest(world.registry, world.blobs, world.target, world.scratch, world.validator, check_template=refuse)
    world.ingest = ingest
    version = world.push(make_adapter(), **FURTHER)
    assert version.report["error"]["code"] == "template_too_slow"
    assert seen == [TEMPLATE.decode()]
    assert world.push(make_adapter(seed=1)).state == "ready", "only a template is checked"


def test_accepted_files_survive_a_failing_store(
    open_world: Callable[..., IngestWorld], make_adapter: Any, database: Database
) -> None:
    blobs = FailingBlobStore()
    world = open_world(blobs, DirectValidator())
    upload = world.upload(make_adapter().config_bytes, make_adapter().tensor_bytes, **FURTHER)
    version = world.ingest.create_version(world.adapter_id, upload.id)
    for num_calls in range(4):
        blobs.num_calls = num_calls
        with pytest.raises(Exception, match="the store is down"):
            world.ingest.process(version.id)
        with database.read() as connection:
            rows = connection.execute(select(func.count()).select_from(adapter_version_files)).scalar_one()
        assert rows == 5, "a retry replaces the files"
        assert world.registry.resolve("acme", "support") is None
    blobs.num_calls = 1_000_000
    ready = world.ingest.process(version.id)
    assert ready.state == "ready"
    assert read_further_files(database, version.id) == FURTHER
    world.assert_nothing_left_over(ready)


def test_janitor_keeps_the_files_of_an_open_upload_and_deletes_those_of_a_cancelled_one(
    world: IngestWorld, make_adapter: Any
) -> None:
    files = make_adapter()
    upload = world.upload(files.config_bytes, files.tensor_bytes, **FURTHER)
    world.ingest.remove_abandoned()
    assert len(list(world.blobs.list_keys("uploads/"))) == 7
    world.ingest.cancel_upload(world.adapter_id, upload.id)
    assert not list(world.blobs.list_keys("uploads/"))
