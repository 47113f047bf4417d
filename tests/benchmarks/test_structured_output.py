from __future__ import annotations

import json

import pytest
from rich.console import Console

from benchmarks.peers.system import LORAMUX
from benchmarks.structured_output import LONG_SCHEMA, PLAIN, SCHEMA, Checker, Figures, new_schema, report
from loramux.platform.grammars.check import checked_grammar
from tests.engine.byte_vocabulary import byte_vocabulary


def test_new_schemas_differ_and_are_accepted() -> None:
    first, second = (json.dumps(new_schema(number, 20_000)) for number in (1, 2))
    assert first != second
    assert 20_000 <= len(first) < 21_000
    assert checked_grammar("json_schema", first, byte_vocabulary())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param('[{"name": "Brie", "kind": "che', True, id="beginning"),
        pytest.param('[\n\t{ "name" :"', True, id="other whitespace"),
        pytest.param('[{"name": "Bri\ufffd', True, id="cut within a character"),
        pytest.param('[{"name": "Bri\x11', False, id="control character"),
        pytest.param('[{"kind"', False, id="another property first"),
        pytest.param("[]", False, id="too few items"),
        pytest.param("", False, id="nothing"),
    ],
)
def test_answers_must_begin_a_valid_document(text: str, expected: bool) -> None:
    assert Checker(byte_vocabulary(), LONG_SCHEMA).is_beginning(text) is expected


@pytest.mark.parametrize(
    ("schema_s", "with_s", "verdicts"),
    [pytest.param(1.04, 0.24, ["met", "met", "met"], id="good"), pytest.param(3.0, 0.3, ["missed"] * 3, id="bad")],
)
def test_verdicts_follow_the_goals(schema_s: float, with_s: float, verdicts: list[str]) -> None:
    figures = Figures(
        {(LORAMUX, PLAIN): [1.0], (LORAMUX, SCHEMA): [schema_s], ("vLLM", PLAIN): [3.0], ("vLLM", SCHEMA): [3.0]},
        {"with": [with_s], "without": [0.2], "neighbour of with": [0.2], "neighbour of without": [0.2]},
    )
    console = Console(record=True, width=200)
    found = report(figures, 100, console)
    rows = [line for line in console.export_text().splitlines() if "<=" in line or ">=" in line]
    assert [next(word for word in ("met", "missed") if f" {word} " in row) for row in rows] == verdicts
    assert found["tokens_per_second"][LORAMUX] == {PLAIN: 100.0, SCHEMA: round(100 / schema_s, 2)}
