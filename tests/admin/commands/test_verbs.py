from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from loramux.admin.cli import app

WITHOUT_JSON = {"serve", "demo", "gateway", "chat"}
"""Commands that run until stopped or talk to a person, and therefore have no `--json`."""


def verbs(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, inner in command.commands.items():
        yield from verbs(inner, (*words, name))


VERBS = dict(verbs(typer.main.get_command(app)))


@pytest.mark.parametrize("words", sorted(VERBS), ids=" ".join)
def test_every_command_has_help_and_a_json_option(words: tuple[str, ...]) -> None:
    verb = VERBS[words]
    assert (verb.help or "").strip().endswith("."), "the help ends like a sentence"
    flags = {flag for parameter in verb.params for flag in parameter.opts}
    assert ("--json" in flags) is (words[0] not in WITHOUT_JSON)
    for parameter in verb.params:
        assert getattr(parameter, "help", None), f"{parameter.name} is explained"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("tenant", "list"), "Did you mean", id="verb"),
        pytest.param(("tenants", "creat", "x"), "Did you mean", id="verb of a group"),
        pytest.param(("tenants", "list", "--jsn"), "--json", id="option"),
    ],
)
def test_mistyped_word_gets_a_suggestion(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, list(arguments))
    assert (result.exit_code, said in result.stderr) == (2, True), result.output


def test_closed_output_pipe_causes_no_traceback() -> None:
    program = [sys.executable, "-m", "loramux.admin.cli", "--help"]
    environment = {**os.environ, "PYTHONPATH": ".src", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors


def complete(directory: Path, *words: str) -> list[str]:
    """Return bash's completions for the last word by calling the completion function as bash does."""
    program = directory / "bin" / "loramux"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom loramux.admin.cli import main\nmain()\n")
    program.chmod(0o755)
    script = f"""
        eval "$(_LORAMUX_COMPLETE=source_bash loramux)"
        COMP_WORDS=(loramux {" ".join(words)}) COMP_CWORD={len(words)}
        $(complete -p loramux | sed -E 's/.*-F ([^ ]+).*/\\1/') loramux
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "XDG_CONFIG_HOME": str(directory),
    }
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        pytest.param(("keys", "re"), ["revoke"], id="verb"),
        pytest.param(("usage", "--format", "j"), ["json"], id="value"),
        pytest.param(("--profile", "pro"), ["production"], id="profile"),
    ],
)
def test_bash_completes_commands_options_and_profiles(
    tmp_path: Path, words: tuple[str, ...], offered: list[str]
) -> None:
    from loramux.admin.client.profiles import Profile, ProfileFile

    ProfileFile.of_user({"XDG_CONFIG_HOME": str(tmp_path)}).add(Profile(name="production", url="https://x", key="k"))
    assert complete(tmp_path, *words) == offered
