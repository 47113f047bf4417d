"""Chat templates that try to take time or memory, or to leave the sandbox."""

from __future__ import annotations

NAMESPACE = "{% set n = namespace(x='aa') %}"

COSTLY = {
    "endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless loop with items": "{% for a in range(99999) %}{% for b in range(999) %}{{ a[b] }}{% endfor %}{% endfor %}",
    "endless output": "{% for a in range(99999) %}{% for b in range(999) %}xxxxxxxxxxxx{% endfor %}{% endfor %}",
    "long range": "{{ range(10 ** 9) | list | length }}",
    "squared ranges": "{% set a = range(99999) | list %}{% for b in a %}{% set c = a + a %}{{ c * 99 }}{% endfor %}",
    "repeated text": "{{ ('a' * 10 ** 9) | length }}",
    "repeated list": "{{ ([messages] * 10 ** 9) | length }}",
    "large power": "{{ 10 ** (10 ** 9) > 1 }}",
    "product of powers": "{{ (7 ** 9999999) ** 99 > 1 }}",
    "center": "{{ 'x' | center(10 ** 9) }}",
    "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "printf width": "{{ '%1000000000d' | format(1) }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "doubling": NAMESPACE + "{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "doubling by join": NAMESPACE + "{% for i in range(99) %}{% set n.x = [n.x, n.x] | join %}{% endfor %}",
    "doubling by replace": NAMESPACE + "{% for i in range(9) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "wide json": "{{ [1, 2] | tojson(indent=10 ** 9) }}",
    "deep json": NAMESPACE + "{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x | tojson }}",
    "wide batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "wide slice": "{{ [1] | slice(10 ** 9, 'x') | list }}",
    "indent": "{{ ('\\n' * 9999999) | indent(9999) }}",
    "word wrap": "{{ ('a ' * 9999999) | wordwrap(1) }}",
    "urlize": "{{ ('www.a.b ' * 999999) | urlize }}",
    "pretty print": "{{ range(99999) | list | pprint }}{{ range(99999) | map('pprint') | list | pprint }}" * 9,
    "sum of lists": "{{ ([[1] * 999] * 99999) | sum(start=[]) }}",
    "sort": "{% for i in range(99999) %}{{ range(99999) | sort(reverse=true) | length }}{% endfor %}",
    "joiner": "{% set j = joiner('a' * 10 ** 8) %}{% for i in range(999) %}{{ j() }}{% endfor %}",
    "cycler": "{% set c = cycler(*range(9999)) %}{% for i in c.items %}{% for j in c.items %}{% endfor %}{% endfor %}",
    "lipsum": "{{ lipsum(10 ** 8, false, 10, 99) }}",
    "clock": "{{ strftime_now('%c' * 10 ** 8) }}",
    "macro recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "recursive loop": "{% for m in messages recursive %}{{ loop([m]) }}{% endfor %}",
    "parentheses": "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
    "long sum": "{{ 1" + " + 1" * 15_000 + " }}",
    "nested loops": "{% for a in messages %}" * 500 + "x" + "{% endfor %}" * 500,
    "nested lists": "{{ " + "[" * 30_000 + "]" * 30_000 + " }}",
    "long chain": "{{ messages" + ".a" * 30_000 + " }}",
    "folded constants": "{{ 'a' * 9 ** 9 ~ 'b' * 9 ** 9 }}",
}
"""Refused, because they need too much of something."""

SLOW = (
    "endless loop with items",
    "squared ranges",
    "product of powers",
    "wide slice",
    "indent",
    "word wrap",
    "urlize",
    "pretty print",
    "sum of lists",
    "sort",
    "cycler",
    "lipsum",
    "macro tree",
)
"""Names in COSTLY of templates that use all of their processor time, tried in the campaign."""

ESCAPES = {
    "class walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attribute filter": "{{ (messages | attr('__class__')) | string }}{{ messages | map('attr', '__class__') | list }}",
    "item": "{{ messages['__class__'] }}",
    "globals of lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "globals of cycler": "{{ cycler.__init__.__globals__ }}",
    "globals of a filter": "{{ raise_exception.__globals__ }}{{ strftime_now.__globals__ }}",
    "type of namespace": "{{ namespace.__init__.__globals__ }}{{ namespace().__class__ }}",
    "name on namespace": "{% set n = namespace() %}{% set n.__class__ = dict %}{{ n }}",
    "name for namespace": "{{ namespace({'__class__': 1}) }}",
    "type of dict": "{{ dict.__call__.__globals__ }}{{ dict.mro() }}",
    "context": "{{ self._TemplateReference__context.environment }}",
    "format field": "{{ '{0.__class__.__init__}'.format(messages) }}",
    "format map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "frame of a generator": "{{ (messages | map('length')).gi_frame.f_globals }}",
    "caller's code": "{% macro f() %}{% endmacro %}{{ f._func.__code__ }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.environ }}",
    "extends": "{% extends '/etc/passwd' %}",
    "change of a message": "{{ messages.append(1) }}{{ messages[0].update(a=1) }}",
}
"""Refused, or rendered as nothing."""

UNUSABLE = {
    "empty": "",
    "blank": " \n{{ '' }}",
    "comment": "{# nothing #}",
    "fixed": "You are helpful.",
    "without the user": "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}",
    "needs a field": "{{ messages[0].content + messages[0].mood }}",
    "needs a variable": "{{ mood.name }}{{ messages[0].content }}",
    "refuses": "{{ raise_exception('no') }}",
    "malformed": "{% for m in messages %}",
    "unknown filter": "{{ messages | shout }}",
    "unpaired surrogate": '{{ messages[0].content }}{{ "\\ud800" }}',
    "refuses with a surrogate": '{{ raise_exception("\\ud800") }}',
}
"""Templates of which no conversation can be rendered as text with the user's message."""
