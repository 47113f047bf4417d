from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from loramux.engine.chat_templates.chat_template import ChatTemplate
from loramux.engine.chat_templates.jinja_sandbox import MAX_RENDER_S
from loramux.engine.chat_templates.template_kwargs import MAX_DEPTH, MAX_KWARGS, MAX_SIZE, check_kwargs
from loramux.engine.chat_templates.template_refused import TemplateRefused
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.conformance.chat_templates import CASES, Counts, compare, save
from tests.engine.chat_templates.templates import TEMPLATES

ASKED = [{"role": "user", "content": "Hello"}]


def rendered(source: str, messages: list[dict[str, Any]] = ASKED, **options: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(messages, **options)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    tokenizer = save(tmp_path, TEMPLATES[name])
    ours = ModelTokenizer.load(tmp_path)
    counts = Counts()
    for case in CASES:
        compare(tokenizer, ours, case, counts)
    assert not counts.wrong
    assert counts.equal > len(CASES) // 2


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'b': 'é<', 'a': 1} | tojson }}", '{"b": "é<", "a": 1}'),
        ("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=true, sort_keys=true) }}", '{"a": 1, "b": "\\u00e9"}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}{{ [1] | tojson(indent=1) }}", "[1,2][\n 1\n]"),
        ("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}", "1False"),
        ("{{ dict(a=1).a }}{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}", "12"),
        ("{{ strftime_now('%%') }}{{ documents }}{{ tools }}", "%NoneNone"),
    ],
    ids=["plain json", "sorted ascii json", "json layout", "generation block", "dict and namespace", "clock"],
)
def test_templates_have_the_functions_of_transformers(source: str, expected: str) -> None:
    assert rendered(source) == expected


def test_tool_use_template_renders_requests_with_tools(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert [template.render(ASKED), template.render(ASKED, tools=[])] == ["plain", "tools"]


def test_template_files_go_before_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "configured"}))
    (tmp_path / "chat_template.jinja").write_text("file")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("tools file")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert [template.render(ASKED), template.render(ASKED, tools=[])] == ["file", "tools file"]


def test_the_file_of_earlier_processors_is_read_last(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "earlier"}))
    for content, expected in (({}, "earlier"), ({"chat_template": "configured"}, "configured")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
        template = ChatTemplate.load(tmp_path)
        assert template is not None
        assert template.render(ASKED) == expected


def test_a_malformed_file_of_earlier_processors_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text("[")
    with pytest.raises(ModelNotSupported, match=r"chat_template.json is not JSON"):
        ChatTemplate.load(tmp_path)


def test_template_for_tools_alone_refuses_requests_without_tools() -> None:
    template = ChatTemplate({"tool_use": "tools"}, {})
    assert template.render(ASKED, tools=[]) == "tools"
    with pytest.raises(TemplateRefused) as caught:
        template.render(ASKED)
    assert caught.value.param == "tools"


def test_functions_without_arguments_are_shown_by_templates_that_read_their_properties() -> None:
    source = (
        "{% for one in tools %}{{ one.function.name }}({% for name, spec in one.function.parameters.properties.items() "
        "%}{{ name }}: {{ spec.type }}{% endfor %}) {% endfor %}"
    )
    template = ChatTemplate({"default": source}, {})
    schemas = (None, {}, {"type": "object"}, {"type": "object", "properties": {"a": {"type": "string"}}})
    functions = [{"name": "f"} if one is None else {"name": "f", "parameters": one} for one in schemas]
    tools = [{"type": "function", "function": function} for function in functions]
    assert template.render([{"role": "user", "content": "Hi"}], tools=tools) == "f() f() f() f(a: string) "


def test_templates_that_read_properties_show_schemas_as_they_were_written() -> None:
    source = "{% for one in tools %}{{ one.function.parameters.properties | length }}{{ one | tojson }}{% endfor %}"
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    template = ChatTemplate({"default": source}, {})
    assert template.render([{"role": "user", "content": "Hi"}], tools=[tool]) == f"1{json.dumps(tool)}"


def test_features_of_the_base_come_from_the_template_for_each_request() -> None:
    tool_use = "{{ messages[0].content }}{{ tools | tojson }}{{ messages | tojson }}"
    template = ChatTemplate({"default": "{{ messages[0].content }}", "tool_use": tool_use}, {})
    features = template.features()
    assert (features.tools, features.arguments_as_text) == (True, False)
    assert template.source(has_tools=True) == tool_use


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
        ({"messages": []}, "messages"),
    ],
    ids=["both", "not rendered", "no messages"],
)
def test_what_cannot_be_rendered_is_refused_by_name(options: dict[str, Any], param: str) -> None:
    with pytest.raises(TemplateRefused) as caught:
        rendered("{{ messages[0].content | upper }}", **options)
    assert caught.value.param == param


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "kwargs",
    [
        {"messages": []},
        {"tools": None},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"bos_token": "<system>"},
        {"pad_token": ""},
        {"chat_template": "x"},
        {"": 1},
        {"a b": 1},
        {"__class__": 1},
        {"a" * 65: 1},
        {"a\n": 1},
        {f"a{i}": 1 for i in range(MAX_KWARGS + 1)},
        {"a": "x" * MAX_SIZE},
        {"a": [0] * MAX_SIZE},
        {"a": {"b" * MAX_SIZE: 1}},
        {"a": deep(MAX_DEPTH + 1)},
        {"a": deep(100_000)},
        {"a": {1: 2}},
        {"a": 1 << 64},
        {"a": float("nan")},
        {"a": b"bytes"},
        {"a": ("tuple",)},
        {"a": print},
    ],
    ids=[
        *("messages", "tools", "generation prompt", "continuation", "bos", "pad", "template"),
        *("no name", "space", "underscore", "long name", "line break", "many"),
        *("long text", "long list", "long key", "deep", "very deep"),
        *("key that is a number", "large number", "not a number", "bytes", "tuple", "function"),
    ],
)
def test_kwargs_are_a_few_small_json_values(kwargs: dict[str, Any]) -> None:
    with pytest.raises(TemplateRefused) as caught:
        rendered("x", kwargs=kwargs)
    assert caught.value.param == "chat_template_kwargs"
    assert "chat_template_kwargs" in caught.value.message
    assert len(caught.value.message) < 300


def test_kwargs_within_the_limits_reach_the_template() -> None:
    kwargs = {"enable_thinking": False, "depth": deep(MAX_DEPTH - 1), "größe": {"a": [1, 2.5, None]}}
    check_kwargs(kwargs)
    assert rendered("{{ enable_thinking }}{{ größe.a[1] }}{{ bos_token }}", kwargs=kwargs) == "False2.5<s>"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in messages %}{% for b in messages %}{% if b.role == 'x' %}{% endif %}{% endfor %}{% endfor %}",
        "{% for a in messages %}{% set x = messages[loop.index:] %}{% endfor %}{{ messages[0].content.x.y }}",
        "{% for a in messages %}{{ messages | tojson }}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    ],
    ids=["squared time", "squared copies", "squared text", "recursion"],
)
def test_a_long_history_ends_within_the_limits(source: str) -> None:
    template = ChatTemplate({"default": source}, {})
    history = [{"role": "user", "content": "x" * 20}] * 20_000
    started_s = time.thread_time()
    with pytest.raises(TemplateRefused) as caught:
        template.render(history)
    assert caught.value.param == "messages"
    assert time.thread_time() - started_s < 2 * MAX_RENDER_S
    # Each rendering on the thread has its own time limit.
    assert rendered("{% for m in messages %}{{ m.role }}{% endfor %}", history[:5000]) == "user" * 5000


def test_deeply_nested_arguments_are_refused() -> None:
    with pytest.raises(TemplateRefused):
        rendered("{{ messages | tojson }}", [{"role": "user", "content": deep(100_000)}])
