"""`loramux serve`: checks settings, binds ports, starts the engine, assembles the services, serves and drains."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import TYPE_CHECKING

import msgspec
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
from loramux.admin.server.quantized_base import quantize_base
from loramux.admin.server.required_sandbox import require_sandbox
from loramux.admin.server.settings import Settings
from loramux.admin.server.stop_signals import StopSignals
from loramux.admin.serving.engine_plans import plan_engines
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.weight_files import checkpoint_of
from loramux.engine.loop.config import (
    DEFAULT_BATCH_TOKENS,
    DEFAULT_SEQUENCES,
    DEFAULT_SPECULATE,
    EngineConfig,
    check_activations,
    check_host_page,
    check_kv_host_bytes,
    check_workers,
    resolve_device,
    resolve_dtype,
    resolve_max_model_len,
)
from loramux.engine.parallel.weight_parts import check_groups
from loramux.engine.protocol.errors import ConfigNotUsable, EngineError
from loramux.engine.protocol.messages import EngineReady
from loramux.engine.quantizing.quantize import shared_group
from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.engine_link.engine_process import ENGINE_COMMAND
from loramux.platform.engine_link.local_engine import EngineStartError, LocalEngine, Supervision
from loramux.platform.engine_link.output_lines import OutputLines

if TYPE_CHECKING:
    from loramux.admin.serving.assembly import OpenSharing
    from loramux.admin.serving.cluster import ClusterMember
    from loramux.admin.serving.local_engines import LocalEngines
    from loramux.platform.replicas.peer_relay import RelayedEngine

SETTLE_S = 5.0
"""Time, in seconds, allowed for the last settlements after both listeners have closed."""


def run(
    settings: Settings,
    command: tuple[str, ...] = ENGINE_COMMAND,
) -> None:
    """Serve until SIGINT or SIGTERM. Raises StartRefused before any port is listening.

    `command` is the command line that starts the engine.
    """
    configure_logs(settings.log_format)
    load_extensions()
    require_sandbox(settings)
    has_peers = settings.peer_address is not None
    limits = make_room(settings.max_connections, settings.max_connections_per_address, has_peers)
    with ExitStack() as stack:
        settings = with_model_directory(stack.enter_context(local_model(settings)))
        if settings.cluster is not None:
            # The engines divide the base, on machines that may have more threads than this one.
            settings = settings.model_copy(update={"tensor_parallel_size": None})
        model, config = read_model(settings)
        configs = plan_engines(settings, config)
        gateway = stack.enter_context(bind(settings.host, settings.port, "port", settings.reuse_port))
        admin = stack.enter_context(bind(settings.admin_host, settings.admin_port, "admin_port"))
        settings = with_bound_ports(settings, gateway, admin)
        peers = _bind_peers(settings, stack)
        directory = stack.enter_context(open_data_directory(settings.data_dir))
        if settings.quantization is not None:
            base = quantize_base(config, directory.quantized.absolute(), settings.quantization)
            configs = [msgspec.structs.replace(one, quantized_dir=str(base.directory)) for one in configs]
            print(f"weights quantised to {settings.quantization}; {base.quality}", flush=True)
            if base.warning is not None:
                print(f"warning: {base.warning}", flush=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, directory, model, configs, command, gateway, admin, peers, limits))


def with_bound_ports(settings: Settings, gateway: socket.socket, admin: socket.socket) -> Settings:
    """Replace port 0 with the port that the system has chosen, because clients cannot call port 0."""
    ports = {"port": gateway.getsockname()[1], "admin_port": admin.getsockname()[1]}
    return settings.model_copy(update=ports)


def read_model(settings: Settings, *, runs_here: bool = True) -> tuple[ModelConfig, EngineConfig]:
    """Read the model directory and derive the engine's configuration. Raises StartRefused before anything starts.

    If the engine does not run on this machine, the setting `device` must name the device, because this machine may lack
    it.
    """
    try:
        requested = "cuda" if settings.devices and settings.device == "auto" else settings.device
        num_gpus = (settings.data_parallel_size or 1) * (settings.tensor_parallel_size or 1)
        gpus = settings.devices or range(num_gpus)
        device = resolve_device(requested, gpus) if runs_here else requested
        if device == "auto":
            raise ConfigNotUsable("the engines run on other machines: set device to cpu or cuda")
        model = ModelConfig.load(settings.model_dir)
        config = EngineConfig(
            model_dir=str(settings.model_dir),
            blob_url=settings.resolved_blob_url,
            cache_dir=str((settings.disk_tier_dir or DataDirectory(settings.data_dir).disk_tier).absolute()),
            program_dir=str(DataDirectory(settings.data_dir).programs.absolute()) if device == "cuda" else None,
            device=device,
            dtype=resolve_dtype(settings.dtype, model, device),
            adapter_dtype=settings.adapter_dtype,
            kv_dtype=settings.kv_dtype,
            activations=settings.activations,
            pool_bytes=None if settings.pool_bytes is None else int(settings.pool_bytes),
            max_model_len=settings.max_model_len,
            max_batch_tokens=settings.max_batch_tokens or DEFAULT_BATCH_TOKENS[device],
            max_sequences=settings.max_sequences or DEFAULT_SEQUENCES[device],
            max_waiting_tokens=settings.max_waiting_tokens,
            max_waiting_s=settings.max_waiting_s,
            max_resident_adapters=settings.max_resident_adapters,
            max_pinned_share=settings.max_pinned_share,
            eviction_policy=settings.eviction_policy,
            disk_tier_bytes=int(settings.disk_tier_bytes),
            host_tier_bytes=int(settings.host_tier_bytes),
            kv_host_bytes=int(settings.kv_host_bytes),
            kv_disk_bytes=int(settings.kv_disk_bytes),
            pdl=settings.pdl,
            fused_lora=settings.fused_lora,
            speculate=settings.speculate or DEFAULT_SPECULATE[device],
            tensor_parallel_size=settings.tensor_parallel_size or 1,
            is_sandbox_required=settings.sandbox == "required",
            traces=settings.trace_config,
        )
        if settings.num_threads is not None:
            config = msgspec.structs.replace(config, num_threads=settings.num_threads)
        resolve_max_model_len(config, model)
        if settings.quantization is not None and model.quantization is not None:
            raise ConfigNotUsable(
                f"the model's weights are already quantised ({model.quantization.name}): omit --quantization"
            )
        is_quantized = settings.quantization is not None or model.quantization is not None
        check_activations(config, is_quantized)
        check_workers(config, model)
        check_host_page(config, model)
        if settings.quantization is not None:
            shared_group(model, settings.quantization, config.tensor_parallel_size)
        if runs_here:
            check_kv_host_bytes(config)
            if config.tensor_parallel_size > 1 and model.quantization is not None:
                check_groups(checkpoint_of(settings.model_dir), model, config.tensor_parallel_size)
    except EngineError as error:
        raise StartRefused(str(error)) from error
    return model, config


async def _serve(
    settings: Settings,
    directory: DataDirectory,
    model: ModelConfig,
    configs: Sequence[EngineConfig],
    command: tuple[str, ...],
    gateway_listener: socket.socket,
    admin_listener: socket.socket,
    peers: socket.socket | None,
    limits: ListenerLimits,
) -> None:
    signals = StopSignals()
    async with AsyncExitStack() as stack:
        stack.enter_context(signals.caught())
        try:
            engine, share = _engine(settings, directory, configs, command, peers)
            stack.push_async_callback(engine.close)
            # The engine imports torch and loads the model while this process imports everything else.
            await engine.spawn()
            from loramux.admin.server.background import in_background
            from loramux.admin.server.connection_registry import ConnectionRegistry
            from loramux.admin.server.http_servers import HttpServer, serve_until_stopped
            from loramux.admin.serving.assembly import assemble
            from loramux.platform.listener.health import begin_drain

            local = engine if isinstance(engine, LocalEngine) else engine.client
            blocking = assemble(settings, directory, model, configs[0], local, is_loopback(admin_listener), share)
            assembled = await asyncio.to_thread(blocking.__enter__)
            stack.push_async_callback(asyncio.to_thread, blocking.__exit__, None, None, None)
            # Close the engine again before the services: its requests end, and their settlements need the database.
            stack.push_async_callback(engine.close)
            if not await _started(engine, signals):
                return
            if engine.info is not None and engine.info.base_sha256 != assembled.base_id:
                raise StartRefused("the files in the model directory changed while the server started: start it again")
        except EngineStartError as error:
            raise StartRefused(str(error)) from error
        gateway, sharing = assembled.gateway, assembled.sharing
        presence = None if sharing is None or sharing.open_presence is None else sharing.open_presence()
        bootstrap_key = None
        if not await asyncio.to_thread(gateway.callers.api_keys.has_platform_admin):
            created = await asyncio.to_thread(gateway.callers.api_keys.create, None, "bootstrap")
            bootstrap_key = created.secret

        is_new = not (await asyncio.to_thread(gateway.callers.tenants.list, 1)).data

        def announce() -> None:
            urls = url_of(gateway_listener), url_of(admin_listener)
            peer_address = None if sharing is None else sharing.address
            if isinstance(engine, LocalEngine):
                place = f"engine      {engine.socket_path}  (for additional gateways: loramux gateway --engine)"
            else:
                place = engine.place
            _announce(settings, configs[0], engine.info, *urls, peer_address, bootstrap_key, place)
            if is_new:
                print(next_commands(urls[1], bootstrap_key), flush=True)

        proxies = TrustedProxies(settings.trusted_proxies)
        openai = ConnectionRegistry(limits.openai, proxies, gateway.metrics.listeners, "openai")
        admin = ConnectionRegistry(limits.admin, proxies, gateway.metrics.listeners, "admin")
        if presence is not None:
            stack.push_async_callback(presence.close)
            presence.start(signals.drain)
        upkeep = assembled.upkeep.run(assembled.own_server, signals.drain)
        await stack.enter_async_context(in_background(gateway.run.maintenance.run(), "maintenance"))
        await stack.enter_async_context(in_background(upkeep, "upkeep"))
        # When the drain begins, running evals and batches go back to the queue, and other servers continue them.
        await stack.enter_async_context(in_background(assembled.evals.run(signals.drain), "evals"))
        batches = assembled.batches.run(signals.drain, settings.run_batches)
        await stack.enter_async_context(in_background(batches, "batches"))
        await stack.enter_async_context(in_background(assembled.events.run(), "events"))
        await stack.enter_async_context(in_background(assembled.webhooks.run(signals.drain), "webhooks"))
        await serve_until_stopped(
            HttpServer(assembled.gateway_app, gateway_listener, openai, settings.keep_alive_s, settings.root_path),
            HttpServer(assembled.admin_app, admin_listener, admin, settings.keep_alive_s),
            signals,
            settings.drain_s,
            announce,
            partial(begin_drain, assembled.admin_app),
            engine.close,
        )
        await gateway.run.requests.drain(SETTLE_S)
        if presence is not None:
            await presence.drained(signals.hurry, settings.drain_s)


def _bind_peers(settings: Settings, stack: ExitStack) -> socket.socket | None:
    """Bind the listener for other servers, if this server shares requests."""
    if settings.peer_address is None:
        return None
    # Sharing needs cryptography and a router. A server that does not share requests never imports them.
    from loramux.admin.serving.sharing import bind_peers

    return stack.enter_context(bind_peers(settings, settings.peer_address))


def _engine(
    settings: Settings,
    directory: DataDirectory,
    configs: Sequence[EngineConfig],
    command: tuple[str, ...],
    peers: socket.socket | None,
) -> tuple[LocalEngine | LocalEngines | ClusterMember, OpenSharing | None]:
    """Return the engines of this server, or its membership in the cluster that runs the engines, and how the server
    shares requests.
    """
    if settings.cluster is not None:
        # Like sharing, below: a server with an engine of its own never imports it.
        from loramux.admin.serving.cluster import ClusterMember

        member = ClusterMember(settings, configs[0])
        return member, member.share
    supervision = Supervision(step_timeout_s=settings.engine_step_timeout_s)
    strikes = CrashStrikes(time.monotonic)
    if len(configs) > 1:
        from loramux.admin.serving.local_engines import LocalEngines

        is_shared = peers is not None
        several = LocalEngines(settings, directory, configs, supervision, command, strikes, is_shared=is_shared)
        if peers is None or several.front is None:
            return several, several.share
        engines = several.engines
        behind = engines.engine, several.front, engines.capacity, engines.engines
        return several, _sharing(settings, peers, *behind, strikes)
    config = configs[0]
    lines = OutputLines("engine printed") if settings.log_format == "json" else None
    engine = LocalEngine(config, supervision, command, socket_directory=directory.run, lines=lines, strikes=strikes)
    if peers is None:
        return engine, None
    return engine, _sharing(settings, peers, engine, engine, lambda: config.max_sequences, {}, strikes)


def _sharing(
    settings: Settings,
    peers: socket.socket,
    local: EngineClient,
    relayed: RelayedEngine,
    capacity: Callable[[], int],
    engines: Mapping[str, EngineClient],
    strikes: CrashStrikes,
) -> OpenSharing:
    from loramux.admin.serving.sharing import Sharing

    return partial(Sharing, settings, peers, local, relayed, capacity, engines, strikes)


async def _started(engine: LocalEngine | LocalEngines | ClusterMember, signals: StopSignals) -> bool:
    """Wait for the engine. Return False if a stop signal arrives first."""
    starting = asyncio.create_task(engine.start())
    stopping = asyncio.create_task(signals.drain.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        return False
    starting.result()
    return True


def _announce(
    settings: Settings,
    config: EngineConfig,
    info: EngineReady | None,
    url: str,
    admin_url: str,
    peer_address: str | None,
    bootstrap_key: str | None,
    place: str,
) -> None:
    weights = "" if info is None or info.quantization is None else f", weights in {info.quantization}"
    if info is not None and info.num_dequantized:
        weights += f", {info.num_dequantized} linear layers expanded to {config.dtype}"
    room = "" if info is None else f", room for {info.num_kv_tokens:,} tokens"
    drafts = "" if info is None or info.guesses is None else f", drafts from the {info.guesses}"
    if info is not None and info.num_host_kv_tokens:
        room += f" and {info.num_host_kv_tokens:,} in main memory"
    if info is not None and info.num_disk_kv_tokens:
        room += f" and {info.num_disk_kv_tokens:,} on disk"
    lines = [
        f"loramux serves {settings.resolved_served_name} ({config.device}, {config.dtype}{weights}{drafts}{room})",
        f"  OpenAI API  {url}/v1",
        f"  admin       {admin_url}",
        f"  console     {admin_url}{settings.admin_root_path}/console/",
    ]
    if bootstrap_key is not None:
        lines.append(f"  admin key   {bootstrap_key}  (shown this once: export it as LORAMUX_ADMIN_KEY)")
    if peer_address is not None:
        lines.append(f"  peers       {peer_address}  (for other servers on this database)")
    lines.append(f"  {place}")
    print("\n".join(lines), flush=True)


def next_commands(admin_url: str, bootstrap_key: str | None) -> str:
    """Return the commands with which the operator of a server without tenants goes on."""
    return f"""
In another terminal, create a tenant with a key, and push an adapter that PEFT has saved:
  export LORAMUX_ADMIN_URL={admin_url} LORAMUX_ADMIN_KEY={bootstrap_key or "..."}
  loramux tenants create acme
  loramux keys create --tenant acme
  loramux adapters push PEFT_DIRECTORY --tenant acme --name my-adapter"""
