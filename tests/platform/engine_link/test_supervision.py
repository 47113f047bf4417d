from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from loramux.engine.loop.config import EngineConfig
from loramux.engine.server.step_record import ID_BYTES, StepRecord
from loramux.platform.engine_link import crash_strikes, process_output
from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.engine_process import EngineProcess
from loramux.platform.engine_link.local_engine import LocalEngine, Supervision
from loramux.platform.engine_link.process_output import ProcessOutput
from loramux.platform.engine_link.watchdog import Watchdog
from tests.platform.engine_link.supervised_engine import PATIENCE_S, add, end_of, running, until

HERE = Path(__file__).parent
HANGING_TOKEN = 666


@pytest.mark.campaign
def test_request_that_hangs_a_step_is_refused_after_two_deaths(demo_base: Path, tmp_path: Path) -> None:
    config = EngineConfig(
        model_dir=str(demo_base),
        blob_url=f"file://{tmp_path / 'blobs'}",
        cache_dir=str(tmp_path / "cache"),
        pool_bytes=16 << 20,
        num_threads=1,
        max_sequences=2,
    )
    supervision = Supervision(step_timeout_s=3.0, first_delay_s=0.05)
    command = (sys.executable, str(HERE / "hanging_engine.py"))

    async def scenario() -> None:
        async with running(LocalEngine(config, supervision, command)) as engine:
            assert (await end_of(engine.submit(add("first")))).reason == "length"
            # First death: a step hangs, and the supervisor notices. Another request is running, and one is waiting.
            pid = engine.pid
            beside = engine.submit(add("beside", max_tokens=900))
            await anext(beside)
            hanging = engine.submit(add("poison", 5, HANGING_TOKEN))
            waiting = engine.submit(add("waiting", 8, 9))
            async with asyncio.timeout(PATIENCE_S):
                ended = await asyncio.gather(*map(end_of, (beside, hanging, waiting)))
            assert [one.code for one in ended] == ["engine_unavailable"] * 3
            assert [one.prompt_tokens for one in ended] == [3, 2, 0], "a waiting request costs nothing"
            assert ended[0].completion_tokens >= 1
            assert not engine.is_ready
            assert len(engine._strikes) == 2, "a waiting request is not blamed"
            with pytest.raises(EngineUnavailable):
                engine.submit(add("early"))
            await until(lambda: engine.is_ready)
            assert engine.is_live
            assert engine.pid != pid

            # The other running request has now completed and is no longer suspected.
            assert (await end_of(engine.submit(add("beside again")))).reason == "length"
            assert len(engine._strikes) == 1

            # Second death: an engine without a supervisor ends on its own, even while a step hangs.
            process = engine._process
            assert process is not None
            hanging = engine.submit(add("poison again", 5, HANGING_TOKEN, max_tokens=3))
            await until(lambda: "poison again" in process.record.running())
            assert process._process.stdin is not None
            process._process.stdin.close()
            async with asyncio.timeout(PATIENCE_S):
                assert await process.wait() == 1
            assert (await end_of(hanging)).code == "engine_unavailable"
            await until(lambda: engine.is_ready)

            # The third attempt never reaches the engine. Other requests still run.
            pid = engine.pid
            refused = await end_of(engine.submit(add("poison once more", 5, HANGING_TOKEN)))
            assert (refused.reason, refused.code) == ("error", "request_excluded")
            assert (refused.prompt_tokens, refused.completion_tokens) == (0, 0)
            assert (await end_of(engine.submit(add("waiting again", 8, 9)))).reason == "length"
            assert engine.pid == pid

    asyncio.run(scenario())


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., LocalEngine]:
    def make(**supervision: float) -> LocalEngine:
        config = EngineConfig(model_dir="", blob_url="", cache_dir="", max_sequences=4)
        command = (sys.executable, str(HERE / "toy_engine.py"), str(tmp_path))
        return LocalEngine(config, Supervision(**supervision), command)

    return make


def test_crash_loop_backs_off_and_reports_the_reason(
    toy: Callable[..., LocalEngine], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with running(toy(first_delay_s=0.02, max_delay_s=0.1)) as engine:
            (tmp_path / "fails").write_text("loading\nRuntimeError: the device fell off\n\n")
            with capture_logs() as logged:
                assert engine.pid is not None
                os.kill(engine.pid, signal.SIGKILL)
                await until(lambda: len(deaths(logged)) >= 6)
                assert not engine.is_ready
                assert engine.trouble == "exit code 1: RuntimeError: the device fell off"
                (tmp_path / "fails").unlink()
                await until(lambda: engine.is_ready)
            assert engine.trouble is None
            assert deaths(logged)[:6] == [0.02, 0.04, 0.08, 0.1, 0.1, 0.1]
            assert next(entry["reason"] for entry in logged if entry["event"] == "engine died") == "killed by SIGKILL"

    def deaths(logged: Any) -> list[float]:
        return [entry["restart_in_s"] for entry in logged if entry["event"] == "engine died"]

    asyncio.run(scenario())
    # Operators see everything that an engine prints.
    assert capfd.readouterr().err.count("the device fell off") >= 5


def test_restart_delay_is_capped() -> None:
    delays = [Supervision().delay_s(num_short_runs) for num_short_runs in (0, 1, 2, 7, 8, 10_000)]
    assert delays == [0.2, 0.4, 0.8, 25.6, 30.0, 30.0]


def test_steady_run_resets_the_restart_delay(toy: Callable[..., LocalEngine]) -> None:
    async def scenario() -> None:
        async with running(toy(first_delay_s=0.02, steady_s=0.1)) as engine:
            with capture_logs() as logged:
                for _ in range(3):
                    await asyncio.sleep(0.15)
                    pid = engine.pid
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                    await until(lambda pid=pid: engine.is_ready and engine.pid != pid)  # type: ignore[misc]
            assert [entry["restart_in_s"] for entry in logged if entry["event"] == "engine died"] == [0.02] * 3

    asyncio.run(scenario())


@pytest.mark.parametrize("stop", ["the loop hangs", "the process stands still"])
def test_hung_engine_is_replaced_or_not_live_if_unkillable(
    toy: Callable[..., LocalEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    look, has_stopped = Watchdog.look, False

    def patient(watchdog: Watchdog, num_passes: int, since_last_look_s: float) -> bool:
        # On a busy machine, the engine may get no processor time before it is stopped. That time must not count.
        return look(watchdog, num_passes, since_last_look_s if has_stopped else 0.0)

    monkeypatch.setattr(Watchdog, "look", patient)

    async def scenario() -> None:
        nonlocal has_stopped
        async with running(toy(step_timeout_s=0.5, first_delay_s=0.02)) as engine:
            process = engine._process
            assert process is not None
            await until(lambda: process.record.num_passes() > 0)
            with monkeypatch.context() as patched:
                patched.setattr(EngineProcess, "kill", lambda self: None)
                if stop == "the loop hangs":
                    (tmp_path / "hangs").touch()
                else:
                    os.kill(process.pid, signal.SIGSTOP)
                has_stopped = True
                await until(lambda: not engine.is_live)
                assert not engine.is_ready
                has_stopped = False
            (tmp_path / "hangs").unlink(missing_ok=True)
            # Simulate a driver that finally lets the process die.
            os.kill(process.pid, signal.SIGKILL)
            await until(lambda: engine.is_live and engine.is_ready)
            assert engine.pid != process.pid

    asyncio.run(scenario())


def test_close_does_not_wait_for_a_hung_engine(toy: Callable[..., LocalEngine]) -> None:
    async def scenario() -> float:
        engine = toy()
        await engine.start()
        pid = engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        started = asyncio.get_running_loop().time()
        await engine.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        return asyncio.get_running_loop().time() - started

    assert asyncio.run(scenario()) < 10


def test_idle_engine_is_not_hung(toy: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    look = Watchdog.look

    def noted(watchdog: Watchdog, num_passes: int, since_last_look_s: float) -> bool:
        is_hung = look(watchdog, num_passes, since_last_look_s)
        looks.append(watchdog.stalled_s)
        return is_hung

    monkeypatch.setattr(Watchdog, "look", noted)
    monkeypatch.setattr(Supervision, "look_interval_s", 0.05)

    async def scenario() -> None:
        async with running(toy(step_timeout_s=60.0)) as engine:
            pid = engine.pid
            # The loop goes on between most looks.
            await until(lambda: looks.count(0.0) > 5)
            assert engine.is_ready
            assert engine.pid == pid

    asyncio.run(scenario())


def test_watchdog_ignores_suspended_machines() -> None:
    watchdog = Watchdog(step_timeout_s=10, max_gap_s=2)
    assert not any(watchdog.look(4, 1) for _ in range(11))
    assert watchdog.look(4, 1)
    for num_passes in range(5, 100):
        assert not watchdog.look(num_passes, 9)
    # The machine slept for an hour, which must not count against the engine.
    assert not watchdog.look(99, 3600)
    assert watchdog.stalled_s == 2


def test_step_record_is_shared_and_never_truncates_an_id() -> None:
    fd = StepRecord.new_file(max_sequences=3)
    written, read = StepRecord(fd), StepRecord(fd)
    os.close(fd)
    assert (read.num_passes(), read.running()) == (0, frozenset())
    written.note_pass()
    written.note_pass()
    written.note_running(["a", "b"])
    assert (read.num_passes(), read.running()) == (2, {"a", "b"})
    written.note_running([name * (ID_BYTES - 1) for name in "abc"])
    assert len(read.running()) == 3
    written.note_running([name * ID_BYTES for name in "abcd"])
    assert read.running() == {name * ID_BYTES for name in "ab"}, "an ID is never truncated"
    written.note_running([])
    assert read.running() == frozenset()
    written.close()
    read.close()


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_two_deaths_exclude_a_request_for_ten_minutes() -> None:
    clock = Clock()
    strikes = CrashStrikes(clock)
    # Two choices of one request in the same death count as one strike.
    strikes.strike([add("a"), add("b")])
    assert not strikes.is_refused(add("c"))
    clock.now_s = 599
    strikes.strike([add("d"), add("other", 1)])
    assert strikes.is_refused(add("e"))
    assert not strikes.is_refused(add("f", 1))
    clock.now_s = 599 + 599
    assert strikes.is_refused(add("g"))
    clock.now_s = 599 + 600
    assert not strikes.is_refused(add("h"))
    assert len(strikes) == 0


def test_completed_request_is_acquitted() -> None:
    strikes = CrashStrikes(Clock())
    strikes.strike([add("a")])
    strikes.acquit(add("b"))
    strikes.strike([add("c")])
    assert not strikes.is_refused(add("d"))


ORIGINAL = add("a", 1, 2, share_key="acme", isolation_key=b"acme", digest="d" * 64)
SAMPLING = ORIGINAL.sampling


@pytest.mark.parametrize(
    ("changes", "is_the_same"),
    [
        pytest.param({"sequence_id": "b"}, True, id="another call"),
        pytest.param({"max_tokens": 9}, True, id="another grant"),
        pytest.param({"sampling": msgspec.structs.replace(SAMPLING, seed=7)}, True, id="another seed"),
        pytest.param({"prompt": (1, 2, 3)}, False, id="another prompt"),
        pytest.param({"digest": None}, False, id="no adapter"),
        pytest.param({"share_key": "other"}, False, id="another tenant"),
        pytest.param({"isolation_key": b"other"}, False, id="another namespace"),
        pytest.param({"sampling": msgspec.structs.replace(SAMPLING, top_k=7)}, False, id="other sampling"),
    ],
)
def test_retry_counts_as_the_same_request(changes: dict[str, Any], is_the_same: bool) -> None:
    strikes = CrashStrikes(Clock())
    strikes.strike([ORIGINAL])
    strikes.strike([ORIGINAL])
    assert strikes.is_refused(msgspec.structs.replace(ORIGINAL, **changes)) == is_the_same


def test_strikes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_strikes, "MAX_REQUESTS", 10)
    strikes = CrashStrikes(Clock())
    for number in range(30):
        strikes.strike([add("a", number)] * 2)
        strikes.strike([add("a", number)])
    assert len(strikes) == 10
    assert strikes.is_refused(add("b", 29))
    assert not strikes.is_refused(add("b", 0))


def test_output_is_forwarded_whole_and_its_tail_kept() -> None:
    async def scenario() -> None:
        passed: list[bytes] = []
        output = ProcessOutput(passed.append)
        lines = b"".join(b"line %d\n" % number for number in range(100_000))

        def write() -> None:
            with os.fdopen(os.dup(output.write_fd), "wb") as pipe:
                pipe.write(lines + b"x" * 10_000 + b"\nthe end \xff\n\n")

        writer = threading.Thread(target=write)
        writer.start()
        await until(lambda: not writer.is_alive())
        output.close_write_end()
        assert output.last_line() == "the end \ufffd"
        assert b"".join(passed).startswith(lines)
        assert len(output._kept) <= process_output.MAX_KEPT_BYTES
        output.close()
        assert output.last_line() == "the end \ufffd"

    asyncio.run(scenario())
