from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer.main

from loramux.admin.cli import app

HEAD = """# Commands

`make docs` generates this page from the command line, and a test checks that it is current. `loramux COMMAND --help`
shows the same text.

`--profile NAME` and `--version` come before the command: `loramux --profile production tenants list`. A
command takes the server's address and key together from the first of these that is set:

1. the profile named by `--profile` or by `LORAMUX_PROFILE`;
2. `LORAMUX_ADMIN_KEY`, with `LORAMUX_ADMIN_URL` (by default `http://127.0.0.1:8001`);
3. the current profile (`loramux profiles list` marks it), unless only `LORAMUX_ADMIN_URL` is set, which is an error.

`chat`, `bench`, `run` and, without `--admin`, `batches` call an OpenAI API instead. They use `--url` and `--api-key` if
one of them is given, then a profile that `--profile` or `LORAMUX_PROFILE` names, then `OPENAI_BASE_URL` and
`OPENAI_API_KEY`, and then the current profile. A profile needs an `openai_url` for this:
`loramux profiles add NAME --openai-url URL`.

| exit code | meaning |
|---:|---|
| 0 | done |
| 1 | the server refused the call, or the command refused an adapter, a merge or a download; see also the next table |
| 2 | the command or the settings are wrong; nothing was sent |
| 3 | the server does not answer, or no server is configured |
| 130 | Ctrl-C, or Ctrl-D at a question |

| command | also exits with 1 if |
|---|---|
| `bench` | all requests failed, or a file can no longer be written |
| `check` | it found a problem |
| `cluster status` | an engine does not run |
| `doctor` | a check failed |
| `eval` | the eval did not end, or its score is below `--min-score` |
| `quotas check` | the request would be refused |
| `run` | the batch did not complete, a request failed, or the answers can no longer be written |
| `webhooks test` | the event was not delivered |

`--json` prints one JSON document to standard output. For a failure, this is
`{"error": {"message": ..., "code": ..., "param": ...}}`. Without `--json`, a failure is a sentence on standard error.
A wrong option or argument (exit code 2) is such a sentence even with `--json`. So is a failure of `bench` to write a
file after it has printed its figures.

`loramux --install-completion` installs completion for bash, zsh or fish.
"""


def commands_page() -> str:
    parts = [HEAD]
    for words, verb in _verbs(typer.main.get_command(app)):
        parts.append(_section(words, verb))
    return "\n".join(parts)


def _verbs(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name in sorted(command.commands):
        yield from _verbs(command.commands[name], (*words, name))


def _section(words: tuple[str, ...], verb: Any) -> str:
    arguments = [parameter for parameter in verb.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in verb.params if parameter.param_type_name == "option"]
    call = " ".join(["loramux", *words, *(_shown_argument(argument) for argument in arguments)])
    lines = [f"## {' '.join(words)}", "", " ".join((verb.help or "").split()), "", f"    {call}", ""]
    rows = [(_shown_argument(argument), argument.help, "") for argument in arguments]
    rows += [(_shown_option(option), option.help, "required" if option.required else "") for option in options]
    lines += ["| | | |", "|---|---|---|"]
    lines += [f"| `{_cell(name)}` | {_cell(text)} | {note} |" for name, text, note in rows if name != "--help"]
    return "\n".join([*lines, ""])


def _shown_argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _shown_option(option: Any) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    return names if option.is_flag else f"{names} {_value_of(option)}"


def _value_of(option: Any) -> str:
    kind = option.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "/".join(str(choice.value) for choice in kind)
    return {int: "N", float: "N", Path: "PATH"}.get(kind, "TEXT")


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")
