"""Grades an answer against what a line of the file expects."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loramux.adapter_store.formats.files.strict_json import InvalidJson, parse_strict_json
from loramux.platform.evals.cases import MAX_DEPTH, Case, is_deeper
from loramux.platform.evals.schema_check import SchemaTooCostly, follows, same

_FENCED = re.compile(r"\A```[a-zA-Z]*\n(.*)\n```\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Grade:
    """A score from 0 to 1. `detail` says why the answer did not pass, and is empty if it did."""

    score: float
    is_passed: bool
    detail: str = ""


def grade_text(case: Case, answer: str) -> list[Grade]:
    """Apply the graders that need no model."""
    grades = []
    if case.equal is not None:
        grades.append(_all_or_nothing(answer.strip() == case.equal.strip(), "not equal to the expected answer"))
    if case.contains is not None:
        missing = [text for text in case.required if text not in answer]
        grades.append(_share(len(case.required) - len(missing), len(case.required), "expected texts are missing"))
    if case.fields_ is None and case.schema_ is None:
        return grades
    try:
        value = answer_json(answer)
    except InvalidJson as error:
        return [*grades, Grade(0.0, False, f"not JSON: {error}")]
    if case.fields_ is not None:
        right = sum(_has_field(value, name, wanted) for name, wanted in case.fields_.items())
        grades.append(_share(right, len(case.fields_), "fields are wrong or missing"))
    if case.schema_ is not None:
        try:
            grades.append(_all_or_nothing(follows(case.schema_, value), "the JSON does not follow the schema"))
        except SchemaTooCostly:
            grades.append(Grade(0.0, False, "the schema takes too long to check"))
    return grades


def grade_verdict(verdict: str) -> Grade:
    """Grade by the judge's answer, which is `yes` or `no`."""
    return _all_or_nothing(verdict.strip() == "yes", "the judge said no")


def grade_likelihood(case: Case, logprobs: Sequence[float]) -> Grade:
    """Score a reference by the geometric mean of its tokens' probabilities."""
    likelihood = math.exp(sum(logprobs) / len(logprobs)) if logprobs else 0.0
    is_passed = likelihood >= case.min_likelihood
    return Grade(likelihood, is_passed, "" if is_passed else f"the reference's likelihood is {likelihood:.3f}")


def combined(grades: Sequence[Grade]) -> Grade:
    """The mean score. The answer passes if it passes every grader."""
    score = sum(grade.score for grade in grades) / len(grades)
    detail = "; ".join(grade.detail for grade in grades if grade.detail)
    return Grade(score, all(grade.is_passed for grade in grades), detail)


def answer_json(answer: str) -> Any:
    """Parse an answer that is JSON, alone or in one Markdown code block. Raises InvalidJson."""
    text = answer.strip()
    fenced = _FENCED.match(text)
    value = parse_strict_json((text if fenced is None else fenced[1]).encode("utf-8", "replace"))
    if is_deeper(value, MAX_DEPTH):
        raise InvalidJson("nesting is too deep")
    return value


def _has_field(value: Any, name: str, wanted: Any) -> bool:
    return isinstance(value, dict) and name in value and same(wanted, value[name])


def _all_or_nothing(is_right: bool, detail: str) -> Grade:
    return Grade(1.0, True) if is_right else Grade(0.0, False, detail)


def _share(num_right: int, num_all: int, detail: str) -> Grade:
    is_passed = num_right == num_all
    return Grade(num_right / num_all, is_passed, "" if is_passed else f"{num_all - num_right} of {num_all} {detail}")
