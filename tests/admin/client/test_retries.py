from __future__ import annotations

import pytest

from loramux.admin.client.client import AdminError, ServerUnreachable
from loramux.admin.client.retries import retry_read


def refused(status: int, retry_after_s: int | None = None) -> AdminError:
    return AdminError(status, f"the server returned {status}", None, None, retry_after_s)


class Answers:
    """A read that raises or returns each of these in turn."""

    def __init__(self, *answers: Exception | str) -> None:
        self._answers = list(answers)

    def __call__(self) -> str:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def num_left(self) -> int:
        return len(self._answers)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.admin.client.retries.PAUSE_S", 0.0)


def test_a_read_is_repeated_while_the_server_restarts_or_is_busy() -> None:
    read = Answers(ServerUnreachable("no server"), refused(502), refused(503, 0), refused(429), refused(500), "here")
    assert retry_read(read) == "here"
    assert read.num_left == 0


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409])
def test_a_refusal_is_final(status: int) -> None:
    read = Answers(refused(status), "here")
    with pytest.raises(AdminError, match=str(status)):
        retry_read(read)
    assert read.num_left == 1


def test_the_last_error_is_raised_when_the_time_is_over() -> None:
    read = Answers(ServerUnreachable("no server"), "here")
    with pytest.raises(ServerUnreachable, match="no server"):
        retry_read(read, retry_for_s=-1.0)
    read = Answers(refused(429, retry_after_s=60), "here")
    with pytest.raises(AdminError, match="429"):
        retry_read(read, retry_for_s=30.0)
    assert read.num_left == 1
