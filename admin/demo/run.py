"""`loramux demo`: tenants each push an adapter, one batch serves all of them, and the bill matches the usage."""

from __future__ import annotations

import importlib.util
import json
import random
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console

from loramux.admin.client.client import AdminClient, AdminError, ServerUnreachable
from loramux.admin.client.push import PushedVersion, PushRefused, push_adapter
from loramux.admin.demo.prompts import DEMO_PROMPTS, MAX_ANSWER_TOKENS
from loramux.admin.demo.server import DemoFailed, DemoServer
from loramux.admin.demo.tables import output_console, print_answers, print_directions, print_tool_loops, print_usage
from loramux.admin.demo.tools.functions import FUNCTIONS, FUNCTIONS_BY_NAME, draw_result

if TYPE_CHECKING:
    from loramux.admin.demo.mixed_batch import DemoAnswer

DEMO_FILES = Path(__file__).parent
TOKENS_PER_MINUTE = 100_000


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


@dataclass(frozen=True, slots=True)
class Account:
    """A tenant with its API key and its adapter's version."""

    tenant: str
    api_key: str
    pushed: PushedVersion


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
    with ExitStack() as stack:
        stack.enter_context(_ended_by_signals())
        if data_dir is None:
            data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loramux-demo-")))
        ports = _port(port, 8000), _port(admin_port, 8001)
        server = DemoServer(scenario.folder / "base", data_dir, *ports, scenario.served_name, device=device)
        stack.callback(server.stop)
        client = stack.enter_context(server.client())
        console = output_console()
        try:
            accounts = _show(console, server, client, started, scenario)
        except (AdminError, ServerUnreachable, PushRefused) as error:
            server.check()
            raise DemoFailed(str(error)) from error
        if not exit_after:
            print_directions(console, server, accounts[0].api_key, accounts[0].pushed.model, scenario.next_question)
            while True:
                server.check()
                time.sleep(0.5)


def _show(
    console: Console, server: DemoServer, client: AdminClient, started: float, scenario: Scenario
) -> list[Account]:
    with ThreadPoolExecutor(len(scenario.adapters) + 1) as threads:
        # Importing the official client takes a second, so import it while the server starts.
        batch = threads.submit(importlib.import_module, "loramux.admin.demo.mixed_batch")
        server.wait_until(client.is_alive, "listening")
        accounts = list(threads.map(lambda tenant: _open_account(client, tenant, scenario), scenario.adapters))
        server.wait_until(client.is_ready, "ready")
        batch.result()
    before = _billed(client)
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
    billed = _billed(client)
    print_usage(console, billed)
    _check_bill(console, answers, before, billed, scenario.served_name)
    return accounts


def _open_account(client: AdminClient, tenant: str, scenario: Scenario) -> Account:
    """Create the tenant, its quota, a key and its adapter over REST. The tenant may already exist."""
    try:
        client.post("tenants", {"slug": tenant})
    except AdminError as error:
        if error.code != "tenant_exists":
            raise
    client.post("quotas", {"tenant": tenant, "metric": "tokens_per_minute", "limit": TOKENS_PER_MINUTE})
    key = client.post("api_keys", {"tenant": tenant, "name": "demo"})
    adapter = scenario.adapters[tenant]
    pushed = push_adapter(client, scenario.folder / "adapters" / adapter, tenant, adapter)
    return Account(tenant, key["secret"], pushed)


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


Bill = dict[tuple[str, str], tuple[int, int, int]]
"""Numbers of requests, prompt tokens and completion tokens by tenant and model."""


def _billed(client: AdminClient) -> Bill:
    results = client.get("usage", group_by="tenant,model")["data"]
    return {
        (row["tenant"], row["model"]): (row["requests"], row["prompt_tokens"], row["completion_tokens"])
        for bucket in results
        for row in bucket["results"]
    }


def _check_bill(console: Console, answers: list[DemoAnswer], before: Bill, after: Bill, base: str) -> None:
    """Raise DemoFailed unless the bill equals the usage reported in the answers, per tenant and model."""
    expected = dict(before)
    for answer in answers:
        name = (answer.question.tenant, answer.adapter or base)
        requests, prompt, completion = expected.get(name, (0, 0, 0))
        expected[name] = (requests + 1, prompt + answer.prompt_tokens, completion + answer.completion_tokens)
    if expected != after:
        raise DemoFailed(f"the usage report does not add up: {after} was billed instead of {expected}")
    num_tokens = sum(answer.prompt_tokens + answer.completion_tokens for answer in answers)
    console.print(f"It adds up: {len(answers)} answers cost {num_tokens} tokens, and exactly those were billed.\n")


def _port(given: int | None, preferred: int) -> int:
    """Return the requested port. Without one, return the preferred port if it is free, otherwise any free port."""
    if given is not None:
        return given
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise DemoFailed("no port is free on 127.0.0.1")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let Ctrl-C or SIGTERM end the block without an exception."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, previous)
