from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

FUNCTION = """
def get_weather(city: str) -> str:
    "Tell the weather in a city."
    return "sunny"
"""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def run(home: str, *arguments: str) -> str:
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("llm")),
            "-m",
            "served",
            "--key",
            os.environ["CLIENT_KEY"],
            "-o",
            "temperature",
            "0",
            *arguments,
        ],
        env={**os.environ, "LLM_USER_PATH": home},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        served = {
            "model_id": "served",
            "model_name": os.environ["CLIENT_TOOL_MODEL"],
            "api_base": os.environ["CLIENT_URL"],
            "api_key_name": "openai",
            "supports_tools": True,
            "supports_schema": True,
        }
        # JSON is YAML too.
        (Path(home) / "extra-openai-models.yaml").write_text(json.dumps([served]))
        question = "What is the weather in Rome?"
        tools = ("--functions", FUNCTION, "-o", "max_tokens", "128")
        run(home, *tools, question)
        log = subprocess.run(
            [str(Path(sys.executable).with_name("llm")), "logs", "--json", "-n", "2"],
            env={**os.environ, "LLM_USER_PATH": home},
            capture_output=True,
            text=True,
            check=True,
        )
        calls = [call for entry in json.loads(log.stdout) for call in entry["tool_calls"]]
        found = {
            "version": version("llm"),
            "calls": [[call["name"], call["arguments"]] for call in calls],
            "streamed": run(home, *tools, question),
            "whole": run(home, "--no-stream", *tools, question),
            "structured": json.loads(run(home, "--schema", json.dumps(SCHEMA), "-o", "max_tokens", "128", question)),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
