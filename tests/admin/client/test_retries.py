from __future__ import annotations

import pytest

from loramux.admin.client.client import AdminError, ServerUnreachable
from loramux.admin.client.retries import PAUSE_S, retry_read


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


class Clock:
    """Stands for the module `time`. Time passes only in pauses and in slow reads."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("loramux.admin.client.retries.time", clock)
    return clock


def test_a_read_is_repeated_while_the_server_restarts_or_is_busy(clock: Clock) -> None:
    read = Answers(ServerUnreachable("no server"), refused(502), refused(503, 7), refused(429, 0), refused(500), "here")
    assert retry_read(read) == "here"
    assert read.num_left == 0
    assert clock.pauses == [PAUSE_S, PAUSE_S, 7, PAUSE_S, PAUSE_S], "a server that says 0 is not called without a pause"


def test_the_time_counts_from_the_first_error(clock: Clock) -> None:
    read = Answers(ServerUnreachable("the download broke"), "here")

    def read_slowly() -> str:
        clock.now_s += 1000.0
        return read()

    assert retry_read(read_slowly, retry_for_s=300.0) == "here"


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
