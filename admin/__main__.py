"""Starts `loramux`. Ctrl-C and output that cannot be written end it with one sentence instead of a traceback."""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
from typing import NoReturn

from loramux.admin.exit_codes import INTERRUPTED, REFUSED


def main() -> None:
    _open_standard_files()
    try:
        # Imported here, because the import takes 0.3 s, in which Ctrl-C can come. It drops few of its objects.
        gc.disable()
        from loramux.admin.cli import main as run

        gc.enable()
        try:
            run()
        finally:
            _flush()
    except KeyboardInterrupt:
        _end("interrupted", INTERRUPTED, "\n")
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        # Also the output, if it was written before the end.
        _end(f"a file or the output cannot be written: {error.strerror}", REFUSED)


def _flush() -> None:
    """Write what is left of the output. A reader that has gone ends the command without a sentence."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Otherwise, the interpreter would try to write the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            raise SystemExit(REFUSED) from None
        _end(f"the output cannot be written: {error.strerror}", REFUSED)


def _open_standard_files() -> None:
    """Replace closed standard files by the null device, and write characters that the encoding lacks as escapes."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # A socket or a file would get the number otherwise, here or in a child process.
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, "w" if number else "r"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _end(message: str, code: int, before: str = "") -> NoReturn:
    print(f"{before}loramux: {message}", file=sys.stderr)
    raise SystemExit(code) from None


if __name__ == "__main__":
    main()
