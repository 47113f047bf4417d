"""The server's log, written to standard error, so that standard output contains only the startup messages."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any, Literal

import structlog

from loramux.admin.client.safe_text import safe_text

LogFormat = Literal["console", "json"]

_SECRET = re.compile(r"sk-lmx-[0-9A-Za-z]{16}-[0-9A-Za-z]+|(?i:bearer)\s+\S+")


REPEAT_S = 60.0
"""Time for which the same trouble of work in the background is not logged again, in seconds."""

_TRYING_AGAIN = "; trying again"
"""End of the events of work in the background that fails and is repeated."""


class _LossyLogger(structlog.PrintLogger):
    """Prints to standard error. A line that cannot be written, for example to a full disk, is dropped."""

    def __init__(self, *_: object) -> None:
        super().__init__(sys.stderr)

    def msg(self, message: str) -> None:
        with suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = msg


def configure_logs(log_format: LogFormat = "console") -> None:
    """Log each event as text (in colour on a terminal) or as a line of JSON. A request's events include its ID."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        hide_secrets,
    ]
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if log_format == "console":
        # JSON escapes these characters itself.
        shared.append(replace_control_characters)
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    processors: list[structlog.typing.Processor] = [*shared[:2], RepeatedTrouble(), *shared[2:], renderer]
    structlog.configure(processors=processors, logger_factory=_LossyLogger)
    # Libraries log through the standard logging module. Their warnings go to the same stream in the same format.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared[:2], structlog.stdlib.add_logger_name, *shared[2:]],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


class RepeatedTrouble:
    """Drops events of work in the background that fails again for the same reason, except one per `REPEAT_S`.

    During a database failure, several loops try again every second, and their lines would hide all others. The next
    event that is logged has the number of dropped ones as `left_out`. Events of requests, and events with a traceback,
    are always logged. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._logged: dict[str, tuple[float, int]] = {}
        """When each trouble was last logged, and how often it has been dropped since."""

    def __call__(self, _: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if not str(event["event"]).endswith(_TRYING_AGAIN) or "request_id" in event or event.get("exc_info"):
            return event
        # The time of the line is not among its fields yet.
        trouble, now_s = str(sorted(event.items())), self._clock()
        with self._lock:
            logged_s, num_dropped = self._logged.pop(trouble, (-REPEAT_S, 0))
            if now_s - logged_s < REPEAT_S:
                self._logged[trouble] = logged_s, num_dropped + 1
                raise structlog.DropEvent
            # Trouble that has ended, or whose text differs each time, is forgotten.
            self._logged = {one: last for one, last in self._logged.items() if now_s - last[0] < 2 * REPEAT_S}
            self._logged[trouble] = now_s, 0
        if num_dropped:
            event["left_out"] = num_dropped
        return event


def hide_secrets(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Mask anything that looks like a key or a bearer token, because an exception's text can contain any input."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = _SECRET.sub("[hidden]", value)
    return event


def replace_control_characters(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Keep text of requests and files from controlling the terminal."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = safe_text(value)
    return event
