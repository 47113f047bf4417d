"""Names of base models on a hub or in a bucket."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from loramux.adapter_store.errors import PullRefused

FORMS = "OWNER/NAME[@REVISION], hf://OWNER/NAME[/FILE.gguf][@REVISION] or s3://BUCKET[/PREFIX][/FILE.gguf]"
MAX_NAME_LENGTH = 400
MAX_FILE_LENGTH = 200
"""Longest name of a GGUF file, in characters. The name of its directory here contains it."""

MAX_SPLIT_FILES = 1000
DEFAULT_REVISION = "main"

# No part of a path begins with a dot, so it cannot lead out of a directory.
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REVISION = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}"
_FILE = r"(?:[A-Za-z0-9_][A-Za-z0-9._+=-]*/){0,3}[A-Za-z0-9_][A-Za-z0-9._+=-]*\.gguf"
_HUB = re.compile(rf"(?:hf://)?(?P<place>{_NAME}/{_NAME})(?:/(?P<file>{_FILE}))?(?:@(?P<revision>{_REVISION}))?")
# A blob store's keys have fewer characters.
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_BUCKET = re.compile(
    rf"s3://(?P<place>[a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9](?:/{_PART})*?)(?:/(?P<file>{_PART}\.gguf))?/?"
)
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class ModelName:
    """A base model: a repository of a hub at a revision, or a bucket's prefix. `file` is a GGUF file in it."""

    kind: Literal["hf", "s3"]
    place: str
    revision: str = ""
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> ModelName:
        """Parse a name in one of FORMS. Raises PullRefused."""
        is_bucket = text.startswith("s3://")
        match = None if len(text) > MAX_NAME_LENGTH else (_BUCKET if is_bucket else _HUB).fullmatch(text)
        if match is None or len(match["file"] or "") > MAX_FILE_LENGTH:
            raise PullRefused("invalid_model", f"{text[:MAX_NAME_LENGTH]!r} does not have the form {FORMS}", "model")
        if is_bucket:
            return cls("s3", match["place"], "", match["file"])
        return cls("hf", match["place"], match["revision"] or DEFAULT_REVISION, match["file"])

    @property
    def url(self) -> str:
        file = "" if self.file is None else f"/{self.file}"
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.kind}://{self.place}{file}{revision}"

    @property
    def name(self) -> str:
        """The last part of the name, under which the model is served by default."""
        return (self.file or self.place).rpartition("/")[2].removesuffix(".gguf")

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the GGUF file and its further splits, in order."""
        if self.file is None:
            return ()
        match = _SPLIT.fullmatch(self.file)
        if match is None:
            return (self.file,)
        count = int(match["count"])
        if not 1 <= int(match["number"]) <= count <= MAX_SPLIT_FILES:
            raise PullRefused("invalid_model", f"{self.file} cannot be one of {count} files", "model")
        return tuple(f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))

    @property
    def is_pinned(self) -> bool:
        return _COMMIT.fullmatch(self.revision) is not None


def is_model_url(text: str) -> bool:
    """Return whether a setting names a model on a hub or in a bucket rather than a path."""
    return text.startswith(("hf://", "s3://"))
