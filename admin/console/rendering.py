"""The templates. All values are escaped, and characters that could deceive a reader are made visible."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from loramux.admin.console import formats

FOLDER = Path(__file__).parent
STATIC = FOLDER / "static"

# Control characters except tab and line feed, marks that reorder or hide text (some of Unicode's Cf), and separators.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb]"
)


def visible(value: Any) -> Any:
    r"""Escape invisible and reordering characters, for example as `\u202e`."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", value)
    return value


class Templates:
    def __init__(self, now_s: Callable[[], float]) -> None:
        # With StrictUndefined, an undefined name raises an error instead of rendering as an empty string.
        self._environment = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=visible,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(formats.FILTERS)
        self._environment.filters["ago"] = lambda at: formats.ago(at, now_s())
        self._environment.globals["now"] = now_s
        self._environment.globals["static_version"] = _static_version()

    def render(self, template: str, /, **values: Any) -> str:
        return self._environment.get_template(template).render(**values)


@cache
def _static_version() -> str:
    """A version string that changes when any static file does, so that browsers can cache the files for a long time."""
    digest = hashlib.sha256()
    for path in sorted(STATIC.rglob("*")):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]
