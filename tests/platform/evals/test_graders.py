from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import pytest

from loramux.platform.evals.cases import Case, read_cases
from loramux.platform.evals.graders import Grade, combined, grade_likelihood, grade_text, grade_verdict
from loramux.platform.evals.schema_check import MAX_STEPS, SchemaTooCostly, check_schema, follows


def case_of(**graders: Any) -> Case:
    [case] = read_cases(json.dumps({"prompt": "p", **graders}).encode()).cases
    return case


def graded(answer: str, **graders: Any) -> Grade:
    return combined(grade_text(case_of(**graders), answer))


@pytest.mark.parametrize(
    ("answer", "graders", "score", "is_passed"),
    [
        (" hi\n", {"equal": "hi"}, 1, True),
        ("Hi", {"equal": "hi"}, 0, False),
        ("a cat sat", {"contains": "cat"}, 1, True),
        ("a cat sat", {"contains": ["cat", "dog"]}, 0.5, False),
        ('{"a": 1, "b": {"c": [true]}}', {"fields": {"a": 1, "b": {"c": [True]}}}, 1, True),
        ('```json\n{"a": 1}\n```', {"fields": {"a": 1}}, 1, True),
        ('{"a": 1, "b": 2}', {"fields": {"a": 1, "b": 3}}, 0.5, False),
        ('{"a": true}', {"fields": {"a": 1}}, 0, False),
        ("[1]", {"fields": {"a": 1}}, 0, False),
        ("no JSON", {"fields": {"a": 1}}, 0, False),
        ("[" * 100_000, {"schema": {}}, 0, False),
        ("[" * 40 + "]" * 40, {"schema": {}}, 0, False),
        ('{"a": 1, "a": 2}', {"schema": {}}, 0, False),
        ("NaN", {"schema": {}}, 0, False),
        ('{"a": 1}', {"schema": {"type": "object", "required": ["a"]}}, 1, True),
        ('{"b": 1}', {"schema": {"type": "object", "required": ["a"]}}, 0, False),
        ('{"a": 1}', {"contains": "a", "schema": {"type": "array"}}, 0.5, False),
        ("", {"equal": ""}, 1, True),
    ],
)
def test_answer_is_graded(answer: str, graders: dict[str, Any], score: float, is_passed: bool) -> None:
    grade = graded(answer, **graders)
    assert (grade.score, grade.is_passed) == (score, is_passed)
    assert bool(grade.detail) is not is_passed


def test_likelihood_is_the_geometric_mean() -> None:
    case = case_of(reference="r", min_likelihood=0.4)
    grade = grade_likelihood(case, [math.log(0.5), math.log(0.32)])
    assert grade.score == pytest.approx(0.4)
    assert grade_likelihood(case, [math.log(0.5)]).is_passed
    assert not grade_likelihood(case, [math.log(0.39)]).is_passed
    assert grade_likelihood(case, []) == Grade(0.0, False, "the reference's likelihood is 0.000")


def test_only_yes_is_a_pass() -> None:
    assert [grade_verdict(said).is_passed for said in ("yes", " yes ", "no", "yes!", "")] == [True, True, *[False] * 3]


SCHEMAS: list[Any] = [
    True,
    False,
    {"type": ["integer", "null"]},
    {"enum": [1, "a", None, True]},
    {"const": {"a": [0]}},
    {"minLength": 1, "maxLength": 2},
    {"minItems": 1, "maxItems": 2, "items": {"type": "number", "minimum": 0, "maximum": 1.5}},
    {"properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False},
    {"additionalProperties": {"type": "boolean"}},
    {"anyOf": [{"type": "string"}, {"type": "object", "required": ["b"]}]},
    {"allOf": [{"type": "array"}, {"minItems": 2}]},
]
VALUES: list[Any] = [None, True, False, 0, 1, 1.0, 1.5, -1, "", "a", "abc", [], [0], [0, 2], [True, "a"], [1, 1, 1]]
VALUES += [{}, {"a": "x"}, {"a": 1}, {"a": [0]}, {"a": "x", "b": True}, {"b": True}, {"b": None}]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_schemas_mean_what_json_schema_says(schema: Any) -> None:
    check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert [follows(schema, value) for value in VALUES] == [validator.is_valid(value) for value in VALUES]


LONG = list(range(1000))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"items": {"enum": [*range(10_000)]}}, [9999] * 1000),
        ({"items": {"enum": [[one] for one in LONG]}}, [[999]] * 1000),
        ({"items": {"anyOf": [{"const": one} for one in LONG]}}, [999] * 1000),
        ({"items": {"required": ["a"] * 1000}}, [{"a": 1}] * 1000),
        ({"items": {"properties": {str(one): True for one in LONG}}}, [{}] * 1000),
        ({"items": {"type": [*["string"] * 999, "integer"]}}, [0] * 1000),
        ({"allOf": [{"additionalProperties": True}] * 1000}, {str(one): 0 for one in LONG}),
        ({"allOf": [{"anyOf": [{"const": [*LONG, 1]}, True]}] * 1000}, [*LONG, 2]),
        (
            {"allOf": [{"anyOf": [{"const": {str(one): 0 for one in LONG}}, True]}] * 1000},
            {str(one): 0 for one in LONG},
        ),
    ],
    ids=lambda one: json.dumps(one)[:30],
)
def test_costly_check_ends_early(schema: Any, value: Any) -> None:
    check_schema(schema)
    with pytest.raises(SchemaTooCostly):
        follows(schema, value)


def test_line_with_a_costly_schema_does_not_pass() -> None:
    schema = {"items": {"enum": LONG}}
    assert graded(json.dumps([999] * 1000), schema=schema).is_passed
    assert graded(json.dumps([999] * (MAX_STEPS // 100)), schema=schema).detail == "the schema takes too long to check"
