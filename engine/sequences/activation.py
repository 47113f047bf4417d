"""Finds the position in a prompt from which an adapter applies."""

from __future__ import annotations

from collections.abc import Sequence


def last_tokens(prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[int, ...]:
    """Return the position of the `num_tokens` last tokens of each prompt, or 0 if the prompt has fewer."""
    return tuple(max(0, len(prompt) - num_tokens) for prompt in prompts)


def activations(prompts: Sequence[Sequence[int]], invocation_tokens: Sequence[int]) -> tuple[int | None, ...]:
    """Return the position in each prompt from which the adapter applies, or None if the adapter is not activated.

    An adapter without invocation tokens applies from the start.
    """
    return tuple(activation(prompt, invocation_tokens) if invocation_tokens else 0 for prompt in prompts)


def activation(prompt: Sequence[int], invocation_tokens: Sequence[int]) -> int | None:
    """Return the start of the last occurrence of the invocation tokens in a prompt, at the same position as PEFT, or
    None.
    """
    # Search reversed text with one character per token. `str.find` takes linear time even for hostile prompts, but
    # `str.rfind` does not.
    text, wanted = ("".join(map(chr, reversed(token_ids))) for token_ids in (prompt, invocation_tokens))
    num_after = text.find(wanted)
    return None if num_after < 0 else len(prompt) - num_after - len(invocation_tokens)
