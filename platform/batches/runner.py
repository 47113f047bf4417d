"""Claims batches, checks their files, runs them, and writes their output files. Deletes expired files."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog

from loramux.adapter_store.errors import BlobStoreUnavailable, ClaimLost
from loramux.platform.batches.batch_claims import BatchClaim, BatchQueue, ClaimedBatch
from loramux.platform.batches.batch_files import BatchFiles
from loramux.platform.batches.batch_rows import Batch
from loramux.platform.batches.batch_run import BatchPace, BatchRun
from loramux.platform.batches.line_run import TROUBLE
from loramux.platform.batches.places import MAX_RUNNING, PlaceGivenUp, Places
from loramux.platform.batches.room import Room, RoomLimits
from loramux.platform.batches.tenant_files import TenantFiles
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.errors import ApiError
from loramux.platform.requests.claim_loop import ClaimLoop
from loramux.platform.requests.services import GatewayServices
from loramux.platform.telemetry.package_metrics import BatchMetrics
from loramux.platform.threads import call_on

NUM_THREADS = 2
SWEEP_INTERVAL_S = 600.0
"""Interval between sweeps of expired files."""

log = structlog.get_logger(__name__)


class BatchRunner:
    """Claims batches and runs them until cancelled. Several servers on one database can run batches concurrently."""

    def __init__(
        self,
        services: GatewayServices,
        files: TenantFiles,
        queue: BatchQueue,
        metrics: BatchMetrics,
        limits: RoomLimits | None = None,
        pace: BatchPace | None = None,
    ) -> None:
        self._services = services
        self._files = files
        self._queue = queue
        self._metrics = metrics
        requests = services.run.requests
        self._room = Room(services.engine, limits or RoomLimits(), lambda: requests.num_awaited > 0)
        self._pace = pace or BatchPace()
        self._places = Places(queue, MAX_RUNNING)

    async def run(self, draining: asyncio.Event, claims: bool = True) -> None:
        """Run until cancelled or until `draining` is set. Another server can then continue the batches at once.

        Without `claims`, only delete expired files.
        """
        # Files are long work, which must not occupy the threads of requests.
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="batches") as executor:
            loop = ClaimLoop(
                services=self._services,
                claim=self._places.claim,
                claim_without_engine=self._queue.claim_ending,
                run_one=partial(self._run, executor),
                what="batches",
                max_running=MAX_RUNNING,
                poll_s=self._pace.poll_s,
            )
            sweep = asyncio.create_task(self._sweep(executor))
            try:
                await (loop.run(draining) if claims else draining.wait())
            finally:
                sweep.cancel()
                await asyncio.gather(sweep, return_exceptions=True)

    async def _sweep(self, executor: ThreadPoolExecutor) -> None:
        while True:
            try:
                await call_on(executor, self._files.clear_up)
            except (*TROUBLE, BlobStoreUnavailable) as error:
                log.warning("files cannot be cleared up; trying again", error=repr(error))
            except Exception:
                log.exception("files cannot be cleared up; trying again")
            await asyncio.sleep(SWEEP_INTERVAL_S)

    async def _run(self, executor: ThreadPoolExecutor, claimed: ClaimedBatch) -> None:
        batch, claim, run = claimed.batch, claimed.claim, None
        try:
            with TemporaryDirectory(dir=self._files.scratch) as scratch:
                files = BatchFiles(claim, self._files, batch, Path(scratch), self._services.settings)
                shared = (self._metrics, self._room, self._places, self._pace)
                run = BatchRun(self._services, claim, *shared, batch, files)
                await run.settle_earlier()
                if not await call_on(executor, files.fetch_input):
                    return
                state = await call_on(executor, files.begin) if batch.state == "validating" else batch.state
                if state == "in_progress":
                    await run.run_lines()
                if state != "failed":
                    await call_on(executor, files.finish)
        except ClaimLost:
            log.info("a batch was taken over or deleted", batch_id=batch.id)
        except asyncio.CancelledError:
            # The server stops. Another one, or this one after a restart, continues the batch at once.
            await self._give_back(claim, batch)
            raise
        except PlaceGivenUp as error:
            log.info("a batch is given back", batch_id=batch.id, reason=str(error))
            await self._give_back(claim, batch)
        except EngineUnavailable as error:
            log.warning("a batch is given back", batch_id=batch.id, reason=str(error))
            await self._give_back(claim, batch)
        except (*TROUBLE, ApiError, BlobStoreUnavailable) as error:
            # The claim expires, and a server continues the batch.
            log.warning("a batch was interrupted; it continues later", batch_id=batch.id, error=repr(error))
        except Exception:
            log.exception("a batch was interrupted unexpectedly; it continues later", batch_id=batch.id)
        finally:
            self._places.leave(batch.tenant_id)

    async def _give_back(self, claim: BatchClaim, batch: Batch) -> None:
        with suppress(ClaimLost, *TROUBLE):
            await self._services.call(claim.give_back, batch.id)
