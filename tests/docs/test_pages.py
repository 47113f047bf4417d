from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from loramux.admin.cli import app
from loramux.engine.architectures.missing_features import MISSING_FEATURES
from loramux.engine.architectures.multimodal import SUPPORTED
from loramux.platform.accounts.keys import PLATFORM_SCOPES, TENANT_SCOPES
from tests.docs.models_page import architectures, compared
from tests.docs.shell_session import Typed, script_of, type_page
from tests.docs.write import DOCS, PAGES
from tests.ports import free_port

ROOT = DOCS.parent
DEMO = ROOT / "admin" / "demo"
GUIDES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
WRITTEN_PAGES = [*GUIDES, *sorted(DOCS.rglob("*.md"))]
PAGES_WITH_LINKS = [*WRITTEN_PAGES, *sorted(ROOT.glob("*/README.md"))]
# A group of commands, such as `loramux db`, can be named without a command.
COMMANDS = {
    words
    for command in re.findall(r"^## (.+)$", (DOCS / "commands.md").read_text(), re.MULTILINE)
    for words in (command, f"{command.split()[0]} ")
}
METRICS = set(re.findall(r"^\| `(loramux_\w+)`", (DOCS / "metrics.md").read_text(), re.MULTILINE))
TYPED_PAGES = sorted(path for path in DOCS.glob("*.md") if script_of(path))


@pytest.mark.parametrize("name", PAGES)
def test_reference_pages_match_the_program(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run 'make docs'"


def test_each_architecture_of_transformers_is_served_or_lacks_a_feature() -> None:
    assert architectures() - SUPPORTED - MISSING_FEATURES.keys() == set()
    assert SUPPORTED & MISSING_FEATURES.keys() == set()
    assert len(architectures()) > 200


def test_each_served_architecture_is_compared_with_transformers() -> None:
    """In this file, because the page of models needs the same random models, which take seconds to make."""
    assert compared().keys() >= SUPPORTED


@pytest.mark.parametrize("page", PAGES_WITH_LINKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", page.read_text()):
        link = target[0] or target[1]
        if link.startswith(("http://", "https://")):
            continue
        path, _, heading = link.partition("#")
        found = (page.parent / path) if path else page
        assert found.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, link


@pytest.mark.parametrize("page", PAGES_WITH_LINKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_rows_of_a_table_have_equally_many_cells(page: Path) -> None:
    """Markdown drops further cells. A bar in code ends a cell, too, unless it is escaped."""
    for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
        head, *rows = table.splitlines()
        num_bars = len(re.findall(r"(?<!\\)\|", head))
        assert [row for row in rows if len(re.findall(r"(?<!\\)\|", row)) != num_bars] == []


@pytest.mark.parametrize("page", WRITTEN_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_metrics_named_in_pages_exist(page: Path) -> None:
    text = page.read_text()
    code = [*re.findall(r"^```sh[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL), *re.findall(r"`([^`\n]+)`", text)]
    named = [
        words
        for part in code
        for words in re.findall(r"(?:^|[(/ ])loramux ([a-z]+)\b(?!/)(?: ([a-z]+))?", part, re.MULTILINE)
    ]
    assert [words for words in named if not {words[0], " ".join(words)} & COMMANDS] == []
    metrics = set(re.findall(r"`(loramux_[a-z_]+[a-z])[`{]", text))
    assert metrics - METRICS == set()


@pytest.mark.parametrize("page", ["security.md", "commands.md"])
def test_every_scope_of_a_key_is_explained(page: str) -> None:
    named = set(re.findall(r"[a-z]+:[a-z]+|\b(?:adapters|base)\b", (DOCS / page).read_text()))
    assert named >= TENANT_SCOPES | PLATFORM_SCOPES


def test_every_header_of_an_answer_is_explained() -> None:
    sources = "".join(path.read_text() for name in ("platform", "admin") for path in (ROOT / name).rglob("*.py"))
    headers = set(re.findall(r'"(x-loramux-[a-z-]+)"', sources))
    pages = "".join(page.read_text() for page in WRITTEN_PAGES)
    assert {header for header in headers if f"`{header}" not in pages} == set()
    assert len(headers) > 5


def commands_in(text: str) -> Iterator[list[str]]:
    """The words after each `loramux`, in shell blocks and between backticks."""
    fenced = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    lines = [
        line
        for language, block in fenced.findall(text)
        if language in ("sh", "bash")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    lines += [" ".join(code.split()) for code in re.findall(r"`(loramux [^`]+)`", fenced.sub("", text))]
    for line in lines:
        # Without redirections, such as `2> server.log`.
        words = shlex.shlex(re.sub(r"[0-9]?>\s*\S+", "", line), posix=True, punctuation_chars=True)
        words.whitespace_split = True
        for is_end, group in itertools.groupby(words, lambda word: set(word) <= set("();<>|&")):
            command = list(group)
            if not is_end and command[0] == "loramux":
                yield command[1:]


@cache
def command_line() -> Any:
    return typer.main.get_command(app)


def refusal_of(words: list[str]) -> str | None:
    """Why the command line refuses these words. Commands in the middle of a sentence may lack arguments."""
    command = command_line()
    rest = words[2:] if words[:1] == ["--profile"] else list(words)
    while rest and rest[0] in getattr(command, "commands", ()):
        command = command.commands[rest.pop(0)]
    if hasattr(command, "commands"):
        return None
    try:
        command.make_context("loramux", rest).close()
    except Exception as error:
        said = str(getattr(error, "message", error))
        return said if re.search("[Nn]o such|unexpected", str(getattr(error, "format_message", str)())) else None
    return None


@pytest.mark.parametrize("page", PAGES_WITH_LINKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_pages_have_known_options_and_no_further_words(page: Path) -> None:
    found = list(commands_in(page.read_text()))
    assert [(words, said) for words in found if (said := refusal_of(words)) is not None] == []


def test_unknown_options_and_further_words_are_found() -> None:
    text = "```sh\nKEY=$(loramux keys create --tennant acme)\n```\nThen run `loramux usage\nreport`."
    wrong = list(commands_in(text))
    assert wrong == [["keys", "create", "--tennant", "acme"], ["usage", "report"]]
    assert all(refusal_of(words) for words in wrong)
    assert len([words for page in PAGES_WITH_LINKS for words in commands_in(page.read_text())]) > 200


def test_files_named_in_the_contributing_guide_exist() -> None:
    named = re.findall(r"`([\w.-]+/[\w./-]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert len(named) > 50


def test_the_contributing_guide_names_every_generated_page() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name in PAGES if f"docs/{name}" not in guide] == []


def type_in_place(page: Path, directory: Path) -> Typed:
    """Run a page in a directory with a base and two adapters, as a reader would have."""
    shutil.copytree(DEMO / "base", directory / "my-base")
    shutil.copytree(DEMO / "adapters" / "pirate", directory / "my-adapter")
    shutil.copytree(DEMO / "adapters" / "formal", directory / "my-better-adapter")
    ports = {8000: free_port(), 8001: free_port()}
    environment = {"LORAMUX_PORT": str(ports[8000]), "LORAMUX_ADMIN_PORT": str(ports[8001])}
    return type_page(page, directory, ports, environment)


@pytest.mark.campaign
def test_readme_quickstart_works(tmp_path: Path) -> None:
    typed = type_in_place(ROOT / "README.md", tmp_path)
    assert typed.exit_code == 0, typed.errors + typed.output
    assert "acme/support version 1 is ready" in typed.output
    # curl's output does not end with a newline.
    answer, _ = json.JSONDecoder().raw_decode(typed.output, typed.output.index('{"id"'))
    assert answer["choices"][0]["message"]["content"].startswith("Arr, matey!")
    usage = answer["usage"]
    billed = rf"acme +acme/support@1 +1 +{usage['prompt_tokens']} +0 +{usage['completion_tokens']}\b"
    assert re.search(billed, typed.output), typed.output
    assert "Traceback" not in typed.errors


@pytest.mark.campaign
@pytest.mark.parametrize("page", TYPED_PAGES, ids=lambda page: page.name)
def test_commands_in_pages_work(page: Path, tmp_path: Path) -> None:
    typed = type_in_place(page, tmp_path)
    assert typed.exit_code == 0, typed.errors + typed.output
    assert "Traceback" not in typed.errors
