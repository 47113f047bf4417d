"""Summaries of the adapters that a server holds: the first 8 bytes of each digest, sorted."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable

from loramux.platform.routing.views import digest_prefix

MAX_ADAPTERS = 4096
"""Maximum number of adapters in a summary."""
PREFIX_BYTES = 8
MAX_SUMMARY_BYTES = MAX_ADAPTERS * PREFIX_BYTES


class SummaryRefused(Exception):
    """Another server's summary cannot be used. The message says why."""


def summarise(digests: Iterable[str]) -> bytes:
    """Return a summary of at most MAX_ADAPTERS adapters. Further adapters are left out, because a summary is only a
    hint.
    """
    prefixes = sorted({digest_prefix(digest) for digest in digests})[:MAX_ADAPTERS]
    return b"".join(prefix.to_bytes(PREFIX_BYTES) for prefix in prefixes)


def read_summary(summary: bytes) -> frozenset[int]:
    """Return the prefixes in a summary. Raises SummaryRefused if `summarise` cannot have produced the summary."""
    if len(summary) > MAX_SUMMARY_BYTES:
        raise SummaryRefused(f"the summary of its adapters has more than {MAX_SUMMARY_BYTES} bytes")
    if len(summary) % PREFIX_BYTES:
        raise SummaryRefused("the summary of its adapters is cut off")
    prefixes = struct.unpack(f">{len(summary) // PREFIX_BYTES}Q", summary)
    if any(left >= right for left, right in itertools.pairwise(prefixes)):
        raise SummaryRefused("the summary of its adapters is not sorted")
    return frozenset(prefixes)
