"""The demo's printed output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loramux.admin.client.safe_text import safe_text
from loramux.admin.demo.server import DemoServer

if TYPE_CHECKING:
    from loramux.admin.demo.mixed_batch import DemoAnswer


NUMBERS = ("version", "rank", "tokens", "first\ntoken")


def output_console() -> Console:
    """Return a console as wide as the terminal. For a file or pipe, it is wide enough for one answer per line."""
    console = Console()
    if not console.is_terminal:
        console.width = 140
    return console


def print_answers(console: Console, answers: Sequence[DemoAnswer], ranks: Mapping[str, int]) -> None:
    """Print one row per answer. The question is the same for all answers."""
    title = f"One batch, one question: {answers[0].question.text}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in ("tenant", "model", "version", "rank", "answer", "tokens", "first\ntoken"):
        is_number = column in NUMBERS
        table.add_column(column, justify="right" if is_number else "left", no_wrap=column != "answer")
    for answer in answers:
        version = answer.adapter.rpartition("@")[2] if answer.adapter else "-"
        table.add_row(
            answer.question.tenant,
            answer.question.model,
            version,
            str(ranks.get(answer.question.model, "-")),
            # The model's output is text, never markup.
            Text(safe_text(answer.text.strip())),
            str(answer.completion_tokens),
            f"{answer.time_to_first_token_s * 1000:.0f} ms",
        )
    console.print(table)


def print_tool_loops(console: Console, asked: Sequence[DemoAnswer], answered: Sequence[DemoAnswer]) -> None:
    """Print one row per model: its thinking, its calls, their results, and its final answer."""
    title = f"One batch, one question, two tools: {asked[0].question.text}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in ("tenant", "model", "thinks", "calls", "result", "answers"):
        table.add_column(column, no_wrap=column == "model")
    for before, after in zip(asked, answered, strict=True):
        calls = [call["function"] for call in before.message.get("tool_calls", ())]
        table.add_row(
            before.question.tenant,
            before.question.model,
            Text(safe_text(before.reasoning.strip() or "-")),
            Text(safe_text("\n".join(f"{call['name']} {call['arguments']}" for call in calls) or before.text.strip())),
            Text("\n".join(m["content"] for m in after.question.messages if m["role"] == "tool") or "-"),
            Text(safe_text(after.text.strip())),
        )
    console.print(table)


def print_usage(console: Console, billed: Mapping[tuple[str, str], tuple[int, int, int]]) -> None:
    table = Table(title="Usage report", title_justify="left", box=SIMPLE_HEAD)
    for column in ("tenant", "model"):
        table.add_column(column)
    for column in ("requests", "prompt tokens", "completion tokens"):
        table.add_column(column, justify="right")
    for (tenant, model), amounts in sorted(billed.items()):
        table.add_row(tenant, model, *(str(amount) for amount in amounts))
    console.print(table)


def print_directions(console: Console, server: DemoServer, api_key: str, model: str, question: str) -> None:
    lines = (
        "Press Ctrl-C to stop the server.",
        f"  OpenAI API   {server.url}/v1",
        f"  console      {server.admin_url}/console/    (open it in a browser, and sign in with the key below)",
        f"  metrics      {server.admin_url}/metrics",
        "",
        "Ask it yourself:",
        f"  curl {server.url}/v1/chat/completions -H 'Authorization: Bearer {api_key}' \\",
        "    -H 'Content-Type: application/json' \\",
        f'    -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "{question}"}}]}}\'',
        "",
        "Administer it:",
        f"  export LORAMUX_ADMIN_URL={server.admin_url} LORAMUX_ADMIN_KEY={server.admin_key}",
        "  loramux adapters list",
    )
    for line in lines:
        # Commands are neither wrapped nor coloured, so that they can be copied.
        console.print(line, markup=False, highlight=False, soft_wrap=True)
