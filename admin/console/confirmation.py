"""A confirmation page that shows the effects of a far-reaching action before it runs. Works without JavaScript."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from starlette.responses import Response

from loramux.admin.console.visit import Visit


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """The content of a confirmation page. The page's form is sent to `path` with `fields` as hidden fields. `back` is
    the path of the previous page.
    """

    title: str
    before: str
    after: str
    affects: str
    """The callers that the action affects, and when it takes effect."""
    undo: str
    verb: str
    path: str
    back: str
    back_label: str
    fields: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    facts: Sequence[tuple[str, str]] = ()
    choices: Sequence[tuple[str, str]] = ()
    """Options of the page's only visible field, as values and labels. The first option is preselected."""
    choice_name: str = ""
    choice_label: str = ""
    is_danger: bool = True

    def ask(self, visit: Visit) -> Response:
        fields = [
            (name, value)
            for name, values in self.fields.items()
            for value in ([values] if isinstance(values, str) else values)
        ]
        return visit.page("confirm.html", ask=self, fields=fields)


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun: `1 key`, `2,000 keys`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
