"""Calls to S3, with a deadline, retries, a retry budget, a circuit breaker, and translated errors."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from botocore.exceptions import ClientError, ConnectTimeoutError, NoCredentialsError, ReadTimeoutError

from loramux.adapter_store.blobs.circuit_breaker import CircuitBreaker
from loramux.adapter_store.blobs.retry_budget import RetryBudget
from loramux.adapter_store.blobs.s3_connections import AttemptTimer
from loramux.adapter_store.blobs.s3_limits import Deadline, S3Limits
from loramux.adapter_store.errors import BlobDamaged, BlobNotFound, BlobStoreUnavailable

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_ABSENT = ("404", "NoSuchKey", "NotFound", "NoSuchUpload")
_CONTENDED = ("ConditionalRequestConflict", "OperationAborted")
# The store received a damaged or incomplete request.
_DAMAGED_ON_THE_WAY = ("BadDigest", "IncompleteBody", "InvalidDigest", "RequestTimeout", "XAmzContentSHA256Mismatch")
_CODE = re.compile(r"[A-Za-z0-9.]{1,64}")

T = TypeVar("T")


class PreconditionFailed(Exception):
    """The store refused a request because of its If-None-Match or If-Match header."""


class RangeRefused(Exception):
    """The blob has no bytes in the requested range."""


class AttemptFailed(Exception):
    """One attempt failed.

    `is_outage` is set if the failure counts against the store as a whole, `can_retry` if another attempt may succeed,
    and `is_damage` if the received bytes differ from the stored ones.
    """

    def __init__(self, reason: str, *, can_retry: bool = True, is_outage: bool = True, is_damage: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.can_retry = can_retry
        self.is_outage = is_outage
        self.is_damage = is_damage


class S3Calls:
    """Sends requests to one bucket. Thread-safe."""

    def __init__(
        self,
        client: S3Client,
        bucket: str,
        limits: S3Limits,
        breaker: CircuitBreaker,
        budget: RetryBudget,
        pause: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.client = client
        self.bucket = bucket
        self.limits = limits
        self._breaker = breaker
        self._budget = budget
        self._pause = pause
        self._chance = chance

    def run(self, what: str, attempt: Callable[[], T], deadline: Deadline | None = None) -> T:
        """Make attempts until one succeeds or no retry is left.

        An attempt sends requests with `ask` and may raise AttemptFailed itself.

        Raises BlobNotFound, PreconditionFailed, RangeRefused, BlobStoreUnavailable, or any other error that `attempt`
        raises.
        """
        deadline = deadline or Deadline(self.limits.call_s)
        for number in range(self.limits.max_attempts):
            closed_for_s = self._breaker.enter()
            if closed_for_s is not None:
                raise self._unavailable(what, "repeated failures, not retrying yet", closed_for_s)
            try:
                with AttemptTimer(deadline.remaining_s) as timer:
                    found = attempt()
            except (BlobNotFound, PreconditionFailed, RangeRefused):
                self._breaker.succeeded()
                raise
            except AttemptFailed as failure:
                if timer.has_fired:
                    failure.reason = "deadline exceeded"
                if failure.is_outage:
                    self._breaker.failed()
                else:
                    self._breaker.succeeded()
                self.pause_or_give_up(what, number, failure, deadline)
            else:
                self._breaker.succeeded()
                self._budget.succeeded()
                return found
        raise AssertionError("unreachable")

    def send(self, what: str, request: Callable[[], T], deadline: Deadline | None = None) -> T:
        """Make attempts that each send one request. Raises the same errors as `run`."""
        return self.run(what, lambda: self.ask(request), deadline)

    def ask(self, request: Callable[[], T]) -> T:
        """Send one request of an attempt. Raises BlobNotFound, PreconditionFailed, RangeRefused or AttemptFailed."""
        try:
            return request()
        except ClientError as error:
            raise _meaning(error) from error
        except (ReadTimeoutError, ConnectTimeoutError) as error:
            raise AttemptFailed("timed out") from error
        except NoCredentialsError as error:
            raise AttemptFailed("no credentials found", can_retry=False, is_outage=False) from error
        except Exception as error:
            # Catch more than BotoCoreError: a damaged response can make boto3's parsers raise any exception.
            raise AttemptFailed(f"connection failed ({type(error).__name__})") from error

    def pause_or_give_up(self, what: str, number: int, failure: AttemptFailed, deadline: Deadline) -> None:
        """Pause after attempt `number` failed, or raise BlobDamaged or BlobStoreUnavailable if no retry is left."""
        # Pause for a random time up to a bound that doubles with each attempt, so that callers do not retry in
        # lockstep.
        pause_s = self._chance() * min(self.limits.max_pause_s, self.limits.first_pause_s * 2**number)
        may_retry = failure.can_retry and number < self.limits.max_attempts - 1 and pause_s < deadline.remaining_s
        if may_retry and self._budget.take_retry():
            self._pause(pause_s)
            return
        if failure.is_damage:
            raise BlobDamaged(f"cannot {what} in the bucket {self.bucket}: {failure.reason}") from failure
        raise self._unavailable(what, failure.reason) from failure

    def _unavailable(self, what: str, reason: str, retry_after_s: float | None = None) -> BlobStoreUnavailable:
        if reason == "NoSuchBucket":
            return BlobStoreUnavailable(f"the bucket {self.bucket} does not exist")
        return BlobStoreUnavailable(f"cannot {what} in the bucket {self.bucket}: {reason}", retry_after_s)


def _meaning(error: ClientError) -> Exception:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = error.response.get("Error", {}).get("Code", "")
    if not _CODE.fullmatch(code):
        code = str(status)
    if code == "NoSuchBucket":
        return AttemptFailed(code, can_retry=False, is_outage=False)
    if code in _ABSENT:
        return BlobNotFound("no such blob")
    if status == 412:
        return PreconditionFailed(code)
    if status == 416:
        return RangeRefused(code)
    if code in _CONTENDED or status == 409 or code in _DAMAGED_ON_THE_WAY:
        return AttemptFailed(code, is_outage=False)
    if status in (408, 429) or (status >= 500 and status != 501):
        return AttemptFailed(code)
    # A retry would not help with expired credentials, a missing permission or an unsupported method.
    hint = "; check the credentials and their permissions" if status in (401, 403) else ""
    return AttemptFailed(f"{code}{hint}", can_retry=False, is_outage=False)
