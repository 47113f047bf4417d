"""The limits under which these tests call S3: small parts, and little or more patience."""

from __future__ import annotations

from loramux.adapter_store.blobs.s3_limits import MIN_PART_BYTES, S3Limits

SMALL_PARTS = S3Limits(part_bytes=MIN_PART_BYTES)
"""Parts as small as S3 takes them, so that tests need not move much."""

HURRIED = S3Limits(
    connect_s=1.0,
    read_s=0.5,
    call_s=3.0,
    body_s=4.0,
    first_pause_s=0.01,
    max_pause_s=0.05,
    part_bytes=MIN_PART_BYTES,
)
"""Limits under which a test that waits for a hung store ends soon; for small blobs on a busy machine."""

PATIENT = S3Limits(read_s=2.0, first_pause_s=0.01, max_pause_s=0.05, part_bytes=MIN_PART_BYTES)
"""For large ones."""
