"""A process that runs batches until it is killed: `python -m tests.platform.batches.batch_server URL BLOBS SCRATCH`."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from loramux.adapter_store.blobs.local import LocalBlobStore
from loramux.migrations.database import Database
from loramux.platform.batches.batch_claims import BatchQueue
from loramux.platform.batches.runner import BatchRunner
from loramux.platform.batches.tenant_files import TenantFiles
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.demo_base import DEMO_BASE
from tests.platform.batches.batch_lab import LIMITS, PACE
from tests.platform.gateways import open_gateway
from tests.platform.scripted_engine import Script

LEASE_US = 300_000


async def main(url: str, blobs: Path, scratch: Path) -> None:
    database = Database(url)
    with ThreadPoolExecutor(4) as executor:
        async with open_gateway(database, ModelTokenizer.load(DEMO_BASE), executor) as gateway:
            gateway.engine.script = lambda add: Script(token_ids=(5, 6, 7), delay_s=0.005)
            files = TenantFiles(database, LocalBlobStore(blobs), scratch)
            services = gateway.services
            runner = BatchRunner(
                services, files, BatchQueue(database, LEASE_US), services.metrics.batches, LIMITS, PACE
            )
            print("runs", flush=True)
            await runner.run(asyncio.Event())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
