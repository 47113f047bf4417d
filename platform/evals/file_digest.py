"""The checksum by which aliases and results name an eval's file."""

from __future__ import annotations

import hashlib


def lines_sha256(content: bytes) -> str:
    """Return the SHA-256 of the file's lines. Line endings, empty lines and spaces around lines do not count."""
    lines = (line.strip() for line in content.split(b"\n"))
    return hashlib.sha256(b"\n".join(line for line in lines if line)).hexdigest()
