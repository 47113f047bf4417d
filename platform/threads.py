"""Runs blocking functions on threads, without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def call_on(executor: Executor, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    # Context variables, such as the audit actor and the log's request id, carry over to the thread.
    known = copy_context()
    return await asyncio.get_running_loop().run_in_executor(executor, partial(known.run, function, *args, **kwargs))
