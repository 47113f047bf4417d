"""`loramux demo --real`: three adapters for a real model, and how many held-out prompts they answer as expected."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from loramux.admin.client.client import AdminClient, AdminError, ServerUnreachable
from loramux.admin.client.push import PushRefused
from loramux.admin.demo.accounts import Account, check_bill, open_accounts, read_bill
from loramux.admin.demo.real.download import model_file
from loramux.admin.demo.real.grading import GRADES
from loramux.admin.demo.real.held_out import ADAPTERS, Prompt, read_prompts
from loramux.admin.demo.real.tables import Graded, print_accuracy, print_side_by_side
from loramux.admin.demo.server import DemoFailed, DemoServer
from loramux.admin.demo.started_server import demo_server
from loramux.admin.demo.tables import output_console, print_directions, print_usage

if TYPE_CHECKING:
    from loramux.admin.demo.mixed_batch import DemoQuestion

SERVED_NAME = "smollm2-135m"
TENANTS: Mapping[str, str] = {"helpdesk": "tickets", "archive": "redaction", "northwind": "house-style"}
"""The adapter that each tenant pushes, by tenant."""

MAX_ANSWER_TOKENS = 48
"""The longest expected answer has 34 tokens."""

AT_ONCE = 32


def run_real_demo(
    port: int | None, admin_port: int | None, data_dir: Path | None, exit_after: bool, device: str = "cpu"
) -> None:
    """Run the demo, then keep serving until Ctrl-C unless `exit_after` is set. Raises DemoFailed."""
    started = time.monotonic()
    if importlib.util.find_spec("openai") is None:
        raise DemoFailed("the demo needs the official OpenAI client: pip install openai")
    console = output_console()
    model = model_file(console)
    with demo_server(model, SERVED_NAME, port, admin_port, data_dir, device) as server:
        with server.client() as client:
            try:
                account = _show(console, server, client, started)
            except (AdminError, ServerUnreachable, PushRefused) as error:
                server.check()
                raise DemoFailed(str(error)) from error
        if not exit_after:
            question = "I want to cancel the order of the desk lamp. There is no rush."
            print_directions(console, server, account.api_key, account.pushed.model, question)
            server.watch()


def _show(console: Console, server: DemoServer, client: AdminClient, started: float) -> Account:
    accounts = open_accounts(server, client, {tenant: ADAPTERS / name for tenant, name in TENANTS.items()})
    before = read_bill(client)
    asked_at = time.monotonic()
    graded = _ask(console, server, accounts)
    answered_at = time.monotonic()
    print_side_by_side(console, graded)
    print_accuracy(console, graded)
    engine = client.get("engine")
    console.print(
        f"{len(graded)} answers in {(answered_at - asked_at) / 60:.1f} minutes, up to {AT_ONCE} at once. Up to "
        f"{engine['max_adapters_in_step']} adapters shared one step of the engine.\n"
    )
    billed = read_bill(client)
    print_usage(console, billed)
    check_bill(console, [one.answer for one in graded], before, billed, SERVED_NAME)
    console.print(f"The demo took {(time.monotonic() - started) / 60:.1f} minutes, with everything.\n")
    return accounts[0]


def _ask(console: Console, server: DemoServer, accounts: list[Account]) -> list[Graded]:
    """Ask the base and the adapters the same prompts. All are mixed, as the requests of real tenants are."""
    from loramux.admin.demo.mixed_batch import DemoQuestion, ask_together

    asked: list[tuple[str, Prompt, DemoQuestion]] = []
    for prompts in zip(*(read_prompts(TENANTS[account.tenant]) for account in accounts), strict=True):
        for account, prompt in zip(accounts, prompts, strict=True):
            for model in (SERVED_NAME, account.pushed.model):
                question = DemoQuestion(account.tenant, account.api_key, model, prompt.messages, MAX_ANSWER_TOKENS)
                asked.append((TENANTS[account.tenant], prompt, question))
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("Asking held-out prompts", total=len(asked))
        questions = [question for _, _, question in asked]
        answers = ask_together(f"{server.url}/v1", questions, AT_ONCE, lambda: progress.advance(bar))
    return [
        Graded(adapter, answer, GRADES[adapter](prompt.expected, answer.text))
        for (adapter, prompt, _), answer in zip(asked, answers, strict=True)
    ]
