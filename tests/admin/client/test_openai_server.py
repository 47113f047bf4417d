from __future__ import annotations

from pathlib import Path

import pytest

from loramux.admin.client.openai_server import find_openai_server
from loramux.admin.client.profiles import Profile, ProfileFile
from loramux.admin.client.server_address import NoServerNamed
from loramux.admin.client.sse import MAX_EVENT_BYTES, EventReader, StreamTooLong
from tests.admin.command_line import Run

OURS = "sk-lmx-a-key"
BOTH = {"OPENAI_BASE_URL": "http://h/v1", "OPENAI_API_KEY": "key\n"}
NAMED = {"LORAMUX_PROFILE": "whole"}


@pytest.fixture
def file(tmp_path: Path) -> ProfileFile:
    file = ProfileFile(tmp_path / "config.toml")
    own = {"openai_url": "https://of-a-profile/v1/", "openai_key": "secret"}
    file.add(Profile(name="whole", url="http://admin", key="a", **own))
    file.add(Profile(name="admin-only", url="http://admin", key="a"))
    return file


@pytest.mark.parametrize(
    ("given", "environment", "found"),
    [
        pytest.param((None, None, None), {}, ("https://of-a-profile/v1", "secret"), id="current profile"),
        pytest.param((None, None, None), BOTH, ("http://h/v1", "key"), id="environment"),
        pytest.param((None, None, "whole"), BOTH, ("https://of-a-profile/v1", "secret"), id="named profile"),
        pytest.param((None, None, None), {**BOTH, **NAMED}, ("https://of-a-profile/v1", "secret"), id="variable"),
        pytest.param(("http://x:1", None, "whole"), BOTH, ("http://x:1/v1", "key"), id="option"),
        pytest.param(("http://x/", "other", None), BOTH, ("http://x/v1", "other"), id="both options"),
        pytest.param(("http://x/v1", None, None), {}, ("http://x/v1", None), id="without a key"),
        pytest.param((None, None, None), {"OPENAI_API_KEY": OURS}, ("http://127.0.0.1:8000/v1", OURS), id="our key"),
    ],
)  # fmt: skip
def test_server_is_found(
    file: ProfileFile,
    given: tuple[str | None, str | None, str | None],
    environment: dict[str, str],
    found: tuple[str, str | None],
) -> None:
    server = find_openai_server(*given, environment, file)
    assert (server.url, server.key) == found
    assert found[1] is None or found[1] not in repr(server)


@pytest.mark.parametrize(
    ("given", "environment", "said"),
    [
        pytest.param((None, None, "admin-only"), BOTH, "--openai-url", id="profile without"),
        pytest.param((None, None, "none"), BOTH, "there is no profile", id="no profile"),
        pytest.param((None, None, None), {"OPENAI_API_KEY": "sk-of-another"}, "set OPENAI_BASE_URL", id="foreign key"),
        pytest.param(("ftp://x", None, None), {}, "should look like", id="no http"),
        pytest.param(("http://x", "k\x1b", None), {}, "printable ASCII", id="no key"),
    ],
)
def test_no_server_is_explained(
    file: ProfileFile, given: tuple[str | None, str | None, str | None], environment: dict[str, str], said: str
) -> None:
    with pytest.raises(NoServerNamed, match=said):
        find_openai_server(*given, environment, file)


def test_nothing_configured_is_explained(tmp_path: Path) -> None:
    with pytest.raises(NoServerNamed, match="set OPENAI_BASE_URL and OPENAI_API_KEY"):
        find_openai_server(None, None, None, {}, ProfileFile(tmp_path / "none"))


def test_a_profile_is_saved_with_both_addresses(loramux: Run, tmp_path: Path) -> None:
    arguments = ("profiles", "add", "p", "--url", "http://admin", "--openai-url", "http://api/v1")
    assert loramux(*arguments, input="admin\ntenant\n").exit_code == 0
    known = ProfileFile(tmp_path / "config" / "loramux" / "config.toml").read().profiles["p"]
    assert (known.key, known.openai_url, known.openai_key) == ("admin", "http://api/v1", "tenant")
    assert loramux(*arguments, input="admin\n").exit_code == 2


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    data = 'data: {"a": "\u2028"}\r\n\r\n: ping\n\nevent: x\ndata:[DONE]\n\ndata: cut'.encode()
    reader, found = EventReader(), []
    for start in range(0, len(data), size):
        found += reader.feed(data[start : start + size])
    assert found == ['{"a": "\u2028"}'.encode(), b"[DONE]"]


def test_a_line_without_end_is_refused() -> None:
    with pytest.raises(StreamTooLong, match="16 MiB"):
        EventReader().feed(b"x" * (MAX_EVENT_BYTES + 1))
