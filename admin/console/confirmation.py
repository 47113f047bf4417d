"""What a far-reaching action will change, said before it is done: a page with a form, which needs no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from starlette.responses import Response

from loramux.admin.console.visit import Visit


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """The page. `path` is what the form is sent to, with `fields` hidden in it; `back` is where nothing is changed."""

    title: str
    before: str
    after: str
    affects: str
    """Who will notice, and when."""
    undo: str
    verb: str
    """On the button."""
    path: str
    back: str
    back_label: str
    fields: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    facts: Sequence[tuple[str, str]] = ()
    """What the reader should know beside: names and how much is used just now."""
    choices: Sequence[tuple[str, str]] = ()
    """For the one field that is still to be chosen: values with their labels; the first is taken unless changed."""
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
    """`1 key`, `2,000 keys`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
