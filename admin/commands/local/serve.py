"""`loramux serve`, `loramux gateway` and `loramux demo`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from loramux.admin.commands.options import ConfigFile, DatabaseUrl, DataDir
from loramux.admin.commands.output import fail
from loramux.admin.exit_codes import WRONG_CALL

Port = Annotated[int | None, typer.Option(help="Port of the OpenAI API (default: 8000).")]
AdminPort = Annotated[int | None, typer.Option(help="Port of the admin listener (default: 8001).")]


Model = Annotated[
    str | None,
    typer.Option(
        help="Directory of the base model in Hugging Face format, a GGUF file, or the URL of either, hf://OWNER/NAME "
        "or s3://BUCKET/PREFIX, which is pulled first."
    ),
]
Host = Annotated[str | None, typer.Option(help="Address of the OpenAI API (default: 127.0.0.1).")]
AdminHost = Annotated[str | None, typer.Option(help="Address of the admin listener (default: 127.0.0.1).")]
ServedName = Annotated[str | None, typer.Option(help="The base model's public name (default: last part of --model).")]
GenerationConfig = Annotated[
    str | None, typer.Option(help="auto or off: sampling defaults from the model's directory (default: auto).")
]
AdapterGenerationConfig = Annotated[
    str | None, typer.Option(help="auto or off: sampling defaults uploaded with adapters (default: auto).")
]
ToolCallParser = Annotated[
    str | None, typer.Option(help="auto, off or a parser's name: how tool calls are read (default: auto).")
]
ReasoningParser = Annotated[
    str | None, typer.Option(help="auto, off or a parser's name: how reasoning is recognised (default: auto).")
]
ReusePort = Annotated[bool | None, typer.Option("--reuse-port", help="Share --port with other gateways on this host.")]

TierObjectives = Annotated[
    str | None,
    typer.Option(
        help="Longest time until the first token by service tier, such as priority=1s,default=5s,flex=none. A request "
        "that would miss it is refused (default: none)."
    ),
]


def serve(
    context: typer.Context,
    model: Model = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    host: Host = None,
    port: Port = None,
    admin_host: AdminHost = None,
    admin_port: AdminPort = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16 (default: auto).")] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            help="int8, int4 or fp8: quantise a float model at startup; +head, as in int4+head, also quantises its "
            "head, to int8 (default: none)."
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            help="int8: round activations of a quantised base to 8 bits instead of 16, on a CPU with VNNI or AVX2; "
            "fp8: in large steps on a GPU, for FP8 weights (default if the checkpoint says so); 16bit: do not."
        ),
    ] = None,
    adapter_dtype: Annotated[
        str | None,
        typer.Option(
            help="fp8: store adapters in the page pool in 8 bits per weight (default: in the dtype of the weights)."
        ),
    ] = None,
    speculate: Annotated[
        str | None,
        typer.Option(
            help="off; text: draft tokens from the text of each request, and verify several in one step; head: with "
            "the base's own head for drafts; auto: with the head if there is one, otherwise from the text "
            "(default: text on a CPU, off on a GPU)."
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="auto, or int8: store K and V in 8 bits, so that almost twice as many tokens fit (default: auto)."
        ),
    ] = None,
    kv_host_bytes: Annotated[
        str | None,
        typer.Option(help="Main memory for cached prefixes that the page pool evicts, such as 8GiB (default: 0)."),
    ] = None,
    kv_disk_bytes: Annotated[
        str | None,
        typer.Option(help="Disk space for cached prefixes that this memory evicts, such as 100GiB (default: 0)."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda (default: auto).")] = None,
    data_parallel_size: Annotated[
        int | None,
        typer.Option(
            help="Number of engines, each with all of the model's weights; on a CPU, they divide the threads (default: "
            "1, or as many as --devices suffice for)."
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            help="Number of processes that divide the model's linear layers, the page pool and the threads of an "
            "engine, each on a GPU of its own or all on a CPU (default: 1)."
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Numbers of the GPUs that run the engines, such as 0,1: one for each engine or, with "
            "--tensor-parallel-size, for each of its processes (default: the first ones)."
        ),
    ] = None,
    database_url: DatabaseUrl = None,
    blob_url: Annotated[
        str | None, typer.Option(help="file://DIR or s3://BUCKET/PREFIX (default: in --data-dir).")
    ] = None,
    served_name: ServedName = None,
    generation_config: GenerationConfig = None,
    adapter_generation_config: AdapterGenerationConfig = None,
    tool_call_parser: ToolCallParser = None,
    reasoning_parser: ReasoningParser = None,
    peer_address: Annotated[
        str | None,
        typer.Option(help="HOST:PORT at which other servers reach this one, to share requests (default: none)."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="local, or HOST:PORT of a Ray cluster's head: use the engines that 'loramux cluster up' has started "
            "(default: none)."
        ),
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(
            help="auto or off: send requests to other servers' engines, or not, because a router in front of the "
            "servers chooses (default: auto)."
        ),
    ] = None,
    tier_objectives: TierObjectives = None,
    reuse_port: ReusePort = None,
) -> None:
    """Serve a base model and its tenants' adapters until Ctrl-C.

    Every setting is also read from LORAMUX_<NAME> and from the TOML file. A flag takes precedence over both.
    """
    # Until `freeze_gc`, because imports create many objects and drop few.
    gc.disable()
    from loramux.admin.errors import StartRefused
    from loramux.admin.server.settings import Settings, SettingsError, load_settings
    from loramux.admin.serving.serve import run

    try:
        # The parameters have the same names as the settings.
        run(load_settings(Settings, context.params))
    except (SettingsError, StartRefused) as error:
        fail(str(error), WRONG_CALL)


def gateway(
    context: typer.Context,
    engine: Annotated[
        Path | None, typer.Option(help="The socket that 'loramux serve' prints, or several with commas between them.")
    ] = None,
    model: Model = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    host: Host = None,
    port: Port = None,
    admin_host: AdminHost = None,
    admin_port: AdminPort = None,
    database_url: DatabaseUrl = None,
    served_name: ServedName = None,
    generation_config: GenerationConfig = None,
    adapter_generation_config: AdapterGenerationConfig = None,
    tool_call_parser: ToolCallParser = None,
    reasoning_parser: ReasoningParser = None,
    tier_objectives: TierObjectives = None,
    reuse_port: ReusePort = None,
) -> None:
    """Serve the OpenAI API from another process, using a running server's engine and database, until Ctrl-C.

    Give the gateway the server's model, database and served name, but its own data directory and ports. Its admin port
    serves only metrics and health. Administer adapters and tenants on the server.
    """
    # Until `freeze_gc`, because imports create many objects and drop few.
    gc.disable()
    from loramux.admin.errors import StartRefused
    from loramux.admin.server.settings import Settings, SettingsError, load_settings
    from loramux.admin.serving.gateway import run

    try:
        run(load_settings(Settings, context.params))
    except (SettingsError, StartRefused) as error:
        fail(str(error), WRONG_CALL)


def demo(
    exit_after: Annotated[bool, typer.Option("--exit", help="Exit after the report; do not keep serving.")] = False,
    tools: Annotated[
        bool,
        typer.Option("--tools", help="Serve a base that thinks and calls tools, with the adapters of two tenants."),
    ] = False,
    real: Annotated[
        bool,
        typer.Option(
            "--real",
            help="Download a real model (93 MB), and count the right answers to 600 held-out prompts with and without "
            "three adapters.",
        ),
    ] = False,
    port: Port = None,
    admin_port: AdminPort = None,
    data_dir: Annotated[Path | None, typer.Option(help="The demo's data directory (default: a temporary one).")] = None,
    device: Annotated[
        str,
        typer.Option(
            help="cpu or cuda (default: cpu). On a GPU, the first start compiles kernels.", show_default=False
        ),
    ] = "cpu",
) -> None:
    """Demonstrate loramux with three tenants, three adapters, one batch and one bill."""
    from loramux.admin.demo.real.run import run_real_demo
    from loramux.admin.demo.run import STYLES, TOOLS, run_demo
    from loramux.admin.demo.server import DemoFailed

    if real and tools:
        fail("--real and --tools exclude each other", WRONG_CALL)
    try:
        if real:
            run_real_demo(port, admin_port, data_dir, exit_after, device)
            return
        run_demo(port, admin_port, data_dir, exit_after, TOOLS if tools else STYLES, device)
    except DemoFailed as error:
        fail(str(error), error.exit_code)
