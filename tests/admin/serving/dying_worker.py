"""Kills a worker of a tensor-parallel engine where it gets to a named point.

The workers' processes import this module through `SITE`. A worker that gets to the point that is named in the file
DYING_WORKER removes the file and kills itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "DYING_WORKER"
"""Environment variable with the path of the file."""

SITE = """
import sys

if "loramux.engine.server.worker_process" in sys.orig_argv:
    from tests.admin.serving import dying_worker

    dying_worker.install()
"""
"""The contents of `sitecustomize.py`, which Python imports when it starts."""

STARTING = ("loading", "connecting", "warming up")
"""Points before the engine is ready."""

SERVING = (
    "reading a step",
    "in a prompt, before a sum",
    "in a prompt, after a sum",
    "in a decode, before a sum",
    "in a decode, after a sum",
    "in a decode, before the logits are joined",
    "before an adapter is copied",
    "after an adapter is copied",
)


def install() -> None:
    from loramux.engine.parallel.process_groups import GlooGroup
    from loramux.engine.parallel.sharded_weights import ShardedWeights
    from loramux.engine.parallel.worker import Worker
    from loramux.engine.parallel.worker_messages import PlaceAdapter, RunStep

    path, phase, num_steps = Path(os.environ[VARIABLE]), "", 0

    def reach(*points: str) -> None:
        if path.exists() and path.read_text() in points:
            path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(owner: Any, name: str, before: Callable[..., None], after: Callable[[], None] = lambda: None) -> None:
        method = getattr(owner, name)

        def wrapped(*arguments: Any) -> Any:
            before(*arguments)
            result = method(*arguments)
            after()
            return result

        setattr(owner, name, wrapped)

    def before_message(worker: Worker, message: object) -> None:
        nonlocal phase, num_steps
        if isinstance(message, RunStep):
            num_steps += 1
            phase = "in a prompt" if message.max_q > 1 else "in a decode"
            reach("reading a step", *(["warming up"] if num_steps == 1 else []))
        elif isinstance(message, PlaceAdapter):
            phase = "adapter"
            reach("before an adapter is copied")

    def after_message() -> None:
        if phase == "adapter":
            reach("after an adapter is copied")

    wrap(ShardedWeights, "tensor", lambda *_: reach("loading"))
    wrap(GlooGroup, "join", lambda *_: reach("connecting"))
    wrap(Worker, "execute", before_message, after_message)
    wrap(
        GlooGroup,
        "sum",
        lambda *_: reach(f"{phase}, before a sum"),
        lambda: reach(f"{phase}, after a sum"),
    )
    wrap(GlooGroup, "join_columns", lambda *_: reach(f"{phase}, before the logits are joined"))
