"""Named servers for the command line, kept in a TOML file that only its owner can read."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loramux.admin.client.suggestions import did_you_mean

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_OPENAI_FIELDS = frozenset({"openai_url", "openai_key"})


class ProfileError(Exception):
    """The profile cannot be used or saved. The message states the problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    name: str
    url: str
    key: str = field(repr=False)
    openai_url: str | None = None
    """The address of the server's OpenAI API, for `loramux chat` and `loramux bench`."""
    openai_key: str | None = field(repr=False, default=None)
    """A tenant's key for that address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownProfiles:
    """The content of the profile file. `current` is used when a command names no profile."""

    profiles: Mapping[str, Profile]
    current: str | None

    def find(self, name: str) -> Profile:
        if name not in self.profiles:
            close = did_you_mean(name, self.profiles)
            raise ProfileError(f"there is no profile {name!r}{close}; create it with 'loramux profiles add {name}'")
        return self.profiles[name]


class ProfileFile:
    """`config.toml` in the user's configuration directory, replaced atomically and readable only by its owner."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_user(cls, environment: Mapping[str, str] = os.environ) -> ProfileFile:
        home = environment.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
        return cls(Path(home) / "loramux" / "config.toml")

    def read(self) -> KnownProfiles:
        try:
            with self.path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                content = file.read()
        except FileNotFoundError:
            return KnownProfiles(profiles={}, current=None)
        except OSError as error:
            raise ProfileError(f"{self.path} cannot be read: {error.strerror}") from None
        if stat.S_IMODE(mode) & 0o077:
            raise ProfileError(f"other users can read the keys in {self.path}: run 'chmod 600 {self.path}'")
        try:
            return _parse(tomllib.loads(content.decode()))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError, _Malformed) as error:
            # The file can contain keys, so the message includes the parser's error but never the file's text.
            reason = str(error) if not isinstance(error, UnicodeDecodeError) else "it is not UTF-8"
            raise ProfileError(f"{self.path} is not a valid profile file: {reason}") from None

    def add(self, profile: Profile) -> None:
        """Save a profile, replacing any profile of the same name.

        If no profile is current, the saved profile becomes the current one.
        """
        if _NAME.fullmatch(profile.name) is None:
            raise ProfileError(
                "a profile's name has up to 63 lowercase letters, digits, '.', '_' and '-', and begins with a letter "
                "or digit"
            )
        self._change(
            lambda known: replace(
                known,
                profiles={**known.profiles, profile.name: profile},
                current=known.current or profile.name,
            )
        )

    def use(self, name: str) -> None:
        self._change(lambda known: replace(known, current=known.find(name).name))

    def remove(self, name: str) -> None:
        """Remove a profile. If it was the current profile, no profile is current until the next `use` or `add`."""

        def without(known: KnownProfiles) -> KnownProfiles:
            removed = known.find(name).name
            return KnownProfiles(
                profiles={kept: profile for kept, profile in known.profiles.items() if kept != removed},
                current=None if known.current == removed else known.current,
            )

        self._change(without)

    def _change(self, change: Callable[[KnownProfiles], KnownProfiles]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked():
                text = _written(change(self.read()))
                unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}")
                try:
                    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                        file.write(text)
                        file.flush()
                        os.fsync(descriptor)
                    unfinished.replace(self.path)
                finally:
                    unfinished.unlink(missing_ok=True)
        except OSError as error:
            raise ProfileError(f"{self.path} cannot be written: {error.strerror}") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self.path.with_name("lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class _Malformed(Exception):
    """The file is valid TOML but does not describe profiles."""


def _parse(document: Mapping[str, Any]) -> KnownProfiles:
    unknown = sorted(document.keys() - {"current", "profiles"})
    if unknown:
        raise _Malformed(
            f"it may contain only 'current' and 'profiles'{did_you_mean(unknown[0], ('current', 'profiles'))}"
        )
    tables = document.get("profiles", {})
    current = document.get("current")
    if not isinstance(tables, dict) or not (current is None or isinstance(current, str)):
        raise _Malformed("'current' must be a name and 'profiles' a table of tables")
    profiles = {}
    for name, table in tables.items():
        if not isinstance(table, dict) or table.keys() - _OPENAI_FIELDS != {"url", "key"}:
            raise _Malformed(
                "each profile must have a 'url' and a 'key', may have an 'openai_url' and an 'openai_key', and nothing "
                "else"
            )
        if not all(isinstance(value, str) for value in table.values()):
            raise _Malformed("the fields of a profile must be strings")
        profiles[name] = Profile(name=name, **table)
    return KnownProfiles(profiles=profiles, current=current)


def _written(known: KnownProfiles) -> str:
    # These strings are printable ASCII, so their JSON form is also a TOML basic string.
    lines = [f"current = {json.dumps(known.current)}"] if known.current is not None else []
    for name, profile in sorted(known.profiles.items()):
        lines += [
            "",
            f"[profiles.{json.dumps(name)}]",
            f"url = {json.dumps(profile.url)}",
            f"key = {json.dumps(profile.key)}",
        ]
        if profile.openai_url is not None:
            lines.append(f"openai_url = {json.dumps(profile.openai_url)}")
        if profile.openai_key is not None:
            lines.append(f"openai_key = {json.dumps(profile.openai_key)}")
    return "\n".join([*lines, ""]).lstrip("\n")
