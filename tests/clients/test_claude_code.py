"""Claude Code's command line against a gateway whose engine plays the model.

The test needs `claude` on the PATH, from the npm package `@anthropic-ai/claude-code`. `make test-clients` does not
install it, because its use is subject to Anthropic's terms.
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

CLAUDE = shutil.which("claude")
WRITTEN = "written by a tool call\n"
MAX_MODEL_LEN = 100_000
TIMEOUT_S = 150


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def write_then_answer(gateway: Gateway, path: Path) -> None:
    """Let the model think and call the tool `Write`, and end once it sees the result."""
    tokenizer = gateway.services.prompts.tokenizer
    arguments = {"file_path": str(path), "content": WRITTEN}
    call = f"<tool_call>\n{json.dumps({'name': 'Write', 'arguments': arguments})}\n</tool_call>"

    def script(add: Add) -> Script:
        prompt = b"".join(map(tokenizer.token_bytes, add.prompt)).decode(errors="replace")
        answer = "The file is written." if "<|tool|>" in prompt else f"<think>\nI write it.\n</think>\nNow.\n{call}"
        return Script(token_ids=tokenizer.encode(answer)[1:])

    gateway.engine.script = script


async def run_claude(gateway: Gateway, url: str, folder: Path, home: Path) -> str:
    assert CLAUDE is not None
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": gateway.key,
        "ANTHROPIC_MODEL": "base",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "base",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    arguments = ("-p", "Write a file.", "--permission-mode", "acceptEdits", "--tools", "Write,Read,Edit")
    async with asyncio.timeout(TIMEOUT_S):
        process = await asyncio.create_subprocess_exec(
            CLAUDE,
            *arguments,
            cwd=folder,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.skipif(CLAUDE is None, reason="claude is not on the PATH")
async def test_claude_code_edits_a_file_with_a_tool_call(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("base", "project", "home")]
    for folder in folders:
        folder.mkdir()
    base, project, home = folders
    tokenizer = ModelTokenizer.load(make_tool_base(base))
    database = Database(migrated_sqlite(tmp_path / "loramux.db"))
    with ThreadPoolExecutor(4) as threads:
        async with open_gateway(database, tokenizer, threads, max_model_len=MAX_MODEL_LEN) as gateway:
            write_then_answer(gateway, project / "note.txt")
            async with listening(gateway.app) as url:
                said = await run_claude(gateway, url, project, home)
            events = gateway.usage()
    database.close()
    assert said.strip() == "The file is written."
    assert (project / "note.txt").read_text() == WRITTEN
    assert [(event.endpoint, event.status) for event in events] == [("messages", "completed")] * 2
    assert all(event.end_user for event in events)
