"""The server's log, written to standard error, so that standard output contains only the startup messages."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any, Literal

import structlog

from loramux.admin.client.safe_text import safe_text

LogFormat = Literal["console", "json"]

_SECRET = re.compile(r"sk-lmx-[0-9A-Za-z]{16}-[0-9A-Za-z]+|(?i:bearer)\s+\S+")


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
    structlog.configure(processors=[*shared, renderer], logger_factory=_LossyLogger)
    # Libraries log through the standard logging module. Their warnings go to the same stream in the same format.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared[:2], structlog.stdlib.add_logger_name, *shared[2:]],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


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
