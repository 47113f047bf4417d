from __future__ import annotations

import re
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.filters import FILTERS
from transformers.utils.chat_template_utils import render_jinja_template

from loramux.engine.chat_templates.chat_template import ChatTemplate
from loramux.engine.chat_templates.jinja_sandbox import ChatEnvironment
from loramux.engine.chat_templates.template_refused import TemplateRefused

ASKED = [{"role": "user", "content": "Hello"}]
REPRESENTATION = re.compile(r"0x[0-9a-f]{4}|<(?!\|)|object at|built-in|loramux")

OBJECTS = {
    "raise_exception": "raise_exception",
    "strftime_now": "strftime_now",
    "dict": "dict",
    "namespace": "namespace",
    "empty namespace": "namespace()",
    "range": "range",
    "lipsum": "lipsum",
    "cycler": "cycler('a')",
    "type of cycler": "cycler",
    "joiner": "joiner()",
    "method of a list": "messages.index",
    "method of a dict": "messages[0].items",
    "method of text": "''.join",
    "format method": "''.format",
    "attribute filter": "messages[0] | attr('keys')",
    "generator": "messages | map('length')",
    "iterator": "messages | reverse",
    "macro": "f",
    "loop": "l[0]",
    "template": "self",
    "function in a list": "[raise_exception]",
    "method in nested data": "{'a': [(1, messages.index)]}",
    "method as a key": "{messages.index: 1}",
    "methods in a list": "messages | map(attribute='items') | list",
    "view of methods": "{'a': messages.index}.values()",
}
"""Expressions whose values are not data. Each template begins with PRELUDE."""

PRELUDE = "{% macro f() %}{% endmacro %}{% set l = namespace(x=1) %}{% for a in [1] %}{% set l = [loop] %}"
END = "{% endfor %}"

WAYS = {
    "output": "{{ X }}",
    "set block": "{% set t %}{{ X }}{% endset %}{{ t }}",
    "filter block": "{% filter upper %}{{ X }}{% endfilter %}",
    "conditional": "{{ X if true }}",
    "call block": "{% macro g() %}{{ caller() }}{% endmacro %}{% call g() %}{{ X }}{% endcall %}",
    "escaped output": "{% autoescape true %}{{ X }}{% endautoescape %}",
    "concatenation": "{{ 'a' ~ (X) ~ 'b' }}",
    "escaped concatenation": "{% autoescape true %}{{ 'a' ~ (X) }}{% endautoescape %}",
    "percent": "{{ '%s' % [X] | first }}",
    "percent tuple": "{{ '%s %r' % (1, X) }}",
    "percent dict": "{{ '%(a)s' % {'a': X} }}",
    "percent bytes": "{{ 'a%a'.encode() % (X,) }}",
    "format filter": "{{ '%s' | format(X) }}",
    "format filter with a name": "{{ '%(a)s' | format(a=X) }}",
    "format method": "{{ '{}'.format(X) }}",
    "format method with a name": "{{ '{a!r}'.format(a=X) }}",
    "format width": "{{ '{:{}}'.format('a', X) }}",
    "format map": "{{ '{a}'.format_map({'a': X}) }}",
    "safe format": "{{ ('{}' | safe).format(X) }}",
    "safe percent": "{{ ('%s' | safe) % (X,) }}",
    "list of texts": "{{ [X] | map('string') | list }}",
    "join": "{{ [X] | join(',') }}",
    "join with": "{{ ['a', 'b'] | join(X) }}",
    "join attribute": "{{ [{'a': X}] | join(',', attribute='a') }}",
    "raise_exception": "{{ raise_exception(X) }}",
    "raise_exception by name": "{{ raise_exception(message=X) }}",
    "index": "{{ [].index(X) }}",
    "missing element": "{{ messages[0][X].y }}",
    "missing attribute": "{{ (messages | attr(X)).y }}",
    "loop": "{% for c in [X] %}{{ c }}{% endfor %}",
    "replacement": "{{ 'abc' | replace('b', X) }}",
    "xmlattr": "{{ {'a': X} | xmlattr }}",
    "parameters": "{{ {'a': X} | urlencode }}",
}
"""Ways in which templates turn the value X into text or into an error."""

MAKERS_OF_TEXT = sorted(
    {*FILTERS}
    - {"attr", "batch", "d", "default", "dictsort", "first", "groupby", "items", "last", "list", "map", "max", "min"}
    - {"random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort", "sum", "unique", "count"}
    - {"format", "length", "abs", "int", "float", "filesizeformat", "round"}
)
"""The filters that return text made from their input."""


EVERY_PAIR = pytest.mark.parametrize(
    "is_whole", [False, pytest.param(True, marks=pytest.mark.campaign)], ids=["some", "every-pair"]
)
"""The campaign `templates` combines every value with every way. A test run combines each of them with some others."""


def source(way: str, value: str) -> str:
    return PRELUDE + way.replace("X", f"({value})") + END


def text_or_refusal(template: str) -> str | TemplateRefused:
    try:
        return ChatTemplate({"default": template}, {}).render(ASKED)
    except TemplateRefused as refusal:
        return refusal


@pytest.mark.parametrize("value", OBJECTS)
def test_no_representation_of_an_object_leaves_the_sandbox(value: str) -> None:
    for name, way in WAYS.items():
        given = text_or_refusal(source(way, OBJECTS[value]))
        text = given.message if isinstance(given, TemplateRefused) else given
        assert not REPRESENTATION.search(text), name
        if "{{ X }}" in way:
            assert isinstance(given, TemplateRefused), name
            assert given.message.endswith("it prints a function or another object that is not data"), name


@EVERY_PAIR
@pytest.mark.parametrize("value", OBJECTS)
def test_no_filter_makes_text_from_an_object(value: str, is_whole: bool) -> None:
    for number, name in enumerate(MAKERS_OF_TEXT, list(OBJECTS).index(value)):
        ways = f"{{{{ (X) | {name} }}}}", f"{{{{ [X] | map('{name}') | list }}}}", f"{{{{ [X] | {name} }}}}"
        for way in ways if is_whole else ways[number % 3 :][:1]:
            given = text_or_refusal(source(way, OBJECTS[value]))
            text = given.message if isinstance(given, TemplateRefused) else given
            assert not REPRESENTATION.search(text), way


DATA = {
    "text": "'a<é\\n'",
    "empty text": "''",
    "whole number": "17",
    "negative number": "-3",
    "float": "1.50",
    "large float": "1e30",
    "true": "true",
    "none": "none",
    "undefined": "unknown",
    "undefined element": "messages[0].x",
    "list": "[1, 'a', none, 2.0, true]",
    "tuple": "(1, 'b')",
    "dict": "{'a': {'b': ['c', \"d'\"]}, 1: none}",
    "undefined in a list": "[unknown]",
    "messages": "messages",
    "tools": "tools",
    "keys": "messages[0].keys()",
    "items": "messages[0].items()",
    "numbers": "range(3)",
    "bytes": "'é'.encode()",
    "safe text": "(messages[0].role ~ '<b>') | safe",
    "attribute of a namespace": "namespace(a=[1]).a",
    "text of a macro": "f()",
}


@EVERY_PAIR
@pytest.mark.parametrize("value", DATA)
def test_data_is_printed_as_by_transformers(value: str, is_whole: bool) -> None:
    ways = (*WAYS.values(), *(f"{{{{ (X) | {name} }}}}" for name in MAKERS_OF_TEXT))
    for way in ways if is_whole else ways[list(DATA).index(value) % 2 :: 2]:
        if "raise_exception" in way:
            continue
        template = source(way, DATA[value])
        given = text_or_refusal(template)
        try:
            expected = render_jinja_template([ASKED], chat_template=template)[0][0]
        except Exception:
            expected = None
        assert (None if isinstance(given, TemplateRefused) else given) == expected, way


@pytest.mark.parametrize(
    ("value", "said"),
    [("'no <|system|> <b>'", "no <|system|> <b>"), ("3", "3"), ("none", "None"), ("['a', 1]", "['a', 1]")],
)
def test_an_exception_shows_data(value: str, said: str) -> None:
    given = text_or_refusal(f"{{{{ raise_exception({value}) }}}}")
    assert isinstance(given, TemplateRefused)
    assert given.message == f"the chat template rejects these messages: {said}"


def test_nested_data_counts_towards_the_time_limit() -> None:
    doubled: Any = "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    environment = ChatEnvironment()
    template = environment.template(environment.compiled(doubled + "{{ n.x }}"))
    with pytest.raises(TemplateError, match="it takes more than"):
        environment.text(template, {})
