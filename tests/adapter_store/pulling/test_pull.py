"""A pull fetches the files that a server reads, at one commit, verified, and only those that are not there yet."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from loramux.adapter_store.errors import PullRefused, Refused
from loramux.adapter_store.pulling.model_cache import ModelCache, PulledModel, in_use
from loramux.adapter_store.pulling.model_name import ModelName
from tests.adapter_store.hub.local_hub import TOKEN, Answer, LocalHub
from tests.adapter_store.pulling.pulled import BASE, FILES, NEEDED, SHARDS, WEIGHTS, Pulls, contents

NAME = ModelName.parse(f"hf://{BASE}")


def code_of(call: object) -> str:
    with pytest.raises(Refused) as error:
        call()
    return error.value.code


def found(pulls: Pulls) -> PulledModel:
    model = pulls.find()
    assert model is not None
    return model


def downloads(hub: LocalHub) -> list[str]:
    return [path for path, _ in hub.requests if path.startswith("/store/")]


def test_only_the_needed_files_are_fetched(hub: LocalHub, pulls: Pulls, tmp_path: Path) -> None:
    commit = hub.revisions[BASE, "main"]
    model = pulls()
    assert model.path == tmp_path / "models" / "hf" / "acme" / "tiny-base" / commit
    assert contents(model.path) == NEEDED
    asked = "".join(path for path, _ in hub.requests)
    assert not any(name in asked for name in set(FILES).difference(NEEDED))
    assert (model.record.commit, model.num_bytes) == (commit, sum(map(len, NEEDED.values())))


def test_pulled_model_is_found_without_the_hub(hub: LocalHub, pulls: Pulls) -> None:
    assert pulls.find() is None
    model = pulls()
    hub.requests.clear()
    assert pulls.find() == pulls.find(f"{BASE}@main") == pulls.find(f"{BASE}@{model.record.commit}") == model
    assert pulls.find(f"{BASE}@v2") is None
    assert not hub.requests
    pulls()
    assert [path for path, _ in hub.requests if "/resolve/" in path] == [
        f"/{BASE}/resolve/{model.record.commit}/model.safetensors.index.json"
    ], "a second pull asks only which files there are"


def test_plan_names_files_and_bytes(hub: LocalHub, pulls: Pulls) -> None:
    plan = pulls.puller.plan(NAME)
    assert {file.name: file.size for file in plan.files} == {name: len(content) for name, content in NEEDED.items()}
    assert (plan.num_bytes, plan.missing_bytes, plan.is_complete) == (plan.num_bytes, plan.num_bytes, False)
    assert not downloads(hub)
    assert not plan.directory.exists()
    pulls()
    again = pulls.puller.plan(NAME)
    assert (again.missing_bytes, again.is_complete) == (0, True)


def test_moved_revision_is_pulled_again_and_equal_files_are_reused(hub: LocalHub, pulls: Pulls) -> None:
    before = pulls()
    after_commit = hub.push(BASE, {**FILES, SHARDS[1]: b"other weights"})
    assert pulls.find() == before, "what was pulled stays until it is pulled again"
    hub.requests.clear()
    assert pulls.puller.plan(NAME).missing_bytes == len(b"other weights")
    after = pulls()
    assert (after.record.commit, contents(after.path)) == (after_commit, {**NEEDED, SHARDS[1]: b"other weights"})
    assert downloads(hub) == [f"/store/{BASE}/{after_commit}/{SHARDS[1]}"]
    assert pulls.find() == after
    assert contents(before.path) == NEEDED
    old = pulls.find(f"{BASE}@{before.record.commit}")
    assert old is not None
    assert old.path == before.path


def test_small_files_that_an_earlier_release_left_out_are_added(hub: LocalHub, pulls: Pulls) -> None:
    before = pulls()
    left_out = ("modules.json", "1_Pooling/config.json")
    for name in left_out:
        (before.path / name).unlink()
    (before.path / "1_Pooling").rmdir()
    record = before.path.parent / "pulled.json"
    record.write_text(record.read_text().replace(',"selection":2', ""))
    before = found(pulls)
    assert before.may_lack_files
    weights = before.path / SHARDS[0]
    written_ns = weights.stat().st_mtime_ns
    assert pulls.find() == before, "a server does not ask the hub"
    plan = pulls.puller.plan(NAME)
    assert (plan.is_complete, plan.missing_bytes) == (False, sum(len(NEEDED[name]) for name in left_out))
    after = pulls(before.name.url)
    assert (contents(after.path), after.may_lack_files) == (NEEDED, False)
    assert pulls.find() == after, "the revision leads to the same directory"
    assert weights.stat().st_mtime_ns == written_ns
    assert pulls.puller.plan(NAME).is_complete
    assert not list((before.path.parent / "unfinished").iterdir())


def test_adding_small_files_leaves_space_and_keeps_them_private(
    hub: LocalHub, pulls: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pulls()
    (model.path / "modules.json").unlink()
    modes: list[int] = []
    unfinished = model.path.parent / "unfinished" / model.path.name

    def watch(name: str, num_bytes: int) -> None:
        modes.append(unfinished.stat().st_mode & 0o777)

    plan = pulls.puller.plan(NAME)
    with monkeypatch.context() as patched:
        patched.setattr("loramux.adapter_store.pulling.pull.RESERVE_BYTES", 1 << 62)
        assert code_of(lambda: pulls.puller.carry_out(plan)) == "disk_full"
    assert pulls.puller.carry_out(plan, watch).path == model.path
    assert modes == [0o700]


def test_folders_without_a_list_of_steps_are_left_out(hub: LocalHub, pulls: Pulls) -> None:
    hub.push(BASE, {name: content for name, content in FILES.items() if name != "modules.json"})
    assert "1_Pooling/config.json" not in contents(pulls().path)


def test_hub_that_answers_with_another_commit_is_refused(hub: LocalHub, pulls: Pulls) -> None:
    commit = hub.revisions[BASE, "main"]
    other = hub.push(BASE, {**FILES, "config.json": b"{}"})
    hub.revisions[BASE, commit] = other
    assert code_of(lambda: pulls(f"{BASE}@{commit}")) == "source_moved"
    assert not downloads(hub)


def test_push_during_a_pull_changes_nothing(hub: LocalHub, pulls: Pulls) -> None:
    plan = pulls.puller.plan(NAME)
    hub.push(BASE, {**FILES, SHARDS[0]: b"other weights"})
    assert contents(pulls.puller.carry_out(plan).path) == NEEDED


def test_unfit_model_is_refused_before_its_weights_are_fetched(hub: LocalHub, pulls: Pulls) -> None:
    class Unfit(Exception):
        pass

    def refuse(directory: Path) -> None:
        assert contents(directory) == {name: content for name, content in NEEDED.items() if name not in WEIGHTS}
        raise Unfit

    with pytest.raises(Unfit):
        pulls.puller.carry_out(pulls.puller.plan(NAME), accept=refuse)
    assert not downloads(hub)
    assert pulls.find() is None


def test_mirror_without_metadata_is_asked_file_by_file(hub: LocalHub, pulls: Pulls) -> None:
    hub.has_metadata = False
    assert contents(pulls().path) == NEEDED
    hub.has_resolve_cache = False
    again = Pulls(dataclasses.replace(pulls.settings, models_dir=pulls.settings.models_dir / "again"))
    assert contents(again().path) == NEEDED


def test_private_repository_needs_the_token(hub: LocalHub, pulls: Pulls) -> None:
    hub.private.add(BASE)
    assert code_of(pulls) == "source_unauthorized"
    allowed = Pulls(dataclasses.replace(pulls.settings, token=TOKEN))
    assert contents(allowed().path) == NEEDED
    assert {authorization for path, authorization in hub.requests if path.startswith("/store/")} == {""}


def test_gated_repository_is_explained(hub: LocalHub, pulls: Pulls) -> None:
    def gate(answer: Answer) -> None:
        answer.status, answer.headers = 403, {"x-error-code": "GatedRepo"}

    hub.faults["/revision/"] = gate
    with pytest.raises(Refused, match="accept its terms"):
        pulls()


GGUF = {"Q4/big-Q4_K_M-00001-of-00002.gguf": b"GGUF one", "Q4/big-Q4_K_M-00002-of-00002.gguf": b"GGUF two"}


def test_gguf_file_and_its_splits_are_fetched(hub: LocalHub, pulls: Pulls) -> None:
    hub.push("acme/big", {**GGUF, "big-Q8_0.gguf": b"GGUF eight", "config.json": b"{}", "mmproj.gguf": b"GGUF"})
    model = pulls("acme/big/Q4/big-Q4_K_M-00002-of-00002.gguf")
    assert contents(model.directory) == GGUF
    assert model.path == model.directory / "Q4/big-Q4_K_M-00001-of-00002.gguf"
    assert pulls.find("hf://acme/big/Q4/big-Q4_K_M-00001-of-00002.gguf@main") == model
    single = pulls("acme/big/big-Q8_0.gguf")
    assert (single.path.name, single.path.read_bytes()) == ("big-Q8_0.gguf", b"GGUF eight")
    assert pulls.find("acme/big/Q4/big-Q4_K_M-00001-of-00002.gguf") is not None, "files of one commit live side by side"


@pytest.mark.parametrize(
    ("files", "code", "said"),
    [
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, "not_a_base", "adapters push"),
        ({**GGUF, "README.md": b""}, "choose_a_file", "as in hf://acme/odd/Q4/big-Q4_K_M-00001-of-00002.gguf"),
        ({"config.json": b"{}", "pytorch_model.bin": b"\x80"}, "only_pickles", "never read"),
        ({"config.json": b"{}", "tf_model.h5": b""}, "not_a_base", "no model.safetensors"),
        ({"README.md": b""}, "not_a_base", "no config.json"),
        ({}, "not_a_base", "no config.json"),
    ],
)
def test_what_is_no_base_is_named(hub: LocalHub, pulls: Pulls, files: dict[str, bytes], code: str, said: str) -> None:
    hub.push("acme/odd", files)
    with pytest.raises(PullRefused, match=said) as error:
        pulls("acme/odd")
    assert error.value.code == code
    assert not downloads(hub)


def test_missing_split_is_named(hub: LocalHub, pulls: Pulls) -> None:
    hub.push("acme/big", {"a-00001-of-00002.gguf": b"GGUF"})
    with pytest.raises(PullRefused, match=r"no a-00002-of-00002\.gguf") as error:
        pulls("acme/big/a-00001-of-00002.gguf")
    assert error.value.code == "file_missing"


@pytest.mark.parametrize(
    "index",
    [
        b"{",
        b"{}",
        b'{"weight_map": {}}',
        b'{"weight_map": 3}',
        b'{"weight_map": {"a": "../../etc/passwd"}}',
        b'{"weight_map": {"a": "/etc/passwd.safetensors"}}',
        b'{"weight_map": {"a": "x/y.safetensors"}}',
        b'{"weight_map": {"a": "pytorch_model.bin"}}',
        b"[" * 100_000,
        json.dumps({"weight_map": {str(n): f"{n}.safetensors" for n in range(1001)}}).encode(),
    ],
)
def test_hostile_index_is_refused(hub: LocalHub, pulls: Pulls, index: bytes) -> None:
    hub.push(BASE, {**FILES, "model.safetensors.index.json": index})
    assert code_of(pulls) == "invalid_index"
    assert not downloads(hub)


def test_second_pull_waits_for_the_first(hub: LocalHub, pulls: Pulls) -> None:
    waits, finished = [], threading.Event()
    hub.faults["/store/"] = lambda _: finished.wait(60)
    plans = [pulls.puller.plan(NAME) for _ in range(2)]

    def pull(number: int) -> None:
        def wait() -> None:
            waits.append(number)
            finished.set()

        pulls.puller.carry_out(plans[number], on_wait=wait)

    threads = [threading.Thread(target=pull, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(waits) == 1
    assert len(downloads(hub)) == len(SHARDS), "the second pull finds the files of the first"
    found = pulls.find()
    assert found is not None
    assert contents(found.path) == NEEDED


def test_models_are_listed_and_removed(hub: LocalHub, pulls: Pulls) -> None:
    hub.push("acme/big", {"one.gguf": b"GGUF one", "two.gguf": b"GGUF two"})
    first, one, two = pulls(), pulls("acme/big/one.gguf"), pulls("acme/big/two.gguf@main")
    cache = ModelCache(pulls.settings.models_dir)
    assert [model.name.url for model in cache.models()] == [one.name.url, two.name.url, first.name.url]
    assert cache.models()[0].revisions == ("main",)
    with in_use(two.directory):
        assert code_of(lambda: cache.remove(two.name)) == "model_in_use"
    assert cache.remove(two.name) == len(b"GGUF two")
    assert not two.directory.exists()
    assert pulls.find("acme/big/two.gguf") is None
    assert pulls.find("acme/big/one.gguf") == one
    assert code_of(lambda: cache.remove(two.name)) == "not_pulled"
    assert code_of(lambda: cache.remove(ModelName.parse("acme/unknown"))) == "not_pulled"
    assert not (pulls.settings.models_dir / "hf" / "acme" / "unknown").exists()


def test_damaged_record_is_repaired_without_a_download(hub: LocalHub, pulls: Pulls) -> None:
    model = pulls()
    (model.directory.parent / "pulled.json").write_text('{"models": 3')
    assert pulls.find() is None
    hub.requests.clear()
    assert pulls().path == model.path
    assert not downloads(hub)


def test_offline_names_what_was_not_pulled(hub: LocalHub, pulls: Pulls) -> None:
    offline = Pulls(dataclasses.replace(pulls.settings, is_offline=True))
    assert code_of(offline) == "not_pulled"
    assert not hub.requests
    model = pulls()
    assert offline.find() == model


def test_too_large_small_file_is_refused(hub: LocalHub, pulls: Pulls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.adapter_store.pulling.needed_files.MAX_SMALL_BYTES", 20)
    assert code_of(pulls) == "file_too_large"


def test_unwritable_directory_is_named(hub: LocalHub, pulls: Pulls, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    assert code_of(pulls) == "directory_not_usable"
