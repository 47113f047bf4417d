"""peft's two methods of serving many adapters in process, and transformers' static batch."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch


@torch.inference_mode()
def generate(
    model: Any, prompts: torch.Tensor, num_tokens: int, adapter_names: list[str] | None
) -> tuple[list[list[int]], float]:
    """Decode a static batch greedily, and return each row's tokens and the total time in seconds.

    `adapter_names` contains one name per row (`__base__` for no adapter). If it is None, all rows use the active
    adapter.
    """
    extra: dict[str, Any] = {} if adapter_names is None else {"adapter_names": adapter_names}
    started = time.perf_counter()
    output = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        **extra,
    )
    elapsed = time.perf_counter() - started
    return output[:, prompts.shape[1] :].tolist(), elapsed


def base_only(model: Any, prompts: torch.Tensor, num_tokens: int) -> tuple[list[list[int]], float]:
    with model.disable_adapter():
        return generate(model, prompts, num_tokens, None)


def mixed_batch(model: Any, prompts: torch.Tensor, num_tokens: int) -> tuple[list[list[int]], float]:
    """Run one static batch, each row with its own adapter."""
    return generate(model, prompts, num_tokens, [f"a{row}" for row in range(len(prompts))])


def switching(model: Any, prompts: torch.Tensor, num_tokens: int) -> tuple[list[list[int]], float]:
    """Run one request after another, with `set_adapter` before each."""
    answers, total = [], 0.0
    for row in range(len(prompts)):
        started = time.perf_counter()
        model.set_adapter(f"a{row}")
        total += time.perf_counter() - started
        answer, elapsed = generate(model, prompts[row : row + 1], num_tokens, None)
        answers += answer
        total += elapsed
    return answers, total


@contextlib.contextmanager
def quiet_transformers() -> Any:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
