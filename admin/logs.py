"""Where the server's log goes: standard error, so that standard output holds only what the start announces."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logs() -> None:
    """One line an event, in colour on a terminal."""
    # Libraries log through the standard module; their warnings belong to the same stream.
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
