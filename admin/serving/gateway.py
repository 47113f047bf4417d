"""`loramux gateway`: a gateway process that uses a server's engine and database and supervises neither."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import AsyncExitStack, ExitStack
from functools import partial

import uvloop

from loramux.admin.errors import StartRefused
from loramux.admin.server.client_addresses import TrustedProxies
from loramux.admin.server.connection_limits import ListenerLimits, make_room
from loramux.admin.server.data_directory import DataDirectory, open_data_directory
from loramux.admin.server.extensions import load_extensions
from loramux.admin.server.gguf_base import with_model_directory
from loramux.admin.server.listeners import bind, is_loopback, url_of
from loramux.admin.server.logs import configure_logs
from loramux.admin.server.pulled_model import local_model
from loramux.admin.server.required_sandbox import require_sandbox
from loramux.admin.server.settings import Settings
from loramux.admin.server.stop_signals import StopSignals
from loramux.admin.serving.local_engines import open_several
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.model_files import model_sha256
from loramux.engine.protocol.errors import EngineError
from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.engine_link.followed_engine import JoinRefused
from loramux.platform.engine_link.joined_engine import JoinedEngine
from loramux.platform.replicas.data_parallel import DataParallelEngines, engine_name
from loramux.platform.replicas.records import base_fingerprint

SETTLE_S = 5.0
"""Time, in seconds, allowed for the last settlements after both listeners have closed."""


def run(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM. Raises StartRefused before any port is listening."""
    configure_logs(settings.log_format)
    load_extensions()
    require_sandbox(settings)
    if not settings.engine:
        raise StartRefused("a gateway needs an engine: set --engine to the path that 'loramux serve' prints")
    if settings.is_database_embedded:
        raise StartRefused(
            "a gateway needs its server's database: set --database-url; for a server started without this setting, "
            "it is sqlite:///DIR/loramux.db, where DIR is the server's data directory"
        )
    limits = make_room(settings.max_connections, settings.max_connections_per_address)
    with ExitStack() as stack:
        settings = with_model_directory(stack.enter_context(local_model(settings)))
        try:
            model = ModelConfig.load(settings.model_dir)
        except EngineError as error:
            raise StartRefused(str(error)) from error
        gateway = stack.enter_context(bind(settings.host, settings.port, "port", settings.reuse_port))
        admin = stack.enter_context(bind(settings.admin_host, settings.admin_port, "admin_port"))
        directory = stack.enter_context(open_data_directory(settings.data_dir))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, directory, model, gateway, admin, limits))


async def _serve(
    settings: Settings,
    directory: DataDirectory,
    model: ModelConfig,
    gateway_listener: socket.socket,
    admin_listener: socket.socket,
    limits: ListenerLimits,
) -> None:
    signals = StopSignals()
    async with AsyncExitStack() as stack:
        stack.enter_context(signals.caught())
        engine, several = await _joined(settings, stack)
        # Everything else is imported only now, so that a wrong engine is refused at once.
        from loramux.admin.server.background import in_background
        from loramux.admin.server.connection_registry import ConnectionRegistry
        from loramux.admin.server.http_servers import HttpServer, serve_until_stopped
        from loramux.admin.serving.gateway_assembly import assemble_gateway
        from loramux.platform.listener.health import begin_drain

        blocking = assemble_gateway(settings, directory, model, engine, is_loopback(admin_listener), several)
        assembled = await asyncio.to_thread(blocking.__enter__)
        stack.push_async_callback(asyncio.to_thread, blocking.__exit__, None, None, None)
        # Close the engine again before the services: its requests end, and their settlements need the database.
        close_engine = engine.close if several is None else several.close
        stack.push_async_callback(close_engine)

        def announce() -> None:
            engines = ", ".join(map(str, settings.engine))
            lines = [
                f"loramux gateway serves {settings.resolved_served_name} (engine {engines})",
                f"  OpenAI API  {url_of(gateway_listener)}/v1",
                f"  metrics     {url_of(admin_listener)}",
            ]
            print("\n".join(lines), flush=True)

        proxies = TrustedProxies(settings.trusted_proxies)
        openai = ConnectionRegistry(limits.openai, proxies, assembled.services.metrics.listeners, "openai")
        admin = ConnectionRegistry(limits.admin, proxies, assembled.services.metrics.listeners, "admin")
        await stack.enter_async_context(in_background(assembled.services.run.maintenance.run(), "maintenance"))
        if assembled.batches is not None:
            batches = assembled.batches.run(signals.drain, settings.run_batches)
            await stack.enter_async_context(in_background(batches, "batches"))
        await serve_until_stopped(
            HttpServer(assembled.gateway_app, gateway_listener, openai, settings.keep_alive_s, settings.root_path),
            HttpServer(assembled.operations_app, admin_listener, admin, settings.keep_alive_s),
            signals,
            settings.drain_s,
            announce,
            partial(begin_drain, assembled.operations_app),
            close_engine,
        )
        await assembled.services.run.requests.drain(SETTLE_S)


async def _joined(settings: Settings, stack: AsyncExitStack) -> tuple[EngineClient, DataParallelEngines | None]:
    """Join the engines. Return their client, and what is behind it if there are several. Raises StartRefused."""
    digest, strikes = model_sha256(settings.model_dir), CrashStrikes(time.monotonic)
    joined = {
        engine_name(number): JoinedEngine(path.absolute(), digest, strikes=strikes)
        for number, path in enumerate(settings.engine)
    }
    for engine in joined.values():
        try:
            await engine.start()
        except JoinRefused as error:
            raise StartRefused(str(error)) from error
        stack.push_async_callback(engine.close)
    if len(joined) == 1:
        return engine, None
    bases = {base_fingerprint(engine.info) for engine in joined.values() if engine.info is not None}
    if len(bases) > 1:
        raise StartRefused(
            "the engines serve different weights, dtypes or quantisations: set --engine to the sockets of one server"
        )
    several = open_several(joined, settings.router)
    stack.push_async_callback(several.close)
    await several.follow()
    return several.engine, several
