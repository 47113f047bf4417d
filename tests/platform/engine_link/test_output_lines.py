from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from typing import Any

import pytest
import structlog

from loramux.platform.engine_link.output_lines import MAX_LINE_BYTES, OutputLines
from loramux.platform.engine_link.process_output import ProcessOutput

PRINTED = """starting
  indented, and no traceback
Traceback (most recent call last):
  File "engine.py", line 1, in <module>
    step()
ValueError: of sk-lmx-secret

afterwards"""
WANTED = [
    ("info", "starting"),
    ("info", "  indented, and no traceback"),
    ("error", "ValueError: of sk-lmx-secret"),
    ("info", "afterwards"),
]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_lines_and_tracebacks_become_events_however_split(size: int) -> None:
    with structlog.testing.capture_logs() as events:
        lines = OutputLines("engine printed")
        data = PRINTED.encode()
        for start in range(0, len(data), size):
            lines.take(data[start : start + size])
        lines.end()
    assert [(event["log_level"], event["text"]) for event in events] == WANTED
    assert events[2]["traceback"].splitlines()[::3] == ["Traceback (most recent call last):", WANTED[2][1]]


def test_long_truncated_or_binary_output_is_still_logged() -> None:
    with structlog.testing.capture_logs() as events:
        lines = OutputLines("engine printed")
        lines.take(b"x" * (3 * MAX_LINE_BYTES) + b"\xff\n\n")
        lines.take(b"Traceback (most recent call last):\n  File 1\n")
        lines.end()
        lines.end()
    assert [len(event["text"]) for event in events[:-1]] == [MAX_LINE_BYTES] * 3 + [1]
    assert events[-1]["traceback"].endswith("File 1")
    assert len(events) == 5


def test_dying_process_produces_only_json_events(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    log = structlog.wrap_logger(structlog.PrintLogger(written), processors=[structlog.processors.JSONRenderer()])

    async def scenario() -> None:
        lines = OutputLines("engine printed", log)
        output = ProcessOutput(lines.take, lines.end)
        program = "print('hello', flush=True); raise ValueError('gone\\n{}')"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=output.write_fd, stderr=subprocess.STDOUT
        )
        output.close_write_end()
        await process.wait()
        assert output.last_line() is not None
        output.close()

    asyncio.run(scenario())
    events: list[dict[str, Any]] = [json.loads(line) for line in written.getvalue().splitlines()]
    assert events[0] == {"event": "engine printed", "text": "hello"}
    assert "ValueError: gone" in events[1]["text"]
    assert events[2]["text"] == "{}"
