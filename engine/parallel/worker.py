"""The loop of workers other than worker 0."""

from __future__ import annotations

from multiprocessing.connection import Connection

import msgspec
import torch

from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.adapters.slot_tables import TableWriter
from loramux.engine.device.accelerator import Accelerator
from loramux.engine.execution.executor import Executor
from loramux.engine.execution.graph_executor import GraphExecutor
from loramux.engine.pages.pool_memory import room_for_steps
from loramux.engine.parallel.worker_messages import PlaceAdapter, RunStep, ToWorker, WarmUp


class Worker:
    """Executes the messages of worker 0 on this worker's share of the model.

    `pages` is the worker's pool, one page per row, and `target` the layout of its adapters.
    """

    def __init__(
        self,
        executor: Executor,
        tables: TableWriter,
        pages: torch.Tensor,
        target: PackTarget,
        accelerator: Accelerator,
    ) -> None:
        self._executor = executor
        self._tables = tables
        self._pages = pages
        self._target = target
        self._accelerator = accelerator

    def serve(self, connection: Connection) -> None:
        """Execute messages until the connection is closed."""
        decoder = msgspec.msgpack.Decoder(ToWorker)
        while True:
            try:
                received = connection.recv_bytes()
            except EOFError:
                return
            self.execute(decoder.decode(received))

    def execute(self, message: ToWorker) -> None:
        match message:
            case RunStep():
                self._executor.submit(message.batch)
            case WarmUp():
                assert isinstance(self._executor, GraphExecutor)
                with room_for_steps(message.max_batch_tokens):
                    self._executor.warm_up(message.shapes)
            case PlaceAdapter():
                self._place(message)

    def _place(self, message: PlaceAdapter) -> None:
        outer_ranks = message.outer_ranks.array
        layout = self._target.layout(message.ranks.array, outer_ranks, message.has_affines, message.rows)
        payload = message.payload.array
        packed = PackedAdapter(message.digest, layout, message.scales.array, payload, message.outer_scales.array)
        self._accelerator.upload(self._pages, message.pages, torch.from_numpy(payload), self._accelerator.fence())
        self._tables.write(message.slot, message.pages, packed)
