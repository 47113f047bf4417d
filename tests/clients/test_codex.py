"""Codex's command line against a gateway whose engine plays the model.

The test needs `codex` on the PATH, from the npm package `@openai/codex`. `make test-clients` does not install it,
because it has more than 400 MB.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loramux.engine.protocol.messages import Add
from loramux.migrations.database import Database
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.migrated import migrated_sqlite
from tests.platform.gateways import Gateway, listening, open_gateway
from tests.platform.scripted_engine import Script
from tests.platform.tool_base import make_tool_base

pytestmark = [pytest.mark.campaign, pytest.mark.anyio]

CODEX = shutil.which("codex")
WRITTEN = "written by a tool call\n"
MAX_MODEL_LEN = 100_000
TIMEOUT_S = 150
CONFIG = """\
model = "base"
model_provider = "loramux"
web_search = "disabled"

[model_providers.loramux]
name = "loramux"
base_url = "URL/v1"
env_key = "LORAMUX_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def write_then_answer(gateway: Gateway) -> None:
    """Let the model think and call the tool `exec_command`, and end once it sees the result."""
    tokenizer = gateway.services.prompts.tokenizer
    arguments = {"cmd": f"printf '{WRITTEN}' > note.txt"}
    call = f"<tool_call>\n{json.dumps({'name': 'exec_command', 'arguments': arguments})}\n</tool_call>"

    def script(add: Add) -> Script:
        prompt = b"".join(map(tokenizer.token_bytes, add.prompt)).decode(errors="replace")
        answer = "The file is written." if "<|tool|>" in prompt else f"<think>\nI write it.\n</think>\nNow.\n{call}"
        return Script(token_ids=tokenizer.encode(answer)[1:])

    gateway.engine.script = script


async def run_codex(gateway: Gateway, url: str, folder: Path, home: Path) -> str:
    assert CODEX is not None
    (home / "config.toml").write_text(CONFIG.replace("URL", url))
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home), "LORAMUX_KEY": gateway.key}
    last = home / "last.txt"
    options = ("--skip-git-repo-check", "--sandbox", "danger-full-access", "--output-last-message", str(last))
    async with asyncio.timeout(TIMEOUT_S):
        process = await asyncio.create_subprocess_exec(
            CODEX,
            "exec",
            *options,
            "Write a file.",
            cwd=folder,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return last.read_text()


@pytest.mark.skipif(CODEX is None, reason="codex is not on the PATH")
async def test_codex_writes_a_file_with_a_tool_call(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("base", "project", "home")]
    for folder in folders:
        folder.mkdir()
    base, project, home = folders
    tokenizer = ModelTokenizer.load(make_tool_base(base))
    database = Database(migrated_sqlite(tmp_path / "loramux.db"))
    with ThreadPoolExecutor(4) as threads:
        async with open_gateway(database, tokenizer, threads, max_model_len=MAX_MODEL_LEN) as gateway:
            write_then_answer(gateway)
            async with listening(gateway.app) as url:
                said = await run_codex(gateway, url, project, home)
            events = gateway.usage()
    database.close()
    assert said.strip() == "The file is written."
    assert (project / "note.txt").read_text() == WRITTEN
    assert [(event.endpoint, event.status) for event in events] == [("responses", "completed")] * 2
