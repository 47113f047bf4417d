"""Downloads that stop, lie, or lead elsewhere: they continue where they stopped, or end with a named error."""

from __future__ import annotations

import dataclasses
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from loramux.adapter_store.errors import PullRefused, Refused, SourceUnavailable
from loramux.adapter_store.hub import hub_client
from loramux.adapter_store.hub.hub_client import HubClient
from loramux.adapter_store.hub.hub_transport import HubTransport, is_trusted_endpoint, operators_rule
from loramux.adapter_store.pulling import pull
from loramux.adapter_store.pulling.download import MAX_FAILURES
from loramux.adapter_store.pulling.model_name import ModelName
from loramux.adapter_store.pulling.pull import Puller
from loramux.adapter_store.pulling.pull_settings import PullSettings
from loramux.adapter_store.pulling.remote import HubRemote
from tests.adapter_store.hub.local_hub import Answer, LocalHub
from tests.adapter_store.pulling.pulled import BASE, NEEDED, SHARDS, WEIGHTS, Pulls, contents
from tests.platform.small_disk import BALLAST, fill, mounted

FIRST = WEIGHTS[SHARDS[0]]
MOST = len(FIRST) * 99 // 100
NAME = ModelName.parse(f"hf://{BASE}")


class Faults:
    """Changes the first `times` answers of the store for the first shard, and counts all of them."""

    def __init__(self, hub: LocalHub, change: Callable[[Answer], None], times: int = 1) -> None:
        self._change, self._times = change, times
        self.num_answers = 0
        hub.faults[f"/store/{BASE}/{hub.revisions[BASE, 'main']}/{SHARDS[0]}"] = self

    def __call__(self, answer: Answer) -> None:
        self.num_answers += 1
        if self.num_answers <= self._times:
            self._change(answer)


def stop_after(num_bytes: int) -> Callable[[Answer], None]:
    def stop(answer: Answer) -> None:
        answer.num_declared = len(answer.body)
        answer.body = answer.body[:num_bytes]

    return stop


def status(number: int, **headers: str) -> Callable[[Answer], None]:
    return lambda answer: answer.__init__(number, headers=headers)  # type: ignore[misc]


def body(content: bytes) -> Callable[[Answer], None]:
    return lambda answer: setattr(answer, "body", content)


def part_of(pulls: Pulls) -> Path:
    (part,) = pulls.settings.models_dir.rglob(f"{SHARDS[0]}.part")
    return part


def test_download_that_stops_at_99_percent_continues_there(hub: LocalHub, pulls: Pulls) -> None:
    faults = Faults(hub, stop_after(MOST))
    assert contents(pulls().path) == NEEDED
    assert faults.num_answers == 2
    assert [asked for _, asked in hub.ranges if asked] == [f"bytes={MOST}-"] * 2, "the hub and its store see the range"
    assert pulls.pauses == [1.0]


def test_pull_that_was_given_up_continues_in_the_next_pull(hub: LocalHub, pulls: Pulls) -> None:
    faults = Faults(hub, status(503), times=100)
    with pytest.raises(SourceUnavailable, match="503"):
        pulls()
    assert faults.num_answers == MAX_FAILURES
    assert pulls.find() is None
    part_of(pulls).write_bytes(FIRST[:MOST])
    hub.faults.clear()
    hub.requests.clear()
    assert pulls.puller.plan(NAME).kept_bytes == MOST + sum(
        len(content) for name, content in NEEDED.items() if name not in WEIGHTS
    )
    assert contents(pulls().path) == NEEDED
    assert f"bytes={MOST}-" in [asked for _, asked in hub.ranges]
    assert not any("tokenizer" in path for path, _ in hub.requests), "finished files are not fetched again"


def test_attempts_that_bring_much_do_not_count_as_failures(hub: LocalHub, pulls: Pulls) -> None:
    big = bytes(range(256)) * (8 << 12)
    hub.push("acme/big", {"big.gguf": big})
    hub.faults["/store/"] = stop_after(1 << 20)
    assert pulls("acme/big/big.gguf").path.read_bytes() == big
    assert pulls.pauses == [1.0] * 7, "eight attempts brought one of 8 MiB each"


def test_attempts_that_bring_little_end(hub: LocalHub, pulls: Pulls) -> None:
    faults = Faults(hub, stop_after(10), times=1000)
    with pytest.raises(SourceUnavailable):
        pulls()
    assert faults.num_answers == MAX_FAILURES
    assert part_of(pulls).read_bytes() == FIRST[: 10 * MAX_FAILURES]


def test_server_without_ranges_sends_everything_again(hub: LocalHub, pulls: Pulls) -> None:
    hub.has_ranges = False
    faults = Faults(hub, stop_after(MOST))
    assert contents(pulls().path) == NEEDED
    assert faults.num_answers == 2


@pytest.mark.parametrize("header", ["bytes 0-9/10", "bytes 5-/3145728", "", "bytes 3114270-3145727/9"])
def test_wrong_range_is_not_appended(hub: LocalHub, pulls: Pulls, header: str) -> None:
    def change(answer: Answer) -> None:
        if answer.status == 206:
            answer.headers["content-range"] = header
        else:
            stop_after(MOST)(answer)

    Faults(hub, change, times=1000)
    with pytest.raises(SourceUnavailable, match="not the requested range"):
        pulls()
    assert part_of(pulls).read_bytes() == FIRST[:MOST]


def test_damaged_beginning_is_fetched_again(hub: LocalHub, pulls: Pulls) -> None:
    Faults(hub, status(503), times=MAX_FAILURES)
    with pytest.raises(SourceUnavailable):
        pulls()
    part_of(pulls).write_bytes(bytes(MOST))
    counted: dict[str, int] = {}

    def progress(name: str, num_bytes: int) -> None:
        counted[name] = counted.get(name, 0) + num_bytes

    puller = pulls.puller
    model = puller.carry_out(puller.plan(NAME), progress=progress)
    assert contents(model.path) == NEEDED
    assert counted[SHARDS[0]] + MOST == len(FIRST), "the progress bar ends at 100 %"


def test_longer_beginning_is_dropped(hub: LocalHub, pulls: Pulls) -> None:
    Faults(hub, status(503), times=MAX_FAILURES)
    with pytest.raises(SourceUnavailable):
        pulls()
    part_of(pulls).write_bytes(FIRST + b"more")
    assert contents(pulls().path) == NEEDED


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (FIRST + b"!", "size_mismatch"),
        (b"!" + FIRST[1:], "checksum_mismatch"),
        (FIRST[:-1] + b"!", "checksum_mismatch"),
    ],
    ids=["longer", "changed", "changed-at-the-end"],
)
def test_wrong_bytes_are_refused_and_not_kept(hub: LocalHub, pulls: Pulls, content: bytes, code: str) -> None:
    faults = Faults(hub, body(content), times=1000)
    with pytest.raises(PullRefused) as error:
        pulls()
    assert (error.value.code, error.value.param, faults.num_answers) == (code, SHARDS[0], 1)
    assert pulls.find() is None
    assert not list(pulls.settings.models_dir.rglob("*.part"))


def test_wrong_small_file_is_refused(hub: LocalHub, pulls: Pulls) -> None:
    hub.faults["/resolve-cache/"] = lambda answer: setattr(answer, "body", answer.body[::-1])
    with pytest.raises(PullRefused) as error:
        pulls()
    assert error.value.code == "checksum_mismatch"


@pytest.mark.parametrize("number", [408, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("part", ["/revision/", "/resolve/", "/store/"])
def test_short_trouble_is_waited_out(hub: LocalHub, pulls: Pulls, part: str, number: int) -> None:
    troubles = iter((status(number, **{"retry-after": "7"}), status(number)))

    def trouble(answer: Answer) -> None:
        next(troubles, lambda _: None)(answer)

    hub.faults[part] = trouble
    assert contents(pulls().path) == NEEDED
    assert pulls.pauses == [7.0, 2.0], "the hub's Retry-After is obeyed"


@pytest.mark.parametrize("given", ["1e9", "-1", "soon", "999999999999999999999", "86400"])
def test_absurd_retry_after_is_bounded(hub: LocalHub, pulls: Pulls, given: str) -> None:
    hub.faults["/revision/"] = status(429, **{"retry-after": given})
    with pytest.raises(SourceUnavailable):
        pulls()
    assert max(pulls.pauses) <= hub_client.MAX_RETRY_AFTER_S


@pytest.mark.parametrize(("number", "code"), [(401, "source_unauthorized"), (403, "source_unauthorized"), (404, None)])
def test_refusal_is_not_repeated(hub: LocalHub, pulls: Pulls, number: int, code: str | None) -> None:
    for part in ("/store/", "/revision/"):
        hub.faults = {part: status(number)}
        with pytest.raises(Refused) as error:
            pulls()
        assert error.value.code == (code or "source_not_found")
    assert not pulls.pauses


def test_unknown_repository_and_revision_are_refused(hub: LocalHub, pulls: Pulls) -> None:
    for name in ("acme/unknown", f"{BASE}@v9"):
        with pytest.raises(Refused) as error:
            pulls(name)
        assert error.value.code == "source_not_found"
    hub.renamed[BASE] = "evil/base"
    with pytest.raises(Refused) as error:
        pulls()
    assert error.value.code == "source_moved"


def test_listing_of_any_size_is_bounded(hub: LocalHub, pulls: Pulls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_client, "MAX_LISTING_BYTES", 10_000)
    hub.push("acme/many", {f"{number}.txt": b"" for number in range(1000)})
    with pytest.raises(SourceUnavailable, match="more than 10000 bytes"):
        pulls("acme/many")


@pytest.mark.parametrize(
    "listing",
    [
        b"{}",
        b'{"sha": "main", "siblings": []}',
        b'{"sha": "%s", "siblings": [{"rfilename": "a", "size": -1, "blobId": "%s"}]}' % (b"0" * 40, b"0" * 40),
        b'{"sha": "%s", "siblings": [{"rfilename": "a", "lfs": {"sha256": "../x", "size": 1}}]}' % (b"0" * 40),
        b'{"sha": "%s", "siblings": [{"rfilename": "a", "lfs": {"sha256": "0", "size": 1e99}}]}' % (b"0" * 40),
        b"[" * 100_000,
    ],
)
def test_malformed_listing_is_refused(hub: LocalHub, pulls: Pulls, listing: bytes) -> None:
    hub.faults["/revision/"] = body(listing)
    with pytest.raises(SourceUnavailable):
        pulls()


def test_model_larger_than_the_disk_is_refused_before_it_is_fetched(hub: LocalHub, pulls: Pulls) -> None:
    free = shutil.disk_usage(pulls.settings.models_dir.parent).free
    hub.push("acme/huge", {"huge.gguf": b"GGUF"})

    def claim(answer: Answer) -> None:
        answer.body = answer.body.replace(b'"size": 4', b'"size": %d' % (free + 1))

    hub.faults["/revision/"] = claim
    with pytest.raises(PullRefused, match=f"needs {free + 1} more bytes") as error:
        pulls("acme/huge/huge.gguf")
    assert error.value.code == "disk_full"
    assert not any(path.startswith("/store/") for path, _ in hub.requests)


def test_disk_that_fills_is_named_and_the_beginning_is_kept(hub: LocalHub, pulls: Pulls) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The system refuses to write beyond this size, as it does on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(PullRefused, match="no space left") as error:
            pulls()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.code == "disk_full"
    assert part_of(pulls).read_bytes() == FIRST[: 1 << 20]
    assert contents(pulls().path) == NEEDED


def test_pull_continues_once_a_full_disk_has_space_again(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "RESERVE_BYTES", 0)
    with mounted(tmp_path, 12):
        pulls = Pulls(PullSettings(tmp_path / "models", hub.url))
        plan = pulls.puller.plan(NAME)

        def fill_once(name: str, _: int) -> None:
            if name == SHARDS[0] and not (tmp_path / BALLAST).exists():
                fill(tmp_path)

        with pytest.raises(PullRefused, match="no space left") as error:
            pulls.puller.carry_out(plan, progress=fill_once)
        assert error.value.code == "disk_full"
        with pytest.raises(PullRefused, match="more bytes"):
            pulls()
        (tmp_path / BALLAST).unlink()
        kept = part_of(pulls).stat().st_size
        assert 0 < kept < len(FIRST)
        assert contents(pulls().path) == NEEDED
        assert f"bytes={kept}-" in [asked for _, asked in hub.ranges]


def pulls_from(hub: LocalHub, pulls: Pulls, own: str) -> Puller:
    """A puller that resolves the hub's own name to the address `own`."""
    rule = operators_rule("http://hub.test", lambda *_: [own])
    connect = partial(HubTransport, is_allowed=rule)
    return Puller(pulls.settings, lambda name, _: HubRemote(HubClient(hub.url, None, connect), name.place, "main"))


@pytest.mark.parametrize(
    ("own", "target", "is_allowed"),
    [
        ("8.8.8.8", "127.0.0.2", False),
        ("10.1.2.3", "127.0.0.2", False),
        ("127.0.0.1", "127.0.0.2", True),
        ("127.0.0.1", "169.254.169.254", False),
        ("8.8.8.8", "10.0.0.1", False),
        ("8.8.8.8", "[fd00::1]", False),
    ],
)
def test_redirect_to_a_private_address(hub: LocalHub, pulls: Pulls, own: str, target: str, is_allowed: bool) -> None:
    # An address is refused before anything connects to it. Nothing listens at the allowed one.
    Faults(hub, status(302, location=f"http://{target}:9/x"), times=1000)
    puller = pulls_from(hub, pulls, own)
    plan = puller.plan(NAME)
    puller._pause = pulls.pauses.append
    with pytest.raises((Refused, SourceUnavailable)) as error:
        puller.carry_out(plan)
    assert getattr(error.value, "code", None) == (None if is_allowed else "source_not_allowed")


@pytest.mark.parametrize(
    ("own", "address", "is_allowed"),
    [
        ("10.1.2.3", "10.9.9.9", True),
        ("10.1.2.3", "192.168.7.7", True),
        ("10.1.2.3", "fc00::1", True),
        ("10.1.2.3", "fd00:ec2::254", False),
        ("10.1.2.3", "169.254.169.254", False),
        ("10.1.2.3", "100.100.100.200", False),
        ("10.1.2.3", "0.0.0.0", False),
        ("127.0.0.1", "10.9.9.9", True),
        ("8.8.8.8", "10.9.9.9", False),
        ("8.8.8.8", "1.1.1.1", True),
    ],
)
def test_only_a_private_hub_may_redirect_to_private_addresses(own: str, address: str, is_allowed: bool) -> None:
    assert operators_rule("https://hub.test", lambda *_: [own])(address) is is_allowed


def test_hub_without_an_address_may_redirect_to_public_ones_only() -> None:
    def fail(*_: object) -> list[str]:
        raise OSError("no such name")

    rule = operators_rule("https://hub.test", fail)
    assert rule("8.8.8.8")
    assert not rule("10.0.0.1")


@pytest.mark.parametrize(
    ("url", "is_trusted"),
    [
        *(("https://huggingface.co", True), ("https://hub.corp", True), ("http://127.0.0.1:8080", True)),
        *(
            ("http://localhost:1", True),
            ("http://[::1]:1", True),
            ("http://hub.corp", False),
            ("http://10.0.0.1", False),
        ),
        *(("http://127.0.0.1.evil.test", False), ("file:///x", False), ("huggingface.co", False), ("https://", False)),
    ],
)
def test_hub_must_be_reached_safely(url: str, is_trusted: bool) -> None:
    assert is_trusted_endpoint(url) is is_trusted


def test_token_stays_out_of_messages(hub: LocalHub, pulls: Pulls) -> None:
    unreachable = Pulls(dataclasses.replace(pulls.settings, endpoint="http://127.0.0.1:9", token="hf_secret"))
    with pytest.raises(SourceUnavailable) as error:
        unreachable()
    assert "hf_secret" not in str(error.value)
    assert len(unreachable.pauses) == MAX_FAILURES - 1
