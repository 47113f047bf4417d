from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loramux.admin.cli import app
from loramux.admin.client.profiles import Profile, ProfileError, ProfileFile
from loramux.admin.client.server_address import NoServerNamed, find_server
from tests.admin.admin_side import ADMIN_KEY
from tests.admin.command_line import Run, printed_json

ELSEWHERE = "http://127.0.0.1:9"


@pytest.fixture
def file(tmp_path: Path) -> ProfileFile:
    return ProfileFile(tmp_path / "config" / "loramux" / "config.toml")


def profile(name: str, key: str = "a key", url: str = "https://lora.example") -> Profile:
    return Profile(name=name, url=url, key=key)


def test_profile_round_trips_through_the_file(file: ProfileFile) -> None:
    odd = profile("a.b_c-1", key='k"e\\y #[x]', url="https://user@[::1]:8001/below")
    file.add(profile("first"))
    file.add(odd)
    known = file.read()
    assert (known.profiles["a.b_c-1"], known.current) == (odd, "first")
    assert "a key" not in repr(known)


def test_profile_file_is_private_and_no_temporary_file_remains(file: ProfileFile) -> None:
    old = os.umask(0)
    try:
        file.add(profile("first"))
        file.use("first")
    finally:
        os.umask(old)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    assert sorted(path.name for path in file.path.parent.iterdir()) == ["config.toml", "lock"]


def test_file_readable_by_others_is_refused(file: ProfileFile) -> None:
    file.add(profile("first"))
    file.path.chmod(0o640)
    for call in (file.read, lambda: file.use("first"), lambda: file.add(profile("second"))):
        with pytest.raises(ProfileError, match="chmod 600"):
            call()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"current = ", "not a valid profile file", id="no TOML"),
        pytest.param(b"\xff", "not UTF-8", id="no text"),
        pytest.param(b"profile = 1", "did you mean profiles", id="unknown table"),
        pytest.param(b"profiles = 1", "table of tables", id="no table"),
        pytest.param(b"current = 1", "table of tables", id="no name"),
        pytest.param(b'[profiles.a]\nurl = "http://x"\nkey = 1', "must be strings", id="no text as key"),
        pytest.param(b'[profiles.a]\nurl = "http://x"', "a 'url' and a 'key'", id="no key"),
        pytest.param(b'[profiles.a]\nurl = "http://x"\nkey = "a-secret"\nkeys = ""', "nothing else", id="too much"),
    ],
)
def test_malformed_file_is_explained_and_kept(file: ProfileFile, content: bytes, said: str) -> None:
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(content)
    file.path.chmod(0o600)
    with pytest.raises(ProfileError, match=said) as refused:
        file.add(profile("first"))
    assert "a-secret" not in str(refused.value)
    assert file.path.read_bytes() == content


@pytest.mark.parametrize("name", ["", "A", "-a", "a b", "../x", "a/b", "ä", "a\n", "x" * 64])
def test_invalid_profile_name_is_refused(file: ProfileFile, name: str) -> None:
    with pytest.raises(ProfileError, match="lowercase letters"):
        file.add(profile(name))
    assert not file.path.exists()


def test_concurrent_commands_lose_no_profile(file: ProfileFile) -> None:
    adding = [threading.Thread(target=file.add, args=(profile(f"p{number}"),)) for number in range(8)]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    assert len(file.read().profiles) == 8


@pytest.mark.parametrize(
    ("asked", "environment", "found"),
    [
        pytest.param("second", {"LORAMUX_ADMIN_KEY": "k"}, ("https://2", "key 2"), id="the flag wins"),
        pytest.param(
            None,
            {"LORAMUX_PROFILE": "second", "LORAMUX_ADMIN_KEY": "k"},
            ("https://2", "key 2"),
            id="then its variable",
        ),
        pytest.param(None, {"LORAMUX_ADMIN_KEY": "k\n"}, ("http://127.0.0.1:8001", "k"), id="then the key's"),
        pytest.param(
            None,
            {"LORAMUX_ADMIN_KEY": "k", "LORAMUX_ADMIN_URL": "http://h:1"},
            ("http://h:1", "k"),
            id="with its address",
        ),
        pytest.param(None, {}, ("https://1", "key 1"), id="then the current profile"),
    ],
)
def test_flag_overrides_environment_and_current_profile(
    file: ProfileFile, asked: str | None, environment: dict[str, str], found: tuple[str, str]
) -> None:
    for number, name in ((1, "first"), (2, "second")):
        file.add(profile(name, key=f"key {number}", url=f"https://{number}"))
    address = find_server(asked, environment, file)
    assert (address.url, address.key) == found


def test_profile_key_is_not_sent_to_another_server(file: ProfileFile) -> None:
    file.add(profile("first"))
    with pytest.raises(NoServerNamed, match="LORAMUX_ADMIN_KEY is not"):
        find_server(None, {"LORAMUX_ADMIN_URL": ELSEWHERE}, file)
    assert "a key" not in repr(find_server(None, {}, file))


def test_profile_is_added_used_listed_without_key_and_removed(
    loramux: Run, admin_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LORAMUX_ADMIN_KEY")
    monkeypatch.delenv("LORAMUX_ADMIN_URL")
    assert printed_json(loramux("profiles", "list", "--json"))["data"] == []
    lost = loramux("tenants", "list")
    assert (lost.exit_code, "loramux profiles add" in lost.stderr) == (3, True)
    assert loramux("profiles", "add", "away", "--url", ELSEWHERE, input="some-key\n").exit_code == 0
    assert "current" not in loramux("profiles", "add", "here", "--url", admin_url, input=ADMIN_KEY + "\n").stdout
    assert loramux("tenants", "list").exit_code == 3
    assert printed_json(loramux("--profile", "here", "tenants", "list", "--json"))["data"] == []
    monkeypatch.setenv("LORAMUX_PROFILE", "here")
    assert loramux("tenants", "list").exit_code == 0
    monkeypatch.delenv("LORAMUX_PROFILE")
    assert loramux("profiles", "use", "here").exit_code == 0
    assert loramux("tenants", "list").exit_code == 0
    table = loramux("profiles", "list").stdout
    assert (ADMIN_KEY in table, admin_url in table) == (False, True)
    assert loramux("profiles", "remove", "here").exit_code == 0
    lost = loramux("tenants", "list")
    assert (lost.exit_code, "loramux profiles use" in lost.stderr) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "given", "exit_code", "said"),
    [
        pytest.param(("--profile", "prodd", "tenants", "list"), "", 3, "did you mean prod?", id="mistyped"),
        pytest.param(("profiles", "use", "nobody"), "", 2, "loramux profiles add nobody", id="unknown"),
        pytest.param(("profiles", "add", "x", "--url", "ftp://x"), "k", 2, "should look like", id="no address"),
        pytest.param(("profiles", "add", "x"), "", 2, "is not a key", id="no key"),
        pytest.param(("profiles", "add", "x"), "käse", 2, "is not a key", id="key not ASCII"),
        pytest.param(("profiles", "add", "X"), "k", 2, "lowercase letters", id="bad name"),
    ],
)
def test_profile_errors_are_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    given: str,
    exit_code: int,
    said: str,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    runner = CliRunner()
    assert runner.invoke(app, ["profiles", "add", "prod"], input="some-key\n").exit_code == 0
    result = runner.invoke(app, arguments, input=given)
    assert (result.exit_code, said in result.stderr) == (exit_code, True), result.output
