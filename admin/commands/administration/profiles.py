"""`loramux profiles`: named servers for the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from loramux.admin.commands.options import AsJson
from loramux.admin.commands.output import ask, fail, print_json, print_table, tell
from loramux.admin.exit_codes import WRONG_CALL

app = typer.Typer(no_args_is_help=True, help="Manage named servers, and choose the server that commands call.")

Name = Annotated[str, typer.Argument(help="The profile's name, such as production.")]


@app.command("list")
def list_profiles(as_json: AsJson = False) -> None:
    """List the profiles. Their keys are not shown."""
    from loramux.admin.client.profiles import ProfileFile

    with _explained(as_json):
        known = ProfileFile.of_user().read()
    profiles = sorted(known.profiles.values(), key=lambda profile: profile.name)
    if as_json:
        data = [
            {"object": "profile", "name": profile.name, "url": profile.url, "current": profile.name == known.current}
            for profile in profiles
        ]
        print_json({"object": "list", "data": data})
        return
    print_table(
        ("current", "name", "url"),
        [("*" if profile.name == known.current else "", profile.name, profile.url) for profile in profiles],
    )


@app.command()
def add(
    name: Name,
    url: Annotated[str, typer.Option(help="The URL of the server's admin listener.")] = "http://127.0.0.1:8001",
    openai_url: Annotated[
        str | None,
        typer.Option(
            help="The URL of its OpenAI API, for 'loramux chat' and 'loramux bench', such as http://127.0.0.1:8000/v1. "
            "A tenant's key for it is read after the administrator's key."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Save a server's address and key. Keys are read from a prompt or from lines of standard input, never from an
    argument.
    """
    from loramux.admin.client.profiles import Profile, ProfileFile
    from loramux.admin.client.server_address import NoServerNamed, check_url

    try:
        check_url(url, "--url")
        key = _read_key("Key")
        openai_key = None
        if openai_url is not None:
            check_url(openai_url, "--openai-url")
            openai_key = _read_key("Tenant's key")
    except NoServerNamed as error:
        fail(str(error), WRONG_CALL)
    file = ProfileFile.of_user()
    with _explained(as_json):
        file.add(Profile(name=name, url=url, key=key, openai_url=openai_url, openai_key=openai_key))
        is_current = file.read().current == name
    tell(_named(name), f"saved profile {name} in {file.path}" + (", the current one" if is_current else ""), as_json)


@app.command()
def use(name: Name, as_json: AsJson = False) -> None:
    """Make a profile the current one. --profile, LORAMUX_PROFILE and LORAMUX_ADMIN_KEY take precedence over it."""
    from loramux.admin.client.profiles import ProfileFile

    with _explained(as_json):
        ProfileFile.of_user().use(name)
    tell(_named(name), f"{name} is now the current profile", as_json)


@app.command()
def remove(name: Name, as_json: AsJson = False) -> None:
    """Remove a profile and its key from the profile file. The key stays valid on its server."""
    from loramux.admin.client.profiles import ProfileFile

    with _explained(as_json):
        ProfileFile.of_user().remove(name)
    tell(_named(name), f"removed profile {name}", as_json)


def _read_key(prompt: str) -> str:
    """Read a key from the terminal, or from the next line of standard input. Raises NoServerNamed."""
    from loramux.admin.client.server_address import check_key

    key = ask(prompt, hides_answer=True) if sys.stdin.isatty() else sys.stdin.readline()
    check_key(key.strip(), "the input")
    return key.strip()


def _named(name: str) -> dict[str, str]:
    return {"object": "profile", "name": name}


@contextmanager
def _explained(as_json: bool) -> Iterator[None]:
    from loramux.admin.client.profiles import ProfileError
    from loramux.admin.commands.output import error_document

    try:
        yield
    except ProfileError as error:
        fail(str(error), WRONG_CALL, error_document(str(error), "profile_error") if as_json else None)
