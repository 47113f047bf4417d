"""The EngineClient of a server whose requests each go through a handle of Ray Serve, whose router chooses a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from loramux.engine.protocol.messages import (
    Add,
    AnswerT,
    EngineCall,
    EngineReady,
    Finished,
    FromEngine,
    SequenceOutput,
)
from loramux.platform.base_draw import BaseOrder
from loramux.platform.cluster.ray_connection import APP, connect
from loramux.platform.engine_link.engine_client import EngineUnavailable

_encoder = msgspec.msgpack.Encoder()


class HandleEngine:
    """Does what a benchmark needs of an EngineClient: it runs sequences. They cannot be aborted."""

    is_live = True
    trouble = None

    def __init__(self, is_multiplexed: bool) -> None:
        self._is_multiplexed = is_multiplexed
        self._handle: Any = None
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self.info: EngineReady | None = None

    @property
    def is_ready(self) -> bool:
        return self.info is not None

    @property
    def is_own_ready(self) -> bool:
        return self.is_ready

    async def start(self) -> None:
        from ray import serve

        self._handle = serve.get_app_handle(APP)
        announced = await self._handle.options(method_name="announce").remote()
        self.info = msgspec.msgpack.decode(announced, type=EngineReady)

    def submit(self, add: Add, order: BaseOrder | None = None) -> AsyncIterator[SequenceOutput | Finished]:
        return self._stream(add)

    async def _stream(self, add: Add) -> AsyncIterator[SequenceOutput | Finished]:
        model = {"multiplexed_model_id": add.digest} if self._is_multiplexed and add.digest else {}
        handle = self._handle.options(method_name="generate", stream=True, **model)
        async for data in handle.remote(_encoder.encode(add)):
            message = self._decoder.decode(data)
            if isinstance(message, Finished):
                yield message
                return
            for output in message.outputs:
                yield output

    def abort(self, sequence_id: str) -> None: ...

    def extend(self, sequence_id: str, max_tokens: int) -> None: ...

    async def call(self, message: EngineCall[AnswerT], timeout_s: float) -> AnswerT:
        raise EngineUnavailable("no call concerns all replicas")

    async def close(self) -> None: ...


class HandleMember:
    """Takes the place of ClusterMember in a server. `address` is the cluster's."""

    def __init__(self, address: str, is_multiplexed: bool) -> None:
        self.address = address
        self.client = HandleEngine(is_multiplexed)

    @property
    def info(self) -> EngineReady | None:
        return self.client.info

    @property
    def place(self) -> str:
        return f"cluster     {self.address}"

    async def spawn(self) -> None:
        await asyncio.to_thread(connect, self.address)

    async def start(self) -> None:
        await self.client.start()

    async def close(self) -> None: ...
