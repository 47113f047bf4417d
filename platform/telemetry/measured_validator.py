"""Counts and times validations."""

from __future__ import annotations

import time

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.validation.validator import Accepted, ValidationJob, Validator
from loramux.platform.telemetry.package_metrics import IngestMetrics


class MeasuredValidator:
    """Delegates to another validator. The outcomes are `accepted`, `rejected`, and `failed` if there is no verdict."""

    def __init__(self, validator: Validator, metrics: IngestMetrics) -> None:
        self._validator = validator
        self._metrics = metrics

    def validate(self, job: ValidationJob, target: PackTarget) -> Accepted:
        started_s = time.monotonic()
        outcome = "failed"
        try:
            accepted = self._validator.validate(job, target)
            outcome = "accepted"
        except AdapterRejected:
            outcome = "rejected"
            raise
        else:
            return accepted
        finally:
            self._metrics.validations.labels(outcome).inc()
            self._metrics.validation_seconds.observe(time.monotonic() - started_s)
