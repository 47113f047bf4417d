"""A repository's files are read at one commit, verified, and refused if anything differs from the declaration."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import HfApi, hf_hub_download, hf_hub_url
from safetensors.numpy import load, save

from loramux.adapter_store.errors import AdapterRejected, Refused, SourceUnavailable, UploadRefused
from loramux.adapter_store.formats.packed.sharded_tensors import INDEX_FILE
from loramux.adapter_store.hub import hub_client
from loramux.adapter_store.hub.hub_client import HubClient
from loramux.adapter_store.sources.adapter_sources import AdapterSources, Source
from loramux.adapter_store.sources.sharded_source import JoinedSource
from tests.adapter_store.adapter_files import AdapterMaker
from tests.adapter_store.formats.mlx.mlx_files import write_mlx, write_tensors
from tests.adapter_store.hub.local_hub import TOKEN, Answer, LocalHub, running_hub
from tests.adapter_store.small_base import make_target

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
FILES = {CONFIG: b'{"r": 8}', TENSORS: bytes(range(256)) * 40, "README.md": b"# A model", "optimizer.pt": b"\x80"}
LARGEST = 1 << 20
TARGET = make_target()


@pytest.fixture(scope="module")
def server() -> Iterator[LocalHub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def hub(server: LocalHub) -> LocalHub:
    """An empty hub without faults."""
    for part in (server.commits, server.revisions, server.private, server.renamed, server.faults, server.requests):
        part.clear()
    server.push("acme/support", FILES)
    return server


@pytest.fixture
def sources(hub: LocalHub) -> AdapterSources:
    return AdapterSources(["hf://acme", "hf://rival/open"], hub=HubClient(hub.url))


def opened(sources: AdapterSources, url: str = "hf://acme/support@main") -> Source:
    return sources.open(sources.pin(url))


def fetched(source: Source, directory: Path) -> dict[str, bytes]:
    """The two required files."""
    for name in (CONFIG, TENSORS):
        source.fetch_file(name, directory / name, source.size(name, LARGEST))
    return {name: (directory / name).read_bytes() for name in (CONFIG, TENSORS)}


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(Refused) as error:
        call()
    return error.value.code


def test_local_hub_answers_as_huggingface_hub_expects(hub: LocalHub, tmp_path: Path) -> None:
    ours, theirs = HubClient(hub.url), HfApi(endpoint=hub.url, token=False)
    commit = ours.resolve("acme/support", "main")
    assert theirs.model_info("acme/support", revision="main", expand=["sha"]).sha == commit
    names = [CONFIG, TENSORS, "absent.json"]
    found = {one.path: one for one in theirs.get_paths_info("acme/support", names, revision=commit)}
    files = ours.files("acme/support", commit, names)
    assert files.keys() == found.keys() == {CONFIG, TENSORS}
    large = found[TENSORS].lfs  # type: ignore[union-attr]
    assert large is not None
    assert (files[TENSORS].size, files[TENSORS].digest.value) == (large.size, large.sha256)
    assert (files[CONFIG].size, files[CONFIG].digest.value) == (len(FILES[CONFIG]), found[CONFIG].blob_id)  # type: ignore[union-attr]
    for name in (CONFIG, TENSORS):
        path = hf_hub_download("acme/support", name, revision=commit, endpoint=hub.url, cache_dir=tmp_path, token=False)
        assert Path(path).read_bytes() == b"".join(ours.chunks("acme/support", commit, name, files[name].size))
        last = hf_hub_url("acme/support", name, revision=commit, endpoint=hub.url).removeprefix(hub.url)
        assert last in [path for path, _ in hub.requests]


def test_files_are_read_at_the_pinned_commit(hub: LocalHub, sources: AdapterSources, tmp_path: Path) -> None:
    commit = hub.revisions["acme/support", "main"]
    pinned = sources.pin("hf://acme/support@main")
    assert pinned == f"hf://acme/support@main#{commit}"
    assert sources.pin(pinned) == pinned
    source = sources.open(pinned)
    # A push between the listing and the download changes nothing, because the files are read by commit.
    hub.push("acme/support", {**FILES, TENSORS: b"other"})
    assert fetched(source, tmp_path) == {name: FILES[name] for name in (CONFIG, TENSORS)}
    assert source.facts == {"source_commit": commit}
    assert not any(source.has(name) for name in ("chat_template.jinja", "README.md", "optimizer.pt"))
    assert not any("README" in path or "optimizer" in path for path, _ in hub.requests)


def test_optional_files_are_found(hub: LocalHub, sources: AdapterSources, tmp_path: Path) -> None:
    hub.push("acme/support", {**FILES, "chat_template.jinja": b"{{ messages }}", "chat_template.json": b"{}"}, "v1")
    source = opened(sources, "hf://acme/support@v1")
    assert source.has("chat_template.jinja")
    assert source.has("chat_template.json")
    source.fetch_file("chat_template.jinja", tmp_path / "template", 64)
    assert (tmp_path / "template").read_bytes() == b"{{ messages }}"


SHARDS = tuple(f"adapter_model-0000{number}-of-00002.safetensors" for number in (1, 2))


def sharded_files() -> dict[str, bytes]:
    tensors = {name: {f"tensor{i}": np.full((i + 1, 2), i, np.float32)} for i, name in enumerate(SHARDS)}
    index = {"weight_map": {tensor: name for name, shard in tensors.items() for tensor in shard}}
    return {CONFIG: b"{}", INDEX_FILE: json.dumps(index).encode()} | {name: save(tensors[name]) for name in SHARDS}


def test_shards_are_fetched_and_joined(hub: LocalHub, sources: AdapterSources, tmp_path: Path) -> None:
    hub.push("acme/support", sharded_files())
    source = JoinedSource(opened(sources), tmp_path, TARGET)
    files = fetched(source, tmp_path)
    assert {name: tensor.shape for name, tensor in load(files[TENSORS]).items()} == {
        "tensor0": (1, 2),
        "tensor1": (2, 2),
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, TENSORS]


def test_an_adapter_of_mlx_is_converted(hub: LocalHub, sources: AdapterSources, tmp_path: Path) -> None:
    files = AdapterMaker(TARGET)(rank=3)
    directory = write_mlx(tmp_path / "mlx", files)
    hub.push("acme/support", {path.name: path.read_bytes() for path in directory.iterdir()})
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    source = JoinedSource(opened(sources), scratch, TARGET)
    for name in (CONFIG, TENSORS):
        source.fetch_file(name, scratch / name, source.size(name, 1 << 20))
    found = load((scratch / TENSORS).read_bytes())
    assert {name: values.tolist() for name, values in found.items()} == {
        name: values.tolist() for name, values in files.tensors.items()
    }
    assert json.loads((scratch / CONFIG).read_text())["r"] == 3
    assert sorted(path.name for path in scratch.iterdir()) == [CONFIG, TENSORS]


def test_an_adapter_of_mlx_is_converted_for_the_servers_base(
    hub: LocalHub, sources: AdapterSources, tmp_path: Path
) -> None:
    tensors = {"model.embed_tokens.lora_a": np.ones((70, 2)), "model.embed_tokens.lora_b": np.ones((2, 32))}
    directory = write_tensors(tmp_path / "mlx", tensors, rank=2, scale=2.0)
    hub.push("acme/support", {path.name: path.read_bytes() for path in directory.iterdir()})
    for is_tied in (False, True):
        scratch = tmp_path / str(is_tied)
        scratch.mkdir()
        source = JoinedSource(opened(sources), scratch, replace(TARGET, tied_embeddings=is_tied))
        for name in (CONFIG, TENSORS):
            source.fetch_file(name, scratch / name, source.size(name, 1 << 20))
        names = load((scratch / TENSORS).read_bytes())
        assert any("lm_head" in name for name in names) is is_tied


def test_a_missing_or_foreign_shard_is_refused(hub: LocalHub, sources: AdapterSources, tmp_path: Path) -> None:
    files = sharded_files()
    hub.push("acme/support", {name: content for name, content in files.items() if name != SHARDS[1]})
    with pytest.raises(AdapterRejected) as error:
        fetched(JoinedSource(opened(sources), tmp_path, TARGET), tmp_path)
    assert (error.value.code, error.value.param) == ("source_not_found", SHARDS[1])
    hub.push("acme/support", {**files, INDEX_FILE: files[INDEX_FILE].replace(SHARDS[1].encode(), b"../optimizer.pt")})
    assert code_of(lambda: fetched(JoinedSource(opened(sources), tmp_path, TARGET), tmp_path)) == "invalid_index"
    assert not any("optimizer" in path for path, _ in hub.requests)


def test_shards_count_together(hub: LocalHub, sources: AdapterSources, tmp_path: Path) -> None:
    files = sharded_files()
    hub.push("acme/support", files)
    source = JoinedSource(opened(sources), tmp_path, TARGET)
    total = sum(len(files[name]) for name in SHARDS)
    assert source.size(TENSORS, total) == total
    assert code_of(lambda: source.size(TENSORS, total - 1)) == "file_too_large"


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/3", "feature/one"])
def test_revision_that_moved_is_refused(hub: LocalHub, sources: AdapterSources, revision: str) -> None:
    before = hub.push("acme/support", FILES, revision)
    pinned = sources.pin(f"hf://acme/support@{revision}")
    after = hub.push("acme/support", {**FILES, CONFIG: b"{}"}, revision)
    with pytest.raises(AdapterRejected) as error:
        sources.open(pinned)
    assert (error.value.code, error.value.param) == ("source_moved", "source")
    assert before in error.value.message
    assert after in error.value.message
    assert code_of(lambda: sources.pin(pinned)) == "source_moved"


def test_commit_that_a_force_push_removed_is_refused(hub: LocalHub, sources: AdapterSources) -> None:
    commit = hub.revisions["acme/support", "main"]
    pinned = sources.pin(f"hf://acme/support@{commit}")
    del hub.revisions["acme/support", commit]
    assert code_of(lambda: sources.open(pinned)) == "source_not_found"


def test_renamed_repository_is_refused(hub: LocalHub, sources: AdapterSources) -> None:
    hub.push("evil/support", FILES)
    hub.renamed["acme/support"] = "evil/support"
    assert code_of(lambda: sources.pin("hf://acme/support@main")) == "source_moved"
    assert not any("evil" in path for path, _ in hub.requests)


def test_private_repository_needs_the_token(hub: LocalHub, sources: AdapterSources, tmp_path: Path) -> None:
    hub.private.add("acme/support")
    assert code_of(lambda: sources.pin("hf://acme/support@main")) == "source_unauthorized"
    allowed = AdapterSources(["hf://acme"], hub=HubClient(hub.url + "/", TOKEN))
    assert fetched(opened(allowed), tmp_path)[TENSORS] == FILES[TENSORS]
    sent = {path.startswith("/store/"): authorization for path, authorization in hub.requests[-4:]}
    assert sent == {False: f"Bearer {TOKEN}", True: ""}, "the token stays with the hub"


@pytest.mark.parametrize("status", [403, 404, 410, 400])
def test_refusal_of_the_hub_is_final(hub: LocalHub, sources: AdapterSources, status: int) -> None:
    hub.faults["/revision/"] = lambda answer: setattr(answer, "status", status)
    expected = "source_unauthorized" if status == 403 else "source_not_found"
    assert code_of(lambda: sources.pin("hf://acme/support@main")) == expected


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("part", ["/revision/", "/paths-info/", "/resolve/", "/store/"])
def test_trouble_of_the_hub_is_temporary(
    hub: LocalHub, sources: AdapterSources, tmp_path: Path, part: str, status: int
) -> None:
    hub.faults[part] = lambda answer: setattr(answer, "status", status)
    with pytest.raises(SourceUnavailable):
        fetched(opened(sources), tmp_path)


def replaced(body: bytes) -> Callable[[Answer], None]:
    return lambda answer: setattr(answer, "body", body)


@pytest.mark.parametrize(
    ("part", "body"),
    [
        ("/revision/", b"<html>"),
        ("/revision/", b"[" * 100_000),
        ("/revision/", b"{}"),
        ("/revision/", b'{"sha": 7}'),
        ("/revision/", b'{"sha": "main"}'),
        ("/revision/", b'{"sha": "../../etc"}'),
        ("/revision/", b" " * (1 << 20)),
        ("/paths-info/", b'[{"type": "file", "path": "adapter_config.json", "size": -5, "oid": "%s"}]' % (b"0" * 40)),
        ("/paths-info/", b'[{"type": "file", "path": "adapter_config.json", "size": 5, "oid": "0"}]'),
        ("/paths-info/", b'[{"type": "file", "path": "adapter_config.json", "size": 1e99, "oid": "0"}]'),
        ("/paths-info/", b"{}"),
    ],
)
def test_malformed_answer_is_refused(hub: LocalHub, sources: AdapterSources, part: str, body: bytes) -> None:
    hub.faults[part] = replaced(body)
    with pytest.raises(SourceUnavailable):
        opened(sources)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        pytest.param(replaced(FILES[TENSORS] + b"!"), "size_mismatch", id="longer"),
        pytest.param(replaced(FILES[TENSORS][:-1]), "size_mismatch", id="shorter"),
        pytest.param(replaced(b"!" + FILES[TENSORS][1:]), "checksum_mismatch", id="changed"),
        pytest.param(replaced(b""), "size_mismatch", id="empty"),
    ],
)
def test_file_that_is_not_as_declared_is_refused(
    hub: LocalHub, sources: AdapterSources, tmp_path: Path, fault: Callable[[Answer], None], code: str
) -> None:
    hub.faults["/store/"] = fault
    assert code_of(lambda: fetched(opened(sources), tmp_path)) == code


def test_small_file_that_is_not_as_declared_is_refused(hub: LocalHub, sources: AdapterSources, tmp_path: Path) -> None:
    hub.faults["/resolve/"] = lambda answer: setattr(answer, "body", answer.body[::-1])
    assert code_of(lambda: fetched(opened(sources), tmp_path)) == "checksum_mismatch"


def test_endless_file_is_cut(hub: LocalHub, sources: AdapterSources, tmp_path: Path) -> None:
    hub.faults["/store/"] = replaced(bytes(64 << 20))
    assert code_of(lambda: fetched(opened(sources), tmp_path)) == "size_mismatch"
    assert (tmp_path / TENSORS).stat().st_size <= len(FILES[TENSORS])


def test_broken_connection_is_temporary(hub: LocalHub, sources: AdapterSources, tmp_path: Path) -> None:
    hub.faults["/store/"] = lambda answer: setattr(answer, "num_declared", len(answer.body) + 9)
    with pytest.raises(SourceUnavailable, match="RemoteProtocolError"):
        fetched(opened(sources), tmp_path)


def test_too_large_file_is_not_downloaded(hub: LocalHub, sources: AdapterSources) -> None:
    source = opened(sources)
    assert code_of(lambda: source.size(TENSORS, len(FILES[TENSORS]) - 1)) == "file_too_large"
    assert not any(path.startswith("/store/") for path, _ in hub.requests)


def test_absent_file_is_named(hub: LocalHub, sources: AdapterSources) -> None:
    hub.push("acme/support", {CONFIG: b"{}"})
    with pytest.raises(AdapterRejected) as error:
        opened(sources).size(TENSORS, LARGEST)
    assert (error.value.code, error.value.param) == ("source_not_found", TENSORS)


def test_endless_redirects_end(hub: LocalHub, sources: AdapterSources, tmp_path: Path) -> None:
    def around(answer: Answer) -> None:
        answer.status, answer.headers["location"] = 302, f"{hub.url}/acme/support/resolve/main/{CONFIG}"

    hub.faults["/resolve/"] = around
    with pytest.raises(SourceUnavailable, match="TooManyRedirects"):
        fetched(opened(sources), tmp_path)


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://[", ""])
def test_redirect_to_something_else_is_refused(
    hub: LocalHub, sources: AdapterSources, tmp_path: Path, location: str
) -> None:
    def elsewhere(answer: Answer) -> None:
        answer.status, answer.headers["location"] = 302, location

    hub.faults["/resolve/"] = elsewhere
    with pytest.raises((SourceUnavailable, AdapterRejected)):
        fetched(opened(sources), tmp_path)


def test_slow_hub_is_left(
    hub: LocalHub, sources: AdapterSources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_client, "READ_S", 0.2)
    is_left = threading.Event()
    hub.faults["/revision/"] = lambda _: is_left.wait(60)
    with pytest.raises(SourceUnavailable, match="ReadTimeout"):
        sources.pin("hf://acme/support@main")
    is_left.set()
    monkeypatch.setattr(hub_client, "READ_S", 20.0)
    monkeypatch.setattr(hub_client, "ANSWER_S", -1.0)
    hub.faults.clear()
    with pytest.raises(SourceUnavailable, match="too slowly"):
        sources.pin("hf://acme/support@main")


def test_unreachable_hub_is_temporary_and_keeps_its_secrets(hub: LocalHub) -> None:
    sources = AdapterSources(["hf://acme"], hub=HubClient("http://127.0.0.1:9", TOKEN))
    with pytest.raises(SourceUnavailable, match="ConnectError") as error:
        sources.pin("hf://acme/support@main")
    assert TOKEN not in str(error.value)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("hf://acme/support", "invalid_source"),
        ("hf://acme@main", "invalid_source"),
        ("hf://acme/support@", "invalid_source"),
        ("hf://acme/../support@main", "invalid_source"),
        ("hf://acme/support/more@main", "invalid_source"),
        ("hf://acme/support@main#abc", "invalid_source"),
        ("hf://acme/support@main?x=1", "invalid_source"),
        ("hf://acme/support@-main", "invalid_source"),
        ("hf://acme/support@main\n", "invalid_source"),
        ("hf://user:password@host/support@main", "invalid_source"),
        (f"hf://acme/support@{'a' * 200}", "invalid_source"),
        ("hf://acme-labs/support@main", "source_not_allowed"),
        ("hf://ACME/support@main", "source_not_allowed"),
        ("hf://rival/other@main", "source_not_allowed"),
        ("hf://rival/open-not@main", "source_not_allowed"),
        ("s3://acme/support", "source_not_allowed"),
    ],
)
def test_other_sources_are_refused_without_a_call(hub: LocalHub, sources: AdapterSources, url: str, code: str) -> None:
    for call in (sources.check, sources.pin, sources.open):
        with pytest.raises(UploadRefused) as error:
            call(url)
        assert (error.value.code, error.value.param) == (code, "source")
    assert hub.requests == []


def test_single_repository_can_be_allowed(hub: LocalHub, sources: AdapterSources, tmp_path: Path) -> None:
    hub.push("rival/open", FILES)
    assert fetched(opened(sources, "hf://rival/open@main"), tmp_path)[CONFIG] == FILES[CONFIG]


def test_hash_of_a_small_file_is_that_of_git(hub: LocalHub) -> None:
    files = HubClient(hub.url).files("acme/support", hub.revisions["acme/support", "main"], (CONFIG, TENSORS))
    # The output of: printf '{"r": 8}' | git hash-object --stdin
    assert files[CONFIG].digest.value == "c9f6dd3bbf764cb8853c748081e24619bf916921"
    assert files[TENSORS].digest.value == hashlib.sha256(FILES[TENSORS]).hexdigest()
