"""Refuses to print objects that are not data, because their representations contain addresses and names of the server.

Jinja turns a value into text in `{{ }}`, `~`, `%`, `str.format` and in many filters. Each of them passes its values to
`ChatEnvironment.printed` first. Data is printed unchanged, as transformers prints it.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from functools import wraps
from itertools import chain
from types import NoneType
from typing import Any

from jinja2 import Environment, TemplateError, Undefined, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedFormatter
from markupsafe import EscapeFormatter

Print = Callable[[Any], Any]
"""Returns a value that may be printed. Raises TemplateError for any other value."""

_SIMPLE = (str, int, float, complex, bytes, NoneType, range, Undefined)
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)

_TEXT_FILTERS = (
    *("capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "pprint", "replace", "safe"),
    *("string", "striptags", "title", "trim", "truncate", "upper", "urlencode", "urlize", "wordcount", "wordwrap"),
    "xmlattr",
)
"""Jinja's filters that turn any value into text, except `join`, which reads generators too."""


def check_printable(value: Any, step: Callable[[], None]) -> None:
    """Raise TemplateError unless a value is data, or a container of data. `step` is called for each item."""
    if isinstance(value, _SIMPLE):
        return
    if isinstance(value, dict):
        items: Iterable[Any] = chain(value.keys(), value.values())
    elif isinstance(value, _CONTAINERS):
        items = value
    else:
        raise TemplateError("it prints a function or another object that is not data")
    for item in items:
        step()
        check_printable(item, step)


def text_filters(printed: Print) -> dict[str, Callable[..., Any]]:
    """Return Jinja's filters that turn values into text. Each checks its arguments first."""

    def guarded(text_filter: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(text_filter)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                # Jinja passes its own objects to some filters.
                if not isinstance(value, (EvalContext, Environment, Context)):
                    printed(value)
            return text_filter(*args, **kwargs)

        return checked

    @pass_eval_context
    def join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> Any:
        if attribute is not None:
            value = map(make_attrgetter(context.environment, attribute), value)
        return FILTERS["join"](context, map(printed, value), printed(d))

    return {name: guarded(FILTERS[name]) for name in _TEXT_FILTERS} | {"join": join}


class PrintingCode(CodeGenerator):
    """Generates code that checks the operands of `~` with the environment's method `printed`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - as the base class names it
        printed = nodes.EnvironmentAttribute("printed", lineno=node.lineno)
        checked = [nodes.Call(printed, [one], [], None, None, lineno=node.lineno) for one in node.nodes]
        super().visit_Concat(nodes.Concat(checked, lineno=node.lineno), frame)


class PrintingFormatter(SandboxedFormatter):
    """Checks the fields of `str.format` and `str.format_map` before it formats them."""

    def __init__(self, environment: Environment, printed: Print, **kwargs: Any) -> None:
        super().__init__(environment, **kwargs)
        self._printed = printed

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        value, first = super().get_field(field_name, args, kwargs)
        return self._printed(value), first


class PrintingEscapeFormatter(PrintingFormatter, EscapeFormatter):
    """`PrintingFormatter` for a text that is marked as safe HTML, whose fields are escaped."""
