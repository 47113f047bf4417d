"""`loramux demo`: tenants each push an adapter, one batch serves all of them, and the bill matches the usage."""

from __future__ import annotations

import importlib.util
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from loramux.admin.client.client import AdminClient, AdminError, ServerUnreachable
from loramux.admin.client.push import PushRefused
from loramux.admin.demo.accounts import Account, check_bill, open_accounts, read_bill
from loramux.admin.demo.prompts import DEMO_PROMPTS, MAX_ANSWER_TOKENS
from loramux.admin.demo.server import DemoFailed, DemoServer
from loramux.admin.demo.started_server import demo_server
from loramux.admin.demo.tables import output_console, print_answers, print_directions, print_tool_loops, print_usage
from loramux.admin.demo.tools.functions import FUNCTIONS, FUNCTIONS_BY_NAME, draw_result

if TYPE_CHECKING:
    from loramux.admin.demo.mixed_batch import DemoAnswer

DEMO_FILES = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Scenario:
    folder: Path
    """Contains `base/` and `adapters/`."""
    served_name: str
    adapters: Mapping[str, str]
    """The adapter that each tenant pushes, by tenant."""
    question: str
    next_question: str
    """The question that the printed directions suggest."""
    max_answer_tokens: int
    calls_tools: bool = False
    """True if the question comes with tools and the client sends the results of calls back."""


STYLES = Scenario(
    folder=DEMO_FILES,
    served_name="demo-base",
    adapters={"harbour": "pirate", "chambers": "formal", "parcels": "json"},
    question=DEMO_PROMPTS[0],
    next_question=DEMO_PROMPTS[1],
    max_answer_tokens=MAX_ANSWER_TOKENS,
)
TOOLS = Scenario(
    folder=DEMO_FILES / "tools",
    served_name="tools-base",
    adapters={"harbour": "sailor", "grand-hotel": "concierge"},
    question="What is the weather in Lisbon?",
    next_question="Who are you?",
    max_answer_tokens=96,
    calls_tools=True,
)


def run_demo(
    port: int | None,
    admin_port: int | None,
    data_dir: Path | None,
    exit_after: bool,
    scenario: Scenario = STYLES,
    device: str = "cpu",
) -> None:
    """Run the demo, then keep serving until Ctrl-C unless `exit_after` is set. Raises DemoFailed."""
    started = time.monotonic()
    if importlib.util.find_spec("openai") is None:
        raise DemoFailed("the demo needs the official OpenAI client: pip install openai")
    with demo_server(scenario.folder / "base", scenario.served_name, port, admin_port, data_dir, device) as server:
        with server.client() as client:
            console = output_console()
            try:
                accounts = _show(console, server, client, started, scenario)
            except (AdminError, ServerUnreachable, PushRefused) as error:
                server.check()
                raise DemoFailed(str(error)) from error
        if not exit_after:
            print_directions(console, server, accounts[0].api_key, accounts[0].pushed.model, scenario.next_question)
            server.watch()


def _show(
    console: Console, server: DemoServer, client: AdminClient, started: float, scenario: Scenario
) -> list[Account]:
    adapters = {tenant: scenario.folder / "adapters" / name for tenant, name in scenario.adapters.items()}
    accounts = open_accounts(server, client, adapters)
    before = read_bill(client)
    asked_at = time.monotonic()
    answers = _ask(server, accounts, scenario)
    first_s = asked_at - started + min(answer.time_to_first_token_s for answer in answers)
    if scenario.calls_tools:
        asked, answers = answers, _return_results(server, answers)
        print_tool_loops(console, asked, answers)
        answers = [*asked, *answers]
    else:
        print_answers(console, answers, {account.pushed.model: account.pushed.max_rank for account in accounts})
    engine = client.get("engine")
    console.print(
        f"First answer {first_s:.1f} s after the start. Up to {engine['max_adapters_in_step']} adapters shared one "
        f"step of the engine; {engine['num_adapter_pages']} of its {engine['num_pages']} pages hold adapters.\n"
    )
    billed = read_bill(client)
    print_usage(console, billed)
    check_bill(console, answers, before, billed, scenario.served_name)
    return accounts


def _ask(server: DemoServer, accounts: list[Account], scenario: Scenario) -> list[DemoAnswer]:
    from loramux.admin.demo.mixed_batch import DemoQuestion, ask_together

    messages = ({"role": "user", "content": scenario.question},)
    tools = tuple(function.tool for function in FUNCTIONS[:2]) if scenario.calls_tools else ()

    def question(account: Account, model: str) -> DemoQuestion:
        return DemoQuestion(account.tenant, account.api_key, model, messages, scenario.max_answer_tokens, tools)

    questions = [question(accounts[0], scenario.served_name)]
    questions += [question(account, account.pushed.model) for account in accounts]
    return ask_together(f"{server.url}/v1", questions)


def _return_results(server: DemoServer, asked: list[DemoAnswer]) -> list[DemoAnswer]:
    """Run each answer's calls, as a client's program would, and ask again with the results."""
    from loramux.admin.demo.mixed_batch import ask_together

    chance = random.Random(0)
    questions = []
    for answer in asked:
        messages = [*answer.question.messages, answer.message]
        for call in answer.message.get("tool_calls", ()):
            function = FUNCTIONS_BY_NAME.get(call["function"]["name"])
            result = {"error": "unknown tool"} if function is None else draw_result(function, chance)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})
        questions.append(replace(answer.question, messages=messages))
    return ask_together(f"{server.url}/v1", questions)
