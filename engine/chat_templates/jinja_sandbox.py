"""The Jinja environment of chat templates. It offers the features that Hugging Face's templates use, and enforces
limits.

Templates read values and build text. They cannot change a message, reach Python's internals, print the representations
of objects, or import anything.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import Markup

from loramux.engine.chat_templates.printed_values import (
    PrintingCode,
    PrintingEscapeFormatter,
    PrintingFormatter,
    check_printable,
    text_filters,
)

MAX_PROMPT_CHARS = 16 << 20
"""Longest text that a template may render, in characters."""

MAX_RENDER_S = 0.5
"""Limit on one rendering's processor time, in seconds."""

_STEPS_PER_LOOK = 64
"""Number of attribute accesses, item accesses and calls after which the clock is read again."""


class RaisedByTemplate(TemplateError):
    """A template called `raise_exception`. The message is the template's own."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Renders templates within limits on processor time and on the length of the text. Thread-safe."""

    code_generator_class = PrintingCode
    intercepted_binops = frozenset(["%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            # At compile time, Jinja would turn constants into text, such as `''.join`, without a check.
            optimized=False,
            finalize=self._finalize,
        )
        self.filters |= text_filters(self.printed) | {"tojson": _tojson}
        self.globals |= {
            "raise_exception": self._raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        self._clock = _Clock()

    def compiled(self, source: str) -> CodeType:
        """Compile a template. A malformed template can raise any exception."""
        return self.compile(source)

    def template(self, code: CodeType) -> Template:
        return self.template_class.from_code(self, code, self.make_globals(None))

    def text(self, template: Template, variables: dict[str, Any]) -> str:
        """Render a template of this environment. The template can raise any exception."""
        self._clock.start()
        parts, num_chars = [], 0
        for part in template.generate(variables):
            parts.append(part)
            num_chars += len(part)
            if num_chars > MAX_PROMPT_CHARS:
                raise TemplateError(f"it renders more than {MAX_PROMPT_CHARS} characters")
        text = "".join(parts)
        # A template can write unpaired surrogates, which no tokenizer encodes.
        text.encode()
        return text

    def printed(self, value: Any) -> Any:
        """Return a value that may be printed. Raises TemplateError if its text would be an object's representation."""
        check_printable(value, self._clock.step)
        return value

    @pass_context
    def _finalize(self, context: Context, value: Any) -> Any:
        return self.printed(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, (str, bytes)):
            self.printed(right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text: str = value.__self__
        formatter = (
            PrintingEscapeFormatter(self, self.printed, escape=text.escape)
            if isinstance(text, Markup)
            else PrintingFormatter(self, self.printed)
        )

        def format_(*args: Any, **kwargs: Any) -> str:
            return type(text)(formatter.vformat(text, args, kwargs))

        def format_map(values: Mapping[str, Any]) -> str:
            return format_(**values)

        return format_map if value.__name__ == "format_map" else format_

    def _raise_exception(self, message: Any) -> NoReturn:
        raise RaisedByTemplate(self.printed(message))

    # Every loop over a conversation calls one of these methods.
    def getattr(self, obj: Any, attribute: str) -> Any:
        self._clock.step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._clock.step()
        return super().getitem(obj, argument)

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        self._clock.step()
        return super().call(*args, **kwargs)


class _Clock(threading.local):
    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._num_steps = 0
        self._end_s = time.thread_time() + MAX_RENDER_S

    def step(self) -> None:
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_LOOK == 0 and time.thread_time() > self._end_s:
            raise TemplateError(f"it takes more than {MAX_RENDER_S:g} s")


class _GenerationBlock(Extension):
    """Renders the body of `{% generation %}` unchanged. The tag marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Dict:
    """The global `dict`, without the other attributes of Python's type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` without names that begin with an underscore, which the sandbox could not read back."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As in Jinja, `self` is a name that a template may use.
        namespace, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(namespace, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute that begins with an underscore: {name[:100]!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
