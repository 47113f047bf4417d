"""A replica as one writes it for Ray Serve without loramux's sessions: one call of the handle for each request."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from ray import serve

from loramux.engine.loop.config import EngineConfig
from loramux.engine.protocol.messages import Add, Finished, FromEngine, Load, StepOutput
from loramux.platform.engine_link.local_engine import LocalEngine

LOAD_WAIT_S = 60.0


class PlainReplica:
    """Runs one engine. `config` is an EngineConfig as JSON. Ray Serve calls the public methods."""

    async def __init__(self, config: str, command: tuple[str, ...]) -> None:  # type: ignore[misc]
        # Ray Serve awaits the constructor.
        self._engine = LocalEngine(msgspec.json.decode(config, type=EngineConfig), command=command)
        self._encoder = msgspec.msgpack.Encoder()
        await self._engine.start()

    async def announce(self) -> bytes:
        return self._encoder.encode(self._engine.info)

    async def generate(self, add: bytes) -> AsyncGenerator[bytes, None]:
        message = msgspec.msgpack.decode(add, type=Add)
        digest = serve.get_multiplexed_model_id()
        if digest:
            await self.adapter(digest)
        async for item in self._engine.submit(message):
            told: FromEngine = item if isinstance(item, Finished) else StepOutput(outputs=(item,))
            yield self._encoder.encode(told)

    async def adapter(self, digest: str) -> str:
        await self._engine.call(Load(digest=digest), LOAD_WAIT_S)
        return digest


def multiplexed(num_slots: int) -> type[PlainReplica]:
    """The class whose adapters Ray Serve counts, evicts and routes by."""

    class MultiplexedReplica(PlainReplica):
        @serve.multiplexed(max_num_models_per_replica=num_slots)  # type: ignore[untyped-decorator]
        async def adapter(self, digest: str) -> str:
            return await super().adapter(digest)

    return MultiplexedReplica
